//! A server behind one address that refuses keys of two slots in one call, as managed services do:
//! a node of a cluster that has all slots.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
    thread::sleep,
    time::{Duration, Instant},
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::JoinSet,
};
use tower_sliding_window::{
    Algorithm, Charge, Check, Limit, Limiter, RedisStore, limiter::Breaker, settlement::Settlement,
};

use crate::support::{
    TEST_TIMEOUT,
    redis_cluster::RedisCluster,
    redis_server::{RedisServer, store_at},
    two_threads,
};

fn charge(limit: &Limit, key: &str) -> Charge {
    Charge::new(limit.clone(), key, 1).unwrap()
}

fn limiter(store: RedisStore) -> Limiter {
    Limiter::new(store)
        .refusal_cache(Duration::ZERO)
        .deadline(TEST_TIMEOUT)
        .breaker(Breaker::OFF)
}

/// A store that has tried the server out, and one that has not.
async fn limiters(cluster: &RedisCluster) -> [Limiter; 2] {
    let builder = || cluster.0[0].store();
    [
        limiter(builder().connect().await.unwrap()),
        limiter(builder().build().unwrap()),
    ]
}

/// 50 clients use ten keys, each of them 200 times in all, of which the limit admits 50.
#[tokio::test]
async fn many_clients_are_decided_at_once() {
    for algorithm in [Algorithm::SLIDING_LOG, Algorithm::FIXED_WINDOW] {
        let cluster = RedisCluster::start(1).await;
        for (number, limiter) in limiters(&cluster).await.into_iter().enumerate() {
            let limit =
                Limit::new(format!("calls-{number}"), 50, Duration::from_secs(86_400)).unwrap();
            let limit = limit.with_algorithm(algorithm);
            let mut clients = JoinSet::new();
            for client in 0..50 {
                let (limiter, limit) = (limiter.clone(), limit.clone());
                clients.spawn(async move {
                    let mut outcomes = BTreeMap::<_, u64>::new();
                    for number in 0..40 {
                        let outcome = limiter
                            .check(&limit, format!("key-{}", (client + number) % 10), 1)
                            .await;
                        let outcome = outcome
                            .map(|decision| decision.is_allowed())
                            .map_err(|error| format!("{error:?}"));
                        *outcomes.entry(outcome).or_default() += 1;
                    }
                    outcomes
                });
            }
            let mut all = BTreeMap::new();
            for (outcome, count) in clients.join_all().await.into_iter().flatten() {
                *all.entry(outcome).or_default() += count;
            }
            assert_eq!(all, BTreeMap::from([(Ok(true), 500), (Ok(false), 1_500)]));
        }
    }
}

/// Alone and together, with a store that learns it at the first of them.
#[tokio::test]
async fn a_check_of_two_keys_is_decided() {
    let (cluster, calls) = (RedisCluster::start(1).await, Limit::per_hour("calls", 20));
    let pair = |number: usize| {
        Check::new(charge(&calls, &format!("a-{number}")))
            .and(charge(&calls, &format!("b-{number}")))
            .unwrap()
    };
    for (kind, limiter) in limiters(&cluster).await.into_iter().enumerate() {
        assert!(
            limiter.check_all(pair(kind)).await.unwrap().is_allowed(),
            "alone"
        );
        let copies: JoinSet<_> = (0..40).map(|_| limiter.check_all(pair(kind))).collect();
        let admitted = copies
            .join_all()
            .await
            .into_iter()
            .filter(|outcome| outcome.as_ref().unwrap().is_allowed());
        assert_eq!(admitted.count(), 19);
    }
    let [_, crowd] = limiters(&cluster).await;
    // Those in flight at the first error, and copies, and those in the queue.
    let checks: JoinSet<_> = (0..2_000)
        .map(|number| crowd.check_all(pair(10 + number % 100)))
        .collect();
    let admitted = checks
        .join_all()
        .await
        .into_iter()
        .filter(|outcome| outcome.as_ref().unwrap().is_allowed());
    assert_eq!(admitted.count(), 2_000);
    assert_eq!(crowd.peek(&calls, "b-10").await.unwrap().binding().used, 20);
}

