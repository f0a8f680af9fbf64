//! The id of an admission.
//!
//! 1. Every admission has an id, so two requests in the same microsecond are two.
//! 2. To repeat a check safely, [give](crate::Check::with_id) it an id of your own: repeated with the same id, while the first
//!    admission is still in the window, it counts once. After a [settlement](crate::settlement) the id is free for a new
//!    admission. The [id](crate::Decision::id) of a check without one can settle its admission, but not repeat it.
//! 3. Fresh ids are unique without coordination: each thread counts up from 64 random bits. Among a thousand threads with a
//!    million live ids each, two ids are the same with a probability below 1e-5.
//!
//! ```
//! use tower_sliding_window::admission::AdmissionId;
//!
//! assert_ne!(AdmissionId::fresh(), AdmissionId::fresh());
//! // A job queue that may deliver a job twice has an id for it.
//! assert_eq!(AdmissionId::from(77), AdmissionId::from(77));
//! ```

use std::{
    cell::Cell,
    fmt,
    hash::{BuildHasher, RandomState},
};

/// The id of an admission: 64 bits. See the [module docs](self).
///
/// Never take it from a client: a client that repeats an id is admitted for free.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct AdmissionId(pub(crate) u64);

impl AdmissionId {
    /// An id that no other admission has.
    #[must_use]
    pub fn fresh() -> Self {
        Self::fresh_run(1)
    }

    /// The first of `length` ids in a row, at most 256, that no other admission has. They differ in the last byte only. If
    /// there are several, it starts at 0, so that each id shows its place in the row.
    pub(crate) fn fresh_run(length: u64) -> Self {
        thread_local! {
            static NEXT: Cell<u64> = Cell::new(random());
        }
        let next = NEXT.get();
        let first = if length > 1 { next.wrapping_add(255) & !255 } else { next };
        NEXT.set(first.wrapping_add(length));
        Self(first)
    }

    /// The id this number of places further in the row.
    #[cfg(feature = "redis")]
    pub(crate) fn following(self, places: u64) -> Self {
        Self(self.0.wrapping_add(places))
    }
}

/// 64 random bits: [`RandomState`] is the standard library's access to the operating system's randomness.
pub(crate) fn random() -> u64 {
    RandomState::new().hash_one(0)
}

impl From<u64> for AdmissionId {
    fn from(id: u64) -> Self {
        Self(id)
    }
}

/// To store it.
impl From<AdmissionId> for u64 {
    fn from(id: AdmissionId) -> Self {
        id.0
    }
}

impl fmt::Debug for AdmissionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AdmissionId({:016x})", self.0)
    }
}
