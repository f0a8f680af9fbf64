//! Each place is renewed, lost and freed by itself, whatever else its check, its id or its runtime
//! has.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use futures_util::future::join_all;
use tower_sliding_window::{
    Key, Store,
    check::AdmissionId,
    settlement::{Settled, Settlement},
    store::{LocalState, StoreFuture},
};

use super::*;
use crate::support::proxy::Proxy;

const SHORT: Limit = Limit::concurrent("short", 2).freed_after(Duration::from_secs(1));

async fn limiter(server: &RedisServer) -> Limiter {
    Limiter::new(RedisStore::connect(&server.url()).await.unwrap()).deadline(TEST_TIMEOUT)
}

/// The life of one is over, or it was reset, while the other is still there.
#[tokio::test]
async fn one_of_two_places_that_is_lost_is_taken_again() {
    let server = RedisServer::start();
    let (own, other) = (limiter(&server).await, limiter(&server).await);
    let held = own
        .check_all(check_of([charge(&SHORT, 1), charge(&STREAMS, 1)]))
        .await
        .unwrap();
    // Nothing of this runtime runs meanwhile. Whoever asks drops a place whose life is over.
    std::thread::sleep(ms(1_200));
    std::thread::scope(|scope| {
        let ask = async {
            limiter(&server)
                .await
                .peek(&SHORT, "ada")
                .await
                .unwrap()
                .binding()
                .used
        };
        assert_eq!(
            scope.spawn(|| one_thread().block_on(ask)).join().unwrap(),
            0
        );
    });
    until_held(&other, &SHORT, 1).await;
    assert!(held.has_lost_place());
    let key = server
        .keys()
        .into_iter()
        .find(|key| key.contains(STREAMS.name()))
        .unwrap();
    assert_eq!(server.run::<u64>(&format!("UNLINK {key}")), 1);
    until_held(&other, &STREAMS, 1).await;
    drop(held);
    until_held(&other, &SHORT, 0).await;
    until_held(&other, &STREAMS, 0).await;
}

#[tokio::test]
async fn places_of_different_checks_with_one_id_are_all_renewed() {
    let server = RedisServer::start();
    let limiter = limiter(&server).await;
    let check = |key: &str| Check::new(Charge::new(SHORT, key, 1).unwrap()).with_id(AdmissionId(7));
    let bob = limiter.check_all(check("bob")).await.unwrap();
    let ada = limiter.check_all(check("ada")).await.unwrap();
    sleep(seconds(2)).await;
    assert_eq!(limiter.peek(&SHORT, "bob").await.unwrap().binding().used, 1);
    drop(bob);
    sleep(seconds(2)).await;
    assert_eq!(limiter.peek(&SHORT, "ada").await.unwrap().binding().used, 1);
    assert!(!ada.has_lost_place());
}

/// The first runtime is the one that has begun to renew.
#[test]
fn a_runtime_that_ends_or_stands_still_loses_no_place_of_another() {
    for ends in [true, false] {
        let server = RedisServer::start();
        let (first, second) = (one_thread(), one_thread());
        let limiter = first.block_on(limiter(&server));
        let of_first = first.block_on(limiter.check(&SHORT, "bob", 1)).unwrap();
        let held = second.block_on(limiter.check(&SHORT, "ada", 1)).unwrap();
        let first = (!ends).then_some(first);
        second.block_on(async {
            for _ in 0..30 {
                sleep(ms(100)).await;
                let used = async |key| limiter.peek(&SHORT, key).await.unwrap().binding().used;
                assert_eq!(
                    [used("ada").await, used("bob").await],
                    [1, 1],
                    "the first runtime has ended: {ends}"
                );
            }
        });
        assert!(!held.has_lost_place() && !of_first.has_lost_place());
        drop((held, of_first, first));
    }
}

#[test]
fn a_place_is_freed_by_another_runtime_if_its_own_has_ended() {
    let (server, first) = (RedisServer::start(), one_thread());
    let limiter = first.block_on(limiter(&server));
    let long = Limit::concurrent("long", 1).freed_after(seconds(3_600));
    let held = first.block_on(enter(&limiter, &long));
    drop(first);
    one_thread().block_on(async {
        drop(held);
        until_held(&limiter, &long, 0).await;
    });
}

