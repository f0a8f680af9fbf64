//! How checks travel to Redis.
//!
//! 1. [`Dispatchers`] has one [`Dispatcher`] for each runtime.
//! 2. The dispatcher puts checks and settlements into a queue, or sends a lone check at once.
//! 3. A batch takes them out of the queue, writes them as one script call, and reads the reply.
//! 4. `cross_slot.rs` takes apart a check whose keys are in several slots of a cluster.

#![expect(clippy::vec_box, reason = "a job moves several times, so it is a pointer everywhere")]

mod batch;
mod commands;
pub(super) mod cross_slot;
mod dispatcher;
mod dispatchers;
mod queue;
mod reply;

pub(super) use self::{
    batch::TimeSource,
    dispatcher::{Config, Dispatcher, Pending},
    dispatchers::Dispatchers,
};
