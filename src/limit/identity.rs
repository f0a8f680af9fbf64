//! What a store knows a limit by.

use std::borrow::Cow;

use crate::algorithm::Algorithm;

/// Limits of one identity share their units for the same key, whatever their numbers of units. Others are apart: a unit leaves each
/// window at another time. Whatever is kept for a limit is kept under its identity.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Identity<'a> {
    pub(crate) name: Cow<'a, str>,
    pub(crate) window_micros: u64,
    pub(crate) algorithm: Algorithm,
}
