//! Places are freed and renewed, whatever fails, hangs or moves meanwhile.

use std::{
    future::{pending, ready},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use futures_util::future::join_all;
use tower_sliding_window::{
    Key, Store,
    error::{StoreError, StoreErrorKind},
    settlement::{Settled, Settlement},
    store::{ManualClock, StoreFuture},
    testing::Fault,
};

use super::*;
use crate::support::{proxy::Proxy, stores::Watched};

/// Its life is longer than a test.
fn long() -> Limit {
    Limit::concurrent("long", 1_000).freed_after(seconds(3_600))
}

async fn enter_all(
    limiter: &Limiter,
    limit: &Limit,
    key: &'static str,
    places: usize,
) -> Vec<Decision> {
    let held = join_all((0..places).map(|_| limiter.check(limit, key, 1))).await;
    held.into_iter().map(Result::unwrap).collect()
}

fn failure() -> StoreError {
    StoreError::new("asking a test's store", StoreErrorKind::Other, "it fails")
}

/// What a store that wraps another does with a settlement, and with a check under an id, as of a
/// place that is taken again.
struct Wrapped<S> {
    store: S,
    settle: fn(&S, Settlement) -> StoreFuture<Settled>,
    take_again: fn(StoreFuture<Decision>) -> StoreFuture<Decision>,
    is_taking: Arc<AtomicBool>,
}

impl<S: Store> Wrapped<S> {
    fn new(store: S) -> Self {
        let settle = |store: &S, settlement| store.settle(settlement);
        Self {
            store,
            settle,
            take_again: |decision| decision,
            is_taking: Arc::default(),
        }
    }
}

impl<S: Store> Store for Wrapped<S> {
    fn decide(&self, check: Check) -> StoreFuture<Decision> {
        if check.id().is_none() {
            return self.store.decide(check);
        }
        self.is_taking.store(true, Ordering::SeqCst);
        (self.take_again)(self.store.decide(check))
    }

    fn decide_now(&self, check: &Check) -> Option<Result<Decision, StoreError>> {
        self.store.decide_now(check)
    }

    fn settle(&self, settlement: Settlement) -> StoreFuture<Settled> {
        (self.settle)(&self.store, settlement)
    }

    fn reset(&self, limit: Limit, key: Key) -> StoreFuture<()> {
        self.store.reset(limit, key)
    }
}

#[test]
fn a_store_that_decides_at_once_may_fail_without_a_runtime() {
    let store = Wrapped {
        settle: |_, _| Box::pin(ready(Err(failure()))),
        ..Wrapped::new(MemoryStore::new())
    };
    let limiter = Limiter::new(store);
    let held = one_thread().block_on(enter(&limiter, &STREAMS));
    drop(held);
}

/// After some seconds, and within the ten for which releases are tried.
#[tokio::test(start_paused = true)]
async fn a_store_that_is_back_frees_places() {
    let store = Watched::new(MemoryStore::new());
    let limiter = Limiter::new(store.clone());
    for outage in [1, 3, 6, 8] {
        let held = enter(&limiter, &long()).await;
        store.set_for_settlements(Fault::Fails);
        drop(held);
        sleep(seconds(outage)).await;
        assert_eq!(
            limiter.peek(&long(), "ada").await.unwrap().binding().used,
            1
        );
        store.set_for_settlements(Fault::None);
        sleep(ms(1_200)).await;
        assert_eq!(
            limiter.peek(&long(), "ada").await.unwrap().binding().used,
            0,
            "after {outage} s"
        );
    }
}

/// More than are renewed at once, and due before the one that does not hang.
#[tokio::test]
async fn renewals_that_hang_delay_no_other() {
    let server = RedisServer::start();
    let settle = |store: &RedisStore, settlement: Settlement| -> StoreFuture<Settled> {
        let hangs = settlement
            .check
            .charges()
            .any(|charge| *charge.key() == Key::from("bob"));
        if hangs {
            Box::pin(pending())
        } else {
            store.settle(settlement)
        }
    };
    let store = RedisStore::connect(&server.url()).await.unwrap();
    let limiter = Limiter::new(Wrapped {
        settle,
        ..Wrapped::new(store)
    })
    .deadline(TEST_TIMEOUT);
    let life = Limit::concurrent("life", 1_000).freed_after(seconds(3));
    let (_bob, ada) = (
        enter_all(&limiter, &life, "bob", 1_000).await,
        enter(&limiter, &life).await,
    );
    let begun = Instant::now();
    while begun.elapsed() < seconds(6) {
        assert!(!ada.has_lost_place(), "after {:?}", begun.elapsed());
        sleep(ms(20)).await;
    }
}

/// The first call for each place.
#[tokio::test]
async fn a_renewal_that_hangs_is_tried_again() {
    static HANG: AtomicU64 = AtomicU64::new(0);
    let server = RedisServer::start();
    let settle = |store: &RedisStore, settlement: Settlement| -> StoreFuture<Settled> {
        let hangs = HANG.fetch_add(1, Ordering::SeqCst) < 10;
        if hangs {
            Box::pin(pending())
        } else {
            store.settle(settlement)
        }
    };
    let store = RedisStore::connect(&server.url()).await.unwrap();
    let limiter = Limiter::new(Wrapped {
        settle,
        ..Wrapped::new(store)
    })
    .deadline(TEST_TIMEOUT);
    let life = Limit::concurrent("life", 10).freed_after(seconds(3));
    let (held, begun) = (enter_all(&limiter, &life, "ada", 10).await, Instant::now());
    while begun.elapsed() < seconds(6) {
        assert!(
            !held.iter().any(Decision::has_lost_place),
            "after {:?}",
            begun.elapsed()
        );
        sleep(ms(20)).await;
    }
}

/// A store whose renewals all hang, and which does not decide at once, so that places are renewed.
struct Hanging(MemoryStore, Arc<AtomicU64>);

impl Store for Hanging {
    fn decide(&self, check: Check) -> StoreFuture<Decision> {
        self.0.decide(check)
    }

    fn settle(&self, _: Settlement) -> StoreFuture<Settled> {
        self.1.fetch_add(1, Ordering::SeqCst);
        Box::pin(pending())
    }

    fn reset(&self, limit: Limit, key: Key) -> StoreFuture<()> {
        self.0.reset(limit, key)
    }
}

/// Of a place that lives for an hour: it is renewed after half of it, and tried again an eighth
/// later.
#[tokio::test(start_paused = true)]
async fn no_renewal_hangs_for_a_part_of_a_long_life() {
    let calls = Arc::default();
    let limiter = Limiter::new(Hanging(MemoryStore::new(), Arc::clone(&calls)));
    let _held = enter(&limiter, &long()).await;
    sleep(seconds(60 * 40)).await;
    assert_eq!(calls.load(Ordering::SeqCst), 2);
}

/// The reply is lost, and its decision has been dropped before.
#[tokio::test]
async fn a_place_that_is_taken_again_meanwhile_is_freed() {
    let server = RedisServer::start();
    let take_again = |decision: StoreFuture<Decision>| -> StoreFuture<Decision> {
        let taking = tokio::spawn(async move {
            sleep(ms(500)).await;
            assert!(decision.await.unwrap().is_allowed());
        });
        Box::pin(async move {
            taking.await.unwrap();
            Err(failure())
        })
    };
    let store = Wrapped {
        take_again,
        ..Wrapped::new(RedisStore::connect(&server.url()).await.unwrap())
    };
    let (is_taking, limiter) = (
        Arc::clone(&store.is_taking),
        Limiter::new(store).deadline(TEST_TIMEOUT),
    );
    let life = Limit::concurrent("life", 1).freed_after(seconds(6));
    let held = enter(&limiter, &life).await;
    server.run::<()>("FLUSHALL");
    until("it is not taken again", || is_taking.load(Ordering::SeqCst)).await;
    drop(held);
    sleep(seconds(1)).await;
    let begun = Instant::now();
    until_held(&limiter, &life, 0).await;
    assert!(begun.elapsed() < seconds(4), "its life was over");
}

#[tokio::test]
async fn a_settlement_that_frees_a_place_has_the_time_of_the_store() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let limiter =
        Limiter::new(server.store().clock(&clock).build().unwrap()).deadline(TEST_TIMEOUT);
    clock.advance(seconds(3_600));
    let (check, held) = (
        Check::new(charge(&STREAMS, 1)),
        enter(&limiter, &STREAMS).await,
    );
    let settled = limiter
        .settle(Settlement::new(check, &held, |_| Some(0)))
        .await
        .unwrap();
    assert_eq!(
        (settled.decision.at(), settled.was_applied),
        (clock.now(), true)
    );
}

