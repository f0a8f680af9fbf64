//! What a store makes of a server that is slow, gone, or says no.

use std::time::Duration;

use tokio::{
    runtime::Runtime,
    time::{Instant, sleep},
};
use tower_sliding_window::{
    AdmissionId, Algorithm, Breaker, Charge, Check, Error, Limit, Limiter, ManualClock, RedisStore,
};

use crate::support::{PATIENCE, proxy::Proxy, redis_server::RedisServer};

const CALLS: Limit = Limit::per_hour("calls", 1_000_000);

fn limiter(url: &str) -> Limiter<RedisStore> {
    Limiter::new(RedisStore::builder(url).connections(2).build().unwrap()).deadline(PATIENCE)
}

/// An error and its causes.
fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

async fn used(limiter: &Limiter<RedisStore>) -> Result<u64, Error> {
    limiter.check(&CALLS, "ada", 1).await.map(|decision| decision.used())
}

#[tokio::test]
async fn a_server_that_has_forgotten_the_script_is_sent_it_again() {
    let server = RedisServer::start();
    let limiter = limiter(&server.url());
    for expected in 1..=5 {
        assert_eq!(used(&limiter).await.unwrap(), expected);
        server.run::<()>("SCRIPT FLUSH");
    }
}

/// With two connections, so that the second would be just as dead when it is taken.
#[tokio::test]
async fn a_restarted_server_costs_no_check() {
    let mut server = RedisServer::start();
    let limiter = limiter(&server.url());
    for _ in 0..4 {
        tokio::try_join!(used(&limiter), used(&limiter)).unwrap();
        server.kill();
        server.restart();
    }
    assert_eq!(used(&limiter).await.unwrap(), 1, "the server came back empty");
}

#[tokio::test]
async fn connections_that_are_cut_cost_no_check_and_no_unit() {
    let server = RedisServer::start();
    let limiter = limiter(&server.url());
    for expected in 1..=20 {
        assert_eq!(used(&limiter).await.unwrap(), expected);
        server.run::<()>("CLIENT KILL TYPE normal SKIPME yes");
    }
}

#[tokio::test]
async fn a_server_that_hangs_is_given_up_at_the_deadline_and_taken_up_again() {
    let server = RedisServer::start();
    let limiter = limiter(&server.url());
    used(&limiter).await.unwrap();
    let hasty = limiter.clone().deadline(Duration::from_millis(50)).breaker(Breaker::off());

    server.pause();
    for _ in 0..10 {
        let asked = Instant::now();
        assert!(matches!(used(&hasty).await, Err(Error::TimedOut { deadline }) if deadline.as_millis() == 50));
        assert!(asked.elapsed() >= Duration::from_millis(50));
    }
    server.resume();
    used(&limiter).await.unwrap();
}

