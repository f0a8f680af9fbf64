//! Checks in one batch fail independently: a key with foreign content, or a server without memory,
//! fails only the checks that it concerns.

use std::{
    error::Error as _,
    time::{Duration, UNIX_EPOCH},
};

use tokio::{task::JoinSet, time::sleep};
use tower_sliding_window::{
    Algorithm, Charge, Check, Decision, Error, Limit, Limiter, error::StoreErrorKind,
    settlement::Settlement, store::ManualClock,
};

use crate::support::{TEST_TIMEOUT, ms, redis_server::RedisServer, with_causes};

const LOGIN: Limit = Limit::per("login", 3, Duration::from_secs(10));

/// With one batch at a time, so that checks share batches.
fn limiter(server: &RedisServer) -> Limiter {
    let store = server.store().connections(1).build().unwrap();
    Limiter::new(store)
        .deadline(TEST_TIMEOUT)
        .refusal_cache(Duration::ZERO)
}

#[tokio::test]
async fn an_out_of_memory_server_still_decides_checks_that_write_nothing() {
    let server = RedisServer::start();
    let limiter = limiter(&server);
    assert!(
        limiter
            .check(&LOGIN, "spent", 3)
            .await
            .unwrap()
            .is_allowed()
    );
    server.run::<()>("CONFIG SET maxmemory 1");
    // More rounds than failures that open a breaker.
    for round in 0..10 {
        let charge = |limit: &Limit| Charge::new(limit.clone(), "new", 1).unwrap();
        let several = Check::new(charge(&Limit::per_day("daily", 9)))
            .and(charge(&LOGIN))
            .unwrap();
        let (refused, admitted, peeked, several, costly) = tokio::join!(
            limiter.check(&LOGIN, "spent", 1),
            limiter.check(&LOGIN, "new", 1),
            limiter.peek(&LOGIN, "spent"),
            limiter.check_all(several),
            limiter.check(&LOGIN, "new", 2),
        );
        assert!(refused.unwrap().retry_after().is_some(), "round {round}");
        assert_eq!(peeked.unwrap().binding().used, 3);
        for (failed, name) in [(admitted, "login"), (several, "daily"), (costly, "login")] {
            let text = with_causes(&failed.unwrap_err());
            assert!(
                text.contains("OOM") && text.contains(&format!("limit {name:?}")),
                "{text}"
            );
        }
    }
    server.run::<()>("CONFIG SET maxmemory 0");
    assert_eq!(
        limiter
            .check(&LOGIN, "new", 1)
            .await
            .unwrap()
            .binding()
            .used,
        1,
        "what has failed was not counted"
    );
}

/// By every algorithm: foreign numbers that the store never writes, and values that are not
/// numbers.
#[tokio::test]
async fn foreign_content_fails_only_checks_of_its_key() {
    let server = RedisServer::start();
    let limiter = limiter(&server);
    let algorithms = [
        Algorithm::SLIDING_LOG,
        Algorithm::compact_log(16),
        Algorithm::SLIDING_WINDOW_COUNTER,
        Algorithm::FIXED_WINDOW,
    ];
    for algorithm in algorithms {
        let limit = LOGIN.with_algorithm(algorithm);
        let suffix = |key: &String| key.contains(":login");
        assert!(
            limiter
                .check(&limit, "mallory", 1)
                .await
                .unwrap()
                .is_allowed()
        );
        let key = server.keys().into_iter().find(suffix).unwrap();
        for foreign in [
            "9223372036854775807 used",
            "-9223372036854775808 used",
            "1e300 used 5 abcdefgh",
            "inf used",
            "-inf abcdefgh",
            "-inf abcdefgh9223372036854775807",
            "inf 9223372036854775807:9223372036854775807:9223372036854775807",
            "inf 1:2:3 inf 4:5:6",
            "-1e18 abcdefgh9007199254740993*9007199254740993",
            "9.5 used -1.5 abcdefgh0.5",
            "-1 x",
        ] {
            server.run::<()>(&format!("DEL {key}"));
            server.run::<()>(&format!("ZADD {key} {foreign}"));
            for round in 0..8 {
                let (foreign, own) = tokio::join!(
                    ask_in_every_way(&limiter, &limit, "mallory"),
                    ask_in_every_way(&limiter, &limit, "ada")
                );
                let case = format!("{algorithm:?} {foreign:?} round {round}");
                assert!(own.into_iter().all(|outcome| outcome.is_ok()), "{case}");
                for failed in foreign.into_iter().filter_map(Result::err) {
                    assert!(with_causes(&failed).contains("\"login\""), "{case}");
                }
                limiter.reset(&limit, "ada").await.unwrap();
            }
        }
        server.run::<()>(&format!("SET {key} text"));
        for _ in 0..10 {
            let (foreign, own) = tokio::join!(
                ask_in_every_way(&limiter, &limit, "mallory"),
                ask_in_every_way(&limiter, &limit, "ada")
            );
            assert!(own.into_iter().all(|outcome| outcome.is_ok()));
            // A refusal that is known stands.
            let is_refused = |outcome: &Result<Decision, Error>| {
                outcome.as_ref().is_ok_and(|known| !known.is_allowed())
            };
            for failed in foreign.into_iter().filter(|outcome| !is_refused(outcome)) {
                let failed = failed.unwrap_err();
                assert!(with_causes(&failed).contains("WRONGTYPE"));
                assert!(
                    matches!(failed, Error::Unavailable(error) if error.kind == StoreErrorKind::WrongType)
                );
            }
        }
        server.run::<()>("FLUSHALL");
    }
}

