//! One check takes bounded work, whatever its key holds: bounds on the entries that it reads, drops
//! and moves.

use std::time::Duration;

use futures_util::future::join_all;
use tower_sliding_window::{
    Algorithm, Charge, Check, Decision, Limit, Limiter, check::AdmissionId, settlement::Settlement,
    store::ManualClock,
};

use crate::support::{TEST_TIMEOUT, charge, redis_server::RedisServer, to_next_window};

const MILLISECOND: Duration = Duration::from_millis(1);
const HOUR: Duration = Duration::from_secs(3_600);
const CALLS: Limit = Limit::per_hour("calls", 1_000_000);

/// The entries that a refusal reads for its retry time, or moves after the clock stepped back.
const LOOKED_AT: u32 = 100;

/// The expired entries that one check drops.
const DROPPED: u32 = 500;

struct Test {
    server: RedisServer,
    clock: ManualClock,
    limiter: Limiter,
}

impl Test {
    fn new() -> Self {
        let (server, clock) = (RedisServer::start(), ManualClock::new());
        let store = server.store().clock(&clock).build().unwrap();
        let limiter = Limiter::new(store)
            .deadline(TEST_TIMEOUT)
            .refusal_cache(Duration::ZERO);
        Self {
            server,
            clock,
            limiter,
        }
    }

    /// Admits so many checks, a millisecond apart.
    async fn fill(&self, limit: &Limit, admissions: u32, cost: u64) {
        for _ in 0..admissions {
            assert!(
                self.limiter
                    .check(limit, "ada", cost)
                    .await
                    .unwrap()
                    .is_allowed()
            );
            self.clock.advance(MILLISECOND);
        }
    }

    /// The number of entries of the only key.
    fn members(&self) -> u32 {
        let key = self.server.keys().remove(0);
        self.server.run(&format!("ZCARD {key}"))
    }
}

/// The retry time is exact if a refusal reads all entries that must leave. If more must leave, it
/// is a time before which the check is not admitted.
#[tokio::test]
async fn a_retry_time_is_exact_or_a_lower_bound() {
    let test = Test::new();
    test.fill(&CALLS, 1_000, 2).await;
    let leaves = |entry: u32| HOUR - MILLISECOND * (1_000 - entry);
    for (entries, reported) in [
        (1, 1),
        (LOOKED_AT, LOOKED_AT),
        (LOOKED_AT + 1, LOOKED_AT),
        (1_000, LOOKED_AT),
    ] {
        let full = Limit::per_hour("calls", 2_000);
        let refused = test
            .limiter
            .check(&full, "ada", u64::from(entries) * 2)
            .await
            .unwrap();
        assert_eq!(
            refused.retry_after(),
            Some(leaves(reported - 1)),
            "{entries} entries have to leave"
        );
    }
    // Each refusal then gives the next part of the wait, and in the end the check is admitted.
    let full = Limit::per_hour("calls", 2_000);
    let mut asked = 0;
    while let Some(wait) = test
        .limiter
        .check(&full, "ada", 2_000)
        .await
        .unwrap()
        .retry_after()
    {
        test.clock.advance(wait);
        asked += 1;
    }
    assert_eq!(asked, 1_000_u32.div_ceil(LOOKED_AT));
}

/// True if units are reserved or not, a counter's retry time is no earlier than the departure of
/// the last entry that was read.
#[tokio::test]
async fn reserved_entries_do_not_shorten_the_bound_of_a_counter() {
    let second = Duration::from_secs(1);
    let limit =
        Limit::per("calls", 120, second * 1_000).with_algorithm(Algorithm::SLIDING_WINDOW_COUNTER);
    // A hundred entries are read: if units may be given back, 90 that were admitted and ten that
    // are reserved, or all reserved.
    for reserved in [91..=105, 1..=119] {
        let test = Test::new();
        for number in 1..=120 {
            test.clock.advance(second);
            let charge = Charge::new(limit.clone(), "ada", 1).unwrap();
            let check = if reserved.contains(&number) {
                Check::new(charge.reserve(second * 1_000))
            } else {
                Check::new(charge).with_id(AdmissionId(number))
            };
            assert!(test.limiter.check_all(check).await.unwrap().is_allowed());
        }
        test.clock.advance(second);
        let refused = test.limiter.check(&limit, "ada", 120).await.unwrap();
        assert_eq!(
            refused.retry_after(),
            Some(second * (1_000 - 21)),
            "{reserved:?} are reserved"
        );
        assert!(!refused.binding().is_refused_by_reservations());
    }
}

