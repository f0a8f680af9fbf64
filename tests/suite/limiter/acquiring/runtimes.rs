//! Callers that nobody polls, on runtimes that are not driven or have ended.

use std::{
    future::{Future, poll_fn},
    pin::{Pin, pin},
    task::{Context, Poll, Waker},
    time::Duration,
};

use tokio::{
    runtime::Builder,
    task::JoinSet,
    time::{Instant, sleep, timeout},
};
use tower_sliding_window::{Charge, Check, Decision, Error, Limit, Limiter, MemoryStore};

use super::{CALLS, Test, check_of_ada, lines};
use crate::support::{TEST_TIMEOUT, let_tasks_run, ms, one_thread, seconds};

const ONE: Limit = Limit::per("one", 1, ms(100));

type Kept = Pin<Box<dyn Future<Output = Result<Decision, Error>> + Send>>;

/// A caller that is polled once, and then kept.
async fn kept(limiter: &Limiter, limit: &Limit) -> Kept {
    let limiter = limiter.clone();
    let check = Check::new(Charge::new(limit.clone(), "ada", 1).unwrap());
    let mut kept: Kept = Box::pin(async move { limiter.acquire_all(check, TEST_TIMEOUT).await });
    assert!(poll_fn(|cx| Poll::Ready(kept.as_mut().poll(cx).is_pending())).await);
    let_tasks_run().await;
    kept
}

/// A caller that waits for as long as it takes, and is polled once.
async fn long_kept(limiter: &Limiter, limit: &Limit) -> Kept {
    let (limiter, limit) = (limiter.clone(), limit.clone());
    let mut kept: Kept =
        Box::pin(async move { limiter.acquire(&limit, "ada", 1, Duration::MAX).await });
    assert!(poll_fn(|cx| Poll::Ready(kept.as_mut().poll(cx).is_pending())).await);
    let_tasks_run().await;
    kept
}

async fn is_admitted(limiter: &Limiter, limit: &Limit) -> bool {
    let acquired = limiter.acquire(limit, "ada", 1, TEST_TIMEOUT);
    let decision = timeout(TEST_TIMEOUT, acquired).await;
    decision.expect("the line is blocked").unwrap().is_allowed()
}

/// They are admitted in their order, although nobody polls them, and know it when they are polled.
#[tokio::test(start_paused = true)]
async fn callers_that_are_not_polled_are_admitted_in_the_order_of_arrival() {
    let test = Test::spent().await;
    let mut callers = Vec::new();
    for _ in 0..5 {
        callers.push(kept(&test.limiter, &CALLS).await);
    }
    test.wait("polled", check_of_ada(1), TEST_TIMEOUT).await;
    test.pass(ms(100)).await;
    assert!(test.admitted().is_empty());
    test.pass(ms(100)).await;
    assert_eq!((test.admitted(), test.lines()), (vec!["polled"], 0));
    for caller in callers {
        assert!(timeout(ms(1), caller).await.unwrap().unwrap().is_allowed());
    }
}

/// A caller that is dropped without being polled passes on at once, also while it asks.
#[tokio::test(start_paused = true)]
async fn a_caller_that_is_dropped_passes_on() {
    for asks in [false, true] {
        let test = Test::spent().await;
        let first = kept(&test.limiter, &CALLS).await;
        test.wait("second", check_of_ada(1), TEST_TIMEOUT).await;
        test.clock.advance(ms(100));
        if asks {
            test.limiter.reset(&CALLS, "ada").await.unwrap();
        }
        drop(first);
        let_tasks_run().await;
        assert_eq!((test.admitted(), test.lines()), (vec!["second"], 0));
    }
}

/// One runtime has callers in line, and is not driven, or is driven by turns.
#[test]
fn a_runtime_that_is_not_driven_blocks_no_other() {
    let limiter = Limiter::new(MemoryStore::new());
    let (idle, driven) = (one_thread(), one_thread());
    let callers = idle.block_on(async {
        assert!(is_admitted(&limiter, &ONE).await);
        [kept(&limiter, &ONE).await, kept(&limiter, &ONE).await]
    });
    assert_eq!(lines(&limiter), 1);
    for _ in 0..3 {
        assert!(driven.block_on(is_admitted(&limiter, &ONE)));
    }
    for caller in callers {
        let decision = idle.block_on(async { timeout(TEST_TIMEOUT, caller).await });
        assert!(decision.unwrap().unwrap().is_allowed());
        assert!(driven.block_on(is_admitted(&limiter, &ONE)));
    }
    assert_eq!(lines(&limiter), 0);
}

