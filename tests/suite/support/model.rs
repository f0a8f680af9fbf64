//! The rules of a decision, as plainly as they can be written: the oracle of every store.

use std::time::Duration;

use tower_sliding_window::{Decision, Limit};

/// Everything that was ever admitted and has not been found expired.
#[derive(Debug, Default)]
pub(crate) struct Model {
    units: Vec<Unit>,
}

#[derive(Debug)]
struct Unit {
    bucket: Bucket,
    at: u64,
    cost: u64,
    id: Option<u64>,
}

/// Which limit, and which key: whatever numbers the test gives them.
type Bucket = (usize, usize);

#[derive(Clone, Debug)]
pub(crate) struct ModelCharge {
    pub(crate) limit: Limit,
    pub(crate) bucket: Bucket,
    pub(crate) cost: u64,
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

impl Model {
    pub(crate) fn decide(&mut self, now: u64, charges: &[ModelCharge], id: Option<u64>) -> Vec<Standing> {
        for charge in charges {
            let window = window(charge);
            self.units.retain(|unit| unit.bucket != charge.bucket || unit.at + window > now);
        }
        let retries: Vec<Option<u64>> = charges.iter().map(|charge| self.retry(now, charge, id)).collect();
        let is_admitted = retries.iter().all(Option::is_none);
        for (charge, retry) in charges.iter().zip(&retries) {
            if is_admitted && charge.cost > 0 && !self.is_counted(charge, id) {
                self.units.push(Unit { bucket: charge.bucket, at: now, cost: charge.cost, id });
            }
            if retry.is_some() {
                self.pull_back(now, charge);
            }
        }
        charges.iter().zip(retries).map(|(charge, retry)| self.standing(now, charge, retry)).collect()
    }

    pub(crate) fn reset(&mut self, bucket: Bucket) {
        self.units.retain(|unit| unit.bucket != bucket);
    }

    fn is_counted(&self, charge: &ModelCharge, id: Option<u64>) -> bool {
        id.is_some() && self.of(charge).any(|unit| unit.id == id && unit.cost == charge.cost)
    }

    /// The first of all moments at which enough is gone, if nothing else arrives. What lies in the future counts as now.
    fn retry(&self, now: u64, charge: &ModelCharge, id: Option<u64>) -> Option<u64> {
        let fits = |wait: u64| {
            let left = self.of(charge).filter(|unit| unit.at.min(now) + window(charge) > now + wait);
            left.map(|unit| unit.cost).sum::<u64>() + charge.cost <= charge.limit.units()
        };
        if charge.cost == 0 || self.is_counted(charge, id) || fits(0) {
            return None;
        }
        self.of(charge).map(|unit| unit.at.min(now) + window(charge) - now).filter(|wait| fits(*wait)).min()
    }

    /// Where a charge refuses, what lies in the future counts as having happened now from here on.
    fn pull_back(&mut self, now: u64, charge: &ModelCharge) {
        for unit in self.units.iter_mut().filter(|unit| unit.bucket == charge.bucket) {
            unit.at = unit.at.min(now);
        }
    }

    fn standing(&self, now: u64, charge: &ModelCharge, retry: Option<u64>) -> Standing {
        let used = self.of(charge).map(|unit| unit.cost).sum();
        let oldest = self.of(charge).map(|unit| unit.at.min(now)).min();
        Standing { used, reset: oldest.map_or(0, |at| at + window(charge) - now), retry }
    }

    fn of<'a>(&'a self, charge: &'a ModelCharge) -> impl Iterator<Item = &'a Unit> {
        self.units.iter().filter(|unit| unit.bucket == charge.bucket)
    }
}

fn window(charge: &ModelCharge) -> u64 {
    u64::try_from(charge.limit.window().as_micros()).unwrap()
}
