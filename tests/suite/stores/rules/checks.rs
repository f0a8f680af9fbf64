//! Checks: several limits and keys are decided together, and what a check spends is what it
//! reports.

use std::time::Duration;

use super::trial::{Trial, charge, check_of, to_the_start_of_a_window};
use tower_sliding_window::{Charge, Check, Key, Limit, settlement::Settlement};

const TRIED_WINDOW: Duration = Duration::from_secs(60);

/// A check of several charges is admitted whole or refused whole, and reports which charge refused.
pub(super) async fn several_limits_are_all_or_nothing(test: Trial) {
    let (small, large) = (
        Limit::per_minute("small", 1),
        Limit::per_minute("large", 10),
    );
    assert!(
        test.spend_all(&[large.clone(), small.clone()], 1)
            .await
            .is_allowed()
    );
    let refused = test.spend_all(&[large.clone(), small.clone()], 1).await;
    let refusing: Vec<&str> = refused
        .statuses()
        .filter(|status| status.retry_after().is_some())
        .map(|status| status.limit.name())
        .collect();
    assert_eq!(refusing, ["small"]);
    assert_eq!(
        refused.binding().limit,
        small,
        "the binding limit is the one that refused"
    );
    assert_eq!(
        test.used(&large).await,
        1,
        "a refusal takes nothing from the others"
    );
}

/// The same over several keys, with a cost for each.
pub(super) async fn several_keys_and_costs_are_all_or_nothing(test: Trial) {
    let limit = Limit::per_minute("calls", 10);
    let pair = |ada, bob| {
        let charge = |key, cost| Charge::new(limit.clone(), key, cost).unwrap();
        test.limiter.check_all(
            Check::new(charge("ada", ada))
                .and(charge("bob", bob))
                .unwrap(),
        )
    };
    assert!(pair(4, 8).await.unwrap().is_allowed());
    assert!(!pair(1, 3).await.unwrap().is_allowed());
    assert!(pair(6, 2).await.unwrap().is_allowed());
    let used: Vec<u64> = pair(0, 0)
        .await
        .unwrap()
        .statuses()
        .map(|status| status.used)
        .collect();
    assert_eq!(used, [10, 10]);
}

/// A check with cost 0 is never refused and changes nothing.
pub(super) async fn peeking_spends_nothing(test: Trial) {
    let limit = Limit::per_minute("calls", 3);
    let empty = test.limiter.peek(&limit, "ada").await.unwrap();
    assert_eq!(
        (
            empty.binding().used,
            empty.remaining(),
            empty.binding().reset_after()
        ),
        (0, 3, Duration::ZERO)
    );

    assert!(test.spend(&limit, 3).await.is_allowed());
    test.clock.advance(Duration::from_secs(20));
    for _ in 0..5 {
        let full = test.limiter.peek(&limit, "ada").await.unwrap();
        assert!(full.is_allowed());
        assert_eq!(
            (
                full.binding().used,
                full.remaining(),
                full.binding().reset_after()
            ),
            (3, 0, Duration::from_secs(40))
        );
    }
}

pub(super) async fn a_reset_forgets_one_key_of_one_limit(test: Trial) {
    let (one, other) = (Limit::per_minute("one", 3), Limit::per_minute("other", 3));
    assert!(
        test.spend_all(&[one.clone(), other.clone()], 2)
            .await
            .is_allowed()
    );
    assert!(
        test.limiter
            .check(&one, "bob", 2)
            .await
            .unwrap()
            .is_allowed()
    );

    test.limiter.reset(&one, "ada").await.unwrap();
    assert_eq!((test.used(&one).await, test.used(&other).await), (0, 2));
    assert_eq!(
        test.limiter.peek(&one, "bob").await.unwrap().binding().used,
        2
    );
    test.limiter.reset(&one, "nobody").await.unwrap();
}

/// Keys of different namespaces and limits of different names never share units.
pub(super) async fn keys_and_limits_are_separate(test: Trial) {
    let limit = Limit::per_minute("calls", 1);
    let keys = ["a", "b"]
        .map(Key::from)
        .into_iter()
        .chain([Key::new("ip", "a"), Key::new("i", "pa")]);
    let pairs = [("a", "bc"), ("ab", "c")]
        .map(|(first, second)| Key::from((&first.into(), &second.into())));
    for key in keys.chain(pairs) {
        assert!(
            test.limiter
                .check(&limit, key.clone(), 1)
                .await
                .unwrap()
                .is_allowed()
        );
        assert!(
            !test
                .limiter
                .check(&limit, key, 1)
                .await
                .unwrap()
                .is_allowed()
        );
    }
    assert!(
        test.limiter
            .check(&Limit::per_minute("other", 1), "a", 1)
            .await
            .unwrap()
            .is_allowed()
    );
}

/// A decision reports the limit with the fewest units left.
pub(super) async fn a_decision_reports_its_tightest_limit(test: Trial) {
    let (narrow, wide) = (Limit::per_minute("narrow", 5), Limit::per_hour("wide", 100));
    let decision = test.spend_all(&[wide.clone(), narrow.clone()], 1).await;
    assert_eq!(
        (
            &decision.binding().limit,
            decision.binding().used,
            decision.remaining()
        ),
        (&narrow, 1, 4)
    );
    assert_eq!(decision.binding().reset_after(), narrow.window());
    assert_eq!(decision.at(), test.clock.now());

    // If both have the same number left, it reports the limit that takes longer to free units.
    let (minute, hour) = (Limit::per_minute("minute", 5), Limit::per_hour("hour", 5));
    for limits in [[minute.clone(), hour.clone()], [hour.clone(), minute]] {
        assert_eq!(test.spend_all(&limits, 1).await.binding().limit, hour);
    }

    // If both refuse, it reports the limit with the longer wait.
    assert!(test.spend(&narrow, 4).await.is_allowed());
    assert!(test.spend(&wide, 99).await.is_allowed());
    let refused = test.spend_all(&[narrow, wide.clone()], 1).await;
    assert_eq!(
        (&refused.binding().limit, refused.retry_after()),
        (&wide, Some(wide.window()))
    );
}

