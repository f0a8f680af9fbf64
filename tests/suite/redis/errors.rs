//! Errors of a server, and of wrong settings, reach the caller with their cause.

use std::time::Duration;

use tower_sliding_window::{
    Algorithm, Charge, Check, Error, Limit, Limiter, RedisStore, check::AdmissionId, error::StoreErrorKind,
    store::ManualClock,
};

use super::{limiter, used};
use crate::support::{TEST_TIMEOUT, redis_server::RedisServer, with_causes};

fn kind(error: &Error) -> StoreErrorKind {
    let Error::Unavailable(error) = error else { panic!("{error}") };
    error.kind()
}

#[tokio::test]
async fn an_out_of_memory_error_is_reported() {
    let server = RedisServer::start();
    let limiter = limiter(&server.url());
    used(&limiter).await.unwrap();
    server.run::<()>("CONFIG SET maxmemory 1");
    let error = used(&limiter).await.unwrap_err();
    assert!(with_causes(&error).contains("OOM"), "{}", with_causes(&error));
    assert_eq!(kind(&error), StoreErrorKind::OutOfMemory);
    server.run::<()>("CONFIG SET maxmemory 0");
    assert_eq!(used(&limiter).await.unwrap(), 2, "the failed check was not counted");
}

#[tokio::test]
async fn a_missing_permission_is_reported() {
    let server = RedisServer::start();
    server.run::<()>("ACL SETUSER guest on >guest ~* +@all -zadd");
    server.run::<()>("ACL SETUSER nobody on >nobody ~* +@connection");
    for user in ["guest", "nobody"] {
        let url = server.url().replace("redis://", &format!("redis://{user}:{user}@"));
        assert!(RedisStore::connect(&url).await.is_err() || user == "guest", "connecting tries the script out");
        let error = used(&limiter(&url)).await.unwrap_err();
        assert_eq!(kind(&error), StoreErrorKind::Denied);
        assert!(
            with_causes(&error).contains("permission") || with_causes(&error).contains("can't run"),
            "{}",
            with_causes(&error)
        );
        assert!(!with_causes(&error).contains(&format!(":{user}@")), "the password stays out of it");
    }
    assert_eq!(server.keys(), [""; 0]);
}

/// A process that fails open would limit nothing there, so `connect` must fail at its start.
#[tokio::test]
async fn connect_fails_where_nothing_can_be_written() {
    let server = RedisServer::start();
    server.run::<()>("ACL SETUSER elsewhere on >elsewhere ~foo:* +@all");
    let url = server.url().replace("redis://", "redis://elsewhere:elsewhere@");
    let error = RedisStore::connect(&url).await.unwrap_err();
    assert!(with_causes(&error).contains("permission"), "{}", with_causes(&error));
    assert_eq!(error.kind(), StoreErrorKind::Denied);

    server.run::<()>("REPLICAOF 127.0.0.1 1");
    let error = RedisStore::connect(&server.url()).await.unwrap_err();
    assert!(with_causes(&error).contains("read only replica"), "{}", with_causes(&error));
    assert_eq!(error.kind(), StoreErrorKind::ReadOnly);
}

#[tokio::test]
async fn a_missing_password_is_reported() {
    let server = RedisServer::start();
    server.run::<()>("CONFIG SET requirepass s3cret");
    let error = used(&limiter(&server.url())).await.unwrap_err();
    assert!(with_causes(&error).contains("NOAUTH"), "{}", with_causes(&error));
    assert_eq!(kind(&error), StoreErrorKind::Denied);
    let wrong = RedisStore::connect(&server.url().replace("redis://", "redis://:wrong@")).await.unwrap_err();
    assert_eq!(wrong.kind(), StoreErrorKind::Denied, "{}", with_causes(&wrong));
    let right = server.url().replace("redis://", "redis://:s3cret@");
    assert_eq!(used(&limiter(&right)).await.unwrap(), 1);
}

