//! A store and limits that are read from a configuration.

mod extreme_limits;
mod limits;
#[cfg(feature = "serde")]
mod serde;
mod store_urls;
