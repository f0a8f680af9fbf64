//! The rules of a decision, written as plainly as possible. Every store must decide like this
//! model.

mod status;

use std::{borrow::Borrow, collections::HashMap};

use tower_sliding_window::{Algorithm, Limit};

use self::status::Refusal;
pub(crate) use self::status::{Expected, ModelStatus};

/// All admissions that have not expired.
#[derive(Debug)]
pub(crate) struct Model {
    units: HashMap<Bucket, Vec<Unit>>,
    /// The most entries that the store reads for a retry time.
    looked_at: usize,
    /// The number of decisions so far.
    decisions: usize,
}

#[derive(Clone, Debug)]
struct Unit {
    /// The unit counts for one window after this time.
    at: u64,
    cost: u64,
    name: Name,
    decision: usize,
}

/// The identity of an admission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Name {
    /// It has no identity.
    None,
    Id(Option<u64>),
    /// A reservation with this id, until it is settled.
    Held(Option<u64>),
    /// The settled admission of this id.
    Settled(u64),
}

/// The units that a charge takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Takes {
    WhatFits,
    Nothing,
    WhatWasSpent,
}

/// The time, in microseconds, after which a check that only reservations refuse is to be retried.
pub(crate) const RETRY_RESERVED_AFTER: u64 = 1_000_000;

/// Under every algorithm but the log, a key has at most so many entries with their own id.
const MOST_NAMED: usize = 10_000;

/// The numbers that the test gives to a limit and a key.
type Bucket = (usize, usize);

#[derive(Clone, Debug)]
pub(crate) struct ModelCharge {
    pub(crate) limit: Limit,
    pub(crate) bucket: Bucket,
    pub(crate) cost: u64,
    /// In microseconds, and at most the window.
    pub(crate) lease: Option<u64>,
    pub(crate) is_shadow: bool,
    pub(crate) takes: Takes,
    /// The length of a sub-window of a compact log.
    part: Option<u64>,
}

impl ModelCharge {
    pub(crate) fn new(limit: Limit, bucket: Bucket, cost: u64) -> Self {
        let mut entries = Algorithm::MIN_ENTRIES..=Algorithm::MAX_ENTRIES;
        let window = u64::try_from(limit.window().as_micros()).unwrap();
        let is_other = [Algorithm::sliding_log(), Algorithm::fixed_window(), Algorithm::sliding_window_counter()]
            .contains(&limit.algorithm());
        let entries = if is_other { None } else { entries.find(|n| limit.algorithm() == Algorithm::compact_log(*n)) };
        let part = entries.map(|entries| window.div_ceil(u64::from(entries) - 2));
        Self { limit, bucket, cost, lease: None, is_shadow: false, takes: Takes::WhatFits, part }
    }

    pub(crate) fn window(&self) -> u64 {
        u64::try_from(self.limit.window().as_micros()).unwrap()
    }

    fn is_counter(&self) -> bool {
        self.limit.algorithm() == Algorithm::sliding_window_counter()
    }

    fn is_log(&self) -> bool {
        self.limit.algorithm() == Algorithm::sliding_log()
    }

    /// The recorded time of an admission without an id.
    fn recorded(&self, now: u64) -> u64 {
        match self.part {
            Some(part) => (now / part + 1) * part - 1,
            None if self.is_log() => now,
            None => now / self.window() * self.window(),
        }
    }

    /// The recorded time of an admission with an id, unless it is reserved.
    fn named_at(&self, now: u64) -> u64 {
        if self.is_counter() { now } else { self.recorded(now) }
    }

    /// The latest time that can be recorded, unless the clock has stepped back.
    fn present(&self, unit: &Unit, now: u64) -> u64 {
        if self.is_counter() && unit.name != Name::None { now } else { self.recorded(now) }
    }