/// A user that may run only the commands listed in the guide, and only on keys of the store.
#[tokio::test]
async fn the_documented_permissions_are_enough() {
    let page = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/guide/running_redis.md"));
    let (_, listed) = page.split_once("~shop:* -@all").unwrap();
    let (listed, _) = listed.split_once("```").unwrap();
    let mut commands: Vec<&str> = listed.split_whitespace().collect();
    assert!(commands.len() >= 12, "{commands:?}");

    let server = RedisServer::start();
    if server.is_before_7() {
        commands.retain(|&command| command != "+pexpiretime");
    }
    server.run::<()>(&format!("ACL SETUSER limiter on >limiter ~tsw1:* -@all {}", commands.join(" ")));
    let url = server.url().replace("redis://", "redis://limiter:limiter@");
    let limiter = Limiter::new(RedisStore::connect(&url).await.unwrap()).deadline(TEST_TIMEOUT);
    for _ in 0..3 {
        assert!(limiter.check(&Limit::per_day("by-the-server", 5), "ada", 1).await.unwrap().is_allowed());
    }
    let clock = ManualClock::new();
    let store = RedisStore::builder(&url).clock(&clock);
    let limiter = Limiter::new(store.build().unwrap()).deadline(TEST_TIMEOUT);
    let limit = Limit::per("calls", 600, Duration::from_secs(1));
    let id = AdmissionId::from(7);
    for cost in [1, 1, 3, 600, 595, 1] {
        let charge = Charge::new(limit.clone(), "ada", cost).unwrap();
        let _ = limiter.check_all(Check::new(charge.clone())).await.unwrap();
        let _ = limiter.check_all(Check::new(charge).with_id(id)).await.unwrap();
        clock.advance(Duration::from_millis(300));
    }
    clock.step_back(Duration::from_secs(5));
    let _ = limiter.check(&limit, "ada", 600).await.unwrap();
    // A log that is long enough to be freed as a whole.
    for _ in 0..600 {
        assert!(limiter.check(&limit, "bob", 1).await.unwrap().is_allowed());
    }
    assert!(limiter.check(&limit, "eve", 1).await.unwrap().is_allowed());
    clock.advance(Duration::from_secs(10));
    for key in ["ada", "bob", "eve"] {
        assert_eq!(limiter.peek(&limit, key).await.unwrap().used(), 0);
    }
    limiter.reset(&limit, "ada").await.unwrap();
    for algorithm in [
        Algorithm::sliding_log(),
        Algorithm::compact_log(16),
        Algorithm::sliding_window_counter(),
        Algorithm::fixed_window(),
    ] {
        let limit = Limit::per_day("others", 20).with_algorithm(algorithm);
        for _ in 0..2 {
            let reservation = limiter.reserve(&limit, "ada", 5, Duration::from_secs(1)).await.unwrap().unwrap();
            assert!(limiter.check(&limit, "ada", 5).await.unwrap().is_allowed());
            assert!(reservation.settle(2).await.unwrap().was_applied);
            clock.step_back(Duration::from_secs(100_000));
            assert!(!limiter.check(&limit, "ada", 20).await.unwrap().is_allowed());
        }
    }
    let calls: String = server.run("INFO commandstats");
    for command in &commands {
        assert!(calls.contains(&format!("cmdstat_{}:", &command[1..])), "{command} is listed, but not used");
    }
}

/// Another script keeps the server busy. The BUSY error is not a decision, and the connection stays usable.
#[tokio::test]
async fn a_busy_server_is_reported() {
    let server = RedisServer::start_with(&["--lua-time-limit", "50"]);
    let limiter = limiter(&server.url());
    used(&limiter).await.unwrap();
    let mut other = server.connect();
    let spinning = std::thread::spawn(move || {
        let outcome: redis::RedisResult<()> = redis::cmd("EVAL").arg("while true do end").arg(0).query(&mut other);
        outcome.unwrap_err()
    });
    let error = loop {
        if let Err(error) = used(&limiter).await {
            break error;
        }
    };
    assert!(with_causes(&error).contains("BUSY"), "{}", with_causes(&error));
    server.run::<()>("SCRIPT KILL");
    spinning.join().unwrap();
    used(&limiter).await.unwrap();
}

#[tokio::test]
async fn invalid_settings_are_named_without_the_password() {
    for (url, shown) in [
        ("http://127.0.0.1", "http://127.0.0.1"),
        ("redis://user:s3cret@:port/", "not shown"),
        ("s3cret@nowhere", "not shown"),
        ("redis://host/db?password=s3cret", "redis://host…"),
        ("", "not shown"),
    ] {
        let error = RedisStore::builder(url).build().unwrap_err();
        assert!(error.to_string().contains(shown), "{error}");
        assert!(!format!("{error} {error:?} {:?}", RedisStore::builder(url)).contains("s3cret"));
    }
    #[cfg(not(feature = "tls"))]
    {
        let error = RedisStore::builder("rediss://:s3cret@127.0.0.1/").build().unwrap_err();
        assert!(error.to_string().contains("`tls`") && !error.to_string().contains("s3cret"), "{error}");
    }
    for prefix in ["", "a:b", "a b", "{a}", &"a".repeat(65)] {
        let error = RedisStore::builder("redis://127.0.0.1/").prefix(prefix).build().unwrap_err();
        assert!(error.to_string().contains(&format!("{prefix:?}")), "{error}");
    }
    assert!(RedisStore::builder("redis://127.0.0.1/").connections(0).build().is_err());
    assert!(RedisStore::builder("redis://127.0.0.1/").connect_timeout(Duration::ZERO).build().is_err());
    assert!(RedisStore::builder("redis://127.0.0.1/").reply_timeout(Duration::ZERO).build().is_err());
    assert!(RedisStore::sentinel(["redis://127.0.0.1:26379"], "").build().is_err());
}

/// The store opens and spawns nothing until the first check.
#[test]
fn a_store_is_built_without_a_runtime() {
    RedisStore::builder("redis://127.0.0.1:1/").build().unwrap();
}
