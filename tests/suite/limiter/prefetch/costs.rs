//! What prefetches cost the store, in any traffic: at most a tenth more calls, and a fifth more
//! time. The time is virtual.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use proptest::{collection::vec, prelude::*, test_runner::TestRunner};
use tokio::{task::JoinSet, time::advance};
use tower_sliding_window::{
    Check, Key, MemoryStore, Store,
    settlement::{Settled, Settlement},
    store::{LocalState, StoreFuture},
};

use super::*;
use crate::support::proxy::Proxy;

/// The calls of the 64 prefetches that a process may take before any has paid off.
const FIRST: u64 = 128;

/// A prefetch, and giving it back, take about three times as long as a plain check: 88 microseconds
/// of Redis, not 30.
const TIME_OF_PREFETCH: u64 = 3;

/// A store at a distance, which counts calls.
#[derive(Clone)]
struct Counting {
    memory: MemoryStore,
    state: LocalState,
    trip: Duration,
    checks: Arc<AtomicU64>,
    prefetches: Arc<AtomicU64>,
}

impl Counting {
    fn at(trip: Duration) -> Self {
        let state = LocalState::default().with_prefetch();
        state.answered_in(trip);
        Self {
            memory: MemoryStore::new(),
            state,
            trip,
            checks: Arc::default(),
            prefetches: Arc::default(),
        }
    }

    fn calls(&self) -> (u64, u64) {
        (
            self.checks.load(Ordering::SeqCst),
            self.prefetches.load(Ordering::SeqCst),
        )
    }
}

impl Store for Counting {
    fn decide(&self, check: Check) -> StoreFuture<Decision> {
        let is_prefetch = check.charges().any(|charge| charge.lease().is_some());
        if is_prefetch {
            &self.prefetches
        } else {
            &self.checks
        }
        .fetch_add(1, Ordering::SeqCst);
        let store = self.clone();
        Box::pin(async move {
            sleep(store.trip).await;
            store.memory.decide(check).await
        })
    }

    fn settle(&self, settlement: Settlement) -> StoreFuture<Settled> {
        self.prefetches.fetch_add(1, Ordering::SeqCst);
        let store = self.clone();
        Box::pin(async move {
            sleep(store.trip).await;
            store.memory.settle(settlement).await
        })
    }

    fn reset(&self, limit: Limit, key: Key) -> StoreFuture<()> {
        self.memory.reset(limit, key)
    }

    fn local_state(&self) -> Option<&LocalState> {
        Some(&self.state)
    }
}

/// Requests of some keys, so long after the ones before.
#[derive(Clone, Debug)]
struct Burst {
    keys: u64,
    first_key: u64,
    requests: u64,
    /// True if they come one after the other, and not all at once.
    in_turn: bool,
    after: Duration,
}

/// Returns the requests, the checks that asked the store, and the calls of prefetches.
fn run(trip: Duration, limit: &Limit, bursts: &[Burst]) -> (u64, u64, u64) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .unwrap();
    runtime.block_on(async {
        let store = Counting::at(trip);
        let limiter = Limiter::new(store.clone())
            .deadline(TEST_TIMEOUT)
            .refusal_cache(Duration::ZERO);
        let mut requests = 0;
        for burst in bursts {
            sleep(burst.after).await;
            let mut keys = JoinSet::new();
            for key in burst.first_key..burst.first_key + burst.keys {
                let (limiter, limit, burst) = (limiter.clone(), limit.clone(), burst.clone());
                keys.spawn(async move {
                    let ask = async || drop(limiter.check(&limit, key, 1).await.unwrap());
                    if burst.in_turn {
                        for _ in 0..burst.requests {
                            ask().await;
                            sleep(Duration::from_millis(2)).await;
                        }
                    } else {
                        join_all((0..burst.requests).map(|_| ask())).await;
                    }
                });
            }
            keys.join_all().await;
            requests += burst.keys * burst.requests;
        }
        // What is held is given back.
        advance(Duration::from_secs(5)).await;
        limiter.shutdown(Duration::from_secs(10)).await.unwrap();
        let (checks, prefetches) = store.calls();
        (requests, checks, prefetches)
    })
}

fn assert_cheap((requests, checks, prefetches): (u64, u64, u64)) -> Result<(), TestCaseError> {
    let figures = format!("{requests} requests, {checks} checks, {prefetches} calls of prefetches");
    prop_assert!(
        (checks + prefetches) * 10 <= (requests + FIRST) * 11,
        "{}",
        figures
    );
    let time = checks + TIME_OF_PREFETCH * prefetches;
    prop_assert!(
        time * 10 <= requests * 12 + FIRST * TIME_OF_PREFETCH * 10,
        "{}",
        figures
    );
    Ok(())
}

