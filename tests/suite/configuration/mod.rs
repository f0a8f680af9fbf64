//! A store and limits that are read from a configuration.

mod any_store;
mod extreme_limits;
#[cfg(feature = "serde")]
mod serde;
