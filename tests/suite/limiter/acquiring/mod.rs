//! `acquire`: callers wait in line for capacity, in order of arrival, for at most `max_wait`.
//!
//! Where the order matters, the test controls both tokio's time and the store's.

mod failing_stores;
mod histories;
mod identities;
mod line;
mod reserved_units;
mod returned_units;
mod runtimes;

use std::{
    fmt::Debug,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{task::JoinHandle, time::advance};
use tower_sliding_window::{
    Charge, Check, Decision, Error, Key, Limit, Limiter, MemoryStore, Store,
    settlement::{Settled, Settlement},
    store::{ManualClock, StoreFuture},
};

use crate::support::{let_tasks_run, ms, stores::failing};

const CALLS: Limit = Limit::per("calls", 3, ms(100));

/// A store that counts the checks it gets, and fails while `fails` is set.
#[derive(Clone, Debug)]
struct CountingStore {
    store: MemoryStore,
    checks_sent: Arc<AtomicU64>,
    fails: Arc<AtomicBool>,
}

impl Store for CountingStore {
    fn decide(&self, check: Check) -> StoreFuture<Decision> {
        self.checks_sent.fetch_add(1, Ordering::SeqCst);
        if self.fails.load(Ordering::SeqCst) {
            return failing().decide(check);
        }
        self.store.decide(check)
    }

    fn settle(&self, settlement: Settlement) -> StoreFuture<Settled> {
        self.store.settle(settlement)
    }

    fn reset(&self, limit: Limit, key: Key) -> StoreFuture<()> {
        if self.fails.load(Ordering::SeqCst) {
            return failing().reset(limit, key);
        }
        self.store.reset(limit, key)
    }
}

/// A limiter and its store, and the names of admitted callers in order.
struct Test {
    limiter: Limiter,
    store: CountingStore,
    clock: ManualClock,
    admitted: Arc<Mutex<Vec<&'static str>>>,
}

type Waiting = JoinHandle<Result<Decision, Error>>;

impl Test {
    fn start() -> Self {
        let clock = ManualClock::new();
        let store = MemoryStore::new().clock(&clock);
        let store = CountingStore {
            store,
            checks_sent: Arc::default(),
            fails: Arc::default(),
        };
        Self {
            limiter: Limiter::new(store.clone()),
            store,
            clock,
            admitted: Arc::default(),
        }
    }

    /// A test in which all units of `CALLS` are spent.
    async fn spent() -> Self {
        let test = Self::start();
        assert!(
            test.limiter
                .check(&CALLS, "ada", 3)
                .await
                .unwrap()
                .is_allowed()
        );
        test
    }

    /// Starts a caller that waits, and lets it get as far as it can.
    async fn wait(&self, name: &'static str, check: Check, max_wait: Duration) -> Waiting {
        let (limiter, admitted) = (self.limiter.clone(), Arc::clone(&self.admitted));
        let waiting = tokio::spawn(async move {
            let decision = limiter.acquire_all(check, max_wait).await?;
            if decision.is_allowed() {
                admitted.lock().unwrap().push(name);
            }
            Ok(decision)
        });
        let_tasks_run().await;
        waiting
    }

    async fn pass(&self, time: Duration) {
        self.clock.advance(time);
        advance(time).await;
        let_tasks_run().await;
    }

    fn admitted(&self) -> Vec<&'static str> {
        self.admitted.lock().unwrap().clone()
    }

    fn checks_sent(&self) -> u64 {
        self.store.checks_sent.swap(0, Ordering::SeqCst)
    }

    fn lines(&self) -> usize {
        lines(&self.limiter)
    }
}

/// The number of lines.
fn lines(limiter: &impl Debug) -> usize {
    let debug = format!("{limiter:?}");
    let (_, lines) = debug.split_once("Lines(").unwrap();
    lines.split_once(')').unwrap().0.parse().unwrap()
}

fn check_of_ada(cost: u64) -> Check {
    Check::new(Charge::new(CALLS, "ada", cost).unwrap())
}
