//! Settlements and refunds on every store, by every algorithm, with the time passed in.

use std::time::Duration;

use tokio::task::JoinSet;
use tower_sliding_window::{AdmissionId, Algorithm, Charge, Check, Decision, Limit, Settlement, Store};

use crate::support::{ALGORITHMS, Fixture, MICROSECOND, for_every_store, to_next_window, to_the_start_of_a_window};

const SECOND: Duration = Duration::from_secs(1);
const LEASE: Duration = Duration::from_secs(5);
const TOKENS: Limit = Limit::per_minute("tokens", 100);

fn reserved_check(limit: &Limit, cost: u64, lease: Duration) -> Check {
    Check::new(Charge::new(limit.clone(), "ada", cost).unwrap().reserve(lease))
}

fn plain_check(limit: &Limit, cost: u64) -> Check {
    Check::new(Charge::new(limit.clone(), "ada", cost).unwrap())
}

impl<S: Store> Fixture<S> {
    async fn take(&self, check: &Check) -> Decision {
        let decision = self.limiter.check_all(check.clone()).await.unwrap();
        assert!(decision.is_allowed());
        decision
    }

    /// Settles, and returns whether it was applied and how many units are used then.
    async fn settled(&self, check: &Check, admitted: &Decision, cost: u64) -> (bool, u64) {
        let settled = self.limiter.settle(Settlement::new(check.clone(), admitted, |_| Some(cost))).await.unwrap();
        (settled.was_applied(), settled.decision().used())
    }

    async fn units_used(&self, limit: &Limit) -> u64 {
        self.limiter.peek(limit, "ada").await.unwrap().used()
    }
}

/// Settles at less, at more, and at nothing. A second settlement changes nothing.
async fn a_settlement_counts_once_at_its_cost(test: Fixture<impl Store>) {
    for algorithm in ALGORITHMS {
        let limit = TOKENS.with_algorithm(algorithm);
        for (cost, used) in [(40, 70), (90, 120), (0, 30), (60, 90)] {
            to_the_start_of_a_window(&test.clock, TOKENS.window());
            test.limiter.reset(&limit, "ada").await.unwrap();
            assert!(test.take(&plain_check(&limit, 30)).await.is_allowed());
            let check = reserved_check(&limit, 60, LEASE);
            let admitted = test.take(&check).await;
            assert_eq!(admitted.used(), 90, "reserved units count");
            assert_eq!(test.settled(&check, &admitted, cost).await, (true, used), "{algorithm:?}");
            for again in [cost, 0, 99] {
                assert_eq!(test.settled(&check, &admitted, again).await, (false, used), "{algorithm:?}");
            }
            test.clock.advance(LEASE);
            assert_eq!(
                test.units_used(&limit).await,
                used,
                "{algorithm:?}: the lease returns nothing after the settlement"
            );
        }
    }
}

/// A settlement may exceed the limit. Then checks are refused until enough units have left.
async fn units_settled_above_the_limit_refuse_until_they_leave(test: Fixture<impl Store>) {
    let check = reserved_check(&TOKENS, 10, LEASE);
    let admitted = test.take(&check).await;
    test.clock.advance(Duration::from_secs(1));
    assert_eq!(test.settled(&check, &admitted, 250).await, (true, 250));
    let refused = test.limiter.check(&TOKENS, "ada", 1).await.unwrap();
    assert_eq!((refused.remaining(), refused.retry_after()), (0, Some(Duration::from_secs(59))));
    test.clock.advance(Duration::from_secs(59));
    assert_eq!(test.units_used(&TOKENS).await, 0, "the settlement counts from the admission");
}

