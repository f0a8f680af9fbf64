//! The deny cache: refusals that are repeated without asking the store. [`DenyCache`] has its rules.

use std::{
    hash::BuildHasherDefault,
    sync::{Arc, OnceLock},
    time::Duration,
};

use quick_cache::{UnitWeighter, sync::Cache};

use crate::{
    check::Check,
    decision::{Decision, LimitStatus},
    digest::Digester,
    prehashed::Prehashed,
    store::{Epoch, Moment},
};

/// Settings of a limiter's deny cache: refusals that are repeated without asking the store.
///
/// 1. A check that was refused is refused again without asking, until the oldest unit of one of its limits leaves the
///    window. Its figures count down meanwhile. A check is the same if its limits, keys and costs are.
/// 2. That is done where the limits that refuse have nothing left: then nobody can spend from them meanwhile, so the
///    retry time stays true. What its other limits have left is told as it was.
/// 3. After a [reset](super::Limiter::reset) or a [settlement](crate::settlement) of the limit through any clone of the
///    store, under a limit that was raised, or with an id of the caller's, the store is asked.
/// 4. A reset or settlement by another process, or through another store on the same server, is seen after the
///    [`max_age`](Self::max_age), one second by default, at most.
/// 5. It holds a bounded number of refusals, as 64-bit digests under a key of the process's own, never the keys
///    themselves. Nobody outside can make two checks meet; among 10,000 refusals and a million checks a second, chance
///    does once in fifty years.
/// 6. It is used where a store says so by its [epoch](crate::Store::epoch): by `RedisStore`, not by `MemoryStore`, which
///    decides as quickly.
///
/// ```
/// # #[cfg(feature = "redis")]
/// # fn settings() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use tower_sliding_window::{DenyCache, Limiter, RedisStore};
///
/// let limiter = Limiter::new(RedisStore::builder("redis://127.0.0.1:6379").build()?);
/// // Nobody ever resets a key, so a refusal holds for as long as it says.
/// let patient = limiter.clone().deny_cache(DenyCache::new().max_age(Duration::MAX));
/// let every_time = limiter.deny_cache(DenyCache::off());
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct DenyCache {
    max_age: Duration,
    capacity: usize,
}

impl DenyCache {
    /// A deny cache of 10,000 refusals, for one second each at most.
    pub const fn new() -> Self {
        Self { max_age: Duration::from_secs(1), capacity: 10_000 }
    }

    /// No deny cache: the store is asked every time.
    pub const fn off() -> Self {
        Self { max_age: Duration::ZERO, capacity: 0 }
    }

    /// How long a refusal may be repeated at most. Default: one second.
    ///
    /// That is how late a reset by another process is seen, or a failover to a server that has lost entries. Zero is
    /// [`off`](Self::off).
    pub const fn max_age(mut self, max_age: Duration) -> Self {
        self.max_age = max_age;
        self
    }

    /// How many refusals to remember at most. Default: 10,000.
    pub const fn capacity(mut self, refusals: usize) -> Self {
        self.capacity = refusals;
        self
    }
}

impl Default for DenyCache {
    fn default() -> Self {
        Self::new()
    }
}

/// What a limiter remembers. Clones remember the same.
#[derive(Clone, Debug)]
pub(super) struct Refusals(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    settings: DenyCache,
    /// The store's, if it has one.
    epoch: Option<Epoch>,
    digester: Digester,
    /// Made by the first refusal.
    cache: OnceLock<Cache<u64, Refusal, UnitWeighter, BuildHasherDefault<Prehashed>>>,
}

#[derive(Clone, Debug)]
struct Refusal {
    epoch: u64,
    /// From when until when it may be repeated.
    asked: u64,
    until: u64,
    /// When it arrived. Its figures count down from there, so that nobody is told to come too early.
    answered: u64,
    decision: Decision,
}

/// A check on its way to the store.
#[derive(Clone, Copy, Debug)]
pub(super) struct Question {
    digest: u64,
    asked: Moment,
}

impl Refusals {
    pub(super) fn new(settings: DenyCache, epoch: Option<&Epoch>) -> Self {
        // Without an epoch, as without any age, nothing is ever recalled.
        let epoch = epoch.filter(|_| !settings.max_age.is_zero()).cloned();
        Self(Arc::new(Shared { settings, epoch, digester: Digester::default(), cache: OnceLock::new() }))
    }

    /// The refusal of a check, or what is needed to remember the one that may come; neither where the store is to be
    /// asked every time.
    pub(super) fn recall(&self, check: &Check) -> Result<Decision, Option<Question>> {
        let (Some(epoch), None) = (&self.0.epoch, check.id()) else { return Err(None) };
        let (asked, digest) = (epoch.moment(check), self.0.digester.of_check(check));
        match self.0.cache.get().and_then(|cache| cache.get(&digest)) {
            Some(refusal) if refusal.holds_at(asked) => Ok(refusal.at(asked)),
            _ => Err(Some(Question { digest, asked })),
        }
    }

    /// Remembers the answer to a question if it is a refusal.
    pub(super) fn learn(&self, question: Question, decision: &Decision) {
        let Shared { settings, epoch: Some(epoch), cache, .. } = &*self.0 else { return };
        let Question { digest, asked } = question;
        let Some(retry_after) = decision.retry_after() else { return };
        if decision.statuses().any(|status| status.retry_after().is_some() && status.remaining() > 0) {
            // Somebody may spend what is left, and the wait become longer.
            return;
        }
        let steady = decision.statuses().filter(|status| status.used() > 0).map(LimitStatus::reset_after);
        let held = steady.fold(retry_after, Duration::min).min(settings.max_age);
        let refusal = Refusal {
            epoch: asked.epoch,
            asked: asked.micros,
            until: asked.micros.saturating_add(u64::try_from(held.as_micros()).unwrap_or(u64::MAX)),
            answered: epoch.micros(),
            decision: decision.clone(),
        };
        let room = settings.capacity;
        cache
            .get_or_init(|| Cache::with(room, room as u64, UnitWeighter, Default::default(), Default::default()))
            .insert(digest, refusal);
    }
}

impl Refusal {
    /// Not before it was asked for either: then the clock has stepped back.
    fn holds_at(&self, moment: Moment) -> bool {
        self.epoch == moment.epoch && (self.asked..self.until).contains(&moment.micros)
    }

    fn at(&self, moment: Moment) -> Decision {
        self.decision.later(Duration::from_micros(moment.micros.saturating_sub(self.answered)))
    }
}
