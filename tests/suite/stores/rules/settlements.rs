//! Settlements and refunds: each counts once, at its cost, as of the time of its admission.

use std::time::Duration;

use tokio::task::JoinSet;

use super::trial::{Trial, plain_check, reserved_check, to_next_window, to_the_start_of_a_window};
use tower_sliding_window::{
    Algorithm, Charge, Check, Decision, Limit, check::AdmissionId, settlement::Settlement,
};

const LEASE: Duration = Duration::from_secs(5);
const TOKENS: Limit = Limit::per_minute("tokens", 100);

/// Settles at less, at more, and at nothing. A second settlement changes nothing.
pub(super) async fn a_settlement_counts_once_at_its_cost(test: Trial) {
    for algorithm in test.algorithms() {
        let limit = TOKENS.with_algorithm(algorithm);
        for (cost, used) in [(40, 70), (90, 120), (0, 30), (60, 90)] {
            to_the_start_of_a_window(&test.clock, TOKENS.window());
            test.limiter.reset(&limit, "ada").await.unwrap();
            assert!(test.take(&plain_check(&limit, 30)).await.is_allowed());
            let check = reserved_check(&limit, 60, LEASE);
            let admitted = test.take(&check).await;
            assert_eq!(admitted.binding().used, 90, "reserved units count");
            assert_eq!(
                test.settled(&check, &admitted, cost).await,
                (true, used),
                "{algorithm:?}"
            );
            for again in [cost, 0, 99] {
                assert_eq!(
                    test.settled(&check, &admitted, again).await,
                    (false, used),
                    "{algorithm:?}"
                );
            }
            test.clock.advance(LEASE);
            assert_eq!(
                test.used(&limit).await,
                used,
                "{algorithm:?}: the lease returns nothing after the settlement"
            );
        }
    }
}

/// Spent units with a lease are settled as others are: from then on they count until a window after
/// their admission.
pub(super) async fn spent_units_with_a_lease_are_settled(test: Trial) {
    for algorithm in test.algorithms() {
        let limit = TOKENS.with_algorithm(algorithm);
        for (cost, has_id) in [0, 4, 10, 250]
            .into_iter()
            .flat_map(|cost| [(cost, false), (cost, true)])
        {
            to_the_start_of_a_window(&test.clock, TOKENS.window());
            test.limiter.reset(&limit, "ada").await.unwrap();
            let check = Check::new(Charge::spent(limit.clone(), "ada", 10).reserve(LEASE));
            let check = if has_id {
                check.with_id(AdmissionId::fresh())
            } else {
                check
            };
            let admitted = test.take(&check).await;
            assert_eq!(admitted.binding().used, 10);
            assert_eq!(
                test.settled(&check, &admitted, cost).await,
                (true, cost),
                "{algorithm:?} {has_id}"
            );
            assert_eq!(
                test.settled(&check, &admitted, 99).await,
                (false, cost),
                "{algorithm:?} {has_id}"
            );
            test.clock.advance(LEASE);
            assert_eq!(
                test.used(&limit).await,
                cost,
                "{algorithm:?} {has_id}: it counts for longer than the lease"
            );
        }
    }
}

/// A settlement may exceed the limit. Then checks are refused until enough units have left.
pub(super) async fn units_settled_above_the_limit_refuse_until_they_leave(test: Trial) {
    let check = reserved_check(&TOKENS, 10, LEASE);
    let admitted = test.take(&check).await;
    test.clock.advance(Duration::from_secs(1));
    assert_eq!(test.settled(&check, &admitted, 250).await, (true, 250));
    let refused = test.limiter.check(&TOKENS, "ada", 1).await.unwrap();
    assert_eq!(
        (refused.remaining(), refused.retry_after()),
        (0, Some(Duration::from_secs(59)))
    );
    test.clock.advance(Duration::from_secs(59));
    assert_eq!(
        test.used(&TOKENS).await,
        0,
        "the settlement counts from the admission"
    );
}

/// Settling one charge of a check leaves the other charges unchanged.
pub(super) async fn charges_are_settled_one_by_one(test: Trial) {
    let requests = Limit::per_minute("requests", 10);
    let check = reserved_check(&TOKENS, 60, LEASE)
        .and(Charge::new(requests.clone(), "ada", 1).unwrap())
        .unwrap();
    let admitted = test.take(&check).await;
    let tokens = |charge: &Charge| (charge.limit() == &TOKENS).then_some(7);
    let settled = test
        .limiter
        .settle(Settlement::new(check.clone(), &admitted, tokens))
        .await
        .unwrap();
    let used: Vec<u64> = settled
        .decision
        .statuses()
        .map(|status| status.used)
        .collect();
    assert_eq!((settled.was_applied, used), (true, vec![7, 1]));

    let settled = test
        .limiter
        .settle(Settlement::new(check, &admitted, |_| Some(0)))
        .await
        .unwrap();
    let used: Vec<u64> = settled
        .decision
        .statuses()
        .map(|status| status.used)
        .collect();
    assert_eq!(
        (settled.was_applied, used),
        (true, vec![7, 0]),
        "a charge that is not settled yet can be"
    );
}

