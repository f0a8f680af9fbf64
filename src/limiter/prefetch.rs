//! Tasks that take prefetches of units from the store, and give back the rest: see
//! [`limit::prefetch`](crate::limit::prefetch).
//!
//! A task belongs to one limit and key. It begins when the key is asked for often, and ends when it
//! holds nothing and the key no longer is. If its runtime ends, what it holds can be spent for the
//! rest of its life, and the task of another runtime gives back the rest.

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
    /// Takes note of a decision by the store. After an admission, begins to take prefetches if the
    /// key is asked for often. Without a runtime it does not. After a refusal, gives back what this
    /// process holds if the check would fit then.
    pub(super) fn note(&self, check: &Check, decision: Decision, asked_after: u64) -> Decision {
        let Some(prefetches) = &self.prefetches else { return decision };
        if decision.is_allowed() {
            return prefetches.note(check, decision, asked_after, |kept| self.hold(kept));
        }
        let refused = check.charges().zip(decision.statuses()).filter(|(_, status)| status.refuses().is_some());
        for (charge, status) in refused {
            let held = prefetches.held(charge);
            if held > 0 && status.remaining().saturating_add(held) >= charge.cost() {
                drop(self.outdate(charge.limit(), charge.key()));
            }
        }
        decision
    }

    /// Starts the task that takes care of a holding. Without a runtime, others may spend what is
    /// held.
    pub(super) fn hold(&self, kept: KeptHolding) {
        let Ok(runtime) = Handle::try_current() else { return };
        let core = self.clone();
        runtime.spawn(async move {
            // Calls that get no reply do not keep it from giving back what is over meanwhile.
            let kept = Arc::new(kept);
            let mut calls = JoinSet::new();
            loop {
                while calls.try_join_next().is_some() {}
                let part = || core.store.part_of(&kept.check());
                match kept.next(core.breaker.is_open_for(part, core.deadline())) {
                    Step::Ask { give_back: over, take } => {
                        if !over.is_empty() {
                            let store = Arc::clone(&core.store);
                            calls.spawn(async move { give_back(over, |settlement| store.settle(settlement)).await });
                        }
                        if let Some(check) = take {
                            // Without a deadline: one that comes too late is given back, and one
                            // that nobody waits for would stay charged.
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

    /// Forgets what this process remembers of a limit and key, before and after a call to the
    /// store.
    pub(super) fn outdate(&self, limit: &Limit, key: &Key) -> Option<Outdated> {
        self.store.local_state().map(|state| state.outdate([(limit, key)], Some((limit.clone(), key.clone()))))
    }
}
