//! What is due for an admitted request once its cost is known: what it has reserved is settled, and what it has spent of
//! limits that count afterwards is counted.

use std::time::Duration;

use super::claim::Origin;
use crate::{
    check::{Charge, Check},
    decision::Decision,
    error::Error,
    limiter::Limiter,
    settlement::Settlement,
    store::Store,
};

/// What is due for an admitted request.
pub(super) struct Due {
    admitted: Decision,
    settlement: Option<Settlement>,
    /// What counts as of later than the admission.
    later: Option<Settlement>,
    spent: Option<Spent>,
}

/// What is counted afterwards, and of which of the admission's charges it is.
struct Spent {
    check: Check,
    places: Vec<usize>,
}

/// What a charge that is reserved has cost, and how much later it counts.
#[derive(Clone, Copy, Default)]
struct Cost {
    units: Option<u64>,
    delay: Option<Duration>,
}

/// As exactly as stores count time.
const MICRO: Duration = Duration::from_micros(1);

impl Due {
    /// What is due, if anything is. `cost` says what a charge has cost by one of its limits, and of several the largest
    /// counts. `None` leaves the charge as it is. `delay` says how much later than its admission it counts by one of its
    /// limits, if it does.
    pub(super) fn of(
        check: &Check,
        origins: &[Origin],
        admitted: &Decision,
        cost: impl Fn(&Charge, &Origin) -> Option<u64>,
        delay: impl Fn(&Charge, &Origin) -> Option<Duration>,
    ) -> Option<Self> {
        let (mut is_settled, mut spent) = (false, None::<Spent>);
        let mut costs = Vec::new();
        for ((index, charge), status) in check.charges().enumerate().zip(admitted.statuses()) {
            costs.push(Cost::default());
            // Where the shadow would have refused, nothing is counted.
            if status.retry_after().is_some() || charge.cost() == 0 {
                continue;
            }
            let of_limits = || origins.iter().filter(|origin| origin.charge == index);
            let units =
                || of_limits().map(|origin| cost(charge, origin)).reduce(|one, other| Some(one?.max(other?))).flatten();
            if let Some(lease) = charge.lease() {
                let longest = of_limits().filter_map(|origin| delay(charge, origin)).max();
                // Within the lease, so that one that is over is still seen to be.
                let delay = longest.map(|delay| delay.min(lease.saturating_sub(MICRO)));
                let units = units();
                costs[index] = Cost { units, delay };
                // Also where the cost is the charge: others would be told that it may be given back.
                is_settled |= delay.is_none() && units.is_some();
            } else if charge.takes_nothing()
                && let Some(units @ 1..) = units()
            {
                // A share, if this process has decided in the store's place.
                let limit = status.limit().clone();
                Spent::add(&mut spent, charge.as_spent(limit, units), index);
            }
        }
        let settlement_of = |is_meant: &dyn Fn(&Cost) -> bool| {
            let mut costs = costs.iter();
            Settlement::new(check.clone(), admitted, |_| costs.next().filter(|cost| is_meant(cost))?.units)
        };
        let settlement = is_settled.then(|| settlement_of(&|cost| cost.delay.is_none()));
        let delay = costs.iter().filter_map(|cost| cost.delay).min();
        let later = delay.map(|delay| settlement_of(&|cost| cost.delay.is_some()).counting_later_by(delay));
        let is_due = settlement.is_some() || later.is_some() || spent.is_some();
        is_due.then(|| Self { admitted: admitted.clone(), settlement, later, spent })
    }

    /// Whether units of this charge are given back.
    pub(super) fn gives_back(&self, index: usize) -> bool {
        let accounts = [&self.settlement, &self.later].into_iter().flatten();
        accounts
            .filter_map(|settlement| settlement.accounts().nth(index))
            .any(|account| account.cost().is_some_and(|cost| cost < account.charge().cost()))
    }

    /// Does what is due, and says how the limits stand then. One that fails leaves the others alone.
    pub(super) async fn settle<S: Store>(self, limiter: &Limiter<S>) -> Result<Decision, Error> {
        let Self { admitted, settlement, later, spent } = self;
        let is_local = admitted.local_cause().is_some();
        let mut settled = Ok(admitted);
        for settlement in [settlement, later].into_iter().flatten() {
            let outcome = limiter.settle(settlement).await.map(|settled| settled.decision().clone());
            settled = settled.and(outcome);
        }
        match spent {
            Some(Spent { check, places }) => {
                let counted = limiter.count(check, is_local).await?;
                settled.map(|decision| decision.with_statuses_of(&counted, &places))
            }
            None => settled,
        }
    }
}

impl Spent {
    fn add(spent: &mut Option<Self>, charge: Charge, place: usize) {
        match spent {
            Some(Self { check, places }) => {
                check.add_distinct(charge);
                places.push(place);
            }
            None => *spent = Some(Self { check: Check::new(charge), places: vec![place] }),
        }
    }
}
