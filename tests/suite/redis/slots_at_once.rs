//! Checks of several slots of a cluster. All slots are asked at the same time, and what a refused
//! check has counted is given back.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use tokio::{
    task::JoinSet,
    time::{sleep, timeout},
};
use tower::ServiceExt;
use tower_sliding_window::{
    Algorithm, Charge, Check, Decision, Header, Limit, Limiter, MemoryStore, RateLimitLayer, Store,
    check::AdmissionId, limiter::Breaker, store::RedisStoreBuilder,
};

use crate::support::{
    TEST_TIMEOUT,
    redis_cluster::{Proxies, RedisCluster},
    redis_server::RedisServer,
    requests::request,
    services::{around, handler},
};

const DAY: Duration = Duration::from_secs(86_400);

fn limiter(store: impl Store) -> Limiter {
    Limiter::new(store)
        .deadline(TEST_TIMEOUT)
        .breaker(Breaker::OFF)
}

fn charge(limit: &Limit, key: &str, cost: u64) -> Charge {
    Charge::new(limit.clone(), key, cost).unwrap()
}

/// A check of these charges, each under a key of its own.
fn check(charges: impl IntoIterator<Item = (Limit, String)>) -> Check {
    let mut all: Option<Check> = None;
    for (limit, key) in charges {
        let charge = charge(&limit, &key, 1);
        all = Some(match all {
            None => Check::new(charge),
            Some(check) => check.and(charge).unwrap(),
        });
    }
    all.unwrap()
}

async fn used(limiter: &Limiter, limit: &Limit, key: &str) -> u64 {
    limiter.peek(limit, key).await.unwrap().binding().used
}

/// Waits until no more than `most` units of a limit are used.
async fn falls_to(limiter: &Limiter, limit: &Limit, key: &str, most: u64) {
    let begun = Instant::now();
    loop {
        let used = used(limiter, limit, key).await;
        if used <= most {
            return;
        }
        assert!(
            begun.elapsed() < TEST_TIMEOUT,
            "{used} units stay counted under {limit}"
        );
        sleep(Duration::from_millis(5)).await;
    }
}

/// Of several tries, the fastest takes less than two round trips, and each asks a slot once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_check_of_several_slots_takes_one_round_trip() {
    let cluster = RedisCluster::start(3).await;
    let proxies = Proxies::start(&cluster).await;
    let limiter = limiter(proxies.builder().connect().await.unwrap()).refusal_cache(Duration::ZERO);
    let scripts = || -> u64 { cluster.0.iter().map(RedisServer::script_calls).sum() };
    for (far, delay) in [0, 20, 80]
        .map(Duration::from_millis)
        .into_iter()
        .enumerate()
    {
        proxies.delay_replies(delay);
        for keys in 2..=5 {
            for units in [1_000, 1] {
                let name = format!("calls-{far}-{keys}-{units}");
                let limit = |key| {
                    Limit::new(
                        name.clone(),
                        if key + 1 == keys { units } else { 1_000 },
                        DAY,
                    )
                    .unwrap()
                };
                let pair = |key: usize| (limit(key), format!("{name}-{key}"));
                let whole = || check((0..keys).map(pair));
                let _ = limiter.check_all(whole()).await.unwrap();
                let mut fastest = Duration::MAX;
                for _ in 0..5 {
                    let (before, asked) = (scripts(), Instant::now());
                    let decision = limiter.check_all(whole()).await.unwrap();
                    fastest = fastest.min(asked.elapsed());
                    assert_eq!(decision.is_allowed(), units > 1);
                    let refunds = if units > 1 { 0 } else { keys as u64 - 1 };
                    let most = before + keys as u64 + refunds;
                    assert!(
                        scripts() <= most,
                        "{} calls for {keys} slots",
                        scripts() - before
                    );
                    if units == 1 {
                        for key in 0..keys - 1 {
                            falls_to(&limiter, &limit(key), &format!("{name}-{key}"), 1).await;
                        }
                    }
                }
                assert!(
                    delay.is_zero() || fastest < 2 * delay,
                    "{keys} slots, {delay:?} away: {fastest:?}"
                );
            }
        }
    }
}

