//! Checks whose keys are in several slots. In a cluster, and on any other server that refuses keys
//! in several slots, no script can decide such a check in one step.
//!
//! 1. All slots are asked at the same time, so a decision takes one round trip. Each slot decides
//!    its part, all or nothing. The check is admitted if all slots admit it.
//! 2. If a slot refuses, the caller gets its answer at once, and the units that the other slots
//!    have counted are given back afterwards. Until then, these units may cause other checks to be
//!    refused too early. No limit ever admits too much.
//! 3. All parts count under one id, like an admission in a single slot. To give back units without
//!    their own id, such as a compact log's, the script takes them from the sum for their time.
//! 4. If the caller gave the id, nothing is given back: another try under the same id may rely on
//!    the units that this one has counted.
//! 5. If the caller leaves, parts that wait in a queue are not sent, and parts that have been sent
//!    are given back by their [batch](super::batch). A part whose reply is lost is also given back.

use std::{collections::BTreeMap, sync::Arc, time::SystemTime};

use tokio::sync::oneshot::Receiver;

use super::{
    dispatcher::{Common, Dispatcher, without_runtime},
    job::{Answer, Job},
    queue::Caller,
};
use crate::{
    check::{AdmissionId, Check},
    decision::{Decision, LimitStatus, Settlement},
    error::StoreError,
    store::StoreFuture,
};

/// One slot's part of a check.
struct Part {
    check: Check,
    /// The indices that its charges have in the whole check.
    indices: Vec<usize>,
}

