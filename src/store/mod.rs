//! Stores decide checks, and remember what they admitted.
//!
//! 1. A store decides a [`Check`] in one atomic step: every charge or none.
//! 2. A refusal adds nothing. It does not count units, and refusals alone do not keep a key alive.
//!    It may drop entries that have left the window.
//! 3. A store forgets a key soon after its last unit has left the window: a second later on Redis,
//!    and up to one more window later for an exact log there.
//! 4. A settlement is exact, counts once, and never gives back more than its admission took.
//! 5. Checks with an id are idempotent. If any of a check's limits still has an admission with the
//!    check's id, the store admits the check again without counting it. The decision has the time
//!    of the first admission.
//! 6. A charge made by [`any_left`](crate::Charge::any_left) is not counted, and refuses the check
//!    if no unit is left. A charge that is [spent](crate::check::Takes::Always) is counted and
//!    never refuses the check. A charge at a cost of 0 never refuses it either, even while more
//!    units are used than the limit allows.
//! 7. A status says how many used units are [reserved](crate::decision::LimitStatus::new).
//! 8. A check counts when its future is first polled, not when the future is made. A future that
//!    was polled and then dropped may have counted its check. So do not put a timeout around a
//!    store: a [`Limiter`](crate::Limiter) has a [deadline](crate::Limiter::deadline), and gives
//!    places back. [`decide_now`](Store::decide_now) may decide without a future. In that case, the
//!    check counts at once. So a layer on a [`MemoryStore`] counts a request when its service is
//!    called.
//!
//! [`MemoryStore`] serves one process. `RedisStore` shares its limits between all processes that
//! use the same server. [`from_url`] and [`connect`] choose one of them at run time.
//!
//! # A store of your own
//!
//! A custom store implements [`Store`]. The package `tower-sliding-window-conformance` tests it and
//! names the rules that it breaks: see
//! [`guide::testing_your_limits`](crate::guide::testing_your_limits#a-store-of-your-own). Besides
//! the rules above, a store keeps these:
//!
//! 1. A limit is identified by its name, window and algorithm. Its number of units may change; the
//!    new number also holds for units that are already stored.
//! 2. Units count from their decision until exactly one window later. Units of a charge with a
//!    [lease](crate::Charge::lease) count until the lease ends, and are reserved until they are
//!    settled, unless the charge is spent.
//! 3. [`Decision::new`](crate::Decision::new) calls `status` once for each charge, in order. The
//!    check is admitted if no status has a retry time. Retry times of charges in the
//!    [shadow](crate::Charge::in_shadow) are ignored.
//! 4. [`LimitStatus::new`](crate::decision::LimitStatus::new) gets the units used after the
//!    decision, how many of them are reserved, and the time until the first of them leave. For a
//!    charge that does not fit, it also gets two retry times, which last until enough units have
//!    left. One assumes that all reserved units are given back now, and the other that none are. A
//!    charge in the shadow that does not fit has retry times too. It is not counted, but the
//!    check's other charges are.
//! 5. The caller may give a check an [id](crate::Check::id). The check was admitted before if the
//!    store has an unsettled admission with this id, under the limit and key of any of its charges.
//!    The decision has the time and id of that admission.
//! 6. A settlement belongs to the admission with the same limit, key, id, cost, kind (reserved or
//!    not) and time. If the admission reserved nothing, or is a
//!    [prefetch](LocalState::with_prefetch), the settlement's time may also be later. Settled units
//!    are no longer reserved, and count until one window after the admission. A settlement at a
//!    cost of 0 removes the units. A settlement at a cost of 1 renews a place under a
//!    [concurrent](crate::Limit::concurrent) limit: the place counts until one window after the
//!    settlement, or until it is removed.
//! 7. A settlement after the lease, but within one window of the admission, counts as if it were
//!    made at the admission. The store remembers it by id and time, so a repeated settlement
//!    changes nothing.
//! 8. All times come from one clock: a [`ManualClock`] in tests, and otherwise for example
//!    [`SystemTime::now`](std::time::SystemTime::now). The store reads it under the lock that
//!    orders its decisions. If it read the time before it waited for the lock, other threads' units
//!    would seem to come from the future. If the clock steps back, each unit counts for at most one
//!    window from the first refusal on, so a key recovers within one window.
//! 9. Costs go up to 2^52, and many of them may be counted. So the store adds them without
//!    overflow.
//! 10. A store need not support every [`Algorithm`](crate::Algorithm). For one that it does not
//!     support, it returns an [error of one check](crate::error::StoreError::of_one_check).
//!
//! A store that wraps another is short:
//!
//! ```
//! use std::sync::{Arc, atomic::{AtomicU64, Ordering}};
//! use tower_sliding_window::{
//!     Check, Decision, Key, Limit, MemoryStore, Store, settlement::{Settled, Settlement},
//!     store::StoreFuture,
//! };
//!
//! /// Counts the checks that pass through it.
//! struct Counted<S> {
//!     store: S,
//!     checks: Arc<AtomicU64>,
//! }
//!
//! impl<S: Store> Store for Counted<S> {
//!     fn decide(&self, check: Check) -> StoreFuture<Decision> {
//!         self.checks.fetch_add(1, Ordering::Relaxed);
//!         self.store.decide(check)
//!     }
//!
//!     fn settle(&self, settlement: Settlement) -> StoreFuture<Settled> {
//!         self.store.settle(settlement)
//!     }
//!
//!     fn reset(&self, limit: Limit, key: Key) -> StoreFuture<()> {
//!         self.store.reset(limit, key)
//!     }
//! }
//! # fn is_store(_: impl Store) {}
//! # is_store(Counted { store: MemoryStore::new(), checks: Arc::default() });
//! ```

