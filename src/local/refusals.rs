//! The refusal cache, a negative cache. [`Limiter::refusal_cache`](crate::Limiter::refusal_cache)
//! has the rules.

use std::{
    hash::BuildHasherDefault,
    iter,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime},
};

use quick_cache::{UnitWeighter, sync::Cache};

use crate::{
    check::{AdmissionId, Charge, Check},
    clock::{Clock, micros},
    decision::{Decision, LimitStatus},
    key::{Digester, Prehashed},
    limit::Limit,
};

/// A store's reset time may be too long by this many microseconds.
const RESET_SLACK: u64 = 1_000;

/// The most limits and keys that are cached as refusing.
const CAPACITY: usize = 10_000;

/// The number of slots in the version table: a count-min sketch with two hashes. A slot has the
/// last generation in which units were given back. Giving units back writes a new generation into
/// the two slots for the limit and key. A refusal is outdated once both slots have a newer
/// generation. Another key hardly ever has the same two slots, so almost no refusals for other keys
/// become outdated: 260 settlements in a second outdate one such refusal in a thousand.
const GENERATIONS: usize = 16_384;

/// While one check asks the store whether a refusal still stands, other checks are refused. After
/// this time without a reply, another check asks.
const LONGEST_ANSWER: Duration = Duration::from_millis(100);

/// Tells which refusals are outdated because units were given back. Also has the clock by which
/// refusals end.
pub(super) struct Generations {
    pub(super) clock: Clock,
    pub(super) digester: Digester,
    /// The last generation's number: how often units were given back.
    last: AtomicU64,
    /// The last generation in which units were given back, by (limit, key) digest.
    of_keys: Box<[AtomicU64]>,
}

/// The refusals, by (limit, key) digest and number of units.
type Table = Cache<u64, Arc<Refusal>, UnitWeighter, BuildHasherDefault<Prehashed>>;

/// The refusals that limiters have cached. Clones share these refusals.
#[derive(Clone)]
pub(crate) struct Refusals {
    max_age: Duration,
    /// True if each check asks the store. A cached refusal is then used only when the store fails.
    pub(crate) is_asking: bool,
    pub(super) generations: Arc<Generations>,
    /// The table of refusals. The first refusal creates it.
    table: Arc<OnceLock<Table>>,
}

/// The status for a limit and key when the store refused a check.
struct Refusal {
    status: LimitStatus,
    cost: u64,
    /// The newest of the [`Generations`] at the time when this process asked the store.
    generation: u64,
    /// The refusal may be used from this time on.
    asked_at: u64,
    /// Until this time, each check whose cost is above the units left is refused.
    until: u64,
    /// When the store was last asked whether the refusal still stands. After `max_age`, the next
    /// check asks.
    confirmed_at: AtomicU64,
    /// When the reply arrived. The times in the status count down from this moment, so that clients
    /// are not told to come back too early.
    replied_at: u64,
    at: SystemTime,
    id: AdmissionId,
}

/// A cached refusal for a charge's limit and key, and whether it applies to this charge.
struct Known {
    refusal: Arc<Refusal>,
    refuses: bool,
    /// True if it is certain that no units were given back since the refusal.
    is_sure: bool,
}

/// The cache's state when a check was looked up.
#[derive(Clone, Copy)]
pub(crate) struct Lookup {
    asked_at: u64,
    generation: u64,
    /// True if the check has to ask the store although a refusal is cached for it. If the store
    /// fails, the refusal stands.
    pub(crate) asks: bool,
    /// True if other checks are refused until this check is answered, but for at most
    /// [`LONGEST_ANSWER`].
    pub(crate) has_turn: bool,
}

impl Generations {
    pub(super) fn new(clock: Clock) -> Self {
        let of_keys = iter::repeat_with(AtomicU64::default)
            .take(GENERATIONS)
            .collect();
        Self {
            clock,
            digester: Digester::default(),
            last: AtomicU64::new(0),
            of_keys,
        }
    }

    /// Outdates the refusals for a limit and key: all those for which the store was asked before
    /// this call.
    pub(super) fn advance(&self, digest: u64) {
        let generation = self.last.fetch_add(1, Ordering::SeqCst) + 1;
        for last in self.of(digest) {
            last.fetch_max(generation, Ordering::SeqCst);
        }
    }

