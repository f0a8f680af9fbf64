//! A store that is chosen at run time.

#[cfg(not(feature = "redis"))]
mod no_redis;
mod url;

use std::{
    fmt,
    future::Future,
    pin::Pin,
    task::{Context, Poll},
};

#[cfg(not(feature = "redis"))]
use self::no_redis::{RedisDecide, RedisReset, RedisSettle, RedisStore};
pub use self::url::InvalidStoreUrl;
use self::url::StoreKind;
#[cfg(feature = "redis")]
use super::redis::{RedisDecide, RedisReset, RedisSettle, RedisStore};
use super::{
    interface::Store,
    memory::{MemoryDecide, MemoryStore},
};
use crate::{
    check::Check, decision::Decision, error::StoreError, key::Key, limit::Limit, local::LocalState,
    settlement::Settlement,
};

/// The in-process store or Redis, chosen at run time: so that an application needs no type parameter for its store.
///
/// | URL | store |
/// |---|---|
/// | `memory:`, `memory://` | [`MemoryStore::new`] |
/// | `redis://`, `rediss://` (TLS, with the feature `tls`), `redis+unix://`, `unix://`, and the same with `valkey` | `RedisStore::builder(url)` |
///
/// A store with settings of its own, behind sentinels or on a cluster becomes an `AnyStore` by [`From`]. It decides as the store
/// itself does: without a box, and in process without a future.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use tower_sliding_window::{AnyStore, Everyone, Limit, MemoryStore, RateLimitLayer};
///
/// let url = std::env::var("STORE_URL").unwrap_or_else(|_| "memory:".to_owned());
/// let store = AnyStore::from_url(&url)?;
/// let layer: RateLimitLayer<AnyStore> = RateLimitLayer::new(store).limit(Limit::per_minute("exports", 20).by(Everyone));
///
/// let small = AnyStore::from(MemoryStore::builder().capacity(10_000).build());
/// # let _ = (layer, small);
/// # Ok(()) }
/// ```
///
/// The type of a layer names its responder. The type of a closure has no name, so make the closure a function pointer:
///
/// ```
/// use axum::body::Body;
/// use http::Response;
/// use tower_sliding_window::{AnyStore, Everyone, Limit, RateLimitLayer, Rejection, TextResponse};
///
/// type Own = fn(&Rejection, Response<()>) -> Response<Body>;
///
/// struct Layers {
///     json: RateLimitLayer<AnyStore>,
///     text: RateLimitLayer<AnyStore, TextResponse>,
///     own: RateLimitLayer<AnyStore, Own>,
/// }
///
/// let json = RateLimitLayer::new(AnyStore::memory()).limit(Limit::per_minute("exports", 20).by(Everyone));
/// let own: Own = |rejection, head| head.map(|()| Body::from(rejection.detail()));
/// let layers = Layers { text: json.clone().respond_with(TextResponse), own: json.clone().on_rejection(own), json };
/// # let Layers { json: _, text: _, own: _ } = layers;
/// ```
#[derive(Clone)]
pub struct AnyStore(Either<MemoryStore, RedisStore>);

/// A store or one of its futures. Without the feature `redis`, there is no value for the second one.
#[derive(Clone, Debug)]
enum Either<M, R> {
    Memory(M),
    Redis(R),
}

impl AnyStore {
    /// An in-process store: [`MemoryStore::new`].
    #[must_use]
    pub fn memory() -> Self {
        MemoryStore::new().into()
    }

    /// The store at `url`. One on Redis connects when the first check arrives, so Redis may be down, and no runtime is
    /// needed yet.
    ///
    /// # Errors
    ///
    /// [`InvalidStoreUrl`] if the scheme is unknown or needs a feature that is missing, if something follows `memory:`, or if it
    /// is not a valid Redis URL.
    pub fn from_url(url: &str) -> Result<Self, InvalidStoreUrl> {
        match url::kind(url)? {
            StoreKind::Memory => Ok(Self::memory()),
            StoreKind::Redis => redis_at(url).map(|store| Self(Either::Redis(store))),
        }
    }

