//! How long a refusal is known, how seldom Redis is asked about it meanwhile, and whose events end
//! it.

use std::{sync::Arc, time::Duration};

use futures_util::future::join_all;
use tokio::{sync::Notify, task::yield_now, time::sleep};
use tower_sliding_window::{
    Charge, Check, Decision, Error, Key, Limit, Limiter, MemoryStore, Store,
    settlement::{Settled, Settlement},
    store::{LocalState, ManualClock, StoreFuture},
};

use super::{CALLS, Test};
use crate::support::{
    MICROSECOND, TEST_TIMEOUT, charge, check_of, ms, redis_server::RedisServer, seconds,
};

const PLACES: Limit = Limit::concurrent("places", 50);

/// A used-up window of `ada`, and a place of all.
fn with_place() -> Check {
    check_of([charge(&CALLS, 1), Charge::new(PLACES, "all", 1).unwrap()])
}

fn is_refused(outcome: &Result<Decision, Error>) -> bool {
    matches!(outcome, Ok(decision) if !decision.is_allowed())
}

/// A flood costs Redis one call a second, whatever places others free.
#[tokio::test]
async fn a_refusal_beside_a_place_asks_redis_as_rarely_as_alone() {
    for check in [check_of([charge(&CALLS, 1)]), with_place()] {
        let test = Test::start();
        let limiter = test.refused().await;
        assert!(!limiter.check_all(check.clone()).await.unwrap().is_allowed());
        let mut calls = 0;
        for _ in 0..40 {
            // Another client takes a place, and frees it.
            let other = check_of([Charge::new(PLACES, "all", 1).unwrap()]);
            drop(limiter.check_all(other).await.unwrap());
            sleep(ms(5)).await;
            test.scripts();
            let outcomes = join_all((0..100).map(|_| limiter.check_all(check.clone()))).await;
            assert!(outcomes.iter().all(is_refused));
            calls += test.scripts();
            test.clock.advance(ms(100));
        }
        assert!(
            (3..=4).contains(&calls),
            "{calls} calls in four seconds: {check:?}"
        );
    }
}

/// Settlements of other keys do not concern it.
#[tokio::test]
async fn settlements_of_other_keys_leave_a_refusal_alone() {
    let test = Test::start();
    let limiter = test.refused().await;
    for other in 0..50_u64 {
        let reservation = limiter
            .reserve(&CALLS, other, 1, seconds(10))
            .await
            .unwrap()
            .unwrap();
        reservation.settle(0).await.unwrap();
        test.scripts();
        assert!(!limiter.check(&CALLS, "ada", 1).await.unwrap().is_allowed());
        assert_eq!(test.scripts(), 0, "{other}");
    }
}

/// After a second, one check asks, and the others are refused until its reply.
#[tokio::test]
async fn one_check_asks_while_the_others_are_refused() {
    let test = Test::start();
    let limiter = test.refused().await;
    test.clock.advance(seconds(1));
    test.scripts();
    test.server.pause();
    let asking = tokio::spawn(limiter.check(&CALLS, "ada", 1));
    tokio::task::yield_now().await;
    assert!(
        join_all((0..100).map(|_| limiter.check(&CALLS, "ada", 1)))
            .await
            .iter()
            .all(is_refused)
    );
    // Another one asks if there is no reply.
    test.clock.advance(ms(100));
    let asking_as_well = tokio::spawn(limiter.check(&CALLS, "ada", 1));
    tokio::task::yield_now().await;
    assert!(
        join_all((0..100).map(|_| limiter.check(&CALLS, "ada", 1)))
            .await
            .iter()
            .all(is_refused)
    );
    test.server.resume();
    assert!(is_refused(&asking.await.unwrap()) && is_refused(&asking_as_well.await.unwrap()));
    assert!((1..=2).contains(&test.scripts()));
}

/// Also if each check asks Redis: then what is known decides only when Redis fails.
#[tokio::test]
async fn without_a_refusal_cache_a_known_refusal_stands_while_redis_fails() {
    let mut test = Test::start();
    let limiter = test.limiter().refusal_cache(Duration::ZERO);
    for admitted in [true, true, false] {
        assert_eq!(
            limiter.check(&CALLS, "ada", 1).await.unwrap().is_allowed(),
            admitted
        );
    }
    test.scripts();
    for _ in 0..3 {
        assert!(is_refused(&limiter.check(&CALLS, "ada", 1).await));
    }
    assert_eq!(test.scripts(), 3);
    test.server.kill();
    test.clock.advance(seconds(30));
    let wait = limiter.check(&CALLS, "ada", 1).await.unwrap().retry_after();
    assert_eq!(wait, Some(seconds(30)));
    assert!(limiter.check(&CALLS, "bob", 1).await.is_err());
    test.clock.advance(seconds(30));
    assert!(
        limiter.check(&CALLS, "ada", 1).await.is_err(),
        "its time has passed"
    );
}

/// A caller that waits for reserved units asks Redis each time, and is refused as is known when
/// Redis fails.
#[tokio::test]
async fn a_caller_behind_others_in_line_is_refused_while_redis_fails() {
    let mut test = Test::start();
    let limiter = test.refused().await;
    let first = tokio::spawn({
        let limiter = limiter.clone();
        async move { limiter.acquire(&CALLS, "ada", 1, seconds(600)).await }
    });
    tokio::task::yield_now().await;
    test.server.kill();
    assert!(is_refused(&limiter.acquire(&CALLS, "ada", 1, ms(1)).await));
    first.abort();
}

