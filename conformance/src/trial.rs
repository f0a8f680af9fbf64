//! What each part of the suite is given: a store without anything stored, and the algorithms.

use std::sync::Arc;

use tower_sliding_window::{Algorithm, Store, store::ManualClock};

pub(crate) const ALGORITHMS: [Algorithm; 4] = [
    Algorithm::sliding_log(),
    Algorithm::compact_log(16),
    Algorithm::sliding_window_counter(),
    Algorithm::fixed_window(),
];

/// A store under test that has nothing stored: the store and a clone of it.
pub(crate) struct Trial {
    pub(crate) handles: [Arc<dyn Store>; 2],
    pub(crate) clock: ManualClock,
}
