//! Places and threads of checks whose callers and runtimes have left. No life of a place ends
//! within a test.

use std::{
    env,
    fs::read_dir,
    future::{Future, pending, poll_fn},
    pin::{Pin, pin},
    process::Command,
    task::{Context, Poll, Waker},
    thread::sleep,
    time::{Duration, Instant},
};

use tokio::{
    runtime::Runtime,
    task::{JoinSet, yield_now},
    time,
};
use tower::{Layer, Service};
use tower_sliding_window::{
    Charge, Check, Limit, Limiter, RateLimitLayer, RedisStore, Store, limiter::Breaker,
    store::RedisStoreBuilder,
};

#[cfg(feature = "cluster")]
use crate::support::redis_cluster::RedisCluster;
use crate::support::{
    TEST_TIMEOUT, ms, one_thread,
    proxy::{Cut, Proxy},
    redis_server::RedisServer,
    requests::{anyone, request},
    seconds,
    services::handler,
    two_threads,
};

/// Its life is longer than a test.
fn long() -> Limit {
    Limit::concurrent("long", 1_000).freed_after(seconds(3_600))
}

fn limiter(builder: RedisStoreBuilder) -> Limiter {
    Limiter::new(builder.build().unwrap())
        .deadline(TEST_TIMEOUT)
        .breaker(Breaker::OFF)
}

/// The places of `ada` that are held after a while.
fn left(observer: &Runtime, server: &RedisServer, limit: &Limit, within: Duration) -> u64 {
    observer.block_on(async {
        let (limiter, begun) = (limiter(server.store()), Instant::now());
        loop {
            let used = limiter.peek(limit, "ada").await.unwrap().binding().used;
            if used == 0 || begun.elapsed() > within {
                return used;
            }
            time::sleep(ms(20)).await;
        }
    })
}

fn poll_now<T>(future: Pin<&mut (impl Future<Output = T> + ?Sized)>) -> Poll<T> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

/// The threads of a process that runs one test, before and at the most.
fn threads() -> usize {
    read_dir("/proc/self/task").unwrap().count()
}

/// Runs an ignored test in a process of its own.
fn alone(test: &str) {
    let name = format!("limiter::concurrent::left_behind::{test}");
    let output = Command::new(env::current_exe().unwrap())
        .args(["--exact", &name, "--ignored"])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{text}"
    );
}

/// The reply has come, and the runtime ends before the caller is polled.
#[test]
fn a_place_that_was_answered_is_freed_when_its_runtime_ends() {
    let (server, observer) = (RedisServer::start(), one_thread());
    let limiter = limiter(server.store().connections(1));
    let ending = one_thread();
    ending.block_on(async {
        drop(limiter.check(&long(), "ada", 1).await.unwrap());
        let limiter = limiter.clone();
        tokio::spawn(async move {
            let check = limiter.check(&long(), "ada", 1);
            let mut check = pin!(check);
            assert!(poll_now(check.as_mut()).is_pending());
            pending::<()>().await;
        });
        time::sleep(ms(200)).await;
    });
    drop(ending);
    assert_eq!(left(&observer, &server, &long(), seconds(5)), 0);
}

/// The same without tricks: a runtime ends with the first of many requests that were decided
/// together.
#[test]
fn places_that_were_answered_are_freed_when_their_runtime_ends() {
    let (server, observer) = (RedisServer::start(), one_thread());
    let limiter = limiter(server.store());
    for _ in 0..3 {
        let ending = one_thread();
        ending.block_on(async {
            drop(limiter.check(&long(), "ada", 1).await.unwrap());
            for _ in 0..400 {
                tokio::spawn(limiter.check(&long(), "ada", 1));
            }
            yield_now().await;
            drop(limiter.check(&long(), "ada", 1).await.unwrap());
        });
        drop(ending);
    }
    assert_eq!(left(&observer, &server, &long(), seconds(5)), 0);
}

/// Its own runtime goes on, but the thread that drops the check is within the context of one that
/// has ended.
#[test]
fn a_check_that_is_dropped_within_an_ended_runtime_leaves_no_place() {
    let (server, observer, own, ended) = (
        RedisServer::start(),
        one_thread(),
        two_threads(),
        one_thread(),
    );
    let limiter = limiter(server.store().connections(1));
    own.block_on(async { drop(limiter.check(&long(), "ada", 1).await.unwrap()) });
    server.pause();
    let mut check = Box::pin(limiter.check(&long(), "ada", 1));
    own.block_on(async {
        assert!(poll_now(check.as_mut()).is_pending());
        time::sleep(ms(100)).await;
    });
    let context = ended.handle().clone();
    drop(ended);
    {
        let _entered = context.enter();
        drop(check);
    }
    server.resume();
    sleep(ms(200));
    assert_eq!(left(&observer, &server, &long(), seconds(5)), 0);
}