mod memory;
#[cfg(feature = "redis")]
mod redis;

use std::{fmt, future::Future, pin::Pin, sync::Arc, time::Duration};

use tokio::time::{sleep, timeout};

pub use self::memory::MemoryStore;
#[cfg(feature = "redis")]
pub use self::redis::{RedisSource, RedisStore, RedisStoreBuilder};
use crate::{
    check::Check,
    decision::{Decision, Settled, Settlement},
    error::{ConfigError, StoreError, StoreErrorKind},
    key::Key,
    limit::Limit,
};
pub use crate::{clock::ManualClock, local::LocalState};

/// The future that a store returns.
pub type StoreFuture<T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send>>;

/// Decides checks, and remembers the admitted ones. See the [module docs](self).
///
/// Layers and limiters keep a store behind a pointer, so their own types do not depend on its type.
/// An `Arc` of a store is a store, too.
pub trait Store: Send + Sync + 'static {
    /// Decides `check` and, if it is admitted, counts it.
    fn decide(&self, check: Check) -> StoreFuture<Decision>;

    /// Decides `check` for a caller that waits no longer than `deadline`. Limiters and layers call
    /// this method. A store with a queue may know that it cannot decide the check in time. It then
    /// fails at once, with an [error of one check](crate::error::StoreError::of_one_check).
    /// Default: [`decide`](Self::decide). A store that wraps another need not forward this method.
    /// If it does not, a check that cannot be decided in time waits until its deadline. The check
    /// is passed in an `Arc`, since the caller still needs it if the store fails.
    fn decide_within(&self, check: Arc<Check>, deadline: Duration) -> StoreFuture<Decision> {
        let _ = deadline;
        self.decide(Arc::unwrap_or_clone(check))
    }

    /// Decides `check` and counts it now, if this is possible without waiting. `None` means that
    /// nothing was done, and that the caller has to use [`decide`](Self::decide). Default: `None`.
    /// A store that wraps another need not forward this method.
    fn decide_now(&self, check: &Check) -> Option<Result<Decision, StoreError>> {
        let _ = check;
        None
    }

    /// Sets the actual cost of an admitted check: see [`settlement`](crate::settlement).
    fn settle(&self, settlement: Settlement) -> StoreFuture<Settled>;

    /// Forgets the units that `limit` counts for `key`. Places under a
    /// [concurrent](Limit::concurrent) limit stay taken, since admissions still hold them.
    fn reset(&self, limit: Limit, key: Key) -> StoreFuture<()>;

    /// The name of the part that decides `check`, if the store has parts that can fail
    /// independently. In a cluster, the part is the node that has the check's keys. Each part has
    /// its own [`Breaker`](crate::limiter::Breaker). If several parts decide the check, their names
    /// are joined with spaces. Default: `None`, which stands for the whole store. A store that
    /// wraps another returns the wrapped store's name.
    fn part_of(&self, check: &Check) -> Option<Arc<str>> {
        let _ = check;
        None
    }

    /// The state that the store's clones share in this process: a
    /// [`Breaker`](crate::limiter::Breaker) and a [refusal cache](crate::Limiter::refusal_cache).
    /// Default: none, so each limiter has its own breaker, and refusals are not cached. A store
    /// that wraps another, and passes limits and keys on unchanged, returns the wrapped store's
    /// state.
    fn local_state(&self) -> Option<&LocalState> {
        None
    }
}

