//! Windows: a unit counts for exactly one window, and no span of that length admits more than the
//! limit.

use std::time::Duration;

use super::trial::{MICROSECOND, Trial, charge, plain_check, seconds, to_the_start_of_a_window};
use tower_sliding_window::{Check, Limit, settlement::Settlement};

/// A unit admitted at `t` counts until exactly `t + window`.
pub(super) async fn a_unit_leaves_exactly_one_window_later(test: Trial) {
    let limit = Limit::per_minute("login", 1);
    assert!(test.spend(&limit, 1).await.is_allowed());
    test.clock.advance(limit.window() - MICROSECOND);
    assert!(!test.spend(&limit, 1).await.is_allowed());
    test.clock.advance(MICROSECOND);
    assert!(test.spend(&limit, 1).await.is_allowed());
}

/// There is no boundary at which twice the limit fits.
pub(super) async fn no_span_of_one_window_admits_more_than_the_limit(test: Trial) {
    let limit = Limit::per_second("burst", 50);
    let mut admitted = 0;
    for _ in 0..4 {
        // 100 checks in a tenth of a second, around the boundary of a fixed window.
        for _ in 0..100 {
            admitted += u64::from(test.spend(&limit, 1).await.is_allowed());
            test.clock.advance(Duration::from_millis(1));
        }
        assert_eq!(admitted, 50);
    }
}

/// Two requests in the same microsecond are two admissions.
pub(super) async fn several_admissions_fit_into_one_microsecond(test: Trial) {
    let limit = Limit::per_minute("calls", 5);
    let check = Check::new(charge(&limit, 1));
    for used in 1..=5 {
        // A caller may send the same check again. Without an id, each time is a new admission.
        assert_eq!(
            test.limiter
                .check_all(check.clone())
                .await
                .unwrap()
                .binding()
                .used,
            used
        );
    }
    assert!(!test.limiter.check_all(check).await.unwrap().is_allowed());
}

/// A raised or lowered limit applies at once to units admitted before.
pub(super) async fn a_changed_limit_applies_to_the_recorded_history(test: Trial) {
    let limit = |units| Limit::per_minute("plan", units);
    assert!(test.spend(&limit(10), 8).await.is_allowed());
    let lowered = test.spend(&limit(5), 1).await;
    assert_eq!(
        (
            lowered.is_allowed(),
            lowered.binding().used,
            lowered.remaining()
        ),
        (false, 8, 0)
    );
    let raised = test.spend(&limit(20), 10).await;
    assert_eq!((raised.is_allowed(), raised.remaining()), (true, 2));
}

/// The window is a part of a limit's identity. A request under a shorter window makes a longer one
/// of the same name forget nothing.
pub(super) async fn no_window_admits_more_because_another_limit_has_its_name(test: Trial) {
    let test = test.without_refusal_cache();
    for algorithm in test.algorithms() {
        let [hourly, brief] = [Limit::per_hour("api", 10), Limit::per_second("api", 10)]
            .map(|limit| limit.with_algorithm(algorithm));
        to_the_start_of_a_window(&test.clock, hourly.window());
        let (mut admitted, mut briefly) = (0, 0);
        for _ in 0..20 {
            for _ in 0..12 {
                admitted += u64::from(test.spend(&hourly, 1).await.is_allowed());
            }
            test.clock.advance(seconds(2));
            briefly += u64::from(test.spend(&brief, 1).await.is_allowed());
        }
        assert_eq!((admitted, briefly), (10, 20), "{algorithm:?}");
        test.clock.advance(2 * hourly.window());
    }
}

/// Limits of one name and one window are one, whatever their units; those of other windows are
/// reset, blocked and settled apart.
pub(super) async fn limits_of_one_name_and_other_windows_are_apart(test: Trial) {
    let test = test.without_refusal_cache();
    let (hourly, lowered, daily) = (
        Limit::per_hour("api", 10),
        Limit::per_hour("api", 5),
        Limit::per_day("api", 10),
    );
    let both = plain_check(&hourly, 3).and(charge(&daily, 4)).unwrap();
    let admitted = test.take(&both).await;
    let used = async || {
        (
            test.used(&hourly).await,
            test.used(&lowered).await,
            test.used(&daily).await,
        )
    };
    assert_eq!(used().await, (3, 3, 4));
    let settlement = Settlement::new(both, &admitted, |charge| {
        (charge.limit() == &daily).then_some(7)
    });
    assert!(test.limiter.settle(settlement).await.unwrap().was_applied);
    assert_eq!(used().await, (3, 3, 7));
    test.limiter.reset(&lowered, "ada").await.unwrap();
    assert_eq!(used().await, (0, 0, 7));
    test.limiter
        .block(&hourly, "ada", seconds(60))
        .await
        .unwrap();
    assert!(!test.spend(&lowered, 1).await.is_allowed());
    assert!(test.spend(&daily, 1).await.is_allowed());
}

