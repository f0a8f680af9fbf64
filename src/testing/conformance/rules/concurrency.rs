//! Concurrency: checks that arrive together are decided one after the other, on the store and its clones. A check is decided
//! when it is polled.

use tokio::task::JoinSet;

use super::super::trial::{Trial, charge, check_of, plain_check, to_the_start_of_a_window};
use crate::{check::Check, limit::Limit, store::Store};

const NARROW: Limit = Limit::per_hour("narrow", 5);
const WIDE: Limit = Limit::per_hour("wide", 20);

impl Trial {
    /// Decides all checks at once, and returns how many were admitted.
    async fn admitted(&self, checks: impl Iterator<Item = Check>) -> u64 {
        let decide = |check| {
            let limiter = self.limiter.clone();
            async move { limiter.check_all(check).await.unwrap().is_allowed() }
        };
        let decisions = checks.map(decide).collect::<JoinSet<_>>().join_all().await;
        decisions.into_iter().map(u64::from).sum()
    }
}

/// A store that reads, decides and writes in separate steps decides several checks by the same figures.
pub(super) async fn concurrent_checks_admit_no_more_than_the_limit(test: Trial) {
    let test = test.without_deny_cache();
    for algorithm in test.algorithms() {
        to_the_start_of_a_window(&test.clock, NARROW.window());
        let [narrow, wide] = [NARROW, WIDE].map(|limit| limit.with_algorithm(algorithm));
        let admitted = test.admitted((0..50).map(|_| plain_check(&narrow, 1))).await;
        assert_eq!((admitted, test.used(&narrow).await), (5, 5), "{algorithm:?}: 50 checks of one limit");

        // The wide limit alone, and together with the narrow one in either order.
        test.limiter.reset(&narrow, "ada").await.unwrap();
        let check = |number: usize| match number % 4 {
            0 => check_of([charge(&narrow, 1), charge(&wide, 1)]),
            1 => check_of([charge(&wide, 1), charge(&narrow, 1)]),
            _ => plain_check(&wide, 1),
        };
        let admitted = test.admitted((0..50).map(check)).await;
        assert_eq!((admitted, test.used(&wide).await), (20, 20), "{algorithm:?}: 50 checks of two limits");
        assert!(test.used(&narrow).await <= 5, "{algorithm:?}: 50 checks of two limits");
        for limit in [&narrow, &wide] {
            test.limiter.reset(limit, "ada").await.unwrap();
        }
    }
}

/// A caller that drops a future before it has polled it has spent nothing.
pub(super) async fn a_check_is_counted_when_its_future_is_polled(test: Trial) {
    let check = plain_check(&WIDE, 1);
    for _ in 0..3 {
        drop(test.store.decide(check.clone()));
    }
    assert_eq!(test.used(&WIDE).await, 0, "three futures were dropped unpolled");
    let decision = test.store.decide(check);
    assert_eq!(test.used(&WIDE).await, 0, "the future was not polled yet");
    assert_eq!(decision.await.unwrap().used(), 1);
}

/// A layer clones its store for each service.
pub(super) async fn clones_of_a_store_count_together(test: Trial) {
    for used in 1..=NARROW.units() {
        let decision = test.limiter_on_a_clone().check(&NARROW, "ada", 1).await.unwrap();
        assert_eq!((decision.is_allowed(), decision.used()), (true, used));
        assert_eq!(test.used(&NARROW).await, used, "the store does not count what its clone has admitted");
    }
    assert!(!test.limiter_on_a_clone().check(&NARROW, "ada", 1).await.unwrap().is_allowed());
}

/// A limiter asks `decide` only if `decide_now` does not decide. Both spend the same units.
pub(super) async fn checks_decided_at_once_and_later_count_together(test: Trial) {
    let check = plain_check(&NARROW, 1);
    assert_eq!(test.used(&NARROW).await, 0);
    for used in 1..=NARROW.units() {
        let at_once = if used % 2 == 0 { test.store.decide_now(&check) } else { None };
        let decision = match at_once {
            Some(decision) => decision,
            None => test.store.decide(check.clone()).await,
        };
        assert_eq!(decision.unwrap().used(), used);
    }
    assert!(!test.store.decide(check.clone()).await.unwrap().is_allowed());
    assert!(test.store.decide_now(&check).is_none_or(|decision| !decision.unwrap().is_allowed()));
}