/// An admission without a reservation can be refunded if it has its own entry.
pub(super) async fn an_admission_can_be_refunded_by_its_id(test: Trial) {
    for algorithm in test.algorithms() {
        let limit = TOKENS.with_algorithm(algorithm);
        to_the_start_of_a_window(&test.clock, TOKENS.window());
        let (ours, others) = (plain_check(&limit, 20), plain_check(&limit, 30));
        let (admitted, _) = (test.take(&ours).await, test.take(&others).await);
        let is_known = algorithm == Algorithm::SLIDING_LOG;
        let left = if is_known { 30 } else { 50 };
        assert_eq!(
            test.settled(&ours, &admitted, 0).await,
            (is_known, left),
            "{algorithm:?}"
        );
        assert_eq!(
            test.settled(&ours, &admitted, 0).await,
            (false, left),
            "{algorithm:?}"
        );

        let named = plain_check(&limit, 5).with_id(AdmissionId(77));
        let admitted = test.take(&named).await;
        assert_eq!(
            test.settled(&named, &admitted, 0).await,
            (true, left),
            "{algorithm:?}: an id of the caller's"
        );
    }
}

/// A settlement returns nothing for an unknown id, or at a cost that differs from the charge.
pub(super) async fn a_foreign_settlement_frees_nothing(test: Trial) {
    for algorithm in test.algorithms() {
        let limit = TOKENS.with_algorithm(algorithm);
        to_the_start_of_a_window(&test.clock, TOKENS.window());
        let check = reserved_check(&limit, 20, LEASE);
        let admitted = test.take(&check).await;
        let unknown = Settlement::by_id(check.clone(), AdmissionId::fresh(), admitted.at(), |_| {
            Some(0)
        });
        let at_another_cost =
            Settlement::new(reserved_check(&limit, 90, LEASE), &admitted, |_| Some(0));
        let not_reserved = Settlement::new(plain_check(&limit, 20), &admitted, |_| Some(0));
        for settlement in [unknown, at_another_cost, not_reserved] {
            let settled = test.limiter.settle(settlement).await.unwrap();
            assert_eq!(
                (settled.was_applied, settled.decision.binding().used),
                (false, 20),
                "{algorithm:?}"
            );
        }
        assert_eq!(test.settled(&check, &admitted, 0).await, (true, 0));
    }
}

/// A settlement belongs to its admission, and not to a later one with the same id.
pub(super) async fn a_late_settlement_leaves_a_repeated_admission_alone(test: Trial) {
    for algorithm in test.algorithms() {
        let limit = TOKENS.with_algorithm(algorithm);
        to_the_start_of_a_window(&test.clock, TOKENS.window());
        let check = reserved_check(&limit, 60, LEASE).with_id(AdmissionId(4711));
        let first = test.take(&check).await;
        test.clock.advance(LEASE);
        let second = test.take(&check).await;
        assert_eq!(
            test.settled(&check, &first, 10).await,
            (true, 70),
            "{algorithm:?}: its lease has ended"
        );
        assert_eq!(
            test.settled(&check, &second, 20).await,
            (true, 30),
            "{algorithm:?}"
        );

        // The same without a reservation, after the first admission was refunded.
        let named = plain_check(&limit, 30).with_id(AdmissionId(77));
        let first = test.take(&named).await;
        assert_eq!(test.settled(&named, &first, 0).await, (true, 30));
        test.clock.advance(LEASE);
        assert!(test.take(&named).await.is_allowed());
        // A fixed window does not tell them apart, but counts the same units.
        if algorithm != Algorithm::FIXED_WINDOW {
            assert_eq!(
                test.settled(&named, &first, 0).await,
                (false, 60),
                "{algorithm:?}"
            );
        }
    }
}