/// Places are freed, and units are settled, in several slots at once.
#[tokio::test]
async fn places_and_settlements_of_several_slots_are_done() {
    let (cluster, calls, streams) = (
        RedisCluster::start(1).await,
        Limit::per_hour("calls", 100),
        Limit::concurrent("streams", 1),
    );
    for limiter in limiters(&cluster).await {
        let both = Check::new(charge(&streams, "ada"))
            .and(charge(&streams, "bob"))
            .unwrap();
        for _ in 0..3 {
            let held = limiter
                .acquire_all(both.clone(), TEST_TIMEOUT)
                .await
                .unwrap();
            assert!(held.is_allowed());
            assert!(!limiter.check_all(both.clone()).await.unwrap().is_allowed());
            drop(held);
            let freed = limiter
                .acquire_all(both.clone(), TEST_TIMEOUT)
                .await
                .unwrap();
            assert!(freed.is_allowed());
            drop(freed);
            let one = limiter
                .acquire(&streams, "bob", 1, TEST_TIMEOUT)
                .await
                .unwrap();
            drop((
                one,
                limiter
                    .acquire(&streams, "ada", 1, TEST_TIMEOUT)
                    .await
                    .unwrap(),
            ));
            assert!(
                limiter
                    .acquire_all(both.clone(), TEST_TIMEOUT)
                    .await
                    .unwrap()
                    .is_allowed()
            );
        }
        let units = Check::new(charge(&calls, "ada").reserve(Duration::from_secs(60)))
            .and(charge(&calls, "bob").reserve(Duration::from_secs(60)))
            .unwrap();
        let admitted = limiter.check_all(units.clone()).await.unwrap();
        assert!(
            limiter
                .settle(Settlement::new(units, &admitted, |_| Some(7)))
                .await
                .unwrap()
                .was_applied
        );
        for key in ["ada", "bob"] {
            assert_eq!(limiter.peek(&calls, key).await.unwrap().binding().used, 7);
            limiter.reset(&calls, key).await.unwrap();
        }
    }
    // A store whose first call of several slots is a settlement.
    let units = Check::new(charge(&calls, "ada"))
        .and(charge(&calls, "bob"))
        .unwrap();
    let [first, second] = limiters(&cluster).await;
    let admitted = first.check_all(units.clone()).await.unwrap();
    let refund = Settlement::new(units, &admitted, |_| Some(0));
    assert!(second.settle(refund).await.unwrap().was_applied);
    assert_eq!(second.peek(&calls, "bob").await.unwrap().binding().used, 0);
}

/// Its first slot has admitted the check, or may have. The process goes on.
#[test]
fn a_runtime_that_ends_leaves_nothing_in_any_slot() {
    let (one, other) = (two_threads(), two_threads());
    let cluster = other.block_on(RedisCluster::start(1));
    let [limiter, _] = other.block_on(limiters(&cluster));
    let places = Limit::concurrent("places", 4).freed_after(Duration::from_secs(3_600));
    let pair = || {
        Check::new(charge(&places, "a"))
            .and(charge(&places, "b"))
            .unwrap()
    };
    one.block_on(async { drop(limiter.check_all(pair()).await.unwrap()) });
    let server = &cluster.0[0];
    server.pause();
    for _ in 0..4 {
        one.spawn(limiter.check_all(pair()));
    }
    sleep(Duration::from_millis(100));
    drop(one);
    server.resume();
    let begun = Instant::now();
    let held = || {
        other.block_on(async {
            let [a, b] = ["a", "b"].map(|key| limiter.peek(&places, key));
            a.await.unwrap().binding().used + b.await.unwrap().binding().used
        })
    };
    sleep(Duration::from_secs(1));
    while held() > 0 {
        assert!(begun.elapsed() < TEST_TIMEOUT, "{} are held", held());
    }
}

/// True if a request is one script call on two keys that differ.
fn is_of_two_keys(request: &str) -> bool {
    let Some((_, arguments)) = request.split_once("\r\n$1\r\n2\r\n") else {
        return false;
    };
    let mut keys = arguments
        .split("\r\n")
        .filter(|argument| argument.contains(":{"));
    request.matches("EVAL").count() == 1 && keys.next() != keys.next()
}

