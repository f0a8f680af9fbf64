//! One store on several runtimes: a runtime that stalls or ends affects no other.

use std::{
    fmt::Debug,
    future::{Future, poll_fn},
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, Waker},
    thread,
    time::{Duration, Instant},
};

use tokio::{
    runtime::{self, Runtime},
    task::{JoinHandle, yield_now},
    time::sleep,
};
use tower_sliding_window::{
    Charge, Check, Decision, Error, Key, Limit, Limiter, RedisStore, Store, limiter::Breaker,
    settlement::Settlement,
};

use crate::support::{TEST_TIMEOUT, ms, one_thread, redis_server::RedisServer, two_threads};

const CALLS: Limit = Limit::per_hour("calls", 1_000_000_000);

/// How many runtimes stall or end.
const RUNTIMES: [usize; 3] = [1, 2, 4];

fn store(server: &RedisServer, connections: u32) -> RedisStore {
    server.store().connections(connections).build().unwrap()
}

fn limiter(server: &RedisServer, connections: u32) -> Limiter {
    Limiter::new(store(server, connections))
        .deadline(TEST_TIMEOUT)
        .breaker(Breaker::OFF)
}

/// Yields so often: the check is then queued, sent, or nearly answered.
async fn turns(number: usize) {
    for _ in 0..number {
        yield_now().await;
    }
}

/// Sends two checks from tasks.
fn ask(limiter: &Limiter) -> [JoinHandle<Result<Decision, Error>>; 2] {
    ["ada", "bob"].map(|key| tokio::spawn(limiter.check(&CALLS, key, 1)))
}

