//! The identity of an admission.
//!
//! 1. Every admission has one, so two requests in the same microsecond are two.
//! 2. A check that is repeated with the same id, while its first admission is still in the window, counts once. What has
//!    been [settled](crate::settlement) is done with: after that the id is that of a new admission.
//!    Give ids of your own for that: the [id](crate::Decision::id) of a decision without one settles it, but may not be known
//!    when it is given to another check.
//! 3. Fresh ids are unique without coordination: each thread counts up from its own 64 random bits. A thousand threads
//!    with a million live ids each meet with a probability below 1e-5.
//!
//! ```
//! use tower_sliding_window::AdmissionId;
//!
//! assert_ne!(AdmissionId::fresh(), AdmissionId::fresh());
//! // A job queue that delivers twice has an id of its own.
//! assert_eq!(AdmissionId::from(77), AdmissionId::from(77));
//! ```

use std::{
    cell::Cell,
    fmt,
    hash::{BuildHasher, RandomState},
};

/// The identity of an admission: 64 bits. See the [module docs](self).
///
/// Never take it from a client: who repeats an id repeats it for free.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct AdmissionId(u64);

impl AdmissionId {
    /// An id that no other admission has.
    #[must_use]
    pub fn fresh() -> Self {
        Self::fresh_run(1)
    }

    /// The first of so many ids in a row, at most 256, that no other admission has. They differ in their last byte only,
    /// which is 0 for the first if there are several: so each tells its place among them.
    pub(crate) fn fresh_run(length: u64) -> Self {
        thread_local! {
            static NEXT: Cell<u64> = Cell::new(random());
        }
        let next = NEXT.get();
        let first = if length > 1 { next.wrapping_add(255) & !255 } else { next };
        NEXT.set(first.wrapping_add(length));
        Self(first)
    }

    /// The id so many places further in a row.
    #[cfg(feature = "redis")]
    pub(crate) fn following(self, places: u64) -> Self {
        Self(self.0.wrapping_add(places))
    }

    /// The id of these eight bytes: see [`to_bytes`](Self::to_bytes).
    #[must_use]
    pub const fn from_bytes(bytes: [u8; 8]) -> Self {
        Self(u64::from_be_bytes(bytes))
    }

    /// The eight bytes of the id, to keep it.
    #[must_use]
    pub const fn to_bytes(self) -> [u8; 8] {
        self.0.to_be_bytes()
    }
}

/// 64 bits that the operating system's randomness seeds: [`RandomState`] is the standard library's door to it.
pub(crate) fn random() -> u64 {
    RandomState::new().hash_one(0)
}

impl From<u64> for AdmissionId {
    fn from(id: u64) -> Self {
        Self(id)
    }
}

impl fmt::Debug for AdmissionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AdmissionId({:016x})", self.0)
    }
}