    fn of(&self, digest: u64) -> impl Iterator<Item = &AtomicU64> {
        [digest, digest >> 32]
            .into_iter()
            .map(|part| &self.of_keys[part as usize % GENERATIONS])
    }
}

impl Refusals {
    pub(super) fn new(max_age: Duration, generations: Arc<Generations>) -> Self {
        Self {
            max_age,
            is_asking: max_age.is_zero(),
            generations,
            table: Arc::default(),
        }
    }

    /// The same cache for a limiter that asks the store again after `max_age`.
    pub(crate) fn with_max_age(&self, max_age: Duration) -> Self {
        Self {
            max_age,
            is_asking: max_age.is_zero(),
            ..self.clone()
        }
    }

    /// The last generation in which units were given back.
    pub(crate) fn generation(&self) -> u64 {
        self.generations.last.load(Ordering::SeqCst)
    }

    /// Caches the store's refusal of a check whose caller has left. The store was asked `took` ago,
    /// when `generation` was the last one.
    #[cfg(feature = "redis")]
    pub(crate) fn learn_late(
        &self,
        check: &Check,
        refusal: &Decision,
        took: Duration,
        generation: u64,
    ) {
        if let Some(mut lookup) = self.look_up(check) {
            lookup.asked_at = lookup.asked_at.saturating_sub(micros(took));
            lookup.generation = generation;
            self.learn(&lookup, check, refusal);
        }
    }

    /// Looks a check up before the store is asked. Returns `None` if the check cannot be refused.
    pub(crate) fn look_up(&self, check: &Check) -> Option<Lookup> {
        if !check.can_be_refused() {
            return None;
        }
        let generation = self.generation();
        Some(Lookup {
            asked_at: self.generations.clock.now(),
            generation,
            asks: false,
            has_turn: false,
        })
    }

    /// Returns a refusal if the cache knows that one of the check's limits refuses it. Statuses
    /// with reserved units are used for at most `reserved_for`. If `may_ask` is set, the check may
    /// be chosen to [ask](Lookup::asks) the store, while other checks are refused.
    pub(crate) fn recall(
        &self,
        check: &Check,
        lookup: &mut Lookup,
        reserved_for: Duration,
        may_ask: bool,
    ) -> Option<Decision> {
        self.table.get()?;
        let now = lookup.asked_at;
        let (first, others) = check.map_charges(|charge| self.find(charge, now, reserved_for));
        let all = || iter::once(&first).chain(&others).flatten();

        // If units may have been given back under all limits that refuse the check, each check asks
        // the store. If the store fails, the refusal stands.
        let is_unsure = !all().any(|known| known.is_sure && known.refuses);
        let refusing = || all().filter(|known| known.refuses && (known.is_sure || is_unsure));
        let refused = &refusing().next()?.refusal;
        // Only the store knows whether an earlier try with a caller's id has been counted.
        let asks_each_time = self.is_asking || is_unsure || check.id().is_some();
        lookup.has_turn = !asks_each_time
            && refusing().all(|known| known.refusal.is_due(now, self.max_age))
            && (!may_ask || refused.is_asked_for(now, self.max_age));
        lookup.asks = asks_each_time || lookup.has_turn;
        let at = refused.at + Duration::from_micros(refused.age(now));
        let mut found = iter::once(&first).chain(&others);
        Some(Decision::new(check, at, refused.id, |charge| {
            let mut status = match found.next() {
                Some(Some(it)) if it.is_sure || is_unsure => it.refusal.status(charge, now),
                _ => LimitStatus::estimate(charge, false),
            };
            status.set_retry_reserved_after(reserved_for);
            status
        }))
    }

    /// Finds the cached status that stands for a charge.
    fn find(&self, charge: &Charge, now: u64, reserved_for: Duration) -> Option<Known> {
        let digest = charge.digest(&self.generations.digester);
        let table_key = table_key(digest, charge.limit());
        let refusal = self.table.get()?.get(&table_key)?;
        // Since the refusal, callers can only have spent more units. So a cost that was above the
        // units left at that time does not fit now, either.
        let refuses = charge.can_refuse() && charge.cost() > refusal.status.remaining();
        let is_sure = self.is_sure(digest, refusal.generation);
        let may_stand = is_sure || refuses && refusal.status.reserved == 0;
        // A status younger than `max_age` may be shown in any refusal, even if its limit would
        // admit the check.
        let is_shown = refuses || now < refusal.asked_at.saturating_add(micros(self.max_age));
        let stands = may_stand && is_shown && refusal.stands_for(charge, now, reserved_for);
        stands.then_some(Known {
            refusal,
            refuses,
            is_sure,
        })
    }

