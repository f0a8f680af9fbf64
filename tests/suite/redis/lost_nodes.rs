//! A node of a cluster that is killed or stopped: checks of its keys have no decision, and all
//! others are decided.

use std::{
    cell::Cell,
    collections::BTreeMap,
    thread,
    time::{Duration, Instant},
};

use axum::body::Body;
use http::{Request, StatusCode, request::Parts};
use tokio::{task::JoinSet, time::sleep};
use tower::ServiceExt;
use tower_sliding_window::{
    Charge, Check, Error, Key, Limit, Limiter, RateLimitLayer, RedisStore, Store,
    extract::KeyError, limiter::Breaker, store::RedisSource,
};

use crate::support::{
    TEST_TIMEOUT, log::Log, ms, one_thread, redis_cluster::RedisCluster, services::around,
    services::handler, until,
};

const CALLS: Limit = Limit::per_hour("calls", 1_000_000);
const STREAMS: Limit = Limit::concurrent("streams", 1_000);

/// A node of a cluster, after which the others still decide, and for each node keys that it has.
struct Nodes {
    cluster: RedisCluster,
    keys: [Vec<String>; 3],
}

#[derive(Clone, Copy, Debug)]
enum Loss {
    Killed,
    Stopped,
}

impl Nodes {
    async fn start() -> Self {
        let cluster = RedisCluster::start(3).await;
        cluster
            .0
            .iter()
            .for_each(|node| node.run::<()>("CONFIG SET cluster-require-full-coverage no"));
        let (limiter, mut keys) = (
            cluster.limiter(cluster.builder()),
            [const { Vec::new() }; 3],
        );
        for key in (0..40).map(|number| format!("key-{number}")) {
            assert!(
                limiter
                    .check(&CALLS, key.as_str(), 1)
                    .await
                    .unwrap()
                    .is_allowed()
            );
            let has_it = |node: &usize| cluster.0[*node].keys().len() > keys[*node].len();
            let node = (0..3).find(has_it).unwrap();
            keys[node].push(key);
        }
        assert!(keys.iter().all(|keys| keys.len() > 2));
        Self { cluster, keys }
    }

    /// As an application makes it: with the default timeouts and breaker.
    async fn store(&self) -> RedisStore {
        let store = RedisStore::builder(RedisSource::cluster(
            self.cluster.0.iter().map(|node| node.url()),
        ))
        .connect()
        .await
        .unwrap();
        let check = Check::new(Charge::new(CALLS, self.keys[0][0].as_str(), 0).unwrap());
        until("the store does not learn the nodes", || {
            store.part_of(&check).is_some()
        })
        .await;
        store
    }

    /// How often the nodes that are not lost were asked for the slots.
    fn look_ups(&self) -> u64 {
        self.cluster.0[..2]
            .iter()
            .map(|node| node.calls("cluster"))
            .sum()
    }

    /// Loses the last node.
    fn lose(&mut self, loss: Loss) {
        match loss {
            Loss::Killed => self.cluster.0[2].kill(),
            Loss::Stopped => self.cluster.0[2].pause(),
        }
    }
}

/// With a deadline that a busy machine keeps.
fn patient(store: &RedisStore) -> Limiter {
    Limiter::new(store.clone())
        .refusal_cache(Duration::ZERO)
        .deadline(ms(500))
}

/// The outcomes of checks: `None` is a decision.
type Outcomes = BTreeMap<Option<&'static str>, usize>;

fn label<T>(outcome: &Result<T, Error>) -> Option<&'static str> {
    Some(match outcome.as_ref().err()? {
        Error::BreakerOpen(_) => "breaker open",
        Error::TimedOut { .. } => "timed out",
        _ => "unavailable",
    })
}

/// Asks one after the other until then.
async fn ask(limiter: Limiter, checks: Vec<Check>, until: Instant) -> Outcomes {
    let mut outcomes = Outcomes::new();
    for check in checks.iter().cycle().take_while(|_| Instant::now() < until) {
        *outcomes
            .entry(label(&limiter.check_all(check.clone()).await))
            .or_default() += 1;
        sleep(ms(1)).await;
    }
    outcomes
}

