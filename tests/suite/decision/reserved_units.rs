//! Refusals that only reserved units cause, and the retry time they give.

use std::time::Duration;

use tower_sliding_window::{
    AdmissionId, Algorithm, Charge, Check, Decision, DenyCache, Limit, LimitStatus, Limiter, MemoryStore, RedisStore,
    Settlement, Store,
};

use crate::support::{
    ALGORITHMS, Fixture, MICROSECOND, Numbers, TEST_TIMEOUT, charge, for_every_store, ms, redis_server::RedisServer,
    seconds, to_next_window,
};

const SECOND: Duration = Duration::from_secs(1);
const TOKENS: Limit = Limit::per_minute("tokens", 100);

fn both(first: Charge, second: Charge) -> Check {
    Check::new(first).and(second).unwrap()
}

impl<S: Store> Fixture<S> {
    async fn ask(&self, check: Check) -> Decision {
        self.limiter.check_all(check).await.unwrap()
    }

    async fn admit(&self, charge: Charge) {
        let decision = self.ask(Check::new(charge)).await;
        assert!(decision.is_allowed(), "{decision:?}");
    }

    /// The refusal of a cost to a key, or `None` if it would be admitted. Spends nothing.
    async fn refused_for(&self, limiter: &Limiter<S>, limit: &Limit, key: &'static str, cost: u64) -> Option<Decision> {
        if limiter.peek(limit, key).await.unwrap().remaining() >= cost {
            return None;
        }
        let decision = limiter.check(limit, key, cost).await.unwrap();
        assert!(!decision.is_allowed());
        Some(decision)
    }
}

/// The retry time is exact as if all reservations stayed. If the check would be admitted sooner without them, the retry
/// time is that earlier moment, but at least `retry_reserved_after`. The same history without the reserved units runs
/// beside it under another key.
async fn a_refusal_is_exact_unless_only_reservations_cause_it(test: Fixture<impl Store>) {
    let test = test.without_deny_cache();
    let (mut numbers, mut by_reservations_alone, mut sure) = (Numbers(7), 0, 0);
    for algorithm in ALGORITHMS {
        let limit = TOKENS.with_algorithm(algorithm);
        for _ in 0..30 {
            test.clock.advance(2 * limit.window() + Duration::from_micros(numbers.below(60_000_000)));
            for _ in 0..=numbers.below(7) {
                test.clock.advance(Duration::from_micros(numbers.below(15_000_000)));
                let cost = 1 + numbers.below(40);
                let lease = (numbers.below(2) == 0).then(|| Duration::from_micros(1 + numbers.below(70_000_000)));
                let made = lease.into_iter().fold(charge(&limit, cost), Charge::reserve);
                if test.ask(Check::new(made)).await.is_allowed() && lease.is_none() {
                    assert!(test.limiter.check(&limit, "without", cost).await.unwrap().is_allowed());
                }
            }
            let reserved_units = async || {
                let [with, without] = ["ada", "without"].map(|key| test.limiter.peek(&limit, key));
                with.await.unwrap().used() - without.await.unwrap().used()
            };
            let patient = test.limiter.clone().retry_reserved_after(Duration::MAX);
            let mut longest = None;
            for cost in [1, 20, 45, 70, 100] {
                let Some(staying) = test.refused_for(&patient, &limit, "ada", cost).await else { continue };
                let staying = staying.retry_after().unwrap();
                let without = test.refused_for(&test.limiter, &limit, "without", cost).await;
                let given_back = without.and_then(|refused| refused.retry_after()).unwrap_or_default();
                for setting in [Duration::ZERO, ms(1), SECOND, seconds(10), Duration::MAX] {
                    let limiter = test.limiter.clone().retry_reserved_after(setting);
                    let refused = limiter.check(&limit, "ada", cost).await.unwrap();
                    let expected = staying.min(given_back.max(setting));
                    assert_eq!(refused.retry_after(), Some(expected), "{algorithm:?}: {cost} {setting:?} {refused:?}");
                    let by_reservations = given_back.is_zero();
                    assert_eq!(refused.is_refused_by_reservations(), by_reservations, "{algorithm:?}: {refused:?}");
                    assert_eq!(refused.binding().reserved(), reserved_units().await, "{algorithm:?}");
                    let counted = if by_reservations { &mut by_reservations_alone } else { &mut sure };
                    *counted += 1;
                }
                longest = Some((staying, cost));
            }
            if let Some((staying, cost)) = longest {
                test.clock.advance(staying - MICROSECOND);
                assert!(!test.limiter.check(&limit, "ada", cost).await.unwrap().is_allowed(), "{algorithm:?}");
                test.clock.advance(MICROSECOND);
                assert!(test.limiter.check(&limit, "ada", cost).await.unwrap().is_allowed(), "{algorithm:?}");
            }
        }
    }
    assert!(by_reservations_alone > 200 && sure > 200, "{by_reservations_alone} {sure}");
}

