//! Reservations: leases end by themselves, and refusals that only reserved units cause have a retry
//! time of their own.

use std::time::Duration;

use super::trial::{
    MICROSECOND, Numbers, Trial, charge, ms, plain_check, reserved_check, seconds, to_next_window,
    to_the_start_of_a_window,
};
use crate::support::is_refused_by_reservations;
use tower_sliding_window::{
    Algorithm, Charge, Check, Decision, Limit, Limiter, decision::LimitStatus,
    settlement::Settlement,
};

const SECOND: Duration = Duration::from_secs(1);
const LEASE: Duration = Duration::from_secs(5);
const TOKENS: Limit = Limit::per_minute("tokens", 100);

fn both(first: Charge, second: Charge) -> Check {
    Check::new(first).and(second).unwrap()
}

impl Trial {
    async fn admit(&self, charge: Charge) {
        let decision = self.decide(&Check::new(charge)).await;
        assert!(decision.is_allowed(), "{decision:?}");
    }

    /// The refusal of a cost to a key, or `None` if it would be admitted. Spends nothing.
    async fn refused_for(
        &self,
        limiter: &Limiter,
        limit: &Limit,
        key: &'static str,
        cost: u64,
    ) -> Option<Decision> {
        if limiter.peek(limit, key).await.unwrap().remaining() >= cost {
            return None;
        }
        let decision = limiter.check(limit, key, cost).await.unwrap();
        assert!(!decision.is_allowed());
        Some(decision)
    }
}

/// Units that are not settled return when the lease ends, to the microsecond. A later settlement
/// still counts them, once.
pub(super) async fn a_lease_ends_by_itself(test: Trial) {
    for algorithm in test.algorithms() {
        let limit = TOKENS.with_algorithm(algorithm);
        to_the_start_of_a_window(&test.clock, TOKENS.window());
        let check = reserved_check(&limit, 100, LEASE);
        let admitted = test.take(&check).await;
        // A reservation may be returned at any time, so the retry time is a second, or the end of
        // the lease if that is sooner.
        for (block, reported) in [
            (Duration::ZERO, SECOND),
            (LEASE - SECOND - MICROSECOND, SECOND),
            (2 * MICROSECOND, SECOND - MICROSECOND),
            (SECOND - 2 * MICROSECOND, MICROSECOND),
        ] {
            test.clock.advance(block);
            let refused = test.limiter.check(&limit, "ada", 1).await.unwrap();
            let reserved = refused.binding().reserved;
            let told_of = (
                refused.retry_after(),
                is_refused_by_reservations(&refused),
                refused.binding().used,
                reserved,
            );
            assert_eq!(told_of, (Some(reported), true, 100, 100), "{algorithm:?}");
        }
        test.clock.advance(MICROSECOND);
        assert_eq!(test.used(&limit).await, 0, "{algorithm:?}");
        for is_known in [true, false] {
            assert_eq!(
                test.settled(&check, &admitted, 50).await,
                (is_known, 50),
                "{algorithm:?}"
            );
        }
        assert_eq!(
            test.take(&plain_check(&limit, 50)).await.binding().used,
            100,
            "{algorithm:?}"
        );
    }
}

/// A lease that is longer than the window ends with the window.
pub(super) async fn a_lease_lasts_at_most_one_window(test: Trial) {
    assert!(
        test.take(&reserved_check(&TOKENS, 100, Duration::MAX))
            .await
            .is_allowed()
    );
    let refused = test.limiter.check(&TOKENS, "ada", 1).await.unwrap();
    assert_eq!(
        refused.retry_after(),
        Some(SECOND),
        "the reservation may return earlier"
    );
    let patient = test.limiter.clone().retry_reserved_after(Duration::MAX);
    let wait = patient
        .check(&TOKENS, "ada", 1)
        .await
        .unwrap()
        .retry_after();
    assert_eq!(wait, Some(TOKENS.window()));
    test.clock.advance(TOKENS.window() - MICROSECOND);
    assert_eq!(test.used(&TOKENS).await, 100);
    test.clock.advance(MICROSECOND);
    assert_eq!(test.used(&TOKENS).await, 0);
}