fn check(key: &str) -> Check {
    Check::new(Charge::new(CALLS, key, 1).unwrap())
}

fn checks(keys: &[String]) -> Vec<Check> {
    keys.iter().map(|key| check(key)).collect()
}

/// 29 tasks use keys of the lost node, and one uses others. Returns the outcomes of both.
async fn load(limiter: &Limiter, nodes: &Nodes) -> (Outcomes, Outcomes) {
    let end = Instant::now() + Duration::from_secs(3);
    let mut lost: JoinSet<_> = (0..29)
        .map(|_| ask(limiter.clone(), checks(&nodes.keys[2]), end))
        .collect();
    let healthy = ask(
        limiter.clone(),
        checks(&[&nodes.keys[0][..], &nodes.keys[1]].concat()),
        end,
    )
    .await;
    let mut all = Outcomes::new();
    while let Some(outcomes) = lost.join_next().await {
        outcomes
            .unwrap()
            .into_iter()
            .for_each(|(label, count)| *all.entry(label).or_default() += count);
    }
    (all, healthy)
}

async fn a_lost_node_fails_no_check_of_others(loss: Loss, own: bool) {
    let (log, mut nodes) = (Log::start(), Nodes::start().await);
    let store = nodes.store().await;
    let limiter = if own {
        patient(&store).breaker(Breaker::default())
    } else {
        patient(&store)
    };
    let (lost, _) = load(&limiter, &nodes).await;
    assert_eq!(lost.into_keys().collect::<Vec<_>>(), [None]);
    nodes.lose(loss);
    let (lost, healthy) = load(&limiter, &nodes).await;
    assert_eq!(
        healthy.keys().collect::<Vec<_>>(),
        [&None],
        "{loss:?}: {healthy:?} beside {lost:?}"
    );
    assert!(!lost.contains_key(&None), "{lost:?}");
    assert!(lost.contains_key(&Some("breaker open")), "{lost:?}");
    let opened = log
        .text()
        .lines()
        .filter(|line| line.contains("the breaker opens"))
        .map(str::to_owned)
        .collect::<Vec<_>>();
    let part = format!("part=\"{}\"", nodes.cluster.0[2].address());
    assert!(
        !opened.is_empty() && opened.iter().all(|line| line.contains(&part)),
        "{opened:?}"
    );
    if let Loss::Stopped = loss {
        nodes.cluster.0[2].resume();
        let begun = Instant::now();
        while limiter
            .check(&CALLS, nodes.keys[2][0].as_str(), 1)
            .await
            .is_err()
        {
            assert!(
                begun.elapsed() < TEST_TIMEOUT,
                "it is back, and its keys are not decided"
            );
            sleep(ms(10)).await;
        }
    }
}

#[tokio::test]
async fn a_killed_node_fails_no_check_of_others() {
    a_lost_node_fails_no_check_of_others(Loss::Killed, false).await;
}

#[tokio::test]
async fn a_stopped_node_fails_no_check_of_others() {
    a_lost_node_fails_no_check_of_others(Loss::Stopped, false).await;
}

#[tokio::test]
async fn a_breaker_of_ones_own_counts_by_node() {
    a_lost_node_fails_no_check_of_others(Loss::Stopped, true).await;
}

/// Asks until the breaker refuses a call, and returns how often the call failed before: five times,
/// unless a place is renewed meanwhile.
async fn failures_until_open<T>(what: &str, call: impl AsyncFn() -> Result<T, Error>) -> usize {
    for failures in 0.. {
        match label(&call().await) {
            Some("breaker open") => {
                return if (5..9).contains(&failures) {
                    5
                } else {
                    failures
                };
            }
            Some(_) => assert!(failures < 100, "{what} does not open the breaker"),
            None => panic!("{what} has succeeded"),
        }
    }
    0
}

