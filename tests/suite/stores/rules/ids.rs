//! Ids: a check that is repeated with its id is one admission, as long as any of its limits still
//! counts it. A settlement finds that admission, however often the check was sent and wherever the
//! clock was.

use std::time::Duration;

use super::trial::{MICROSECOND, Trial, charge, check_of, ms, seconds, to_the_start_of_a_window};
use tower_sliding_window::{
    Algorithm, Charge, Check, Decision, Limit, check::AdmissionId, decision::LimitStatus,
    settlement::Settlement,
};

const MANY: Limit = Limit::per_minute("many", 1_200);
const SHORT: Limit = Limit::per("short", 3, Duration::from_secs(10));
const LONG: Limit = Limit::per_hour("long", 3);

fn used(decision: &Decision) -> Vec<u64> {
    decision.statuses().map(|status| status.used).collect()
}

impl Trial {
    async fn fill(&self, limit: &Limit, cost: u64) {
        assert!(
            self.limiter
                .check(limit, "ada", cost)
                .await
                .unwrap()
                .is_allowed()
        );
    }

    async fn refund(&self, check: &Check, decision: &Decision) -> (bool, Vec<u64>) {
        let settled = self
            .limiter
            .settle(Settlement::new(check.clone(), decision, |_| Some(0)))
            .await
            .unwrap();
        (settled.was_applied, used(&settled.decision))
    }
}

fn check_with_id(id: u64) -> Check {
    Check::new(charge(&MANY, 1)).with_id(AdmissionId(id))
}

/// A repeated id counts once, as long as its admission is in the window.
pub(super) async fn a_repeated_id_counts_once(test: Trial) {
    let limit = Limit::per_minute("calls", 10);
    let order = || Check::new(charge(&limit, 4)).with_id(AdmissionId(7));
    for _ in 0..3 {
        let decision = test.limiter.check_all(order()).await.unwrap();
        assert_eq!(
            (
                decision.is_allowed(),
                decision.binding().used,
                decision.id()
            ),
            (true, 4, AdmissionId(7))
        );
    }
    assert!(test.spend(&limit, 6).await.is_allowed());
    assert!(
        test.limiter.check_all(order()).await.unwrap().is_allowed(),
        "also when the limit is used up"
    );

    test.clock.advance(limit.window());
    assert_eq!(
        test.limiter
            .check_all(order())
            .await
            .unwrap()
            .binding()
            .used,
        4,
        "after a window it is a new admission"
    );
}

/// The shorter window has passed, and others have spent all units of both limits since.
pub(super) async fn a_repeated_check_is_neither_charged_nor_refused_while_any_limit_knows_it(
    test: Trial,
) {
    for (number, (short, long)) in test
        .algorithms()
        .into_iter()
        .flat_map(|short| test.algorithms().into_iter().map(move |long| (short, long)))
        .enumerate()
    {
        for (lease, is_reversed) in [
            (None, false),
            (None, true),
            (Some(seconds(600)), false),
            (Some(seconds(600)), true),
        ] {
            let case = format!("{short:?} {long:?} {lease:?} {is_reversed}");
            to_the_start_of_a_window(&test.clock, LONG.window());
            let limits = [SHORT.with_algorithm(short), LONG.with_algorithm(long)];
            let mut charges = limits
                .each_ref()
                .map(|limit| lease.into_iter().fold(charge(limit, 1), Charge::reserve));
            if is_reversed {
                charges.reverse();
            }
            let id = AdmissionId(1_000 + number as u64);
            let check = check_of(charges).with_id(id);
            let first = test.decide(&check).await;
            assert!(first.is_allowed() && used(&first) == [1, 1], "{case}");

            test.clock.advance(2 * SHORT.window());
            test.fill(&limits[0], 3).await;
            test.fill(&limits[1], 2).await;
            let again = test.decide(&check).await;
            assert!(again.is_allowed() && again.id() == id, "{case}: {again:?}");
            assert_eq!(used(&again), [3, 3], "{case}");
            assert_eq!(
                again
                    .statuses()
                    .filter_map(LimitStatus::retry_after)
                    .count(),
                0,
                "{case}"
            );
            if long == Algorithm::SLIDING_LOG {
                assert_eq!(again.at(), first.at(), "{case}");
            }

            // One refund returns everything that the check has charged.
            let left = if is_reversed { [2, 3] } else { [3, 2] };
            assert_eq!(
                test.refund(&check, &again).await,
                (true, left.to_vec()),
                "{case}"
            );
            assert_eq!(
                test.refund(&check, &first).await,
                (false, left.to_vec()),
                "{case}"
            );

            // After the refund, the id belongs to a new admission. The same holds after the longest
            // window.
            let refused = test.decide(&check).await;
            assert!(
                !refused.is_allowed() && refused.binding().limit == limits[0],
                "{case}"
            );
            for limit in &limits {
                test.limiter.reset(limit, "ada").await.unwrap();
            }
            let known = test.decide(&check).await;
            assert!(known.is_allowed() && used(&known) == [1, 1], "{case}");
            test.clock.advance(3 * LONG.window());
            let new = test.decide(&check).await;
            assert_eq!(
                (new.is_allowed(), new.at(), used(&new)),
                (true, test.clock.now(), vec![1, 1]),
                "{case}"
            );
            for limit in &limits {
                test.limiter.reset(limit, "ada").await.unwrap();
            }
        }
    }
}

