//! Checks whose keys are in several slots. In a cluster, and on any other server that refuses keys
//! of several slots, no script can decide such a check in one step.
//!
//! 1. The store asks the slots one after the other, always in the same order. Each slot decides its
//!    own charges, all or nothing. The check is admitted when the last slot has admitted it. Until
//!    then, the units of the check may make the limits refuse other checks.
//! 2. If a slot refuses, the slots before it get back exactly the units that they have counted. The
//!    slots after it are asked only for their statuses. Each of these slots reports when its next
//!    unit leaves. At that time, the check may still not fit.
//! 3. Each slot counts its charges under the id of the check, so that the charges can be given back
//!    and settled. If the caller has given the id, nothing is given back: an earlier try may have
//!    counted the units, and the next try uses them.
//! 4. No limit ever admits too much. If a node stays away for longer than the store tries to give
//!    units back, those units stay taken until they leave the window.
//! 5. A task decides the check, so a caller that stops waiting leaves no check half taken. If the
//!    caller leaves before the first slot was asked, no slot is asked. If the slots were asked
//!    nevertheless, many callers that time out would keep the queue full of checks for which nobody
//!    waits.

use std::{
    collections::BTreeMap,
    sync::{Arc, Weak},
    time::{Duration, SystemTime},
};

use super::{
    dispatcher::{Dispatcher, without_runtime},
    job::{Answer, Job},
    lost::Lost,
    queue::Caller,
};
use crate::{
    check::{AdmissionId, Check},
    decision::{Decision, LimitStatus, Settlement},
    store::StoreFuture,
};

/// A check of several slots.
struct CrossSlot {
    dispatcher: Arc<Dispatcher>,
    check: Check,
    id: AdmissionId,
    /// For each slot, a check of the slot's charges, and the indices of these charges in the whole
    /// check.
    slots: Vec<(Check, Vec<usize>)>,
    /// The statuses of all charges. `None` for a status that is not known.
    statuses: Vec<Option<LimitStatus>>,
    /// The time of the latest decision of a slot.
    at: SystemTime,
    caller: Weak<Caller>,
}

impl Dispatcher {
    /// Sends a job to a cluster, or to a server that refuses keys of several slots. A task asks
    /// slot by slot if the keys of the job are in several slots. The future is boxed, since
    /// [`ask`](Self::ask) may itself wait for such a future.
    pub(crate) fn ask_slots(self: Arc<Self>, mut job: Box<Job>) -> StoreFuture<(Decision, bool)> {
        Box::pin(async move {
            job.set_id();
            // As long as the `Caller` exists, the task knows that somebody waits.
            let Some((slots, _caller)) = CrossSlot::new(&self, job.check(), job.id) else {
                return self.ask(job).await;
            };
            let task = match job.settlement() {
                None => self.runtime.spawn(slots.decide(job.deadline)),
                Some(settlement) => self.runtime.spawn(slots.settle(settlement.clone())),
            };
            drop(self);
            task.await
                .unwrap_or_else(|error| Err(without_runtime(error)))
        })
    }
}

impl CrossSlot {
    /// Takes a check apart. `None` if all keys are in one slot.
    fn new(
        dispatcher: &Arc<Dispatcher>,
        check: &Check,
        id: AdmissionId,
    ) -> Option<(Self, Arc<Caller>)> {
        let first = check.first().key();
        if check.charges().all(|charge| charge.key() == first) {
            return None;
        }
        let mut slots = BTreeMap::<u16, (Option<Check>, Vec<usize>)>::new();
        for (index, charge) in check.charges().enumerate() {
            let (check, indices) = slots
                .entry(dispatcher.common.keys.hash_slot(charge.key()))
                .or_default();
            Check::push(check, charge.clone());
            indices.push(index);
        }
        let first = slots.keys().next().filter(|_| slots.len() > 1)?;
        let caller = Arc::new(Caller {
            queue: Arc::downgrade(dispatcher.queue(*first, false)),
        });
        let with_id = |(check, indices): (Option<Check>, _)| Some((check?.with_id(id), indices));
        let slots = slots.into_values().filter_map(with_id).collect();
        let statuses = vec![None; check.charges().count()];
        let dispatcher = Arc::clone(dispatcher);
        let check = check.clone();
        let at = SystemTime::UNIX_EPOCH;
        Some((
            Self {
                dispatcher,
                check,
                id,
                slots,
                statuses,
                at,
                caller: Arc::downgrade(&caller),
            },
            caller,
        ))
    }

