//! The settlements of an admitted request once its costs are known, and the counts of limits that count afterwards.

use std::time::Duration;

use super::super::request::ChargedLimit;
use crate::{
    check::{Charge, Check},
    decision::Decision,
    error::Error,
    limiter::Limiter,
    settlement::Settlement,
};

pub(super) struct Settlements {
    admitted: Decision,
    /// One as of the admission, and one as of the response for limits that heed the upstream.
    settlements: Vec<Settlement>,
    /// The units to count afterwards, each with the index of the admitted charge.
    spent: Vec<(usize, Charge)>,
}

/// The cost of a reserved charge, and how much later than its admission it counts.
#[derive(Default)]
struct SettledCost {
    units: Option<u64>,
    delay: Option<Duration>,
}

/// The precision of stores.
const MICRO: Duration = Duration::from_micros(1);

impl Settlements {
    /// `cost` computes the cost of a charge by one of its limits. The largest of them counts. `None` leaves the charge
    /// as it is. `delay` computes how much later than its admission it counts.
    pub(super) fn new(
        check: &Check,
        charged: &[ChargedLimit],
        admitted: &Decision,
        cost: impl Fn(&Charge, &ChargedLimit) -> Option<u64>,
        delay: impl Fn(&Charge, &ChargedLimit) -> Option<Duration>,
    ) -> Option<Self> {
        let (mut costs, mut spent) = (Vec::new(), Vec::new());
        for ((index, charge), status) in check.charges().enumerate().zip(admitted.statuses()) {
            costs.push(SettledCost::default());
            // A limit in the shadow that would have refused has counted nothing.
            if status.retry_after().is_some() || charge.cost() == 0 {
                continue;
            }
            let limits = || charged.iter().filter(|charged| charged.charge_index == index);
            let units =
                || limits().map(|limit| cost(charge, limit)).reduce(|one, other| Some(one?.max(other?))).flatten();
            if let Some(lease) = charge.lease() {
                let longest = limits().filter_map(|limit| delay(charge, limit)).max();
                // Shorter than the lease, so that the store still sees whether the lease has ended.
                let delay = longest.map(|delay| delay.min(lease.saturating_sub(MICRO)));
                costs[index] = SettledCost { units: units(), delay };
            } else if charge.takes_nothing()
                && let Some(units @ 1..) = units()
            {
                // The status has the share of the limit if this process has decided.
                spent.push((index, charge.as_spent(status.limit().clone(), units)));
            }
        }
        // Also if the cost is the charge: until it is settled, others are told that its units may be given back.
        let settlement = |is_delayed: bool| {
            let mut costs = costs.iter();
            let cost = |_: &Charge| costs.next().filter(|cost| cost.delay.is_some() == is_delayed)?.units;
            Settlement::new(check.clone(), admitted, cost)
        };
        let at_admission = costs.iter().any(|cost| cost.delay.is_none() && cost.units.is_some());
        let at_admission = at_admission.then(|| settlement(false));
        let delay = costs.iter().filter_map(|cost| cost.delay).min();
        let at_response = delay.map(|delay| settlement(true).counting_later_by(delay));
        let settlements: Vec<_> = at_admission.into_iter().chain(at_response).collect();
        let is_any = !settlements.is_empty() || !spent.is_empty();
        is_any.then(|| Self { admitted: admitted.clone(), settlements, spent })
    }

    /// Whether a charge gets units back.
    pub(super) fn gives_back(&self, charge_index: usize) -> bool {
        let accounts = self.settlements.iter().filter_map(|settlement| settlement.accounts().nth(charge_index));
        accounts.into_iter().any(|(charge, cost)| cost.is_some_and(|cost| cost < charge.cost()))
    }

    /// Sends them, and returns the decision with the statuses after them. One that fails does not stop the others.
    pub(super) async fn apply(self, limiter: &Limiter) -> Result<Decision, Error> {
        let Self { admitted, settlements, spent } = self;
        let is_local = admitted.local_cause().is_some();
        let mut settled = Ok(admitted);
        for settlement in settlements {
            let outcome = limiter.settle(settlement).await.map(|settled| settled.decision().clone());
            settled = settled.and(outcome);
        }
        let (indexes, charges): (Vec<_>, Vec<_>) = spent.into_iter().unzip();
        let mut charges = charges.into_iter();
        let Some(first) = charges.next() else { return settled };
        let mut check = Check::new(first);
        charges.for_each(|charge| check.add_distinct(charge));
        let counted = limiter.count(check, is_local).await?;
        settled.map(|decision| decision.with_statuses_of(&counted, &indexes))
    }
}