/// A check that its caller sends itself, polled by another runtime once its own has ended.
#[test]
fn a_lone_check_that_outlives_its_runtime_leaves_no_place() {
    let (server, observer, ending) = (RedisServer::start(), one_thread(), one_thread());
    let limiter = limiter(server.store());
    ending.block_on(async {
        for _ in 0..5 {
            drop(limiter.check(&long(), "ada", 1).await.unwrap());
        }
        time::sleep(ms(100)).await;
    });
    server.pause();
    let mut check = Box::pin(limiter.check(&long(), "ada", 1));
    ending.block_on(async {
        assert!(poll_now(check.as_mut()).is_pending());
        time::sleep(ms(50)).await;
    });
    drop(ending);
    let outcome = observer.block_on(check);
    drop(outcome);
    server.resume();
    assert_eq!(left(&observer, &server, &long(), seconds(5)), 0);
}

/// A connection breaks, and the runtime ends while the batch waits for another one, to be sent
/// again.
#[test]
fn a_batch_that_is_about_to_be_sent_again_leaves_no_place() {
    let (server, observer, ending) = (RedisServer::start(), two_threads(), one_thread());
    let proxy = observer.block_on(Proxy::start(&server));
    let store = RedisStore::builder(proxy.url())
        .connections(1)
        .connect_timeout(TEST_TIMEOUT)
        .reply_timeout(TEST_TIMEOUT);
    let limiter = limiter(store);
    ending.block_on(async {
        drop(limiter.check(&long(), "ada", 1).await.unwrap());
        time::sleep(ms(100)).await;
        server.pause();
        for _ in 0..10 {
            tokio::spawn(limiter.check(&long(), "ada", 1));
        }
        time::sleep(ms(200)).await;
        proxy.cut(Cut::Close);
        time::sleep(ms(200)).await;
    });
    drop(ending);
    server.resume();
    sleep(ms(100));
    assert_eq!(left(&observer, &server, &long(), seconds(5)), 0);
}

/// Equal checks that took places in one batch of a server that is far away.
#[test]
fn all_places_of_a_lost_batch_are_freed_far_away() {
    let (server, observer) = (RedisServer::start(), two_threads());
    let proxy = observer.block_on(Proxy::start(&server));
    let limiter = limiter(
        RedisStore::builder(proxy.url())
            .connections(1)
            .connect_timeout(TEST_TIMEOUT)
            .reply_timeout(TEST_TIMEOUT),
    );
    proxy.delay_replies(ms(400));
    let ending = one_thread();
    ending.block_on(async {
        drop(limiter.check(&long(), "ada", 1).await.unwrap());
        time::sleep(ms(1_000)).await;
        for _ in 0..128 {
            tokio::spawn(limiter.check(&long(), "ada", 1));
        }
        time::sleep(ms(75)).await;
    });
    assert_eq!(left(&observer, &server, &long(), Duration::ZERO), 128);
    drop(ending);
    assert_eq!(left(&observer, &server, &long(), seconds(30)), 0);
}

/// Checks of several slots that have taken nothing yet.
#[cfg(feature = "cluster")]
#[test]
fn a_runtime_that_ends_with_many_checks_of_several_slots_needs_few_threads() {
    alone("process_of_many_slots");
}

#[cfg(feature = "cluster")]
#[test]
#[ignore = "a process of its own counts threads"]
fn process_of_many_slots() {
    let (one, other) = (two_threads(), two_threads());
    let cluster = other.block_on(RedisCluster::start(1));
    let server = &cluster.0[0];
    let limiter = Limiter::new(other.block_on(server.store().connect()).unwrap())
        .deadline(TEST_TIMEOUT)
        .breaker(Breaker::OFF);
    let calls = Limit::per_hour("calls", 1_000_000);
    let pair = |number: usize| {
        let charge = |slot| Charge::new(calls.clone(), format!("{slot}-{number}"), 1).unwrap();
        Check::new(charge("a")).and(charge("b")).unwrap()
    };
    one.block_on(async { drop(limiter.check_all(pair(0)).await.unwrap()) });
    let before = threads();
    server.pause();
    for number in 0..2_000 {
        one.spawn(limiter.check_all(pair(number)));
    }
    sleep(ms(500));
    drop(one);
    let mut most = 0;
    for look in 0..40 {
        if look == 10 {
            server.resume();
        }
        most = most.max(threads());
        sleep(ms(50));
    }
    assert!(most < before + 16, "{before} and then {most} threads");
}

/// Checks that take places, dropped on a thread without a runtime, as when a runtime-less owner
/// drops its requests.
#[test]
fn many_checks_that_are_dropped_without_a_runtime_need_few_threads() {
    alone("process_of_many_dropped");
}

