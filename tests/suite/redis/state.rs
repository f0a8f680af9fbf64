//! The data in Redis after each kind of operation: keys, entries, scores, expiry, memory.

use std::{
    hint,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use tokio::time::sleep;
use tower_sliding_window::{
    Algorithm, Charge, Check, Limit, Limiter, check::AdmissionId, settlement::Settlement,
    store::ManualClock,
};

use crate::support::{TEST_TIMEOUT, ms, redis_server::RedisServer, seconds, to_next_window};

const LOGIN: Limit = Limit::per("login", 3, Duration::from_secs(10));

/// The time by which a key outlives its last unit, in milliseconds.
const SLACK: i64 = 1_000;

/// The same by the clock of a test.
const SLACK_OF_TESTS: i64 = 60_000;

/// A limiter that uses the server's clock.
fn limiter(server: &RedisServer) -> Limiter {
    Limiter::new(server.store().build().unwrap()).deadline(TEST_TIMEOUT)
}

/// The members with their scores: the sum if there is one, then the oldest first.
fn entries(server: &RedisServer, key: &str) -> Vec<(Vec<u8>, i64)> {
    server.run(&format!("ZREVRANGE {key} 0 -1 WITHSCORES"))
}

/// Milliseconds until the key expires.
fn ttl(server: &RedisServer, key: &str) -> i64 {
    server.run(&format!("PTTL {key}"))
}

fn millis(duration: Duration) -> i64 {
    duration.as_millis().try_into().unwrap()
}

/// The time of the server's clock.
fn micros(server: &RedisServer) -> i64 {
    let (seconds, micros) = server.run::<(i64, i64)>("TIME");
    seconds * 1_000_000 + micros
}

#[tokio::test]
async fn an_admission_is_one_entry_and_the_sum() {
    let server = RedisServer::start();
    assert!(
        limiter(&server)
            .check(&LOGIN, "ada", 1)
            .await
            .unwrap()
            .is_allowed()
    );
    let key = server.only_key();
    assert_eq!(
        entries(&server, &key).len(),
        1,
        "as long as every entry is one unit, their number is the sum"
    );

    let decision = limiter(&server).check(&LOGIN, "ada", 2).await.unwrap();
    assert!(
        key.starts_with("tsw1:{") && key.ends_with("}:login/10s"),
        "{key}"
    );
    let entries = entries(&server, &key);
    assert_eq!(entries[0], (b"used".to_vec(), 3));
    assert_eq!(entries[1].0.len(), 8, "a cost of 1 is not written");
    assert_eq!(
        entries[2].0,
        [&decision.id().0.to_be_bytes()[..], b"2"].concat()
    );
    let at = decision
        .at()
        .duration_since(UNIX_EPOCH)
        .unwrap()
        .as_micros();
    assert_eq!(u128::try_from(-entries[2].1).unwrap(), at);
}

/// The expiry is one window plus the slack after a single entry, and two windows after the oldest
/// of several. Before Redis 7.0 scripts cannot read it, so it is one window after each entry.
#[tokio::test]
async fn the_expiry_outlives_every_entry_and_is_rarely_moved() {
    let server = RedisServer::start();
    let limiter = limiter(&server);
    let limit = Limit::per("calls", 100, Duration::from_millis(30_001));
    let is_telling = !server.is_before_7();
    let expiry = |key: &str| match is_telling {
        true => server.run::<i64>(&format!("PEXPIRETIME {key}")),
        false => {
            let (now, left) = (micros(&server) / 1_000, ttl(&server, key));
            now + left
        }
    };
    // The two commands run at different times.
    let tolerance = if is_telling {
        0..1_000
    } else {
        -100_000..100_000
    };
    let mut oldest = None;
    for (cost, windows) in [(1, 1), (1, 2), (1, 2), (2, 2), (1, 2)] {
        let windows = if is_telling { windows } else { 1 };
        let decision = limiter.check(&limit, "ada", cost).await.unwrap();
        let at = i64::try_from(
            decision
                .at()
                .duration_since(UNIX_EPOCH)
                .unwrap()
                .as_micros(),
        )
        .unwrap();
        let from = if windows == 2 { oldest.unwrap() } else { at };
        oldest = oldest.or(Some(at));
        let late = (expiry(&server.only_key()) - windows * 30_001 - SLACK) * 1_000 - from;
        assert!(tolerance.contains(&late), "{windows} windows: {late}");
        sleep(Duration::from_millis(5)).await;
    }
}

/// An admission moves the expiry only if it must, in checks of one charge and of several.
#[tokio::test]
async fn a_late_enough_expiry_is_not_moved() {
    let server = RedisServer::start();
    let limiter = limiter(&server);
    let charge = |name| Charge::new(Limit::per_day(name, 100), "ada", 1).unwrap();
    let checks = [
        Check::new(charge("alone")),
        Check::new(charge("both")).and(charge("too")).unwrap(),
    ];
    for (check, logs) in checks.into_iter().zip([1, 2]) {
        server.run::<()>("CONFIG RESETSTAT");
        for _ in 0..10 {
            assert!(limiter.check_all(check.clone()).await.unwrap().is_allowed());
        }
        let stats: String = server.run("INFO commandstats");
        // The first two admissions move it, or all of them where a script cannot read it.
        let admissions = if server.is_before_7() { 10 } else { 2 };
        let moved = format!("cmdstat_pexpireat:calls={},", admissions * logs);
        assert!(
            stats.contains(&moved),
            "by the first {admissions} admissions: {stats}"
        );
        assert_eq!(stats.contains("cmdstat_pexpiretime"), !server.is_before_7());
        // The expiry tells the time of the oldest entry, also to the second check of the key.
        if logs == 1 && !server.is_before_7() {
            assert!(!stats.contains("cmdstat_zrevrange"), "{stats}");
        }
    }
}

/// The expiry of two entries does not stay when one of them is given back: else the next check,
/// within a millisecond of the other one's end, would take it for the expiry of a single entry, and
/// report a reset that is a window late.
#[tokio::test]
async fn the_reset_beside_an_entry_that_is_just_leaving_is_its_end() {
    let server = RedisServer::start();
    let limiter = limiter(&server);
    let window = Duration::from_millis(60);
    let mut seen = 0;
    for round in 0..200 {
        let check = Check::new(
            Charge::new(Limit::per("short", 100, window), format!("{round}"), 1).unwrap(),
        );
        let leaves = limiter.check_all(check.clone()).await.unwrap().at() + window;
        let second = limiter.check_all(check.clone()).await.unwrap();
        limiter
            .settle(Settlement::new(check.clone(), &second, |_| Some(0)))
            .await
            .unwrap();
        while SystemTime::now() + Duration::from_micros(400 + round % 6 * 100) < leaves {
            hint::spin_loop();
        }
        let third = limiter.check_all(check).await.unwrap();
        let third_status = third.binding();
        if third_status.used == 2 {
            let left = leaves.duration_since(third.at()).unwrap();
            assert!(
                third_status.reset_after() <= left + Duration::from_millis(1),
                "{third_status:?}, {left:?}"
            );
            seen += 1;
        }
        if seen == 5 {
            return;
        }
    }
    panic!("seen {seen} times only");
}

/// Each window has a key of its own, so none brings the expiry of another forward.
#[tokio::test]
async fn a_shorter_window_leaves_the_expiry_of_a_longer_one() {
    let server = RedisServer::start();
    let limiter = limiter(&server).refusal_cache(Duration::ZERO);
    let [long, short] = [60, 1].map(|window| Limit::per("shared", 5, seconds(window)));
    for _ in 0..5 {
        assert!(limiter.check(&long, "ada", 1).await.unwrap().is_allowed());
    }
    let key = server.only_key();
    let with_id = Check::new(Charge::new(short, "ada", 1).unwrap()).with_id(AdmissionId::fresh());
    assert_eq!(
        limiter.check_all(with_id).await.unwrap().binding().used,
        1,
        "nothing of the longer window"
    );
    assert_eq!(server.keys().len(), 2);
    let lives = Duration::from_millis(ttl(&server, &key).unsigned_abs());
    assert!(lives > seconds(60), "{lives:?}");
    sleep(Duration::from_millis(3_300)).await;
    assert!(
        !limiter.check(&long, "ada", 1).await.unwrap().is_allowed(),
        "all are used in the last 4 s of 60"
    );
}

/// An admission never brings an expiry forward: not after a step back of the clock, which leaves
/// entries of a later part of the window. Redis 6.2 does not say when a key expires.
#[tokio::test]
async fn an_admission_after_a_step_back_leaves_a_later_expiry() {
    let server = RedisServer::start();
    let limiter = limiter(&server);
    let limit = Limit::per("calls", 10, seconds(560)).with_algorithm(Algorithm::compact_log(16));
    assert!(limiter.check(&limit, "ada", 1).await.unwrap().is_allowed());
    let key = server.only_key();
    let ahead = -entries(&server, &key).last().unwrap().1 + 3 * 40_000_000;
    server.run::<()>(&format!("ZADD {key} -{ahead} zz6 7 used"));
    server.run::<()>(&format!(
        "PEXPIREAT {key} {}",
        ahead / 1_000 + 560_000 + SLACK
    ));
    assert_eq!(
        limiter
            .check(&limit, "ada", 1)
            .await
            .unwrap()
            .binding()
            .used,
        8
    );
    let left = ahead / 1_000 + 560_000 - micros(&server) / 1_000;
    assert_eq!(
        ttl(&server, &key) >= left,
        !server.is_before_7(),
        "the entry ahead leaves in {left} ms"
    );
}

/// If the expiry was changed from outside, some figures may be wrong, but no decision is.
#[tokio::test]
async fn no_decision_depends_on_the_expiry() {
    let server = RedisServer::start();
    let limiter = limiter(&server).refusal_cache(Duration::ZERO);
    for (round, costs) in [&[5][..], &[1, 1, 1, 1, 1], &[1, 2, 1, 1]]
        .into_iter()
        .enumerate()
    {
        for life in [5_000, 10_900, 11_500, 16_000, 20_990, 3_600_000] {
            let key = format!("{round} {life}");
            let limit = Limit::per("calls", 6, Duration::from_secs(10));
            for cost in costs {
                assert!(
                    limiter
                        .check(&limit, key.as_str(), *cost)
                        .await
                        .unwrap()
                        .is_allowed()
                );
            }
            let redis_key = server.keys().remove(0);
            server.run::<()>(&format!("PEXPIRE {redis_key} {life}"));
            let allowed = async || {
                limiter
                    .check(&limit, key.as_str(), 1)
                    .await
                    .unwrap()
                    .is_allowed()
            };
            assert_eq!(
                [allowed().await, allowed().await, allowed().await],
                [true, false, false],
                "{costs:?} {life}"
            );
            server.run::<()>("FLUSHALL");
        }
    }
}

/// A limit under another window counts in a key of its own, with an expiry of its own.
#[tokio::test]
async fn a_check_under_another_window_leaves_that_of_the_first_alone() {
    let server = RedisServer::start();
    let limiter = limiter(&server).refusal_cache(Duration::ZERO);
    let limit = |millis| Limit::per("calls", 2, Duration::from_millis(millis));
    for (first, second) in [
        (20_000, 3_600_000),
        (3_600_000, 20_000),
        (3_600_000, 50),
        (3_600_000, 1),
    ] {
        assert!(
            limiter
                .check(&limit(first), "ada", 1)
                .await
                .unwrap()
                .is_allowed()
        );
        let key = server.only_key();
        sleep(Duration::from_millis(60)).await;
        let decision = limiter.check(&limit(second), "ada", 1).await.unwrap();
        assert_eq!(
            (decision.is_allowed(), decision.binding().used),
            (true, 1),
            "{first} {second}"
        );
        for (key, window) in server
            .keys()
            .iter()
            .map(|one| (one, if *one == key { first } else { second }))
        {
            let left = ttl(&server, key);
            assert!(
                left > i64::try_from(window).unwrap() + SLACK - 500,
                "{first} {second}: {left} of {key}"
            );
        }
        assert_eq!(
            limiter
                .check(&limit(first), "ada", 1)
                .await
                .unwrap()
                .binding()
                .used,
            2,
            "{first} {second}"
        );
        assert!(
            !limiter
                .check(&limit(first), "ada", 1)
                .await
                .unwrap()
                .is_allowed(),
            "{first} {second}"
        );
        server.run::<()>("FLUSHALL");
    }
}

/// A key needs its whole expiry from the first unit of an entry on, since units that join the entry
/// leave the expiry as it is. Before Redis 7.0, an admission sets the expiry without reading it. If
/// the clock has stepped back over a boundary, the expiry is too early, so the next unit moves it.
#[tokio::test]
async fn a_key_outlives_the_units_that_join_an_entry() {
    let server = RedisServer::start();
    let limiter = limiter(&server);
    for algorithm in [
        Algorithm::compact_log(3),
        Algorithm::SLIDING_WINDOW_COUNTER,
        Algorithm::FIXED_WINDOW,
    ] {
        let limit = Limit::per_day("calls", 100).with_algorithm(algorithm);
        assert!(limiter.check(&limit, "ada", 1).await.unwrap().is_allowed());
        let key = server.only_key();
        let needed = ttl(&server, &key);
        let counts_for = limiter
            .peek(&limit, "ada")
            .await
            .unwrap()
            .statuses()
            .next()
            .unwrap()
            .reset_after();
        assert!(
            needed > millis(counts_for) + SLACK - 500,
            "{algorithm:?}: {needed} of {counts_for:?}"
        );
        if server.is_before_7() {
            server.run::<()>(&format!("PEXPIRE {key} 20000"));
        }
        assert_eq!(
            limiter
                .check(&limit, "ada", 1)
                .await
                .unwrap()
                .binding()
                .used,
            2,
            "{algorithm:?}"
        );
        let ttl = ttl(&server, &key);
        assert!(ttl > needed - 20_000, "{algorithm:?}: {ttl} of {needed}");
        server.run::<()>("FLUSHALL");
    }
}

#[tokio::test]
async fn a_cost_of_ten_thousand_is_one_entry() {
    let server = RedisServer::start();
    assert!(
        limiter(&server)
            .check(&Limit::per_day("quota", 20_000), "ada", 10_000)
            .await
            .unwrap()
            .is_allowed()
    );
    let key = server.only_key();
    assert_eq!(entries(&server, &key).len(), 2);
    assert_eq!(entries(&server, &key)[0].1, 10_000);
}

#[tokio::test]
async fn a_refusal_adds_nothing_and_moves_no_expiry() {
    let server = RedisServer::start();
    let limiter = limiter(&server);
    assert!(limiter.check(&LOGIN, "ada", 3).await.unwrap().is_allowed());
    let key = server.only_key();
    // An expiry that differs clearly from the one that an admission would set.
    server.run::<()>(&format!("PEXPIRE {key} 5000"));
    let before = entries(&server, &key);

    for _ in 0..10 {
        assert!(!limiter.check(&LOGIN, "ada", 1).await.unwrap().is_allowed());
        assert!(limiter.peek(&LOGIN, "ada").await.unwrap().is_allowed());
    }
    assert_eq!(entries(&server, &key), before);
    assert!(ttl(&server, &key) <= 5_000);
}

#[tokio::test]
async fn a_refusal_by_one_limit_leaves_no_key_for_the_others() {
    let server = RedisServer::start();
    let limiter = limiter(&server);
    assert!(limiter.check(&LOGIN, "ada", 3).await.unwrap().is_allowed());
    let charge = |limit: &Limit| Charge::new(limit.clone(), "ada", 1).unwrap();
    let both = Check::new(charge(&Limit::per_day("daily", 100)))
        .and(charge(&LOGIN))
        .unwrap();
    assert!(!limiter.check_all(both).await.unwrap().is_allowed());
    assert!(server.only_key().ends_with(":login/10s"));
}

#[tokio::test]
async fn peeking_and_resetting_leave_no_key() {
    let server = RedisServer::start();
    let limiter = limiter(&server);
    assert!(limiter.peek(&LOGIN, "ada").await.unwrap().is_allowed());
    assert_eq!(server.keys(), [""; 0]);
    assert!(limiter.check(&LOGIN, "ada", 1).await.unwrap().is_allowed());
    limiter.reset(&LOGIN, "ada").await.unwrap();
    assert_eq!(server.keys(), [""; 0]);
}

#[tokio::test]
async fn expired_entries_are_dropped_and_the_sum_follows() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let store = server.store().clock(&clock).build().unwrap();
    let limiter = Limiter::new(store).deadline(TEST_TIMEOUT);
    for cost in [1, 2] {
        assert!(
            limiter
                .check(&LOGIN, "ada", cost)
                .await
                .unwrap()
                .is_allowed()
        );
        clock.advance(Duration::from_secs(4));
    }
    let key = server.only_key();
    // The first entry has expired and the second has not. A refused check drops expired entries,
    // too.
    clock.advance(Duration::from_secs(2));
    assert!(!limiter.check(&LOGIN, "ada", 2).await.unwrap().is_allowed());
    assert_eq!(
        entries(&server, &key)
            .iter()
            .map(|entry| entry.0.len())
            .collect::<Vec<_>>(),
        [4, 9]
    );
    assert_eq!(entries(&server, &key)[0].1, 2);

    // All entries have expired. A check that spends nothing deletes the key.
    clock.advance(Duration::from_secs(10));
    assert!(limiter.peek(&LOGIN, "ada").await.unwrap().is_allowed());
    assert_eq!(server.keys(), [""; 0]);
}

