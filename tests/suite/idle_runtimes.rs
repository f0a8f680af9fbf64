//! One store on several runtimes, of which some stand still or end: what they hold is their own, and all others are decided.

use std::{
    fmt::Debug,
    future::{Future, poll_fn},
    pin::{Pin, pin},
    task::{Context, Poll, Waker},
    thread,
    time::{Duration, Instant},
};

use tokio::{
    runtime::{self, Runtime},
    task::{JoinHandle, yield_now},
};
use tower_sliding_window::{
    Breaker, Charge, Check, Decision, Error, Key, Limit, Limiter, RedisStore, Settlement, Store,
};

use crate::support::{PATIENCE, redis_server::RedisServer};

const CALLS: Limit = Limit::per_hour("calls", 1_000_000_000);

/// How many runtimes stand still or end.
const RUNTIMES: [usize; 3] = [1, 2, 4];

fn store(server: &RedisServer, connections: u32) -> RedisStore {
    RedisStore::builder(&server.url()).connections(connections).connect_timeout(PATIENCE).build().unwrap()
}

fn limiter(server: &RedisServer, connections: u32) -> Limiter<RedisStore> {
    Limiter::new(store(server, connections)).deadline(PATIENCE).breaker(Breaker::off())
}

fn one_thread() -> Runtime {
    runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

fn two_threads() -> Runtime {
    runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

/// So many turns of a runtime: a check has then been queued, or sent, or nearly been answered, as it happens.
async fn turns(number: usize) {
    for _ in 0..number {
        yield_now().await;
    }
}

/// Asks from tasks, with company.
fn ask(limiter: &Limiter<RedisStore>) -> [JoinHandle<Result<Decision, Error>>; 2] {
    ["ada", "bob"].map(|key| tokio::spawn(limiter.check(&CALLS, key, 1)))
}

async fn all_decided<const N: usize>(answers: [JoinHandle<Result<Decision, Error>>; N], trial: impl Debug) {
    for answer in answers {
        let outcome = answer.await.unwrap();
        assert!(outcome.as_ref().is_ok_and(Decision::is_allowed), "{trial:?}: {outcome:?}");
    }
}

fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let asked = Instant::now();
    while !is_so() {
        assert!(asked.elapsed() < PATIENCE, "{what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// 10,000 trials. In each, some runtimes of one thread get a few turns with checks of theirs, which are then somewhere on
/// their way, and stand still. Then another runtime asks.
#[test]
fn runtimes_that_stand_still_hold_up_no_other() {
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
                living.block_on(async { all_decided(ask(&limiter), (idle, connections, round, trial)).await });
                trials += 1;
            }
            // One that goes on where it stood still is decided as any other.
            for runtime in runtimes {
                runtime.block_on(async { all_decided(ask(&limiter), "awake again").await });
            }
        }
    }
    assert!(trials >= 10_000, "{trials}");
}

/// A call that `block_on` gives up in the middle of a check leaves nothing behind that another needs.
#[test]
fn a_runtime_that_gives_up_in_the_middle_of_a_check_holds_up_no_other() {
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

/// Runtimes end with checks of theirs on the way, of one thread or of two, while another has asked.
#[test]
fn runtimes_that_end_take_nothing_of_others_along() {
    let (server, living) = (RedisServer::start(), two_threads());
    for (ending, connections) in RUNTIMES.into_iter().flat_map(|ending| [(ending, 1), (ending, 2)]) {
        let limiter = limiter(&server, connections);
        for trial in 0..60 {
            let runtimes: Vec<_> = (0..ending).map(|_| [one_thread, two_threads][trial % 2]()).collect();
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

/// Checks, settlements and resets that have been polled once and are then left alone, many of each, before there is a
/// connection and when there are some.
#[tokio::test]
async fn futures_that_are_stored_and_not_polled_hold_up_no_other() {
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
                let settled = limiter.settle(Settlement::refund(check.clone(), &decision));
                stored.push(store_after_one_poll(async move { settled.await.is_ok() }).await);
                limiter.reset(&CALLS, "somebody").await.unwrap();
            }
        }
        all_decided(ask(&limiter), (connections, is_cold)).await;
        for future in stored {
            assert!(future.await, "what has been stored is done when it is polled again");
        }
    }
}

/// A runtime that ends closes its connections, and those alone; the last store closes all.
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
    assert!((3..=6).contains(&all), "each has its own: {all}");
    ending.shutdown_timeout(PATIENCE);
    wait_until("the ended runtime's connections are closed", || server.connections() < all);
    let left = server.connections();
    living.block_on(async { all_decided(ask(&limiter), "after another has ended").await });
    assert!(left >= 2 && server.connections() <= left + 1);

    let clone = limiter.clone();
    drop(limiter);
    living.block_on(async { all_decided(ask(&clone), "a clone is left").await });
    drop(clone);
    wait_until("no task is left", || tasks(&living) == before);
    // What stands still cannot close anything: it does when it goes on.
    idle.block_on(turns(10));
    wait_until("no connection is left", || server.connections() == 0);
    assert_eq!(tasks(&idle), 0);
}

/// Without a runtime, what is asked of the store fails.
#[test]
fn outside_of_a_runtime_the_store_fails_and_does_not_panic() {
    let server = RedisServer::start();
    let store = store(&server, 2);
    let check = Check::new(Charge::new(CALLS, "ada", 1).unwrap());
    let decision = Limiter::new(store.clone()).deadline(PATIENCE);
    let decision = one_thread().block_on(decision.check_all(check.clone())).unwrap();
    fn now<T>(future: impl Future<Output = T>) -> Poll<T> {
        pin!(future).poll(&mut Context::from_waker(Waker::noop()))
    }
    for error in [
        now(store.decide(check.clone())).map(Result::unwrap_err),
        now(store.settle(Settlement::refund(check, &decision))).map(Result::unwrap_err),
        now(store.reset(CALLS, Key::from("ada"))).map(Result::unwrap_err),
    ] {
        let Poll::Ready(error) = error else { panic!("it waits") };
        assert!(format!("{error:?}").contains("TryCurrentError"), "{error:?}");
    }
}
