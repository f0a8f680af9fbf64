//! Checks whose keys are in several slots of a cluster, which no script can decide in one step.
//!
//! 1. The store asks the slots one after the other, always in the same order. Each decides its own charges, all or nothing. The
//!    check is admitted when the last slot has admitted it. Before that, it may hold units for which others are refused.
//! 2. If a slot refuses, those before it get back exactly the units that they have counted. Those after it are asked only for
//!    their statuses. They report when their next unit leaves, which may be too early for the check.
//! 3. Each slot counts its charges under the id of the check, so that they can be given back and settled. If the id is the
//!    caller's own, nothing is given back: the units may be of an earlier try, and wait for the next.
//! 4. No limit ever admits too much. If a node stays away for longer than the store tries to give units back, they
//!    stay taken until they leave the window.
//! 5. A task decides the check, so a caller that stops waiting leaves no check half taken.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    sync::Arc,
    time::{Duration, SystemTime},
};

use tokio::sync::oneshot::{self, Sender};

use super::dispatcher::{Dispatcher, Pending};
use crate::{
    admission::AdmissionId,
    check::Check,
    decision::{Decision, LimitStatus},
    error::StoreError,
    settlement::{Settled, Settlement},
    store::{give_back, redis::keys::Keys, refund_by_id},
};

/// Sends a check: slot by slot, if it has several.
pub(crate) fn decide(dispatcher: &Arc<Dispatcher>, check: Check) -> Result<Pending<Decision>, StoreError> {
    let id = check.id().unwrap_or_else(AdmissionId::fresh);
    let Some(subchecks) = subchecks(dispatcher.keys(), &check, id) else { return dispatcher.decide(check) };
    let (caller, result) = oneshot::channel();
    dispatcher.runtime().spawn(decide_each(Arc::clone(dispatcher), check, id, subchecks, caller));
    Ok(Pending::from_task(result))
}

/// Sends a settlement: slot by slot, if it has several.
pub(crate) fn settle(dispatcher: &Arc<Dispatcher>, settlement: Settlement) -> Result<Pending<Settled>, StoreError> {
    let Some(subchecks) = subchecks(dispatcher.keys(), settlement.check(), settlement.id()) else {
        return dispatcher.settle(settlement);
    };
    let (caller, result) = oneshot::channel();
    let settled = settle_each(Arc::clone(dispatcher), settlement, subchecks);
    dispatcher.runtime().spawn(async { drop(caller.send(settled.await)) });
    Ok(Pending::from_task(result))
}

/// The charges of a check that are in one slot, and their indices in the whole check.
struct Subcheck {
    check: Check,
    indices: Vec<usize>,
}

/// One check for each slot, or `None` if there is only one slot.
fn subchecks(keys: &Keys, check: &Check, id: AdmissionId) -> Option<Vec<Subcheck>> {
    let first = check.charges().next()?.key();
    if check.charges().all(|charge| charge.key() == first) {
        return None;
    }
    let mut slots = BTreeMap::<u16, Subcheck>::new();
    for (index, charge) in check.charges().enumerate() {
        match slots.entry(keys.hash_slot(charge.key())) {
            Entry::Vacant(slot) => {
                slot.insert(Subcheck { check: Check::new(charge.clone()).with_id(id), indices: vec![index] });
            }
            Entry::Occupied(mut slot) => {
                slot.get_mut().check.add_distinct(charge.clone());
                slot.get_mut().indices.push(index);
            }
        }
    }
    (slots.len() > 1).then(|| slots.into_values().collect())
}