/// The server's clock cannot be set, so the test writes entries into the past.
#[tokio::test]
async fn an_admission_drops_expired_entries_by_the_servers_clock() {
    let server = RedisServer::start();
    let limiter = limiter(&server);
    let limit = Limit::per("calls", 1_000, Duration::from_secs(10));
    let charge = |limit: &Limit, cost| Charge::new(limit.clone(), "ada", cost).unwrap();
    let other = Limit::per_day("other", 1_000);
    assert!(limiter.check(&limit, "ada", 1).await.unwrap().is_allowed());
    let key = server.only_key();
    for (gone, left) in [(0, 1), (1, 0), (1, 2), (3, 1), (150, 2)] {
        for (units, cost) in [(1, 1), (1, 3), (2, 1), (2, 3)] {
            let (begun, now) = (Instant::now(), micros(&server));
            let before = |micros: i64, name: &str, number: i64| {
                let weight = if units == 1 {
                    String::new()
                } else {
                    units.to_string()
                };
                format!(
                    " {} {name}{number:04}{weight}",
                    micros + 1_000 * number - now
                )
            };
            let entries_gone = (0..gone).map(|number| before(10_000_000, "gone", number));
            let entries_left = (0..left).map(|number| before(5_000_000, "left", number));
            let sum = if units == 1 {
                String::new()
            } else {
                format!(" {} used", units * (gone + left))
            };
            server.run::<()>(&format!("DEL {key}"));
            server.run::<()>(&format!(
                "ZADD {key}{sum}{}",
                entries_gone.chain(entries_left).collect::<String>()
            ));
            // That of a single entry of that time: too soon for a new one.
            let life = if left == 0 { 1_000 } else { 6_000 };
            server.run::<()>(&format!("PEXPIREAT {key} {}", now / 1_000 + life));

            let alone = Check::new(charge(&limit, cost));
            let with_another = Check::new(charge(&other, 1))
                .and(charge(&limit, cost))
                .unwrap();
            for (again, check) in [alone, with_another].into_iter().enumerate() {
                let decision = limiter.check_all(check).await.unwrap();
                let status = decision
                    .statuses()
                    .find(|status| status.limit.name() == "calls")
                    .unwrap();
                let used = u64::try_from(units * left).unwrap() + cost * (again as u64 + 1);
                let case = format!("{gone} gone, {left} left, of {units}, and {cost}");
                assert_eq!((decision.is_allowed(), status.used), (true, used), "{case}");

                let (sums, entries): (Vec<_>, Vec<_>) = entries(&server, &key)
                    .into_iter()
                    .partition(|(member, _)| member == b"used");
                // A log whose entries have all expired starts without a sum.
                let is_summed = units > 1 && left > 0 || cost > 1;
                assert_eq!(
                    sums.iter()
                        .map(|(_, sum)| sum.unsigned_abs())
                        .collect::<Vec<_>>(),
                    if is_summed { vec![used] } else { vec![] },
                    "{case}"
                );
                assert_eq!(
                    entries.len(),
                    usize::try_from(left).unwrap() + 1 + again,
                    "{case}"
                );
                assert!(
                    !entries
                        .iter()
                        .any(|(member, _)| member.starts_with(b"gone")),
                    "{case}"
                );
                let passed = begun.elapsed();
                assert!(
                    ttl(&server, &key) + millis(passed) >= 10_000,
                    "{case}: the new entry lives for a window"
                );
                // The oldest entry leaves 10 s after it was added. The reset time may be off by a
                // millisecond.
                let resets =
                    decision.at().duration_since(UNIX_EPOCH).unwrap() + status.reset_after();
                let late = millis(resets) - now / 1_000 - if left > 0 { 5_000 } else { 10_000 };
                let latest = if left > 0 { 1 } else { millis(passed) + 1 };
                assert!(
                    (-1..=latest).contains(&late),
                    "{case}: {late} ms late, {status:?}"
                );
            }
        }
    }
}