/// Peeks, spends and reserves.
async fn ask_in_every_way(
    limiter: &Limiter,
    limit: &Limit,
    key: &'static str,
) -> Vec<Result<Decision, Error>> {
    let reserved = Charge::new(limit.clone(), key, 1)
        .unwrap()
        .reserve(Duration::from_secs(5));
    let (peeked, spent, all, reserved) = tokio::join!(
        limiter.peek(limit, key),
        limiter.check(limit, key, 1),
        limiter.check(limit, key, 3),
        limiter.check_all(Check::new(reserved)),
    );
    vec![peeked, spent, all, reserved]
}

/// A retry time is at most one window, or two for a counter, whatever the key holds.
#[tokio::test]
async fn a_huge_foreign_sum_still_gives_a_bounded_retry_time() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let store = server.store().clock(&clock).build().unwrap();
    let limiter = Limiter::new(store)
        .deadline(TEST_TIMEOUT)
        .refusal_cache(Duration::ZERO);
    assert!(limiter.check(&LOGIN, "ada", 2).await.unwrap().is_allowed());
    let key = server.keys().remove(0);
    server.run::<()>(&format!("ZADD {key} 9223372036854775807 used"));
    let refused = limiter.check(&LOGIN, "ada", 1).await.unwrap();
    assert!(
        refused
            .retry_after()
            .is_some_and(|wait| wait <= LOGIN.window()),
        "{refused:?}"
    );
    assert_eq!(refused.remaining(), 0);
}

/// All callers ask at once, and a third of them ask for a key that cannot be read.
#[tokio::test]
async fn one_bad_key_in_full_batches_fails_no_other_check() {
    let server = RedisServer::start();
    let limiter = limiter(&server);
    assert!(limiter.check(&LOGIN, "bad", 1).await.unwrap().is_allowed());
    let key = server.keys().remove(0);
    server.run::<()>(&format!("SET {key} text"));
    let mut tasks = JoinSet::new();
    for number in 0..600 {
        let limiter = limiter.clone();
        tasks.spawn(async move {
            let is_bad = number % 3 == 0;
            let key = if is_bad {
                "bad".to_owned()
            } else {
                number.to_string()
            };
            let outcome = limiter.check(&LOGIN, key, 1).await;
            // Behind three others of its key a check is refused.
            assert_eq!(
                !outcome.as_ref().is_ok_and(Decision::is_allowed),
                is_bad,
                "{outcome:?}"
            );
        });
    }
    tasks.join_all().await;
}

/// The time of the server's clock.
fn micros(server: &RedisServer) -> i64 {
    let (seconds, micros) = server.run::<(i64, i64)>("TIME");
    seconds * 1_000_000 + micros
}

/// A fraction, and a number below that of a sub-window.
#[tokio::test]
async fn a_foreign_total_fails_no_check_of_another_key() {
    let server = RedisServer::start();
    let algorithms = [Algorithm::SLIDING_LOG, Algorithm::compact_log(16)];
    for (algorithm, total) in algorithms.into_iter().zip(["9.5", "-1000"]) {
        let store = server.store().connect().await.unwrap();
        let limiter = Limiter::new(store)
            .deadline(TEST_TIMEOUT)
            .refusal_cache(Duration::ZERO);
        let limit = Limit::per("calls", 10_000, ms(3_500)).with_algorithm(algorithm);
        // In sub-windows of their own.
        for _ in 0..4 {
            let outcome = limiter.check(&limit, "mallory", 2).await.unwrap();
            assert!(outcome.is_allowed());
            sleep(ms(260)).await;
        }
        server.run::<()>(&format!("ZADD {} {total} used", server.only_key()));
        let keys = (0..64).map(|key: u32| match key {
            40 => "mallory".to_owned(),
            _ => key.to_string(),
        });
        let mut all = JoinSet::new();
        for key in keys {
            let asked = limiter.check(&limit, key.clone(), 1);
            all.spawn(async move { (key, asked.await) });
        }
        for (key, outcome) in all.join_all().await {
            assert!(
                key == "mallory" || outcome.is_ok(),
                "{algorithm:?}: {outcome:?}"
            );
        }
        for _ in 0..10 {
            let _ = limiter.check(&limit, "mallory", 1).await;
        }
        let outcome = limiter.check(&limit, "ada", 1).await.unwrap();
        assert!(outcome.is_allowed());
        server.run::<()>("FLUSHALL");
    }
}

