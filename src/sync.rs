//! The locks and atomics of the parts that threads meet in: those of `std`. In the crate's own tests they are those of `loom`,
//! whose models try each order of the steps of threads. There they work within `loom::model` only.

#[cfg(test)]
pub(crate) use loom::sync::{Mutex, MutexGuard, atomic};
#[cfg(not(test))]
pub(crate) use std::sync::{Mutex, MutexGuard, atomic};