/// The retry time is exact as if all reservations stayed. If the check would be admitted sooner
/// without them, the retry time is that earlier moment, but at least `retry_reserved_after`. The
/// same history without the reserved units runs beside it under another key.
pub(super) async fn a_refusal_is_exact_unless_only_reservations_cause_it(test: Trial) {
    let test = test.without_refusal_cache();
    let (mut numbers, mut by_reservations_alone, mut sure) = (Numbers(7), 0, 0);
    for algorithm in test.algorithms() {
        let limit = TOKENS.with_algorithm(algorithm);
        for _ in 0..120 / test.algorithms().len() {
            test.clock
                .advance(2 * limit.window() + Duration::from_micros(numbers.below(60_000_000)));
            for _ in 0..=numbers.below(7) {
                test.clock
                    .advance(Duration::from_micros(numbers.below(15_000_000)));
                let cost = 1 + numbers.below(40);
                let lease = (numbers.below(2) == 0)
                    .then(|| Duration::from_micros(1 + numbers.below(70_000_000)));
                let made = lease
                    .into_iter()
                    .fold(charge(&limit, cost), Charge::reserve);
                if test.decide(&Check::new(made)).await.is_allowed() && lease.is_none() {
                    assert!(
                        test.limiter
                            .check(&limit, "without", cost)
                            .await
                            .unwrap()
                            .is_allowed()
                    );
                }
            }
            let reserved_units = async || {
                let [with, without] = ["ada", "without"].map(|key| test.limiter.peek(&limit, key));
                with.await.unwrap().binding().used - without.await.unwrap().binding().used
            };
            let patient = test.limiter.clone().retry_reserved_after(Duration::MAX);
            let mut longest = None;
            for cost in [1, 20, 45, 70, 100] {
                let Some(staying) = test.refused_for(&patient, &limit, "ada", cost).await else {
                    continue;
                };
                let staying = staying.retry_after().unwrap();
                let without = test
                    .refused_for(&test.limiter, &limit, "without", cost)
                    .await;
                let given_back = without
                    .and_then(|refused| refused.retry_after())
                    .unwrap_or_default();
                for setting in [Duration::ZERO, ms(1), SECOND, seconds(10), Duration::MAX] {
                    let limiter = test.limiter.clone().retry_reserved_after(setting);
                    let refused = limiter.check(&limit, "ada", cost).await.unwrap();
                    let expected = staying.min(given_back.max(setting));
                    assert_eq!(
                        refused.retry_after(),
                        Some(expected),
                        "{algorithm:?}: {cost} {setting:?} {refused:?}"
                    );
                    let by_reservations = given_back.is_zero();
                    assert_eq!(
                        is_refused_by_reservations(&refused),
                        by_reservations,
                        "{algorithm:?}: {refused:?}"
                    );
                    assert_eq!(
                        refused.binding().reserved,
                        reserved_units().await,
                        "{algorithm:?}"
                    );
                    let counted = if by_reservations {
                        &mut by_reservations_alone
                    } else {
                        &mut sure
                    };
                    *counted += 1;
                }
                longest = Some((staying, cost));
            }
            if let Some((staying, cost)) = longest {
                test.clock.advance(staying - MICROSECOND);
                assert!(
                    !test
                        .limiter
                        .check(&limit, "ada", cost)
                        .await
                        .unwrap()
                        .is_allowed(),
                    "{algorithm:?}"
                );
                test.clock.advance(MICROSECOND);
                assert!(
                    test.limiter
                        .check(&limit, "ada", cost)
                        .await
                        .unwrap()
                        .is_allowed(),
                    "{algorithm:?}"
                );
            }
        }
    }
    assert!(
        by_reservations_alone > 200 && sure > 200,
        "{by_reservations_alone} {sure}"
    );
}

/// The retry times from the reservation to the end of its lease, if it is never settled.
pub(super) async fn an_unsettled_reservation_refuses_until_its_lease_ends(test: Trial) {
    let test = test.without_refusal_cache();
    for (setting, lease) in [
        (SECOND, seconds(10)),
        (seconds(3), seconds(10)),
        (seconds(20), seconds(10)),
    ] {
        let limiter = test.limiter.clone().retry_reserved_after(setting);
        test.admit(charge(&TOKENS, 100).reserve(lease)).await;
        let ends = test.clock.now() + lease;
        for _ in 0..lease.as_secs().div_ceil(setting.as_secs()) {
            let wait = setting.min(ends.duration_since(test.clock.now()).unwrap());
            assert_eq!(
                limiter
                    .check(&TOKENS, "ada", 1)
                    .await
                    .unwrap()
                    .retry_after(),
                Some(wait)
            );
            test.clock.advance(wait);
        }
        assert_eq!(test.clock.now(), ends);
        let decision = limiter.check(&TOKENS, "ada", 1).await.unwrap();
        assert_eq!(
            decision.retry_after(),
            None,
            "the refusals end exactly with the lease"
        );
        test.limiter.reset(&TOKENS, "ada").await.unwrap();
    }
}

