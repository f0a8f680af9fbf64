//! Without the feature `metrics`: the same calls, of which nothing is left.

use crate::{decision::Decision, error::Error};

#[inline(always)]
pub(crate) fn decided(_: &Decision) {}

#[inline(always)]
pub(crate) fn failed(_: &Error) {}

#[inline(always)]
pub(crate) fn degraded(_: &'static str) {}

#[inline(always)]
pub(crate) fn recalled() {}

#[inline(always)]
pub(crate) fn breaker_opened() {}

#[inline(always)]
pub(crate) fn breaker_closed() {}

#[cfg(feature = "redis")]
#[inline(always)]
pub(crate) fn batch(_: usize, _: impl FnOnce() -> usize) {}

#[cfg(feature = "redis")]
#[inline(always)]
pub(crate) fn queue_full() {}

#[cfg(feature = "redis")]
pub(crate) struct Stopwatch;

#[cfg(feature = "redis")]
impl Stopwatch {
    #[inline(always)]
    pub(crate) fn start() -> Self {
        Self
    }

    #[inline(always)]
    pub(crate) fn script(self) {}
}