impl<S: Store + ?Sized> Store for Arc<S> {
    fn decide(&self, check: Check) -> StoreFuture<Decision> {
        (**self).decide(check)
    }

    fn decide_within(&self, check: Arc<Check>, deadline: Duration) -> StoreFuture<Decision> {
        (**self).decide_within(check, deadline)
    }

    fn decide_now(&self, check: &Check) -> Option<Result<Decision, StoreError>> {
        (**self).decide_now(check)
    }

    fn settle(&self, settlement: Settlement) -> StoreFuture<Settled> {
        (**self).settle(settlement)
    }

    fn reset(&self, limit: Limit, key: Key) -> StoreFuture<()> {
        (**self).reset(limit, key)
    }

    fn part_of(&self, check: &Check) -> Option<Arc<str>> {
        (**self).part_of(check)
    }

    fn local_state(&self) -> Option<&LocalState> {
        (**self).local_state()
    }
}

impl fmt::Debug for dyn Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store")
            .field("local_state", &self.local_state())
            .finish_non_exhaustive()
    }
}

/// Returns the store at `url`, chosen at run time. A store on Redis connects when the first check
/// arrives, so Redis may be down, and no runtime is needed yet.
///
/// | URL | store |
/// |---|---|
/// | `memory:`, `memory://`, `memory` | [`MemoryStore::new`] |
/// | `redis://`, `rediss://` (TLS, with the feature `tls`), `redis+unix://`, `unix://`, and the same with `valkey` | a [`RedisStore`] on one server |
/// | `redis+cluster://host:port,host:port`, with the feature `cluster` | on a cluster |
/// | `redis+sentinel://host:port,host:port/primary`, or the same with `/3` behind it for the database 3 | on the primary that sentinels know by this name |
///
/// A cluster's URL may have the user and password for all nodes, as in
/// `redis+cluster://user:password@host:port`. A URL with sentinels may have the primary's user and
/// password. If the sentinels themselves ask for a password, use [`RedisSource::sentinels`]. In a
/// user or password, percent-encode `/ ? # @ , %` (RFC 3986, section 2.1). The default port is
/// 6379, also for a sentinel. With `rediss+cluster://` and `rediss+sentinel://`, the store uses TLS
/// for all servers. Schemes are case-insensitive (RFC 3986, section 3.1).
///
/// A URL cannot set a prefix, a secret or a certificate: for these, use [`RedisStore::builder`],
/// which takes the same URLs, except `memory:`.
///
/// The only option is `?protocol=resp3`, for RESP3. A socket's URL has no host, so database, user
/// and password are options, too: `unix:///path?db=8&user=user&pass=password`. Any other option is
/// an error, as is a user without a password.
///
/// Call this function once, and give clones to all routes. Two `memory:` stores count separately,
/// so a limit that two routes share would admit twice its units. Two stores on one Redis share
/// their counts.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use tower_sliding_window::{Everyone, Limit, RateLimitLayer, store};
///
/// let url = std::env::var("STORE_URL").unwrap_or_else(|_| "memory:".to_owned());
/// let layer = RateLimitLayer::new(store::from_url(&url)?).limit(Limit::per_minute("exports", 20).by(Everyone));
/// # let _: RateLimitLayer = layer;
/// # Ok(()) }
/// ```
///
/// # Errors
///
/// [`ConfigError`] if the scheme is unknown or needs a missing feature, if the URL is not a valid
/// Redis URL, or if any part of it would be ignored.
pub fn from_url(url: &str) -> Result<Arc<dyn Store>, ConfigError> {
    if is_memory(url) {
        return Ok(Arc::new(MemoryStore::new()));
    }
    #[cfg(feature = "redis")]
    return Ok(Arc::new(RedisStore::builder(url).build()?));
    #[cfg(not(feature = "redis"))]
    Err(ConfigError::new(
        "URLs of Redis need this crate's feature `redis`",
    ))
}

