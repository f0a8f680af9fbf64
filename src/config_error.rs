//! The error of everything that is set up wrong. The module [`error`](crate::error) exports it.

use std::{borrow::Cow, error, fmt};

/// A wrong setting. Its text names the value, and says what is wrong with it.
///
/// The text shows at most the scheme of a URL, since the rest may be part of a password.
///
/// ```
/// use std::time::Duration;
/// use tower_sliding_window::{Limit, error::ConfigErrorKind};
///
/// let error = Limit::new("login", 5, Duration::ZERO).unwrap_err();
/// assert_eq!(error.kind(), ConfigErrorKind::Limit);
/// assert_eq!(error.to_string(), "limit \"login\": a limit's window must be 1 ms to 365 days, not 0ns");
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct ConfigError {
    kind: ConfigErrorKind,
    text: Cow<'static, str>,
}

/// The kind of setting that is wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ConfigErrorKind {
    /// The name, the units, the window, the text or the [prefetch](crate::limit::prefetch) of a
    /// [`Limit`](crate::Limit).
    Limit,
    /// The number of parts of a [split](crate::split) limit.
    Split,
    /// A layer has no limit, so nothing would be limited.
    NoLimits,
    /// Two limits of a layer have the same name, by which clients and metrics know them. Or a check
    /// charges one limit twice for a key.
    SameLimit,
    /// An option that would have no effect on its limit, or a call that a limit of its kind does
    /// not know.
    NoEffect,
    /// The URL or a setting of a [store](crate::store).
    Store,
    /// A [`Secret`](crate::Secret) is too short.
    Secret,
    /// An address range, or a prefix of addresses.
    Address,
}

impl ConfigError {
    pub(crate) fn new(kind: ConfigErrorKind, text: impl Into<Cow<'static, str>>) -> Self {
        Self { kind, text: text.into() }
    }

    /// The kind of setting that is wrong.
    #[must_use]
    pub fn kind(&self) -> ConfigErrorKind {
        self.kind
    }
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

/// Shows the text, since a `main` that returns the error prints its `Debug`.
impl fmt::Debug for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ConfigError").field(&self.text).finish()
    }
}

impl error::Error for ConfigError {}
