//! Limiters on clones of a store share one breaker, also with different deadlines and runtimes.

use std::time::{Duration, Instant};

use tokio::{runtime, time::sleep};
use tower_sliding_window::{Error, Limiter, limiter::Breaker, testing::Fault};

use super::{CALLS, INTERVAL, SLACK, is_open};
use crate::support::{let_tasks_run, ms, stores::with_fault};

/// All limiters on clones of a store share a breaker.
#[tokio::test(start_paused = true)]
async fn limiters_on_clones_of_a_store_share_one_breaker() {
    let store = with_fault(Fault::Fails).with_local_state();
    for _ in 0..5 {
        let each = Limiter::new(store.clone());
        assert!(matches!(
            each.check(&CALLS, "ada", 1).await,
            Err(Error::Unavailable(_))
        ));
    }
    let [one, other] = [(); 2].map(|()| Limiter::new(store.clone()));
    assert!(is_open(&one) && is_open(&other));
    let_tasks_run().await;
    assert_eq!(store.calls(), 6, "one probe for both");
    let own = Limiter::new(store.clone()).breaker(Breaker::default());
    assert!(
        matches!(
            own.check(&CALLS, "ada", 1).await,
            Err(Error::Unavailable(_))
        ),
        "its own is closed"
    );

    store.set(Fault::None);
    sleep(2 * INTERVAL).await;
    assert!(!is_open(&one) && !is_open(&other));
}

#[tokio::test(start_paused = true)]
async fn probes_stop_with_the_last_limiter_and_start_with_the_next() {
    let store = with_fault(Fault::Hangs).with_local_state();
    let [one, other] = [(); 2].map(|()| Limiter::new(store.clone()));
    for _ in 0..5 {
        one.check(&CALLS, "ada", 1).await.unwrap_err();
    }
    assert!(is_open(&one));
    let_tasks_run().await;
    drop(one);
    let_tasks_run().await;
    assert_eq!(store.hanging(), 1);
    drop(other);
    let_tasks_run().await;
    assert_eq!(store.hanging(), 0, "before its deadline");
    sleep(2 * INTERVAL).await;
    assert_eq!(store.calls(), 6);

    let next = Limiter::new(store.clone());
    assert!(is_open(&next), "the store has not answered since");
    store.set(Fault::None);
    let_tasks_run().await;
    sleep(2 * INTERVAL).await;
    assert!(!is_open(&next));
}

/// A store that takes 20 ms is too slow for a deadline of 1 ms, and fast enough for one of 50 ms.
#[tokio::test(start_paused = true)]
async fn a_short_deadline_opens_no_breaker_for_longer_deadlines() {
    let store = with_fault(Fault::Slow(Duration::from_millis(20))).with_local_state();
    let patient = Limiter::new(store.clone());
    let hasty = Limiter::new(store.clone()).deadline(Duration::from_millis(1));
    let mut refused = 0;
    for round in 0..100 {
        match hasty.check(&CALLS, "ada", 1).await {
            Err(Error::TimedOut { .. }) => {}
            Err(Error::BreakerOpen(_)) => refused += 1,
            answer => panic!("{answer:?}"),
        }
        assert!(patient.check(&CALLS, "bob", 1).await.is_ok(), "{round}");
    }
    assert!(
        refused >= 90,
        "the breaker was open {refused} times for the short deadline"
    );
}

/// A reply counts for all deadlines that are at least as long as it took.
#[tokio::test(start_paused = true)]
async fn a_fast_reply_closes_the_breaker_for_every_deadline() {
    let store = with_fault(Fault::Hangs).with_local_state();
    let hasty = Limiter::new(store.clone()).deadline(Duration::from_millis(10));
    for (takes, closes) in [(20, false), (5, true)] {
        store.set(Fault::Hangs);
        while !matches!(
            hasty.check(&CALLS, "ada", 1).await,
            Err(Error::BreakerOpen(_))
        ) {}
        // A probe is in flight and gets no reply.
        let_tasks_run().await;
        store.set(Fault::Slow(Duration::from_millis(takes)));
        let patient = Limiter::new(store.clone());
        assert!(patient.check(&CALLS, "bob", 1).await.is_ok());
        let is_open = matches!(
            hasty.check(&CALLS, "ada", 1).await,
            Err(Error::BreakerOpen(_))
        );
        assert_eq!(is_open, !closes, "after {takes} ms");
    }
}

/// A store that does not reply within 50 ms does not reply within 1 ms either.
#[tokio::test(start_paused = true)]
async fn a_long_deadline_opens_the_breaker_for_shorter_ones() {
    let store = with_fault(Fault::Hangs).with_local_state();
    let patient = Limiter::new(store.clone());
    let [hasty, longer] =
        [1, 100].map(|millis| Limiter::new(store.clone()).deadline(Duration::from_millis(millis)));
    for _ in 0..5 {
        assert!(matches!(
            patient.check(&CALLS, "ada", 1).await,
            Err(Error::TimedOut { .. })
        ));
    }
    assert!(is_open(&patient) && is_open(&hasty));
    for _ in 0..5 {
        assert!(matches!(
            longer.check(&CALLS, "ada", 1).await,
            Err(Error::TimedOut { .. })
        ));
    }
    assert!(is_open(&longer));

    // The breaker probes with the longest deadline, and closes for all.
    store.set(Fault::Slow(Duration::from_millis(80)));
    sleep(2 * INTERVAL).await;
    assert!(longer.check(&CALLS, "ada", 1).await.is_ok());
    assert!(matches!(
        patient.check(&CALLS, "ada", 1).await,
        Err(Error::TimedOut { .. })
    ));
}