#[tokio::test]
async fn a_server_may_come_up_after_the_store() {
    let mut server = RedisServer::start();
    server.kill();
    assert!(RedisStore::connect(&server.url()).await.is_err(), "connecting at once is refused");

    let limiter = limiter(&server.url());
    // At once, and not after the time that connecting may take.
    let patient = Limiter::new(RedisStore::builder(&server.url()).connect_timeout(PATIENCE).build().unwrap());
    let error = used(&patient.deadline(PATIENCE)).await.unwrap_err();
    assert!(chain(&error).contains("refused"), "the cause is named: {}", chain(&error));
    server.restart();
    let up = Instant::now();
    while used(&limiter).await.is_err() {
        assert!(up.elapsed() < PATIENCE);
        sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn a_server_without_memory_says_so() {
    let server = RedisServer::start();
    let limiter = limiter(&server.url());
    used(&limiter).await.unwrap();
    server.run::<()>("CONFIG SET maxmemory 1");
    let error = used(&limiter).await.unwrap_err();
    assert!(chain(&error).contains("OOM"), "{}", chain(&error));
    server.run::<()>("CONFIG SET maxmemory 0");
    assert_eq!(used(&limiter).await.unwrap(), 2, "what failed was not counted");
}

#[tokio::test]
async fn a_user_without_permission_says_so() {
    let server = RedisServer::start();
    server.run::<()>("ACL SETUSER guest on >guest ~* +@all -zadd");
    server.run::<()>("ACL SETUSER nobody on >nobody ~* +@connection");
    for user in ["guest", "nobody"] {
        let url = server.url().replace("redis://", &format!("redis://{user}:{user}@"));
        assert!(RedisStore::connect(&url).await.is_err() || user == "guest", "connecting tries the script out");
        let error = used(&limiter(&url)).await.unwrap_err();
        assert!(matches!(error, Error::Unavailable(_)));
        assert!(chain(&error).contains("permission") || chain(&error).contains("can't run"), "{}", chain(&error));
        assert!(!chain(&error).contains(&format!(":{user}@")), "the password stays out of it");
    }
    assert_eq!(server.keys(), [""; 0]);
}

/// Where nothing can be counted, a process that fails open would limit nothing: it had better not start.
#[tokio::test]
async fn connecting_finds_out_where_nothing_can_be_written() {
    let server = RedisServer::start();
    server.run::<()>("ACL SETUSER elsewhere on >elsewhere ~foo:* +@all");
    let url = server.url().replace("redis://", "redis://elsewhere:elsewhere@");
    let error = RedisStore::connect(&url).await.unwrap_err();
    assert!(chain(&error).contains("permission"), "{}", chain(&error));

    server.run::<()>("REPLICAOF 127.0.0.1 1");
    let error = RedisStore::connect(&server.url()).await.unwrap_err();
    assert!(chain(&error).contains("read only replica"), "{}", chain(&error));
}

#[tokio::test]
async fn a_password_that_is_missing_is_named() {
    let server = RedisServer::start();
    server.run::<()>("CONFIG SET requirepass s3cret");
    let error = used(&limiter(&server.url())).await.unwrap_err();
    assert!(chain(&error).contains("NOAUTH"), "{}", chain(&error));
    let right = server.url().replace("redis://", "redis://:s3cret@");
    assert_eq!(used(&limiter(&right)).await.unwrap(), 1);
}

/// A user that may run the commands that the guide lists, on our keys, and nothing else.
#[tokio::test]
async fn the_documented_permissions_are_enough() {
    let page = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/src/guide/running_redis.md"));
    let (_, listed) = page.split_once("~tsw1:* -@all").unwrap();
    let (listed, _) = listed.split_once("```").unwrap();
    let mut commands: Vec<&str> = listed.split_whitespace().collect();
    assert!(commands.len() >= 12, "{commands:?}");

    let server = RedisServer::start();
    if server.is_before_7() {
        commands.retain(|&command| command != "+pexpiretime");
    }
    server.run::<()>(&format!("ACL SETUSER limiter on >limiter ~tsw1:* -@all {}", commands.join(" ")));
    let url = server.url().replace("redis://", "redis://limiter:limiter@");
    let limiter = Limiter::new(RedisStore::connect(&url).await.unwrap()).deadline(PATIENCE);
    for _ in 0..3 {
        assert!(limiter.check(&Limit::per_day("by-the-server", 5), "ada", 1).await.unwrap().is_allowed());
    }
    let clock = ManualClock::new();
    let store = RedisStore::builder(&url).clock(&clock);
    let limiter = Limiter::new(store.build().unwrap()).deadline(PATIENCE);
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
    for algorithm in [Algorithm::log(), Algorithm::compact(16), Algorithm::counter(), Algorithm::fixed()] {
        let limit = Limit::per_day("others", 20).with_algorithm(algorithm);
        for _ in 0..2 {
            let reservation = limiter.reserve(&limit, "ada", 5, Duration::from_secs(1)).await.unwrap().unwrap();
            assert!(limiter.check(&limit, "ada", 5).await.unwrap().is_allowed());
            assert!(reservation.settle(2).await.unwrap().was_applied());
            clock.step_back(Duration::from_secs(100_000));
            assert!(!limiter.check(&limit, "ada", 20).await.unwrap().is_allowed());
        }
    }
    let calls: String = server.run("INFO commandstats");
    for command in &commands {
        assert!(calls.contains(&format!("cmdstat_{}:", &command[1..])), "{command} is listed, but not used");
    }
}

/// After a failover the old connections reach what has become a replica. They are left, and the check goes over a new
/// one, to the new primary.
#[tokio::test]
async fn a_primary_that_became_a_replica_is_left() {
    let (old, new) = (RedisServer::start(), RedisServer::start());
    let proxy = Proxy::start(&old).await;
    let limiter = limiter(proxy.url());
    used(&limiter).await.unwrap();
    old.run::<()>("REPLICAOF 127.0.0.1 1");
    let error = used(&limiter).await.unwrap_err();
    assert!(chain(&error).to_lowercase().contains("readonly"), "as long as there is no other: {}", chain(&error));

    proxy.lead_to(&new);
    assert_eq!(used(&limiter).await.unwrap(), 1);
}

/// A connection that nothing comes back over, and that no error ever ends.
#[tokio::test]
async fn a_silent_connection_is_left() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server).await;
    let limiter = limiter(proxy.url());
    used(&limiter).await.unwrap();
    proxy.silence_what_is_open();
    let silent = Instant::now();
    while used(&limiter).await.is_err() {
        assert!(silent.elapsed() < PATIENCE);
    }
}

