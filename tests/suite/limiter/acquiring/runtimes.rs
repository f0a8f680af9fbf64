//! Callers on runtimes that are not driven or have ended, and on executors other than tokio's.

use std::{
    future::poll_fn,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    sync::{Arc, Mutex, mpsc},
    task::{Context, Wake, Waker},
    thread,
    time::{Duration, Instant},
};

use tokio::{
    runtime::Builder,
    task::yield_now,
    time::{sleep, timeout},
};
use tower_sliding_window::{Charge, Check, Limit, Limiter, MemoryStore};

use super::{
    lines,
    unpolled_callers::{UnpolledWait, poll_once_for},
};
use crate::support::{Lateness, TEST_TIMEOUT, ms, one_thread};

fn check(limit: &Limit) -> Check {
    Check::new(Charge::new(limit.clone(), "ada", 1).unwrap())
}

/// As documented: about a second more, and 20 ms for each place in line. The line has three places,
/// and the watch is on a runtime that is not driven. Callers of other lines come and go in between.
#[test]
fn callers_of_other_lines_do_not_delay_a_takeover() {
    let (store, limit) = (MemoryStore::new(), Limit::per("calls", 3, ms(300)));
    let limiter = Limiter::new(store);
    let (undriven, driven) = (one_thread(), one_thread());
    let _kept = undriven.block_on(async {
        assert!(limiter.check(&limit, "ada", 3).await.unwrap().is_allowed());
        let first = poll_once_for(&limiter, check(&limit), Duration::MAX).await;
        (
            first,
            poll_once_for(&limiter, check(&limit), Duration::MAX).await,
        )
    });
    driven.block_on(async {
        for other in 0..2_000 {
            assert!(
                limiter
                    .acquire(&limit, format!("{other}"), 1, ms(1))
                    .await
                    .unwrap()
                    .is_allowed()
            );
        }
        let (begun, lateness) = (Instant::now(), Lateness::start());
        let decision = timeout(
            TEST_TIMEOUT / 2,
            limiter.acquire(&limit, "ada", 1, Duration::MAX),
        )
        .await;
        assert!(
            decision.is_ok(),
            "the third in line still waits after {:?}",
            begun.elapsed()
        );
        let (waited, late) = (begun.elapsed(), lateness.so_far());
        assert!(
            waited < ms(2_500) + late,
            "{waited:?}, timers were late by {late:?}"
        );
    });
}

/// The same without callers of other lines.
#[test]
fn a_takeover_from_a_runtime_that_is_not_driven_takes_a_second() {
    let (store, limit) = (MemoryStore::new(), Limit::per("calls", 3, ms(300)));
    let limiter = Limiter::new(store);
    let (undriven, driven) = (one_thread(), one_thread());
    let _kept = undriven.block_on(async {
        assert!(limiter.check(&limit, "ada", 3).await.unwrap().is_allowed());
        let first = poll_once_for(&limiter, check(&limit), Duration::MAX).await;
        (
            first,
            poll_once_for(&limiter, check(&limit), Duration::MAX).await,
        )
    });
    driven.block_on(async {
        let (begun, lateness) = (Instant::now(), Lateness::start());
        let decision = timeout(
            TEST_TIMEOUT / 2,
            limiter.acquire(&limit, "ada", 1, Duration::MAX),
        )
        .await;
        assert!(
            decision.is_ok(),
            "the third in line still waits after {:?}",
            begun.elapsed()
        );
        let (waited, late) = (begun.elapsed(), lateness.so_far());
        assert!(
            waited < ms(2_500) + late,
            "{waited:?}, timers were late by {late:?}"
        );
    });
}

/// A task of a small executor: it lives as long as something can wake it.
struct Task {
    future: Mutex<Option<UnpolledWait>>,
    queue: mpsc::Sender<Arc<Self>>,
}

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        let _ = self.queue.clone().send(self);
    }
}

impl Task {
    fn poll(self: Arc<Self>) {
        let waker = Waker::from(Arc::clone(&self));
        let mut future = self.future.lock().unwrap();
        if let Some(wait) = future.as_mut()
            && wait
                .as_mut()
                .poll(&mut Context::from_waker(&waker))
                .is_ready()
        {
            *future = None;
        }
    }
}