/// A failure of the longer deadline counts for both, and stays counted when the breaker has opened
/// for the shorter one.
#[tokio::test(start_paused = true)]
async fn checks_with_two_deadlines_in_turn_wait_no_more_often_than_with_one() {
    let store = with_fault(Fault::Hangs).with_local_state();
    let limiters =
        [10, 100].map(|millis| Limiter::new(store.clone()).deadline(Duration::from_millis(millis)));
    let mut waits = [0, 0];
    for _ in 0..10 {
        for (limiter, waits) in limiters.iter().zip(&mut waits) {
            match limiter.check(&CALLS, "ada", 1).await {
                Err(Error::TimedOut { .. }) => *waits += 1,
                outcome => assert!(matches!(outcome, Err(Error::BreakerOpen(_))), "{outcome:?}"),
            }
        }
    }
    assert!(waits[0] <= 3 && waits[1] <= 5, "{waits:?}");
}

/// The runtime of the probes stalls or has ended. Callers on another runtime are decided soon after
/// the store is back.
#[test]
fn another_runtime_takes_over_probing_when_the_first_ends_or_stalls() {
    let runtime = || {
        runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .unwrap()
    };
    for ends in [true, false] {
        let store = with_fault(Fault::Fails).with_local_state();
        let first = runtime();
        let one = Limiter::new(store.clone());
        first.block_on(async {
            for _ in 0..5 {
                one.check(&CALLS, "ada", 1).await.unwrap_err();
            }
            assert!(is_open(&one));
            let_tasks_run().await;
        });
        // From here on the first runtime is not driven.
        let stands_still = (!ends).then_some(first);
        let other = Limiter::new(store.clone());
        runtime().block_on(async {
            assert!(is_open(&other));
            sleep(INTERVAL).await;
            store.set(Fault::None);
            let (back, mut refused) = (Instant::now(), 0);
            while other.check(&CALLS, "ada", 1).await.is_err() {
                refused += 1;
                assert!(back.elapsed() < SLACK, "asked {} times", store.calls());
                sleep(Duration::from_millis(1)).await;
            }
            assert!(refused > 0);
        });
        drop(stands_still);
    }
}

/// A handler may make a limiter for each call, on clones of one store. Then no limiter lives until
/// its probe has an answer.
#[tokio::test(start_paused = true)]
async fn limiters_that_live_for_one_check_do_not_keep_the_breaker_open() {
    let store = with_fault(Fault::Fails).with_local_state();
    for _ in 0..6 {
        Limiter::new(store.clone())
            .check(&CALLS, "ada", 1)
            .await
            .unwrap_err();
    }
    assert!(is_open(&Limiter::new(store.clone())));
    store.set(Fault::None);
    for _ in 0..100 {
        if Limiter::new(store.clone())
            .check(&CALLS, "ada", 1)
            .await
            .is_ok()
        {
            return;
        }
        sleep(ms(10)).await;
    }
    panic!("refused for a second although the store is back");
}

/// Each request has a limiter of its own, which lives longer than its check, but shorter than the
/// reply to a probe takes.
#[tokio::test(start_paused = true)]
async fn limiters_that_live_shorter_than_a_probe_do_not_keep_the_breaker_open() {
    let store = with_fault(Fault::Fails).with_local_state();
    for _ in 0..6 {
        Limiter::new(store.clone())
            .check(&CALLS, "ada", 1)
            .await
            .unwrap_err();
    }
    store.set(Fault::Slow(ms(20)));
    for _ in 0..200 {
        let limiter = Limiter::new(store.clone());
        if limiter.check(&CALLS, "ada", 1).await.is_ok() {
            return;
        }
        sleep(ms(5)).await;
        drop(limiter);
        sleep(ms(5)).await;
    }
    panic!("refused for two seconds although the store is back");
}

/// If a runtime has ended, another runtime soon sends the next probe, even if a probe might take
/// for ever.
#[test]
fn a_runtime_that_has_ended_delays_no_probe() {
    let runtime = || {
        runtime::Builder::new_current_thread()
            .enable_time()
            .build()
            .unwrap()
    };
    for deadline in [Duration::from_secs(60), Duration::MAX] {
        let store = with_fault(Fault::Fails).with_local_state();
        let limiter = Limiter::new(store.clone()).deadline(deadline);
        runtime().block_on(async {
            for _ in 0..6 {
                limiter.check(&CALLS, "ada", 1).await.unwrap_err();
            }
            let_tasks_run().await;
        });
        store.set(Fault::None);
        runtime().block_on(async {
            let begun = Instant::now();
            while limiter.check(&CALLS, "ada", 1).await.is_err() {
                assert!(
                    begun.elapsed() < SLACK,
                    "{deadline:?}: asked {} times",
                    store.calls()
                );
                sleep(ms(1)).await;
            }
        });
    }
}