/// The retry times from the reservation to the end of its lease, if it is never settled.
async fn an_unsettled_reservation_refuses_until_its_lease_ends(test: Fixture<impl Store>) {
    let test = test.without_deny_cache();
    for (setting, lease) in [(SECOND, seconds(10)), (seconds(3), seconds(10)), (seconds(20), seconds(10))] {
        let limiter = test.limiter.clone().retry_reserved_after(setting);
        test.admit(charge(&TOKENS, 100).reserve(lease)).await;
        let mut asked = 0;
        let begun = test.clock.now();
        while let Some(wait) = limiter.check(&TOKENS, "ada", 1).await.unwrap().retry_after() {
            let left = lease - test.clock.now().duration_since(begun).unwrap();
            assert_eq!(wait, setting.min(left));
            test.clock.advance(wait);
            asked += 1;
        }
        assert_eq!(test.clock.now().duration_since(begun).unwrap(), lease, "the refusals end exactly with the lease");
        assert_eq!(asked, lease.as_secs().div_ceil(setting.as_secs()));
        test.limiter.reset(&TOKENS, "ada").await.unwrap();
    }
}

async fn a_refusal_by_settled_units_outranks_one_by_reservations(test: Fixture<impl Store>) {
    let test = test.without_deny_cache();
    let said = |status: &LimitStatus| (status.retry_after(), status.is_refused_by_reservations(), status.reserved());
    for algorithm in ALGORITHMS {
        to_next_window(&test.clock, seconds(3_600));
        let tokens = Limit::per_hour("tokens", 100).with_algorithm(algorithm);
        let calls = Limit::per_minute("calls", 2).with_algorithm(Algorithm::fixed());
        test.admit(charge(&tokens, 100).reserve(Duration::MAX)).await;
        test.admit(charge(&calls, 2)).await;

        let check = both(charge(&tokens, 1), charge(&calls, 1));
        let refused = test.ask(check.clone()).await;
        assert_eq!(
            refused.statuses().map(said).collect::<Vec<_>>(),
            [(Some(SECOND), true, 100), (Some(seconds(60)), false, 0)]
        );
        assert_eq!((refused.retry_after(), refused.limit()), (Some(seconds(60)), &calls), "{algorithm:?}");
        assert!(!refused.is_refused_by_reservations(), "settled units refuse it as well");

        // The settled units leave before `retry_reserved_after`, and then refuse no more.
        test.clock.advance(seconds(60) - ms(1));
        let refused = test.ask(check.clone()).await;
        assert_eq!((refused.retry_after(), refused.is_refused_by_reservations()), (Some(SECOND), false));
        test.clock.advance(ms(1));
        let refused = test.ask(check.clone()).await;
        assert_eq!((refused.retry_after(), refused.is_refused_by_reservations()), (Some(SECOND), true));
        assert_eq!(refused.statuses().map(said).collect::<Vec<_>>(), [(Some(SECOND), true, 100), (None, false, 0)]);

        // A shadow limit refuses nothing, so its settled units do not count.
        let shadow = charge(&Limit::per_minute("shadow", 1), 1);
        test.admit(shadow.clone()).await;
        let refused = test.ask(both(charge(&tokens, 1), shadow.clone().in_shadow())).await;
        assert_eq!((refused.retry_after(), refused.is_refused_by_reservations()), (Some(SECOND), true));
        let would = refused.shadow_refusals().map(said).collect::<Vec<_>>();
        assert_eq!(would, [(Some(seconds(60)), false, 0)]);

        // Both limits refuse by reservations, and one lease ends first.
        test.admit(charge(&calls, 2).reserve(ms(400))).await;
        let refused = test.ask(check.clone()).await;
        assert_eq!(
            refused.statuses().map(said).collect::<Vec<_>>(),
            [(Some(SECOND), true, 100), (Some(ms(400)), true, 2)]
        );
        assert!(refused.is_refused_by_reservations());

        // An admitted check also reports reserved units.
        test.clock.advance(ms(400));
        let asked = test.ask(both(charge(&tokens, 0), charge(&calls, 1))).await;
        assert_eq!(asked.statuses().map(said).collect::<Vec<_>>(), [(None, false, 100), (None, false, 0)]);
        assert!(asked.is_allowed() && !asked.is_refused_by_reservations());

        // Once they are settled, they refuse until they leave.
        test.limiter.reset(&tokens, "ada").await.unwrap();
        let check = Check::new(charge(&tokens, 60).reserve(Duration::MAX));
        let admitted = test.ask(check.clone()).await;
        let settled = test.limiter.settle(Settlement::new(check, &admitted, |_| Some(100))).await.unwrap();
        let status = settled.decision().binding();
        assert_eq!((status.used(), status.reserved()), (100, 0));
        let refused = test.limiter.check(&tokens, "ada", 1).await.unwrap();
        assert!(!refused.is_refused_by_reservations() && refused.retry_after() > Some(seconds(1_000)), "{refused:?}");
        for limit in [&tokens, &calls] {
            test.limiter.reset(limit, "ada").await.unwrap();
        }
        test.clock.advance(seconds(60));
    }
}