/// Passes requests on. In the state 1, the reply to a script call on two keys is lost. From then
/// on, in the state 2, script calls on two keys are refused, as by a node of a cluster.
async fn lose_a_reply_then_refuse(listener: TcpListener, server: String, state: Arc<AtomicU8>) {
    while let Ok((mut client, _)) = listener.accept().await {
        let (mut server, state) = (
            TcpStream::connect(&server).await.unwrap(),
            Arc::clone(&state),
        );
        tokio::spawn(async move {
            let (mut request, mut reply) = (vec![0; 65_536], vec![0; 65_536]);
            loop {
                tokio::select! {
                    read = client.read(&mut request) => {
                        let Ok(length @ 1..) = read else { return };
                        let is_of_two_keys = is_of_two_keys(&String::from_utf8_lossy(&request[..length]));
                        if is_of_two_keys && state.load(Ordering::SeqCst) == 2 {
                            client.write_all(b"-CROSSSLOT Keys in request don't hash to the same slot\r\n").await.unwrap();
                            continue;
                        }
                        server.write_all(&request[..length]).await.unwrap();
                        if is_of_two_keys && state.load(Ordering::SeqCst) == 1 {
                            let _ = server.read(&mut reply).await;
                            state.store(2, Ordering::SeqCst);
                            return;
                        }
                    }
                    read = server.read(&mut reply) => {
                        let Ok(length @ 1..) = read else { return };
                        if client.write_all(&reply[..length]).await.is_err() {
                            return;
                        }
                    }
                }
            }
        });
    }
}

/// A limiter behind such a proxy, and the state of the proxy.
async fn behind_proxy(server: &RedisServer) -> (Limiter, Arc<AtomicU8>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("redis://{}/", listener.local_addr().unwrap());
    let state = Arc::new(AtomicU8::new(0));
    tokio::spawn(lose_a_reply_then_refuse(
        listener,
        server.address(),
        Arc::clone(&state),
    ));
    let store = store_at(&url)
        .connect_timeout(TEST_TIMEOUT)
        .reply_timeout(TEST_TIMEOUT)
        .build()
        .unwrap();
    (limiter(store), state)
}

/// The first try takes places, and its reply is lost. The second is refused because its keys are in
/// two slots, and then each slot is asked under another id.
#[tokio::test]
async fn places_of_a_lost_try_are_freed_if_the_second_try_is_refused_for_its_slots() {
    let server = RedisServer::start();
    let (limiter, state) = behind_proxy(&server).await;
    let places = Limit::concurrent("places", 4).freed_after(Duration::from_secs(3_600));
    let both = || {
        Check::new(charge(&places, "a"))
            .and(charge(&places, "b"))
            .unwrap()
    };
    drop(limiter.check_all(both()).await.unwrap());
    let held = || {
        server
            .keys()
            .iter()
            .map(|key| server.run::<usize>(&format!("ZCARD {key}")))
            .sum::<usize>()
    };
    let are_free = async || {
        let all_free = async {
            while held() > 0 {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(5), all_free)
            .await
            .is_ok()
    };
    assert!(are_free().await);
    state.store(1, Ordering::SeqCst);
    let decision = limiter.check_all(both()).await;
    assert_eq!(state.load(Ordering::SeqCst), 2);
    drop(decision);
    assert!(
        are_free().await,
        "{} places are held by nobody, for an hour",
        held()
    );
}

/// The same with units, which count once.
#[tokio::test]
async fn units_of_a_lost_try_count_once_if_the_second_try_is_refused_for_its_slots() {
    let server = RedisServer::start();
    let (limiter, state) = behind_proxy(&server).await;
    let limiter = limiter.refusal_cache(Duration::ZERO);
    let calls = Limit::per_hour("calls", 100);
    let both = || {
        Check::new(charge(&calls, "a"))
            .and(charge(&calls, "b"))
            .unwrap()
    };
    assert!(limiter.check_all(both()).await.unwrap().is_allowed());
    state.store(1, Ordering::SeqCst);
    assert!(limiter.check_all(both()).await.unwrap().is_allowed());
    assert_eq!(state.load(Ordering::SeqCst), 2);
    let begun = Instant::now();
    loop {
        let [a, b] = [
            limiter.peek(&calls, "a").await,
            limiter.peek(&calls, "b").await,
        ];
        let used = [a, b].map(|peeked| peeked.unwrap().binding().used);
        if used == [2, 2] {
            break;
        }
        assert!(
            begun.elapsed() < Duration::from_secs(5),
            "{used:?} are used by two checks"
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