/// A foreign key with the name of one of the store's keys. Its check fails, and charges nothing
/// under other limits.
#[tokio::test]
async fn a_key_of_a_wrong_type_fails_only_its_check() {
    let server = RedisServer::start();
    let limiter = limiter(&server);
    assert!(limiter.check(&LOGIN, "ada", 1).await.unwrap().is_allowed());
    let key = server.only_key();
    server.run::<()>(&format!("SET {key} text"));

    let charge = |limit: &Limit| Charge::new(limit.clone(), "ada", 1).unwrap();
    let both = Check::new(charge(&Limit::per_day("daily", 100)))
        .and(charge(&LOGIN))
        .unwrap();
    let error = limiter.check_all(both).await.unwrap_err();
    let Error::Unavailable(error) = &error else {
        panic!("{error:?}")
    };
    let cause = error.source().unwrap().to_string();
    assert!(
        cause.starts_with("the key of the limit \"login\" cannot be read")
            && cause.contains("WRONGTYPE"),
        "{cause}"
    );
    assert_eq!(server.keys(), [key], "the daily limit was not charged");

    // However often the check fails, the breaker stays closed for other keys.
    for _ in 0..10 {
        limiter.check(&LOGIN, "ada", 1).await.unwrap_err();
    }
    assert!(limiter.check(&LOGIN, "bob", 1).await.unwrap().is_allowed());
    // Most checks of a crowd wait behind equal ones. They have the error as well.
    let crowd: JoinSet<_> = (0..100).map(|_| limiter.check(&LOGIN, "ada", 1)).collect();
    for outcome in crowd.join_all().await {
        assert!(with_causes(&outcome.unwrap_err()).contains("WRONGTYPE"));
    }
    limiter.reset(&LOGIN, "ada").await.unwrap();
    assert!(limiter.check(&LOGIN, "ada", 1).await.unwrap().is_allowed());
}

/// A failed check subtracts the expired units that it has dropped from the sum.
#[tokio::test]
async fn a_failed_check_keeps_the_sums_correct() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let store = server.store().clock(&clock).build().unwrap();
    let limiter = Limiter::new(store).deadline(TEST_TIMEOUT);
    for _ in 0..2 {
        assert!(
            limiter
                .check(&Limit::per("heavy", 10, Duration::from_secs(10)), "ada", 3)
                .await
                .unwrap()
                .is_allowed()
        );
        clock.advance(Duration::from_secs(5));
    }
    assert!(limiter.check(&LOGIN, "ada", 1).await.unwrap().is_allowed());
    let login = server
        .keys()
        .into_iter()
        .find(|key| key.ends_with(":login/10s"))
        .unwrap();
    server.run::<()>(&format!("SET {login} text"));

    let heavy = Limit::per("heavy", 10, Duration::from_secs(10));
    let charge = |limit: &Limit| Charge::new(limit.clone(), "ada", 1).unwrap();
    let both = Check::new(charge(&heavy)).and(charge(&LOGIN)).unwrap();
    assert!(limiter.check_all(both).await.is_err());
    assert_eq!(limiter.peek(&heavy, "ada").await.unwrap().binding().used, 3);
}

/// A foreign sorted set, whose entries do not add up to its sum, must not block the server.
#[tokio::test]
async fn a_foreign_sum_causes_no_endless_loop() {
    let server = RedisServer::start();
    let limiter = limiter(&server);
    assert!(limiter.check(&LOGIN, "ada", 1).await.unwrap().is_allowed());
    let key = server.only_key();
    for entry in ["-9000000000000000 abcdefgh2", "-5 abcdefgh2", "50 used"] {
        server.run::<()>(&format!("DEL {key}"));
        server.run::<()>(&format!("ZADD {key} 50 used {entry}"));
        let _ = limiter.check(&LOGIN, "ada", 1).await;
        assert_eq!(server.run::<String>("PING"), "PONG");
    }
}

