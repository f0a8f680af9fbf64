//! Checks whose charges live in several slots of a cluster, where no script can decide them in one step.
//!
//! 1. The slots are asked one after the other, always in the same order, each for its own charges, all or nothing. The
//!    check is admitted when the last has admitted it. Before that, it may hold units that others are refused for.
//! 2. When one refuses, those before it are given back exactly what they had counted, and those after it are only asked
//!    how they stand: they say when their next unit leaves, which may be sooner than when they would admit the check.
//! 3. Each keeps its charges under the id of the check, so that they can be given back and settled. If that id is the
//!    caller's own, nothing is given back: what has been taken may be of an earlier try, and waits for the next.
//! 4. Nothing is ever admitted beyond a limit. If a node stays away for longer than giving back is tried, its units
//!    stay taken until they leave the window.
//! 5. It goes on in a task of its own, so that nobody who stops waiting leaves a check half taken.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    sync::Arc,
    time::{Duration, SystemTime},
};

use tokio::{
    sync::oneshot::{self, Sender},
    time::sleep,
};

use super::{
    dispatcher::{Dispatcher, Submitted},
    job::Outcome,
    keys::Keys,
};
use crate::{
    admission::AdmissionId,
    check::Check,
    decision::{Decision, LimitStatus},
    error::StoreError,
    settlement::{Settled, Settlement},
};

/// How often giving back is tried again in the background, each time after twice as long.
const ATTEMPTS: u32 = 6;
const FIRST_WAIT: Duration = Duration::from_millis(50);

/// Sends a check, part by part if it lives in several slots.
pub(super) fn decide(dispatcher: &Arc<Dispatcher>, check: Check) -> Result<Submitted<Decision>, StoreError> {
    if !dispatcher.is_cluster() {
        return dispatcher.decide(check);
    }
    let id = check.id().unwrap_or_else(AdmissionId::fresh);
    let Some(parts) = split(dispatcher.keys(), &check, id) else { return dispatcher.decide(check) };
    let (caller, outcome) = oneshot::channel();
    dispatcher.runtime().spawn(decide_parts(Arc::clone(dispatcher), check, id, parts, caller));
    Ok((outcome, None))
}

/// Sends a settlement, part by part if it lives in several slots.
pub(super) fn settle(dispatcher: &Arc<Dispatcher>, settlement: Settlement) -> Result<Submitted<Settled>, StoreError> {
    if !dispatcher.is_cluster() {
        return dispatcher.settle(settlement);
    }
    let Some(parts) = split(dispatcher.keys(), settlement.check(), settlement.id()) else {
        return dispatcher.settle(settlement);
    };
    let (caller, outcome) = oneshot::channel();
    let settled = settle_parts(Arc::clone(dispatcher), settlement, parts);
    dispatcher.runtime().spawn(async { drop(caller.send(settled.await)) });
    Ok((outcome, None))
}

/// The charges of a check that live in one slot, and their places among all.
struct Part {
    check: Check,
    places: Vec<usize>,
}

/// The parts of a check that has several.
fn split(keys: &Keys, check: &Check, id: AdmissionId) -> Option<Vec<Part>> {
    let first = check.charges().next()?.key();
    if check.charges().all(|charge| charge.key() == first) {
        return None;
    }
    let mut parts = BTreeMap::<u16, Part>::new();
    for (place, charge) in check.charges().enumerate() {
        match parts.entry(keys.hash_slot(charge.key())) {
            Entry::Vacant(part) => {
                part.insert(Part { check: Check::new(charge.clone()).with_id(id), places: vec![place] });
            }
            Entry::Occupied(mut part) => {
                part.get_mut().check.add_distinct(charge.clone());
                part.get_mut().places.push(place);
            }
        }
    }
    (parts.len() > 1).then(|| parts.into_values().collect())
}

/// Decides a check part by part.
async fn decide_parts(
    dispatcher: Arc<Dispatcher>,
    check: Check,
    id: AdmissionId,
    parts: Vec<Part>,
    caller: Sender<Outcome<Decision>>,
) {
    let (mut taken, mut statuses, mut at) = (Vec::new(), Statuses::of(&check), SystemTime::UNIX_EPOCH);
    let (mut rest, mut failure) = (parts.into_iter(), None);
    while let Some(part) = rest.next() {
        match answer(dispatcher.decide(part.check.clone())).await {
            Ok(decision) => {
                at = at.max(decision.at());
                statuses.note(&part, &decision);
                if decision.is_allowed() {
                    taken.push(part);
                    continue;
                }
            }
            Err(error) => {
                failure = Some(error);
                // It may have been counted all the same.
                taken.push(part);
            }
        }
        if check.id().is_some() {
            taken.clear();
        }
        if failure.is_none() {
            let mut owed = Vec::new();
            for part in taken.drain(..) {
                match give_back(&dispatcher, &part, id).await {
                    Ok(settled) => statuses.note(&part, settled.decision()),
                    Err(_) => owed.push(part),
                }
            }
            taken = owed;
            // It is refused all the same if one of them cannot say.
            for part in rest.by_ref() {
                if let Ok(decision) = answer(dispatcher.decide(part.check.without_costs())).await {
                    statuses.note_untaken(&part, &decision);
                }
            }
        }
        let outcome = failure.map_or_else(|| Ok(statuses.decision(&check, at, id)), Err);
        drop(caller.send(outcome));
        return give_back_later(&dispatcher, taken, id).await;
    }
    drop(caller.send(Ok(statuses.decision(&check, at, id))));
}