/// No clock can be passed in here. Another clock has written the entry ahead of the server's time,
/// with and without the expiry that goes with it.
#[tokio::test]
async fn an_entry_ahead_of_the_servers_clock_counts_from_now() {
    let server = RedisServer::start();
    let limiter = limiter(&server).refusal_cache(Duration::ZERO);
    assert!(limiter.check(&LOGIN, "ada", 1).await.unwrap().is_allowed());
    let key = server.only_key();
    for (is_reported, longest) in [(false, 20_001 + SLACK), (true, 25_000 + SLACK)] {
        server.run::<()>(&format!("DEL {key}"));
        let ahead = micros(&server) + 5_000_000;
        server.run::<()>(&format!("ZADD {key} {} another1", -ahead));
        if is_reported {
            server.run::<()>(&format!(
                "PEXPIREAT {key} {}",
                ahead / 1_000 + 20_000 + SLACK
            ));
        }
        for used in [2, 3, 3] {
            let decision = limiter.check(&LOGIN, "ada", 1).await.unwrap();
            assert_eq!(decision.binding().used, used);
            assert!(
                decision.binding().reset_after() <= LOGIN.window(),
                "{decision:?}"
            );
            let ttl = ttl(&server, &key);
            // Two windows after the newest admission or the entry ahead. Expiries are whole
            // milliseconds, rounded up.
            assert!((10_000..=longest).contains(&ttl), "{used}: {ttl}");
        }
    }
}

