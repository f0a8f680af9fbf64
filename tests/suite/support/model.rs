//! The rules of a decision, as plainly as they can be written: the oracle of every store.

use std::{collections::HashMap, time::Duration};

use tower_sliding_window::{Algorithm, Decision, Limit};

/// Everything that was ever admitted and has not been found expired.
#[derive(Debug, Default)]
pub(crate) struct Model {
    units: HashMap<Bucket, Vec<Unit>>,
    /// How many decisions there have been.
    decisions: usize,
}

#[derive(Clone, Debug)]
struct Unit {
    /// Until a window after this time it counts.
    at: u64,
    cost: u64,
    name: Name,
    decision: usize,
}

/// What tells an admission from others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Name {
    /// Nothing.
    None,
    Id(Option<u64>),
    /// The same, until it is settled.
    Held(Option<u64>),
}

/// Which limit, and which key: whatever numbers the test gives them.
type Bucket = (usize, usize);

#[derive(Clone, Debug)]
pub(crate) struct ModelCharge {
    pub(crate) limit: Limit,
    pub(crate) bucket: Bucket,
    pub(crate) cost: u64,
    /// Microseconds, at most the window.
    pub(crate) lease: Option<u64>,
    pub(crate) is_shadow: bool,
    /// Of a compact log: how long a sub-window is.
    part: Option<u64>,
}

/// How a charge stands after the decision, in microseconds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Standing {
    pub(crate) used: u64,
    pub(crate) reset: u64,
    pub(crate) retry: Option<u64>,
}

impl Standing {
    pub(crate) fn all_of(decision: &Decision) -> Vec<Self> {
        let micros = |duration: Duration| u64::try_from(duration.as_micros()).unwrap();
        decision
            .statuses()
            .map(|status| Self {
                used: status.used(),
                reset: micros(status.reset_after()),
                retry: status.retry_after().map(micros),
            })
            .collect()
    }
}

impl ModelCharge {
    pub(crate) fn new(limit: Limit, bucket: Bucket, cost: u64) -> Self {
        let mut entries = Algorithm::MIN_ENTRIES..=Algorithm::MAX_ENTRIES;
        let window = u64::try_from(limit.window().as_micros()).unwrap();
        let is_other = [Algorithm::log(), Algorithm::fixed(), Algorithm::counter()].contains(&limit.algorithm());
        let entries = if is_other { None } else { entries.find(|n| limit.algorithm() == Algorithm::compact(*n)) };
        let part = entries.map(|entries| window.div_ceil(u64::from(entries) - 2));
        Self { limit, bucket, cost, lease: None, is_shadow: false, part }
    }

    pub(crate) fn window(&self) -> u64 {
        u64::try_from(self.limit.window().as_micros()).unwrap()
    }

    fn is_counter(&self) -> bool {
        self.limit.algorithm() == Algorithm::counter()
    }

    fn is_log(&self) -> bool {
        self.limit.algorithm() == Algorithm::log()
    }

    /// The time under which an admission is remembered that has no id.
    fn recorded(&self, now: u64) -> u64 {
        match self.part {
            Some(part) => (now / part + 1) * part - 1,
            None if self.is_log() => now,
            None => now / self.window() * self.window(),
        }
    }

    /// The latest time under which anything can be remembered, unless the clock has stepped back.
    fn present(&self, unit: &Unit, now: u64) -> u64 {
        if self.is_counter() && unit.name != Name::None { now } else { self.recorded(now) }
    }

