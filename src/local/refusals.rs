//! A refusal cache at work. [`RefusalCache`] has the rules.

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

use super::refusal_cache::RefusalCache;
use crate::{
    admission::AdmissionId,
    algorithm::Algorithm,
    check::{Charge, Check},
    clock::{Clock, micros},
    decision::{Decision, LimitStatus},
    key::{Digester, Prehashed},
    limit::Limit,
};

/// A store may report a reset time this many microseconds late.
const RESET_SLACK: u64 = 1_000;

/// Limits share this many generations, so that settlements of one limit leave the refusals of most others alone.
const GENERATIONS: usize = 64;

/// Tells which refusals are outdated: by time, or because units were given back.
pub(super) struct Generations {
    clock: Clock,
    numbers: [AtomicU64; GENERATIONS],
}

/// The refusals that limiters remember.
pub(crate) struct Refusals {
    settings: RefusalCache,
    generations: Arc<Generations>,
    digester: Digester,
    /// Made by the first refusal.
    table: OnceLock<Cache<u64, Refusal, UnitWeighter, BuildHasherDefault<Prehashed>>>,
}

/// The status of one limit and key when a check of them was refused.
#[derive(Clone, Copy)]
struct Refusal {
    units: u64,
    window: u64,
    algorithm: Algorithm,
    generation: u64,
    /// It may be used from here on,
    asked_at: u64,
    /// until here.
    until: u64,
    /// When the reply arrived. The times count down from there, so that no client is told to come back too early.
    replied_at: u64,
    at: SystemTime,
    id: AdmissionId,
    cost: u64,
    used: u64,
    reserved: u64,
    reset: Duration,
    /// If the limit refused the cost.
    waits: Option<(Duration, Duration)>,
}

/// The result of a look at the cache.
pub(crate) enum Recall {
    Refused(Decision),
    /// The store has to be asked. Its refusal can be remembered by this lookup.
    Missed(Lookup),
    /// The store has to be asked, and its reply cannot be remembered.
    NotCacheable,
}

/// A check as the cache looks it up.
#[derive(Debug)]
pub(crate) struct Lookup {
    asked_at: u64,
    first: ChargeLookup,
    rest: Vec<ChargeLookup>,
}

#[derive(Clone, Copy, Debug)]
struct ChargeLookup {
    digest: u64,
    generation: u64,
    cost: u64,
}

impl Generations {
    pub(super) fn new(clock: Clock) -> Self {
        Self { clock, numbers: array::from_fn(|_| AtomicU64::new(0)) }
    }

    pub(super) fn clock(&self) -> Clock {
        self.clock.clone()
    }

    /// Makes all refusals of a limit outdated.
    pub(super) fn advance(&self, limit: &Limit) {
        self.number(limit).fetch_add(1, Ordering::SeqCst);
    }

    fn of(&self, limit: &Limit) -> u64 {
        self.number(limit).load(Ordering::SeqCst)
    }

    /// By FNV-1a of the name.
    fn number(&self, limit: &Limit) -> &AtomicU64 {
        let hash = limit
            .name()
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
        &self.numbers[(hash >> 32) as usize % GENERATIONS]
    }
}

impl Refusals {
    pub(super) fn new(settings: RefusalCache, generations: Arc<Generations>) -> Self {
        Self { settings, generations, digester: Digester::default(), table: OnceLock::new() }
    }

    /// Refuses a check if the cache knows that all of its limits stand as they did, and one of them refuses. Statuses with
    /// reserved units are used for at most `reserved_for`.
    pub(crate) fn recall(&self, check: &Check, reserved_for: Duration) -> Recall {
        if check.id().is_some() || !check.can_be_refused() {
            return Recall::NotCacheable;
        }
        let (first, rest) = check.map_charges(|charge| ChargeLookup {
            digest: self.digester.of_key(charge.limit().name(), charge.key()),
            generation: self.generations.of(charge.limit()),
            cost: charge.cost(),
        });
        let lookup = Lookup { asked_at: self.generations.clock.now(), first, rest };
        match self.refuse(check, &lookup, reserved_for) {
            Some(refusal) => Recall::Refused(refusal),
            None => Recall::Missed(lookup),
        }
    }