/// Units that are not settled return when the lease ends, to the microsecond. A later settlement still counts them,
/// once.
async fn a_lease_ends_by_itself(test: Fixture<impl Store>) {
    for algorithm in ALGORITHMS {
        let limit = TOKENS.with_algorithm(algorithm);
        to_the_start_of_a_window(&test.clock, TOKENS.window());
        let check = reserved_check(&limit, 100, LEASE);
        let admitted = test.take(&check).await;
        // A reservation may be returned at any time, so the retry time is a second, or the end of the lease if that is
        // sooner.
        for (pause, reported) in [
            (Duration::ZERO, SECOND),
            (LEASE - SECOND - MICROSECOND, SECOND),
            (2 * MICROSECOND, SECOND - MICROSECOND),
            (SECOND - 2 * MICROSECOND, MICROSECOND),
        ] {
            test.clock.advance(pause);
            let refused = test.limiter.check(&limit, "ada", 1).await.unwrap();
            let reserved = refused.binding().reserved();
            let told_of = (refused.retry_after(), refused.is_refused_by_reservations(), refused.used(), reserved);
            assert_eq!(told_of, (Some(reported), true, 100, 100), "{algorithm:?}");
        }
        test.clock.advance(MICROSECOND);
        assert_eq!(test.units_used(&limit).await, 0, "{algorithm:?}");
        for is_known in [true, false] {
            assert_eq!(test.settled(&check, &admitted, 50).await, (is_known, 50), "{algorithm:?}");
        }
        assert_eq!(test.take(&plain_check(&limit, 50)).await.used(), 100, "{algorithm:?}");
    }
}

/// A lease that is longer than the window ends with the window.
async fn a_lease_lasts_at_most_one_window(test: Fixture<impl Store>) {
    assert!(test.take(&reserved_check(&TOKENS, 100, Duration::MAX)).await.is_allowed());
    let refused = test.limiter.check(&TOKENS, "ada", 1).await.unwrap();
    assert_eq!(refused.retry_after(), Some(SECOND), "the reservation may return earlier");
    let patient = test.limiter.clone().retry_reserved_after(Duration::MAX);
    let wait = patient.check(&TOKENS, "ada", 1).await.unwrap().retry_after();
    assert_eq!(wait, Some(TOKENS.window()));
    test.clock.advance(TOKENS.window() - MICROSECOND);
    assert_eq!(test.units_used(&TOKENS).await, 100);
    test.clock.advance(MICROSECOND);
    assert_eq!(test.units_used(&TOKENS).await, 0);
}

/// Settling one charge of a check leaves the other charges unchanged.
async fn charges_are_settled_one_by_one(test: Fixture<impl Store>) {
    let requests = Limit::per_minute("requests", 10);
    let check = reserved_check(&TOKENS, 60, LEASE).and(Charge::new(requests.clone(), "ada", 1).unwrap()).unwrap();
    let admitted = test.take(&check).await;
    let tokens = |charge: &Charge| (charge.limit() == &TOKENS).then_some(7);
    let settled = test.limiter.settle(Settlement::new(check.clone(), &admitted, tokens)).await.unwrap();
    let used: Vec<u64> = settled.decision().statuses().map(|status| status.used()).collect();
    assert_eq!((settled.was_applied(), used), (true, vec![7, 1]));

    let settled = test.limiter.settle(Settlement::refund(check, &admitted)).await.unwrap();
    let used: Vec<u64> = settled.decision().statuses().map(|status| status.used()).collect();
    assert_eq!((settled.was_applied(), used), (true, vec![7, 0]), "a charge that is not settled yet can be");
}

/// An admission without a reservation can be refunded if it has its own entry.
async fn an_admission_can_be_refunded_by_its_id(test: Fixture<impl Store>) {
    for algorithm in ALGORITHMS {
        let limit = TOKENS.with_algorithm(algorithm);
        to_the_start_of_a_window(&test.clock, TOKENS.window());
        let (ours, others) = (plain_check(&limit, 20), plain_check(&limit, 30));
        let (admitted, _) = (test.take(&ours).await, test.take(&others).await);
        let is_known = algorithm == Algorithm::log();
        let left = if is_known { 30 } else { 50 };
        assert_eq!(test.settled(&ours, &admitted, 0).await, (is_known, left), "{algorithm:?}");
        assert_eq!(test.settled(&ours, &admitted, 0).await, (false, left), "{algorithm:?}");

        let named = plain_check(&limit, 5).with_id(AdmissionId::from(77));
        let admitted = test.take(&named).await;
        assert_eq!(test.settled(&named, &admitted, 0).await, (true, left), "{algorithm:?}: an id of the caller's");
    }
}

