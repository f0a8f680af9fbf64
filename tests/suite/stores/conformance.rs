//! The rules that every store must keep, one by one, with the time passed in.
//!
//! Each test runs once per store. A new store adds one line to the macro in `support`.

use std::time::Duration;

use tower_sliding_window::{AdmissionId, Charge, Check, Decision, Limit, LimitStatus, Store};

use crate::support::{Fixture, MICROSECOND, for_every_store};

const BURST: Limit = Limit::per("burst", 100, Duration::from_secs(10));
const HOURLY: Limit = Limit::per_hour("hourly", 250);
const DAILY: Limit = Limit::per_day("daily", 400);

impl<S: Store> Fixture<S> {
    async fn spend(&self, limit: &Limit, cost: u64) -> Decision {
        self.limiter.check(limit, "ada", cost).await.unwrap()
    }

    /// Decides all limits together, for one key.
    async fn spend_all(&self, limits: &[Limit], cost: u64) -> Decision {
        self.limiter.check_all(check(limits, cost)).await.unwrap()
    }

    async fn used(&self, limit: &Limit) -> u64 {
        self.limiter.peek(limit, "ada").await.unwrap().used()
    }
}

fn check(limits: &[Limit], cost: u64) -> Check {
    let mut charges = limits.iter().map(|limit| Charge::new(limit.clone(), "ada", cost).unwrap());
    let first = Check::new(charges.next().unwrap());
    charges.try_fold(first, Check::and).unwrap()
}

/// A unit admitted at `t` counts until exactly `t + window`.
async fn a_unit_leaves_exactly_one_window_later(test: Fixture<impl Store>) {
    let limit = Limit::per_minute("login", 1);
    assert!(test.spend(&limit, 1).await.is_allowed());
    test.clock.advance(limit.window() - MICROSECOND);
    assert!(!test.spend(&limit, 1).await.is_allowed());
    test.clock.advance(MICROSECOND);
    assert!(test.spend(&limit, 1).await.is_allowed());
}

