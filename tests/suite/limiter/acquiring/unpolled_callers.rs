//! Callers that are not polled do not block the line.

use std::{future::poll_fn, pin::Pin, task::Poll, time::Duration};

use tokio::{
    runtime::Builder,
    time::{Instant, sleep, timeout},
};
use tower_sliding_window::{
    Charge, Check, Decision, Error, Limit, Limiter, MemoryStore,
    testing::{Fault, FaultyStore},
};

use super::{Test, Waiting, check_of_ada};
use crate::support::{TEST_TIMEOUT, let_tasks_run, ms};

const CALLS_AN_HOUR: Limit = Limit::per_hour("calls", 3);

/// How late the first caller may be before the next one takes over, as documented.
const GRACE: Duration = ms(100);

/// A wait that was polled once and is then stored.
pub(super) type UnpolledWait = Pin<Box<dyn Future<Output = Result<Decision, Error>> + Send>>;

/// Polls a wait once, and returns it.
async fn poll_once(limiter: &Limiter, check: Check) -> UnpolledWait {
    poll_once_for(limiter, check, TEST_TIMEOUT).await
}

pub(super) async fn poll_once_for(
    limiter: &Limiter,
    check: Check,
    max_wait: Duration,
) -> UnpolledWait {
    let limiter = limiter.clone();
    let mut kept: UnpolledWait =
        Box::pin(async move { limiter.acquire_all(check, max_wait).await });
    assert!(poll_fn(|cx| Poll::Ready(kept.as_mut().poll(cx).is_pending())).await);
    kept
}

async fn finish_in_time(waiting: Waiting) -> Decision {
    timeout(TEST_TIMEOUT, waiting)
        .await
        .expect("the line is blocked")
        .unwrap()
        .unwrap()
}

#[tokio::test(start_paused = true)]
async fn the_line_passes_a_first_caller_that_is_not_polled() {
    let test = Test::spent().await;
    let first = poll_once(&test.limiter, check_of_ada(3)).await;
    let _second = test.wait("second", check_of_ada(1), TEST_TIMEOUT).await;
    let _third = test.wait("third", check_of_ada(1), TEST_TIMEOUT).await;
    test.pass(ms(100)).await;
    assert_eq!(
        test.admitted(),
        Vec::<&str>::new(),
        "the first caller still has its grace"
    );
    test.pass(GRACE).await;
    assert_eq!(test.admitted(), ["second", "third"]);

    // When it is polled again, it takes its old place.
    let fourth = test.wait("fourth", check_of_ada(2), TEST_TIMEOUT).await;
    let first = tokio::spawn(first);
    let_tasks_run().await;
    assert!(!first.is_finished() && !fourth.is_finished());
    test.pass(ms(100)).await;
    assert!(fourth.is_finished(), "it was first by then");
    test.pass(ms(100)).await;
    assert_eq!(first.await.unwrap().unwrap().binding().used, 3);
    assert_eq!(test.lines(), 0);
}

/// Half of a hundred callers are not polled, and the first of them is at the front. The others are
/// admitted in order of arrival.
#[tokio::test(start_paused = true)]
async fn polled_callers_are_admitted_while_others_are_not_polled() {
    let test = Test::spent().await;
    let names: Vec<&'static str> = (0..50).map(|number| &*format!("{number}").leak()).collect();
    let mut kept = Vec::new();
    for name in &names {
        kept.push(poll_once(&test.limiter, check_of_ada(1)).await);
        test.wait(name, check_of_ada(1), TEST_TIMEOUT).await;
    }
    test.checks_sent();
    for _ in 0..600 {
        test.pass(ms(10)).await;
    }
    assert_eq!(test.admitted(), names);
    assert!(test.checks_sent() <= 150, "only the first in line asks");

    // The stored callers are also admitted once they are polled, in the order of their polls.
    let waiting: Vec<_> = kept.into_iter().map(tokio::spawn).collect();
    for _ in 0..200 {
        test.pass(ms(10)).await;
    }
    for waiting in waiting {
        assert!(waiting.await.unwrap().unwrap().is_allowed());
    }
    assert_eq!(test.lines(), 0);
}

/// Units return, and only the second caller can use them.
#[tokio::test(start_paused = true)]
async fn a_first_caller_that_is_not_polled_does_not_withhold_returned_units() {
    let (limiter, limit) = (
        Limiter::new(MemoryStore::new()),
        Limit::per_hour("calls", 3),
    );
    let check = || Check::new(Charge::new(limit.clone(), "ada", 1).unwrap());
    assert!(limiter.check(&limit, "ada", 3).await.unwrap().is_allowed());
    let _first = poll_once_for(&limiter, check(), Duration::MAX).await;
    let second = tokio::spawn({
        let (limiter, check) = (limiter.clone(), check());
        async move { limiter.acquire_all(check, Duration::MAX).await }
    });
    let_tasks_run().await;
    limiter.reset(&limit, "ada").await.unwrap();
    let begun = Instant::now();
    assert!(finish_in_time(second).await.is_allowed());
    assert!(begun.elapsed() <= GRACE, "{:?}", begun.elapsed());
}

