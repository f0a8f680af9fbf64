//! How checks travel to Redis.
//!
//! 1. [`Runtimes`] has one [`Dispatcher`](dispatcher::Dispatcher) for each runtime.
//! 2. The caller of a lone check sends it. Other checks and settlements wait in a queue, as [`Job`]s.
//! 3. A batch takes them out of the queue, writes them as one script call, and reads the reply.
//! 4. `cross_slot.rs` takes apart a check whose keys are in several slots of a cluster.

#![expect(clippy::vec_box, reason = "a job moves several times, so it is a pointer everywhere")]

mod batch;
mod commands;
mod copies;
mod cross_slot;
mod dispatcher;
mod job;
mod lone;
mod queue;
mod reply;
mod runtimes;

pub(super) use self::{batch::TimeSource, dispatcher::Config, job::Job, runtimes::Runtimes};