/// Renewals travel side by side, so that a distance does not add up.
#[tokio::test]
async fn many_places_are_renewed_in_a_far_redis() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server).await;
    proxy.delay_replies(ms(250));
    let limiter =
        Limiter::new(RedisStore::connect(proxy.url()).await.unwrap()).deadline(TEST_TIMEOUT);
    let many = Limit::concurrent("many", 2_000).freed_after(seconds(3));
    let places = (0..2_000).map(|_| limiter.check(&many, "ada", 1));
    let held: Vec<_> = join_all(places)
        .await
        .into_iter()
        .map(Result::unwrap)
        .collect();
    sleep(seconds(7)).await;
    let lost = held.iter().filter(|place| place.has_lost_place()).count();
    assert_eq!(lost, 0, "of {}", held.len());
}

/// Counts the checks that reach the store, and may pass on its local state.
struct Counted(RedisStore, Arc<AtomicU64>, bool);

impl Store for Counted {
    fn decide(&self, check: Check) -> StoreFuture<Decision> {
        self.1.fetch_add(1, Ordering::Relaxed);
        self.0.decide(check)
    }

    fn settle(&self, settlement: Settlement) -> StoreFuture<Settled> {
        self.0.settle(settlement)
    }

    fn reset(&self, limit: Limit, key: Key) -> StoreFuture<()> {
        self.0.reset(limit, key)
    }

    fn local_state(&self) -> Option<&LocalState> {
        self.0.local_state().filter(|_| self.2)
    }
}

#[tokio::test]
async fn a_renewal_wakes_no_caller_that_waits() {
    let (server, checks) = (RedisServer::start(), Arc::new(AtomicU64::new(0)));
    let store = Counted(
        RedisStore::connect(&server.url()).await.unwrap(),
        Arc::clone(&checks),
        true,
    );
    let limiter = Limiter::new(store)
        .deadline(TEST_TIMEOUT)
        .retry_reserved_after(seconds(3_600));
    // A caller that waits asks again at the end of the life, if not before.
    let long = Limit::concurrent("long", 1).freed_after(seconds(6));
    let held = enter(&limiter, &long).await;
    let waiting = tokio::spawn({
        let (limiter, long) = (limiter.clone(), long.clone());
        async move {
            limiter
                .acquire(&long, "ada", 1, TEST_TIMEOUT)
                .await
                .unwrap()
        }
    });
    sleep(ms(500)).await;
    let before = checks.load(Ordering::Relaxed);
    // It is renewed after three seconds.
    sleep(seconds(4)).await;
    assert_eq!(checks.load(Ordering::Relaxed), before);
    drop(held);
    assert!(waiting.await.unwrap().is_allowed());
}

#[tokio::test]
async fn places_of_a_wrapped_store_without_a_local_state_are_renewed() {
    let server = RedisServer::start();
    let store = Counted(
        RedisStore::connect(&server.url()).await.unwrap(),
        Arc::default(),
        false,
    );
    let limiter = Limiter::new(store).deadline(TEST_TIMEOUT);
    let held = [enter(&limiter, &SHORT).await, enter(&limiter, &SHORT).await];
    sleep(seconds(3)).await;
    assert!(!enter(&limiter, &SHORT).await.is_allowed());
    drop(held);
    until_held(&limiter, &SHORT, 0).await;
}

/// All at once, which takes Redis longer than the deadline.
#[tokio::test]
async fn each_of_ten_thousand_places_is_freed_once() {
    let server = RedisServer::start();
    let (limiter, other) = (
        limiter(&server).await.deadline(ms(200)),
        limiter(&server).await,
    );
    let many = Limit::concurrent("many", 100_000);
    let mut held = Vec::new();
    while held.len() < 10_000 {
        let places = join_all((0..100).map(|_| limiter.check(&many, "ada", 1))).await;
        held.extend(places.into_iter().filter_map(Result::ok));
    }
    let (count, before) = (held.len() as u64, server.calls("zrem"));
    drop(held);
    until_held(&other, &many, 0).await;
    sleep(ms(200)).await;
    assert_eq!(server.calls("zrem") - before, count);
}

/// The breaker is open for all the time.
#[tokio::test]
async fn a_deadline_below_the_reply_time_loses_no_place() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server).await;
    let limiter = Limiter::new(RedisStore::connect(proxy.url()).await.unwrap()).deadline(ms(20));
    let (held, other) = (enter(&limiter, &SHORT).await, self::limiter(&server).await);
    proxy.delay_replies(ms(100));
    let begun = Instant::now();
    while begun.elapsed() < seconds(4) {
        assert!(limiter.check(&STREAMS, "ada", 1).await.is_err());
        assert_eq!(other.peek(&SHORT, "ada").await.unwrap().binding().used, 1);
        sleep(ms(20)).await;
    }
    assert!(!held.has_lost_place());
    drop(held);
    until_held(&other, &SHORT, 0).await;
}