/// A runtime that ends while connections are being made takes them along. Others are made by the next one.
#[test]
fn a_runtime_that_ends_while_it_connects_harms_no_other() {
    let server = RedisServer::start();
    let limiter = limiter(&server.url());
    server.pause();
    for _ in 0..2 {
        let hasty = limiter.clone().deadline(Duration::from_millis(50));
        let runtime = Runtime::new().unwrap();
        let asked = [(); 2].map(|()| runtime.spawn(hasty.check(&CALLS, "ada", 1)));
        for answer in asked {
            assert!(matches!(runtime.block_on(answer).unwrap(), Err(Error::TimedOut { .. })));
        }
    }
    server.resume();
    assert!(Runtime::new().unwrap().block_on(used(&limiter)).is_ok());
}

#[tokio::test]
async fn a_reset_survives_a_connection_that_is_cut() {
    let server = RedisServer::start();
    let limiter = limiter(&server.url());
    used(&limiter).await.unwrap();
    server.run::<()>("CLIENT KILL TYPE normal SKIPME yes");
    limiter.reset(&CALLS, "ada").await.unwrap();
    assert_eq!(used(&limiter).await.unwrap(), 1);
}

/// A server that takes one connection and no more still decides over that one.
#[tokio::test]
async fn a_connection_that_cannot_be_made_does_not_fail_who_can_use_another() {
    let server = RedisServer::start_with(&["--maxclients", "1"]);
    let limiter = limiter(&server.url());
    while used(&limiter).await.is_err() {
        // The connection that has seen the server start is still being closed.
        sleep(Duration::from_millis(10)).await;
    }
    for _ in 0..20 {
        // The second is asked while the first is on its way.
        let first = tokio::spawn(limiter.check(&CALLS, "ada", 1));
        tokio::task::yield_now().await;
        tokio::task::yield_now().await;
        let second = tokio::spawn(limiter.check(&CALLS, "bob", 1));
        assert!(first.await.unwrap().is_ok() && second.await.unwrap().is_ok());
    }
}

/// A script that somebody else runs holds the server up. What it then says is no answer, and its connection stays good.
#[tokio::test]
async fn a_busy_server_says_so() {
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
    assert!(chain(&error).contains("BUSY"), "{}", chain(&error));
    server.run::<()>("SCRIPT KILL");
    spinning.join().unwrap();
    used(&limiter).await.unwrap();
}

#[tokio::test]
async fn settings_that_cannot_be_name_the_value_and_never_the_password() {
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
    assert!(RedisStore::sentinel(["redis://127.0.0.1:26379"], "").build().is_err());
}

/// Nothing is opened or spawned until the first check.
#[test]
fn a_store_needs_no_runtime_to_be_built() {
    RedisStore::builder("redis://127.0.0.1:1/").build().unwrap();
}
