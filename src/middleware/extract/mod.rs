//! Extractors: from a request to the key in whose name it spends.
//!
//! 1. An extractor gives a key or a [`KeyError`], never "no limit": a request without a key is answered, with the
//!    status that the error carries, and does not reach the service.
//! 2. Nothing that a client can choose freely decides on its own how much it may spend. Take a key that an earlier
//!    layer has verified, or stack a limit by address beside the limit by key.
//! 3. Any closure over [`Parts`] is an extractor, for path parameters, host names, or what an authentication layer has
//!    put into the extensions. Its argument needs its type: `|parts: &Parts|`.
//! 4. [`and`](KeyExtractor::and) makes one key of two. [`or`](KeyExtractor::or) takes the second only where the first
//!    is absent; a value that is there but malformed is an error and no way around.
//! 5. The built-in extractors make the key of a value that is known otherwise, too, for a reset or a list: see
//!    [`ApiKey::key`].
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

/// From a request to the key in whose name it spends. See the [module docs](self).
#[diagnostic::on_unimplemented(note = "a closure is an extractor if it is a `Fn(&Parts) -> Result<Key, KeyError>`; \
            its argument needs its type: `|parts: &Parts|`")]
pub trait KeyExtractor: Send + Sync + 'static {
    /// The key of a request.
    ///
    /// # Errors
    ///
    /// [`KeyError`] if the request has none: it is then answered, not forwarded.
    fn extract(&self, parts: &Parts) -> Result<Key, KeyError>;

    /// Whether no two upstreams share a key. Then a limit by it [heeds](crate::KeyedLimit::heed_upstream) its upstream, since
    /// none can close it for another. Default: no.
    fn is_by_upstream(&self) -> bool {
        false
    }

    /// One key of both: equal only if both are.
    fn and<E: KeyExtractor>(self, other: E) -> And<Self, E>
    where
        Self: Sized,
    {
        And::new(self, other)
    }

    /// The key of `other` where this one is absent. Addresses, headers by their names, and API keys have namespaces of
    /// their own, so keys of the one never meet keys of the other. An address is one key for [`PeerIp`] and for
    /// [`ClientIp`], and so is a token for two [`ApiKey`]s of one secret.
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

/// Why a request has no key, and with which status it is answered.
#[derive(Clone, Debug)]
pub struct KeyError {
    what: Cow<'static, str>,
    problem: Cow<'static, str>,
    is_missing: bool,
    status: StatusCode,
    challenge: Option<HeaderValue>,
}

impl KeyError {
    /// There is no such thing in the request, answered with 400.
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

    /// It is there, but cannot be used because of `problem`, as in "repeated"; answered with 400.
    #[must_use]
    pub fn invalid(what: impl Into<Cow<'static, str>>, problem: impl Into<Cow<'static, str>>) -> Self {
        Self { problem: problem.into(), is_missing: false, ..Self::missing(what) }
    }

    /// Answers with this status instead. One of the 5xx says that the server is set up wrongly, and is logged.
    #[must_use]
    pub fn with_status(mut self, status: StatusCode) -> Self {
        self.status = status;
        self
    }

    /// Answers with 401 and this challenge (RFC 9110, section 11.6.1).
    #[must_use]
    pub fn unauthorized(mut self, challenge: HeaderValue) -> Self {
        self.status = StatusCode::UNAUTHORIZED;
        self.challenge = Some(challenge);
        self
    }

    /// Whether it is absent, rather than there and of no use.
    #[must_use]
    pub fn is_missing(&self) -> bool {
        self.is_missing
    }

    /// The status of the answer.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// The value of `WWW-Authenticate` in the answer.
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
