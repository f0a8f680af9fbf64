//! Tasks that take prefetches of units from the store, and give back the rest: see
//! [`limit::prefetch`](crate::limit::prefetch).
//!
//! A task belongs to one limit and key. It begins when the key is asked for often. It ends when it
//! holds nothing and the key is no longer asked for often. If the runtime of the task ends,
//! the process can still spend its units until their life is over, and a task on another runtime
//! gives back those that are left.

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
    /// key is asked for often and there is a runtime. After a refusal, gives back the units that
    /// this process holds, if the check would fit with them.
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
            // The calls run beside this task. So a call without a reply does not keep the task from
            // giving back what is over.
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
                            // The call has no deadline. A prefetch that comes too late is given
                            // back. If nobody waited for the reply, the prefetch would stay
                            // charged.
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
        self.store.local_state().map(|state| state.outdate([(limit, key)], state.prefetches.clone()))
    }
}