/// By the server's own clock, whatever operations the key has seen.
#[tokio::test]
async fn keys_expire_after_the_window_and_the_slack() {
    let server = RedisServer::start();
    let limiter = limiter(&server);
    let limit = |name| Limit::per(name, 2, Duration::from_millis(200));
    for key in ["ada", "bob"] {
        for cost in [1, 1, 1, 2] {
            let _ = limiter
                .check(&limit("admitted-and-refused"), key, cost)
                .await
                .unwrap();
        }
        assert!(
            limiter
                .peek(&limit("peeked"), key)
                .await
                .unwrap()
                .is_allowed()
        );
        assert!(
            limiter
                .check(&limit("reset"), key, 1)
                .await
                .unwrap()
                .is_allowed()
        );
        limiter.reset(&limit("reset"), key).await.unwrap();
    }
    assert_eq!(server.keys().len(), 2);

    let last_unit = Instant::now();
    while !server.keys().is_empty() {
        sleep(Duration::from_millis(20)).await;
        assert!(last_unit.elapsed() < TEST_TIMEOUT);
    }
}

/// A late settlement counts from the admission, and the expiry of its key follows that.
#[tokio::test]
async fn a_settlement_does_not_extend_the_expiry() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let limiter =
        Limiter::new(server.store().clock(&clock).build().unwrap()).deadline(TEST_TIMEOUT);
    // The middle of a fixed window.
    to_next_window(&clock, seconds(10));
    clock.advance(seconds(5));
    for algorithm in [
        Algorithm::SLIDING_LOG,
        Algorithm::compact_log(3),
        Algorithm::SLIDING_WINDOW_COUNTER,
    ] {
        let limit = Limit::per("calls", 100, Duration::from_secs(10)).with_algorithm(algorithm);
        let check = Check::new(Charge::new(limit, "ada", 5).unwrap()).with_id(AdmissionId(7));
        let decision = limiter.check_all(check.clone()).await.unwrap();
        // In the next window, just before the admission expires.
        clock.advance(Duration::from_secs(9));
        let settled = limiter
            .settle(Settlement::new(check, &decision, |_| Some(2)))
            .await
            .unwrap();
        assert_eq!(
            (settled.was_applied, settled.decision.binding().used),
            (true, 2),
            "{algorithm:?}"
        );
        let life = 9_000 + ttl(&server, &server.only_key());
        assert!(
            life <= 2 * 10_000 + SLACK_OF_TESTS,
            "{algorithm:?}: {life} after the admission"
        );
        server.run::<()>("FLUSHALL");
        clock.advance(Duration::from_secs(21));
    }
}