/// The caller that has waited longest is on a runtime that is not driven.
#[test]
fn freed_units_reach_a_caller_although_another_runtime_stands_still() {
    let limiter = Limiter::new(MemoryStore::new());
    let limit = Limit::per_hour("calls", 1);
    let (idle, driven) = (one_thread(), one_thread());
    assert!(driven.block_on(is_admitted(&limiter, &limit)));
    let _kept = idle.block_on(long_kept(&limiter, &limit));
    driven.block_on(async {
        let (waiter, calls) = (limiter.clone(), limit.clone());
        let acquired = async move { waiter.acquire(&calls, "ada", 1, Duration::MAX).await };
        let waiting = tokio::spawn(acquired);
        let_tasks_run().await;
        limiter.reset(&limit, "ada").await.unwrap();
        let decision = timeout(seconds(2), waiting).await;
        let decision = decision.expect("it still sleeps").unwrap().unwrap();
        assert!(decision.is_allowed());
    });
}

/// The first in line sleeps when its runtime ends. A kept caller of this runtime gets an error.
#[test]
fn the_end_of_a_runtime_ends_its_lines() {
    let limiter = Limiter::new(MemoryStore::new());
    let (ending, other) = (one_thread(), one_thread());
    let mut callers = ending.block_on(async {
        assert!(is_admitted(&limiter, &ONE).await);
        let mut callers = Vec::new();
        for _ in 0..3 {
            callers.push(kept(&limiter, &ONE).await);
        }
        callers
    });
    drop(ending);
    assert_eq!(lines(&limiter), 0);
    let first = callers.remove(0);
    let outcome = other.block_on(async { timeout(TEST_TIMEOUT, first).await });
    assert!(
        matches!(outcome, Ok(Err(Error::Unavailable(_)))),
        "{outcome:?}"
    );
    for mut caller in callers {
        let polled = caller
            .as_mut()
            .poll(&mut Context::from_waker(Waker::noop()));
        assert!(matches!(polled, Poll::Ready(Err(Error::Unavailable(_)))));
    }
    assert!(other.block_on(is_admitted(&limiter, &ONE)));
}

/// Without a runtime there is no task that could wait.
#[test]
fn waiting_without_a_runtime_is_an_error() {
    let limiter = Limiter::new(MemoryStore::new());
    let (calls, mut noop) = (CALLS, Context::from_waker(Waker::noop()));
    for is_first in [true, false] {
        let acquired = limiter.acquire(&calls, "ada", 3, TEST_TIMEOUT);
        let mut acquired = pin!(acquired);
        let Poll::Ready(outcome) = acquired.as_mut().poll(&mut noop) else {
            panic!("it waits");
        };
        assert_eq!(
            outcome.is_ok_and(|decision| decision.is_allowed()),
            is_first
        );
    }
    assert_eq!(lines(&limiter), 0);
}

/// Half of the callers give up before their turn.
#[test]
fn ten_thousand_callers_wait_for_one_key() {
    const CALLERS: usize = 10_000;
    let limit = Limit::per("calls", 100, ms(100));
    let mut paused = Builder::new_current_thread();
    let paused = paused.enable_all().start_paused(true).build().unwrap();
    let limiter = Limiter::new(MemoryStore::new());
    paused.block_on(async {
        let begun = Instant::now();
        let mut waiting = JoinSet::new();
        for number in 0..CALLERS {
            let (limiter, limit) = (limiter.clone(), limit.clone());
            let max_wait = if number % 2 == 0 {
                ms(50)
            } else {
                seconds(600)
            };
            waiting.spawn(async move { limiter.acquire(&limit, "ada", 1, max_wait).await });
        }
        let decisions = waiting.join_all().await;
        let admitted = decisions.into_iter().filter(|decision| {
            let decision = decision.as_ref().unwrap();
            decision.is_allowed()
        });
        assert!(admitted.count() >= CALLERS / 2);
        assert!(begun.elapsed() < seconds(60), "{:?}", begun.elapsed());
        sleep(Duration::ZERO).await;
    });
    assert_eq!(lines(&limiter), 0);
}
