//! Replies that are lost after the script has run.

use std::time::Duration;

use tokio::{task::JoinHandle, time::sleep};
use tower_sliding_window::{
    Charge, Check, Decision, Error, Limit, Limiter, limiter::Breaker, settlement::Settlement,
};

use super::reached;
use crate::support::{
    TEST_TIMEOUT,
    outage::row,
    proxy::{Cut, Proxy},
    redis_server::{RedisServer, store_at},
    until,
};

const CALLS: Limit = Limit::per_hour("calls", 1_000_000);
const SHORT: Limit = Limit::per("short", 1_000_000, Duration::from_secs(10));
const FLEETING: Limit = Limit::per("fleeting", 1_000_000, Duration::from_millis(2));
const KEYS: [&str; 5] = ["ada", "bob", "cy", "dee", "eve"];
/// Checks per trial, few enough for one batch.
const CHECKS: usize = 50;
const BATCHES: usize = 200;

type Answer = JoinHandle<Result<Decision, Error>>;

/// With one batch in flight at a time.
fn limiter(proxy: &Proxy) -> Limiter {
    let store = store_at(proxy.url())
        .connections(1)
        .connect_timeout(TEST_TIMEOUT)
        .reply_timeout(TEST_TIMEOUT)
        .build()
        .unwrap();
    Limiter::new(store)
        .deadline(TEST_TIMEOUT)
        .breaker(Breaker::OFF)
}

/// On a runtime of one thread, all of these checks are queued before the first is sent. Some are
/// alone with their key and others are copies, some cost more, and some reserve their units.
fn ask(limiter: &Limiter) -> Vec<(usize, u64, Answer)> {
    let ask_one = |number: usize| {
        let (key, cost, limiter) = (
            number * number % KEYS.len(),
            [1, 1, 1, 7][number / 10 % 4],
            limiter.clone(),
        );
        let answer = tokio::spawn(async move {
            if number.is_multiple_of(13) {
                let reserved = limiter
                    .reserve(&CALLS, KEYS[key], cost, Duration::from_secs(600))
                    .await?;
                return Ok(reserved.unwrap().decision().clone());
            }
            limiter.check(&CALLS, KEYS[key], cost).await
        });
        (key, cost, answer)
    };
    (0..CHECKS).map(ask_one).collect()
}

/// 10,000 admissions whose reply is lost and that are sent again: each counts once.
#[tokio::test]
async fn resent_checks_count_once() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server).await;
    let limiter = limiter(&proxy);
    assert!(limiter.peek(&CALLS, "ada").await.unwrap().is_allowed());
    let (mut used, mut admitted) = ([0; KEYS.len()], 0);
    for _ in 0..BATCHES {
        proxy.lose_replies(1);
        for (key, cost, answer) in ask(&limiter) {
            let decision = answer.await.unwrap().unwrap();
            used[key] += cost;
            admitted += 1;
            assert!(decision.is_allowed());
        }
        assert!(proxy.has_lost_them());
        for (key, expected) in KEYS.iter().zip(used) {
            assert_eq!(
                limiter.peek(&CALLS, *key).await.unwrap().binding().used,
                expected
            );
        }
    }
    assert_eq!(admitted, 10_000);
    row(
        "a reply is lost after the script has run, and the checks are sent again",
        format!("{admitted} admissions, each counted once"),
        "each admission counted once, in 10,000 trials",
    );
}

/// `CHECKS` checks of several limits, whose shortest window may pass before the second try. Some
/// are alone, some are copies, and some reserve.
fn ask_several(limiter: &Limiter, trial: usize) -> Vec<(usize, Check, Answer)> {
    let ask_one = |number: usize| {
        let (key, cost) = (number * number % KEYS.len(), [1, 1, 1, 7][number / 10 % 4]);
        let is_reserved = number.is_multiple_of(13);
        let limits = [FLEETING, SHORT, CALLS];
        let limits = if (trial + number / 5).is_multiple_of(2) {
            &limits[..]
        } else {
            &limits[1..]
        };
        let mut charges = limits.iter().map(|limit| {
            let charge = Charge::new(limit.clone(), KEYS[key], cost).unwrap();
            if is_reserved {
                charge.reserve(Duration::from_secs(600))
            } else {
                charge
            }
        });
        let first = Check::new(charges.next().unwrap());
        let check = charges.try_fold(first, Check::and).unwrap();
        (key, check.clone(), tokio::spawn(limiter.check_all(check)))
    };
    (0..CHECKS).map(ask_one).collect()
}

