//! The settings of a refusal cache.

use std::time::Duration;

/// Settings of a refusal cache, which refuses checks without asking the store.
///
/// 1. When a check is refused, the cache remembers for each of its limits and keys how much is left, and until when nothing
///    leaves the window. Until then it refuses any higher cost: other callers can only spend in the meantime. So a client
///    that varies its costs is refused as cheaply as one that repeats them.
/// 2. It refuses a check of several limits if it remembers all of them, from whatever checks and layers. It never admits.
/// 3. Remaining units and times count down. The retry time is exact where nothing is left and the refused cost was the
///    same, unless units are [counted afterwards](crate::Charge::spent) in the meantime. Otherwise it is a lower bound.
///    For a cost of at least the refused one, it is the remembered retry time. For a lower cost, it is the time until
///    the oldest unit leaves. If some of the used units are reserved, nothing is remembered for longer than
///    [`retry_reserved_after`](crate::Limiter::retry_reserved_after).
/// 4. The cache does not refuse after a [reset](crate::Limiter::reset) or [settlement](crate::settlement) of the limit
///    through any clone of the store, nor if the units, window or algorithm of the limit have changed, nor for a check
///    with an id from its caller. A reset or settlement through another store or process is noticed after
///    [`max_age`](Self::max_age).
/// 5. It remembers a bounded number of limits and keys by 64-bit digests under a secret of the process, never the keys.
///    No client can make two digests collide. By chance, among 10,000 remembered and a million checks a second, two collide
///    once in fifty years.
/// 6. Stores with a [local state](crate::Store::local_state), such as `RedisStore`, have one for all of their clones. A
///    limiter or layer that sets a refusal cache has its own. `MemoryStore` has none, since it decides as quickly.
///
/// ```
/// # #[cfg(feature = "redis")]
/// # fn settings() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use tower_sliding_window::{Limiter, RedisStore, limiter::RefusalCache};
///
/// let limiter = Limiter::new(RedisStore::builder("redis://127.0.0.1:6379").build()?);
/// // No key is ever reset, so a refusal holds until its retry time.
/// let patient = limiter.clone().refusal_cache(RefusalCache::new().max_age(Duration::MAX));
/// let without = limiter.refusal_cache(RefusalCache::off());
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct RefusalCache {
    pub(super) max_age: Duration,
    pub(super) capacity: usize,
}

impl RefusalCache {
    /// A refusal cache of 10,000 limits and keys, each for at most one second.
    pub const fn new() -> Self {
        Self { max_age: Duration::from_secs(1), capacity: 10_000 }
    }

    /// No refusal cache: the store is asked every time.
    pub const fn off() -> Self {
        Self { max_age: Duration::ZERO, capacity: 0 }
    }

    /// The longest time for which a refusal is remembered. Default: one second. Zero is [`off`](Self::off).
    ///
    /// A reset by another process, or a failover to a server that has lost entries, is noticed this late.
    pub const fn max_age(mut self, max_age: Duration) -> Self {
        self.max_age = max_age;
        self
    }

    /// The largest number of remembered refusals: one for each limit and key. Default: 10,000.
    pub const fn capacity(mut self, charges: usize) -> Self {
        self.capacity = charges;
        self
    }
}

impl Default for RefusalCache {
    fn default() -> Self {
        Self::new()
    }
}
