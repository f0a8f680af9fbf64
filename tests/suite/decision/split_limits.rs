//! Limits that are split into parts: together the parts never admit more than the whole limit.

use std::{convert::Infallible, panic::catch_unwind, time::Duration};

use axum::body::Body;
use http::{Request, Response};
use proptest::{
    collection::vec,
    prelude::*,
    test_runner::{Config, TestCaseError, TestRunner},
};
use tokio::task::JoinSet;
use tower::{Layer, ServiceExt, service_fn};
use tower_sliding_window::{
    Charge, Check, Key, KeyedLimit, Limit, Limiter, MemoryStore, RateLimitLayer, Store,
    middleware::ShadowRefusals, split::Split, store::ManualClock,
};

use crate::support::{
    Fixture, for_every_store,
    requests::{anyone, figures, hello, request},
};

/// 16 parts of 100 units.
const CALLS: Split = Limit::per_hour("calls", 1_600).split(16);

/// The units that each part has used.
async fn used(limiter: &Limiter, split: &Split, key: &Key) -> Vec<u64> {
    let mut used = Vec::new();
    for part in split.keys(key.clone()) {
        used.push(
            limiter
                .peek(&split.part, part)
                .await
                .unwrap()
                .binding()
                .used,
        );
    }
    used
}

/// Spends `times` units of `ada` from many tasks, one at a time, and returns how many were
/// admitted.
async fn spend_from_many_tasks(limiter: &Limiter, times: usize) -> u64 {
    let mut tasks = JoinSet::new();
    for _ in 0..32 {
        let limiter = limiter.clone();
        tasks.spawn(async move {
            let mut admitted = 0;
            for _ in 0..times / 32 {
                let decision = limiter
                    .check(&CALLS.part, CALLS.next_key("ada"), 1)
                    .await
                    .unwrap();
                admitted += u64::from(decision.is_allowed());
            }
            admitted
        });
    }
    tasks.join_all().await.into_iter().sum()
}

/// With as many checks as units, nearly all are admitted, whichever part they get. With many more,
/// all units are used.
async fn all_parts_together_admit_the_limit(test: Fixture<impl Store + Clone>) {
    let admitted = spend_from_many_tasks(&test.limiter, 1_600).await;
    assert!((1_500..=1_600).contains(&admitted), "{admitted}");
    assert_eq!(
        admitted + spend_from_many_tasks(&test.limiter, 3_200).await,
        1_600
    );
    assert_eq!(used(&test.limiter, &CALLS, &"ada".into()).await, [100; 16]);
    assert_eq!(spend_from_many_tasks(&test.limiter, 320).await, 0);
    test.clock.advance(Duration::from_secs(3_600));
    assert!(spend_from_many_tasks(&test.limiter, 320).await >= 300);
}

async fn a_split_limit_is_reset_part_by_part(test: Fixture<impl Store + Clone>) {
    for _ in 0..64 {
        for key in ["ada", "bob"] {
            assert!(
                test.limiter
                    .check(&CALLS.part, CALLS.next_key(key), 1)
                    .await
                    .unwrap()
                    .is_allowed()
            );
        }
    }
    assert_eq!(
        used(&test.limiter, &CALLS, &"ada".into())
            .await
            .iter()
            .sum::<u64>(),
        64
    );
    for part in CALLS.keys("ada") {
        test.limiter.reset(&CALLS.part, part).await.unwrap();
    }
    assert_eq!(used(&test.limiter, &CALLS, &"ada".into()).await, [0; 16]);
    assert_eq!(
        used(&test.limiter, &CALLS, &"bob".into())
            .await
            .iter()
            .sum::<u64>(),
        64
    );
    assert_eq!(
        test.limiter
            .peek(&CALLS.part, "ada")
            .await
            .unwrap()
            .binding()
            .used,
        0,
        "the key itself is no part"
    );
}

async fn a_settlement_reaches_the_part_that_was_charged(test: Fixture<impl Store + Clone>) {
    let mut reservations = Vec::new();
    for _ in 0..32 {
        let key = CALLS.next_key("ada");
        reservations.push(
            test.limiter
                .reserve(&CALLS.part, key, 10, Duration::from_secs(60))
                .await
                .unwrap()
                .unwrap(),
        );
    }
    for (number, reservation) in reservations.iter().enumerate() {
        assert!(
            reservation
                .settle(if number % 2 == 0 { 0 } else { 3 })
                .await
                .unwrap()
                .was_applied
        );
    }
    let used = used(&test.limiter, &CALLS, &"ada".into()).await;
    assert_eq!(used.iter().sum::<u64>(), 48);
    assert!(used.iter().all(|used| used % 3 == 0), "{used:?}");
}

for_every_store! {
    all_parts_together_admit_the_limit
    a_split_limit_is_reset_part_by_part
    a_settlement_reaches_the_part_that_was_charged
}

