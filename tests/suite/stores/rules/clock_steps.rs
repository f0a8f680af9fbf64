//! A clock that has stepped back: reset times are never too early, and counting is correct within
//! one window of 1970, where the clock of a test may be.

use std::time::{Duration, SystemTime};

use Action::{IsRefused, Peeks, Reserves, Settles, Takes, Waits};

use super::trial::{MICROSECOND, Trial, charge, ms, seconds, to_next_window};
use crate::support::{
    clock_steps::{Action, HISTORIES},
    is_refused_by_reservations,
};
use tower_sliding_window::{
    Algorithm, Check, Decision, Limit, check::AdmissionId, settlement::Settlement,
};

const CALLS: Limit = Limit::per("calls", 100, Duration::from_secs(10));

impl Trial {
    async fn perform(&self, limit: &Limit, done: Action) {
        match done {
            Takes(cost) => assert!(
                self.limiter
                    .check(limit, "ada", cost)
                    .await
                    .unwrap()
                    .is_allowed()
            ),
            Reserves(cost) => drop(
                self.limiter
                    .reserve(limit, "ada", cost, seconds(7))
                    .await
                    .unwrap()
                    .unwrap(),
            ),
            Settles(cost, settled) => {
                let reservation = self
                    .limiter
                    .reserve(limit, "ada", cost, seconds(7))
                    .await
                    .unwrap()
                    .unwrap();
                assert!(reservation.settle(settled).await.unwrap().was_applied);
            }
            Waits(time) => self.clock.advance(time),
            Peeks => drop(self.limiter.peek(limit, "ada").await.unwrap()),
            // If no units are left in the window, the check would be admitted.
            IsRefused if self.peek_at(limit).await.binding().used == 0 => {}
            IsRefused => assert!(
                !self
                    .limiter
                    .check(limit, "ada", limit.units())
                    .await
                    .unwrap()
                    .is_allowed()
            ),
        }
        if !matches!(done, Waits(_)) {
            self.clock.advance(seconds(1));
        }
    }

    async fn peek_at(&self, limit: &Limit) -> Decision {
        self.limiter.peek(limit, "ada").await.unwrap()
    }
}

/// Until the reset time as much is used as now, and then less. This is exact to the microsecond.
pub(super) async fn the_reset_time_is_exact_after_a_step_back(test: Trial) {
    let test = test.without_refusal_cache();
    let other = Limit::per("other", 1, seconds(3_600));
    for algorithm in test.algorithms() {
        let limit = CALLS.with_algorithm(algorithm);
        for history in HISTORIES {
            for step in [
                MICROSECOND,
                ms(1),
                ms(150),
                seconds(1),
                seconds(4),
                seconds(25),
            ] {
                for asked in [
                    "peeks",
                    "refused by another",
                    "admitted",
                    "admitted after that",
                ] {
                    to_next_window(&test.clock, seconds(10));
                    test.clock.advance(seconds(51));
                    for done in history {
                        test.perform(&limit, *done).await;
                    }
                    test.clock.step_back(step);
                    let case = format!("{algorithm:?} {history:?} {step:?} {asked}");
                    let decision = match asked {
                        "peeks" => test.peek_at(&limit).await,
                        "refused by another" => {
                            assert!(
                                test.limiter
                                    .check(&other, "ada", 1)
                                    .await
                                    .unwrap()
                                    .is_allowed()
                            );
                            let both = Check::new(charge(&other, 1))
                                .and(charge(&limit, 1))
                                .unwrap();
                            let refused = test.limiter.check_all(both).await.unwrap();
                            assert!(!refused.is_allowed());
                            refused
                        }
                        "admitted" => test.limiter.check(&limit, "ada", 1).await.unwrap(),
                        _ => {
                            test.perform(&limit, Takes(1)).await;
                            test.perform(&limit, Takes(1)).await;
                            test.peek_at(&limit).await
                        }
                    };
                    let status = decision
                        .statuses()
                        .find(|status| status.limit == limit)
                        .unwrap();
                    let (used, reported) = (status.used, status.reset_after());
                    if used > 0 {
                        test.clock.advance(reported - MICROSECOND);
                        assert_eq!(
                            test.peek_at(&limit).await.binding().used,
                            used,
                            "{case}: {reported:?} is too late"
                        );
                        test.clock.advance(MICROSECOND);
                    }
                    assert!(
                        used == 0 || test.peek_at(&limit).await.binding().used < used,
                        "{case}: {reported:?} is too early"
                    );
                    test.limiter.reset(&limit, "ada").await.unwrap();
                    test.limiter.reset(&other, "ada").await.unwrap();
                }
            }
        }
    }
}