    /// The units used at a time, out of those that are stored `now`. Units in the future count from
    /// now.
    fn used(&self, units: impl IntoIterator<Item = impl Borrow<Unit>>, now: u64, at: u64) -> u64 {
        let (window, mut used, mut current, mut previous) = (self.window(), 0, 0, 0);
        let start = at / window * window;
        for unit in units {
            let unit = unit.borrow();
            let time = unit.at.min(self.present(unit, now));
            if !self.is_counter() || unit.name != Name::None {
                used += if time + window > at { unit.cost } else { 0 };
            } else if time >= start {
                current += unit.cost;
            } else if time + window >= start {
                previous += unit.cost;
            }
        }
        let overlap = (start + window - at) as f64;
        used + current + (previous as f64 * overlap / window as f64).ceil() as u64
    }
}

impl Model {
    /// The in-process store, whose retry times are always exact.
    pub(crate) fn of_memory() -> Self {
        Self::looking_at(usize::MAX)
    }

    /// The store on Redis, which reads 100 entries for a retry time.
    pub(crate) fn of_redis() -> Self {
        Self::looking_at(100)
    }

    fn looking_at(entries: usize) -> Self {
        Self { units: HashMap::new(), looked_at: entries, decisions: 0 }
    }

    pub(crate) fn decide(&mut self, now: u64, charges: &[ModelCharge], id: Option<u64>) -> Vec<Expected> {
        self.decisions += 1;
        charges.iter().for_each(|charge| self.forget(now, charge));
        // A check is admitted whole.
        let is_known = charges.iter().any(|charge| self.is_counted(now, charge, id));
        let retry = |charge| if is_known { None } else { self.retry(now, charge) };
        let retries: Vec<Option<Refusal>> = charges.iter().map(retry).collect();
        let is_admitted = charges.iter().zip(&retries).all(|(charge, retry)| charge.is_shadow || retry.is_none());
        for (charge, retry) in charges.iter().zip(&retries) {
            let takes_units = charge.cost > 0 && charge.takes != Takes::Nothing;
            if is_admitted && retry.is_none() && takes_units && !is_known {
                self.admit(now, charge, id);
            }
            if retry.is_some() {
                self.pull_back(now, charge, |_| true);
            }
        }
        let expected = |(charge, retry)| Expected {
            exact: self.status(now, charge, retry),
            not_before: retry.and_then(|refusal| self.not_before(now, charge, refusal)),
        };
        charges.iter().zip(retries).map(expected).collect()
    }

    /// Sets the id that the store has generated for the last decision.
    pub(crate) fn identify(&mut self, id: u64) {
        for unit in self.units.values_mut().flatten().filter(|unit| unit.decision == self.decisions) {
            if let Name::Id(name @ None) | Name::Held(name @ None) = &mut unit.name {
                *name = Some(id);
            }
        }
    }

    /// Sets the cost of an admission, and returns whether it was known.
    pub(crate) fn settle(&mut self, now: u64, charge: &ModelCharge, (id, at): (u64, u64), cost: u64) -> bool {
        self.forget(now, charge);
        let Some(place) = self.find(now, charge, (id, at)) else {
            return self.settle_late(now, charge, (id, at), cost);
        };
        let mut unit = self.units_of(charge).remove(place);
        if charge.lease.is_some() {
            unit.at = at.min(now);
        }
        if charge.is_counter() {
            unit.at = unit.at.min(now);
        }
        if charge.is_log() {
            unit.name = Name::Settled(id);
        } else {
            (unit.at, unit.name) = (charge.recorded(unit.at), Name::None);
        }
        if cost > 0 {
            self.bring_counts_up(now, charge);
            self.units_of(charge).push(Unit { cost, ..unit });
        }
        if charge.is_counter() && charge.used(self.of(charge), now, now) == 0 {
            // Expired counts are not kept alone.
            self.reset(charge.bucket);
        }
        true
    }