/// 10,000 admissions by two or three limits are sent again after a lost reply, and then refunded.
/// Each counts once under each limit that still knows it, and each refund finds it.
#[tokio::test]
async fn resent_checks_of_several_limits_count_once_and_can_be_refunded() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server).await;
    let limiter = limiter(&proxy).refusal_cache(Duration::ZERO);
    assert!(limiter.peek(&CALLS, "ada").await.unwrap().is_allowed());
    let (mut admitted, mut given_back, mut passed) = (0, 0, 0);
    for trial in 0..BATCHES {
        // In every other trial, the shortest window passes between the two tries.
        let later = if trial.is_multiple_of(2) {
            2 * FLEETING.window()
        } else {
            Duration::ZERO
        };
        proxy.delay_replies(later);
        proxy.lose_replies(1);
        let (mut used, mut decisions) = ([0; KEYS.len()], Vec::new());
        let asked = ask_several(&limiter, trial);
        for (key, check, answer) in asked {
            let decision = answer.await.unwrap().unwrap();
            proxy.delay_replies(Duration::ZERO);
            assert!(decision.is_allowed());
            let cost = check.charges().next().unwrap().cost();
            used[key] += cost;
            admitted += 1;
            if let Some(fleeting) = decision.statuses().find(|status| status.limit == FLEETING)
                && !later.is_zero()
            {
                assert_eq!(fleeting.used, 0, "expired units are not charged again");
                passed += 1;
            }
            decisions.push((check, decision));
        }
        assert!(proxy.has_lost_them());
        for (key, expected) in KEYS.iter().zip(used) {
            let [short, long] = [SHORT, CALLS].map(|limit| limiter.peek(&limit, *key));
            assert_eq!(
                (
                    short.await.unwrap().binding().used,
                    long.await.unwrap().binding().used
                ),
                (expected, expected),
                "trial {trial}"
            );
        }
        let refunds: Vec<_> = decisions
            .into_iter()
            .map(|(check, decision)| {
                let (limiter, refund) = (
                    limiter.clone(),
                    Settlement::new(check, &decision, |_| Some(0)),
                );
                tokio::spawn(async move { limiter.settle(refund).await.unwrap().was_applied })
            })
            .collect();
        for refund in refunds {
            given_back += u64::from(refund.await.unwrap());
        }
        for key in KEYS {
            let [fleeting, short, long] =
                [FLEETING, SHORT, CALLS].map(|limit| limiter.peek(&limit, key));
            let left = [fleeting.await, short.await, long.await]
                .map(|standing| standing.unwrap().binding().used);
            assert_eq!(left, [0; 3], "trial {trial}");
        }
    }
    assert_eq!((admitted, given_back), (10_000, 10_000));
    row(
        "the same by two or three limits, of which the shortest window passes before the second try, and a refund of each",
        format!(
            "{admitted} admissions, in {passed} of them the shortest window had passed; {given_back} refunds found"
        ),
        "each admission counted once and each refund found, in 10,000 trials",
    );
}

/// If signing in for the second try is cut whenever it is tried, the checks fail. They have counted
/// once.
#[tokio::test]
async fn checks_whose_reply_is_lost_twice_fail_and_count_once() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server).await;
    let limiter = limiter(&proxy);
    assert!(limiter.peek(&CALLS, "ada").await.unwrap().is_allowed());
    let (mut used, mut failed) = ([0; KEYS.len()], 0);
    for _ in 0..40 {
        // The reply to the script, and those of all connections that sign in.
        proxy.lose_replies(usize::MAX);
        for (key, cost, answer) in ask(&limiter) {
            assert!(matches!(answer.await.unwrap(), Err(Error::Unavailable(_))));
            used[key] += cost;
            failed += 1;
        }
        proxy.lose_replies(0);
        for (key, expected) in KEYS.iter().zip(used) {
            assert_eq!(
                limiter.peek(&CALLS, *key).await.unwrap().binding().used,
                expected
            );
        }
    }
    reached(
        "both replies lost",
        CHECKS,
        format!("failed {failed}, each counted once"),
    );
}

