//! The rules of a [`Store`](tower_sliding_window::Store) of `tower-sliding-window`, as a test: for
//! authors of stores.
//!
//! [`Conformance`] runs random histories of checks, settlements, resets and clock steps on a store,
//! and compares each reply with that of the [`Oracle`], which has the rules in their plainest form.
//! A few rules show what histories cannot, such as checks at the same moment.
//!
//! ```toml
//! [dev-dependencies]
//! tower-sliding-window-conformance = "0.1"
//! ```
//!
//! ```
//! # /*
//! #[tokio::test]
//! async fn my_store_keeps_the_rules() {
//! # */
//! # #[tokio::main(flavor = "current_thread")] async fn main() {
//! # use tower_sliding_window::{MemoryStore, store::ManualClock};
//! # struct MyStore;
//! # impl MyStore {
//! #     async fn connect(clock: &ManualClock) -> MemoryStore { MemoryStore::new().clock(clock) }
//! # }
//!     use tower_sliding_window_conformance::Conformance;
//!
//!     Conformance::new().run(async |clock| MyStore::connect(&clock).await).await;
//! }
//! ```
//!
//! 1. The store decides by the `clock` that it is given. No test waits for a window to pass, so a
//!    run takes as long as the store takes.
//! 2. A store on a server starts with an empty database, or with another prefix each time.
//! 3. The versions of this package and of `tower-sliding-window` go together: the newest of both.
//!
//! # Panics
//!
//! A store that breaks a rule fails the test. The message names each rule that is broken. Of a
//! history, it has the shortest steps that lead to the difference, and the
//! [seed](Conformance::seeds) that runs them again:
//!
//! ```text
//! the store breaks rules:
//! - a history of the seed 27 differs: check 2 units of calls=5/10s for ada: expected a refusal, got an admission with 6 used units of "calls". The steps that lead there:
//!     step 4: 1 times check 4 units of calls=5/10s for ada
//!     step 7: 1 times check 2 units of calls=5/10s for ada
//! ```

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a test says by a panic what it expects"
)]

mod contention;
mod history;
mod oracle;
mod replay;
mod rules;
mod suite;
mod trial;

pub use self::{oracle::Oracle, suite::Conformance};