/// Beside charges that take nothing, that were already spent, or that are in the shadow.
pub(super) async fn a_repeated_check_may_hold_charges_of_every_kind(test: Trial) {
    let third = |units| Limit::per_minute("third", units);
    let free = || charge(&third(3), 0);
    let any_left = || Charge::any_left(third(3), "ada").unwrap();
    let spent = || Charge::spent(third(3), "ada", 5);
    let shadow = || charge(&third(3), 1).in_shadow();
    let shadow_left = || Charge::any_left(third(3), "ada").unwrap().in_shadow();
    let kinds: [(&str, &dyn Fn() -> Charge, u64); 5] = [
        ("free", &free, 0),
        ("any left", &any_left, 0),
        ("spent", &spent, 5),
        ("shadow", &shadow, 1),
        ("any left, in the shadow", &shadow_left, 0),
    ];
    for (number, (kind, made, units)) in kinds.into_iter().enumerate() {
        for place in 0..3 {
            to_the_start_of_a_window(&test.clock, LONG.window());
            let mut charges = vec![charge(&SHORT, 1), charge(&LONG, 1)];
            charges.insert(place, made());
            let check = check_of(charges).with_id(AdmissionId(2_000 + number as u64));
            let first = test.decide(&check).await;
            let reported = |decision: &Decision| {
                let used_of = |name| {
                    decision
                        .statuses()
                        .find(|status| status.limit.name() == name)
                        .unwrap()
                        .used
                };
                (
                    decision.is_allowed(),
                    [used_of("short"), used_of("long"), used_of("third")],
                )
            };
            assert_eq!(reported(&first), (true, [1, 1, units]), "{kind}");

            // By now the third limit is exhausted, and the first has forgotten the check.
            test.clock.advance(2 * SHORT.window());
            let more = 3_u64.saturating_sub(units);
            if more > 0 {
                test.fill(&third(3), more).await;
            }
            let again = test.decide(&check).await;
            assert_eq!(
                reported(&again),
                (true, [0, 1, units.max(3)]),
                "{kind}: {again:?}"
            );
            assert_eq!(
                (again.at(), again.shadow_refusals().count()),
                (first.at(), 0),
                "{kind}"
            );
            for limit in [&SHORT, &LONG, &third(3)] {
                test.limiter.reset(limit, "ada").await.unwrap();
            }
        }
    }

    // A shadow limit remembers units that it has counted. It does not remember a check that it left
    // out.
    for (spent_before, is_known) in [(0, true), (3, false)] {
        if spent_before > 0 {
            test.fill(&LONG, spent_before).await;
        }
        let check =
            check_of([charge(&SHORT, 1), charge(&LONG, 1).in_shadow()]).with_id(AdmissionId(3_000));
        let first = test.decide(&check).await;
        assert_eq!(first.shadow_refusals().count(), usize::from(!is_known));
        test.clock.advance(2 * SHORT.window());
        let again = test.decide(&check).await;
        assert_eq!(
            (again.is_allowed(), again.at() == first.at()),
            (true, is_known)
        );
        assert_eq!(used(&again)[0], u64::from(!is_known));
        test.limiter.reset(&LONG, "ada").await.unwrap();
        test.limiter.reset(&SHORT, "ada").await.unwrap();
    }

    // A check that charges nothing is not remembered.
    let check = Check::new(Charge::any_left(SHORT, "ada").unwrap()).with_id(AdmissionId(4_000));
    for _ in 0..3 {
        assert!(test.decide(&check).await.is_allowed());
        test.fill(&SHORT, 1).await;
    }
    assert!(!test.decide(&check).await.is_allowed());
}