    /// Counts the cost of a reservation whose lease has ended, if its admission would still count
    /// and was not settled before.
    fn settle_late(&mut self, now: u64, charge: &ModelCharge, (id, at): (u64, u64), cost: u64) -> bool {
        let Some(lease) = charge.lease.filter(|lease| *lease < charge.window()) else { return false };
        let time = charge.named_at(at);
        let is_settled = self.of(charge).iter().any(|unit| unit.name == Name::Settled(id) && unit.at == time);
        // A fixed window may have ended earlier.
        let would_count = now < at.min(time) + charge.window();
        if is_settled || now < at + lease || !would_count || cost == 0 {
            return false;
        }
        let (name, at) =
            if self.names(now, charge) { (Name::Settled(id), time) } else { (Name::None, charge.recorded(at)) };
        let unit = Unit { at, cost, name, decision: self.decisions };
        self.units_of(charge).push(unit);
        true
    }

    /// Whether one more entry may have its own id.
    fn names(&self, now: u64, charge: &ModelCharge) -> bool {
        let is_named = |unit: &&Unit| unit.name != Name::None && unit.at + charge.window() > now;
        charge.is_log() || self.of(charge).iter().filter(is_named).count() < MOST_NAMED
    }

    pub(crate) fn reset(&mut self, bucket: Bucket) {
        self.units.remove(&bucket);
    }

    /// The status of a limit that has not refused.
    pub(crate) fn unrefused(&self, now: u64, charge: &ModelCharge) -> ModelStatus {
        self.status(now, charge, None)
    }

    fn status(&self, now: u64, charge: &ModelCharge, refusal: Option<Refusal>) -> ModelStatus {
        let used = charge.used(self.of(charge), now, now);
        let live = || self.of(charge).iter().filter(|unit| unit.at + charge.window() > now);
        // Units in the future stay there until a check is refused.
        let used_at = |at| charge.used(self.of(charge), at, at);
        let reset = match live().map(|unit| unit.at).min() {
            Some(oldest) if !charge.is_counter() => oldest + charge.window() - now,
            _ if used == 0 => 0,
            _ => self.first_fit(now, charge, used - 1, used_at),
        };
        let reserved = live().filter(|unit| matches!(unit.name, Name::Held(_))).map(|unit| unit.cost).sum();
        let by_reservations = reserved > 0 && refusal.is_some_and(|refusal| refusal.sure == 0);
        ModelStatus { used, reserved, reset, retry: refusal.map(Refusal::retry_time), by_reservations }
    }

    fn admit(&mut self, now: u64, charge: &ModelCharge, id: Option<u64>) {
        let (name, at) =
            if self.names(now, charge) { Self::recorded(now, charge, id) } else { (Name::None, charge.recorded(now)) };
        if name == Name::None {
            self.bring_counts_up(now, charge);
        }
        let unit = Unit { at, cost: charge.cost, name, decision: self.decisions };
        self.units_of(charge).push(unit);
    }

    /// The name and time that an admission is recorded under.
    fn recorded(now: u64, charge: &ModelCharge, id: Option<u64>) -> (Name, u64) {
        match charge.lease {
            Some(lease) => {
                let held = now + lease - charge.window();
                (Name::Held(id), if charge.is_counter() { held } else { held.min(charge.recorded(now)) })
            }
            None if charge.is_log() => (Name::Id(id), now),
            None if id.is_some() => (Name::Id(id), charge.named_at(now)),
            None => (Name::None, charge.recorded(now)),
        }
    }

    /// Drops expired units. The counts of a counter stay until they are next written.
    fn forget(&mut self, now: u64, charge: &ModelCharge) {
        let (window, keeps_counts) = (charge.window(), charge.is_counter());
        self.units_of(charge).retain(|unit| keeps_counts && unit.name == Name::None || unit.at + window > now);
    }

    /// Runs before the counts of a counter are written: drops those of windows before the last, and
    /// moves future ones to now.
    fn bring_counts_up(&mut self, now: u64, charge: &ModelCharge) {
        if charge.is_counter() {
            let window = charge.window();
            self.units_of(charge).retain(|unit| unit.name != Name::None || unit.at + 2 * window > now);
            self.pull_back(now, charge, |unit| unit.name == Name::None);
        }
    }

