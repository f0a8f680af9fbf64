//! The limiter: rate limiting without HTTP, for clients, jobs, and services of other kinds.
//!
//! 1. [`check`](Limiter::check) spends units, [`acquire`](Limiter::acquire) waits until it can, [`peek`](Limiter::peek)
//!    shows how a limit stands, [`reserve`](Limiter::reserve) spends units that are [settled](Limiter::settle) later,
//!    [`block`](Limiter::block) takes all units for a time, and [`reset`](Limiter::reset) forgets a key.
//! 2. Every call to the store ends within the [`deadline`](Limiter::deadline), 50 ms by default, which covers queueing,
//!    connecting and the reply. It starts with the first poll, and needs a timer only if the store makes the caller wait. All
//!    methods but [`acquire`](Limiter::acquire) make one call.
//! 3. A refusal is a [`Decision`](crate::Decision), everything else is a typed [`Error`](crate::Error).
//! 4. A check that is known to be refused is refused without asking the store: see [`RefusalCache`].
//! 5. A store that fails repeatedly is not asked, but probed: see [`Breaker`].
//! 6. While the store cannot decide, this process may, under a share of each limit: see [`Share`].
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tower_sliding_window::Error> {
//! use tower_sliding_window::{Limit, Limiter, MemoryStore};
//!
//! // 5000 calls an hour for each access token of an upstream service.
//! const CALLS: Limit = Limit::per_hour("calls", 5_000);
//!
//! let limiter = Limiter::new(MemoryStore::new());
//! match limiter.check(&CALLS, "token-7", 1).await? {
//!     decision if decision.is_allowed() => assert_eq!(decision.remaining(), 4_999),
//!     decision => println!("wait {:?}", decision.retry_after()),
//! }
//! assert_eq!(limiter.peek(&CALLS, "token-7").await?.remaining(), 4_999);
//! # Ok(()) }
//! ```

mod acquire;
mod deadline;
mod decide;
mod failure;
mod lines;
mod prefetch;
mod settings;
mod settle;
mod turns;

pub(crate) use self::decide::{Asking, DecideNow};
pub use self::{
    failure::{FailureMode, Share},
    settings::Limiter,
    settle::Reservation,
};
pub use crate::local::{Breaker, RefusalCache};