/// The largest and smallest numbers of a limit are counted exactly.
pub(super) async fn extreme_numbers_are_exact(test: Trial) {
    let large = Limit::per("large", Limit::MAX_UNITS, Limit::MAX_WINDOW);
    assert_eq!(
        test.spend(&large, Limit::MAX_UNITS - 1).await.remaining(),
        1
    );
    assert!(test.spend(&large, 1).await.is_allowed());
    let refused = test.spend(&large, Limit::MAX_UNITS).await;
    assert_eq!(refused.retry_after(), Some(Limit::MAX_WINDOW));

    let short = Limit::per("short", 1, Limit::MIN_WINDOW);
    assert!(test.spend(&short, 1).await.is_allowed());
    test.clock.advance(Duration::from_micros(999));
    assert_eq!(test.spend(&short, 1).await.retry_after(), Some(MICROSECOND));
}

/// A key recovers one window after the first refusal that a step back causes, even if units
/// admitted after the step leave first.
pub(super) async fn a_key_recovers_one_window_after_the_clock_steps_back(test: Trial) {
    let limit = Limit::per("calls", 10, Duration::from_secs(10));
    assert!(test.spend(&limit, 9).await.is_allowed());
    test.clock.step_back(Duration::from_secs(3_600));
    assert!(test.spend(&limit, 1).await.is_allowed());
    test.clock.advance(Duration::from_secs(1));
    assert!(
        !test.spend(&limit, 1).await.is_allowed(),
        "never more than the limit"
    );
    test.clock.advance(limit.window());
    assert_eq!(
        test.spend(&limit, 10).await.remaining(),
        0,
        "all units are free again"
    );
}

/// Logs that are longer than one read of the script, with single units and with larger costs. They
/// expire in part and as a whole.
pub(super) async fn long_logs_are_exact(test: Trial) {
    let test = test.without_refusal_cache();
    for cost in [1, 2] {
        let limit = Limit::per(
            ["single", "weighted"][usize::from(cost == 2)],
            1_200 * cost,
            Duration::from_secs(10),
        );
        for _ in 0..1_200 {
            assert!(test.spend(&limit, cost).await.is_allowed());
            test.clock.advance(Duration::from_millis(1));
        }
        // A store may look at a hundred entries for a retry time, or at more.
        let leaves = |entry: u64| Duration::from_millis(10_000 - 1_200 + entry - 1);
        for entries in [1, 2, 99, 100, 900] {
            let retry_after = test
                .spend(&limit, entries * cost)
                .await
                .retry_after()
                .unwrap();
            let least = if cost == 1 { entries } else { entries.min(100) };
            assert!(
                (leaves(least)..=leaves(entries)).contains(&retry_after),
                "{entries} of {cost}: {retry_after:?}"
            );
        }

        test.clock.advance(leaves(700));
        assert_eq!(test.used(&limit).await, 500 * cost, "700 are gone");
        assert_eq!(
            test.spend(&limit, 701 * cost).await.retry_after(),
            Some(Duration::from_millis(1))
        );
        test.clock.advance(Duration::from_millis(499));
        assert_eq!(test.used(&limit).await, cost, "one entry is left");
        test.clock.advance(Duration::from_millis(1));
        assert_eq!(test.used(&limit).await, 0);

        for _ in 0..600 {
            assert!(test.spend(&limit, cost).await.is_allowed());
        }
        test.clock.advance(limit.window());
        assert_eq!(
            test.spend(&limit, 1_200 * cost).await.binding().used,
            1_200 * cost,
            "all entries leave at once"
        );
    }
}