/// The clock of the second try may be behind or far ahead of the first. The settlement finds the
/// admission by the time of either decision.
pub(super) async fn a_settlement_finds_a_repeated_check_after_clock_steps(test: Trial) {
    let steps = [
        Duration::from_micros(1),
        ms(1),
        seconds(1),
        seconds(30),
        seconds(600),
    ];
    let (long, forever) = (
        Limit::per_day("tokens", 100),
        Limit::per("forever", 100, seconds(86_400 * 7)),
    );
    for (number, algorithm) in test.algorithms().into_iter().enumerate() {
        for lease in [None, Some(seconds(3_600)), Some(seconds(20 * 3_600))] {
            for (step, is_back) in steps
                .into_iter()
                .flat_map(|step| [(step, true), (step, false)])
            {
                for cost in [1, 7] {
                    for by_second in [true, false] {
                        let case = format!(
                            "{algorithm:?} {lease:?} {step:?} {is_back} {cost} {by_second}"
                        );
                        to_the_start_of_a_window(&test.clock, LONG.window());
                        let charges = [&long, &forever].map(|limit| {
                            let charge = charge(&limit.clone().with_algorithm(algorithm), cost);
                            lease.into_iter().fold(charge, Charge::reserve)
                        });
                        let check = check_of(charges).with_id(AdmissionId(5_000 + number as u64));
                        let first = test.decide(&check).await;
                        if is_back {
                            test.clock.step_back(step);
                        } else {
                            test.clock.advance(step);
                        }
                        let second = test.decide(&check).await;
                        assert!(
                            second.is_allowed() && used(&second) == [cost, cost],
                            "{case}"
                        );
                        // The other algorithms report the time that they have recorded.
                        if algorithm == Algorithm::SLIDING_LOG {
                            assert_eq!(second.at(), first.at(), "{case}");
                        }
                        let by = if by_second { &second } else { &first };
                        assert_eq!(test.refund(&check, by).await, (true, vec![0, 0]), "{case}");
                        assert_eq!(test.refund(&check, by).await, (false, vec![0, 0]), "{case}");
                        test.clock.advance(seconds(86_400 * 15));
                    }
                }
            }
        }
    }
}

/// The admission is among 600 others with the same or nearby times.
pub(super) async fn a_settlement_finds_its_admission_among_many(test: Trial) {
    let calls = Limit::per_hour("calls", 1_000_000);
    let check = |id: u64, lease: Option<Duration>| {
        Check::new(
            lease
                .into_iter()
                .fold(charge(&calls, 1 + id % 3), Charge::reserve),
        )
        .with_id(AdmissionId(id))
    };
    for lease in [None, Some(seconds(3_600))] {
        let mut asked = Vec::new();
        for id in 0..1_200 {
            let check = check(id, lease);
            asked.push((test.decide(&check).await, check));
            // The first half have the same time.
            if id >= 600 {
                test.clock.advance(Duration::from_micros(1));
            }
        }
        // All checks are repeated by a clock that is behind.
        test.clock.step_back(ms(5));
        let mut left: u64 = asked
            .iter()
            .map(|(_, check)| check.charges().map(Charge::cost).sum::<u64>())
            .sum();
        for (first, check) in &asked {
            let again = test.decide(check).await;
            assert_eq!((again.at(), again.binding().used), (first.at(), left));
            left -= check.charges().map(Charge::cost).sum::<u64>();
            assert_eq!(test.refund(check, &again).await, (true, vec![left]));
        }
        test.clock.advance(seconds(7_200));
    }
}

/// More entries have expired than one check drops, so an expired entry is still stored.
async fn fill_and_let_half_expire(test: &Trial) {
    for id in 0..600 {
        assert!(
            test.limiter
                .check_all(check_with_id(id))
                .await
                .unwrap()
                .is_allowed()
        );
        test.clock.advance(MICROSECOND);
    }
    test.clock.advance(MANY.window() / 2);
    for id in 600..1_200 {
        assert!(
            test.limiter
                .check_all(check_with_id(id))
                .await
                .unwrap()
                .is_allowed()
        );
    }
    test.clock.advance(MANY.window() / 2);
}

pub(super) async fn an_expired_id_counts_as_a_new_admission(test: Trial) {
    let test = test.without_refusal_cache();
    fill_and_let_half_expire(&test).await;
    let now = test.clock.now();
    let again = test.limiter.check_all(check_with_id(599)).await.unwrap();
    assert_eq!((again.at(), again.binding().used), (now, 601));
}

pub(super) async fn an_expired_admission_is_not_settled(test: Trial) {
    let test = test.without_refusal_cache();
    fill_and_let_half_expire(&test).await;
    let refund = Settlement::by_id(
        check_with_id(599),
        AdmissionId(599),
        test.clock.now(),
        |_| Some(0),
    );
    let settled = test.limiter.settle(refund).await.unwrap();
    assert_eq!(
        (settled.was_applied, settled.decision.binding().used),
        (false, 600)
    );
}

/// An id belongs to the keys of its check.
pub(super) async fn an_id_given_for_another_key_is_another_admission(test: Trial) {
    let check =
        |key: &'static str| Check::new(Charge::new(SHORT, key, 2).unwrap()).with_id(AdmissionId(7));
    for key in ["ada", "bob", "ada"] {
        let decision = test.take(&check(key)).await;
        assert_eq!(decision.binding().used, 2, "{key}");
    }
    assert_eq!(
        test.limiter
            .peek(&SHORT, "bob")
            .await
            .unwrap()
            .binding()
            .used,
        2
    );
}
