//! What each part of the suite is given: a store without anything stored, and the algorithms.

use std::sync::Arc;

use tower_sliding_window::{Algorithm, Store, store::ManualClock};

pub(crate) const ALGORITHMS: [Algorithm; 4] = [
    Algorithm::SLIDING_LOG,
    Algorithm::compact_log(16),
    Algorithm::SLIDING_WINDOW_COUNTER,
    Algorithm::FIXED_WINDOW,
];

/// A store under test that has nothing stored: the store and a clone of it.
pub(crate) struct Trial {
    pub(crate) handles: [Arc<dyn Store>; 2],
    pub(crate) clock: ManualClock,
}