#[test]
#[ignore = "a process of its own counts threads"]
fn process_of_many_dropped() {
    let (server, runtime) = (RedisServer::start(), two_threads());
    let limiter = limiter(server.store());
    runtime.block_on(async { drop(limiter.check(&long(), "ada", 1).await.unwrap()) });
    let before = threads();
    server.pause();
    let mut asked: Vec<_> = (0..2_000)
        .map(|_| Box::pin(limiter.check(&long(), "ada", 1)))
        .collect();
    runtime.block_on(async {
        asked.retain_mut(|asked| poll_now(asked.as_mut()).is_pending());
        time::sleep(ms(50)).await;
    });
    drop(asked);
    let most = threads();
    server.resume();
    runtime.block_on(async { time::sleep(ms(500)).await });
    assert!(most < before + 16, "{before} and then {most} threads");
}

/// A request that was never polled has sent nothing.
#[test]
fn a_shutdown_does_not_wait_for_a_request_that_was_never_polled() {
    let (server, runtime) = (RedisServer::start(), two_threads());
    runtime.block_on(async {
        let limiter = limiter(server.store());
        drop(limiter.check(&long(), "ada", 1).await.unwrap());
        let mut app = RateLimitLayer::new(limiter.clone())
            .limit(long().by(anyone))
            .layer(handler());
        poll_fn(|cx| app.poll_ready(cx)).await.unwrap();
        let _kept = app.call(request());
        let begun = Instant::now();
        let ended = limiter.shutdown(seconds(3)).await;
        assert!(ended.is_ok(), "{ended:?} after {:?}", begun.elapsed());
    });
}

/// A flood of keys, each of which has one unit and one check. The server refuses keys of several
/// slots, which the store does not know yet.
#[cfg(feature = "cluster")]
#[test]
fn a_check_that_is_asked_again_slot_by_slot_is_not_behind_itself() {
    let runtime = one_thread();
    runtime.block_on(async {
        let cluster = RedisCluster::start(1).await;
        let limiter = limiter(cluster.0[0].store().connections(8)).refusal_cache(Duration::ZERO);
        let one = Limit::per_hour("one", 1);
        let mut checks = JoinSet::new();
        for number in 0..4_000 {
            checks.spawn(limiter.check(&one, format!("key-{number}"), 1));
        }
        let (mut admitted, mut refused, mut failed) = (0, 0, 0);
        for outcome in checks.join_all().await {
            match outcome {
                Ok(decision) if decision.is_allowed() => admitted += 1,
                Ok(_) => refused += 1,
                Err(error) => {
                    failed += 1;
                    println!("{error:?}");
                }
            }
        }
        assert_eq!(
            (admitted, refused, failed),
            (4_000, 0, 0),
            "each is the only one of its key"
        );
    });
}

/// Hang-ups of checks that a store of one's own sends, while their runtime lives.
async fn hang_up(store: &RedisStore, times: usize) {
    let check = || Check::new(Charge::new(long(), "ada", 1).unwrap());
    for _ in 0..times {
        let _ = time::timeout(ms(3), store.decide(check())).await;
    }
}

#[test]
fn a_caller_of_the_store_that_hangs_up_needs_no_thread_while_its_runtime_lives() {
    alone("process_of_many_hang_ups");
}

#[test]
#[ignore = "a process of its own counts threads"]
fn process_of_many_hang_ups() {
    let (server, runtime) = (RedisServer::start(), two_threads());
    let store = runtime.block_on(server.store().connect()).unwrap();
    let before = threads();
    server.pause();
    runtime.block_on(hang_up(&store, 200));
    let most = threads();
    server.resume();
    assert!(most < before + 10, "{before} and then {most} threads");
}

/// Of a batch whose connection is given up, by a store that may open no further connection.
#[test]
fn places_of_a_lost_batch_are_freed_at_a_full_server() {
    let (server, own) = (RedisServer::start(), two_threads());
    let mut control = server.connect();
    let mut ask = |words: &[&str]| {
        redis::cmd(words[0])
            .arg(&words[1..])
            .query::<redis::Value>(&mut control)
            .unwrap()
    };
    own.block_on(async {
        let store = server
            .store()
            .reply_timeout(ms(200))
            .connect()
            .await
            .unwrap();
        let limiter = Limiter::new(store)
            .deadline(seconds(2))
            .breaker(Breaker::OFF);
        let place = limiter.check(&long(), "ada", 1).await.unwrap();
        // Those that are open.
        ask(&[
            "CONFIG",
            "SET",
            "maxclients",
            &server.connections().to_string(),
        ]);
        server.pause();
        let lost: JoinSet<_> = (0..50).map(|_| limiter.check(&long(), "ada", 1)).collect();
        assert!(lost.join_all().await.iter().any(Result::is_err));
        server.resume();
        drop(place);
        let begun = Instant::now();
        while limiter
            .peek(&long(), "ada")
            .await
            .is_ok_and(|peeked| peeked.binding().used > 0)
        {
            assert!(begun.elapsed() < TEST_TIMEOUT, "places are left");
            time::sleep(ms(50)).await;
        }
    });
}
