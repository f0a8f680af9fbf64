//! Units that a settlement or a reset returns wake the callers that wait for them.

use std::{future::poll_fn, pin::pin, sync::atomic::Ordering, task::Poll, time::Duration};

use tokio::{
    task::{JoinSet, yield_now},
    time::{Instant, sleep, timeout},
};
use tower_sliding_window::{
    Charge, Check, Decision, Key, Limit, Limiter, Store,
    limiter::Reservation,
    settlement::{Settled, Settlement},
    store::StoreFuture,
};

use super::{CALLS, CountingStore, Test, check_of_ada, lines};
use crate::support::{TEST_TIMEOUT, let_tasks_run, ms, redis_server::RedisServer};

#[tokio::test(start_paused = true)]
async fn the_first_in_line_uses_returned_units_at_once() {
    let test = Test::start();
    let reservation = test
        .limiter
        .reserve(&CALLS, "ada", 3, ms(100))
        .await
        .unwrap()
        .unwrap();
    let begun = Instant::now();
    for name in ["a", "b", "c"] {
        test.wait(name, check_of_ada(2), TEST_TIMEOUT).await;
    }
    reservation.settle(1).await.unwrap();
    let_tasks_run().await;
    assert_eq!(test.admitted(), ["a"]);
    test.limiter.reset(&CALLS, "ada").await.unwrap();
    let_tasks_run().await;
    assert_eq!(
        (test.admitted(), begun.elapsed()),
        (vec!["a", "b"], Duration::ZERO)
    );
}

/// The line waits for several limits. A check outside of the line returns units of one of them.
#[tokio::test(start_paused = true)]
async fn units_returned_to_one_limit_wake_every_line_that_waits_for_it() {
    let test = Test::start();
    let reservation = test
        .limiter
        .reserve(&CALLS, "ada", 3, ms(100))
        .await
        .unwrap()
        .unwrap();
    let begun = Instant::now();
    let other = Limit::per("other", 3, ms(100));
    for (name, key) in [("a", "bob"), ("b", "cy")] {
        let both = check_of_ada(1)
            .and(Charge::new(other.clone(), key, 1).unwrap())
            .unwrap();
        test.wait(name, both, TEST_TIMEOUT).await;
    }
    assert_eq!((test.admitted(), test.lines()), (vec![], 2));
    reservation.settle(0).await.unwrap();
    let_tasks_run().await;
    assert_eq!(
        (test.admitted(), test.lines(), begun.elapsed()),
        (vec!["a", "b"], 0, Duration::ZERO)
    );
}

/// The check of a caller under a limit that all share, and one that is its own.
fn check_of(name: &'static str, shared: &Limit, own: &Limit) -> Check {
    let charge = |limit: &Limit, key| Charge::new(limit.clone(), key, 1).unwrap();
    Check::new(charge(shared, "all"))
        .and(charge(own, name))
        .unwrap()
}

fn names(count: usize) -> Vec<&'static str> {
    (0..count)
        .map(|number| &*format!("{number}").leak())
        .collect()
}

#[tokio::test(start_paused = true)]
async fn returned_units_wake_no_caller_that_another_limit_has_refused() {
    let (test, names) = (Test::start(), names(200));
    let (shared, own) = (Limit::per_hour("shared", 1_000), Limit::per_hour("own", 1));
    for name in &names {
        assert!(
            test.limiter
                .check(&own, *name, 1)
                .await
                .unwrap()
                .is_allowed()
        );
        test.wait(name, check_of(name, &shared, &own), Duration::MAX)
            .await;
    }
    assert_eq!(test.lines(), 200);
    test.checks_sent();
    for _ in 0..40 {
        let reservation = test
            .limiter
            .reserve(&shared, "all", 1, ms(100))
            .await
            .unwrap()
            .unwrap();
        reservation.settle(0).await.unwrap();
        let_tasks_run().await;
    }
    assert_eq!(test.checks_sent(), 40, "the reservations");

    test.limiter.reset(&own, names[7]).await.unwrap();
    let_tasks_run().await;
    assert_eq!((test.admitted(), test.checks_sent()), (vec![names[7]], 1));
}