    /// Caches the store's refusal of a check that was looked up before.
    pub(crate) fn learn(&self, lookup: &Lookup, check: &Check, refusal: &Decision) {
        let clock = &self.generations.clock;
        let replied_at = clock.now();
        let table = self.table.get_or_init(|| {
            let (hasher, lifecycle) = Default::default();
            Cache::with(CAPACITY, CAPACITY as u64, UnitWeighter, hasher, lifecycle)
        });
        let asked_at = lookup.asked_at;
        for (charge, status) in check.charges().zip(refusal.statuses()) {
            if status.is_estimate {
                continue;
            }
            let digest = charge.digest(&self.generations.digester);
            // If no units are used, there is no reset time.
            let reset = (status.used > 0).then_some(status.leaves_after);
            let retry = status.waits.map(|(_, most)| most);
            let stands_for = reset.into_iter().chain(retry).min().unwrap_or_default();
            // While this check was in flight, the store may have decided another one later, such as
            // a check that has begun a ban. That later refusal stays. Of two checks in one batch,
            // the later one found at least as many units used.
            let table_key = table_key(digest, &status.limit);
            if let Some(known) = table.peek(&table_key)
                && known.overtakes(lookup, clock)
                && (known.at, known.status.used) > (refusal.at(), status.used)
                && self.is_sure(digest, known.generation)
            {
                continue;
            }
            let remembered = Refusal {
                status: status.clone(),
                cost: charge.cost(),
                generation: lookup.generation,
                asked_at,
                until: asked_at.saturating_add(stands_for),
                confirmed_at: AtomicU64::new(asked_at),
                replied_at,
                at: refusal.at(),
                id: refusal.id(),
            };
            table.insert(table_key, Arc::new(remembered));
        }
    }

    /// True if it is certain that no units were given back for a limit and key since this
    /// generation.
    fn is_sure(&self, digest: u64, generation: u64) -> bool {
        self.generations
            .of(digest)
            .any(|last| last.load(Ordering::SeqCst) <= generation)
    }

    /// Forgets the refusals that an admission by the store contradicts.
    pub(crate) fn forget(&self, lookup: &Lookup, check: &Check, admission: &Decision) {
        let Some(table) = self.table.get() else {
            return;
        };
        let clock = &self.generations.clock;
        for (charge, status) in check.charges().zip(admission.statuses()) {
            let digest = charge.digest(&self.generations.digester);
            table.remove_if(&table_key(digest, &status.limit), |known| {
                !known.overtakes(lookup, clock) || known.at <= admission.at()
            });
        }
    }
}

