//! Key extractors, which find the key that a request is charged to.
//!
//! 1. An extractor returns a key or a [`KeyError`], and cannot exempt a request from the limit. A
//!    request without a key is rejected with the error's status.
//! 2. Do not limit only by a value that clients can choose freely: with each new value, a client
//!    gets the full units again. Use a key that an earlier layer has verified, or add a limit per
//!    address.
//! 3. Any closure from `&Parts` to `Result<Key, KeyError>` is an extractor. For example, it can
//!    read the host name, or an extension that an authentication layer has added. Write out the
//!    argument's type: `|parts: &Parts|`. Do not use text that clients can spell in several ways,
//!    such as a path: [`choosing_keys`](crate::guide::choosing_keys#by-a-value-in-the-path) shows
//!    how to use a value in the path.
//! 4. [`and`](KeyExtractor::and) combines two keys into one. [`or`](KeyExtractor::or) uses the
//!    second key only if the first is absent. If the first is malformed, the request is rejected,
//!    so a client cannot skip the first extractor by sending garbage.
//! 5. The built-in extractors also make the key for a given value, for a reset or for a list of
//!    denied or exempt keys: see [`ApiKey::key`].
//!
//! ```
//! use http::{Request, request::Parts};
//! use tower_sliding_window::{Header, Key, KeyExtractor, extract::KeyError};
//!
//! #[derive(Clone)]
//! struct Tenant(&'static str); // put into the extensions by your authentication
//!
//! let tenant = |parts: &Parts| match parts.extensions.get() {
//!     Some(Tenant(tenant)) => Ok(Key::new("tenant", *tenant)),
//!     None => Err(KeyError::missing("tenant")),
//! };
//! let request = Request::get("/items").extension(Tenant("7")).header("x-region", "eu");
//! let (parts, ()) = request.body(()).unwrap().into_parts();
//! assert_eq!(tenant.extract(&parts).unwrap(), Key::new("tenant", "7"));
//!
//! // One budget for each tenant in each region.
//! assert!(tenant.and(Header::new("x-region")).extract(&parts).is_ok());
//! ```

mod address;
mod client_ip;
mod forwarded;
mod header;

use std::{borrow::Cow, collections::HashSet, error, fmt};

use http::{HeaderValue, StatusCode, request::Parts};

pub(super) use self::header::built;
pub use self::{
    address::AddressList,
    client_ip::{ClientIp, PeerIp},
    header::{ApiKey, Header, UpstreamHost},
};
use crate::key::Key;
pub use crate::secret::Secret;

/// Finds a request's key. See the [module docs](self).
#[diagnostic::on_unimplemented(
    note = "a closure is an extractor if it is a `Fn(&Parts) -> Result<Key, KeyError>`; \
            its argument needs its type: `|parts: &Parts|`"
)]
pub trait KeyExtractor: Send + Sync + 'static {
    /// Returns the request's key.
    ///
    /// # Errors
    ///
    /// [`KeyError`] if the request has no key. The request is then rejected.
    fn extract(&self, parts: &Parts) -> Result<Key, KeyError>;

    /// Combines both keys into one. Two combined keys are equal only if their first keys are equal
    /// and their second keys are equal.
    fn and<E: KeyExtractor + Clone>(self, other: E) -> impl KeyExtractor + Clone
    where
        Self: Clone,
    {
        move |parts: &Parts| Ok(Key::from((&self.extract(parts)?, &other.extract(parts)?)))
    }

    /// Falls back to `other` if this extractor's key is absent. Keys of different kinds never
    /// collide: address, API key and header keys are distinct, and so are the keys of different
    /// headers. An address has the same key in [`PeerIp`] and [`ClientIp`]. A token has the same
    /// key in all [`ApiKey`]s that have the same secret.
    fn or<E: KeyExtractor + Clone>(self, other: E) -> impl KeyExtractor + Clone
    where
        Self: Clone,
    {
        move |parts: &Parts| match self.extract(parts) {
            Err(error) if error.is_missing => other.extract(parts),
            outcome => outcome,
        }
    }

    /// Matches requests with one of these keys, for [`exempt`](crate::RateLimitLayer::exempt) and
    /// [`deny`](crate::RateLimitLayer::deny).
    fn one_of(
        self,
        keys: impl IntoIterator<Item = Key>,
    ) -> impl Fn(&Parts) -> Result<bool, KeyError> + Send + Sync + 'static
    where
        Self: Sized,
    {
        let keys: HashSet<Key> = keys.into_iter().collect();
        move |parts| self.extract(parts).map(|key| keys.contains(&key))
    }
}

/// The result of a closure for `exempt` or `deny`: a `bool`, or a `Result` whose error means that
/// the request's key cannot be read.
pub trait IsMatch {
    /// True if the request matches.
    ///
    /// # Errors
    ///
    /// [`KeyError`] if the request's key cannot be read.
    fn into_result(self) -> Result<bool, KeyError>;
}

impl IsMatch for bool {
    fn into_result(self) -> Result<bool, KeyError> {
        Ok(self)
    }
}

impl IsMatch for Result<bool, KeyError> {
    fn into_result(self) -> Self {
        self
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

/// One key for all requests, to limit the total load on a service.
///
/// A single client can use up such a limit for all others, so add a limit per client. If costs have
/// to be [settled](crate::KeyedLimit::settle), let the limit per client settle them. Under
/// `Everyone`, a client that hangs up would keep its reserved units from all others.
///
/// ```
/// use tower_sliding_window::{Everyone, Limit};
///
/// let total = Limit::per_second("total", 5_000).by(Everyone);
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Everyone;

impl Everyone {
    /// The one key that all requests have.
    pub fn key(self) -> Key {
        Key::new("everyone", "")
    }
}

impl KeyExtractor for Everyone {
    fn extract(&self, _: &Parts) -> Result<Key, KeyError> {
        Ok(self.key())
    }
}

/// Why a request has no key, and the status for its rejection.
#[derive(Clone, Debug)]
#[must_use]
pub struct KeyError {
    what: Cow<'static, str>,
    problem: Cow<'static, str>,
    /// True if the key is absent, rather than present but unusable.
    pub(crate) is_missing: bool,
    status: StatusCode,
    /// The response's `WWW-Authenticate`.
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

    /// The request has a `what` that is unusable because of `problem`, such as "repeated". The
    /// status is 400.
    pub fn invalid(
        what: impl Into<Cow<'static, str>>,
        problem: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self {
            problem: problem.into(),
            is_missing: false,
            ..Self::missing(what)
        }
    }

    /// Sets the status. A 5xx means that the server is set up wrongly, and the layer logs it.
    pub fn with_status(mut self, status: StatusCode) -> Self {
        self.status = status;
        self
    }

    /// Sets the status to 401, and adds this challenge (RFC 9110, section 11.6.1).
    pub fn unauthorized(mut self, challenge: HeaderValue) -> Self {
        self.status = StatusCode::UNAUTHORIZED;
        self.challenge = Some(challenge);
        self
    }

    /// The rejection's status.
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