/// Four units of a limit are used up, and each can be given back.
async fn four_reservations(test: &Test, shared: &Limit) -> Vec<Reservation> {
    let mut reservations = Vec::new();
    for _ in 0..4 {
        reservations.push(
            test.limiter
                .reserve(shared, "all", 1, Duration::MAX)
                .await
                .unwrap()
                .unwrap(),
        );
    }
    reservations
}

/// No caller has its reply when the next units return.
#[tokio::test(start_paused = true)]
async fn units_returned_at_once_wake_few_more_callers_than_they_admit() {
    let (test, names) = (Test::start(), names(20));
    let (shared, own) = (Limit::per_hour("shared", 4), Limit::per_hour("own", 1));
    let reservations = four_reservations(&test, &shared).await;
    for name in &names {
        test.wait(name, check_of(name, &shared, &own), Duration::MAX)
            .await;
    }
    test.checks_sent();
    for reservation in reservations {
        reservation.settle(0).await.unwrap();
    }
    let_tasks_run().await;
    assert_eq!(
        (test.admitted(), test.checks_sent()),
        (names[..4].to_vec(), 7)
    );
}

/// The callers are refused by the shared limit and by one of their own, and the shared one refuses
/// for longer.
#[tokio::test(start_paused = true)]
async fn returned_units_reach_the_caller_that_nothing_else_refuses() {
    let (test, names) = (Test::start(), names(20));
    let (shared, own) = (Limit::per_hour("shared", 4), Limit::per_minute("own", 1));
    assert!(
        test.limiter
            .check(&shared, "all", 4)
            .await
            .unwrap()
            .is_allowed()
    );
    for name in &names {
        assert!(
            test.limiter
                .check(&own, *name, 1)
                .await
                .unwrap()
                .is_allowed()
        );
        test.wait(name, check_of(name, &shared, &own), Duration::MAX)
            .await;
    }
    test.wait("free", check_of("free", &shared, &own), Duration::MAX)
        .await;
    test.checks_sent();
    test.limiter.reset(&shared, "all").await.unwrap();
    let_tasks_run().await;
    // Each is refused by its own, and wakes the next.
    assert_eq!((test.admitted(), test.checks_sent()), (vec!["free"], 21));

    // Units of the other limit return as well, and three are left of the shared one.
    for name in &names[3..] {
        test.limiter.reset(&own, *name).await.unwrap();
    }
    let_tasks_run().await;
    assert_eq!(test.admitted(), [&["free"], &names[3..6]].concat());
}

/// The first caller is woken, and is dropped, or admitted without taking the unit.
#[tokio::test(start_paused = true)]
async fn a_unit_that_a_woken_caller_does_not_use_is_for_the_next() {
    let (shared, own) = (Limit::per_hour("shared", 4), Limit::per_hour("own", 1));
    for is_dropped in [true, false] {
        let test = Test::start();
        let reservations = four_reservations(&test, &shared).await;
        let first = Check::new(Charge::any_left(shared.clone(), "all").unwrap());
        let first = test.wait("a", first, Duration::MAX).await;
        test.wait("b", check_of("b", &shared, &own), Duration::MAX)
            .await;
        reservations[0].settle(0).await.unwrap();
        if is_dropped {
            first.abort();
        }
        let_tasks_run().await;
        let admitted = if is_dropped { &["b"][..] } else { &["a", "b"] };
        assert_eq!(test.admitted(), admitted);
    }
}

/// A woken caller needs more units than have returned, and leaves.
#[tokio::test(start_paused = true)]
async fn units_that_are_too_few_for_a_caller_that_leaves_are_for_the_next() {
    let test = Test::start();
    let (shared, own) = (Limit::per_hour("shared", 2), Limit::per_hour("own", 1));
    let check = |cost| Check::new(Charge::new(shared.clone(), "all", cost).unwrap());
    let spent = test.limiter.check_all(check(1)).await.unwrap();
    assert!(spent.is_allowed());
    let other = test.limiter.check_all(check(1)).await.unwrap();
    assert!(other.is_allowed());
    let first = test.wait("a", check(2), Duration::MAX).await;
    test.wait("b", check_of("b", &shared, &own), Duration::MAX)
        .await;
    let settlement = Settlement::new(check(1), &spent, |_| Some(0));
    test.limiter.settle(settlement).await.unwrap();
    let_tasks_run().await;
    assert!(test.admitted().is_empty());
    first.abort();
    let_tasks_run().await;
    assert_eq!(test.admitted(), ["b"]);
}