/// The table key for a limit and key. Limits that share units but differ in their number have
/// different table keys.
fn table_key(digest: u64, limit: &Limit) -> u64 {
    digest.wrapping_add(limit.units().wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

impl Refusal {
    /// True if the refusal still stands for a charge at the time `now`. A time before `asked_at`
    /// means that the clock has stepped back. In that case, the refusal does not stand.
    fn stands_for(&self, charge: &Charge, now: u64, reserved_for: Duration) -> bool {
        // A retry time is never too long, so until it is over, each cost of at least the refused
        // cost is refused. A reset time may be too long by [`RESET_SLACK`].
        let slack = if self.has_refused(charge) {
            0
        } else {
            RESET_SLACK
        };
        let mut until = self.until.saturating_sub(slack);
        if self.status.reserved > 0 {
            let reserved_for = micros(charge.limit().retry_reserved_after(reserved_for));
            until = until.min(self.asked_at.saturating_add(reserved_for));
        }
        (self.asked_at..until).contains(&now)
    }

    /// True if the store sent this refusal while the looked-up check was in flight. The clock is
    /// read here, since another thread may have cached the refusal only now. A refusal from the
    /// future was cached before the clock stepped back.
    fn overtakes(&self, lookup: &Lookup, clock: &Clock) -> bool {
        (lookup.asked_at + 1..=clock.now()).contains(&self.replied_at)
    }

    fn is_due(&self, now: u64, max_age: Duration) -> bool {
        self.confirmed_at
            .load(Ordering::Relaxed)
            .saturating_add(micros(max_age))
            <= now
    }

    /// True if this check now asks the store on behalf of all other checks. These are then refused
    /// for at most [`LONGEST_ANSWER`].
    fn is_asked_for(&self, now: u64, max_age: Duration) -> bool {
        let confirmed_at = self.confirmed_at.load(Ordering::Relaxed);
        let due = confirmed_at.saturating_add(micros(max_age));
        let next = (now + micros(LONGEST_ANSWER.min(max_age))).saturating_sub(micros(max_age));
        due <= now
            && self
                .confirmed_at
                .compare_exchange(confirmed_at, next, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
    }

    /// True if the limit has refused this cost or a lower one.
    fn has_refused(&self, charge: &Charge) -> bool {
        self.status.waits.is_some() && self.cost <= charge.cost()
    }

    fn age(&self, now: u64) -> u64 {
        now.saturating_sub(self.replied_at)
    }

    fn status(&self, charge: &Charge, now: u64) -> LimitStatus {
        let age = self.age(now);
        let mut status = self.status.for_charge(charge);
        status.leaves_after = status.leaves_after.saturating_sub(age);
        let status = status.refused_until_reset(charge);
        match self.status.waits {
            Some((least, most)) if self.has_refused(charge) => {
                status.not_before((least.saturating_sub(age), most.saturating_sub(age)))
            }
            _ => status,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{atomic::AtomicBool, mpsc},
        thread,
    };

    use super::*;
    use crate::clock::ManualClock;

    /// A decision at this time, with a retry time of a minute or without one.
    fn decided(check: &Check, at: SystemTime, is_refused: bool) -> Decision {
        let minute = Duration::from_secs(60);
        let waits = is_refused.then_some((minute, minute));
        Decision::new(check, at, AdmissionId::fresh(), |charge| {
            LimitStatus::new(charge, 1, 0, minute, waits)
        })
    }

    #[test]
    fn an_admission_ends_no_refusal_that_is_learnt_meanwhile() {
        let clock = ManualClock::new();
        let generations = Arc::new(Generations::new(Clock::Manual(clock.clone())));
        let refusals = Refusals::new(Duration::from_secs(1), generations);
        let limit = Limit::per_minute("calls", 1);
        let check = Check::new(Charge::fitting(limit, "ada".into(), 1));
        let moment = Duration::from_micros(1);
        let lookup = refusals.look_up(&check).unwrap();
        refusals.learn(&lookup, &check, &decided(&check, clock.now(), true));
        clock.advance(moment);
        let lookup = refusals.look_up(&check).unwrap();
        let admission = decided(&check, clock.now(), false);

        // After the clock is next read, another thread caches a refusal.
        let is_next = AtomicBool::new(true);
        let (learner, asked, time) = (refusals.clone(), check.clone(), clock.clone());
        let (learnt, has_learnt) = mpsc::channel();
        let (may_go_on, goes_on) = (learnt.clone(), Arc::new(std::sync::Mutex::new(has_learnt)));
        let waits = Arc::clone(&goes_on);
        clock.after_reading(move || {
            if is_next.swap(false, Ordering::SeqCst) {
                let (learner, asked, time) = (learner.clone(), asked.clone(), time.clone());
                let learnt = may_go_on.clone();
                thread::spawn(move || {
                    time.advance(moment);
                    let lookup = learner.look_up(&asked).unwrap();
                    time.advance(moment);
                    learner.learn(&lookup, &asked, &decided(&asked, time.now(), true));
                    learnt.send(()).unwrap();
                    learnt.send(()).unwrap();
                });
                // The cache may rightly be locked here, so the wait is bounded.
                let _ = waits
                    .lock()
                    .unwrap()
                    .recv_timeout(Duration::from_millis(100));
            }
        });
        refusals.forget(&lookup, &check, &admission);
        goes_on.lock().unwrap().recv().unwrap();
        let mut lookup = refusals.look_up(&check).unwrap();
        let known = refusals.recall(&check, &mut lookup, Duration::MAX, false);
        assert!(known.is_some());
    }
}