/// Entries of one unit are counted without reading them, so their retry times are always exact.
#[tokio::test]
async fn the_retry_time_of_single_units_is_always_exact() {
    let test = Test::new();
    test.fill(&CALLS, 1_000, 1).await;
    let full = Limit::per_hour("calls", 1_000);
    let refused = test.limiter.check(&full, "ada", 900).await.unwrap();
    assert_eq!(
        refused.retry_after(),
        Some(HOUR - MILLISECOND * (1_000 - 899))
    );
}

/// A check drops a bounded number of entries. Remaining single units do not count. Remaining larger
/// entries count until later checks drop them. If few entries stay, the log is rewritten with them,
/// and all others are dropped.
#[tokio::test]
async fn many_expired_entries_are_dropped_over_several_checks() {
    for (cost, staying, counted_late) in [(1, 600, 0), (2, 600, 100), (2, 300, 0), (1, 300, 0)] {
        let test = Test::new();
        test.fill(&CALLS, 1_200, cost).await;
        // Advances to the moment at which the first entry that stays is the oldest.
        test.clock.advance(HOUR - MILLISECOND * (staying + 1));
        let used = test
            .limiter
            .peek(&CALLS, "ada")
            .await
            .unwrap()
            .binding()
            .used;
        let is_behind = counted_late > 0;
        let left_behind = if staying > DROPPED {
            1_200 - staying - DROPPED
        } else {
            0
        };
        let case = format!("{staying} of 1,200 entries of {cost} stay");
        assert_eq!(used, u64::from(staying + counted_late) * cost, "{case}");
        assert_eq!(
            test.members(),
            staying + left_behind + u32::from(cost > 1),
            "{case}"
        );
        if is_behind {
            // Units that are not known yet refuse, with a retry time of zero.
            let full = Limit::per_hour("calls", used);
            let second = test.limiter.check(&full, "ada", 1).await.unwrap();
            assert!(
                second.is_allowed(),
                "the next check has dropped the rest: {second:?}"
            );
        }
        assert_eq!(
            test.limiter
                .peek(&CALLS, "ada")
                .await
                .unwrap()
                .binding()
                .used,
            u64::from(staying) * cost + u64::from(is_behind)
        );
        assert_eq!(
            test.members(),
            staying + u32::from(cost > 1) + u32::from(is_behind)
        );
    }
}

/// After the clock stepped back, each refusal moves a bounded number of entries and gives the same
/// retry time.
#[tokio::test]
async fn future_entries_are_moved_over_several_refusals() {
    let test = Test::new();
    test.fill(&CALLS, 250, 1).await;
    let full = Limit::per_hour("calls", 250);
    test.clock.step_back(HOUR * 2);
    let key = test.server.keys().remove(0);
    let now = test
        .clock
        .now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap()
        .as_micros();
    for left in [150, 50, 0] {
        let refused = test.limiter.check(&full, "ada", 1).await.unwrap();
        assert_eq!(refused.retry_after(), Some(HOUR));
        let ahead: u32 = test.server.run(&format!("ZCOUNT {key} -inf (-{now}"));
        assert_eq!(ahead, left);
    }
    test.clock.advance(HOUR);
    assert!(
        test.limiter
            .check(&full, "ada", 250)
            .await
            .unwrap()
            .is_allowed(),
        "one window later the key is right again"
    );
}