#[tokio::test]
async fn a_release_whose_reply_is_lost_was_applied() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server).await;
    let limiter =
        Limiter::new(RedisStore::connect(proxy.url()).await.unwrap()).deadline(TEST_TIMEOUT);
    let (check, held) = (
        Check::new(charge(&long(), 1)),
        enter(&limiter, &long()).await,
    );
    proxy.lose_replies(1);
    let settled = limiter
        .settle(Settlement::new(check, &held, |_| Some(0)))
        .await
        .unwrap();
    assert!(proxy.has_lost_them() && settled.was_applied);
}

/// The old node redirects to the new one, which accepts only what is redirected.
#[cfg(feature = "cluster")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn places_whose_slot_moves_are_freed() {
    use crate::support::redis_cluster::RedisCluster;

    let cluster = RedisCluster::start(3).await;
    let limiter = cluster.limiter(cluster.builder()).deadline(TEST_TIMEOUT);
    let held = enter_all(&limiter, &long(), "ada", 600).await;
    let from = cluster
        .0
        .iter()
        .position(|node| !node.keys().is_empty())
        .unwrap();
    let (to, key) = ((from + 1) % 3, cluster.0[from].only_key());
    let id = |node: usize| cluster.0[node].run::<String>("CLUSTER MYID");
    let slot: u16 = cluster.0[from].run(&format!("CLUSTER KEYSLOT {key}"));
    cluster.0[to].run::<()>(&format!("CLUSTER SETSLOT {slot} IMPORTING {}", id(from)));
    cluster.0[from].run::<()>(&format!("CLUSTER SETSLOT {slot} MIGRATING {}", id(to)));
    let address = cluster.0[to].address().replace(':', " ");
    cluster.0[from].run::<()>(&format!("MIGRATE {address} {key} 0 5000"));
    assert_eq!(
        limiter.peek(&long(), "ada").await.unwrap().binding().used,
        600
    );
    drop(held);
    until("some are never freed", || cluster.0[to].keys().is_empty()).await;
}
