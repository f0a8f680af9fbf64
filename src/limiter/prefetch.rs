//! Tasks that prefetch units from the store, and give back those that stay unspent: see
//! [`limit::prefetch`](crate::limit::prefetch).
//!
//! A task belongs to one limit and key. It begins when the key's checks are frequent. It ends when
//! it holds nothing and the checks are no longer frequent. If its runtime ends, the process can
//! still spend the units that the task has taken, until their life is over. A task on another
//! runtime gives back the units that are left.

use std::sync::Arc;

use tokio::{runtime::Handle, task::JoinSet, time::timeout};

use super::Core;
use crate::{
    check::Check,
    decision::Decision,
    key::Key,
    limit::Limit,
    local::{KeptHolding, Outdated, Step},
    store::give_back,
};

impl Core {
    /// Learns from a store decision. After an admission, begins to take prefetches if the key's
    /// checks are frequent and there is a runtime. After a refusal, gives back the units that this
    /// process holds, if the check would fit without them.
    pub(super) fn note(&self, check: &Check, decision: Decision, asked_after: u64) -> Decision {
        let Some(prefetches) = &self.prefetches else {
            return decision;
        };
        if decision.is_allowed() {
            return prefetches.note(check, decision, asked_after, |kept| self.hold(kept));
        }
        for (charge, status) in check.charges().zip(decision.statuses()) {
            if status.refuses().is_none() {
                continue;
            }
            let held = prefetches.held(charge);
            if held > 0 && status.remaining().saturating_add(held) >= charge.cost() {
                drop(self.outdate(charge.limit(), charge.key()));
            }
        }
        decision
    }

    /// Starts a holding's task, which takes prefetches for one limit and key and gives them back.
    /// Without a runtime, no task starts, and callers may still spend the units that the holding
    /// has.
    pub(super) fn hold(&self, kept: KeptHolding) {
        let Ok(runtime) = Handle::try_current() else {
            return;
        };
        let core = self.clone();
        runtime.spawn(async move {
            // The calls run in their own tasks. So a call without a reply does not keep this task
            // from giving back prefetches that are over.
            let kept = Arc::new(kept);
            let mut calls = JoinSet::new();
            loop {
                while calls.try_join_next().is_some() {}
                let part = || core.store.part_of(&kept.check());
                match kept.next(core.breaker.is_open_for(part, core.deadline())) {
                    Step::Ask {
                        give_back: over,
                        take,
                    } => {
                        if !over.is_empty() {
                            let store = Arc::clone(&core.store);
                            calls.spawn(async move {
                                give_back(over, |settlement| store.settle(settlement)).await;
                            });
                        }
                        if let Some(check) = take {
                            // The call has no deadline, so that even a prefetch that comes too late
                            // is given back. If nobody waited for its reply, it would stay charged.
                            let kept = Arc::clone(&kept);
                            let taken = core.store.decide(check);
                            calls.spawn(async move { kept.answer(taken.await) });
                        }
                    }
                    Step::Wait(time) => drop(timeout(time, kept.changed()).await),
                    Step::End if calls.join_next().await.is_none() => return,
                    Step::End => {}
                }
            }
        });
    }

    /// Forgets the refusals for a limit and key, and gives back the prefetches for them. Does so
    /// now, and again when the returned guard is dropped, after the store call.
    pub(super) fn outdate(&self, limit: &Limit, key: &Key) -> Option<Outdated> {
        let state = self.store.local_state()?;
        Some(state.outdate([(limit, key)], state.prefetches.clone()))
    }
}
