//! The trait of extractors, and extractors made of two.

use http::request::Parts;

use super::key_error::KeyError;
use crate::key::Key;

/// Finds the key of a request. See the [module docs](super).
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
    /// address has one key for [`PeerIp`](super::PeerIp) and [`ClientIp`](super::ClientIp), and a token has one key for all [`ApiKey`](super::ApiKey)s of one secret.
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

/// One key of two: see [`KeyExtractor::and`].
#[derive(Clone, Debug)]
pub struct And<A, B> {
    first: A,
    second: B,
}

impl<A, B> And<A, B> {
    pub(super) fn new(first: A, second: B) -> Self {
        Self { first, second }
    }
}

impl<A: KeyExtractor, B: KeyExtractor> KeyExtractor for And<A, B> {
    fn extract(&self, parts: &Parts) -> Result<Key, KeyError> {
        Ok(Key::pair(&self.first.extract(parts)?, &self.second.extract(parts)?))
    }

    fn is_by_upstream(&self) -> bool {
        self.first.is_by_upstream() || self.second.is_by_upstream()
    }
}

/// The key of the second if the first is absent: see [`KeyExtractor::or`].
#[derive(Clone, Debug)]
pub struct Or<A, B> {
    first: A,
    second: B,
}

impl<A, B> Or<A, B> {
    pub(super) fn new(first: A, second: B) -> Self {
        Self { first, second }
    }
}

impl<A: KeyExtractor, B: KeyExtractor> KeyExtractor for Or<A, B> {
    fn extract(&self, parts: &Parts) -> Result<Key, KeyError> {
        match self.first.extract(parts) {
            Err(error) if error.is_missing() => self.second.extract(parts),
            outcome => outcome,
        }
    }

    fn is_by_upstream(&self) -> bool {
        self.first.is_by_upstream() && self.second.is_by_upstream()
    }
}