/// Each admission under a repeated id is settled once after the end of its lease, also where one
/// entry holds the units of several admissions.
pub(super) async fn admissions_with_one_id_are_settled_late_one_by_one(test: Trial) {
    for algorithm in test.algorithms() {
        let limit = TOKENS.with_algorithm(algorithm);
        to_the_start_of_a_window(&test.clock, TOKENS.window());
        let check = reserved_check(&limit, 60, LEASE).with_id(AdmissionId(4711));
        // At most one admission of an id can be told from the others in a fixed window.
        let admissions = if algorithm == Algorithm::FIXED_WINDOW {
            1
        } else {
            3
        };
        let mut used = 0;
        for number in 0..admissions {
            let admitted = test.take(&check).await;
            test.clock.advance(LEASE);
            used += 10 + number;
            assert_eq!(
                test.settled(&check, &admitted, 10 + number).await,
                (true, used),
                "{algorithm:?}"
            );
            assert_eq!(
                test.settled(&check, &admitted, 10 + number).await,
                (false, used),
                "{algorithm:?}"
            );
        }
        test.clock.advance(2 * limit.window());
        assert_eq!(test.used(&limit).await, 0, "{algorithm:?}");
    }
}

/// An impossible cost refuses the key, and does not overflow.
pub(super) async fn absurd_costs_refuse_their_key_and_do_not_overflow(test: Trial) {
    for algorithm in test.algorithms() {
        let limit = TOKENS.with_algorithm(algorithm);
        to_the_start_of_a_window(&test.clock, TOKENS.window());
        for _ in 0..20 {
            let check = reserved_check(&limit, 1, LEASE);
            let admitted = test.take(&check).await;
            let settled = test
                .limiter
                .settle(Settlement::new(check, &admitted, |_| Some(u64::MAX)))
                .await
                .unwrap();
            assert!(
                settled.was_applied && settled.decision.remaining() == 0,
                "{algorithm:?}"
            );
            let refused = test.limiter.check(&limit, "ada", 1).await.unwrap();
            test.clock.advance(refused.retry_after().unwrap());
        }
    }
}

/// Under algorithms with bounded memory, a key keeps at most 10,000 reservations. Admissions beyond
/// them count for their window.
pub(super) async fn an_admission_without_its_own_entry_counts_for_its_window(test: Trial) {
    for algorithm in test
        .algorithms()
        .into_iter()
        .filter(|algorithm| *algorithm != Algorithm::SLIDING_LOG)
    {
        let limit = Limit::per_day("tokens", 1_000_000).with_algorithm(algorithm);
        to_next_window(&test.clock, limit.window());
        test.clock.advance(Duration::from_secs(60));
        let check = reserved_check(&limit, 1, LEASE);
        // No more at once than the queue of a slot of a cluster holds.
        let mut open = Vec::new();
        for _ in 0..101 {
            let asked: JoinSet<_> = (0..100)
                .map(|_| test.limiter.check_all(check.clone()))
                .collect();
            open.extend(asked.join_all().await.into_iter().map(Result::unwrap));
        }
        let mut known = 0;
        for decisions in open.chunks(100) {
            let refund = |decision: &Decision| {
                let (limiter, refund) = (
                    test.limiter.clone(),
                    Settlement::new(check.clone(), decision, |_| Some(0)),
                );
                async move { limiter.settle(refund).await.unwrap().was_applied }
            };
            let settled: JoinSet<_> = decisions.iter().map(refund).collect();
            known += settled
                .join_all()
                .await
                .into_iter()
                .filter(|is_known| *is_known)
                .count() as u64;
        }
        assert!((9_900..=10_000).contains(&known), "{known}, {algorithm:?}");
        assert_eq!(test.used(&limit).await, 10_100 - known, "{algorithm:?}");
        test.clock.advance(LEASE);
        assert_eq!(
            test.used(&limit).await,
            10_100 - known,
            "{algorithm:?}: no lease ends"
        );
    }
}

/// A limit that is lowered below its used units refuses. A settlement still returns the units.
pub(super) async fn a_lowered_limit_settles_exactly(test: Trial) {
    let check = reserved_check(&TOKENS, 60, LEASE);
    let admitted = test.take(&check).await;
    let lowered = Limit::per_minute("tokens", 30);
    let refused = test.limiter.check(&lowered, "ada", 1).await.unwrap();
    assert_eq!(
        (
            refused.is_allowed(),
            refused.binding().used,
            refused.remaining()
        ),
        (false, 60, 0)
    );
    let peeked = test.limiter.peek(&lowered, "ada").await.unwrap();
    assert_eq!(
        (peeked.is_allowed(), peeked.binding().used),
        (true, 60),
        "a cost of 0 is never refused"
    );
    assert_eq!(test.settled(&check, &admitted, 29).await, (true, 29));
    assert!(
        test.limiter
            .check(&lowered, "ada", 1)
            .await
            .unwrap()
            .is_allowed()
    );
}
