//! The error for a wrong setting, exported from [`error`](crate::error).

use std::{borrow::Cow, error, fmt};

/// A wrong setting. The text names the value, and says what is wrong with it.
///
/// The text shows at most the scheme of a URL, since the rest may be part of a password.
///
/// ```
/// use std::time::Duration;
/// use tower_sliding_window::Limit;
///
/// let error = Limit::new("login", 5, Duration::ZERO).unwrap_err();
/// assert_eq!(error.to_string(), "limit \"login=5/0ns\": a limit's window must be 1 ms to 365 days");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigError(Cow<'static, str>);

impl ConfigError {
    pub(crate) fn new(text: impl Into<Cow<'static, str>>) -> Self {
        Self(text.into())
    }

    /// Makes the error for a wrong limit. `limit` is its name or text.
    pub(crate) fn of_limit(limit: &str, problem: impl fmt::Display) -> Self {
        Self::new(format!("limit {limit:?}: {problem}"))
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl error::Error for ConfigError {}