/// The executor of the first caller ends, so that only its waker keeps it.
#[test]
fn the_last_waker_of_a_caller_is_not_dropped_under_the_lock() {
    let (sent, ended) = mpsc::channel();
    thread::spawn(move || {
        let (runtime, limit) = (
            crate::support::two_threads(),
            Limit::per("calls", 3, ms(200)),
        );
        let limiter = Limiter::new(MemoryStore::new());
        let _entered = runtime.enter();
        assert!(
            runtime
                .block_on(limiter.check(&limit, "ada", 3))
                .unwrap()
                .is_allowed()
        );
        {
            let (queue, woken) = mpsc::channel();
            let wait = {
                let (limiter, check) = (limiter.clone(), check(&limit));
                async move { limiter.acquire_all(check, Duration::MAX).await }
            };
            Arc::new(Task {
                future: Mutex::new(Some(Box::pin(wait))),
                queue,
            })
            .poll();
            // The executor ends when the task is woken.
            drop(woken.recv().unwrap());
        }
        let second = runtime.block_on(async {
            timeout(ms(3_000), limiter.acquire(&limit, "ada", 1, Duration::MAX)).await
        });
        let _ = sent.send(second.is_ok_and(|decision| decision.unwrap().is_allowed()));
    });
    assert_eq!(
        ended.recv_timeout(TEST_TIMEOUT),
        Ok(true),
        "the limiter hangs"
    );
}

/// A caller that waits is polled on another runtime after its own has ended.
#[test]
fn a_caller_whose_runtime_has_ended_does_not_panic() {
    let limit = Limit::per("calls", 3, ms(300));
    for place in ["first", "second"] {
        let limiter = Limiter::new(MemoryStore::new());
        let first = one_thread();
        let mut kept = first.block_on(async {
            assert!(limiter.check(&limit, "ada", 3).await.unwrap().is_allowed());
            let first = poll_once_for(&limiter, check(&limit), Duration::MAX).await;
            let second = poll_once_for(&limiter, check(&limit), Duration::MAX).await;
            if place == "first" {
                (first, second)
            } else {
                (second, first)
            }
        });
        drop(first);
        let other = one_thread();
        let polled = catch_unwind(AssertUnwindSafe(|| {
            other.block_on(async {
                timeout(TEST_TIMEOUT, poll_fn(|cx| Pin::new(&mut kept.0).poll(cx))).await
            })
        }));
        let polled = polled.map(|polled| {
            polled.map(|outcome| {
                outcome
                    .map(|decision| decision.is_allowed())
                    .map_err(|_| ())
            })
        });
        assert!(matches!(polled, Ok(Ok(_))), "{place}: {polled:?}");
    }
}

/// Callers of another runtime go on after a runtime has ended with its callers, the first of them
/// in the middle of its wait.
#[test]
fn a_line_goes_on_when_the_runtime_of_its_first_caller_ends() {
    let (limiter, limit) = (
        Limiter::new(MemoryStore::new()),
        Limit::per("calls", 3, ms(500)),
    );
    let (first, other) = (one_thread(), one_thread());
    first.block_on(async {
        assert!(limiter.check(&limit, "ada", 3).await.unwrap().is_allowed());
        for _ in 0..3 {
            let (limiter, check) = (limiter.clone(), check(&limit));
            drop(tokio::spawn(async move {
                limiter.acquire_all(check, Duration::MAX).await
            }));
        }
        for _ in 0..50 {
            yield_now().await;
        }
    });
    let ended = thread::spawn(move || {
        thread::sleep(ms(100));
        drop(first);
    });
    other.block_on(async {
        let begun = Instant::now();
        let decision = timeout(
            TEST_TIMEOUT / 2,
            limiter.acquire(&limit, "ada", 1, Duration::MAX),
        )
        .await;
        assert!(decision.is_ok_and(|decision| decision.unwrap().is_allowed()));
        assert!(begun.elapsed() < ms(1_500), "{:?}", begun.elapsed());
    });
    ended.join().unwrap();
}

/// Three callers are not polled. The runtime of the task that watches them ends after it has sought
/// a first one among them. Then they leave.
#[test]
fn a_line_ends_with_its_last_caller_when_its_runtime_has_ended() {
    let limit = Limit::per("calls", 3, ms(50));
    let limiter = Limiter::new(MemoryStore::new());
    let runtime = Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .unwrap();
    let kept = runtime.block_on(async {
        assert!(limiter.check(&limit, "ada", 3).await.unwrap().is_allowed());
        let mut kept = Vec::new();
        for _ in 0..3 {
            kept.push(poll_once_for(&limiter, check(&limit), Duration::MAX).await);
        }
        // After 50 ms the first should ask, after 150 ms the next, and after 151 ms any of them.
        sleep(ms(200)).await;
        kept
    });
    drop(runtime);
    assert_eq!(lines(&limiter), 1);
    drop(kept);
    assert_eq!(lines(&limiter), 0);
}
