//! The memory that this process has of a store: the breaker, the refusal cache, and the prefetches of units that it holds.
//!
//! This room lies between the plain values and the stores. It uses values and the clock, and never a store: the trait
//! [`Store`](crate::Store) hands out the [`LocalState`], a store tells it when refusals are outdated, and the limiter asks it before the
//! store, tells it the replies, and gives it the calls that it needs, such as probes.

mod breaker;
mod breaker_state;
mod local_state;
mod prefetch;
mod refusal_cache;
mod refusals;

pub use self::{breaker::Breaker, local_state::LocalState, refusal_cache::RefusalCache};
pub(crate) use self::{
    breaker_state::SharedBreaker,
    local_state::Outdated,
    prefetch::{KeptHolding, Prefetches, Step, Taking},
    refusals::{Lookup, Recall, Refusals},
};
