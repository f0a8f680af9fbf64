//! Tasks that take prefetches of units from the store, and give back the rest: see [`limit::prefetch`](crate::limit::prefetch).
//!
//! A task belongs to one limit and key. It begins when the key is asked for often, and ends when it holds nothing and the key no longer
//! is. If its runtime ends, what it holds can be spent for the rest of its life, and the task of another runtime gives back the rest.

use std::{
    future::{Future, poll_fn},
    pin::pin,
    sync::Arc,
    task::Poll,
    time::Duration,
};

use tokio::{runtime::Handle, time::timeout};

use super::{
    deadline::Deadline,
    settings::{Core, Limiter},
};
use crate::{
    check::Check,
    decision::Decision,
    key::Key,
    limit::Limit,
    local::{KeptHolding, Outdated, SharedBreaker, Step, Taking},
    settlement::Settlement,
    store::{MOST_TIME, Store, give_back, refund_by_id},
};

impl Limiter {
    /// Gives back all units that this process holds with [prefetch](crate::limit::prefetch) of the store, and returns when that is done.
    ///
    /// Call it when the process serves no more requests and is about to end. Otherwise those units count until a window after the life
    /// of their prefetch. It gives back the prefetches of all limiters and layers on clones of the store. Requests that come later take
    /// prefetches again.
    ///
    /// It waits for ten seconds at most, for example if the store fails, or if a runtime that holds units is not driven.
    ///
    /// # Panics
    ///
    /// If units are held, and it is polled outside a tokio runtime with time enabled.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() {
    /// use tower_sliding_window::{Limiter, MemoryStore};
    ///
    /// let store = MemoryStore::new();
    /// // axum::serve(listener, app).with_graceful_shutdown(signal).await?;
    /// Limiter::new(store).give_back_prefetched().await;
    /// # }
    /// ```
    pub async fn give_back_prefetched(&self) {
        if let Some(prefetches) = &self.core.prefetches {
            let _ = Deadline::new(prefetches.give_back(|kept| self.core.hold(kept)), MOST_TIME, Duration::ZERO).await;
        }
    }
}

impl Core {
    /// Takes note of an admission by the store, and begins to take prefetches if the key is asked for often. Without a runtime it does not.
    pub(super) fn note_admission(&self, check: &Check, decision: Decision, asked_after: u64) -> Decision {
        let Some(prefetches) = &self.prefetches else { return decision };
        prefetches.note(check, decision, asked_after, |kept| self.hold(kept))
    }

    fn hold(&self, kept: KeptHolding) {
        if let Ok(runtime) = Handle::try_current() {
            let task =
                Holder { store: Arc::clone(&self.store), breaker: self.breaker.clone(), deadline: self.deadline, kept };
            runtime.spawn(task.run());
        }
    }

    /// Forgets what this process remembers of a limit and key, before and after a call to the store.
    pub(super) fn outdate(&self, limit: &Limit, key: &Key) -> Option<Outdated> {
        self.store.local_state().map(|state| state.outdate(vec![limit.clone()], Some(key.clone())))
    }
}

struct Holder {
    store: Arc<dyn Store>,
    breaker: SharedBreaker,
    deadline: Duration,
    kept: KeptHolding,
}

impl Holder {
    async fn run(mut self) {
        loop {
            match self.kept.next() {
                Step::Ask { give_back, take } => self.ask(give_back, take).await,
                Step::Wait(time) => drop(timeout(time, self.kept.changed()).await),
                Step::End => return,
            }
        }
    }

    /// Polls both, so that they travel together.
    async fn ask(&self, settlements: Vec<Settlement>, taking: Option<Taking>) {
        let give_back = self.give_back(settlements);
        let take = async {
            if let Some(taking) = taking {
                self.take(taking).await;
            }
        };
        let (mut give_back, mut take, mut is_pending) = (pin!(give_back), pin!(take), [true; 2]);
        poll_fn(|cx| {
            is_pending[0] = is_pending[0] && give_back.as_mut().poll(cx).is_pending();
            is_pending[1] = is_pending[1] && take.as_mut().poll(cx).is_pending();
            if is_pending == [false; 2] { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    /// Without a deadline: a prefetch that comes too late is given back, and one that nobody waits for would stay charged.
    async fn take(&self, taking: Taking) {
        if self.breaker.is_open_for(self.deadline) {
            return self.kept.fail(&taking);
        }
        let check = taking.check.clone();
        match self.store.decide(check.clone()).await {
            Ok(decision) => self.kept.take(taking, decision),
            Err(_) => {
                self.kept.fail(&taking);
                // It may have been counted all the same.
                if let Some(id) = check.id() {
                    self.give_back(vec![refund_by_id(check, id)]).await;
                }
            }
        }
    }

    async fn give_back(&self, settlements: Vec<Settlement>) {
        give_back(settlements, |settlement| self.store.settle(settlement)).await;
    }
}