    /// The store at `url`. One on Redis has been reached and can be written to.
    ///
    /// # Errors
    ///
    /// [`StoreError`] if the URL is invalid, as for [`from_url`](Self::from_url), if the server cannot be reached, if it is a
    /// replica, or if this user may not write keys. Print its [sources](std::error::Error::source) as well: they have the
    /// address and the cause.
    pub async fn connect(url: &str) -> Result<Self, StoreError> {
        let store = Self::from_url(url).map_err(|error| StoreError::new("setting up the store", error))?;
        if let Either::Redis(redis) = &store.0 {
            redis.try_out().await?;
        }
        Ok(store)
    }
}

#[cfg(feature = "redis")]
fn redis_at(url: &str) -> Result<RedisStore, InvalidStoreUrl> {
    RedisStore::builder(url).build().map_err(InvalidStoreUrl::redis)
}

#[cfg(not(feature = "redis"))]
fn redis_at(_: &str) -> Result<RedisStore, InvalidStoreUrl> {
    Err(InvalidStoreUrl::no_redis())
}

impl From<MemoryStore> for AnyStore {
    fn from(store: MemoryStore) -> Self {
        Self(Either::Memory(store))
    }
}

#[cfg(feature = "redis")]
impl From<RedisStore> for AnyStore {
    fn from(store: RedisStore) -> Self {
        Self(Either::Redis(store))
    }
}

impl Store for AnyStore {
    type Decide = AnyDecide;
    type Settle = AnySettle;
    type Reset = AnyReset;

    fn decide(&self, check: Check) -> AnyDecide {
        AnyFuture(match &self.0 {
            Either::Memory(store) => Either::Memory(store.decide(check)),
            Either::Redis(store) => Either::Redis(store.decide(check)),
        })
    }

    fn decide_now(&self, check: &Check) -> Option<Result<Decision, StoreError>> {
        match &self.0 {
            Either::Memory(store) => store.decide_now(check),
            Either::Redis(store) => store.decide_now(check),
        }
    }

    fn settle(&self, settlement: Settlement) -> AnySettle {
        AnyFuture(match &self.0 {
            Either::Memory(store) => Either::Memory(store.settle(settlement)),
            Either::Redis(store) => Either::Redis(store.settle(settlement)),
        })
    }

    fn reset(&self, limit: Limit, key: Key) -> AnyReset {
        AnyFuture(match &self.0 {
            Either::Memory(store) => Either::Memory(store.reset(limit, key)),
            Either::Redis(store) => Either::Redis(store.reset(limit, key)),
        })
    }

    fn local_state(&self) -> Option<&LocalState> {
        match &self.0 {
            Either::Memory(store) => store.local_state(),
            Either::Redis(store) => store.local_state(),
        }
    }
}

/// The future of an [`AnyStore`]'s decision.
pub type AnyDecide = AnyFuture<MemoryDecide, RedisDecide>;

/// The future of an [`AnyStore`]'s settlement.
pub type AnySettle = AnyFuture<<MemoryStore as Store>::Settle, RedisSettle>;

/// The future of an [`AnyStore`]'s reset.
pub type AnyReset = AnyFuture<<MemoryStore as Store>::Reset, RedisReset>;

/// The future of the store that an [`AnyStore`] is.
#[derive(Debug)]
#[must_use = "futures do nothing unless polled"]
pub struct AnyFuture<M, R>(Either<M, R>);

impl<T, M, R> Future for AnyFuture<M, R>
where
    M: Future<Output = T> + Unpin,
    R: Future<Output = T> + Unpin,
{
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        match &mut self.0 {
            Either::Memory(future) => Pin::new(future).poll(cx),
            Either::Redis(future) => Pin::new(future).poll(cx),
        }
    }
}

impl fmt::Debug for AnyStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let store: &dyn fmt::Debug = match &self.0 {
            Either::Memory(store) => store,
            Either::Redis(store) => store,
        };
        f.debug_tuple("AnyStore").field(store).finish()
    }
}