/// After the clock has stepped back, entries and keys live at most one window plus the slack.
#[tokio::test]
async fn future_entries_are_moved_to_now_by_the_refusal_they_cause() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let store = server.store().clock(&clock).build().unwrap();
    let limiter = Limiter::new(store).deadline(TEST_TIMEOUT);
    assert!(limiter.check(&LOGIN, "ada", 3).await.unwrap().is_allowed());
    let key = server.only_key();
    server.run::<()>(&format!("PEXPIRE {key} 3600000"));

    clock.step_back(Duration::from_secs(3_600));
    let refused = limiter.check(&LOGIN, "ada", 1).await.unwrap();
    assert_eq!(refused.retry_after(), Some(LOGIN.window()));
    let now = refused.at().duration_since(UNIX_EPOCH).unwrap().as_micros();
    assert_eq!(u128::try_from(-entries(&server, &key)[1].1).unwrap(), now);
    assert!(ttl(&server, &key) <= 10_000 + SLACK_OF_TESTS);
}

/// The bytes of a key whose limit was spent in full, evenly over its window.
async fn bytes_spent_in_full(units: u64, algorithm: Algorithm) -> u64 {
    const STEPS: u64 = 1_000;
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let store = server.store().clock(&clock).build().unwrap();
    let limiter = Limiter::new(store)
        .deadline(TEST_TIMEOUT)
        .refusal_cache(Duration::ZERO);
    let limit = Limit::per("calls", units, Duration::from_secs(1_000)).with_algorithm(algorithm);
    let steps = STEPS.min(units);
    let mut admitted = 0;
    for _ in 0..steps {
        let cost = units / steps;
        admitted += if limiter
            .check(&limit, "ada", cost)
            .await
            .unwrap()
            .is_allowed()
        {
            cost
        } else {
            0
        };
        clock.advance(limit.window() / u32::try_from(steps).unwrap());
    }
    assert!(admitted > units / 2);
    server.run(&format!("MEMORY USAGE {} SAMPLES 0", server.only_key()))
}