#[derive(Clone, Debug)]
enum Step {
    Ask { cost: u64 },
    Advance { micros: u64 },
}

/// Random limits in random parts: no window admits more than the limit, and a check that fits into
/// its part is admitted.
#[test]
fn no_window_admits_more_than_the_whole_limit() {
    const WINDOW: Duration = Duration::from_millis(100);

    let ask = prop_oneof![8 => Just(1), 1 => 0..20_u64].prop_map(|cost| Step::Ask { cost });
    let advance = prop_oneof![8 => 0..2_000_u64, 1 => 0..150_000_u64]
        .prop_map(|micros| Step::Advance { micros });
    let steps = vec(prop_oneof![8 => ask, 3 => advance], 1..1_000);
    let limits = (1..200_u64)
        .prop_flat_map(|units| (Just(units), 1..=u32::try_from(units).unwrap().min(40)));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let config = Config {
        cases: 300,
        failure_persistence: None,
        ..Config::default()
    };
    let outcome = TestRunner::new(config).run(&(limits, steps), |((units, parts), steps)| {
        let clock = ManualClock::new();
        let limiter = Limiter::new(MemoryStore::new().clock(&clock));
        let split = Limit::per("calls", units, WINDOW).split(parts);
        let mut admitted = Vec::new();
        for step in steps {
            match step {
                Step::Advance { micros } => clock.advance(Duration::from_micros(micros)),
                Step::Ask { cost } => {
                    match runtime.block_on(limiter.check(&split.part, split.next_key("ada"), cost))
                    {
                        Ok(decision) if decision.is_allowed() => admitted.push((clock.now(), cost)),
                        Ok(refused) => {
                            prop_assert!(refused.binding().used + cost > units / u64::from(parts));
                        }
                        Err(_) => prop_assert!(cost > units / u64::from(parts)),
                    }
                }
            }
        }
        for (place, (first, _)) in admitted.iter().enumerate() {
            let window = admitted[place..]
                .iter()
                .take_while(|(at, _)| *at < *first + WINDOW);
            let count: u64 = window.map(|(_, cost)| cost).sum();
            prop_assert!(
                count <= units,
                "{} in a window of {} in {} parts",
                count,
                units,
                parts
            );
        }
        Ok::<_, TestCaseError>(())
    });
    if let Err(failure) = outcome {
        panic!("{failure}");
    }
}

async fn send_requests(layer: RateLimitLayer, times: usize) -> Vec<Response<Body>> {
    let (app, mut responses) = (layer.layer(service_fn(hello)), Vec::new());
    for _ in 0..times {
        responses.push(app.clone().oneshot(request()).await.unwrap());
    }
    responses
}

fn admitted(responses: &[Response<Body>]) -> usize {
    responses
        .iter()
        .filter(|response| response.status() == 200)
        .count()
}

fn layer(limit: KeyedLimit) -> RateLimitLayer {
    RateLimitLayer::new(MemoryStore::new()).limit(limit)
}

fn key_of_anyone() -> Key {
    anyone(&request().into_parts().0).unwrap()
}

/// 22 units in 4 parts are four parts of 5.
#[tokio::test]
async fn a_request_is_charged_to_one_part_and_shown_its_figures() {
    let limit = Limit::per_hour("calls", 22);
    let responses = send_requests(layer(limit.clone().split(4).by(anyone)), 100).await;
    assert_eq!(admitted(&responses), 20);
    for response in &responses {
        let [of, remaining, _, retry_after] = figures(response.headers());
        assert_eq!(
            (of, retry_after.is_some()),
            (Some("5"), response.status() == 429)
        );
        assert!(remaining.unwrap().parse::<u64>().unwrap() < 5);
    }
    let costly = send_requests(layer(limit.split(4).by(anyone).cost(|_| 6)), 1).await;
    assert_eq!(
        (costly[0].status().as_u16(), figures(costly[0].headers())[3]),
        (429, None),
        "it never fits"
    );
}

#[tokio::test]
async fn a_reservation_is_settled_in_its_own_part() {
    let limit = Limit::per_hour("calls", 400).split(4);
    let (store, clock) = (MemoryStore::new(), ManualClock::new());
    let keyed = limit.clone().by(anyone).cost(|_| 40).settle(|_| 7);
    let layer = RateLimitLayer::new(store.clone()).limit(keyed);
    assert_eq!(admitted(&send_requests(layer, 32).await), 32);
    let of_parts = used(&Limiter::new(store), &limit, &key_of_anyone()).await;
    assert_eq!(of_parts.iter().sum::<u64>(), 32 * 7);

    // Units that are never settled return when the lease ends.
    let store = MemoryStore::new().clock(&clock);
    let keyed = limit
        .clone()
        .by(anyone)
        .settle(|_| 1)
        .lease(Duration::from_secs(9));
    let app = RateLimitLayer::new(store.clone())
        .limit(keyed)
        .layer(service_fn(|_: Request<Body>| async {
            std::future::pending::<Result<Response<Body>, Infallible>>().await
        }));
    for _ in 0..8 {
        assert!(
            tokio::time::timeout(Duration::from_millis(1), app.clone().oneshot(request()))
                .await
                .is_err()
        );
    }
    let limiter = Limiter::new(store);
    assert_eq!(
        used(&limiter, &limit, &key_of_anyone())
            .await
            .iter()
            .sum::<u64>(),
        8
    );
    clock.advance(Duration::from_secs(9));
    assert_eq!(used(&limiter, &limit, &key_of_anyone()).await, [0; 4]);
}