async fn all_decided<const N: usize>(
    answers: [JoinHandle<Result<Decision, Error>>; N],
    trial: impl Debug,
) {
    for answer in answers {
        let outcome = answer.await.unwrap();
        assert!(
            outcome.as_ref().is_ok_and(Decision::is_allowed),
            "{trial:?}: {outcome:?}"
        );
    }
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let asked = Instant::now();
    while !is_so() {
        assert!(asked.elapsed() < TEST_TIMEOUT, "{what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// 10,000 trials. In each, some single-threaded runtimes run a few turns with checks in flight and
/// stall. Then another runtime sends checks.
#[test]
fn stalled_runtimes_block_no_other() {
    let (server, living, mut trials) = (RedisServer::start(), two_threads(), 0);
    for (idle, connections) in RUNTIMES.into_iter().flat_map(|idle| [(idle, 1), (idle, 2)]) {
        for round in 0..17 {
            let limiter = limiter(&server, connections);
            let runtimes: Vec<_> = (0..idle).map(|_| one_thread()).collect();
            for trial in 0..100 {
                for (number, runtime) in runtimes.iter().enumerate() {
                    runtime.block_on(async {
                        let _ = ask(&limiter);
                        turns((round + trial + number) % 12).await;
                    });
                }
                living.block_on(async {
                    all_decided(ask(&limiter), (idle, connections, round, trial)).await;
                });
                trials += 1;
            }
            // A stalled runtime that continues is decided like any other.
            for runtime in runtimes {
                runtime.block_on(async { all_decided(ask(&limiter), "awake again").await });
            }
        }
    }
    assert!(trials >= 10_000, "{trials}");
}

/// A check that `block_on` abandons leaves nothing behind that blocks others.
#[test]
fn a_runtime_that_abandons_a_check_blocks_no_other() {
    let (server, living) = (RedisServer::start(), two_threads());
    for connections in [1, 2] {
        let limiter = limiter(&server, connections);
        let runtimes: Vec<_> = (0..4).map(|_| one_thread()).collect();
        for runtime in &runtimes {
            runtime.block_on(async { all_decided(ask(&limiter), "first").await });
        }
        server.pause();
        for runtime in &runtimes {
            let hasty = limiter.clone().deadline(Duration::from_millis(20));
            let _ = runtime.block_on(async { (ask(&hasty), hasty.check(&CALLS, "ada", 1).await) });
        }
        server.resume();
        for _ in 0..20 {
            living.block_on(async { all_decided(ask(&limiter), connections).await });
        }
    }
}

/// Runtimes of one or two threads end with checks in flight, while another runtime waits for its
/// own.
#[test]
fn runtimes_that_end_fail_no_check_of_others() {
    let (server, living) = (RedisServer::start(), two_threads());
    for (ending, connections) in RUNTIMES
        .into_iter()
        .flat_map(|ending| [(ending, 1), (ending, 2)])
    {
        let limiter = limiter(&server, connections);
        for trial in 0..60 {
            let runtimes: Vec<_> = (0..ending)
                .map(|_| [one_thread, two_threads][trial % 2]())
                .collect();
            let _guard = living.enter();
            let before = ask(&limiter);
            for (number, runtime) in runtimes.iter().enumerate() {
                runtime.block_on(async {
                    let _ = ask(&limiter);
                    turns((trial / 2 + number) % 12).await;
                });
            }
            let among = ask(&limiter);
            runtimes.into_iter().for_each(Runtime::shutdown_background);
            let after = ask(&limiter);
            drop(_guard);
            living.block_on(async {
                for answers in [before, among, after] {
                    all_decided(answers, (ending, connections, trial)).await;
                }
            });
        }
    }
}

type Stored<'a> = Pin<Box<dyn Future<Output = bool> + 'a>>;

/// Polls a future once, and stores it.
async fn store_after_one_poll<'a>(future: impl Future<Output = bool> + 'a) -> Stored<'a> {
    let mut future: Stored<'a> = Box::pin(future);
    assert!(poll_fn(|cx| Poll::Ready(future.as_mut().poll(cx).is_pending())).await);
    future
}

/// Many checks, settlements and resets are polled once and then stored, with and without open
/// connections.
#[tokio::test]
async fn stored_futures_block_no_other() {
    let (server, limit) = (RedisServer::start(), CALLS);
    for (connections, is_cold) in [(1, true), (1, false), (2, true), (2, false)] {
        let limiter = limiter(&server, connections);
        let check = Check::new(Charge::new(CALLS, "eve", 1).unwrap());
        if !is_cold {
            all_decided(ask(&limiter), "first").await;
        }
        let mut stored = Vec::new();
        for number in 0..100 {
            let asked = limiter.check(&CALLS, "eve", 1);
            stored.push(store_after_one_poll(async move { asked.await.is_ok() }).await);
            let reset = limiter.reset(&limit, "nobody");
            stored.push(store_after_one_poll(async move { reset.await.is_ok() }).await);
            if number % 10 == 0 {
                all_decided(ask(&limiter), (connections, is_cold, number)).await;
                let decision = limiter.check_all(check.clone()).await.unwrap();
                let settled =
                    limiter.settle(Settlement::new(check.clone(), &decision, |_| Some(0)));
                stored.push(store_after_one_poll(async move { settled.await.is_ok() }).await);
                limiter.reset(&CALLS, "somebody").await.unwrap();
            }
        }
        all_decided(ask(&limiter), (connections, is_cold)).await;
        for future in stored {
            assert!(
                future.await,
                "a stored future completes when it is polled again"
            );
        }
    }
}

/// A runtime that ends closes only its own connections. Dropping the last store closes all.
#[test]
fn connections_end_with_their_runtime_and_with_the_store() {
    let server = RedisServer::start();
    let (living, ending, idle) = (two_threads(), two_threads(), one_thread());
    let limiter = limiter(&server, 2);
    let tasks = |runtime: &Runtime| runtime.metrics().num_alive_tasks();
    let before = tasks(&living);
    for runtime in [&living, &ending, &idle] {
        runtime.block_on(async { all_decided(ask(&limiter), "first").await });
    }
    let all = server.connections();
    assert!(
        (3..=6).contains(&all),
        "each runtime has its own connections: {all}"
    );
    ending.shutdown_timeout(TEST_TIMEOUT);
    wait_until("the ended runtime's connections stay open", || {
        server.connections() < all
    });
    let left = server.connections();
    living.block_on(async { all_decided(ask(&limiter), "after another has ended").await });
    assert!(left >= 2 && server.connections() <= left + 1);

    let clone = limiter.clone();
    drop(limiter);
    living.block_on(async { all_decided(ask(&clone), "a clone is left").await });
    drop(clone);
    wait_until("tasks are left", || tasks(&living) == before);
    // A stalled runtime closes its connections when it continues.
    idle.block_on(turns(10));
    wait_until("connections are left", || server.connections() == 0);
    assert_eq!(tasks(&idle), 0);
}

/// Without a runtime, every operation of the store is an error.
#[test]
fn without_a_runtime_the_store_fails_and_does_not_panic() {
    let server = RedisServer::start();
    let store = store(&server, 2);
    let check = Check::new(Charge::new(CALLS, "ada", 1).unwrap());
    let decision = Limiter::new(store.clone()).deadline(TEST_TIMEOUT);
    let decision = one_thread()
        .block_on(decision.check_all(check.clone()))
        .unwrap();
    fn now<T>(future: impl Future<Output = T>) -> Poll<T> {
        pin!(future).poll(&mut Context::from_waker(Waker::noop()))
    }
    for error in [
        now(store.decide(check.clone())).map(Result::unwrap_err),
        now(store.settle(Settlement::new(check, &decision, |_| Some(0)))).map(Result::unwrap_err),
        now(store.reset(CALLS, Key::from("ada"))).map(Result::unwrap_err),
    ] {
        let Poll::Ready(error) = error else {
            panic!("it waits")
        };
        assert!(
            format!("{error:?}").contains("TryCurrentError"),
            "{error:?}"
        );
    }
}

/// A runtime and a limiter that works on it, and another limiter on the same store.
fn healthy_and_stray(server: &RedisServer) -> (Runtime, [Limiter; 2]) {
    let (runtime, store) = (two_threads(), store(server, 2));
    let [healthy, stray] = [(); 2].map(|()| Limiter::new(store.clone()));
    assert!(
        runtime
            .block_on(healthy.check(&CALLS, "ada", 1))
            .unwrap()
            .is_allowed()
    );
    (runtime, [healthy, stray])
}

/// Callers without a runtime are no failure of the store.
#[test]
fn callers_without_a_runtime_open_no_breaker() {
    let server = RedisServer::start();
    let (runtime, [healthy, stray]) = healthy_and_stray(&server);
    for _ in 0..5 {
        let mut check = pin!(stray.check(&CALLS, "eve", 1));
        assert!(
            check
                .as_mut()
                .poll(&mut Context::from_waker(Waker::noop()))
                .is_ready()
        );
    }
    let outcome = runtime.block_on(healthy.check(&CALLS, "ada", 1));
    assert!(
        outcome.is_ok(),
        "a healthy store is not asked: {:?}",
        outcome.unwrap_err()
    );
}

/// A future that was started in a runtime that has ended.
#[test]
fn futures_of_an_ended_runtime_open_no_breaker() {
    let server = RedisServer::start();
    let (runtime, [healthy, stray]) = healthy_and_stray(&server);
    let stray = stray.deadline(TEST_TIMEOUT);
    let begun = one_thread().block_on(async {
        let mut all: Vec<_> = (0..8)
            .map(|_| Box::pin(stray.check(&CALLS, "eve", 1)))
            .collect();
        poll_fn(|cx| {
            for one in &mut all {
                let _ = one.as_mut().poll(cx).is_ready();
            }
            Poll::Ready(())
        })
        .await;
        all
    });
    runtime.block_on(async {
        for one in begun {
            drop(one.await);
        }
        let outcome = healthy.check(&CALLS, "ada", 1).await;
        assert!(
            outcome.is_ok(),
            "a healthy store is not asked: {:?}",
            outcome.unwrap_err()
        );
    });
}

/// A check that its caller has sent, and does not poll, keeps nothing of an ended runtime alive:
/// those behind it end too.
#[test]
fn checks_behind_a_kept_one_end_with_their_runtime() {
    let server = RedisServer::start();
    let store = store(&server, 2);
    let check = || Check::new(Charge::new(CALLS, "ada", 1).unwrap());
    let (ending, living) = (one_thread(), two_threads());
    let _ = ending.block_on(store.decide(check())).unwrap();
    server.pause();
    let mut asked = [(); 3].map(|()| store.decide(check()));
    ending.block_on(poll_fn(|cx| {
        assert!(
            asked
                .iter_mut()
                .all(|one| one.as_mut().poll(cx).is_pending())
        );
        Poll::Ready(())
    }));
    drop(ending);
    let [kept, behind, last] = asked;
    for (place, one) in [behind, last, kept].into_iter().enumerate() {
        let ended = living.block_on(async { tokio::time::timeout(TEST_TIMEOUT, one).await });
        assert!(
            ended
                .unwrap_or_else(|_| panic!("{place} waits forever"))
                .is_err()
        );
    }
}

/// The thread of another runtime is busy for a while. Its timeouts open no breaker for others.
#[test]
fn a_stalled_runtime_opens_no_breaker_for_others() {
    let server = RedisServer::start();
    let store = server.store().build().unwrap();
    let calls = Limit::per_hour("calls", 3_000_000);
    let healthy = Limiter::new(store.clone());
    let (first, busy) = (
        Limiter::new(store.clone()).deadline(TEST_TIMEOUT),
        Limiter::new(store),
    );
    let calls2 = calls.clone();
    let worker = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        let mut timed_out = 0;
        runtime.block_on(async {
            assert!(first.check(&calls2, "eve", 1).await.unwrap().is_allowed());
            std::thread::sleep(Duration::from_millis(300));
            for _ in 0..10 {
                let all: Vec<_> = (0..64)
                    .map(|_| tokio::spawn(busy.check(&calls2, "eve", 1)))
                    .collect();
                tokio::task::yield_now().await;
                tokio::task::yield_now().await;
                std::thread::sleep(Duration::from_millis(120));
                for one in all {
                    timed_out += usize::from(one.await.unwrap().is_err());
                }
            }
        });
        timed_out
    });
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let (mut asked, mut open, mut other) = (0, 0, 0);
    runtime.block_on(async {
        while !worker.is_finished() {
            asked += 1;
            match healthy.check(&calls, "ada", 1).await {
                Ok(_) => {}
                Err(tower_sliding_window::Error::BreakerOpen(_)) => open += 1,
                Err(_) => other += 1,
            }
            tokio::time::sleep(ms(1)).await;
        }
    });
    let timed_out = worker.join().unwrap();
    assert_eq!(
        open, 0,
        "of {asked} checks of a runtime that is not busy, {open} found the breaker open, {other} failed otherwise; the busy one had {timed_out} without an answer"
    );
}

/// The process does not run while the reply arrives and the deadline passes, as on a busy machine
/// or under a quota of CPU time.
#[test]
fn a_reply_that_arrives_while_the_runtime_stalls_decides() {
    let server = Arc::new(RedisServer::start());
    let limiter = limiter(&server, 2).deadline(ms(500));
    let one_worker = || {
        runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap()
    };
    for runtime in [one_thread(), one_worker()] {
        let ask = |limiter: &Limiter| runtime.spawn(limiter.check(&CALLS, "ada", 1));
        // The next check finds an open connection.
        let opened = runtime
            .block_on(ask(&limiter.clone().deadline(TEST_TIMEOUT)))
            .unwrap();
        assert!(opened.is_ok(), "{opened:?}");
        server.pause();
        let asked = ask(&limiter);
        runtime
            .block_on(runtime.spawn(async { sleep(ms(20)).await }))
            .unwrap();
        let server = Arc::clone(&server);
        let stall = async move {
            server.resume();
            thread::sleep(ms(600));
        };
        runtime.block_on(runtime.spawn(stall)).unwrap();
        let outcome = runtime.block_on(asked).unwrap();
        assert!(outcome.is_ok(), "{outcome:?}");
    }
}
