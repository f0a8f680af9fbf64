//! The rules of a decision: most tests run on every store, many of them against a plain model.

mod algorithms;
#[cfg(feature = "calendar")]
mod calendar;
mod clock_steps;
mod late_settlements;
mod properties;
mod reserved_units;
mod split_limits;