/// Reservations that are never settled, as of clients that disconnect. A key with bounded memory
/// keeps ten thousand of them.
#[tokio::test]
async fn open_reservations_are_bounded_under_compact_algorithms() {
    const MOST_KEPT: u64 = 10_000;
    for algorithm in [
        Algorithm::SLIDING_WINDOW_COUNTER,
        Algorithm::FIXED_WINDOW,
        Algorithm::compact_log(16),
    ] {
        let test = Test::new();
        let limit = CALLS.with_algorithm(algorithm);
        // To the start of a fixed window, so that none ends during the test.
        to_next_window(&test.clock, HOUR);
        let reserve = || {
            Check::new(
                Charge::new(limit.clone(), "ada", 1)
                    .unwrap()
                    .reserve(HOUR / 60),
            )
        };
        for _ in 0..110 {
            let asked = (0..100).map(|_| tokio::spawn(test.limiter.check_all(reserve())));
            for decision in asked.collect::<Vec<_>>() {
                assert!(decision.await.unwrap().unwrap().is_allowed());
            }
        }
        let members = test.members();
        assert!(
            (10_000..=10_003).contains(&members),
            "{algorithm:?}: {members}"
        );
        assert_eq!(
            test.limiter
                .peek(&limit, "ada")
                .await
                .unwrap()
                .binding()
                .used,
            11_000,
            "{algorithm:?}: all of them count"
        );
        // When the leases end, the kept reservations return over several checks. The rest stay
        // charged.
        test.clock.advance(HOUR / 60);
        for _ in 0..MOST_KEPT.div_ceil(DROPPED.into()) {
            assert!(test.limiter.peek(&limit, "ada").await.unwrap().is_allowed());
        }
        let used = test
            .limiter
            .peek(&limit, "ada")
            .await
            .unwrap()
            .binding()
            .used;
        assert!((1_000..=1_003).contains(&used), "{algorithm:?}: {used}");
    }
}

#[tokio::test]
async fn late_settlements_are_bounded_under_compact_algorithms() {
    for algorithm in [
        Algorithm::SLIDING_WINDOW_COUNTER,
        Algorithm::compact_log(16),
    ] {
        let test = Test::new();
        let limit = CALLS.with_algorithm(algorithm);
        to_next_window(&test.clock, HOUR);
        for _ in 0..3 {
            let checks: Vec<_> = (0..4_000)
                .map(|_| {
                    Check::new(
                        Charge::new(limit.clone(), "ada", 1)
                            .unwrap()
                            .reserve(HOUR / 3_600),
                    )
                })
                .collect();
            let asked: Vec<_> = checks
                .iter()
                .map(|check| tokio::spawn(test.limiter.check_all(check.clone())))
                .collect();
            let mut settlements = Vec::new();
            for (check, decision) in checks.into_iter().zip(asked) {
                settlements.push(Settlement::new(
                    check,
                    &decision.await.unwrap().unwrap(),
                    |_| Some(1),
                ));
            }
            test.clock.advance(HOUR / 1_800);
            let settled = settlements
                .into_iter()
                .map(|settlement| test.limiter.settle(settlement));
            for settled in join_all(settled).await {
                assert!(settled.unwrap().was_applied);
            }
        }
        let members = test.members();
        assert!(members <= 10_003, "{algorithm:?}: {members}");
        // Reservations without an entry of their own stay charged, and their late settlements count
        // as well.
        assert!(
            test.limiter
                .peek(&limit, "ada")
                .await
                .unwrap()
                .binding()
                .used
                >= 12_000,
            "{algorithm:?}: all of them count"
        );
    }
}