/// A store whose decisions overtake each other. It decides a check of one unit late, and tells its
/// decision on any other check late.
#[derive(Clone)]
struct Overtaking {
    store: MemoryStore,
    local_state: LocalState,
    /// The clock of the local state.
    clock: ManualClock,
    decides: Arc<Notify>,
    replies: Arc<Notify>,
}

impl Overtaking {
    fn on(store: &MemoryStore) -> Self {
        let clock = ManualClock::new();
        let [decides, replies] = [(); 2].map(|()| Arc::new(Notify::new()));
        Self {
            store: store.clone(),
            local_state: LocalState::by(&clock),
            clock,
            decides,
            replies,
        }
    }

    /// Asks for one unit and then for two. The store decides on two units, `between` happens, and
    /// the store decides on one unit. The decision on two units is told last.
    async fn overtake(
        &self,
        limiter: &Limiter,
        between: impl AsyncFnOnce(),
    ) -> [Result<Decision, Error>; 2] {
        let later = tokio::spawn(limiter.check(&CALLS, "ada", 1));
        yield_now().await;
        self.clock.advance(MICROSECOND);
        let earlier = tokio::spawn(limiter.check(&CALLS, "ada", 2));
        yield_now().await;
        between().await;
        self.clock.advance(MICROSECOND);
        self.decides.notify_one();
        let later = later.await.unwrap();
        self.replies.notify_one();
        [earlier.await.unwrap(), later]
    }
}

impl Store for Overtaking {
    fn decide(&self, check: Check) -> StoreFuture<Decision> {
        let Self {
            store,
            decides,
            replies,
            ..
        } = self.clone();
        Box::pin(async move {
            if check.charges().all(|charge| charge.cost() == 1) {
                decides.notified().await;
                return store.decide(check).await;
            }
            let decision = store.decide(check).await;
            replies.notified().await;
            decision
        })
    }

    fn settle(&self, settlement: Settlement) -> StoreFuture<Settled> {
        self.store.settle(settlement)
    }

    fn reset(&self, limit: Limit, key: Key) -> StoreFuture<()> {
        self.store.reset(limit, key)
    }

    fn local_state(&self) -> Option<&LocalState> {
        Some(&self.local_state)
    }
}

/// The check that asked later was decided earlier, when a unit was left. Its reply comes last.
#[tokio::test]
async fn a_refusal_that_was_decided_earlier_replaces_no_later_one() {
    for is_in_one_batch in [false, true] {
        let clock = ManualClock::new();
        let store = MemoryStore::new().clock(&clock);
        let overtaking = Overtaking::on(&store);
        let limiter = Limiter::new(overtaking.clone()).deadline(TEST_TIMEOUT);
        let others = Limiter::new(store);
        assert!(others.check(&CALLS, "ada", 1).await.unwrap().is_allowed());
        let outcomes = overtaking.overtake(&limiter, async || {
            assert!(others.check(&CALLS, "ada", 1).await.unwrap().is_allowed());
            clock.advance(if is_in_one_batch {
                Duration::ZERO
            } else {
                MICROSECOND
            });
        });
        assert!(outcomes.await.iter().all(is_refused));
        let known = tokio::spawn(limiter.check(&CALLS, "ada", 1));
        yield_now().await;
        assert!(
            known.is_finished() && is_refused(&known.await.unwrap()),
            "{is_in_one_batch}"
        );
    }
}

/// The admission was decided before the refusal, and its reply comes last.
#[tokio::test]
async fn an_admission_that_was_decided_earlier_ends_no_later_refusal() {
    let clock = ManualClock::new();
    let store = MemoryStore::new().clock(&clock);
    let overtaking = Overtaking::on(&store);
    let limiter = Limiter::new(overtaking.clone())
        .deadline(TEST_TIMEOUT)
        .refusal_cache(Duration::ZERO);
    let others = Limiter::new(store);
    assert!(others.check(&CALLS, "ada", 2).await.unwrap().is_allowed());
    overtaking.replies.notify_one();
    assert!(is_refused(&limiter.check(&CALLS, "ada", 2).await));
    others.reset(&CALLS, "ada").await.unwrap();
    let [admitted, refused] = overtaking
        .overtake(&limiter, async || clock.advance(MICROSECOND))
        .await;
    assert!(admitted.unwrap().is_allowed() && is_refused(&refused));
    // The store does not decide this check.
    assert!(is_refused(
        &limiter
            .clone()
            .deadline(ms(10))
            .check(&CALLS, "ada", 1)
            .await
    ));
}

/// A used-up window and a place, thousands of checks at once, and Redis stands still for moments.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_flood_passes_a_used_up_window_beside_a_place() {
    let server = RedisServer::start();
    let limiter = Limiter::new(server.store().build().unwrap());
    let patient = limiter.clone().deadline(TEST_TIMEOUT);
    while patient.check_all(with_place()).await.unwrap().is_allowed() {}
    let mut not_refused = 0;
    for round in 0..12 {
        // Of places that are freed meanwhile.
        drop(patient.check(&PLACES, "all", 1).await.unwrap());
        if round % 3 == 2 {
            server.pause();
        }
        let outcomes = join_all((0..8_192).map(|_| limiter.check_all(with_place()))).await;
        not_refused += outcomes
            .iter()
            .filter(|outcome| !is_refused(outcome))
            .count();
        server.resume();
        sleep(ms(100)).await;
    }
    assert_eq!(not_refused, 0);
}
