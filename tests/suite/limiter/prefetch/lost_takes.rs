//! Prefetches that the store refuses or never answers, and clocks that step back meanwhile.

use std::{
    future::pending,
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
};

use tokio::runtime::Handle;
use tower_sliding_window::{
    Charge, Check, Key, Store,
    error::{StoreError, StoreErrorKind},
    settlement::{Settled, Settlement},
    store::{LocalState, StoreFuture},
};

use super::*;

/// What happens to prefetches that are asked for. All other calls reach Redis.
const TAKEN: u8 = 0;
const FAILED: u8 = 1;
const UNANSWERED: u8 = 2;

#[derive(Clone)]
struct Takes {
    store: RedisStore,
    state: LocalState,
    outcome: Arc<AtomicU8>,
}

impl Takes {
    fn new(server: &RedisServer, clock: &ManualClock) -> Self {
        let store = server.store().clock(clock).build().unwrap();
        Self {
            store,
            state: LocalState::by(clock).with_prefetch(),
            outcome: Arc::default(),
        }
    }

    fn set(&self, outcome: u8) {
        self.outcome.store(outcome, Ordering::SeqCst);
    }

    fn limiter(&self) -> Limiter {
        Limiter::new(self.clone())
            .deadline(TEST_TIMEOUT)
            .breaker(Breaker::OFF)
    }
}

impl Store for Takes {
    fn decide(&self, check: Check) -> StoreFuture<Decision> {
        let is_prefetch = check
            .charges()
            .any(|charge| charge.lease().is_some_and(|lease| lease > API.window()));
        match self.outcome.load(Ordering::SeqCst) {
            FAILED if is_prefetch => Box::pin(async {
                Err(StoreError::new(
                    "deciding a check",
                    StoreErrorKind::Other,
                    "it fails",
                ))
            }),
            UNANSWERED if is_prefetch => Box::pin(pending()),
            _ => self.store.decide(check),
        }
    }

    fn settle(&self, settlement: Settlement) -> StoreFuture<Settled> {
        self.store.settle(settlement)
    }

    fn reset(&self, limit: Limit, key: Key) -> StoreFuture<()> {
        self.store.reset(limit, key)
    }

    fn local_state(&self) -> Option<&LocalState> {
        Some(&self.state)
    }
}

/// The next prefetch is asked for before the first one is used up.
#[tokio::test]
async fn a_prefetch_is_given_back_after_its_life_while_the_next_gets_no_reply() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let store = Takes::new(&server, &clock);
    let limiter = store.limiter();
    let mut requests = hold(&server, &limiter, &API, "ada").await;
    store.set(UNANSWERED);
    let (_, held) = used(&server, &clock, &API, "ada").await;
    // Until a few units are left.
    for _ in 0..held - 3 {
        assert!(check(&limiter, &API, "ada", 1).await.is_allowed());
        requests += 1;
    }
    sleep(LIFE).await;
    clock.advance(LIFE);
    wait_until_used(&server, &clock, &API, "ada", requests).await;
}

/// The units that this process holds would be enough with those that Redis has left.
#[tokio::test]
async fn units_that_this_process_holds_are_given_back_for_its_own_checks() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let (limiter, other) = (limiter_by(&server, &clock), limiter_by(&server, &clock));
    let limit = Limit::per_minute("limit", 1_000).prefetch(DEFAULT_LIFE);
    let requests = hold(&server, &limiter, &limit, "ada").await;
    let (all, reserved) = used(&server, &clock, &limit, "ada").await;
    let unspent = all - requests;
    assert!(
        (1..reserved).contains(&unspent),
        "{all} {reserved} {requests}"
    );
    // One is left in Redis. The clock stands still, so no prefetch ends, and no refusal is
    // forgotten.
    assert!(
        check(&other, &limit, "ada", limit.units() - all - 1)
            .await
            .is_allowed()
    );
    // By its clock, the process would remember a refusal for ever.
    let limiter = limiter.refusal_cache(Duration::ZERO);
    let begun = Instant::now();
    while !check(&limiter, &limit, "ada", unspent + 1)
        .await
        .is_allowed()
    {
        assert!(
            begun.elapsed() < TEST_TIMEOUT / 4,
            "{unspent} units are held, and one is left"
        );
        sleep(Duration::from_millis(5)).await;
    }
}

/// A reservation asks Redis, which does not know what this process has not spent.
#[tokio::test]
async fn units_that_this_process_holds_are_given_back_for_its_own_reservations() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let (limiter, other) = (limiter_by(&server, &clock), limiter_by(&server, &clock));
    let limit = Limit::per_minute("limit", 1_000).prefetch(DEFAULT_LIFE);
    let mut requests = hold(&server, &limiter, &limit, "ada").await;
    // On a slow machine, the first prefetch is used up by the requests that were on their way when
    // it came.
    while used(&server, &clock, &limit, "ada").await.0 < requests + 2 {
        requests += hold(&server, &limiter, &limit, "ada").await;
    }
    let left = other.peek(&limit, "ada").await.unwrap().remaining();
    assert!(check(&other, &limit, "ada", left).await.is_allowed());
    // By its clock, the process would remember a refusal for ever.
    let limiter = limiter.refusal_cache(Duration::ZERO);
    let begun = Instant::now();
    loop {
        let charge = Charge::new(limit.clone(), "ada", 2)
            .unwrap()
            .reserve(Duration::from_secs(10));
        if limiter
            .check_all(Check::new(charge))
            .await
            .unwrap()
            .is_allowed()
        {
            return;
        }
        assert!(
            begun.elapsed() < TEST_TIMEOUT / 4,
            "held units are missing to the process that holds them"
        );
        sleep(Duration::from_millis(5)).await;
    }
}

/// The task waits for a while after a prefetch has failed, and the clock steps back by much more.
#[tokio::test]
async fn a_clock_that_steps_back_keeps_no_task_and_no_key_from_prefetches() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let store = Takes::new(&server, &clock);
    let limiter = store.limiter();
    let _ = check(&limiter, &API, "bob", 1).await;
    sleep(Duration::from_millis(50)).await;
    let tasks = || Handle::current().metrics().num_alive_tasks();
    let before = tasks();
    store.set(FAILED);
    for _ in 0..20 {
        assert!(check(&limiter, &API, "ada", 1).await.is_allowed());
    }
    assert!(tasks() > before, "a task has asked for a prefetch");
    clock.step_back(Duration::from_secs(3_600));
    store.set(TAKEN);
    sleep(LIFE).await;
    clock.advance(LIFE);
    let begun = Instant::now();
    while tasks() > before {
        assert!(
            begun.elapsed() < TEST_TIMEOUT / 4,
            "the task is alive {:?} after the step",
            begun.elapsed()
        );
        sleep(Duration::from_millis(5)).await;
    }
    hold(&server, &limiter, &API, "ada").await;
}
