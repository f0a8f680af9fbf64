//! The rules of a limit's name, units and window, and the error of a cost above the limit.

use std::{error, fmt, time::Duration};

use super::Limit;

pub(super) const NAME_RULE: &str = "a limit's name must be 1 to 64 characters of A-Z a-z 0-9 _ . -";
pub(super) const UNITS_RULE: &str = "a limit's units must be 0 to 2^52";
const WINDOW_RULE: &str = "a limit's window must be 1 ms to 365 days";

pub(super) const LIFE_RULE: &str = "the window of a concurrent limit must be 1 s to 365 days";

/// Whether the places of a dead process may be free after this time. A shorter time would leave too
/// little for renewals that fail.
pub(super) const fn is_life(window: Duration) -> bool {
    window.as_secs() >= 1 && window.as_nanos() <= Limit::MAX_WINDOW.as_nanos()
}

/// The rule that these values break; `None` if they keep all rules.
pub(super) const fn broken_rule(name: &str, units: u64, window: Duration) -> Option<&'static str> {
    if !is_fixed_alphabet(name) {
        Some(NAME_RULE)
    } else if units > Limit::MAX_UNITS {
        Some(UNITS_RULE)
    } else if window.as_nanos() < Limit::MIN_WINDOW.as_nanos() || window.as_nanos() > Limit::MAX_WINDOW.as_nanos() {
        Some(WINDOW_RULE)
    } else {
        None
    }
}

/// Whether `text` is 1 to 64 characters of `[A-Za-z0-9_.-]`, which need no escapes in Redis keys
/// and headers.
pub(crate) const fn is_fixed_alphabet(text: &str) -> bool {
    let bytes = text.as_bytes();
    let mut at = 0;
    while at < bytes.len() {
        if !(bytes[at].is_ascii_alphanumeric() || matches!(bytes[at], b'_' | b'.' | b'-')) {
            return false;
        }
        at += 1;
    }
    !bytes.is_empty() && bytes.len() <= 64
}

/// A cost above the limit. Waiting does not help, so there is no retry time.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NeverFits {
    /// The limit that is too small.
    pub limit: Limit,
    /// The cost that is too large.
    pub cost: u64,
    /// Whether the limit is [hidden](crate::Charge::hidden) from clients.
    pub is_hidden: bool,
}

impl fmt::Display for NeverFits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a cost of {} never fits into the limit {:?} of {}", self.cost, self.limit.name(), self.limit.units())
    }
}

impl error::Error for NeverFits {}
