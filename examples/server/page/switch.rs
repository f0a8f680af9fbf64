//! The store of the example: it passes checks on, shows them to the page, and fails while the page
//! has stopped it.

use std::{
    io::{self, ErrorKind},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use tower_sliding_window::{
    Check, Decision, Key, Limit, Store,
    error::{StoreError, StoreErrorKind},
    settlement::{Settled, Settlement},
    store::{LocalState, StoreFuture},
};

use super::history::History;

/// A store that can be stopped. Clones are one switch.
#[derive(Clone)]
pub(super) struct Switch {
    store: Arc<dyn Store>,
    pub(super) history: History,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    is_stopped: AtomicBool,
    calls: AtomicU64,
    micros: AtomicU64,
}

impl Switch {
    pub(super) fn new(store: Arc<dyn Store>, history: History) -> Self {
        Self {
            store,
            history,
            state: Arc::default(),
        }
    }

    pub(super) fn stop(&self, is_stopped: bool) {
        self.state.is_stopped.store(is_stopped, Relaxed);
    }

    pub(super) fn is_stopped(&self) -> bool {
        self.state.is_stopped.load(Relaxed)
    }

    /// The calls for requests, and their mean time.
    pub(super) fn cost(&self) -> (u64, Duration) {
        let calls = self.state.calls.load(Relaxed);
        (
            calls,
            Duration::from_micros(self.state.micros.load(Relaxed) / calls.max(1)),
        )
    }

    /// Fails as a Redis does whose process has ended.
    fn passes<T>(&self, store: impl FnOnce(&dyn Store) -> T) -> Result<T, StoreError> {
        if self.is_stopped() {
            let refused = io::Error::new(
                ErrorKind::ConnectionRefused,
                "the page has stopped the store",
            );
            return Err(StoreError::new(
                "connecting",
                StoreErrorKind::Other,
                refused,
            ));
        }
        Ok(store(&*self.store))
    }

    /// The page's own checks cost no units, and are not counted. Neither are those for its fixed
    /// window and its counter.
    fn counts(&self, check: &Check) -> bool {
        check
            .charges()
            .all(|charge| charge.cost() > 0 && self.history.is_of_requests(charge.limit()))
    }

    fn decided(&self, check: &Check, begun: Instant, outcome: &Result<Decision, StoreError>) {
        if self.counts(check) {
            let micros = u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX);
            self.state.calls.fetch_add(1, Relaxed);
            self.state.micros.fetch_add(micros, Relaxed);
        }
        if let Ok(decision) = outcome {
            self.history.decided(check, decision);
        }
    }
}

impl Store for Switch {
    fn decide(&self, check: Check) -> StoreFuture<Decision> {
        let switch = self.clone();
        Box::pin(async move {
            let _deciding = switch.history.deciding(&check);
            let begun = Instant::now();
            let outcome = switch.passes(|store| store.decide(check.clone()))?.await;
            switch.decided(&check, begun, &outcome);
            outcome
        })
    }

    fn decide_now(&self, check: &Check) -> Option<Result<Decision, StoreError>> {
        let begun = Instant::now();
        let outcome = match self.passes(|store| store.decide_now(check)) {
            Ok(outcome) => outcome?,
            Err(error) => Err(error),
        };
        self.decided(check, begun, &outcome);
        Some(outcome)
    }

    fn settle(&self, settlement: Settlement) -> StoreFuture<Settled> {
        let settled = self.passes(|store| store.settle(settlement));
        Box::pin(async { settled?.await })
    }

    fn reset(&self, limit: Limit, key: Key) -> StoreFuture<()> {
        let reset = self.passes(|store| store.reset(limit, key));
        Box::pin(async { reset?.await })
    }

    fn local_state(&self) -> Option<&LocalState> {
        self.store.local_state()
    }
}