    /// The units that count at a time, out of those that are remembered `now`. What lies in the future counts as now.
    fn used(&self, units: &[Unit], now: u64, at: u64) -> u64 {
        let (window, mut used, mut current, mut previous) = (self.window(), 0, 0, 0);
        let start = at / window * window;
        for unit in units {
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
    pub(crate) fn decide(&mut self, now: u64, charges: &[ModelCharge], id: Option<u64>) -> Vec<Standing> {
        self.decisions += 1;
        charges.iter().filter(|charge| !charge.is_counter()).for_each(|charge| self.forget(now, charge));
        let retries: Vec<Option<u64>> = charges.iter().map(|charge| self.retry(now, charge, id)).collect();
        let is_admitted = charges.iter().zip(&retries).all(|(charge, retry)| charge.is_shadow || retry.is_none());
        for (charge, retry) in charges.iter().zip(&retries) {
            if is_admitted && retry.is_none() && charge.cost > 0 && !self.is_counted(now, charge, id) {
                self.admit(now, charge, id);
            }
            if retry.is_some() {
                self.pull_back(now, charge, |_| true);
            }
        }
        charges.iter().zip(retries).map(|(charge, retry)| self.standing(now, charge, retry)).collect()
    }

    /// The id of the last decision, if it was not given: as the store has told it.
    pub(crate) fn identify(&mut self, id: u64) {
        for unit in self.units.values_mut().flatten().filter(|unit| unit.decision == self.decisions) {
            match &mut unit.name {
                Name::Id(name @ None) | Name::Held(name @ None) => *name = Some(id),
                _ => {}
            }
        }
    }

    /// Sets what an admission has cost, and says whether it was known.
    pub(crate) fn settle(&mut self, now: u64, charge: &ModelCharge, (id, at): (u64, u64), cost: u64) -> bool {
        if !charge.is_counter() || self.find(now, charge, (id, at)).is_some() {
            self.forget(now, charge);
        }
        let Some(place) = self.find(now, charge, (id, at)) else { return false };
        let mut unit = self.units_of(charge).remove(place);
        if charge.lease.is_some() {
            unit.at = at.min(now);
        }
        if charge.is_counter() {
            unit.at = unit.at.min(now);
        }
        (unit.at, unit.name) = (if charge.is_log() { unit.at } else { charge.recorded(unit.at) }, Name::None);
        if cost > 0 {
            self.units_of(charge).push(Unit { cost, ..unit });
        }
        true
    }

    /// Whether an admission that is known to an exact log is remembered under another time than it was admitted at.
    pub(crate) fn has_moved(&self, now: u64, charge: &ModelCharge, (id, at): (u64, u64)) -> bool {
        charge.is_log()
            && charge.lease.is_none()
            && self.find(now, charge, (id, at)).is_some_and(|place| self.of(charge)[place].at != at)
    }

    pub(crate) fn reset(&mut self, bucket: Bucket) {
        self.units.remove(&bucket);
    }

    pub(crate) fn standing(&self, now: u64, charge: &ModelCharge, retry: Option<u64>) -> Standing {
        let used = charge.used(self.of(charge), now, now);
        let live = self.of(charge).iter().filter(|unit| unit.at + charge.window() > now);
        let reset = match live.map(|unit| unit.at.min(charge.present(unit, now))).min() {
            Some(oldest) if !charge.is_counter() => oldest + charge.window() - now,
            _ if used == 0 => 0,
            _ => self.first_fit(now, charge, used - 1),
        };
        Standing { used, reset, retry }
    }

    fn admit(&mut self, now: u64, charge: &ModelCharge, id: Option<u64>) {
        let (name, at) = Self::recorded(now, charge, id);
        if charge.is_counter() {
            self.forget(now, charge);
            if name == Name::None {
                self.pull_back(now, charge, |unit| unit.name == Name::None);
            }
        }
        let unit = Unit { at, cost: charge.cost, name, decision: self.decisions };
        self.units_of(charge).push(unit);
    }

    /// Under which name and time an admission is remembered.
    fn recorded(now: u64, charge: &ModelCharge, id: Option<u64>) -> (Name, u64) {
        match charge.lease {
            Some(lease) => {
                let held = now + lease - charge.window();
                (Name::Held(id), if charge.is_counter() { held } else { held.min(charge.recorded(now)) })
            }
            None if charge.is_log() => (Name::Id(id), now),
            None if id.is_some() => (Name::Id(id), if charge.is_counter() { now } else { charge.recorded(now) }),
            None => (Name::None, charge.recorded(now)),
        }
    }

    /// Drops what has left the window. Of a counter that is not done before there is something to write.
    fn forget(&mut self, now: u64, charge: &ModelCharge) {
        let window = charge.window();
        self.units_of(charge).retain(|unit| {
            let lasts = if charge.is_counter() && unit.name == Name::None { 2 * window } else { window };
            unit.at + lasts > now
        });
    }

    /// An admission under this id, at this time or, if the clock has stepped back since, before it.
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
        id.is_some() && self.of(charge).iter().any(|unit| is_it(unit) && unit.cost == charge.cost && is_live(unit))
    }

    /// The time until the charge passes, if nothing else arrives.
    fn retry(&self, now: u64, charge: &ModelCharge, id: Option<u64>) -> Option<u64> {
        let most = charge.limit.units() - charge.cost;
        let fits =
            charge.cost == 0 || self.is_counted(now, charge, id) || charge.used(self.of(charge), now, now) <= most;
        (!fits).then(|| self.first_fit(now, charge, most))
    }

    /// The smallest `d` such that at most so many units are used at `now + d`: what is used never rises by itself.
    fn first_fit(&self, now: u64, charge: &ModelCharge, most: u64) -> u64 {
        let (mut too_short, mut enough) = (0, 3 * charge.window());
        while enough - too_short > 1 {
            let middle = too_short.midpoint(enough);
            if charge.used(self.of(charge), now, now + middle) <= most {
                enough = middle;
            } else {
                too_short = middle;
            }
        }
        enough
    }

    /// What lies in the future counts as having happened now from here on.
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