/// Settles an admission part by part.
async fn settle_parts(dispatcher: Arc<Dispatcher>, settlement: Settlement, parts: Vec<Part>) -> Outcome<Settled> {
    let costs: Vec<_> = settlement.accounts().map(|account| account.cost()).collect();
    let (id, mut at, mut is_known, mut failure) = (settlement.id(), settlement.at(), false, None);
    let mut statuses = Statuses::of(settlement.check());
    for part in parts {
        let mut places = part.places.iter();
        let cost = |_: &_| places.next().and_then(|place| costs.get(*place).copied().flatten());
        let of_part = Settlement::by_id(part.check.clone(), id, settlement.at(), cost);
        match answer(dispatcher.settle(of_part)).await {
            Ok(settled) => {
                at = at.max(settled.decision().at());
                is_known |= settled.was_applied();
                statuses.note(&part, settled.decision());
            }
            // The others are settled all the same. Sent again, each counts once.
            Err(error) => failure = Some(error),
        }
    }
    match failure {
        Some(error) => Err(error),
        None => Ok(Settled::of(statuses.decision(settlement.check(), at, id), is_known)),
    }
}

/// Gives back what was taken under an id of our own. No other admission has it, so any time will do that is late enough.
async fn give_back(dispatcher: &Arc<Dispatcher>, part: &Part, id: AdmissionId) -> Outcome<Settled> {
    let late_enough = SystemTime::UNIX_EPOCH + Duration::from_secs(1 << 33);
    answer(dispatcher.settle(Settlement::by_id(part.check.clone(), id, late_enough, |_| Some(0)))).await
}

async fn give_back_later(dispatcher: &Arc<Dispatcher>, mut owed: Vec<Part>, id: AdmissionId) {
    let mut wait = FIRST_WAIT;
    for _ in 0..ATTEMPTS {
        let mut left = Vec::new();
        for part in owed {
            if give_back(dispatcher, &part, id).await.is_err() {
                left.push(part);
            }
        }
        if left.is_empty() {
            return;
        }
        owed = left;
        sleep(wait).await;
        wait *= 2;
    }
}

/// What comes of something that has been submitted.
async fn answer<T>(submitted: Result<Submitted<T>, StoreError>) -> Outcome<T> {
    let (outcome, sending) = submitted?;
    if let Some(sending) = sending {
        sending.await;
    }
    outcome.await.unwrap_or_else(|gone| Err(StoreError::new("asking Redis", gone).of_one_check()))
}

/// How the charges of the whole check stand, as far as they have been heard of.
struct Statuses(Vec<LimitStatus>);

impl Statuses {
    fn of(check: &Check) -> Self {
        Self(check.charges().map(|charge| LimitStatus::new(charge, 0, Duration::ZERO, None)).collect())
    }

    fn note(&mut self, part: &Part, decision: &Decision) {
        for (place, status) in part.places.iter().zip(decision.statuses()) {
            self.0[*place] = status.clone();
        }
    }

    /// Notes how charges stand whose units were not asked for.
    fn note_untaken(&mut self, part: &Part, decision: &Decision) {
        for ((place, charge), status) in part.places.iter().zip(part.check.charges()).zip(decision.statuses()) {
            let untaken = LimitStatus::new(charge, status.used(), status.reset_after(), None);
            let untaken = untaken.with_reserved(status.reserved(), Duration::ZERO);
            self.0[*place] = if charge.can_refuse() { untaken.refused_until_reset(charge) } else { untaken };
        }
    }

    fn decision(self, check: &Check, at: SystemTime, id: AdmissionId) -> Decision {
        let mut statuses = self.0.into_iter();
        Decision::new(check, at, id, |charge| {
            statuses.next().unwrap_or_else(|| LimitStatus::new(charge, 0, Duration::ZERO, None))
        })
    }
}