/// Returns the store at `url`, by the rules of [`from_url`]. When this returns, a store on Redis
/// has reached its server, and can write to it.
///
/// # Errors
///
/// [`StoreError`] if the URL is invalid (see [`from_url`]), if the server cannot be reached or is a
/// replica that refuses writes, or if this user may not write keys. Print the error's
/// [sources](std::error::Error::source) as well: they show the cause, and the address that could
/// not be reached.
pub async fn connect(url: &str) -> Result<Arc<dyn Store>, StoreError> {
    #[cfg(feature = "redis")]
    if !is_memory(url) {
        return Ok(Arc::new(RedisStore::connect(url).await?));
    }
    from_url(url).map_err(invalid)
}

/// True if the URL names the in-process store.
fn is_memory(url: &str) -> bool {
    matches!(
        &*url.trim().to_ascii_lowercase(),
        "memory:" | "memory://" | "memory"
    )
}

/// The error for invalid settings.
fn invalid(error: ConfigError) -> StoreError {
    StoreError::new("setting up the store", StoreErrorKind::Config, error)
}

/// The longest time for which a process tries to give units back.
pub(crate) const MOST_TIME: Duration = Duration::from_secs(10);

/// The wait before the first retry of a failed settlement. It doubles with each retry, up to
/// [`LONGEST_WAIT`], so a store that recovers is asked again before [`MOST_TIME`] has passed.
const FIRST_WAIT: Duration = Duration::from_millis(10);
const LONGEST_WAIT: Duration = Duration::from_secs(1);

/// Makes the settlements one after the other, and retries each with exponential backoff until it
/// succeeds. Stops after [`MOST_TIME`], even if settlements are left.
pub(crate) async fn give_back<F, T, E>(
    settlements: Vec<Settlement>,
    settle: impl Fn(Settlement) -> F,
) where
    F: Future<Output = Result<T, E>>,
{
    let give_back = async {
        let mut wait = FIRST_WAIT;
        for settlement in settlements {
            while settle(settlement.clone()).await.is_err() {
                sleep(wait).await;
                wait = (wait * 2).min(LONGEST_WAIT);
            }
        }
    };
    let _ = timeout(MOST_TIME, give_back).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_memory_is_in_process() {
        for url in ["memory:", "memory://", "memory", "Memory:", " memory:\n"] {
            assert!(is_memory(url), "{url}");
        }
        for url in [
            "",
            "memoryless",
            "memory://s3cr3t",
            "memory:?capacity=5",
            "redis://host",
            "unix:///run/redis.sock",
        ] {
            assert!(!is_memory(url), "{url}");
        }
    }

    #[cfg(not(feature = "redis"))]
    #[test]
    fn without_the_feature_a_redis_url_is_an_error_that_names_it() {
        let error = from_url("redis://shop:s3cr3t@host")
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("`redis`") && !error.contains("s3cr3t"),
            "{error}"
        );
    }
}