for_every_store! {
    a_refusal_is_exact_unless_only_reservations_cause_it
    an_unsettled_reservation_refuses_until_its_lease_ends
    a_refusal_by_settled_units_outranks_one_by_reservations
}

/// By the server's own clock, a plain check meets a log with reserved units.
#[tokio::test]
async fn a_plain_check_counts_reserved_units() {
    let server = RedisServer::start();
    let store = RedisStore::builder(&server.url()).build().unwrap();
    let limiter = Limiter::new(store).deadline(TEST_TIMEOUT).deny_cache(DenyCache::off());
    for (settled, reserved) in [(0, 10), (1, 9), (4, 6), (9, 1)] {
        let limit = Limit::per_hour("calls", 10);
        assert!(limiter.check(&limit, "ada", settled).await.unwrap().is_allowed());
        let reservation = limiter.reserve(&limit, "ada", reserved, seconds(600)).await.unwrap().unwrap();
        for _ in 0..3 {
            let refused = limiter.check(&limit, "ada", 1).await.unwrap();
            let reported = (refused.is_allowed(), refused.used(), refused.binding().reserved(), refused.retry_after());
            assert_eq!(reported, (false, 10, reserved, Some(SECOND)), "{settled} {reserved}");
        }
        assert_eq!(reservation.settle(0).await.unwrap().decision().used(), settled);
        assert_eq!(limiter.check(&limit, "ada", 1).await.unwrap().used(), settled + 1);
        limiter.reset(&limit, "ada").await.unwrap();
    }
}

/// An application may use any eight bytes as an id, also those of a member that the log uses for a sum.
#[tokio::test]
async fn no_id_is_mistaken_for_a_sum() {
    let server = RedisServer::start();
    let store = RedisStore::builder(&server.url()).build().unwrap();
    let limiter = Limiter::new(store).deadline(TEST_TIMEOUT).deny_cache(DenyCache::off());
    for id in [*b"reserved", *b"used    ", *b"held    ", *b"used\0\0\0\0"] {
        let id = AdmissionId::from_bytes(id);
        assert!(limiter.check_all(Check::new(charge(&TOKENS, 1)).with_id(id)).await.unwrap().is_allowed());
        let reservation = limiter.reserve(&TOKENS, "ada", 40, seconds(600)).await.unwrap().unwrap();
        assert_eq!(reservation.decision().used(), 41);
        let again = limiter.check_all(Check::new(charge(&TOKENS, 1)).with_id(id)).await.unwrap();
        assert_eq!((again.used(), again.binding().reserved()), (41, 40));
        assert_eq!(reservation.settle(2).await.unwrap().decision().used(), 3);
        limiter.reset(&TOKENS, "ada").await.unwrap();
    }
}

/// Between two checks `acquire` pauses for a moment, however short the retry time is.
#[tokio::test(start_paused = true)]
async fn retry_reserved_after_may_be_zero_or_endless() {
    let limit = Limit::per_minute("calls", 10);
    for wait in [Duration::ZERO, Duration::MAX] {
        let limiter = Limiter::new(MemoryStore::new()).retry_reserved_after(wait).deadline(Duration::MAX);
        let held = limiter.reserve(&limit, "ada", 10, Duration::from_secs(30)).await.unwrap().unwrap();
        let refused = limiter.check(&limit, "ada", 1).await.unwrap();
        assert!(refused.is_refused_by_reservations());
        assert_eq!(refused.retry_after(), Some(wait.min(Duration::from_secs(30))));
        assert!(limiter.acquire(&limit, "ada", 1, Duration::from_secs(31)).await.unwrap().is_allowed());
        drop(held);
        limiter.pause(&limit, "ada", Duration::MAX).await.unwrap();
        limiter.pause(&limit, "ada", Duration::ZERO).await.unwrap();
        assert_eq!(limiter.check(&limit, "ada", 1).await.unwrap().retry_after(), Some(limit.window()));
    }
}