    /// Decides the check. If a slot fails, or the runtime ends meanwhile, the units that slots may
    /// have counted are given back in the background.
    async fn decide(mut self, left: Duration) -> Answer {
        let is_given_back = self.check.id().is_none();
        let mut lost = Lost::new(&self.dispatcher.common, Vec::new());
        for number in 0..self.slots.len() {
            let mut job = Job::decide(self.slots[number].0.clone(), left);
            if number == 0 {
                job.whole = Some(Box::new(self.caller.clone()));
            }
            if is_given_back {
                lost.taken.push(Settlement::refund_by_id(
                    self.slots[number].0.clone(),
                    self.id,
                ));
            }
            let answer = self.ask(job).await;
            // A slot that failed may have counted its charges nevertheless. If the error is of this
            // check only, the slot has counted nothing: the check was not sent, or its key cannot
            // be read.
            let has_refused = match &answer {
                Ok((decision, _)) => !decision.is_allowed(),
                Err(error) => error.is_of_one_check,
            };
            if has_refused {
                lost.taken.pop();
            }
            let (decision, _) = answer?;
            self.set(number, &decision);
            if has_refused {
                // From here on the check is refused, even if one of the other slots does not reply.
                self.give_back(lost).await;
                self.ask_untaken(number + 1, left).await;
                return Ok((self.decision(), true));
            }
        }
        lost.taken.clear();
        Ok((self.decision(), true))
    }

    /// Gives back the units that the slots before the refusal have counted. The units of a slot
    /// that does not reply are given back in the background.
    async fn give_back(&mut self, mut lost: Lost) {
        // The last slot comes first, so that a removal does not move the settlements that are still
        // to be made.
        for slot in (0..lost.taken.len()).rev() {
            if let Ok((decision, _)) = self.settle_in_slot(lost.taken[slot].clone()).await {
                self.set(slot, &decision);
                drop(lost.taken.remove(slot));
            }
        }
    }

    /// Asks the slots from this one on for their statuses. Only the caller needs these statuses, so
    /// the slots are asked only while the caller waits.
    async fn ask_untaken(&mut self, first: usize, left: Duration) {
        for slot in first..self.slots.len() {
            if self.caller.strong_count() > 0
                && let Ok((decision, _)) = self
                    .ask(Job::decide(self.slots[slot].0.without_costs(), left))
                    .await
            {
                self.set_untaken(slot, &decision);
            }
        }
    }

    /// Settles each charge that has an actual cost.
    async fn settle(mut self, whole: Settlement) -> Answer {
        let costs: Vec<_> = whole.accounts().map(|(_, cost)| cost).collect();
        let mut was_applied = false;
        let mut failure = None;
        self.at = whole.at;
        for number in 0..self.slots.len() {
            let (check, indices) = &self.slots[number];
            let mut costs = indices.iter().map(|index| costs[*index]);
            let settlement =
                Settlement::by_id(check.clone(), self.id, whole.at, |_| costs.next().flatten());
            match self.settle_in_slot(settlement).await {
                Ok((decision, is_known)) => {
                    was_applied |= is_known;
                    self.set(number, &decision);
                }
                // The other slots are settled nevertheless. If the settlement comes again, it
                // counts once in each slot.
                Err(error) => failure = Some(error),
            }
        }
        failure.map_or_else(|| Ok((self.decision(), was_applied)), Err)
    }

    async fn ask(&self, job: Box<Job>) -> Answer {
        Arc::clone(&self.dispatcher).ask(job).await
    }

    async fn settle_in_slot(&self, settlement: Settlement) -> Answer {
        self.ask(Job::settle(settlement, &self.dispatcher.common.local_state))
            .await
    }

    fn set(&mut self, slot: usize, decision: &Decision) {
        self.at = self.at.max(decision.at());
        for (index, status) in self.slots[slot].1.iter().zip(decision.statuses()) {
            self.statuses[*index] = Some(status.clone());
        }
    }

    /// Sets the statuses of a slot that was asked only for its statuses.
    fn set_untaken(&mut self, slot: usize, decision: &Decision) {
        let (check, indices) = &self.slots[slot];
        for ((index, charge), status) in
            indices.iter().zip(check.charges()).zip(decision.statuses())
        {
            self.statuses[*index] = Some(status.for_charge(charge).refused_until_reset(charge));
        }
    }

    fn decision(&self) -> Decision {
        let mut statuses = self.statuses.iter().cloned();
        Decision::new(&self.check, self.at, self.id, |charge| {
            statuses
                .next()
                .flatten()
                .unwrap_or_else(|| LimitStatus::new(charge, 0, 0, Duration::ZERO, None))
        })
    }
}