async fn decide_each(
    dispatcher: Arc<Dispatcher>,
    check: Check,
    id: AdmissionId,
    subchecks: Vec<Subcheck>,
    caller: Sender<Result<Decision, StoreError>>,
) {
    let (mut taken, mut statuses, mut at) = (Vec::new(), KnownStatuses::none(&check), SystemTime::UNIX_EPOCH);
    let (mut rest, mut failure) = (subchecks.into_iter(), None);
    while let Some(subcheck) = rest.next() {
        match wait(dispatcher.decide(subcheck.check.clone())).await {
            Ok(decision) => {
                at = at.max(decision.at());
                statuses.set(&subcheck, &decision);
                if decision.is_allowed() {
                    taken.push(subcheck);
                    continue;
                }
            }
            Err(error) => {
                failure = Some(error);
                // It may have been counted nevertheless.
                taken.push(subcheck);
            }
        }
        if check.id().is_some() {
            taken.clear();
        }
        if failure.is_none() {
            let mut owed = Vec::new();
            for subcheck in taken.drain(..) {
                match wait(dispatcher.settle(refund_by_id(subcheck.check.clone(), id))).await {
                    Ok(settled) => statuses.set(&subcheck, settled.decision()),
                    Err(_) => owed.push(subcheck),
                }
            }
            taken = owed;
            // The check is refused even if one of them does not reply.
            for subcheck in rest.by_ref() {
                if let Ok(decision) = wait(dispatcher.decide(subcheck.check.without_costs())).await {
                    statuses.set_untaken(&subcheck, &decision);
                }
            }
        }
        let result = failure.map_or_else(|| Ok(statuses.decision(&check, at, id)), Err);
        drop(caller.send(result));
        // Each for itself: a node that stays away delays none of the others.
        for subcheck in taken {
            let dispatcher = Arc::clone(&dispatcher);
            let settle = move |settlement| wait(dispatcher.settle(settlement));
            tokio::spawn(give_back(vec![refund_by_id(subcheck.check, id)], settle));
        }
        return;
    }
    drop(caller.send(Ok(statuses.decision(&check, at, id))));
}

async fn settle_each(
    dispatcher: Arc<Dispatcher>,
    settlement: Settlement,
    subchecks: Vec<Subcheck>,
) -> Result<Settled, StoreError> {
    let costs: Vec<_> = settlement.accounts().map(|account| account.cost()).collect();
    let (id, mut at, mut was_applied, mut failure) = (settlement.id(), settlement.at(), false, None);
    let mut statuses = KnownStatuses::none(settlement.check());
    for subcheck in subchecks {
        let mut indices = subcheck.indices.iter();
        let cost = |_: &_| indices.next().and_then(|index| costs.get(*index).copied().flatten());
        let of_slot = Settlement::by_id(subcheck.check.clone(), id, settlement.at(), cost);
        match wait(dispatcher.settle(of_slot)).await {
            Ok(settled) => {
                at = at.max(settled.decision().at());
                was_applied |= settled.was_applied();
                statuses.set(&subcheck, settled.decision());
            }
            // The other slots are settled nevertheless. If they are settled again, each counts once.
            Err(error) => failure = Some(error),
        }
    }
    match failure {
        Some(error) => Err(error),
        None => Ok(Settled::of(statuses.decision(settlement.check(), at, id), was_applied)),
    }
}

async fn wait<T>(pending: Result<Pending<T>, StoreError>) -> Result<T, StoreError> {
    pending?.await
}

/// The statuses of the whole check, as far as they are known.
struct KnownStatuses(Vec<LimitStatus>);

impl KnownStatuses {
    fn none(check: &Check) -> Self {
        Self(check.charges().map(|charge| LimitStatus::new(charge, 0, Duration::ZERO, None)).collect())
    }

    fn set(&mut self, subcheck: &Subcheck, decision: &Decision) {
        for (index, status) in subcheck.indices.iter().zip(decision.statuses()) {
            self.0[*index] = status.clone();
        }
    }

    /// Sets the statuses of charges that were decided without their costs.
    fn set_untaken(&mut self, subcheck: &Subcheck, decision: &Decision) {
        for ((index, charge), status) in subcheck.indices.iter().zip(subcheck.check.charges()).zip(decision.statuses())
        {
            let untaken = LimitStatus::new(charge, status.used(), status.reset_after(), None);
            let untaken = untaken.with_reserved(status.reserved(), Duration::ZERO);
            self.0[*index] = if charge.can_refuse() { untaken.refused_until_reset(charge) } else { untaken };
        }
    }

    fn decision(self, check: &Check, at: SystemTime, id: AdmissionId) -> Decision {
        let mut statuses = self.0.into_iter();
        Decision::new(check, at, id, |charge| {
            statuses.next().unwrap_or_else(|| LimitStatus::new(charge, 0, Duration::ZERO, None))
        })
    }
}
