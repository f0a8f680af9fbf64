//! The refusal cache. [`Limiter::refusal_cache`](crate::Limiter::refusal_cache) has the rules.

use std::{
    array, fmt,
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

/// A store may report a reset time this many microseconds late.
const RESET_SLACK: u64 = 1_000;

/// The most limits and keys that are remembered as refusing.
const CAPACITY: usize = 10_000;

/// Limits share this many generations, so that settlements of one limit leave the refusals of most others alone.
const GENERATIONS: usize = 64;

/// Tells which refusals are outdated: by time, or because units were given back.
pub(super) struct Generations {
    pub(super) clock: Clock,
    /// How often units were given back.
    last: AtomicU64,
    /// The last of these times, by limit.
    of_limits: [AtomicU64; GENERATIONS],
}

/// The refusals that limiters remember.
pub(crate) struct Refusals {
    max_age: Duration,
    generations: Arc<Generations>,
    digester: Digester,
    /// Made by the first refusal.
    table: OnceLock<Cache<u64, Arc<Refusal>, UnitWeighter, BuildHasherDefault<Prehashed>>>,
}

/// The status of one limit and key when a check of them was refused.
struct Refusal {
    status: LimitStatus,
    cost: u64,
    /// The last generation when the store was asked.
    generation: u64,
    /// It may be used from here on,
    asked_at: u64,
    /// until here.
    until: u64,
    /// When the reply arrived. The times count down from there, so that no client is told to come back too early.
    replied_at: u64,
    at: SystemTime,
    id: AdmissionId,
}

/// A check as the cache looks it up.
#[derive(Debug)]
pub(crate) struct Lookup {
    asked_at: u64,
    generation: u64,
    /// The digest of each limit and key, and the cost.
    charges: ((u64, u64), Vec<(u64, u64)>),
}

impl Generations {
    pub(super) fn new(clock: Clock) -> Self {
        Self { clock, last: AtomicU64::new(0), of_limits: array::from_fn(|_| AtomicU64::new(0)) }
    }

    /// Makes all refusals of a limit outdated that the store was asked for before.
    pub(super) fn advance(&self, limit: &Limit) {
        let generation = self.last.fetch_add(1, Ordering::SeqCst) + 1;
        self.of(limit).fetch_max(generation, Ordering::SeqCst);
    }

    /// By FNV-1a of the name.
    fn of(&self, limit: &Limit) -> &AtomicU64 {
        let hash = limit
            .name()
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
        &self.of_limits[(hash >> 32) as usize % GENERATIONS]
    }
}

impl Refusals {
    pub(super) fn new(max_age: Duration, generations: Arc<Generations>) -> Self {
        Self { max_age, generations, digester: Digester::default(), table: OnceLock::new() }
    }

    /// The check as the cache knows it; `None` if its refusal cannot be remembered.
    pub(crate) fn look_up(&self, check: &Check) -> Option<Lookup> {
        if check.id().is_some() || !check.can_be_refused() {
            return None;
        }
        // Refusals of limits that share units and differ in their number are apart.
        let digest = |charge: &Charge| {
            let units = charge.limit().units().wrapping_mul(0x9e37_79b9_7f4a_7c15);
            charge.limit().digest(&self.digester, charge.key()).wrapping_add(units)
        };
        let charges = check.map_charges(|charge| (digest(charge), charge.cost()));
        let generation = self.generations.last.load(Ordering::SeqCst);
        Some(Lookup { asked_at: self.generations.clock.now(), generation, charges })
    }

    /// Refuses a check if the cache knows that all of its limits stand as they did, and one of them refuses. Statuses with
    /// reserved units are used for at most `reserved_for`.
    pub(crate) fn recall(&self, check: &Check, lookup: &Lookup, reserved_for: Duration) -> Option<Decision> {
        let (table, now, (first, rest)) = (self.table.get()?, lookup.asked_at, &lookup.charges);
        let find = |charge: &Charge, digest: u64| {
            let refusal = table.get(&digest)?;
            let outdated_by = self.generations.of(charge.limit()).load(Ordering::SeqCst);
            (outdated_by <= refusal.generation && refusal.holds_for(charge, now, reserved_for)).then_some(refusal)
        };
        let mut charges = check.charges();
        let first = find(charges.next()?, first.0)?;
        let mut others = Vec::new();
        for (charge, (digest, _)) in charges.zip(rest) {
            others.push(find(charge, *digest)?);
        }

        let all = || iter::once(&first).chain(&others);
        // Since then, units can only have been added.
        let fits = |charge: &Charge, refusal: &Refusal| charge.cost() <= refusal.status.remaining();
        let refuses = |(charge, refusal): &(&Charge, &Arc<Refusal>)| charge.can_refuse() && !fits(charge, refusal);
        let (_, refusing) = check.charges().zip(all()).find(refuses)?;
        let mut refusals = all();
        Some(Decision::new(check, refusing.at + refusing.age(now), refusing.id, |charge| {
            let mut status = refusals.next().unwrap_or(&first).status(charge, now);
            status.set_retry_reserved_after(reserved_for);
            status
        }))
    }

    /// Remembers the store's refusal of a check that was looked up before.
    pub(crate) fn learn(&self, lookup: &Lookup, refusal: &Decision) {
        let replied_at = self.generations.clock.now();
        let table = self.table.get_or_init(|| {
            Cache::with(CAPACITY, CAPACITY as u64, UnitWeighter, Default::default(), Default::default())
        });
        let Lookup { asked_at, generation, charges: (first, rest) } = lookup;
        for ((digest, cost), status) in iter::once(first).chain(rest).zip(refusal.statuses()) {
            // Without used units there is no reset time.
            let reset = (status.used() > 0).then_some(status.leaves_after());
            let retry = status.waits.map(|(_, most)| most);
            let lifetime = reset.into_iter().chain(retry).fold(self.max_age, Duration::min);
            let remembered = Refusal {
                status: status.clone(),
                cost: *cost,
                generation: *generation,
                asked_at: *asked_at,
                until: asked_at.saturating_add(micros(lifetime)),
                replied_at,
                at: refusal.at(),
                id: refusal.id(),
            };
            table.insert(*digest, Arc::new(remembered));
        }
    }
}

impl Refusal {
    /// Whether it is of this very limit, and not too old. A time before `asked_at` means that the clock has stepped back.
    fn holds_for(&self, charge: &Charge, now: u64, reserved_for: Duration) -> bool {
        // A retry time is never late, so a cost that is at least as large is refused until the end.
        let slack = if self.has_refused(charge) { 0 } else { RESET_SLACK };
        let is_settled_by = || {
            let reserved_for = micros(charge.limit().retry_reserved_after(reserved_for));
            self.status.reserved() > 0 && now >= self.asked_at.saturating_add(reserved_for)
        };
        // The digest has found the rest of the limit.
        self.status.limit().units() == charge.limit().units()
            && (self.asked_at..self.until.saturating_sub(slack)).contains(&now)
            && !is_settled_by()
    }

    /// Whether the limit has refused this cost or a lower one.
    fn has_refused(&self, charge: &Charge) -> bool {
        self.status.waits.is_some() && self.cost <= charge.cost()
    }

    fn age(&self, now: u64) -> Duration {
        Duration::from_micros(now.saturating_sub(self.replied_at))
    }

    fn status(&self, charge: &Charge, now: u64) -> LimitStatus {
        let age = self.age(now);
        let left = |time: Duration| time.saturating_sub(age);
        let status = LimitStatus::new(charge, self.status.used(), left(self.status.leaves_after()), None);
        let status = status.with_reserved(self.status.reserved(), Duration::ZERO).refused_until_reset(charge);
        match self.status.waits.filter(|_| self.has_refused(charge)) {
            Some((least, most)) => status.not_before((left(least), left(most))),
            None => status,
        }
    }
}

impl fmt::Debug for Refusals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let remembered = self.table.get().map_or(0, Cache::len);
        f.debug_struct("RefusalCache").field("max_age", &self.max_age).field("refusals", &remembered).finish()
    }
}