/// Three requests of each key, and then none: nothing of a prefetch is ever spent.
#[test]
fn keys_that_fall_quiet_cost_hardly_more_than_without_prefetch() {
    for (millis, requests) in [(80, 3), (80, 6), (1, 17), (0, 18)] {
        let burst = |number: u64| Burst {
            keys: 300,
            first_key: 300 * number,
            requests,
            in_turn: millis > 1,
            after: Duration::from_secs(3),
        };
        let bursts: Vec<Burst> = (0..10).map(burst).collect();
        let figures = run(Duration::from_millis(millis), &API, &bursts);
        println!("{millis} ms: {figures:?}");
        assert_cheap(figures).unwrap();
    }
}

/// The commands within scripts tell the work of Redis, whatever the machine does meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_that_fall_quiet_far_away_take_hardly_more_work_of_redis() {
    const KEYS: u64 = 600;
    let mut work = [0, 0];
    let plain = Limit::per_minute("api", API.units());
    for (limit, work) in [plain, API].iter().zip(&mut work) {
        let server = RedisServer::start();
        let proxy = Proxy::start(&server).await;
        proxy.delay_replies(Duration::from_millis(80));
        let limiter =
            Limiter::new(RedisStore::connect(proxy.url()).await.unwrap()).deadline(TEST_TIMEOUT);
        for round in 0..4 {
            let ask = async |key: u64| {
                for _ in 0..3 {
                    assert!(
                        check(&limiter, limit, &format!("{round}-{key}"), 1)
                            .await
                            .is_allowed()
                    );
                }
            };
            join_all((0..KEYS).map(ask)).await;
            sleep(Duration::from_millis(700)).await;
        }
        limiter.shutdown(Duration::from_secs(10)).await.unwrap();
        *work = server.calls("z");
    }
    let [plain, prefetched] = work;
    // Taking a prefetch and giving it back take eleven commands.
    assert!(
        prefetched * 10 <= plain * 12 + 64 * 11 * 10,
        "{prefetched} commands, and {plain} without prefetch"
    );
}

/// A busy key pays for its prefetches, near and far, whatever others have wasted before.
#[test]
fn a_busy_key_is_decided_in_the_process_after_others_have_wasted_their_prefetches() {
    for millis in [1, 80] {
        let wasted = Burst {
            keys: 2_000,
            first_key: 1,
            requests: 20,
            in_turn: false,
            after: Duration::ZERO,
        };
        let busy = Burst {
            keys: 1,
            first_key: 0,
            requests: 5_000,
            in_turn: true,
            after: Duration::from_secs(3),
        };
        let before = run(
            Duration::from_millis(millis),
            &API,
            std::slice::from_ref(&wasted),
        );
        let after = run(Duration::from_millis(millis), &API, &[wasted, busy]);
        let [checks, prefetches] = [after.1 - before.1, after.2 - before.2];
        println!("{millis} ms: {checks} of 5,000 asked, {prefetches} calls of prefetches");
        assert!(
            checks <= 500 && prefetches <= 500,
            "{millis} ms: {checks} checks, {prefetches} calls"
        );
    }
}

#[test]
fn no_traffic_makes_prefetches_that_cost_more_than_they_save() {
    let burst = (
        1..150_u64,
        0..1_000_u64,
        1..30_u64,
        any::<bool>(),
        0..2_000_u64,
    )
        .prop_map(|(keys, first_key, requests, in_turn, after)| {
            let after = Duration::from_millis(after);
            Burst {
                keys,
                first_key,
                requests,
                in_turn,
                after,
            }
        });
    let limit = prop_oneof![
        Just(API),
        Just(Limit::per_second("few", 200).prefetch(DEFAULT_LIFE))
    ];
    let traffic = (
        prop_oneof![Just(0_u64), 1..200_u64],
        limit,
        vec(burst, 1..12),
    );
    let mut runner = TestRunner::new(ProptestConfig {
        cases: 32,
        failure_persistence: None,
        ..Default::default()
    });
    let outcome = runner.run(&traffic, |(trip, limit, bursts)| {
        assert_cheap(run(Duration::from_millis(trip), &limit, &bursts))
    });
    outcome.unwrap();
}
