//! What a store knows a limit by.

use std::borrow::Cow;

use super::Limit;
use crate::algorithm::Algorithm;

/// Limits of one identity share their units for the same key, whatever their numbers of units. Others are apart: a unit leaves each
/// window at another time. Whatever is kept for a limit is kept under its identity.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Identity<'a> {
    pub(crate) name: Cow<'a, str>,
    pub(crate) window_micros: u64,
    pub(crate) algorithm: Algorithm,
}

impl Limit {
    /// What stores, and all that remembers something of it, know it by.
    #[inline]
    pub(crate) fn identity(&self) -> Identity<'_> {
        Identity { name: Cow::Borrowed(&self.name), window_micros: self.window_micros, algorithm: self.algorithm }
    }

    /// The same, to keep.
    pub(crate) fn own_identity(&self) -> Identity<'static> {
        Identity { name: self.name.clone(), window_micros: self.window_micros, algorithm: self.algorithm }
    }

    /// Whether both count together.
    // Few checks compare limits of their own: inlined, it would keep what all need from being inlined.
    #[inline(never)]
    pub(crate) fn is_one_with(&self, other: &Self) -> bool {
        self.identity() == other.identity()
    }
}