/// The decisions on a check's parts, as they arrive.
struct Decided<'a> {
    common: Arc<Common>,
    /// The parts without an answer.
    waiting: Vec<(&'a Part, Receiver<Answer>, Caller)>,
    /// The parts with their decisions, and whether each was counted or settled just now.
    parts: Vec<(&'a Part, Decision, bool)>,
    /// True if the units that were counted are given back when this value is dropped.
    is_given_back: bool,
}

impl Dispatcher {
    /// Sends a job to a cluster, or to a server that refuses keys in several slots. Boxed, since
    /// [`ask`](Self::ask) may itself wait for such a future.
    pub(crate) fn ask_slots(self: Arc<Self>, mut job: Box<Job>) -> StoreFuture<(Decision, bool)> {
        Box::pin(async move {
            let Some(parts) = self.parts(job.check()) else {
                return self.ask(job).await;
            };
            job.set_id();
            match job.settlement() {
                None => self.decide_parts(&job, &parts).await,
                Some(settlement) => self.settle_parts(settlement, &parts).await,
            }
        })
    }

    /// Splits a check by slot. Returns `None` if all keys share one slot.
    fn parts(&self, check: &Check) -> Option<Vec<Part>> {
        let first = check.first().key();
        if check.charges().all(|charge| charge.key() == first) {
            return None;
        }
        let mut slots = BTreeMap::<u16, (Option<Check>, Vec<usize>)>::new();
        for (index, charge) in check.charges().enumerate() {
            let slot = self.common.keys.hash_slot(charge.key());
            let (part, indices) = slots.entry(slot).or_default();
            Check::push(part, charge.clone());
            indices.push(index);
        }
        let mut parts = Vec::with_capacity(slots.len());
        for (part, indices) in slots.into_values() {
            let check = part?.marked_as(check);
            parts.push(Part { check, indices });
        }
        (parts.len() > 1).then_some(parts)
    }

    async fn decide_parts(self: Arc<Self>, job: &Job, parts: &[Part]) -> Answer {
        let is_given_back = job.check().id().is_none();
        let mut decided = Decided::new(&self.common, is_given_back);
        for part in parts {
            match self.enqueue(job.part(part.check.clone())) {
                Ok((answer, caller)) => decided.waiting.push((part, answer, caller)),
                // Returning drops the parts that are already queued, which cancels them.
                Err(answer) => {
                    let (refusal, _) = (*answer)?;
                    let crowded = &self.common.local_state.crowded;
                    crowded.note(job.check(), job.deadline);
                    decided.parts.push((part, refusal, false));
                    return Ok((decided.whole(job.check(), job.id, false), false));
                }
            }
        }
        drop(self);
        let outcome = decided.hear().await;
        let is_admitted = decided.parts.iter().all(|(_, part, _)| part.is_allowed());
        if is_admitted {
            outcome?;
            decided.is_given_back = false;
        }
        let whole = decided.whole(job.check(), job.id, !is_admitted && is_given_back);
        Ok((whole, is_admitted))
    }

    /// Settles all parts at the same time. If one fails, the others are settled nevertheless. A
    /// repeated settlement counts once in each slot.
    async fn settle_parts(self: Arc<Self>, settlement: &Settlement, parts: &[Part]) -> Answer {
        let mut decided = Decided::new(&self.common, false);
        let costs: Vec<_> = settlement.accounts().map(|(_, cost)| cost).collect();
        let mut outcome = Ok(());
        for part in parts {
            let mut costs = part.indices.iter().map(|index| costs[*index]);
            let (check, id, at) = (part.check.clone(), settlement.id, settlement.at);
            let settlement = Settlement::by_id(check, id, at, |_| costs.next().flatten());
            match self.enqueue(Job::settle(settlement, &self.common.local_state)) {
                Ok((answer, caller)) => decided.waiting.push((part, answer, caller)),
                Err(answer) => outcome = answer.map(drop),
            }
        }
        drop(self);
        decided.hear().await.and(outcome)?;
        let whole = decided.whole(&settlement.check, settlement.id, false);
        let was_applied = decided.parts.iter().any(|(_, _, is_known)| *is_known);
        Ok((whole, was_applied))
    }
}

impl Decided<'_> {
    fn new(common: &Arc<Common>, is_given_back: bool) -> Self {
        Self {
            common: Arc::clone(common),
            waiting: Vec::new(),
            parts: Vec::new(),
            is_given_back,
        }
    }

    /// Waits for all parts' answers. Fails if any of them is an error.
    async fn hear(&mut self) -> Result<(), StoreError> {
        let mut outcome = Ok(());
        while let Some((part, answer, _)) = self.waiting.last_mut() {
            let (part, answer) = (*part, answer.await);
            if let Some((_, _, caller)) = self.waiting.pop() {
                caller.leave();
            }
            match answer.unwrap_or_else(|error| Err(without_runtime(error))) {
                Ok((decision, is_new)) => self.parts.push((part, decision, is_new)),
                Err(error) => outcome = Err(error),
            }
        }
        outcome
    }

    /// Returns the decision on the whole check, without the units that are given back. If a slot
    /// has not replied, its charges' figures are unknown.
    fn whole(&self, check: &Check, id: AdmissionId, is_refused: bool) -> Decision {
        let mut at = SystemTime::UNIX_EPOCH;
        let mut statuses = vec![None; check.charges().count()];
        for (part, decision, is_new) in &self.parts {
            at = at.max(decision.at());
            let charges = part.indices.iter().zip(part.check.charges());
            for ((index, charge), status) in charges.zip(decision.statuses()) {
                let status = status.clone();
                statuses[*index] = Some(if is_refused && *is_new {
                    status.given_back(charge)
                } else {
                    status
                });
            }
        }
        let mut statuses = statuses.into_iter();
        Decision::new(check, at, id, |charge| {
            let status = statuses.next().flatten();
            status.unwrap_or_else(|| LimitStatus::estimate(charge, false))
        })
    }
}

impl Drop for Decided<'_> {
    fn drop(&mut self) {
        if !self.is_given_back {
            return;
        }
        for (part, answer, _) in &mut self.waiting {
            // An answer may have arrived without being read, so it is read below. Later answers
            // find that nobody waits for them.
            answer.close();
            if let Ok(Ok((decision, is_new))) = answer.try_recv() {
                self.parts.push((*part, decision, is_new));
            }
        }
        for (part, decision, is_new) in &self.parts {
            if *is_new {
                self.common.give_back(&part.check, decision);
            }
        }
    }
}
