//! What is due for an admitted request once its cost is known: what it has reserved is settled, and what it has spent of
//! limits that count afterwards is counted.

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
    spent: Option<Spent>,
}

/// What is counted afterwards, and of which of the admission's charges it is.
struct Spent {
    check: Check,
    places: Vec<usize>,
}

impl Due {
    /// What is due, if anything is. `cost` says what a charge has cost by one of its limits, and of several the largest
    /// counts. `None` leaves the charge as it is.
    pub(super) fn of(
        check: &Check,
        origins: &[Origin],
        admitted: &Decision,
        cost: impl Fn(&Charge, &Origin) -> Option<u64>,
    ) -> Option<Self> {
        let (mut is_settled, mut spent) = (false, None::<Spent>);
        let mut costs = Vec::new();
        for ((index, charge), status) in check.charges().enumerate().zip(admitted.statuses()) {
            // Where the shadow would have refused, nothing is counted.
            let is_counted = status.retry_after().is_none() && charge.cost() > 0;
            let cost = || {
                let costs = origins.iter().filter(|origin| origin.charge == index).map(|origin| cost(charge, origin));
                costs.reduce(|one, other| Some(one?.max(other?))).flatten()
            };
            let of_lease = match charge.lease().filter(|_| is_counted) {
                Some(lease) => cost().inspect(|cost| {
                    // What is given back at the end of a lease has to be counted anew.
                    is_settled |= *cost != charge.cost() || lease < charge.limit().window();
                }),
                None => None,
            };
            costs.push(of_lease);
            if charge.takes_nothing()
                && is_counted
                && let Some(cost @ 1..) = cost()
            {
                // A share, if this process has decided in the store's place.
                let limit = status.limit().clone();
                Spent::add(&mut spent, charge.as_spent(limit, cost), index);
            }
        }
        let mut costs = costs.into_iter();
        let settlement = is_settled.then(|| Settlement::new(check.clone(), admitted, |_| costs.next().flatten()));
        let is_due = settlement.is_some() || spent.is_some();
        is_due.then(|| Self { admitted: admitted.clone(), settlement, spent })
    }

    /// Does what is due, and says how the limits stand then. One that fails leaves the other alone.
    pub(super) async fn settle<S: Store>(self, limiter: &Limiter<S>) -> Result<Decision, Error> {
        let Self { admitted, settlement, spent } = self;
        let is_local = admitted.local_cause().is_some();
        let settled = match settlement {
            Some(settlement) => limiter.settle(settlement).await.map(|settled| settled.decision().clone()),
            None => Ok(admitted),
        };
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
