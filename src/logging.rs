//! Log lines: at most one a second of each kind, and none without the feature `tracing`.
//!
//! The calls are the same with and without the feature, so that no caller needs a `cfg`:
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
    sync::atomic::{AtomicU64, Ordering},
    time::Instant,
};

#[cfg(feature = "tracing")]
pub(crate) use tracing::{error, info, warn};

/// The time between two lines of one kind, in microseconds.
const INTERVAL: u64 = 1_000_000;

/// Lets one line a second pass and counts the others.
#[derive(Debug)]
pub(crate) struct Throttle {
    started: Instant,
    /// The time from which the next line passes, in microseconds since the start.
    next: AtomicU64,
    suppressed: AtomicU64,
}

impl Throttle {
    /// If the line passes, returns how many lines were suppressed since the last line that passed.
    /// Without the feature `tracing`, no line passes.
    #[inline]
    pub(crate) fn pass(&self) -> Option<u64> {
        if cfg!(feature = "tracing") { self.pass_at(Instant::now()) } else { None }
    }

    fn pass_at(&self, now: Instant) -> Option<u64> {
        let now = u64::try_from(now.duration_since(self.started).as_micros()).unwrap_or(u64::MAX);
        let next = self.next.load(Ordering::Relaxed);
        let passes = next <= now
            && self.next.compare_exchange(next, now + INTERVAL, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if passes {
            return Some(self.suppressed.swap(0, Ordering::Relaxed));
        }
        self.suppressed.fetch_add(1, Ordering::Relaxed);
        None
    }
}

impl Default for Throttle {
    fn default() -> Self {
        Self { started: Instant::now(), next: AtomicU64::new(0), suppressed: AtomicU64::new(0) }
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
            // Some errors repeat the text of their cause.
            let text = error.to_string();
            if text != shown {
                write!(f, ": {text}")?;
            }
            (shown, cause) = (text, error.source());
        }
        Ok(())
    }
}

/// Stands for a log line without the feature `tracing`. The macro uses the fields, and writes
/// nothing.
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
    use std::time::Duration;

    use super::*;

    #[test]
    fn one_line_a_second_passes_and_the_others_are_counted() {
        let throttle = Throttle::default();
        let second = throttle.started + Duration::from_secs(1);
        assert_eq!(throttle.pass_at(throttle.started), Some(0));
        assert_eq!((throttle.pass_at(throttle.started), throttle.pass_at(throttle.started)), (None, None));
        assert_eq!(throttle.pass_at(second), Some(2));
    }
}