/// A layer with the default deadline and failure mode, whose tight limit goes by the key of this
/// number.
fn layer_of_four_keys(store: impl Store, tight: usize) -> RateLimitLayer {
    let mut layer = RateLimitLayer::new(store);
    for number in 0..4 {
        let units = if number == tight { 5 } else { 10_000 };
        let limit = Limit::per_hour(["one", "two", "three", "four"][number], units);
        layer = layer.limit(limit.by(Header::new(["x-one", "x-two", "x-three", "x-four"][number])));
    }
    layer
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tight_limit_in_any_slot_refuses_far_away() {
    let cluster = RedisCluster::start(3).await;
    let proxies = Proxies::start(&cluster).await;
    proxies.delay_replies(Duration::from_millis(20));
    for tight in 0..4 {
        let store = proxies
            .builder()
            .prefix(format!("tight-{tight}"))
            .connect()
            .await
            .unwrap();
        let app = around(&layer_of_four_keys(store, tight), handler());
        let mut admitted = 0;
        for _ in 0..30 {
            let mut request = request();
            for name in ["x-one", "x-two", "x-three", "x-four"] {
                request
                    .headers_mut()
                    .insert(name, format!("{name}-ada").parse().unwrap());
            }
            let response = app.clone().oneshot(request).await.unwrap();
            admitted += usize::from(response.status().is_success());
        }
        assert_eq!(admitted, 5, "the tight limit is number {tight}");
    }
}

/// One client over its own limit sends many requests at once. Other keys of its requests have room.
async fn admitted_of_a_flood(builder: RedisStoreBuilder) -> usize {
    let limiter = Limiter::new(builder.connect().await.unwrap());
    let login = Limit::per_minute("login", 5);
    let tenant = Limit::per_minute("tenant", 100_000);
    let mut clients = JoinSet::new();
    for _ in 0..2_048 {
        let keys = [
            (login.clone(), "ada".to_owned()),
            (tenant.clone(), "acme".to_owned()),
        ];
        let decided = limiter.check_all(check(keys));
        // As a layer that fails open.
        clients.spawn(async { !matches!(decided.await, Ok(decision) if !decision.is_allowed()) });
    }
    let admitted = clients.join_all().await;
    falls_to(&limiter.deadline(TEST_TIMEOUT), &tenant, "acme", 5).await;
    admitted.into_iter().filter(|passed| *passed).count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_of_one_client_passes_a_layer_of_two_keys_no_more_than_its_limit() {
    let cluster = RedisCluster::start(3).await;
    let server = RedisServer::start();
    let one = admitted_of_a_flood(server.store()).await;
    let several = admitted_of_a_flood(cluster.builder()).await;
    assert!(one <= 25, "{one} passed on one server");
    assert!(several <= 25, "{several} passed on a cluster");
}

/// All algorithms, and limits that other checks have filled with many admissions with ids.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_check_takes_nothing_whatever_the_algorithm() {
    let cluster = RedisCluster::start(3).await;
    let limiter = limiter(cluster.builder().connect().await.unwrap());
    let full = Limit::per_day("full", 1);
    let limits = [
        "30d",
        "30d compact(60)",
        "30d fixed",
        "30d counter",
        "month",
    ];
    for (number, text) in limits.into_iter().enumerate() {
        for named in [0, 10_050] {
            let limit: Limit = format!("month-{number}-{named}=20000/{text}")
                .parse()
                .unwrap();
            let mut all = JoinSet::new();
            for id in 0..named {
                let check = Check::new(charge(&limit, "acme", 1)).with_id(AdmissionId(id));
                all.spawn(limiter.check_all(check));
                if all.len() == 512 {
                    assert!(
                        all.join_next()
                            .await
                            .unwrap()
                            .unwrap()
                            .unwrap()
                            .is_allowed()
                    );
                }
            }
            all.join_all().await;
            for lease in [None, Some(Duration::from_secs(60))] {
                for user in 0..2 {
                    let key = format!("user-{number}-{named}-{user}-{}", lease.is_some());
                    assert!(limiter.check(&full, &key, 1).await.unwrap().is_allowed());
                    let mut tenant = charge(&limit, "acme", 3);
                    if let Some(lease) = lease {
                        tenant = tenant.reserve(lease);
                    }
                    let whole = Check::new(tenant).and(charge(&full, &key, 1)).unwrap();
                    // Without the refusal cache, which would take nothing either.
                    let asking = limiter.clone().refusal_cache(Duration::ZERO);
                    for number in 0..3 {
                        let refused = asking.check_all(whole.clone()).await.unwrap();
                        assert!(!refused.is_allowed());
                        let status = refused.statuses().next().unwrap();
                        assert_eq!(
                            (status.used, status.reserved),
                            (named, 0),
                            "{text}, try {number}, {named}, {lease:?}"
                        );
                        falls_to(&limiter, &limit, "acme", named).await;
                    }
                }
            }
        }
    }
    let ended = timeout(Duration::from_secs(1), limiter.shutdown(TEST_TIMEOUT)).await;
    ended.expect("shutdown waits for nothing").unwrap();
}

/// What a decision says of each limit, without times.
fn figures(decision: &Decision) -> Vec<(u64, u64, bool, bool)> {
    let figures = decision.statuses().map(|status| {
        (
            status.used,
            status.reserved,
            status.retry_after().is_some(),
            status.is_hidden(),
        )
    });
    figures.collect()
}

/// Memory, one server and a cluster say the same of the limits that have not refused.
#[tokio::test]
async fn a_refusal_shows_the_figures_of_all_slots() {
    let cluster = RedisCluster::start(3).await;
    let server = RedisServer::start();
    let stores: [Arc<dyn Store>; 3] = [
        Arc::new(MemoryStore::new()),
        Arc::new(server.store().connect().await.unwrap()),
        Arc::new(cluster.builder().connect().await.unwrap()),
    ];
    let mut seen = Vec::new();
    for store in stores {
        let limiter = limiter(store).refusal_cache(Duration::ZERO);
        let (calls, trial) = (Limit::per_day("calls", 2), Limit::per_day("trial", 1));
        let (streams, counted) = (
            Limit::concurrent("streams", 5),
            Limit::per_day("counted", 9).with_algorithm(Algorithm::SLIDING_WINDOW_COUNTER),
        );
        let whole = || {
            Check::new(charge(&streams, "a", 1))
                .and(charge(&calls, "b", 1))
                .unwrap()
                .and(charge(&trial, "c", 1).in_shadow())
                .unwrap()
                .and(charge(&counted, "d", 2).reserve(DAY))
                .unwrap()
        };
        let mut all = Vec::new();
        let mut held = Vec::new();
        for _ in 0..4 {
            let decision = limiter.check_all(whole()).await.unwrap();
            all.push((decision.is_allowed(), figures(&decision)));
            // What other slots have counted for a refused check is given back behind the answer.
            falls_to(&limiter, &streams, "a", 2).await;
            falls_to(&limiter, &counted, "d", 4).await;
            held.push(decision);
        }
        seen.push(all);
    }
    assert!(!seen[0][2].0, "the third is refused");
    assert_eq!(seen[0], seen[1], "memory and one server");
    assert_eq!(seen[1], seen[2], "one server and a cluster");
}

/// Another try under the id may rely on what a refused try has counted, so nothing is given back.
#[tokio::test]
async fn tries_under_one_id_admit_no_more_than_the_limit() {
    let cluster = RedisCluster::start(3).await;
    let builder = || cluster.builder().prefix("ids");
    let stores = [
        builder().connect().await.unwrap(),
        builder().connect().await.unwrap(),
    ];
    let [one, other] = stores.map(|store| limiter(store).refusal_cache(Duration::ZERO));
    for number in 0..10 {
        let tenant = Limit::new(format!("tenant-{number}"), 1, DAY).unwrap();
        let user = Limit::new(format!("user-{number}"), 1, DAY).unwrap();
        let whole = || {
            let keys = [
                (tenant.clone(), "acme".to_owned()),
                (user.clone(), "ada".to_owned()),
            ];
            check(keys).with_id(AdmissionId(number))
        };
        assert!(one.check(&user, "ada", 1).await.unwrap().is_allowed());
        // The user's unit leaves while both try.
        let (first, _, second) = tokio::join!(
            one.check_all(whole()),
            one.reset(&user, "ada"),
            other.check_all(whole())
        );
        let is_any_admitted = first.unwrap().is_allowed() || second.unwrap().is_allowed();
        let third = other.check(&tenant, "acme", 1).await.unwrap();
        assert!(!is_any_admitted || !third.is_allowed(), "two of one");
    }
}

/// The caller leaves while one of the nodes has answered, and the other has not.
#[tokio::test]
async fn what_a_quick_slot_has_counted_is_given_back_after_the_caller_has_left() {
    let cluster = RedisCluster::start(3).await;
    let proxies = Proxies::start(&cluster).await;
    let limiter = limiter(proxies.builder().connect().await.unwrap());
    let limit = Limit::per_day("calls", 100);
    let keys = ["a", "b", "c", "d", "e", "f"];
    let whole = || check(keys.map(|key| (limit.clone(), key.to_owned())));
    for slow in 0..3 {
        proxies.0[slow].delay_replies(Duration::from_millis(600));
        for _ in 0..3 {
            let left = timeout(Duration::from_millis(200), limiter.check_all(whole())).await;
            assert!(left.is_err(), "it still waits for a node");
        }
        proxies.0[slow].delay_replies(Duration::ZERO);
        for key in keys {
            falls_to(&limiter, &limit, key, 0).await;
        }
    }
}

/// A client over its own limit takes nothing from its tenant, not even for a moment.
#[tokio::test]
async fn a_client_over_its_own_limit_asks_no_slot() {
    let cluster = RedisCluster::start(3).await;
    let store = cluster.builder().connect().await.unwrap();
    let limiter = limiter(store).refusal_cache(DAY);
    let (tenant, user) = (Limit::per_day("tenant", 100), Limit::per_day("user", 1));
    let whole = || {
        check([
            (tenant.clone(), "acme".to_owned()),
            (user.clone(), "ada".to_owned()),
        ])
    };
    assert!(limiter.check_all(whole()).await.unwrap().is_allowed());
    assert!(!limiter.check_all(whole()).await.unwrap().is_allowed());
    falls_to(&limiter, &tenant, "acme", 1).await;
    let scripts = || -> u64 { cluster.0.iter().map(RedisServer::script_calls).sum() };
    let before = scripts();
    for _ in 0..100 {
        assert!(!limiter.check_all(whole()).await.unwrap().is_allowed());
    }
    assert_eq!(scripts(), before);
}
