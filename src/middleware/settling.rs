//! What an admission is settled at.

use super::claim::Origin;
use crate::{
    check::{Charge, Check},
    decision::Decision,
    settlement::Settlement,
};

/// Settles what is reserved, if there is something to settle: it has cost something else, or would be given back. `cost`
/// says what a charge has cost by one of its limits, and of several the largest counts. `None` leaves the charge as it is.
pub(super) fn settlement(
    check: &Check,
    origins: &[Origin],
    decision: &Decision,
    cost: impl Fn(&Charge, &Origin) -> Option<u64>,
) -> Option<Settlement> {
    let mut is_due = false;
    let costs: Vec<Option<u64>> = check
        .charges()
        .zip(decision.statuses())
        .enumerate()
        .map(|(index, (charge, status))| {
            let lease = charge.lease()?;
            // Where the shadow would have refused, nothing is counted.
            if charge.cost() == 0 || status.retry_after().is_some() {
                return None;
            }
            let costs = origins.iter().filter(|origin| origin.charge == index).map(|origin| cost(charge, origin));
            let cost = costs.reduce(|one, other| Some(one?.max(other?)))??;
            is_due |= cost != charge.cost() || lease < charge.limit().window();
            Some(cost)
        })
        .collect();
    let mut costs = costs.into_iter();
    is_due.then(|| Settlement::new(check.clone(), decision, |_| costs.next().flatten()))
}
