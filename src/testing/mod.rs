//! Tools for tests of limits: a store that fails on command, and assertions on responses. This
//! module needs the feature `test-util`, which you enable in `[dev-dependencies]`.
//!
//! | I want to test | with |
//! |---|---|
//! | which requests are admitted, and for how long clients are refused | [`assert_admitted`], [`assert_refused`] |
//! | a route while its store fails, hangs, is slow, or loses replies | [`FaultyStore`], [`assert_unavailable`] |
//! | that a store of my own keeps the rules of a store | the package `tower-sliding-window-conformance` |
//!
//! # Time
//!
//! 1. The windows of a [`MemoryStore`](crate::MemoryStore) follow tokio's time. So do deadlines,
//!    the breaker, the refusal cache, `acquire`, and the delay of a [`FaultyStore`]. A test that
//!    pauses tokio's time (`#[tokio::test(start_paused = true)]`) moves all of these at once by
//!    `tokio::time::advance`.
//! 2. A [`ManualClock`](crate::store::ManualClock) moves the windows and the refusal cache of the
//!    stores that have this clock, also on several threads and on Redis. A `ManualClock` does not
//!    move deadlines, the breaker, `acquire`, or the delay of a [`FaultyStore`]. These parts follow
//!    tokio's time, real or paused.
//! 3. Do not pause the time around a store that does input and output, such as `RedisStore`: tokio
//!    then moves the time to the next deadline while the test waits for a reply. Use a
//!    `ManualClock` for such a store.
//!
//! [`guide::testing_your_limits`](crate::guide::testing_your_limits) has an example of each.

#![allow(clippy::unwrap_used, reason = "a test says by a panic what it expects")]

mod faulty_store;
mod responses;

pub use self::{
    faulty_store::{Fault, FaultyStore},
    responses::{assert_admitted, assert_refused, assert_unavailable},
};