/// The figures of the table in the docs of `Algorithm`.
#[tokio::test]
async fn the_documented_memory_is_enough() {
    for (algorithm, most) in [
        (Algorithm::compact_log(128), [3_072; 3]),
        (Algorithm::compact_log(16), [512; 3]),
        (Algorithm::SLIDING_WINDOW_COUNTER, [300; 3]),
        (Algorithm::FIXED_WINDOW, [300; 3]),
    ] {
        for (units, most) in [100, 1_000, 1_000_000].into_iter().zip(most) {
            let bytes = bytes_spent_in_full(units, algorithm).await;
            println!("{algorithm:?} at {units}: {bytes} bytes");
            assert!(bytes < most, "{algorithm:?} at {units}: {bytes} bytes");
        }
    }
    for units in [100, 1_000] {
        println!(
            "log at {units}: {} bytes",
            bytes_spent_in_full(units, Algorithm::SLIDING_LOG).await
        );
    }
}

/// Keys expire by the server's clock, even while that of the store stands still.
#[tokio::test]
async fn a_unit_by_the_clock_of_a_test_waits_for_that_clock() {
    let (server, clock, limit) = (
        RedisServer::start(),
        ManualClock::new(),
        Limit::per("calls", 5, ms(10)),
    );
    let limiter =
        Limiter::new(server.store().clock(&clock).build().unwrap()).deadline(TEST_TIMEOUT);
    assert!(limiter.check(&limit, "ada", 1).await.unwrap().is_allowed());
    sleep(ms(1_200)).await;
    assert_eq!(limiter.peek(&limit, "ada").await.unwrap().binding().used, 1);
    clock.advance(ms(10));
    assert_eq!(limiter.peek(&limit, "ada").await.unwrap().binding().used, 0);
}
