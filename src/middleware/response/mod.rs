//! From a decision to the response: settlements, headers, extensions, or a rejection.

mod block;
mod completion;
mod degraded;
mod detachable;
mod follow_up;
#[cfg(any(feature = "axum", feature = "grpc"))]
mod handler;
mod settlements;
mod upstream;

pub use self::degraded::Degraded;
pub(super) use self::{completion::Completion, follow_up::Settling};
