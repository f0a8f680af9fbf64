//! The calls that prefetches cost Redis. They have no way of their own through the script, since
//! each stands for at least 16 requests.

use super::*;

/// Few enough units are left that a prefetch is soon spent, and its life is long enough that it
/// does not end while a test runs.
const LONG: Limit = Limit::per_minute("long", 1_400).prefetch(MAX_LIFE);

/// The calls of sorted-set commands since the last `CONFIG RESETSTAT`, by name.
fn calls(server: &RedisServer) -> Vec<String> {
    let stats: String = server.run("INFO commandstats");
    let call = |line: &str| {
        let (name, rest) = line.strip_prefix("cmdstat_z")?.split_once(":calls=")?;
        Some(format!("z{name} {}", rest.split(',').next()?))
    };
    let mut calls: Vec<String> = stats.lines().filter_map(call).collect();
    calls.sort_unstable();
    calls
}

#[tokio::test]
async fn a_prefetch_is_taken_and_given_back_by_few_calls() {
    let server = RedisServer::start();
    let limiter = limiter(&server);
    for key in ["given back", "spent"] {
        // A first prefetch has at most the units that are used.
        assert!(check(&limiter, &LONG, key, 1_000).await.is_allowed());
        hold(&server, &limiter, &LONG, key).await;
        server.run::<()>("CONFIG RESETSTAT");
        if key == "given back" {
            limiter.shutdown(TEST_TIMEOUT).await.unwrap();
            assert_eq!(
                calls(&server),
                [
                    "zadd 2",
                    "zcount 1",
                    "zrange 1",
                    "zrem 2",
                    "zrevrange 3",
                    "zscore 2"
                ]
            );
        }
    }
    while server.script_calls() == 0 {
        assert!(check(&limiter, &LONG, "spent", 1).await.is_allowed());
        sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(
        calls(&server),
        ["zadd 2", "zcount 1", "zrevrange 2"],
        "the next prefetch, while some units are left"
    );
}

#[tokio::test]
async fn prefetches_of_many_keys_travel_together() {
    const KEYS: u64 = 50;
    let server = RedisServer::start();
    let limiter = limiter(&server);
    for key in 0..KEYS {
        hold(&server, &limiter, &LONG, &key.to_string()).await;
    }
    // Those that have to be given back meanwhile are, too.
    let before = server.script_calls();
    limiter.shutdown(TEST_TIMEOUT).await.unwrap();
    let scripts = server.script_calls() - before;
    assert!(
        scripts > 0 && scripts < KEYS / 2,
        "{scripts} scripts for {KEYS} keys"
    );
}