/// A settlement returns nothing for an unknown id, or at a cost that differs from the charge.
async fn a_foreign_settlement_frees_nothing(test: Fixture<impl Store>) {
    for algorithm in ALGORITHMS {
        let limit = TOKENS.with_algorithm(algorithm);
        to_the_start_of_a_window(&test.clock, TOKENS.window());
        let check = reserved_check(&limit, 20, LEASE);
        let admitted = test.take(&check).await;
        let unknown = Settlement::by_id(check.clone(), AdmissionId::fresh(), admitted.at(), |_| Some(0));
        let at_another_cost = Settlement::refund(reserved_check(&limit, 90, LEASE), &admitted);
        let not_reserved = Settlement::refund(plain_check(&limit, 20), &admitted);
        for settlement in [unknown, at_another_cost, not_reserved] {
            let settled = test.limiter.settle(settlement).await.unwrap();
            assert_eq!((settled.was_applied(), settled.decision().used()), (false, 20), "{algorithm:?}");
        }
        assert_eq!(test.settled(&check, &admitted, 0).await, (true, 0));
    }
}

/// A settlement belongs to its admission, and not to a later one with the same id.
async fn a_late_settlement_leaves_a_repeated_admission_alone(test: Fixture<impl Store>) {
    for algorithm in ALGORITHMS {
        let limit = TOKENS.with_algorithm(algorithm);
        to_the_start_of_a_window(&test.clock, TOKENS.window());
        let check = reserved_check(&limit, 60, LEASE).with_id(AdmissionId::from(4711));
        let first = test.take(&check).await;
        test.clock.advance(LEASE);
        let second = test.take(&check).await;
        assert_eq!(test.settled(&check, &first, 10).await, (true, 70), "{algorithm:?}: its lease has ended");
        assert_eq!(test.settled(&check, &second, 20).await, (true, 30), "{algorithm:?}");

        // The same without a reservation, after the first admission was refunded.
        let named = plain_check(&limit, 30).with_id(AdmissionId::from(77));
        let first = test.take(&named).await;
        assert_eq!(test.settled(&named, &first, 0).await, (true, 30));
        test.clock.advance(LEASE);
        assert!(test.take(&named).await.is_allowed());
        // A fixed window does not tell them apart, but counts the same units.
        if algorithm != Algorithm::fixed() {
            assert_eq!(test.settled(&named, &first, 0).await, (false, 60), "{algorithm:?}");
        }
    }
}

/// Each admission under a repeated id is settled once after the end of its lease, also where one entry holds the units of
/// several admissions.
async fn admissions_with_one_id_are_settled_late_one_by_one(test: Fixture<impl Store>) {
    for algorithm in ALGORITHMS {
        let limit = TOKENS.with_algorithm(algorithm);
        to_the_start_of_a_window(&test.clock, TOKENS.window());
        let check = reserved_check(&limit, 60, LEASE).with_id(AdmissionId::from(4711));
        // At most one admission of an id can be told from the others in a fixed window.
        let admissions = if algorithm == Algorithm::fixed() { 1 } else { 3 };
        let mut used = 0;
        for number in 0..admissions {
            let admitted = test.take(&check).await;
            test.clock.advance(LEASE);
            used += 10 + number;
            assert_eq!(test.settled(&check, &admitted, 10 + number).await, (true, used), "{algorithm:?}");
            assert_eq!(test.settled(&check, &admitted, 10 + number).await, (false, used), "{algorithm:?}");
        }
        test.clock.advance(2 * limit.window());
        assert_eq!(test.units_used(&limit).await, 0, "{algorithm:?}");
    }
}

/// An impossible cost refuses the key, and does not overflow.
async fn absurd_costs_refuse_their_key_and_do_not_overflow(test: Fixture<impl Store>) {
    for algorithm in ALGORITHMS {
        let limit = TOKENS.with_algorithm(algorithm);
        to_the_start_of_a_window(&test.clock, TOKENS.window());
        for _ in 0..20 {
            let check = reserved_check(&limit, 1, LEASE);
            let admitted = test.take(&check).await;
            let settled = test.limiter.settle(Settlement::new(check, &admitted, |_| Some(u64::MAX))).await.unwrap();
            assert!(settled.was_applied() && settled.decision().remaining() == 0, "{algorithm:?}");
            let refused = test.limiter.check(&limit, "ada", 1).await.unwrap();
            test.clock.advance(refused.retry_after().unwrap());
        }
    }
}

