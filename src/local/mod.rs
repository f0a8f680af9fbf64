//! What this process remembers of a store: the breaker, the deny cache, and the blocks of units that it holds.
//!
//! This room lies between the plain values and the stores. It uses values and the clock, and never a store: the trait
//! [`Store`](crate::Store) hands out the [`LocalState`], a store tells it when refusals are outdated, and the limiter asks it before the
//! store, tells it the replies, and gives it the calls that it needs, such as probes.

mod blocks;
mod breaker;
mod breaker_state;
mod deny_cache;
mod local_state;
mod refusals;

pub(crate) use self::{
    blocks::{HeldBlocks, KeptHolding, Step, Taking},
    breaker_state::SharedBreaker,
    local_state::Outdated,
    refusals::{Lookup, Recall, Refusals},
};
pub use self::{breaker::Breaker, deny_cache::DenyCache, local_state::LocalState};
