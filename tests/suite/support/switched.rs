//! A store that works, is slow, fails or hangs, as the test sets it.

use std::{
    future::Future,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::time::sleep;
use tower_sliding_window::{
    Check, Decision, Key, Limit, LocalState, MemoryStore, Settled, Settlement, Store, StoreError,
};

use super::stores::{Failing, Silent};

#[derive(Clone)]
pub(crate) struct Switched {
    store: MemoryStore,
    state: Arc<Mutex<State>>,
    asked: Arc<AtomicUsize>,
    waiting: Arc<()>,
    local_state: Option<LocalState>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum State {
    Works,
    /// Each operation takes so long.
    Takes(Duration),
    Fails,
    Hangs,
}

type Answer<T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send>>;

impl Switched {
    pub(crate) fn new(state: State) -> Self {
        Self {
            store: MemoryStore::new(),
            state: Arc::new(Mutex::new(state)),
            asked: Arc::default(),
            waiting: Arc::default(),
            local_state: None,
        }
    }

    /// A store whose clones share a local state.
    pub(crate) fn with_local_state(state: State) -> Self {
        Self { local_state: Some(LocalState::new()), ..Self::new(state) }
    }

    pub(crate) fn set(&self, state: State) {
        *self.state.lock().unwrap() = state;
    }

    /// The number of operations so far.
    pub(crate) fn asked(&self) -> usize {
        self.asked.load(Ordering::SeqCst)
    }

    /// The number of operations that never finish and are still waited for.
    pub(crate) fn waiting(&self) -> usize {
        Arc::weak_count(&self.waiting)
    }

    fn never<T>(&self, answer: impl Future<Output = Result<T, StoreError>> + Send + 'static) -> Answer<T> {
        let waiting = Arc::downgrade(&self.waiting);
        Box::pin(async move {
            let answer = answer.await;
            drop(waiting);
            answer
        })
    }

    fn state(&self) -> State {
        self.asked.fetch_add(1, Ordering::SeqCst);
        *self.state.lock().unwrap()
    }
}

impl Store for Switched {
    type Decide = Answer<Decision>;
    type Settle = Answer<Settled>;
    type Reset = Answer<()>;

    fn decide(&self, check: Check) -> Self::Decide {
        match self.state() {
            State::Works => Box::pin(self.store.decide(check)),
            State::Takes(time) => late(time, self.store.decide(check)),
            State::Fails => Box::pin(Failing.decide(check)),
            State::Hangs => self.never(Silent.decide(check)),
        }
    }

    fn settle(&self, settlement: Settlement) -> Self::Settle {
        match self.state() {
            State::Works => Box::pin(self.store.settle(settlement)),
            State::Takes(time) => late(time, self.store.settle(settlement)),
            State::Fails => Box::pin(Failing.settle(settlement)),
            State::Hangs => self.never(Silent.settle(settlement)),
        }
    }

    fn reset(&self, limit: Limit, key: Key) -> Self::Reset {
        match self.state() {
            State::Works => Box::pin(self.store.reset(limit, key)),
            State::Takes(time) => late(time, self.store.reset(limit, key)),
            State::Fails => Box::pin(Failing.reset(limit, key)),
            State::Hangs => self.never(Silent.reset(limit, key)),
        }
    }

    fn local_state(&self) -> Option<&LocalState> {
        self.local_state.as_ref()
    }
}

fn late<T>(time: Duration, answer: impl Future<Output = Result<T, StoreError>> + Send + 'static) -> Answer<T> {
    Box::pin(async move {
        sleep(time).await;
        answer.await
    })
}