#[tokio::test]
async fn a_split_shadow_limit_refuses_nothing() {
    let responses = send_requests(
        layer(Limit::per_hour("calls", 8).split(4).by(anyone).in_shadow()),
        100,
    )
    .await;
    let would_refuse = |response: &&Response<Body>| {
        let refusals: Option<&ShadowRefusals> = response.extensions().get();
        refusals.is_some_and(|refusals| refusals.names().eq(["calls"]))
    };
    assert_eq!(
        (
            admitted(&responses),
            responses.iter().filter(would_refuse).count()
        ),
        (100, 92)
    );
}

#[test]
fn a_layer_takes_no_split_limit_that_heeds_an_upstream() {
    let heeding = || {
        Limit::per_hour("calls", 80)
            .split(8)
            .by(anyone)
            .heed_upstream()
    };
    let error = RateLimitLayer::new(MemoryStore::new())
        .limits([heeding()])
        .unwrap_err();
    assert!(
        error
            .to_string()
            .contains("put `heed_upstream` on a limit that is not split, beside it"),
        "{error}"
    );
    assert!(catch_unwind(|| layer(heeding())).is_err());
}

#[test]
fn invalid_parts_are_a_panic_where_the_limit_is_made() {
    let limit = || Limit::per_hour("calls", 10);
    for parts in [0, 11] {
        assert!(catch_unwind(|| limit().split(parts)).is_err());
    }
    let _ = limit().split(10);
}

/// 1,600 units on three primaries with one replica each.
#[cfg(feature = "cluster")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn parts_are_spread_over_all_nodes_of_a_cluster() {
    use std::collections::HashSet;

    use crate::support::{redis_cluster::RedisCluster, redis_server::RedisServer};

    let cluster = RedisCluster::start(6).await;
    let limiter = cluster.limiter(cluster.builder());
    let admitted = spend_from_many_tasks(&limiter, 1_600).await;
    assert!((1_450..=1_600).contains(&admitted), "{admitted}");
    assert_eq!(
        admitted + spend_from_many_tasks(&limiter, 3_200).await,
        1_600
    );
    assert_eq!(used(&limiter, &CALLS, &"ada".into()).await, [100; 16]);

    let by_node: Vec<_> = cluster.primaries().map(RedisServer::keys).collect();
    assert!(
        by_node.len() == 3 && by_node.iter().all(|keys| !keys.is_empty()),
        "{by_node:?}"
    );
    let slot = |key: &String| cluster.0[0].run::<u16>(&format!("CLUSTER KEYSLOT {key}"));
    assert_eq!(
        by_node
            .iter()
            .flatten()
            .map(slot)
            .collect::<HashSet<_>>()
            .len(),
        16
    );

    for part in CALLS.keys("ada") {
        limiter.reset(&CALLS.part, part).await.unwrap();
    }
    assert_eq!(
        cluster
            .primaries()
            .map(|node| node.keys().len())
            .sum::<usize>(),
        0
    );
}

/// In one call, and nothing is spent.
#[tokio::test]
async fn check_all_at_no_cost_shows_several_limits() {
    let limiter = Limiter::new(MemoryStore::new());
    let split = Limit::per_hour("split", 12).split(3);
    let places = Limit::concurrent("places", 4);
    let mut held = Vec::new();
    for _ in 0..3 {
        assert!(
            limiter
                .check(&split.part, split.next_key("ada"), 1)
                .await
                .unwrap()
                .is_allowed()
        );
        held.push(limiter.check(&places, "ada", 1).await.unwrap());
    }
    for _ in 0..2 {
        let place = Charge::new(places.clone(), "ada", 0).unwrap();
        let parts = split
            .keys("ada")
            .map(|key| Charge::new(split.part.clone(), key, 0).unwrap());
        let check = parts.fold(Check::new(place), |check, part| check.and(part).unwrap());
        let shown = limiter.check_all(check).await.unwrap();
        assert!(!shown.holds_place());
        let used: Vec<_> = shown.statuses().map(|status| status.used).collect();
        // Requests go to the parts in turn, which begin at a random part and are not strict.
        assert_eq!((used[0], used[1..].iter().sum::<u64>()), (3, 3));
    }
}
