//! The deny cache: what is refused without asking the store. [`DenyCache`] has its rules.

use std::{
    fmt,
    hash::BuildHasherDefault,
    iter,
    sync::{Arc, OnceLock},
    time::{Duration, SystemTime},
};

use quick_cache::{UnitWeighter, sync::Cache};

use super::local_state::LocalState;
use crate::{
    admission::AdmissionId,
    algorithm::Algorithm,
    check::{Charge, Check},
    decision::{Decision, LimitStatus, Retry},
    digest::Digester,
    limit::Limit,
    prehashed::Prehashed,
};

/// A store may tell a reset so many microseconds late.
const LATE: u64 = 1_000;

/// Settings of a deny cache: what is refused without asking the store.
///
/// 1. When a check is refused, it is remembered for each of its limits and keys how much is left, and until when nothing
///    leaves the window. Until then, any cost above what is left is refused without asking: others can only spend
///    meanwhile. So a client that varies its costs is refused as cheaply as one that repeats them.
/// 2. A check of several limits is refused so if the process remembers how each of them stands. It may have learned that
///    from different checks, of different layers. Nothing is admitted so.
/// 3. The figures count down meanwhile. The retry time stays exact where nothing is left and the refusal was one of the
///    same cost, unless another counts meanwhile what was [spent](crate::Charge::spent) beyond the limit. Otherwise it is a true "not before": at a cost of at least the refused one, the time that was told for that;
///    at a lower cost, the time until the oldest unit leaves. The figures of other limits are told as they were.
///    Where some of the used units are reserved, nothing is remembered for longer than
///    [`retry_reserved_after`](crate::Limiter::retry_reserved_after).
/// 4. The store is asked after a [reset](crate::Limiter::reset) or a [settlement](crate::settlement) of the limit through
///    any clone of the store, under a limit of other units, window or algorithm, and with an id of the caller's.
/// 5. A reset or settlement by another process, or through another store on the same server, is seen after the
///    [`max_age`](Self::max_age), one second by default, at most.
/// 6. It remembers a bounded number of limits and keys, as 64-bit digests under a secret of the process's own, never the
///    keys themselves. Nobody outside can make two of them meet; among 10,000 that are remembered and a million checks a
///    second, chance does once in fifty years.
/// 7. It is used where a store has a [local state](crate::Store::local_state): by `RedisStore`, not by `MemoryStore`, which decides as
///    quickly. Clones of such a store have one, whatever limiters and layers are made on them. One that is set on a
///    limiter or layer is its own.
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
    /// A deny cache of 10,000 limits and keys, for one second each at most.
    pub const fn new() -> Self {
        Self { max_age: Duration::from_secs(1), capacity: 10_000 }
    }

    /// No deny cache: the store is asked every time.
    pub const fn off() -> Self {
        Self { max_age: Duration::ZERO, capacity: 0 }
    }

    /// For how long a refusal is remembered at most. Default: one second.
    ///
    /// That is how late a reset by another process is seen, or a failover to a server that has lost entries. Zero is
    /// [`off`](Self::off).
    pub const fn max_age(mut self, max_age: Duration) -> Self {
        self.max_age = max_age;
        self
    }

    /// How many charges that were refused to remember at most: one for each limit and key. Default: 10,000.
    pub const fn capacity(mut self, charges: usize) -> Self {
        self.capacity = charges;
        self
    }
}

impl Default for DenyCache {
    fn default() -> Self {
        Self::new()
    }
}

/// What is remembered.
pub(super) struct Memory {
    settings: DenyCache,
    digester: Digester,
    /// Made by the first refusal.
    standings: OnceLock<Cache<u64, Standing, UnitWeighter, BuildHasherDefault<Prehashed>>>,
}

/// The refusals that a limiter knows of. Clones know the same.
#[derive(Clone, Debug)]
pub(crate) struct Refusals(Option<(LocalState, Arc<Memory>)>);

/// How a limit stood for a key when a check of it was refused.
#[derive(Clone, Copy)]
struct Standing {
    units: u64,
    window: u64,
    algorithm: Algorithm,
    local_state: u64,
    /// From when until when it may be told.
    asked: u64,
    until: u64,
    /// When it arrived. Its figures count down from there, so that nobody is told to come too early.
    answered: u64,
    at: SystemTime,
    id: AdmissionId,
    cost: u64,
    used: u64,
    reserved: u64,
    reset: Duration,
    /// If the limit refused the cost.
    retry: Option<Retry>,
}

/// A check on its way to the store.
#[derive(Debug)]
pub(crate) struct Question {
    asked: u64,
    first: Asked,
    rest: Vec<Asked>,
}

/// A charge of it.
#[derive(Clone, Copy, Debug)]
struct Asked {
    digest: u64,
    local_state: u64,
    cost: u64,
}

impl Refusals {
    /// Those that all limiters on a store know of.
    pub(crate) fn of_store(local_state: Option<&LocalState>) -> Self {
        Self(local_state.map(|local_state| (local_state.clone(), Arc::clone(local_state.memory()))))
    }

    /// Those of one limiter.
    pub(crate) fn own(settings: DenyCache, local_state: Option<&LocalState>) -> Self {
        // Without a local state, as without any age, nothing is ever recalled.
        let local_state = local_state.filter(|_| !settings.max_age.is_zero());
        Self(local_state.map(|local_state| (local_state.clone(), Arc::new(Memory::new(settings)))))
    }