/// A store whose replies take 10 ms.
#[derive(Clone)]
struct SlowStore(CountingStore);

impl Store for SlowStore {
    fn decide(&self, check: Check) -> StoreFuture<Decision> {
        let store = self.0.clone();
        Box::pin(async move {
            let decision = store.decide(check).await;
            sleep(ms(10)).await;
            decision
        })
    }

    fn settle(&self, settlement: Settlement) -> StoreFuture<Settled> {
        self.0.settle(settlement)
    }

    fn reset(&self, limit: Limit, key: Key) -> StoreFuture<()> {
        self.0.reset(limit, key)
    }
}

/// Also callers whose first check was in flight, or was refused before there was a line. A caller
/// that arrives while the first one asks is not refused because of its wait.
#[tokio::test(start_paused = true)]
async fn returned_units_reach_every_waiting_caller() {
    for given_back_after in [ms(5), ms(15)] {
        let (limiter, limit) = (
            Limiter::new(SlowStore(Test::start().store)),
            Limit::per_hour("calls", 4),
        );
        let reservation = limiter
            .reserve(&limit, "ada", 4, Duration::MAX)
            .await
            .unwrap()
            .unwrap();
        let mut waiting = JoinSet::new();
        for _ in 0..3 {
            let (limiter, limit) = (limiter.clone(), limit.clone());
            waiting.spawn(async move {
                limiter
                    .acquire(&limit, "ada", 1, Duration::MAX)
                    .await
                    .unwrap()
            });
        }
        let begun = Instant::now();
        sleep(given_back_after).await;
        reservation.settle(0).await.unwrap();
        sleep(ms(5)).await;
        waiting.spawn(async move { limiter.acquire(&limit, "ada", 1, ms(100)).await.unwrap() });
        assert!(waiting.join_all().await.iter().all(Decision::is_allowed));
        assert!(begun.elapsed() < ms(100), "{:?}", begun.elapsed());
    }
}

/// A caller that asked the failing store would get its error and stop waiting.
#[tokio::test(start_paused = true)]
async fn a_failed_reset_ends_no_wait() {
    let test = Test::spent().await;
    test.wait("a", check_of_ada(1), TEST_TIMEOUT).await;
    test.store.fails.store(true, Ordering::SeqCst);
    assert!(test.limiter.reset(&CALLS, "ada").await.is_err());
    let_tasks_run().await;
    test.store.fails.store(false, Ordering::SeqCst);
    test.pass(ms(100)).await;
    assert_eq!(test.admitted(), ["a"]);
}

/// A settlement completes after its caller has left, and still wakes the line.
#[tokio::test]
async fn a_settlement_whose_caller_left_still_wakes_the_line() {
    let server = RedisServer::start();
    let store = server.store().build().unwrap();
    let (limiter, limit) = (
        Limiter::new(store).deadline(TEST_TIMEOUT),
        Limit::per_hour("calls", 10),
    );
    let reservation = limiter
        .reserve(&limit, "ada", 10, Duration::MAX)
        .await
        .unwrap()
        .unwrap();
    let waiting = tokio::spawn({
        let (limiter, limit) = (limiter.clone(), limit.clone());
        async move {
            limiter
                .acquire(&limit, "ada", 1, Duration::MAX)
                .await
                .unwrap()
        }
    });
    while lines(&limiter) == 0 {
        yield_now().await;
    }
    {
        let mut settling = pin!(reservation.settle(1));
        assert!(poll_fn(|cx| Poll::Ready(settling.as_mut().poll(cx).is_pending())).await);
    }
    assert!(
        timeout(TEST_TIMEOUT, waiting)
            .await
            .expect("the caller still sleeps")
            .unwrap()
            .is_allowed()
    );
}