    fn refuse(&self, check: &Check, lookup: &Lookup, reserved_for: Duration) -> Option<Decision> {
        let (table, now) = (self.table.get()?, lookup.asked_at);
        let find = |charge: &Charge, lookup: &ChargeLookup| {
            let holds = |refusal: &Refusal| refusal.holds_for(charge, lookup, now, reserved_for);
            table.get(&lookup.digest).filter(holds)
        };
        let mut charges = check.charges();
        let first = find(charges.next()?, &lookup.first)?;
        let rest: Vec<Refusal> =
            charges.zip(&lookup.rest).map(|(charge, lookup)| find(charge, lookup)).collect::<Option<_>>()?;

        let all = || iter::once(&first).chain(&rest);
        let refuses = |(charge, refusal): &(&Charge, &Refusal)| charge.can_refuse() && refusal.refuses(charge);
        let (_, refusing) = check.charges().zip(all()).find(refuses)?;
        let mut refusals = all();
        Some(Decision::new(check, refusing.at + refusing.age(now), refusing.id, |charge| {
            refusals.next().unwrap_or(&first).status(charge, now)
        }))
    }

    /// Remembers the store's decision on a check that was looked up before, if it is a refusal.
    pub(crate) fn learn(&self, lookup: &Lookup, decision: &Decision) {
        if !decision.is_allowed() {
            self.insert(lookup, decision, self.generations.clock.now());
        }
    }

    fn insert(&self, lookup: &Lookup, decision: &Decision, replied_at: u64) {
        let table = self.table.get_or_init(|| {
            let capacity = self.settings.capacity;
            Cache::with(capacity, capacity as u64, UnitWeighter, Default::default(), Default::default())
        });
        for (charge, status) in iter::once(&lookup.first).chain(&lookup.rest).zip(decision.statuses()) {
            // Without used units there is no reset time.
            let reset = (status.used() > 0).then_some(status.reset_after());
            let retry = status.waits().map(|(_, most)| most);
            let lifetime = reset.into_iter().chain(retry).fold(self.settings.max_age, Duration::min);
            let limit = status.limit();
            table.insert(
                charge.digest,
                Refusal {
                    units: limit.units(),
                    window: limit.window_micros(),
                    algorithm: limit.algorithm(),
                    generation: charge.generation,
                    asked_at: lookup.asked_at,
                    until: lookup.asked_at.saturating_add(micros(lifetime)),
                    replied_at,
                    at: decision.at(),
                    id: decision.id(),
                    cost: charge.cost,
                    used: status.used(),
                    reserved: status.reserved(),
                    reset: status.reset_after(),
                    waits: status.waits(),
                },
            );
        }
    }
}

impl Refusal {
    /// Whether it is of this very limit, and not outdated. A time before `asked_at` means that the clock has stepped back.
    fn holds_for(&self, charge: &Charge, lookup: &ChargeLookup, now: u64, reserved_for: Duration) -> bool {
        // A retry time is never late, so a cost that is at least as large is refused until the end.
        let slack = if self.has_refused(charge) { 0 } else { RESET_SLACK };
        let reserved_for = charge.limit().retry_reserved_after(reserved_for);
        let reserved_until =
            if self.reserved > 0 { self.asked_at.saturating_add(micros(reserved_for)) } else { u64::MAX };
        self.is_of(charge.limit())
            && self.generation == lookup.generation
            && (self.asked_at..self.until.saturating_sub(slack).min(reserved_until)).contains(&now)
    }

    fn is_of(&self, limit: &Limit) -> bool {
        (self.units, self.window, self.algorithm) == (limit.units(), limit.window_micros(), limit.algorithm())
    }

    /// Whether the limit has refused this cost or a lower one.
    fn has_refused(&self, charge: &Charge) -> bool {
        self.waits.is_some() && self.cost <= charge.cost()
    }

    /// Whether the limit refuses the charge: since then, units can only have been added.
    fn refuses(&self, charge: &Charge) -> bool {
        charge.cost() > self.units.saturating_sub(self.used)
    }

    fn age(&self, now: u64) -> Duration {
        Duration::from_micros(now.saturating_sub(self.replied_at))
    }

    fn status(&self, charge: &Charge, now: u64) -> LimitStatus {
        let left = |time: Duration| time.saturating_sub(self.age(now));
        let status = LimitStatus::new(charge, self.used, left(self.reset), None);
        let status = status.with_reserved(self.reserved, Duration::ZERO).refused_until_reset(charge);
        match self.waits.filter(|_| self.has_refused(charge)) {
            Some((least, most)) => status.not_before((left(least), left(most))),
            None => status,
        }
    }
}

impl fmt::Debug for Refusals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let remembered = self.table.get().map_or(0, Cache::len);
        f.debug_struct("RefusalCache").field("settings", &self.settings).field("refusals", &remembered).finish()
    }
}