/// An id that is used again after its window is a new admission, even if its old entry is not
/// dropped yet. The units of the old entry leave with it.
#[tokio::test]
async fn an_id_reused_before_its_entry_is_dropped_counts_once() {
    for (cost, lease) in [(1, None), (2, None), (1, Some(HOUR)), (2, Some(HOUR))] {
        let test = Test::new();
        let check = |id: u64| {
            let charge = lease
                .into_iter()
                .fold(Charge::new(CALLS, "ada", cost).unwrap(), Charge::reserve);
            test.limiter
                .check_all(Check::new(charge).with_id(AdmissionId(id)))
        };
        for id in 0..1_200 {
            assert!(check(id).await.unwrap().is_allowed());
            test.clock.advance(MILLISECOND);
        }
        // 600 entries have expired. The first check drops 500, and so many stay that the log is not
        // rewritten.
        test.clock.advance(HOUR - MILLISECOND * 601);
        for (given, id) in (590..600).enumerate() {
            let again = check(id).await.unwrap();
            assert_eq!(again.at(), test.clock.now(), "{id} of {cost} is a new one");
            let counted = again.binding().used - (600 + given as u64 + 1) * cost;
            assert!(counted <= 100 * cost, "{id} of {cost}: {counted} too many");
        }
        for _ in 0..2 {
            assert!(test.limiter.peek(&CALLS, "ada").await.unwrap().is_allowed());
        }
        for left in [610, 10] {
            let standing = test.limiter.peek(&CALLS, "ada").await.unwrap();
            let reserved = if lease.is_some() { left * cost } else { 0 };
            assert_eq!(
                (standing.binding().used, standing.binding().reserved),
                (left * cost, reserved),
                "{cost} {lease:?}"
            );
            test.clock.advance(MILLISECOND * 600);
        }
    }
}

/// The limit of a log in which 1,700 single units have expired, more than one check drops, and 600
/// count.
const MANY: Limit = Limit::per_hour("calls", 3_000);

/// Fills such a log, and returns the last admission.
async fn fill_and_let_1700_expire(test: &Test) -> (Check, Decision) {
    let check = Check::new(charge(&MANY, 1));
    for _ in 0..1_700 {
        assert!(
            test.limiter
                .check_all(check.clone())
                .await
                .unwrap()
                .is_allowed()
        );
    }
    test.clock.advance(HOUR / 2);
    let mut last = None;
    for _ in 0..600 {
        let decision = test.limiter.check_all(check.clone()).await.unwrap();
        assert!(decision.is_allowed());
        last = Some(decision);
    }
    test.clock.advance(HOUR / 2 + MILLISECOND);
    (check, last.unwrap())
}

/// A cost of 2 makes the log keep a sum. That sum must not include the expired units, which later
/// checks drop.
#[tokio::test]
async fn a_new_sum_excludes_expired_units_that_are_not_dropped_yet() {
    let test = Test::new();
    let _ = fill_and_let_1700_expire(&test).await;
    let (mut used, mut reported) = (600, Vec::new());
    for _ in 0..4 {
        let decision = test.limiter.check(&MANY, "ada", 2).await.unwrap();
        used += 2;
        reported.push((decision.binding().used, used));
    }
    let mut admitted = used;
    while test
        .limiter
        .check(&MANY, "ada", 100)
        .await
        .unwrap()
        .is_allowed()
    {
        admitted += 100;
    }
    assert!(
        admitted <= 3_000,
        "{admitted} units of 3,000 admitted in one window; (reported, true) {reported:?}"
    );
}

/// The same when a settlement makes the log keep a sum.
#[tokio::test]
async fn a_sum_begun_by_a_settlement_excludes_expired_units() {
    let test = Test::new();
    let (check, last) = fill_and_let_1700_expire(&test).await;
    let settled = test
        .limiter
        .settle(Settlement::new(check, &last, |_| Some(3)))
        .await
        .unwrap();
    assert!(settled.was_applied);
    let mut reported = Vec::new();
    for _ in 0..4 {
        reported.push(
            test.limiter
                .peek(&MANY, "ada")
                .await
                .unwrap()
                .binding()
                .used,
        );
    }
    assert!(reported[3] == 602, "602 are used, reported {reported:?}");
}