/// Units of each kind, taken at 1970 and within one window of it.
pub(super) async fn counting_is_unchanged_within_a_window_of_1970(test: Trial) {
    let test = test.without_refusal_cache();
    for algorithm in test.algorithms() {
        let limit = CALLS.with_algorithm(algorithm);
        for since in [
            Duration::ZERO,
            MICROSECOND,
            seconds(3),
            limit.window() - seconds(1),
            limit.window(),
            seconds(11),
        ] {
            let case = format!("{algorithm:?}, {since:?} after");
            test.clock.step_back(Duration::MAX);
            assert_eq!(test.clock.now(), SystemTime::UNIX_EPOCH);
            test.clock.advance(since);
            for (cost, used) in [(30, 30), (1, 31), (40, 71), (1, 72)] {
                let decision = test.limiter.check(&limit, "ada", cost).await.unwrap();
                assert_eq!(
                    (
                        decision.is_allowed(),
                        decision.binding().used,
                        decision.at()
                    ),
                    (true, used, test.clock.now()),
                    "{case}"
                );
            }
            for cost in [29, 100] {
                let refused = test.limiter.check(&limit, "ada", cost).await.unwrap();
                assert_eq!(
                    (refused.is_allowed(), refused.binding().used),
                    (false, 72),
                    "{case}"
                );
                assert!(
                    refused.retry_after() <= Some(2 * limit.window()),
                    "{case}: {refused:?}"
                );
            }
            let named = Check::new(charge(&limit, 3)).with_id(AdmissionId(7));
            for _ in 0..2 {
                assert_eq!(
                    test.limiter
                        .check_all(named.clone())
                        .await
                        .unwrap()
                        .binding()
                        .used,
                    75,
                    "{case}"
                );
            }
            let reservations =
                [5, 6].map(|cost| test.limiter.reserve(&limit, "ada", cost, seconds(9)));
            let [first, second] = reservations;
            let (first, second) = (
                first.await.unwrap().unwrap(),
                second.await.unwrap().unwrap(),
            );
            let status =
                |decision: &Decision| (decision.binding().used, decision.binding().reserved);
            assert_eq!(status(second.decision()), (86, 11), "{case}");
            assert!(
                is_refused_by_reservations(&test.limiter.check(&limit, "ada", 15).await.unwrap()),
                "{case}"
            );
            let settled = first.settle(2).await.unwrap();
            assert_eq!(
                (settled.was_applied, status(&settled.decision)),
                (true, (83, 6)),
                "{case}"
            );
            let given_back = second.settle(0).await.unwrap();
            assert_eq!(
                (given_back.was_applied, status(&given_back.decision)),
                (true, (77, 0)),
                "{case}"
            );
            let admitted = test.limiter.check_all(named.clone()).await.unwrap();
            let refunded = test
                .limiter
                .settle(Settlement::new(named, &admitted, |_| Some(0)))
                .await
                .unwrap();
            assert_eq!(
                (refunded.was_applied, refunded.decision.binding().used),
                (true, 74),
                "{case}"
            );

            // An unsettled lease ends, and then all units leave.
            let _kept = test
                .limiter
                .reserve(&limit, "ada", 26, seconds(9))
                .await
                .unwrap()
                .unwrap();
            test.clock.advance(seconds(9) - MICROSECOND);
            // A fixed window may have ended earlier.
            let reserved = if algorithm == Algorithm::FIXED_WINDOW && since.as_secs() % 10 > 1 {
                0
            } else {
                26
            };
            assert_eq!(
                test.peek_at(&limit).await.binding().reserved,
                reserved,
                "{case}"
            );
            test.clock.advance(limit.window() * 2);
            assert_eq!(status(&test.peek_at(&limit).await), (0, 0), "{case}");
            test.limiter.reset(&limit, "ada").await.unwrap();
        }
    }
}