    /// Finds an admission with this id and time, or with an earlier time if the clock has stepped
    /// back since.
    fn find(&self, now: u64, charge: &ModelCharge, (id, at): (u64, u64)) -> Option<usize> {
        let latest = Self::recorded(at, charge, Some(id)).1;
        let name = if charge.lease.is_some() { Name::Held(Some(id)) } else { Name::Id(Some(id)) };
        self.of(charge).iter().position(|unit| {
            let is_live = unit.at + charge.window() > now && unit.at <= latest;
            unit.name == name && unit.cost == charge.cost && is_live
        })
    }

    fn is_counted(&self, now: u64, charge: &ModelCharge, id: Option<u64>) -> bool {
        let is_it = |unit: &Unit| matches!(unit.name, Name::Id(name) | Name::Held(name) if name == id);
        let is_live = |unit: &Unit| unit.at + charge.window() > now;
        let is_counted = |unit: &Unit| is_it(unit) && unit.cost == charge.cost && is_live(unit);
        id.is_some() && charge.takes != Takes::Nothing && self.of(charge).iter().any(is_counted)
    }

    /// The time until the charge is admitted, if no other check arrives.
    fn retry(&self, now: u64, charge: &ModelCharge) -> Option<Refusal> {
        if charge.cost == 0 || charge.takes == Takes::WhatWasSpent {
            return None;
        }
        let most = charge.limit.units().checked_sub(charge.cost).unwrap();
        if charge.used(self.of(charge), now, now) <= most {
            return None;
        }
        let is_settled = |unit: &&Unit| !matches!(unit.name, Name::Held(_));
        let settled_at = |at| charge.used(self.of(charge).iter().filter(is_settled), now, at);
        let sure = if settled_at(now) <= most { 0 } else { self.first_fit(now, charge, most, settled_at) };
        let longest = self.first_fit(now, charge, most, |at| charge.used(self.of(charge), now, at));
        Some(Refusal { sure, longest })
    }

    /// The smallest `d` such that at most so many units are used at `now + d`. Use never rises by
    /// itself.
    fn first_fit(&self, now: u64, charge: &ModelCharge, most: u64, used_at: impl Fn(u64) -> u64) -> u64 {
        let ahead = self.of(charge).iter().map(|unit| unit.at.saturating_sub(now)).max().unwrap_or(0);
        let (mut too_short, mut enough) = (0, 3 * charge.window() + ahead);
        while enough - too_short > 1 {
            let middle = too_short.midpoint(enough);
            if used_at(now + middle) <= most {
                enough = middle;
            } else {
                too_short = middle;
            }
        }
        enough
    }

    /// The retry time by the entries that the store reads, if the last of them leaves before the
    /// charge is admitted.
    fn not_before(&self, now: u64, charge: &ModelCharge, refusal: Refusal) -> Option<u64> {
        let is_entry = |unit: &&Unit| !charge.is_counter() || unit.name != Name::None;
        let leaves = |unit: &Unit| unit.at.min(charge.present(unit, now)) + charge.window();
        let mut departures: Vec<u64> =
            self.of(charge).iter().filter(is_entry).map(leaves).filter(|leaves| *leaves > now).collect();
        departures.sort_unstable();
        let last = departures.get(self.looked_at.checked_sub(1)?)? - now;
        let seen = Refusal { sure: refusal.sure.min(last), longest: refusal.longest.min(last) };
        (seen.retry_time() < refusal.retry_time()).then_some(seen.retry_time())
    }

    /// Moves units in the future to now.
    fn pull_back(&mut self, now: u64, charge: &ModelCharge, which: impl Fn(&Unit) -> bool) {
        for unit in self.units_of(charge).iter_mut().filter(|unit| which(unit)) {
            unit.at = unit.at.min(charge.present(unit, now));
        }
    }

    fn of(&self, charge: &ModelCharge) -> &[Unit] {
        self.units.get(&charge.bucket).map_or(&[], Vec::as_slice)
    }

    fn units_of(&mut self, charge: &ModelCharge) -> &mut Vec<Unit> {
        self.units.entry(charge.bucket).or_default()
    }
}