/// Under algorithms with bounded memory, a key keeps at most 10,000 reservations. Admissions beyond them count for
/// their window.
async fn an_admission_without_its_own_entry_counts_for_its_window(test: Fixture<impl Store>) {
    for algorithm in [Algorithm::compact(16), Algorithm::counter(), Algorithm::fixed()] {
        let limit = Limit::per_day("tokens", 1_000_000).with_algorithm(algorithm);
        to_next_window(&test.clock, limit.window());
        test.clock.advance(Duration::from_secs(60));
        let check = reserved_check(&limit, 1, LEASE);
        // No more at once than the queue holds.
        let mut open = Vec::new();
        for _ in 0..101 {
            let asked: JoinSet<_> = (0..100).map(|_| test.limiter.check_all(check.clone())).collect();
            open.extend(asked.join_all().await.into_iter().map(Result::unwrap));
        }
        let mut known = 0;
        for decisions in open.chunks(100) {
            let refund = |decision: &Decision| {
                let (limiter, refund) = (test.limiter.clone(), Settlement::refund(check.clone(), decision));
                async move { limiter.settle(refund).await.unwrap().was_applied() }
            };
            let settled: JoinSet<_> = decisions.iter().map(refund).collect();
            known += settled.join_all().await.into_iter().filter(|is_known| *is_known).count() as u64;
        }
        assert!((9_900..=10_000).contains(&known), "{known}, {algorithm:?}");
        assert_eq!(test.units_used(&limit).await, 10_100 - known, "{algorithm:?}");
        test.clock.advance(LEASE);
        assert_eq!(test.units_used(&limit).await, 10_100 - known, "{algorithm:?}: no lease ends");
    }
}

/// A limit that is lowered below its used units refuses. A settlement still returns the units.
async fn a_lowered_limit_settles_exactly(test: Fixture<impl Store>) {
    let check = reserved_check(&TOKENS, 60, LEASE);
    let admitted = test.take(&check).await;
    let lowered = Limit::per_minute("tokens", 30);
    let refused = test.limiter.check(&lowered, "ada", 1).await.unwrap();
    assert_eq!((refused.is_allowed(), refused.used(), refused.remaining()), (false, 60, 0));
    assert_eq!(test.settled(&check, &admitted, 29).await, (true, 29));
    assert!(test.limiter.check(&lowered, "ada", 1).await.unwrap().is_allowed());
}

/// A shadow charge counts if it fits, and reports if it does not. It refuses nothing.
async fn a_shadow_limit_never_refuses(test: Fixture<impl Store>) {
    let enforced = Limit::per_minute("enforced", 3);
    for algorithm in ALGORITHMS {
        to_the_start_of_a_window(&test.clock, TOKENS.window());
        let tried = Limit::per_minute("tried", 2).with_algorithm(algorithm);
        let charge = |limit: &Limit| Charge::new(limit.clone(), "ada", 1).unwrap();
        let check = Check::new(charge(&tried).in_shadow()).and(charge(&enforced)).unwrap();
        for (is_allowed, refusals, used) in
            [(true, 0, [1, 1]), (true, 0, [2, 2]), (true, 1, [2, 3]), (false, 1, [2, 3])]
        {
            let decision = test.limiter.check_all(check.clone()).await.unwrap();
            assert_eq!((decision.is_allowed(), decision.shadow_refusals().count()), (is_allowed, refusals));
            assert_eq!(decision.statuses().map(|status| status.used()).collect::<Vec<_>>(), used, "{algorithm:?}");
            assert_eq!(decision.limit(), &enforced, "the figures are those of the limit that is enforced");
            let would_wait = decision.shadow_refusals().next().and_then(|status| status.retry_after());
            assert_eq!(would_wait.is_some_and(|wait| !wait.is_zero()), refusals == 1);
        }
        test.limiter.reset(&enforced, "ada").await.unwrap();
    }
}

for_every_store! {
    a_settlement_counts_once_at_its_cost
    units_settled_above_the_limit_refuse_until_they_leave
    a_lease_ends_by_itself
    a_lease_lasts_at_most_one_window
    charges_are_settled_one_by_one
    an_admission_can_be_refunded_by_its_id
    a_foreign_settlement_frees_nothing
    a_late_settlement_leaves_a_repeated_admission_alone
    admissions_with_one_id_are_settled_late_one_by_one
    absurd_costs_refuse_their_key_and_do_not_overflow
    an_admission_without_its_own_entry_counts_for_its_window
    a_lowered_limit_settles_exactly
    a_shadow_limit_never_refuses
}