/// A shadow charge counts if it fits, and reports if it does not. It refuses nothing.
pub(super) async fn a_shadow_limit_never_refuses(test: Trial) {
    let enforced = Limit::per_minute("enforced", 3);
    for algorithm in test.algorithms() {
        to_the_start_of_a_window(&test.clock, TRIED_WINDOW);
        let tried = Limit::per_minute("tried", 2).with_algorithm(algorithm);
        let check = check_of([charge(&tried, 1).in_shadow(), charge(&enforced, 1)]);
        for (is_allowed, refusals, used) in [
            (true, 0, [1, 1]),
            (true, 0, [2, 2]),
            (true, 1, [2, 3]),
            (false, 1, [2, 3]),
        ] {
            let decision = test.limiter.check_all(check.clone()).await.unwrap();
            assert_eq!(
                (decision.is_allowed(), decision.shadow_refusals().count()),
                (is_allowed, refusals)
            );
            assert_eq!(
                decision
                    .statuses()
                    .map(|status| status.used)
                    .collect::<Vec<_>>(),
                used,
                "{algorithm:?}"
            );
            assert_eq!(
                decision.binding().limit,
                enforced,
                "the figures are those of the limit that is enforced"
            );
            let would_wait = decision
                .shadow_refusals()
                .next()
                .and_then(|status| status.retry_after());
            assert_eq!(
                would_wait.is_some_and(|wait| !wait.is_zero()),
                refusals == 1
            );
        }
        test.limiter.reset(&enforced, "ada").await.unwrap();
    }
}

/// However many limits a check has, the last ones count as the first ones do.
pub(super) async fn many_limits_are_all_or_nothing(test: Trial) {
    let limits: Vec<Limit> = (0..12)
        .map(|number| Limit::new(format!("limit-{number}"), 2, TRIED_WINDOW).unwrap())
        .collect();
    assert!(test.spend_all(&limits, 1).await.is_allowed());
    for limit in &limits {
        assert_eq!(test.used(limit).await, 1, "{limit:?}");
    }
    // Fills one limit at a time.
    for full in &limits {
        assert!(test.spend(full, 1).await.is_allowed());
        let refused = test.spend_all(&limits, 1).await;
        assert!(!refused.is_allowed(), "{full:?} is full");
        test.limiter.reset(full, "ada").await.unwrap();
        assert!(test.spend(full, 1).await.is_allowed());
    }
    for limit in &limits {
        assert_eq!(
            test.used(limit).await,
            1,
            "a refusal has taken something: {limit:?}"
        );
    }
}

/// Keys are bytes: long ones, those that are no text, and those that differ in case.
pub(super) async fn keys_differ_in_every_byte(test: Trial) {
    let limit = Limit::per_minute("calls", 1);
    let long = [b'a'; 300];
    let mut keys = vec![
        Key::new("user", "ada"),
        Key::new("user", "Ada"),
        Key::new("USER", "ada"),
    ];
    keys.extend(
        [&[0xff_u8][..], &[0xfe], &[0], &[0, 0], &[]].map(|bytes| Key::new("bytes", bytes)),
    );
    keys.extend([0, 70, 299].map(|place| {
        let mut bytes = long;
        bytes[place] = b'b';
        Key::new("long", bytes)
    }));
    keys.push(Key::new("long", long));
    keys.extend((0..100_u8).map(|number| Key::new("number", [number])));
    for key in &keys {
        assert!(
            test.limiter
                .check(&limit, key.clone(), 1)
                .await
                .unwrap()
                .is_allowed(),
            "{key:?} shares units"
        );
    }
    for key in &keys {
        assert!(
            !test
                .limiter
                .check(&limit, key.clone(), 1)
                .await
                .unwrap()
                .is_allowed(),
            "{key:?} is forgotten"
        );
    }
}

/// An admission, a refusal, a look and a settlement have the time at which they were decided.
pub(super) async fn decisions_say_when_they_were_made(test: Trial) {
    let test = test.without_refusal_cache();
    let limit = Limit::per_minute("calls", 1);
    let check = check_of([charge(&limit, 1).reserve(TRIED_WINDOW)]);
    test.clock.advance(Duration::from_micros(1_234_567));
    let admitted = test.take(&check).await;
    assert_eq!(admitted.at(), test.clock.now(), "admitted");
    test.clock.advance(Duration::from_micros(7_001));
    assert_eq!(test.decide(&check).await.at(), test.clock.now(), "refused");
    assert_eq!(
        test.limiter.peek(&limit, "ada").await.unwrap().at(),
        test.clock.now(),
        "at no cost"
    );
    test.clock.advance(Duration::from_micros(7_003));
    let settled = test
        .limiter
        .settle(Settlement::new(check, &admitted, |_| Some(0)))
        .await
        .unwrap();
    assert_eq!(settled.decision.at(), test.clock.now(), "settled");
}