pub(super) async fn a_refusal_by_settled_units_outranks_one_by_reservations(test: Trial) {
    let test = test.without_refusal_cache();
    let said = |status: &LimitStatus| {
        (
            status.retry_after(),
            status.is_refused_by_reservations(),
            status.reserved,
        )
    };
    for algorithm in test.algorithms() {
        to_next_window(&test.clock, seconds(3_600));
        let tokens = Limit::per_hour("tokens", 100).with_algorithm(algorithm);
        let calls = Limit::per_minute("calls", 2);
        let calls = if test.counts_by(Algorithm::FIXED_WINDOW) {
            calls.with_algorithm(Algorithm::FIXED_WINDOW)
        } else {
            calls
        };
        test.admit(charge(&tokens, 100).reserve(Duration::MAX))
            .await;
        test.admit(charge(&calls, 2)).await;

        let check = both(charge(&tokens, 1), charge(&calls, 1));
        let refused = test.decide(&check).await;
        assert_eq!(
            refused.statuses().map(said).collect::<Vec<_>>(),
            [(Some(SECOND), true, 100), (Some(seconds(60)), false, 0)]
        );
        assert_eq!(
            (refused.retry_after(), &refused.binding().limit),
            (Some(seconds(60)), &calls),
            "{algorithm:?}"
        );
        assert!(
            !is_refused_by_reservations(&refused),
            "settled units refuse it as well"
        );

        // The settled units leave before `retry_reserved_after`, and then refuse no more.
        test.clock.advance(seconds(60) - ms(1));
        let refused = test.decide(&check).await;
        assert_eq!(
            (refused.retry_after(), is_refused_by_reservations(&refused)),
            (Some(SECOND), false)
        );
        test.clock.advance(ms(1));
        let refused = test.decide(&check).await;
        assert_eq!(
            (refused.retry_after(), is_refused_by_reservations(&refused)),
            (Some(SECOND), true)
        );
        assert_eq!(
            refused.statuses().map(said).collect::<Vec<_>>(),
            [(Some(SECOND), true, 100), (None, false, 0)]
        );

        // A shadow limit refuses nothing, so its settled units do not count.
        let shadow = charge(&Limit::per_minute("shadow", 1), 1);
        test.admit(shadow.clone()).await;
        let refused = test
            .decide(&both(charge(&tokens, 1), shadow.clone().in_shadow()))
            .await;
        assert_eq!(
            (refused.retry_after(), is_refused_by_reservations(&refused)),
            (Some(SECOND), true)
        );
        let would = refused.shadow_refusals().map(said).collect::<Vec<_>>();
        assert_eq!(would, [(Some(seconds(60)), false, 0)]);

        // Both limits refuse by reservations, and one lease ends first.
        test.admit(charge(&calls, 2).reserve(ms(400))).await;
        let refused = test.decide(&check).await;
        assert_eq!(
            refused.statuses().map(said).collect::<Vec<_>>(),
            [(Some(SECOND), true, 100), (Some(ms(400)), true, 2)]
        );
        assert!(is_refused_by_reservations(&refused));

        // An admitted check also reports reserved units.
        test.clock.advance(ms(400));
        let asked = test
            .decide(&both(charge(&tokens, 0), charge(&calls, 1)))
            .await;
        assert_eq!(
            asked.statuses().map(said).collect::<Vec<_>>(),
            [(None, false, 100), (None, false, 0)]
        );
        assert!(asked.is_allowed() && !is_refused_by_reservations(&asked));

        // Once they are settled, they refuse until they leave.
        test.limiter.reset(&tokens, "ada").await.unwrap();
        let check = Check::new(charge(&tokens, 60).reserve(Duration::MAX));
        let admitted = test.decide(&check).await;
        let settled = test
            .limiter
            .settle(Settlement::new(check, &admitted, |_| Some(100)))
            .await
            .unwrap();
        let status = settled.decision.binding();
        assert_eq!((status.used, status.reserved), (100, 0));
        let refused = test.limiter.check(&tokens, "ada", 1).await.unwrap();
        assert!(
            !is_refused_by_reservations(&refused) && refused.retry_after() > Some(seconds(1_000)),
            "{refused:?}"
        );
        for limit in [&tokens, &calls] {
            test.limiter.reset(limit, "ada").await.unwrap();
        }
        test.clock.advance(seconds(60));
    }
}
