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
    future::Future,
    sync::Arc,
    time::{Duration, SystemTime},
};

use tokio::task::JoinHandle;

use super::{
    dispatcher::Dispatcher,
    job::{Answer, Job, Work},
};
use crate::{
    admission::AdmissionId,
    check::Check,
    decision::{Decision, LimitStatus},
    settlement::Settlement,
    store::{give_back, redis::keys::Keys},
};

/// Asks slot by slot, if there are several.
pub(super) fn ask(dispatcher: &Arc<Dispatcher>, job: &Job) -> Option<JoinHandle<Answer>> {
    let (runtime, slots) = (&dispatcher.runtime, Arc::clone(dispatcher));
    match &job.work {
        Work::Decide(check) => {
            let id = check.id().unwrap_or_else(AdmissionId::fresh);
            let subchecks = subchecks(dispatcher.keys(), check, id)?;
            Some(runtime.spawn(decide(slots, check.clone(), id, subchecks)))
        }
        Work::Settle(settlement) => {
            let subchecks = subchecks(dispatcher.keys(), settlement.check(), settlement.id())?;
            Some(runtime.spawn(settle(slots, settlement.clone(), subchecks)))
        }
    }
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

async fn decide(dispatcher: Arc<Dispatcher>, check: Check, id: AdmissionId, subchecks: Vec<Subcheck>) -> Answer {
    let mut statuses = KnownStatuses::none(&check, SystemTime::UNIX_EPOCH);
    for (number, subcheck) in subchecks.iter().enumerate() {
        match ask_one(&dispatcher, Job::decide(subcheck.check.clone())).await {
            Ok((decision, _)) => {
                statuses.set(subcheck, &decision);
                if decision.is_allowed() {
                    continue;
                }
            }
            Err(error) => {
                // The last one may have been counted nevertheless.
                for taken in subchecks[..=number].iter().filter(|_| check.id().is_none()) {
                    give_back_later(&dispatcher, taken, id);
                }
                return Err(error);
            }
        }
        // The check is refused, even if one of these does not reply.
        for taken in subchecks[..number].iter().filter(|_| check.id().is_none()) {
            match settle_in(&dispatcher, Settlement::refund_by_id(taken.check.clone(), id)).await {
                Ok((decision, _)) => statuses.set(taken, &decision),
                Err(_) => give_back_later(&dispatcher, taken, id),
            }
        }
        for untaken in &subchecks[number + 1..] {
            if let Ok((decision, _)) = ask_one(&dispatcher, Job::decide(untaken.check.without_costs())).await {
                statuses.set_untaken(untaken, &decision);
            }
        }
        break;
    }
    Ok((statuses.decision(&check, id), true))
}

async fn settle(dispatcher: Arc<Dispatcher>, settlement: Settlement, subchecks: Vec<Subcheck>) -> Answer {
    let costs: Vec<_> = settlement.accounts().map(|(_, cost)| cost).collect();
    let (id, mut was_applied, mut failure) = (settlement.id(), false, None);
    let mut statuses = KnownStatuses::none(settlement.check(), settlement.at());
    for subcheck in subchecks {
        let mut indices = subcheck.indices.iter();
        let cost = |_: &_| indices.next().and_then(|index| costs.get(*index).copied().flatten());
        let of_slot = Settlement::by_id(subcheck.check.clone(), id, settlement.at(), cost);
        match settle_in(&dispatcher, of_slot).await {
            Ok((decision, is_known)) => {
                was_applied |= is_known;
                statuses.set(&subcheck, &decision);
            }
            // The other slots are settled nevertheless. If they are settled again, each counts once.
            Err(error) => failure = Some(error),
        }
    }
    match failure {
        Some(error) => Err(error),
        None => Ok((statuses.decision(settlement.check(), id), was_applied)),
    }
}

/// Settles in one slot.
fn settle_in(dispatcher: &Arc<Dispatcher>, settlement: Settlement) -> impl Future<Output = Answer> + Send + use<> {
    ask_one(dispatcher, Job::settle(settlement, &dispatcher.config.local_state))
}

/// Asks one slot. The future holds nothing of the dispatcher.
fn ask_one(dispatcher: &Arc<Dispatcher>, job: Box<Job>) -> impl Future<Output = Answer> + Send + use<> {
    let sending = dispatcher.ask(job);
    async move { sending?.await }
}

/// Each slot for itself: a node that stays away delays none of the others.
fn give_back_later(dispatcher: &Arc<Dispatcher>, taken: &Subcheck, id: AdmissionId) {
    let (settlement, slot) = (Settlement::refund_by_id(taken.check.clone(), id), Arc::clone(dispatcher));
    dispatcher.runtime.spawn(give_back(vec![settlement], move |settlement| settle_in(&slot, settlement)));
}

/// The statuses of the whole check, as far as they are known.
struct KnownStatuses {
    of_charges: Vec<LimitStatus>,
    /// The time of the last one.
    at: SystemTime,
}

impl KnownStatuses {
    fn none(check: &Check, at: SystemTime) -> Self {
        let of_charges = check.charges().map(|charge| LimitStatus::new(charge, 0, Duration::ZERO, None)).collect();
        Self { of_charges, at }
    }

    fn set(&mut self, subcheck: &Subcheck, decision: &Decision) {
        self.at = self.at.max(decision.at());
        for (index, status) in subcheck.indices.iter().zip(decision.statuses()) {
            self.of_charges[*index] = status.clone();
        }
    }

    /// Sets the statuses of charges that were decided without their costs.
    fn set_untaken(&mut self, subcheck: &Subcheck, decision: &Decision) {
        for ((index, charge), status) in subcheck.indices.iter().zip(subcheck.check.charges()).zip(decision.statuses())
        {
            let untaken = LimitStatus::new(charge, status.used(), status.reset_after(), None);
            let untaken = untaken.with_reserved(status.reserved(), Duration::ZERO);
            self.of_charges[*index] = if charge.can_refuse() { untaken.refused_until_reset(charge) } else { untaken };
        }
    }

    fn decision(self, check: &Check, id: AdmissionId) -> Decision {
        let mut statuses = self.of_charges.into_iter();
        Decision::new(check, self.at, id, |charge| {
            statuses.next().unwrap_or_else(|| LimitStatus::new(charge, 0, Duration::ZERO, None))
        })
    }
}
