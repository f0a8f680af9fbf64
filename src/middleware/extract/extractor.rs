//! The trait of extractors and its error, and an extractor with one key for all requests.

use std::{borrow::Cow, error, fmt};

use http::{HeaderValue, StatusCode, request::Parts};

use crate::key::Key;

/// Finds the key of a request. See the [module docs](super).
#[diagnostic::on_unimplemented(note = "a closure is an extractor if it is a `Fn(&Parts) -> Result<Key, KeyError>`; \
            its argument needs its type: `|parts: &Parts|`")]
pub trait KeyExtractor: Send + Sync + 'static {
    /// Returns the key of a request.
    ///
    /// # Errors
    ///
    /// [`KeyError`] if the request has no key. Then the request is rejected.
    fn extract(&self, parts: &Parts) -> Result<Key, KeyError>;

    /// Makes one key of the keys of both extractors. Two combined keys are equal only if both their
    /// parts are equal.
    fn and<E: KeyExtractor + Clone>(self, other: E) -> impl KeyExtractor + Clone
    where
        Self: Clone,
    {
        move |parts: &Parts| Ok(Key::from((&self.extract(parts)?, &other.extract(parts)?)))
    }

    /// Uses the key of `other` if the key of this extractor is absent. A key of an address never
    /// equals a key of an API key or of a header. An API key never has the key of a header. Keys of
    /// two different headers are never equal. An address has the same key for
    /// [`PeerIp`](super::PeerIp) and [`ClientIp`](super::ClientIp). A token has the same key for
    /// all [`ApiKey`](super::ApiKey)s of one secret.
    fn or<E: KeyExtractor + Clone>(self, other: E) -> impl KeyExtractor + Clone
    where
        Self: Clone,
    {
        move |parts: &Parts| match self.extract(parts) {
            Err(error) if error.is_missing => other.extract(parts),
            outcome => outcome,
        }
    }
}

impl<F> KeyExtractor for F
where
    F: Fn(&Parts) -> Result<Key, KeyError> + Send + Sync + 'static,
{
    fn extract(&self, parts: &Parts) -> Result<Key, KeyError> {
        self(parts)
    }
}

/// One key for all requests, for a limit on the load of the whole service.
///
/// A single client can use up such a limit for all others, so add a limit by client. If costs are
/// to be [settled](crate::KeyedLimit::settle), settle them on the limit by client. Under
/// `Everyone`, a client that hangs up would keep its reserved units from all other clients.
///
/// ```
/// use tower_sliding_window::{Everyone, Limit};
///
/// let total = Limit::per_second("total", 5_000).by(Everyone);
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Everyone;

impl KeyExtractor for Everyone {
    fn extract(&self, _: &Parts) -> Result<Key, KeyError> {
        Ok(Key::new("everyone", ""))
    }
}

/// Why a request has no key, and the status of its rejection.
#[derive(Clone, Debug)]
#[must_use]
pub struct KeyError {
    what: Cow<'static, str>,
    problem: Cow<'static, str>,
    /// Whether the key is absent, rather than present and unusable.
    pub(crate) is_missing: bool,
    status: StatusCode,
    /// The value of `WWW-Authenticate` in the response.
    pub(crate) challenge: Option<HeaderValue>,
}

impl KeyError {
    /// The request has no `what`. The status is 400.
    pub fn missing(what: impl Into<Cow<'static, str>>) -> Self {
        Self {
            what: what.into(),
            problem: "missing".into(),
            is_missing: true,
            status: StatusCode::BAD_REQUEST,
            challenge: None,
        }
    }

    /// The request has a `what` that cannot be used because of `problem`, such as "repeated". The
    /// status is 400.
    pub fn invalid(what: impl Into<Cow<'static, str>>, problem: impl Into<Cow<'static, str>>) -> Self {
        Self { problem: problem.into(), is_missing: false, ..Self::missing(what) }
    }

    /// Sets the status. A 5xx means that the server is set up wrongly, and is logged.
    pub fn with_status(mut self, status: StatusCode) -> Self {
        self.status = status;
        self
    }

    /// Sets the status 401 and this challenge (RFC 9110, section 11.6.1).
    pub fn unauthorized(mut self, challenge: HeaderValue) -> Self {
        self.status = StatusCode::UNAUTHORIZED;
        self.challenge = Some(challenge);
        self
    }

    /// The status of the rejection.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        self.status
    }
}

impl fmt::Display for KeyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.what, self.problem)
    }
}

impl error::Error for KeyError {}
