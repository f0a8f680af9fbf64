//! From a decision to the response: settlements, headers, extensions, or a rejection.

mod after_response;
mod completion;
mod follow_up;
mod upstream;

pub(super) use self::{after_response::Settling, completion::Completion};