/// Foreign values that are not numbers of units must not block the server. A counter searches for
/// the moment at which fewer are used.
#[tokio::test]
async fn foreign_units_cause_no_endless_loop() {
    let server = RedisServer::start();
    let limiter = limiter(&server).refusal_cache(Duration::ZERO);
    let limit = Limit::per_day("calls", 3).with_algorithm(Algorithm::SLIDING_WINDOW_COUNTER);
    assert!(limiter.check(&limit, "ada", 1).await.unwrap().is_allowed());
    let key = server.only_key();
    for units in ["inf", "nan", "-1", "0.5", "1e300"] {
        let now = micros(&server);
        for (member, at) in [
            (&b"\xffabcdefgh"[..], now),
            (b"ab", now - now % 86_400_000_000),
            (b"cd", now - 86_400_000_000),
        ] {
            let member = [member, units.as_bytes()].concat();
            redis::cmd("ZADD")
                .arg(&key)
                .arg(-at)
                .arg(member)
                .exec(&mut server.connect())
                .unwrap();
        }
        for cost in [0, 1] {
            let _ = limiter.check(&limit, "ada", cost).await.unwrap();
        }
        assert_eq!(server.run::<String>("PING"), "PONG", "{units}");
        server.run::<()>(&format!("DEL {key}"));
    }
}

/// The sum of all units counts, whatever the sum of reserved units says.
#[tokio::test]
async fn a_reserved_sum_above_the_total_admits_nothing_more() {
    let server = RedisServer::start();
    let limiter = Limiter::new(server.store().build().unwrap()).deadline(TEST_TIMEOUT);
    let limit = Limit::per_minute("calls", 10);
    assert!(limiter.check(&limit, "ada", 10).await.unwrap().is_allowed());
    let key = server.keys().remove(0);
    server.run::<()>(&format!("ZADD {key} 100 held"));
    assert!(!limiter.check(&limit, "ada", 1).await.unwrap().is_allowed());
}

/// Expired foreign entries at the key of a counter once failed the whole batch.
#[tokio::test]
async fn expired_foreign_entries_fail_no_other_check() {
    let server = RedisServer::start();
    let store = server.store().build().unwrap();
    let limiter = Limiter::new(store)
        .deadline(TEST_TIMEOUT)
        .refusal_cache(Duration::ZERO);
    let counter = Limit::per_hour("calls", 3_000).with_algorithm(Algorithm::SLIDING_WINDOW_COUNTER);
    for n in 0..5 {
        assert!(
            limiter
                .check(&counter, format!("key {n}"), 1)
                .await
                .unwrap()
                .is_allowed()
        );
    }
    let members: String = (0..600).map(|n| format!(" -1 m{n}")).collect();
    for key in server.keys() {
        let _: () = server.run(&format!("DEL {key}"));
        let _: () = server.run(&format!("ZADD {key}{members}"));
    }
    let mut reported = Vec::new();
    for n in 0..5 {
        reported.push(
            limiter
                .check(&counter, format!("key {n}"), 1)
                .await
                .map(|decision| decision.binding().used),
        );
    }
    let honest = limiter
        .check(&Limit::per_hour("login", 5), "honest", 1)
        .await;
    assert!(honest.is_ok(), "{:?}\nhonest: {honest:?}", reported[0]);
}

/// A member with the name of the total whose score is the time of an entry. The settlement makes it
/// the total, and counts all entries.
#[tokio::test]
async fn a_foreign_total_among_the_entries_loses_no_unit() {
    let server = RedisServer::start();
    let limiter = limiter(&server);
    let limit = Limit::per("login", 5, Duration::from_secs(60));
    for _ in 0..3 {
        assert!(limiter.check(&limit, "ada", 1).await.unwrap().is_allowed());
    }
    let check = Check::new(Charge::new(limit.clone(), "ada", 1).unwrap());
    let admitted = limiter.check_all(check.clone()).await.unwrap();
    let (seconds, micros) = server.run::<(i64, i64)>("TIME");
    server.run::<()>(&format!(
        "ZADD {} -{} used",
        server.only_key(),
        seconds * 1_000_000 + micros
    ));
    limiter
        .settle(Settlement::new(check, &admitted, |_| Some(2)))
        .await
        .unwrap();
    assert!(
        !limiter.check(&limit, "ada", 1).await.unwrap().is_allowed(),
        "5 units are used"
    );
}

/// An entry of negative units that has left the window, as no check writes it, adds nothing to the
/// total.
#[tokio::test]
async fn expired_negative_units_add_nothing_to_the_total() {
    let server = RedisServer::start();
    let (limiter, limit) = (limiter(&server), Limit::per_minute("calls", 100));
    let before = limiter.check(&limit, "ada", 2).await.unwrap().at();
    let expired = before.duration_since(UNIX_EPOCH).unwrap() - Duration::from_secs(61);
    let (key, score) = (server.only_key(), -(expired.as_micros() as f64));
    redis::cmd("ZADD")
        .arg(&key)
        .arg(score)
        .arg("abcdefgh-50")
        .exec(&mut server.connect())
        .unwrap();
    assert!(
        limiter
            .check(&limit, "ada", 2)
            .await
            .unwrap()
            .binding()
            .used
            <= 4
    );
}