    /// The refusal of a check, or what is needed to remember the one that may come; neither where the store is to be
    /// asked every time. What some reservations are in is not remembered for longer than `reserved_for`.
    pub(crate) fn recall(&self, check: &Check, reserved_for: Duration) -> Result<Decision, Option<Question>> {
        let (Some((local_state, memory)), None) = (&self.0, check.id()) else { return Err(None) };
        if !check.can_be_refused() {
            return Err(None);
        }
        let (first, rest) = check.map_charges(|charge| Asked {
            digest: memory.digester.of_key(charge.limit(), charge.key()),
            local_state: local_state.number(charge.limit()),
            cost: charge.cost(),
        });
        let question = Question { asked: local_state.now(), first, rest };
        memory.refuse(check, &question, reserved_for).ok_or(Some(question))
    }

    /// Remembers the answer to a question if it is a refusal.
    pub(crate) fn learn(&self, question: &Question, decision: &Decision) {
        if let Some((local_state, memory)) = &self.0
            && !decision.is_allowed()
        {
            memory.learn(question, decision, local_state.now());
        }
    }
}

impl Memory {
    pub(super) fn new(settings: DenyCache) -> Self {
        Self { settings, digester: Digester::default(), standings: OnceLock::new() }
    }

    /// The refusal of a check, if all of its limits are remembered, and one refuses.
    fn refuse(&self, check: &Check, question: &Question, reserved_for: Duration) -> Option<Decision> {
        let standings = self.standings.get()?;
        let recall = |charge: &Charge, asked: &Asked| {
            let holds = |standing: &Standing| standing.holds_for(charge, asked, question.asked, reserved_for);
            standings.get(&asked.digest).filter(holds)
        };
        let mut charges = check.charges();
        let first = recall(charges.next()?, &question.first)?;
        let rest: Vec<Standing> =
            charges.zip(&question.rest).map(|(charge, asked)| recall(charge, asked)).collect::<Option<_>>()?;

        let all = || iter::once(&first).chain(&rest);
        let refusing =
            check.charges().zip(all()).find(|(charge, standing)| charge.can_refuse() && standing.refuses(charge));
        let (_, refusing) = refusing?;
        let at = refusing.at + refusing.age(question.asked);
        let mut standings = all();
        Some(Decision::new(check, at, refusing.id, |charge| {
            standings.next().unwrap_or(&first).status(charge, question.asked)
        }))
    }

    fn learn(&self, question: &Question, decision: &Decision, answered: u64) {
        let standings = self.standings.get_or_init(|| {
            let room = self.settings.capacity;
            Cache::with(room, room as u64, UnitWeighter, Default::default(), Default::default())
        });
        for (asked, status) in iter::once(&question.first).chain(&question.rest).zip(decision.statuses()) {
            // What is not used does not leave.
            let leaves = (status.used() > 0).then_some(status.reset_after());
            let refused = status.retry().map(|retry| retry.most);
            let held = leaves.into_iter().chain(refused).fold(self.settings.max_age, Duration::min);
            let limit = status.limit();
            standings.insert(
                asked.digest,
                Standing {
                    units: limit.units(),
                    window: limit.window_micros(),
                    algorithm: limit.algorithm(),
                    local_state: asked.local_state,
                    asked: question.asked,
                    until: question.asked.saturating_add(micros(held)),
                    answered,
                    at: decision.at(),
                    id: decision.id(),
                    cost: asked.cost,
                    used: status.used(),
                    reserved: status.reserved(),
                    reset: status.reset_after(),
                    retry: status.retry(),
                },
            );
        }
    }
}

impl Standing {
    /// Whether it is still so, and of this limit. A time before it was asked for says that the clock has stepped back.
    fn holds_for(&self, charge: &Charge, asked: &Asked, now: u64, reserved_for: Duration) -> bool {
        // By the retry time, which is never late, a cost as large as that is refused until the end.
        let late = if self.has_refused(charge) { 0 } else { LATE };
        let given_back = if self.reserved > 0 { self.asked.saturating_add(micros(reserved_for)) } else { u64::MAX };
        self.is_of(charge.limit())
            && self.local_state == asked.local_state
            && (self.asked..self.until.saturating_sub(late).min(given_back)).contains(&now)
    }

    fn is_of(&self, limit: &Limit) -> bool {
        (self.units, self.window, self.algorithm) == (limit.units(), limit.window_micros(), limit.algorithm())
    }

    /// Whether the limit has refused a cost that is no higher.
    fn has_refused(&self, charge: &Charge) -> bool {
        self.retry.is_some() && self.cost <= charge.cost()
    }

    /// Whether the limit refuses the charge: as much is used, or more.
    fn refuses(&self, charge: &Charge) -> bool {
        charge.cost() > self.units.saturating_sub(self.used)
    }

    fn age(&self, now: u64) -> Duration {
        Duration::from_micros(now.saturating_sub(self.answered))
    }

    fn status(&self, charge: &Charge, now: u64) -> LimitStatus {
        let left = |time: Duration| time.saturating_sub(self.age(now));
        let status = LimitStatus::new(charge, self.used, left(self.reset), None);
        let status = status.with_reserved(self.reserved, Duration::ZERO).until_something_leaves(charge);
        match self.retry.filter(|_| self.has_refused(charge)) {
            Some(known) => status.not_before(&Retry::of(left(known.least), left(known.most))),
            None => status,
        }
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let standings = self.standings.get().map_or(0, Cache::len);
        f.debug_struct("Memory").field("settings", &self.settings).field("standings", &standings).finish()
    }
}
