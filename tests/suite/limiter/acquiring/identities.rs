//! Limits that share units, and limits that share nothing but a name, in lines; and charges that
//! cannot refuse.

use std::time::Duration;

use tower_sliding_window::{
    Algorithm, Charge, Check, Key, Limit, check::AdmissionId, settlement::Settlement,
};

use super::Test;
use crate::support::{check_of, let_tasks_run, ms};

fn of(limit: &Limit, key: impl Into<Key>, cost: u64) -> Charge {
    Charge::new(limit.clone(), key, cost).unwrap()
}

/// A premium client waits; units return through the free plan's limit, which shares them: same
/// name, window and algorithm.
#[tokio::test(start_paused = true)]
async fn units_settled_under_a_smaller_limit_of_the_identity_wake_callers_under_a_larger_one() {
    let test = Test::start();
    let (free, premium) = (Limit::per_hour("api", 10), Limit::per_hour("api", 1_000));
    let small = Check::new(of(&free, "ada", 10));
    let decision = test.limiter.check_all(small.clone()).await.unwrap();
    assert!(decision.is_allowed());
    assert!(
        test.limiter
            .check(&premium, "ada", 990)
            .await
            .unwrap()
            .is_allowed()
    );
    test.wait("a", Check::new(of(&premium, "ada", 10)), Duration::MAX)
        .await;
    test.limiter
        .settle(Settlement::new(small, &decision, |_| Some(0)))
        .await
        .unwrap();
    assert_eq!(
        test.limiter
            .peek(&premium, "ada")
            .await
            .unwrap()
            .remaining(),
        10
    );
    let_tasks_run().await;
    assert_eq!(test.admitted(), ["a"]);
}

#[tokio::test(start_paused = true)]
async fn units_of_one_algorithm_are_not_given_to_callers_of_another() {
    let test = Test::start();
    let (log, own) = (Limit::per_hour("api", 1), Limit::per_hour("own", 5));
    let fixed = Limit::per_day("api", 1).with_algorithm(Algorithm::FIXED_WINDOW);
    let log = Limit::new("api", log.units(), fixed.window()).unwrap();
    let spent = Check::new(of(&fixed, "ada", 1)).with_id(AdmissionId(77));
    let decision = test.limiter.check_all(spent.clone()).await.unwrap();
    assert!(
        test.limiter
            .check(&log, "ada", 1)
            .await
            .unwrap()
            .is_allowed()
    );
    test.wait(
        "log",
        check_of([of(&log, "ada", 1), of(&own, "log", 1)]),
        Duration::MAX,
    )
    .await;
    test.wait(
        "fixed",
        check_of([of(&fixed, "ada", 1), of(&own, "fixed", 1)]),
        Duration::MAX,
    )
    .await;
    test.checks_sent();
    test.limiter
        .settle(Settlement::new(spent, &decision, |_| Some(0)))
        .await
        .unwrap();
    let_tasks_run().await;
    let admitted = test.admitted();
    assert_eq!(
        (
            test.limiter.peek(&fixed, "ada").await.unwrap().remaining(),
            admitted
        ),
        (0, vec!["fixed"])
    );
}

/// Docs of `in_shadow`: it never refuses the check. Here a caller that nothing refuses is refused
/// because of it.
#[tokio::test(start_paused = true)]
async fn a_charge_that_cannot_refuse_makes_no_caller_wait() {
    let (full, other) = (Limit::per_hour("full", 3), Limit::per_hour("other", 10));
    let shadow = check_of([of(&full, "ada", 1).in_shadow(), of(&other, "ada", 1)]);
    let spent = check_of([Charge::spent(full.clone(), "ada", 1), of(&other, "ada", 1)]);
    let free = check_of([of(&full, "ada", 0), of(&other, "ada", 1)]);
    let mut refused = Vec::new();
    for (name, check) in [("shadow", shadow), ("spent", spent), ("no cost", free)] {
        let test = Test::start();
        assert!(
            test.limiter
                .check(&full, "ada", 3)
                .await
                .unwrap()
                .is_allowed()
        );
        assert!(
            test.limiter
                .check_all(check.clone())
                .await
                .unwrap()
                .is_allowed()
        );
        test.wait(
            "a",
            check_of([of(&full, "ada", 1), of(&other, "ada", 1)]),
            Duration::MAX,
        )
        .await;
        let decision = test.limiter.acquire_all(check, ms(500)).await.unwrap();
        if !decision.is_allowed() {
            refused.push((name, decision.retry_after()));
        }
    }
    assert_eq!(refused, []);
}

/// Two callers wait in one line. Each has a limit in the shadow of its own, so the first one to
/// leave is the last that wants its own.
#[tokio::test(start_paused = true)]
async fn a_caller_that_leaves_with_a_limit_of_its_own_ends_no_line_of_others() {
    let test = Test::start();
    let full = Limit::per_hour("full", 1);
    let tried = Limit::per_hour("tried", 9);
    assert!(
        test.limiter
            .check(&full, "ada", 1)
            .await
            .unwrap()
            .is_allowed()
    );
    let check = |own| check_of([of(&full, "ada", 1), of(&tried, own, 1).in_shadow()]);
    let first = test.wait("a", check("a"), Duration::MAX).await;
    for own in ["b", "c"] {
        test.wait(own, check(own), Duration::MAX).await;
    }
    first.abort();
    let_tasks_run().await;
    assert_eq!(test.lines(), 1);
    for admitted in [&["b"][..], &["b", "c"]] {
        test.limiter.reset(&full, "ada").await.unwrap();
        let_tasks_run().await;
        assert_eq!(test.admitted(), admitted);
    }
    assert_eq!(test.lines(), 0);
}