/// A resent check can be refunded like any other: alone, as copies that share an entry, and at a
/// larger cost.
#[tokio::test]
async fn resent_checks_can_be_refunded() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server).await;
    let limiter = limiter(&proxy);
    assert!(limiter.peek(&CALLS, "ada").await.unwrap().is_allowed());
    for (copies, cost) in [(1, 1), (1, 7), (3, 1), (40, 1), (40, 7)] {
        let check = Check::new(Charge::new(CALLS, "ada", cost).unwrap());
        proxy.lose_replies(1);
        let answers: Vec<_> = (0..copies)
            .map(|_| tokio::spawn(limiter.check_all(check.clone())))
            .collect();
        for answer in answers {
            let decision = answer.await.unwrap().unwrap();
            let settled = limiter
                .settle(Settlement::new(check.clone(), &decision, |_| Some(0)))
                .await
                .unwrap();
            assert!(settled.was_applied, "{copies} copies of {cost}");
        }
        assert!(proxy.has_lost_them());
        assert_eq!(
            limiter.peek(&CALLS, "ada").await.unwrap().binding().used,
            0,
            "{copies} copies of {cost}"
        );
    }
}

/// A batch has a check whose caller has stopped waiting, and which has taken a place, and another.
/// It is sent again without the first.
#[tokio::test(flavor = "multi_thread")]
async fn a_shutdown_waits_for_a_place_whose_reply_is_lost() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server).await;
    let patient = limiter(&proxy);
    let hasty = patient.clone().deadline(Duration::from_millis(100));
    let places = Limit::concurrent("streams", 100).freed_after(Duration::from_secs(3_600));
    assert!(patient.check(&CALLS, "ada", 1).await.unwrap().is_allowed());
    proxy.delay_replies(Duration::from_millis(400));
    let together = tokio::spawn({
        let (hasty, patient) = (
            hasty.check(&places, "ada", 1),
            patient.check(&CALLS, "bob", 1),
        );
        async move { tokio::join!(hasty, patient) }
    });
    until("the place is taken", || {
        server.keys().iter().any(|key| key.contains("streams"))
    })
    .await;
    sleep(Duration::from_millis(150)).await;
    proxy.cut(Cut::Close);
    patient.shutdown(TEST_TIMEOUT).await.unwrap();
    assert!(
        !server.keys().iter().any(|key| key.contains("streams")),
        "it is held"
    );
    let (place, call) = together.await.unwrap();
    assert!(place.is_err() && call.unwrap().is_allowed());
}

/// A connection that was cut may have left a request in the server's buffer, which the server reads
/// after the second try.
#[tokio::test]
async fn a_first_try_that_runs_after_the_second_counts_nothing_more() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server).await;
    let limiter = limiter(&proxy);
    assert!(limiter.peek(&CALLS, "ada").await.unwrap().is_allowed());
    let mut used = 0;
    for (copies, cost, is_reserved) in [
        (1, 1, false),
        (3, 1, false),
        (1, 7, false),
        (40, 1, false),
        (40, 7, false),
        (3, 1, false),
        (1, 1, false),
        (1, 7, true),
    ] {
        for limits in [&[CALLS][..], &[SHORT, CALLS]] {
            let mut charges = limits
                .iter()
                .map(|limit| Charge::new(limit.clone(), "ada", cost).unwrap());
            let first = charges.next().unwrap();
            let first = if is_reserved {
                first.reserve(Duration::from_secs(600))
            } else {
                first
            };
            let check = charges.try_fold(Check::new(first), Check::and).unwrap();
            proxy.hold_request();
            let answers: Vec<_> = (0..copies)
                .map(|_| tokio::spawn(limiter.check_all(check.clone())))
                .collect();
            for answer in answers {
                assert!(answer.await.unwrap().unwrap().is_allowed());
            }
            used += copies * cost;
            proxy.pass_on_held().await;
            let counted = limiter.peek(&CALLS, "ada").await.unwrap().binding().used;
            assert_eq!(
                counted,
                used,
                "{copies} copies of {cost}, {} limits, reserved: {is_reserved}",
                limits.len()
            );
        }
    }
}