/// The first caller leaves long before its time, and the next two are not polled.
#[tokio::test(start_paused = true)]
async fn the_line_passes_several_callers_that_are_not_polled() {
    let (store, limit) = (MemoryStore::new(), Limit::per_hour("calls", 3));
    let limiter = Limiter::new(store.clone());
    let check = || Check::new(Charge::new(limit.clone(), "ada", 1).unwrap());
    let wait = || {
        let (limiter, check) = (limiter.clone(), check());
        tokio::spawn(async move { limiter.acquire_all(check, Duration::MAX).await })
    };
    assert!(limiter.check(&limit, "ada", 3).await.unwrap().is_allowed());
    let first = wait();
    let_tasks_run().await;
    let _second = poll_once_for(&limiter, check(), Duration::MAX).await;
    let _third = poll_once_for(&limiter, check(), Duration::MAX).await;
    let last = wait();
    let_tasks_run().await;
    // Not through the limiter, so that it wakes no caller.
    Limiter::new(store).reset(&limit, "ada").await.unwrap();
    first.abort();
    let begun = Instant::now();
    assert!(finish_in_time(last).await.is_allowed());
    assert!(begun.elapsed() <= GRACE + ms(2), "{:?}", begun.elapsed());
}

/// Callers that hung up together, while their futures are kept.
#[tokio::test(start_paused = true)]
async fn the_line_passes_many_callers_that_are_not_polled_as_quickly_as_one() {
    for (ahead, behind) in [(1, 0), (2, 0), (11, 0), (65, 0), (65, 65)] {
        let test = Test::spent().await;
        let mut kept = Vec::new();
        for _ in 0..ahead {
            kept.push(poll_once(&test.limiter, check_of_ada(1)).await);
        }
        let _last = test.wait("last", check_of_ada(1), TEST_TIMEOUT).await;
        for _ in 0..behind {
            kept.push(poll_once(&test.limiter, check_of_ada(1)).await);
        }
        for _ in 0..20 {
            test.pass(ms(10)).await;
        }
        test.pass(ms(2)).await;
        assert_eq!(test.admitted(), ["last"], "{ahead} {behind}");

        // Those that were passed over are admitted in their order when they are polled again.
        let waiting: Vec<_> = kept.into_iter().map(tokio::spawn).collect();
        for _ in 0..500 {
            test.pass(ms(10)).await;
        }
        for waiting in waiting {
            assert!(waiting.await.unwrap().unwrap().is_allowed());
        }
        assert_eq!(test.lines(), 0);
    }
}

/// The first two callers belong to a runtime that is kept, but not driven.
#[test]
fn the_line_passes_callers_whose_runtime_is_not_driven() {
    let runtime = || Builder::new_current_thread().enable_all().build().unwrap();
    let (kept, driven) = (runtime(), runtime());
    let (limiter, limit) = (
        Limiter::new(MemoryStore::new()),
        Limit::per("calls", 1, ms(100)),
    );
    let wait = || {
        let (limiter, limit) = (limiter.clone(), limit.clone());
        async move {
            limiter
                .acquire(&limit, "ada", 1, Duration::MAX)
                .await
                .unwrap()
        }
    };
    kept.block_on(async {
        assert!(wait().await.is_allowed());
        tokio::spawn(wait());
        tokio::spawn(wait());
        let_tasks_run().await;
    });
    let admitted = driven.block_on(async {
        timeout(TEST_TIMEOUT, wait())
            .await
            .expect("the line is blocked")
    });
    assert!(admitted.is_allowed());
}

/// The store has the check, but the caller does not poll for the decision.
#[tokio::test(start_paused = true)]
async fn an_unpolled_check_blocks_the_line_until_its_deadline_plus_a_grace() {
    let store = FaultyStore::new(MemoryStore::new());
    let (limiter, limit) = (
        Limiter::new(store.clone()).deadline(ms(50)),
        Limit::per_hour("calls", 3),
    );
    let check = || Check::new(Charge::new(limit.clone(), "ada", 1).unwrap());
    assert!(limiter.check(&limit, "ada", 3).await.unwrap().is_allowed());
    let mut first = poll_once_for(&limiter, check(), Duration::MAX).await;
    let second = tokio::spawn({
        let (limiter, check) = (limiter.clone(), check());
        async move { limiter.acquire_all(check, Duration::MAX).await }
    });
    let_tasks_run().await;
    limiter.reset(&limit, "ada").await.unwrap();
    store.set(Fault::Hangs);
    assert!(poll_fn(|cx| Poll::Ready(first.as_mut().poll(cx).is_pending())).await);
    assert_eq!(store.hanging(), 1, "the first caller has sent its check");
    store.set(Fault::None);
    let begun = Instant::now();
    assert!(finish_in_time(second).await.is_allowed());
    let waited = begun.elapsed();
    assert!(
        (ms(50)..=ms(50) + GRACE + ms(2)).contains(&waited),
        "{waited:?}"
    );
}

/// The first two in line are not polled. The third is woken to take over; before it is polled, a
/// new caller arrives.
#[tokio::test(start_paused = true)]
async fn a_new_caller_does_not_overtake_those_that_were_woken() {
    for arrives_at in 95..110 {
        let test = Test::start();
        assert!(
            test.limiter
                .check(&CALLS_AN_HOUR, "ada", 3)
                .await
                .unwrap()
                .is_allowed()
        );
        let check = Check::new(Charge::new(CALLS_AN_HOUR, "ada", 1).unwrap());
        let _first = poll_once_for(&test.limiter, check.clone(), Duration::MAX).await;
        let _second = poll_once_for(&test.limiter, check.clone(), Duration::MAX).await;
        test.wait("third", check.clone(), Duration::MAX).await;
        test.limiter.reset(&CALLS_AN_HOUR, "ada").await.unwrap();
        sleep(ms(arrives_at)).await;
        test.wait("new", check, Duration::MAX).await;
        sleep(ms(300)).await;
        assert_eq!(
            test.admitted(),
            ["third", "new"],
            "arrives at {arrives_at} ms"
        );
    }
}