/// There is no boundary at which twice the limit fits.
async fn no_span_of_one_window_admits_more_than_the_limit(test: Fixture<impl Store>) {
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

/// A check of several charges is admitted whole or refused whole, and reports which charge refused.
async fn several_limits_are_all_or_nothing(test: Fixture<impl Store>) {
    let (small, large) = (Limit::per_minute("small", 1), Limit::per_minute("large", 10));
    assert!(test.spend_all(&[large.clone(), small.clone()], 1).await.is_allowed());
    let refused = test.spend_all(&[large.clone(), small.clone()], 1).await;
    let refusing: Vec<&str> = refused
        .statuses()
        .filter(|status| status.retry_after().is_some())
        .map(|status| status.limit().name())
        .collect();
    assert_eq!(refusing, ["small"]);
    assert_eq!(refused.limit(), &small, "the binding limit is the one that refused");
    assert_eq!(test.used(&large).await, 1, "a refusal takes nothing from the others");
}

/// The same over several keys, with a cost for each.
async fn several_keys_and_costs_are_all_or_nothing(test: Fixture<impl Store>) {
    let limit = Limit::per_minute("calls", 10);
    let pair = |ada, bob| {
        let charge = |key, cost| Charge::new(limit.clone(), key, cost).unwrap();
        test.limiter.check_all(Check::new(charge("ada", ada)).and(charge("bob", bob)).unwrap())
    };
    assert!(pair(4, 8).await.unwrap().is_allowed());
    assert!(!pair(1, 3).await.unwrap().is_allowed());
    assert!(pair(6, 2).await.unwrap().is_allowed());
    let used: Vec<u64> = pair(0, 0).await.unwrap().statuses().map(LimitStatus::used).collect();
    assert_eq!(used, [10, 10]);
}

/// A refused check spends nothing that could refuse a later one.
async fn refusals_cost_nothing(test: Fixture<impl Store>) {
    let limit = Limit::per_minute("login", 2);
    assert!(test.spend(&limit, 2).await.is_allowed());
    for _ in 0..100 {
        test.clock.advance(Duration::from_millis(10));
        assert!(!test.spend(&limit, 1).await.is_allowed());
    }
    test.clock.advance(Duration::from_secs(59));
    assert!(test.spend(&limit, 2).await.is_allowed());
}

/// For costs from 1 to 100 and one to three limits: refused at `retry_after − 1 µs`, admitted at `retry_after`.
async fn retry_after_is_exact_to_the_microsecond(test: Fixture<impl Store>) {
    let test = test.without_deny_cache();
    for cost in 1..=100 {
        let limits = &[BURST, HOURLY, DAILY][..usize::try_from(cost % 3).unwrap() + 1];
        // Different costs at different times, until the cost under test does not fit either.
        for uneven in (1..=13).cycle() {
            test.clock.advance(Duration::from_micros(cost * 331));
            if !test.spend_all(limits, uneven).await.is_allowed() {
                break;
            }
        }
        let retry_after = loop {
            if let Some(retry_after) = test.spend_all(limits, cost).await.retry_after() {
                break retry_after;
            }
        };
        test.clock.advance(retry_after - MICROSECOND);
        assert!(!test.spend_all(limits, cost).await.is_allowed(), "cost {cost} admitted early");
        test.clock.advance(MICROSECOND);
        assert!(test.spend_all(limits, cost).await.is_allowed(), "cost {cost} refused at its time");
    }
}

/// The retry time waits for the entry that frees enough units, not for the oldest one.
async fn retry_after_waits_for_enough_units(test: Fixture<impl Store>) {
    let test = test.without_deny_cache();
    let limit = Limit::per_minute("calls", 10);
    for cost in [2, 3, 5] {
        assert!(test.spend(&limit, cost).await.is_allowed());
        test.clock.advance(Duration::from_secs(1));
    }
    for (cost, wait) in [(1, 57), (2, 57), (3, 58), (5, 58), (6, 59), (10, 59)] {
        let refused = test.spend(&limit, cost).await;
        assert_eq!(refused.retry_after(), Some(Duration::from_secs(wait)), "cost {cost}");
    }
}

/// A repeated id counts once, as long as its admission is in the window.
async fn a_repeated_id_counts_once(test: Fixture<impl Store>) {
    let limit = Limit::per_minute("calls", 10);
    let order = || check(std::slice::from_ref(&limit), 4).with_id(AdmissionId::from(7));
    for _ in 0..3 {
        let decision = test.limiter.check_all(order()).await.unwrap();
        assert_eq!((decision.is_allowed(), decision.used(), decision.id()), (true, 4, AdmissionId::from(7)));
    }
    assert!(test.spend(&limit, 6).await.is_allowed());
    assert!(test.limiter.check_all(order()).await.unwrap().is_allowed(), "also when the limit is used up");

    test.clock.advance(limit.window());
    assert_eq!(test.limiter.check_all(order()).await.unwrap().used(), 4, "after a window it is a new admission");
}

/// Two requests in the same microsecond are two admissions.
async fn several_admissions_fit_into_one_microsecond(test: Fixture<impl Store>) {
    let limit = Limit::per_minute("calls", 5);
    let check = check(std::slice::from_ref(&limit), 1);
    for used in 1..=5 {
        // A caller may send the same check again. Without an id, each time is a new admission.
        assert_eq!(test.limiter.check_all(check.clone()).await.unwrap().used(), used);
    }
    assert!(!test.limiter.check_all(check).await.unwrap().is_allowed());
}

/// A check with cost 0 is never refused and changes nothing.
async fn peeking_spends_nothing(test: Fixture<impl Store>) {
    let limit = Limit::per_minute("calls", 3);
    let empty = test.limiter.peek(&limit, "ada").await.unwrap();
    assert_eq!((empty.used(), empty.remaining(), empty.reset_after()), (0, 3, Duration::ZERO));

    assert!(test.spend(&limit, 3).await.is_allowed());
    test.clock.advance(Duration::from_secs(20));
    for _ in 0..5 {
        let full = test.limiter.peek(&limit, "ada").await.unwrap();
        assert!(full.is_allowed());
        assert_eq!((full.used(), full.remaining(), full.reset_after()), (3, 0, Duration::from_secs(40)));
    }
}

async fn a_reset_forgets_one_key_of_one_limit(test: Fixture<impl Store>) {
    let (one, other) = (Limit::per_minute("one", 3), Limit::per_minute("other", 3));
    assert!(test.spend_all(&[one.clone(), other.clone()], 2).await.is_allowed());
    assert!(test.limiter.check(&one, "bob", 2).await.unwrap().is_allowed());

    test.limiter.reset(&one, "ada").await.unwrap();
    assert_eq!((test.used(&one).await, test.used(&other).await), (0, 2));
    assert_eq!(test.limiter.peek(&one, "bob").await.unwrap().used(), 2);
    test.limiter.reset(&one, "nobody").await.unwrap();
}

/// Keys of different namespaces and limits of different names never share units.
async fn keys_and_limits_are_separate(test: Fixture<impl Store>) {
    use tower_sliding_window::Key;

    let limit = Limit::per_minute("calls", 1);
    let keys = ["a", "b"].map(Key::from).into_iter().chain([Key::new("ip", "a"), Key::new("i", "pa")]);
    let pairs = [Key::pair(&"a".into(), &"bc".into()), Key::pair(&"ab".into(), &"c".into())];
    for key in keys.chain(pairs) {
        assert!(test.limiter.check(&limit, key.clone(), 1).await.unwrap().is_allowed());
        assert!(!test.limiter.check(&limit, key, 1).await.unwrap().is_allowed());
    }
    assert!(test.limiter.check(&Limit::per_minute("other", 1), "a", 1).await.unwrap().is_allowed());
}

/// A raised or lowered limit applies at once to units admitted before.
async fn a_changed_limit_applies_to_the_recorded_history(test: Fixture<impl Store>) {
    let limit = |units| Limit::per_minute("plan", units);
    assert!(test.spend(&limit(10), 8).await.is_allowed());
    let lowered = test.spend(&limit(5), 1).await;
    assert_eq!((lowered.is_allowed(), lowered.used(), lowered.remaining()), (false, 8, 0));
    let raised = test.spend(&limit(20), 10).await;
    assert_eq!((raised.is_allowed(), raised.remaining()), (true, 2));
}

/// The largest and smallest numbers of a limit are counted exactly.
async fn extreme_numbers_are_exact(test: Fixture<impl Store>) {
    let large = Limit::per("large", Limit::MAX_UNITS, Limit::MAX_WINDOW);
    assert_eq!(test.spend(&large, Limit::MAX_UNITS - 1).await.remaining(), 1);
    assert!(test.spend(&large, 1).await.is_allowed());
    let refused = test.spend(&large, Limit::MAX_UNITS).await;
    assert_eq!(refused.retry_after(), Some(Limit::MAX_WINDOW));

    let short = Limit::per("short", 1, Limit::MIN_WINDOW);
    assert!(test.spend(&short, 1).await.is_allowed());
    test.clock.advance(Duration::from_micros(999));
    assert_eq!(test.spend(&short, 1).await.retry_after(), Some(MICROSECOND));
}

/// A key recovers one window after the first refusal that a step back causes, even if units admitted after the step
/// leave first.
async fn a_key_recovers_one_window_after_the_clock_steps_back(test: Fixture<impl Store>) {
    let limit = Limit::per("calls", 10, Duration::from_secs(10));
    assert!(test.spend(&limit, 9).await.is_allowed());
    test.clock.step_back(Duration::from_secs(3_600));
    assert!(test.spend(&limit, 1).await.is_allowed());
    test.clock.advance(Duration::from_secs(1));
    assert!(!test.spend(&limit, 1).await.is_allowed(), "never more than the limit");
    test.clock.advance(limit.window());
    assert_eq!(test.spend(&limit, 10).await.remaining(), 0, "all units are free again");
}

/// Logs that are longer than one read of the script, with single units and with larger costs. They expire in part and
/// as a whole.
async fn long_logs_are_exact(test: Fixture<impl Store>) {
    let test = test.without_deny_cache();
    for cost in [1, 2] {
        let limit = Limit::per(["single", "weighted"][usize::from(cost == 2)], 1_200 * cost, Duration::from_secs(10));
        for _ in 0..1_200 {
            assert!(test.spend(&limit, cost).await.is_allowed());
            test.clock.advance(Duration::from_millis(1));
        }
        // A store may look at a hundred entries for a retry time, or at more.
        let leaves = |entry: u64| Duration::from_millis(10_000 - 1_200 + entry - 1);
        for entries in [1, 2, 99, 100, 900] {
            let retry_after = test.spend(&limit, entries * cost).await.retry_after().unwrap();
            let least = if cost == 1 { entries } else { entries.min(100) };
            assert!((leaves(least)..=leaves(entries)).contains(&retry_after), "{entries} of {cost}: {retry_after:?}");
        }

        test.clock.advance(leaves(700));
        assert_eq!(test.used(&limit).await, 500 * cost, "700 are gone");
        assert_eq!(test.spend(&limit, 701 * cost).await.retry_after(), Some(Duration::from_millis(1)));
        test.clock.advance(Duration::from_millis(499));
        assert_eq!(test.used(&limit).await, cost, "one entry is left");
        test.clock.advance(Duration::from_millis(1));
        assert_eq!(test.used(&limit).await, 0);

        for _ in 0..600 {
            assert!(test.spend(&limit, cost).await.is_allowed());
        }
        test.clock.advance(limit.window());
        assert_eq!(test.spend(&limit, 1_200 * cost).await.used(), 1_200 * cost, "all entries leave at once");
    }
}

/// A decision reports the limit with the fewest units left.
async fn a_decision_reports_its_tightest_limit(test: Fixture<impl Store>) {
    let (narrow, wide) = (Limit::per_minute("narrow", 5), Limit::per_hour("wide", 100));
    let decision = test.spend_all(&[wide.clone(), narrow.clone()], 1).await;
    assert_eq!((decision.limit(), decision.used(), decision.remaining()), (&narrow, 1, 4));
    assert_eq!(decision.reset_after(), narrow.window());
    assert_eq!(decision.at(), test.clock.now());

    // If both have the same number left, it reports the limit that takes longer to free units.
    let (minute, hour) = (Limit::per_minute("minute", 5), Limit::per_hour("hour", 5));
    for limits in [[minute.clone(), hour.clone()], [hour.clone(), minute]] {
        assert_eq!(test.spend_all(&limits, 1).await.limit(), &hour);
    }

    // If both refuse, it reports the limit with the longer wait.
    assert!(test.spend(&narrow, 4).await.is_allowed());
    assert!(test.spend(&wide, 99).await.is_allowed());
    let refused = test.spend_all(&[narrow, wide.clone()], 1).await;
    assert_eq!((refused.limit(), refused.retry_after()), (&wide, Some(wide.window())));
}

for_every_store! {
    a_unit_leaves_exactly_one_window_later
    no_span_of_one_window_admits_more_than_the_limit
    several_limits_are_all_or_nothing
    several_keys_and_costs_are_all_or_nothing
    refusals_cost_nothing
    retry_after_is_exact_to_the_microsecond
    retry_after_waits_for_enough_units
    a_repeated_id_counts_once
    several_admissions_fit_into_one_microsecond
    peeking_spends_nothing
    a_reset_forgets_one_key_of_one_limit
    keys_and_limits_are_separate
    a_changed_limit_applies_to_the_recorded_history
    extreme_numbers_are_exact
    a_key_recovers_one_window_after_the_clock_steps_back
    long_logs_are_exact
    a_decision_reports_its_tightest_limit
}
