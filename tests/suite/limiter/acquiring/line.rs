//! The order of a line, how long its callers wait, and how often they ask the store.

use std::{
    future::{pending, ready},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime},
};

use tokio::{
    task::{JoinSet, yield_now},
    time::{Instant, advance, sleep, timeout},
};
use tower_sliding_window::{
    Charge, Check, Decision, Error, Key, Limit, Limiter, MemoryStore, Store,
    check::AdmissionId,
    decision::LimitStatus,
    limiter::Share,
    settlement::{Settled, Settlement},
    store::{LocalState, StoreFuture},
    testing::{Fault, FaultyStore},
};

use super::{CALLS, Test, check_of_ada};
use crate::support::{
    TEST_TIMEOUT, let_tasks_run, ms,
    redis_server::RedisServer,
    stores::{silent, with_fault},
};

/// The limit holds in every window for callers in two processes, and all of them are admitted in
/// the end.
async fn assert_many_waiting_callers_never_exceed_the_limit(limiters: [Limiter; 2]) {
    let limit = Limit::per("many", 5, ms(150));
    let mut waiting = JoinSet::new();
    for number in 0..23 {
        let (limiter, limit) = (
            limiters[number % 2].clone().deadline(TEST_TIMEOUT),
            limit.clone(),
        );
        waiting.spawn(async move {
            limiter
                .acquire(&limit, "ada", 1, TEST_TIMEOUT)
                .await
                .unwrap()
        });
    }
    let decisions = waiting.join_all().await;
    assert!(decisions.iter().all(Decision::is_allowed));
    let mut times: Vec<SystemTime> = decisions.iter().map(Decision::at).collect();
    times.sort_unstable();
    for pair in times.windows(6) {
        assert!(pair[5].duration_since(pair[0]).unwrap() >= limit.window());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_waiting_callers_never_exceed_the_limit_in_process() {
    let store = MemoryStore::new();
    assert_many_waiting_callers_never_exceed_the_limit(
        [(); 2].map(|()| Limiter::new(store.clone())),
    )
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_waiting_callers_never_exceed_the_limit_on_redis() {
    let server = RedisServer::start();
    let limiter = || Limiter::new(server.store().build().unwrap());
    assert_many_waiting_callers_never_exceed_the_limit([limiter(), limiter()]).await;
}

/// Units leave their windows after an hour, so only those that are given back let the callers on.
/// Some callers may give up meanwhile.
async fn assert_units_that_are_given_back_reach_all_callers(limiter: Limiter, give_up: bool) {
    let (all, each) = (Limit::per_hour("all", 5), Limit::per_hour("each", 2));
    let mut callers = JoinSet::new();
    for number in 0..40_u64 {
        let (limiter, all, each) = (limiter.clone(), all.clone(), each.clone());
        callers.spawn(async move {
            for round in 0..8 {
                let charge =
                    |limit: &Limit, key, cost| Charge::new(limit.clone(), key, cost).unwrap();
                let check = Check::new(charge(&all, 0, 1 + number % 3));
                let check = check
                    .and(charge(&each, 1 + (number + round) % 7, 1 + round % 2))
                    .unwrap();
                let acquired = limiter.acquire_all(check.clone(), Duration::MAX);
                let acquired = match (number + round) % 5 {
                    0 if give_up => timeout(Duration::from_micros(300 * round), acquired).await,
                    _ => Ok(acquired.await),
                };
                let Ok(decision) = acquired else { continue };
                yield_now().await;
                limiter
                    .settle(Settlement::new(check, &decision.unwrap(), |_| Some(0)))
                    .await
                    .unwrap();
            }
        });
    }
    timeout(TEST_TIMEOUT, callers.join_all())
        .await
        .expect("a caller still waits");
    assert!(format!("{limiter:?}").contains("Lines(0)"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn units_that_are_given_back_reach_all_callers_on_two_threads() {
    for store in [
        Limiter::new(MemoryStore::new()),
        Limiter::new(FaultyStore::new(MemoryStore::new())),
    ] {
        assert_units_that_are_given_back_reach_all_callers(store, false).await;
    }
}

/// On one thread, no caller can be admitted while it gives up.
#[tokio::test]
async fn units_that_are_given_back_reach_all_callers_that_stay() {
    for store in [
        Limiter::new(MemoryStore::new()),
        Limiter::new(FaultyStore::new(MemoryStore::new())),
    ] {
        assert_units_that_are_given_back_reach_all_callers(store, true).await;
    }
}

/// Only the first caller in line asks Redis, and so does each caller that is refused because its
/// wait would be too long.
#[tokio::test]
async fn only_the_first_in_line_asks_redis() {
    let server = RedisServer::start();
    let limiter = Limiter::new(server.store().build().unwrap()).deadline(TEST_TIMEOUT);
    let limit = Limit::per_minute("calls", 3);
    let check =
        |id| Check::new(Charge::new(limit.clone(), "ada", 1).unwrap()).with_id(AdmissionId(id));
    assert!(limiter.check(&limit, "ada", 3).await.unwrap().is_allowed());
    let mut waiting = JoinSet::new();
    for id in 0..50 {
        let (waiter, check) = (limiter.clone(), check(id));
        waiting.spawn(async move { waiter.acquire_all(check, Duration::MAX).await });
        let_tasks_run().await;
        // Until the first caller is refused there is no line, so new callers would also ask.
        while id == 0 && !format!("{limiter:?}").contains("Lines(1)") {
            yield_now().await;
        }
    }
    server.run::<()>("CONFIG RESETSTAT");
    for id in 50..60 {
        let refused = limiter
            .acquire_all(check(id), Duration::from_secs(1))
            .await
            .unwrap();
        let wait = refused.retry_after().unwrap();
        assert!(
            wait > limit.window() - TEST_TIMEOUT && wait <= limit.window(),
            "{wait:?}"
        );
        assert_eq!((refused.binding().used, refused.id()), (3, AdmissionId(id)));
    }
    assert_eq!(server.script_calls(), 10);
    waiting.shutdown().await;
    let_tasks_run().await;
    assert!(format!("{limiter:?}").contains("Lines(0)"));
}

#[tokio::test(start_paused = true)]
async fn a_caller_waits_exactly_as_long_as_the_refusal_says() {
    let test = Test::spent().await;
    test.pass(ms(40)).await;
    let waiting = test.wait("ada", check_of_ada(1), ms(60)).await;
    test.pass(ms(59)).await;
    assert!(!waiting.is_finished());
    test.pass(ms(1)).await;
    assert_eq!(waiting.await.unwrap().unwrap().binding().used, 1);
    assert_eq!(
        test.checks_sent(),
        3,
        "the first, the refused, and the admitted"
    );
}

#[tokio::test(start_paused = true)]
async fn a_wait_longer_than_max_wait_is_refused_at_once() {
    let test = Test::spent().await;
    let begun = Instant::now();
    for max_wait in [ms(0), ms(50), ms(100) - Duration::from_micros(1)] {
        let refused = test
            .limiter
            .acquire(&CALLS, "ada", 1, max_wait)
            .await
            .unwrap();
        assert_eq!(
            (refused.retry_after(), refused.binding().used),
            (Some(ms(100)), 3)
        );
    }
    assert_eq!((begun.elapsed(), test.lines()), (Duration::ZERO, 0));
    assert!(matches!(
        test.limiter.acquire(&CALLS, "ada", 4, TEST_TIMEOUT).await,
        Err(Error::NeverFits(_))
    ));
}

/// A check outside of the line may spend units and make the wait too long.
#[tokio::test(start_paused = true)]
async fn a_wait_that_becomes_too_long_ends_in_a_refusal() {
    let test = Test::spent().await;
    let waiting = test.wait("ada", check_of_ada(1), ms(150)).await;
    test.clock.advance(ms(100));
    assert!(
        test.limiter
            .check(&CALLS, "ada", 3)
            .await
            .unwrap()
            .is_allowed()
    );
    advance(ms(100)).await;
    assert_eq!(waiting.await.unwrap().unwrap().retry_after(), Some(ms(100)));
}

#[tokio::test(start_paused = true)]
async fn callers_are_admitted_in_the_order_of_arrival() {
    let test = Test::spent().await;
    let names = ["a", "b", "c", "d", "e", "f", "g"];
    for name in names {
        test.wait(name, check_of_ada(1), TEST_TIMEOUT).await;
    }
    assert_eq!(
        (test.checks_sent(), test.lines()),
        (2, 1),
        "only the first in line has asked"
    );
    for admitted in [0, 3, 6, 7] {
        assert_eq!(test.admitted(), names[..admitted]);
        test.pass(ms(100)).await;
    }
    assert_eq!(test.lines(), 0);
}

/// There is always capacity for the cheap checks.
#[tokio::test(start_paused = true)]
async fn cheap_checks_do_not_overtake_an_expensive_one() {
    let test = Test::start();
    for _ in 0..2 {
        assert!(
            test.limiter
                .check(&CALLS, "ada", 1)
                .await
                .unwrap()
                .is_allowed()
        );
        test.pass(ms(40)).await;
    }
    test.wait("costly", check_of_ada(3), TEST_TIMEOUT).await;
    for _ in 0..5 {
        test.wait("cheap", check_of_ada(1), TEST_TIMEOUT).await;
        test.pass(ms(10)).await;
    }
    assert_eq!(test.admitted(), Vec::<&str>::new());
    test.pass(ms(10)).await;
    assert_eq!(test.admitted(), ["costly"]);
    test.pass(ms(100)).await;
    assert_eq!(test.admitted(), ["costly", "cheap", "cheap", "cheap"]);
}

#[tokio::test(start_paused = true)]
async fn a_dropped_caller_leaves_the_line_and_the_next_one_proceeds() {
    let test = Test::start();
    assert!(
        test.limiter
            .check(&CALLS, "ada", 1)
            .await
            .unwrap()
            .is_allowed()
    );
    let first = test.wait("first", check_of_ada(3), TEST_TIMEOUT).await;
    let second = test.wait("second", check_of_ada(3), TEST_TIMEOUT).await;
    let _third = test.wait("third", check_of_ada(2), TEST_TIMEOUT).await;
    second.abort();
    let_tasks_run().await;
    assert_eq!((test.admitted(), test.lines()), (vec![], 1));
    first.abort();
    let_tasks_run().await;
    assert_eq!((test.admitted(), test.lines()), (vec!["third"], 0));
}

/// The refusal has the current figures and the wait of the first caller in line. It sends no check
/// that could overtake others.
#[tokio::test(start_paused = true)]
async fn a_caller_that_cannot_reach_the_front_in_time_is_refused_without_spending() {
    let test = Test::start();
    assert!(
        test.limiter
            .check(&CALLS, "ada", 1)
            .await
            .unwrap()
            .is_allowed()
    );
    test.pass(ms(40)).await;
    assert!(
        test.limiter
            .check(&CALLS, "ada", 1)
            .await
            .unwrap()
            .is_allowed()
    );
    let _first = test.wait("first", check_of_ada(3), TEST_TIMEOUT).await;
    let second = test.wait("second", check_of_ada(3), ms(100)).await;
    test.pass(ms(60)).await;
    test.checks_sent();
    let (begun, refused) = (
        Instant::now(),
        test.limiter
            .acquire(&CALLS, "ada", 1, ms(39))
            .await
            .unwrap(),
    );
    assert_eq!(
        (
            refused.retry_after(),
            refused.binding().used,
            begun.elapsed()
        ),
        (Some(ms(40)), 1, Duration::ZERO)
    );

    test.pass(ms(40)).await;
    let refused = second.await.unwrap().unwrap();
    assert_eq!(test.admitted(), ["first"]);
    assert_eq!(
        (
            refused.is_allowed(),
            refused.binding().used,
            refused.remaining()
        ),
        (false, 3, 0)
    );
    assert!(refused.retry_after().unwrap() > Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn a_check_that_cannot_be_refused_does_not_wait_in_line() {
    let test = Test::spent().await;
    let _first = test.wait("first", check_of_ada(1), TEST_TIMEOUT).await;
    let shadow = Check::new(Charge::new(CALLS, "ada", 1).unwrap().in_shadow());
    let begun = Instant::now();
    for check in [check_of_ada(0), shadow] {
        assert!(
            test.limiter
                .acquire_all(check, TEST_TIMEOUT)
                .await
                .unwrap()
                .is_allowed()
        );
    }
    assert_eq!(begun.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn checks_of_the_same_limits_and_keys_share_a_line_in_any_order() {
    let test = Test::spent().await;
    let charge = |limit: &Limit, key, cost| Charge::new(limit.clone(), key, cost).unwrap();
    let other = Limit::per("other", 3, ms(100));
    let both = |cost| {
        Check::new(charge(&CALLS, "ada", cost))
            .and(charge(&other, "ada", cost))
            .unwrap()
    };
    let turned = Check::new(charge(&other, "ada", 1))
        .and(charge(&CALLS, "ada", 1))
        .unwrap();
    let _both = test.wait("both", both(3), TEST_TIMEOUT).await;
    let _turned = test.wait("turned", turned, TEST_TIMEOUT).await;
    assert_eq!((test.admitted(), test.lines()), (vec![], 1));

    let _bob = test
        .wait("bob", Check::new(charge(&CALLS, "bob", 1)), TEST_TIMEOUT)
        .await;
    let _other = test
        .wait("other", Check::new(charge(&other, "ada", 1)), TEST_TIMEOUT)
        .await;
    assert_eq!(test.admitted(), ["bob", "other"]);
    let _alone = test.wait("alone", check_of_ada(1), TEST_TIMEOUT).await;
    assert_eq!(test.lines(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_store_that_fails_to_the_end_of_a_wait_ends_it_with_its_error() {
    let test = Test::spent().await;
    let waiting = [
        test.wait("a", check_of_ada(1), ms(900)).await,
        test.wait("b", check_of_ada(1), ms(950)).await,
    ];
    test.store.fails.store(true, Ordering::SeqCst);
    for _ in 0..9 {
        assert!(waiting.iter().all(|waiting| !waiting.is_finished()));
        test.pass(ms(100)).await;
    }
    for waiting in waiting {
        assert!(matches!(
            waiting.await.unwrap(),
            Err(Error::Unavailable(_) | Error::BreakerOpen(_))
        ));
    }
    assert_eq!((test.admitted(), test.lines()), (vec![], 0));
}

/// The store is far away. A line that has formed moves as quickly as the limit allows, and in
/// order.
#[tokio::test(start_paused = true)]
async fn a_line_does_not_move_by_one_caller_in_each_round_trip() {
    let limit = Limit::per("far", 100, Duration::from_secs(1));
    let store = with_fault(Fault::Slow(ms(80)));
    let limiter = Limiter::new(store.clone()).deadline(TEST_TIMEOUT);
    let (admitted, mut waiting) = (Arc::new(Mutex::new(Vec::new())), JoinSet::new());
    assert!(
        limiter
            .check(&limit, "ada", 100)
            .await
            .unwrap()
            .is_allowed()
    );
    let begun = Instant::now();
    for number in 0..400 {
        let (limiter, limit, admitted) = (limiter.clone(), limit.clone(), Arc::clone(&admitted));
        waiting.spawn(async move {
            assert!(
                limiter
                    .acquire(&limit, "ada", 1, TEST_TIMEOUT)
                    .await
                    .unwrap()
                    .is_allowed()
            );
            admitted.lock().unwrap().push(number);
        });
        let_tasks_run().await;
    }
    waiting.join_all().await;
    // The first hundred arrive before there is a line, and ask at once.
    let displaced = admitted
        .lock()
        .unwrap()
        .iter()
        .enumerate()
        .map(|(place, number): (usize, &usize)| place.abs_diff(*number))
        .max();
    assert!(displaced <= Some(64), "{displaced:?} places");
    assert!(
        begun.elapsed() < Duration::from_secs(7),
        "{:?} for four windows",
        begun.elapsed()
    );
    assert!(
        store.calls() < 1_000,
        "{} checks for 400 admissions",
        store.calls()
    );
}

/// The units leave the window one after the other, and cheaper callers arrive more often than that.
#[tokio::test(start_paused = true)]
async fn callers_beside_the_first_do_not_starve_one_that_needs_more() {
    let limit = Limit::per("far", 100, Duration::from_secs(1));
    for cost in [50, 100] {
        let limiter = Limiter::new(with_fault(Fault::Slow(ms(80)))).deadline(TEST_TIMEOUT);
        let acquire = |cost| {
            let (limiter, limit) = (limiter.clone(), limit.clone());
            async move {
                limiter
                    .acquire(&limit, "ada", cost, Duration::MAX)
                    .await
                    .unwrap()
                    .is_allowed()
            }
        };
        let mut cheap = JoinSet::new();
        for number in 0..160 {
            cheap.spawn(acquire(1));
            sleep(ms(if number < 100 { 10 } else { 5 })).await;
        }
        let (costly, arrived) = (tokio::spawn(acquire(cost)), Instant::now());
        while !costly.is_finished() {
            assert!(
                arrived.elapsed() < Duration::from_secs(5),
                "it waits for {cost} units for ever"
            );
            cheap.spawn(acquire(1));
            sleep(ms(5)).await;
        }
    }
}

/// Only the first in line asks meanwhile, so the store is not asked more often the more callers
/// wait.
#[tokio::test(start_paused = true)]
async fn a_failure_that_is_over_ends_no_wait() {
    let test = Test::spent().await;
    let mut waiting = Vec::new();
    for name in ["a", "b", "c", "d", "e", "f"] {
        waiting.push(test.wait(name, check_of_ada(1), TEST_TIMEOUT).await);
    }
    test.checks_sent();
    test.store.fails.store(true, Ordering::SeqCst);
    for _ in 0..4 {
        test.pass(ms(100)).await;
    }
    assert_eq!(test.checks_sent(), 4);
    test.store.fails.store(false, Ordering::SeqCst);
    for _ in 0..3 {
        test.pass(ms(100)).await;
    }
    assert_eq!(test.admitted(), ["a", "b", "c", "d", "e", "f"]);
    assert_eq!(test.lines(), 0);
}

#[tokio::test(start_paused = true)]
async fn the_deadline_limits_each_check_and_not_the_whole_wait() {
    let test = Test::spent().await;
    let limiter = test.limiter.clone().deadline(ms(1));
    let waiting =
        tokio::spawn(async move { limiter.acquire(&CALLS, "ada", 1, TEST_TIMEOUT).await });
    let_tasks_run().await;
    test.pass(ms(100)).await;
    assert!(waiting.await.unwrap().unwrap().is_allowed());

    let begun = Instant::now();
    let silent = Limiter::new(silent())
        .deadline(ms(50))
        .acquire(&CALLS, "ada", 1, ms(400))
        .await;
    assert!(matches!(silent, Err(Error::TimedOut { .. })));
    assert!(
        (ms(350)..ms(410)).contains(&begun.elapsed()),
        "{:?}",
        begun.elapsed()
    );
}

/// A store that is so far away, and tells it.
#[derive(Clone)]
struct FarStore {
    store: MemoryStore,
    state: LocalState,
    away: Duration,
}

impl FarStore {
    fn at(away: Duration) -> Self {
        let (store, state) = (MemoryStore::new(), LocalState::default());
        state.answered_in(away);
        Self { store, state, away }
    }
}

impl Store for FarStore {
    fn decide(&self, check: Check) -> StoreFuture<Decision> {
        let far = self.clone();
        Box::pin(async move {
            sleep(far.away).await;
            far.store.decide(check).await
        })
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

#[tokio::test(start_paused = true)]
async fn a_deadline_that_is_too_short_holds_up_no_caller_with_a_longer_one() {
    let limiter = Limiter::new(FarStore::at(ms(10)));
    let hasty = limiter.clone().deadline(ms(5));
    let hasty = tokio::spawn(async move { hasty.acquire(&CALLS, "ada", 1, ms(900)).await });
    sleep(ms(50)).await;
    let begun = Instant::now();
    assert!(
        limiter
            .acquire(&CALLS, "ada", 1, TEST_TIMEOUT)
            .await
            .unwrap()
            .is_allowed()
    );
    assert!(begun.elapsed() < ms(20), "{:?}", begun.elapsed());
    assert!(hasty.await.unwrap().is_err());
}

/// The share of the process is used up for an hour.
#[tokio::test(start_paused = true)]
async fn a_caller_that_its_share_refuses_asks_the_store_again() {
    let test = Test::start();
    let (limiter, limit) = (
        test.limiter.clone().fail_local(Share::one_of(3)),
        Limit::per_hour("upstream", 3),
    );
    test.store.fails.store(true, Ordering::SeqCst);
    assert!(limiter.check(&limit, "ada", 1).await.unwrap().is_allowed());
    let refused = limiter
        .acquire(&limit, "ada", 1, TEST_TIMEOUT)
        .await
        .unwrap();
    assert!(!refused.is_allowed(), "the hour is longer than its wait");
    let waiting =
        tokio::spawn(async move { limiter.acquire(&limit, "ada", 1, Duration::MAX).await });
    let_tasks_run().await;
    test.store.fails.store(false, Ordering::SeqCst);
    test.pass(ms(100)).await;
    assert!(waiting.is_finished());
    let admitted = waiting.await.unwrap().unwrap();
    assert!(
        admitted.is_allowed() && admitted.local_cause().is_none(),
        "{admitted:?}"
    );
}

/// The store refuses with a retry time of zero.
#[tokio::test(start_paused = true)]
async fn acquire_pauses_between_checks_when_the_retry_time_is_zero() {
    #[derive(Clone)]
    struct RefusesForNoTime(Arc<AtomicU64>);

    impl Store for RefusesForNoTime {
        fn decide(&self, check: Check) -> StoreFuture<Decision> {
            self.0.fetch_add(1, Ordering::SeqCst);
            let status = |charge: &Charge| {
                LimitStatus::new(
                    charge,
                    3,
                    0,
                    Duration::ZERO,
                    Some((Duration::ZERO, Duration::ZERO)),
                )
            };
            Box::pin(ready(Ok(Decision::new(
                &check,
                SystemTime::now(),
                AdmissionId::fresh(),
                status,
            ))))
        }

        fn settle(&self, _: Settlement) -> StoreFuture<Settled> {
            Box::pin(pending())
        }

        fn reset(&self, _: Limit, _: Key) -> StoreFuture<()> {
            Box::pin(pending())
        }
    }

    let checks_sent = Arc::new(AtomicU64::new(0));
    let waiting = Limiter::new(RefusesForNoTime(Arc::clone(&checks_sent)));
    let refused = timeout(TEST_TIMEOUT, waiting.acquire(&CALLS, "ada", 1, ms(100)))
        .await
        .unwrap()
        .unwrap();
    assert!(!refused.is_allowed());
    assert!(
        (2..=102).contains(&checks_sent.load(Ordering::SeqCst)),
        "{checks_sent:?}"
    );
}