/// Asks until the call succeeds. While the client looks up the slots, all calls wait for the lost
/// node as long as a reply may take. So calls to others may time out, and open the breaker. Nothing
/// else may.
async fn succeeds<T>(nodes: &Nodes, call: impl AsyncFn() -> Result<T, Error>) -> T {
    let (begun, look_ups) = (Instant::now(), nodes.look_ups());
    let mut was_open = false;
    loop {
        match call().await {
            Ok(output) => {
                assert!(
                    !was_open || nodes.look_ups() > look_ups,
                    "the breaker opened, and nobody looked up the slots"
                );
                return output;
            }
            Err(error) => {
                was_open |= matches!(error, Error::BreakerOpen(_));
                let is_late = matches!(error, Error::BreakerOpen(_) | Error::TimedOut { .. });
                assert!(is_late && begun.elapsed() < TEST_TIMEOUT, "{error:?}");
            }
        }
    }
}

/// Checks, places, settlements, resets, checks of several slots, and calls of another runtime.
async fn each_call_counts_against_its_node(loss: Loss) {
    let mut nodes = Nodes::start().await;
    let store = nodes.store().await;
    let limiter = || patient(&store).breaker(Breaker::default());
    let [first, second, lost] = [0, 1, 2].map(|node| nodes.keys[node][0].clone());
    let place = |key: &str| Check::new(Charge::new(STREAMS, key, 1).unwrap());
    let pair = |one: &str, other: &str| {
        check(one)
            .and(Charge::new(CALLS, other, 1).unwrap())
            .unwrap()
    };
    let reserve = async |limiter: &Limiter, key: &str| {
        limiter
            .reserve(&CALLS, key, 5, Duration::from_secs(600))
            .await
            .unwrap()
            .expect("admitted")
    };
    let settling = limiter();
    let [kept, gone] = [
        reserve(&settling, &first).await,
        reserve(&settling, &lost).await,
    ];
    // It is renewed meanwhile.
    let _held = limiter().check_all(place(&first)).await.unwrap();
    nodes.lose(loss);

    let checks = limiter();
    assert_eq!(
        failures_until_open("a check", async || checks.check_all(check(&lost)).await).await,
        5
    );
    assert!(
        succeeds(&nodes, async || checks
            .check_all(pair(&first, &second))
            .await)
        .await
        .is_allowed()
    );
    assert_eq!(
        failures_until_open("a pair", async || checks
            .check_all(pair(&first, &lost))
            .await)
        .await,
        5
    );
    for others in [
        check(&first),
        check(&second),
        place(&second),
        pair(&second, &first),
    ] {
        assert!(
            succeeds(&nodes, async || checks.check_all(others.clone()).await)
                .await
                .is_allowed()
        );
    }
    succeeds(&nodes, async || checks.reset(&CALLS, second.as_str()).await).await;
    let places = limiter();
    assert_eq!(
        failures_until_open("a place", async || places.check_all(place(&lost)).await).await,
        5
    );
    assert!(
        succeeds(&nodes, async || places.check_all(place(&first)).await)
            .await
            .is_allowed()
    );
    assert_eq!(
        failures_until_open("a settlement", async || gone.settle(1).await).await,
        5
    );
    let tries = Cell::new(0);
    let settled = succeeds(&nodes, async || {
        tries.set(tries.get() + 1);
        kept.settle(1).await
    });
    // A try that has timed out may have been counted, and the next one then finds it settled.
    assert!(settled.await.was_applied || tries.get() > 1);
    let resets = limiter();
    assert_eq!(
        failures_until_open("a reset", async || resets
            .reset(&CALLS, lost.as_str())
            .await)
        .await,
        5
    );
    succeeds(&nodes, async || resets.reset(&CALLS, first.as_str()).await).await;

    // The breaker of the store, which other runtimes open.
    let shared = patient(&store);
    let elsewhere = shared.clone();
    let opened = thread::spawn(move || {
        one_thread().block_on(async {
            failures_until_open("a check", async || elsewhere.check_all(check(&lost)).await).await
        })
    });
    assert_eq!(opened.join().unwrap(), 5);
    for key in [first, second] {
        assert!(
            succeeds(&nodes, async || shared.check_all(check(&key)).await)
                .await
                .is_allowed()
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn each_call_counts_against_its_node_if_that_is_killed() {
    each_call_counts_against_its_node(Loss::Killed).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_call_counts_against_its_node_if_that_is_stopped() {
    each_call_counts_against_its_node(Loss::Stopped).await;
}

/// A layer that fails closed answers 503 for the keys of the lost node only.
#[tokio::test]
async fn a_layer_that_fails_closed_does_so_for_the_lost_node() {
    let key =
        |parts: &Parts| Ok::<_, KeyError>(Key::from(parts.uri.path().trim_start_matches('/')));
    for loss in [Loss::Killed, Loss::Stopped] {
        let mut nodes = Nodes::start().await;
        let layer = RateLimitLayer::new(nodes.store().await)
            .limit(CALLS.by(key))
            .deadline(ms(500))
            .fail_closed();
        let app = around(&layer, handler());
        let status = async |node: usize, nodes: &Nodes| {
            let request = Request::get(format!("/{}", nodes.keys[node][0]))
                .body(Body::empty())
                .unwrap();
            app.clone().oneshot(request).await.unwrap().status()
        };
        assert_eq!(
            [status(0, &nodes).await, status(2, &nodes).await],
            [StatusCode::OK; 2]
        );
        nodes.lose(loss);
        for _ in 0..20 {
            assert_eq!(status(2, &nodes).await, StatusCode::SERVICE_UNAVAILABLE);
            assert_eq!(
                [status(0, &nodes).await, status(1, &nodes).await],
                [StatusCode::OK; 2],
                "{loss:?}"
            );
        }
    }
}

/// Slots of a node move to another, which is then lost. They count against the node that has them.
#[tokio::test]
async fn moved_slots_count_against_their_new_node() {
    let mut nodes = Nodes::start().await;
    let (store, moved) = (nodes.store().await, nodes.keys[0][0].clone());
    let limiter = patient(&store);
    let [to, from] = [2, 0].map(|node| nodes.cluster.0[node].run::<String>("CLUSTER MYID"));
    limiter.reset(&CALLS, moved.as_str()).await.unwrap();
    assert!(
        limiter
            .check(&CALLS, moved.as_str(), 1)
            .await
            .unwrap()
            .is_allowed()
    );
    let keys = nodes.cluster.0[0].keys();
    let before = store.part_of(&check(&moved));
    let key = {
        limiter.reset(&CALLS, moved.as_str()).await.unwrap();
        let left = nodes.cluster.0[0].keys();
        keys.into_iter().find(|key| !left.contains(key)).unwrap()
    };
    let slot: u16 = nodes.cluster.0[0].run(&format!("CLUSTER KEYSLOT {key}"));
    nodes.cluster.0[2].run::<()>(&format!("CLUSTER SETSLOT {slot} IMPORTING {from}"));
    nodes.cluster.0[0].run::<()>(&format!("CLUSTER SETSLOT {slot} MIGRATING {to}"));
    for node in [2, 0, 1] {
        nodes.cluster.0[node].run::<()>(&format!("CLUSTER SETSLOT {slot} NODE {to}"));
    }
    assert!(
        limiter
            .check(&CALLS, moved.as_str(), 1)
            .await
            .unwrap()
            .is_allowed()
    );
    let after = store.part_of(&check(&moved));
    assert_eq!(
        after.as_deref(),
        Some(&*nodes.cluster.0[2].address()),
        "it was {before:?}"
    );
    assert_eq!(store.part_of(&check(&nodes.keys[0][1])), before);
    nodes.lose(Loss::Stopped);
    assert_eq!(
        failures_until_open("a check", async || limiter.check_all(check(&moved)).await).await,
        5
    );
    assert!(
        succeeds(&nodes, async || limiter
            .check_all(check(&nodes.keys[0][1]))
            .await)
        .await
        .is_allowed()
    );
}
