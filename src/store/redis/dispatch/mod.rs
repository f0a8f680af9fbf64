//! How checks travel to Redis.
//!
//! 1. Each runtime has a [`Dispatcher`].
//! 2. While few checks are in flight, a check's caller sends it. The simplest ones are [`Lone`]
//!    checks. Other checks, and all settlements, wait in a queue as [`Job`]s.
//! 3. A batch takes jobs from the queue, writes them as one script call, and reads the reply.
//! 4. `cross_slot.rs` splits a check whose keys are in several slots.

#![expect(
    clippy::vec_box,
    reason = "a job moves several times, so it is a pointer everywhere"
)]

mod admission;
mod batch;
mod cross_slot;
mod crowds;
mod dispatcher;
mod job;
mod lone;
mod lost;
mod queue;
mod send;
mod turns;

pub(super) use self::{
    dispatcher::Common,
    job::{Answer, Job},
    lone::Lone,
};
