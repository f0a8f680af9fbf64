//! Extractors: each finds the key in a request that its units are charged to.
//!
//! 1. An extractor returns a key or a [`KeyError`], never "no limit". A request without a key is rejected with the status of
//!    the error.
//! 2. Do not limit only by a value that clients can choose freely, since a new value has a new budget. Use a key that an
//!    earlier layer has verified, or add a limit by address.
//! 3. Any closure over [`Parts`] is an extractor: for path parameters, host names, or the extensions of an authentication
//!    layer. Its argument needs its type: `|parts: &Parts|`.
//! 4. [`and`](KeyExtractor::and) makes one key of two. [`or`](KeyExtractor::or) uses the second only if the first is absent.
//!    A value that is present but malformed is an error, so that it is no way around the first.
//! 5. The built-in extractors also make the key of a given value, for a reset or a list: see [`ApiKey::key`].
//!
//! ```
//! use http::{Request, request::Parts};
//! use tower_sliding_window::{Header, Key, KeyError, KeyExtractor};
//!
//! let tenant = |parts: &Parts| match parts.uri.path().split('/').nth(2) {
//!     Some(tenant) if !tenant.is_empty() => Ok(Key::new("tenant", tenant)),
//!     _ => Err(KeyError::missing("tenant in the path")),
//! };
//! let (parts, ()) = Request::get("/tenants/7/items").header("x-region", "eu").body(()).unwrap().into_parts();
//! assert_eq!(tenant.extract(&parts).unwrap(), Key::new("tenant", "7"));
//!
//! // One budget for each tenant in each region.
//! assert!(tenant.and(Header::new("x-region")).extract(&parts).is_ok());
//! ```

mod address;
mod api_key;
mod client_ip;
mod combine;
mod everyone;
mod forwarded;
mod header;
mod peer_ip;
mod upstream_host;

use std::{borrow::Cow, error, fmt};

use http::{HeaderValue, StatusCode, request::Parts};

pub(super) use self::header::header_name;
pub use self::{
    address::InvalidPrefix,
    api_key::ApiKey,
    client_ip::{ClientIp, InvalidCidr},
    combine::{And, Or},
    everyone::Everyone,
    header::Header,
    peer_ip::PeerIp,
    upstream_host::UpstreamHost,
};
use crate::key::Key;
pub use crate::secret::{Secret, WeakSecret};

/// Finds the key of a request. See the [module docs](self).
#[diagnostic::on_unimplemented(note = "a closure is an extractor if it is a `Fn(&Parts) -> Result<Key, KeyError>`; \
            its argument needs its type: `|parts: &Parts|`")]
pub trait KeyExtractor: Send + Sync + 'static {
    /// The key of a request.
    ///
    /// # Errors
    ///
    /// [`KeyError`] if the request has none. Then it is rejected.
    fn extract(&self, parts: &Parts) -> Result<Key, KeyError>;

    /// Whether no two upstreams share a key. Then a limit by it [heeds](crate::KeyedLimit::heed_upstream) its upstream, which
    /// can pause calls to itself only. Default: no.
    fn is_by_upstream(&self) -> bool {
        false
    }

    /// Makes one key of both. Two such keys are equal only if both of their keys are.
    fn and<E: KeyExtractor>(self, other: E) -> And<Self, E>
    where
        Self: Sized,
    {
        And::new(self, other)
    }

    /// Uses the key of `other` if this one is absent. Keys of addresses, of API keys, and of each header are never equal. An
    /// address has one key for [`PeerIp`] and [`ClientIp`], and a token has one key for all [`ApiKey`]s of one secret.
    fn or<E: KeyExtractor>(self, other: E) -> Or<Self, E>
    where
        Self: Sized,
    {
        Or::new(self, other)
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

/// Why a request has no key, and the status of its rejection.
#[derive(Clone, Debug)]
pub struct KeyError {
    what: Cow<'static, str>,
    problem: Cow<'static, str>,
    is_missing: bool,
    status: StatusCode,
    challenge: Option<HeaderValue>,
}

impl KeyError {
    /// The request has no `what`. The status is 400.
    #[must_use]
    pub fn missing(what: impl Into<Cow<'static, str>>) -> Self {
        Self {
            what: what.into(),
            problem: "missing".into(),
            is_missing: true,
            status: StatusCode::BAD_REQUEST,
            challenge: None,
        }
    }

    /// The request has a `what` that cannot be used because of `problem`, such as "repeated". The status is 400.
    #[must_use]
    pub fn invalid(what: impl Into<Cow<'static, str>>, problem: impl Into<Cow<'static, str>>) -> Self {
        Self { problem: problem.into(), is_missing: false, ..Self::missing(what) }
    }

    /// Sets the status. A 5xx means that the server is set up wrongly, and is logged.
    #[must_use]
    pub fn with_status(mut self, status: StatusCode) -> Self {
        self.status = status;
        self
    }

    /// Sets the status 401 and this challenge (RFC 9110, section 11.6.1).
    #[must_use]
    pub fn unauthorized(mut self, challenge: HeaderValue) -> Self {
        self.status = StatusCode::UNAUTHORIZED;
        self.challenge = Some(challenge);
        self
    }

    /// Whether the key is absent, rather than present and unusable.
    #[must_use]
    pub fn is_missing(&self) -> bool {
        self.is_missing
    }

    /// The status of the rejection.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// The value of `WWW-Authenticate` in the response.
    #[must_use]
    pub fn challenge(&self) -> Option<&HeaderValue> {
        self.challenge.as_ref()
    }
}

impl fmt::Display for KeyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.what, self.problem)
    }
}

impl error::Error for KeyError {}
