//! Log lines: at most one line of each kind per second, and none without the feature `tracing`.
//!
//! Calls look the same with and without the feature, so callers need no `cfg`:
//!
//! ```text
//! if let Some(suppressed) = self.opened.pass() {
//!     let error = Chain(error);
//!     warn!(%error, suppressed, "the breaker opens");
//! }
//! ```

use std::{
    error::Error,
    fmt,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

#[cfg(feature = "tracing")]
pub(crate) use tracing::{error, info, warn};

/// The shortest time between two lines of the same kind.
const INTERVAL: Duration = Duration::from_secs(1);

/// Lets one line a second pass and counts the others.
#[derive(Debug, Default)]
pub(crate) struct Throttle {
    passed_at: Mutex<Option<Instant>>,
    suppressed: AtomicU64,
}

impl Throttle {
    /// Returns the number of lines suppressed since the last one, or `None` if this one is
    /// suppressed. Without the feature `tracing`, always `None`.
    #[inline]
    pub(crate) fn pass(&self) -> Option<u64> {
        if cfg!(feature = "tracing") {
            self.pass_at(Instant::now())
        } else {
            None
        }
    }

    fn pass_at(&self, now: Instant) -> Option<u64> {
        let mut passed_at = self
            .passed_at
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if passed_at.is_some_and(|before| now < before + INTERVAL) {
            self.suppressed.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        *passed_at = Some(now);
        Some(self.suppressed.swap(0, Ordering::Relaxed))
    }
}

/// Shows an error and all its causes in one line.
pub(crate) struct Chain<'a>(pub(crate) &'a dyn Error);

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = self.0.to_string();
        f.write_str(&shown)?;
        let mut cause = self.0.source();
        while let Some(error) = cause {
            // Some errors repeat their cause's text.
            let text = error.to_string();
            if text != shown {
                write!(f, ": {text}")?;
            }
            (shown, cause) = (text, error.source());
        }
        Ok(())
    }
}

/// Replaces the log macros if the feature `tracing` is off. It uses the fields, but does not write
/// anything.
#[cfg(not(feature = "tracing"))]
macro_rules! no_line {
    ($($(%)? $(?)? $field:ident,)* $message:literal) => {{
        $(let _ = &$field;)*
        let _ = format_args!($message);
    }};
}

#[cfg(not(feature = "tracing"))]
pub(crate) use {no_line as error, no_line as info, no_line as warn};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_a_second_passes_and_the_others_are_counted() {
        let throttle = Throttle::default();
        let first = Instant::now();
        assert_eq!(throttle.pass_at(first), Some(0));
        assert_eq!(
            (throttle.pass_at(first), throttle.pass_at(first)),
            (None, None)
        );
        assert_eq!(throttle.pass_at(first + INTERVAL), Some(2));
    }
}
