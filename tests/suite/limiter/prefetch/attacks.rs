//! States in which prefetches could hold back units, or cost others too much.

use std::{
    future::Future,
    sync::Arc,
    task::{Context, Waker},
    time::Instant as SystemInstant,
};

use tokio::{sync::Barrier, task::JoinSet};

use super::*;
use crate::support::one_thread;

/// The prefetch of the first limit has no task any more, so the next admission starts one that
/// gives it back.
#[test]
fn a_changed_limit_gets_prefetches_after_the_runtime_of_the_earlier_ones_has_ended() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let limiter = limiter_by(&server, &clock);
    one_thread().block_on(hold(&server, &limiter, &API, "ada"));
    clock.advance(LIFE);
    let raised = Limit::per_minute("api", 2_000_000).prefetch(DEFAULT_LIFE);
    one_thread().block_on(hold(&server, &limiter, &raised, "ada"));
}

/// The task of a runtime that is not driven must not keep others from taking prefetches of the key.
#[test]
fn a_key_gets_prefetches_while_the_runtime_that_held_some_is_not_driven() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let limiter = limiter_by(&server, &clock);
    let idle = one_thread();
    idle.block_on(hold(&server, &limiter, &API, "ada"));
    clock.advance(10 * LIFE);
    one_thread().block_on(hold(&server, &limiter, &API, "ada"));
    drop(idle);
}

#[test]
fn units_of_a_runtime_that_has_ended_are_given_back_at_once_if_asked() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let limiter = limiter_by(&server, &clock);
    let first = one_thread();
    let requests = first.block_on(hold(&server, &limiter, &API, "ada"));
    drop(first);
    one_thread().block_on(async {
        limiter.shutdown(TEST_TIMEOUT).await.unwrap();
        assert_eq!(used(&server, &clock, &API, "ada").await, (requests, 0));
    });
}

/// Where no task can start, there is nothing to wait for.
#[test]
fn giving_back_ends_without_a_runtime_and_within_one_that_has_ended() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    for is_entered in [false, true] {
        let limiter = limiter_by(&server, &clock);
        let first = one_thread();
        first.block_on(hold(&server, &limiter, &API, "ada"));
        let context = first.handle().clone();
        drop(first);
        let (done, is_done) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let _entered = is_entered.then(|| context.enter());
            let mut ended = Box::pin(limiter.shutdown(Duration::from_secs(1)));
            let ended = ended
                .as_mut()
                .poll(&mut Context::from_waker(Waker::noop()))
                .is_ready();
            done.send(ended).unwrap();
        });
        assert_eq!(is_done.recv_timeout(TEST_TIMEOUT), Ok(true), "{is_entered}");
    }
}

#[tokio::test]
async fn giving_back_ends_while_requests_go_on() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let limiter = limiter_by(&server, &clock);
    let keys = || (0..20).map(|key| key.to_string());
    for key in keys() {
        hold(&server, &limiter, &API, &key).await;
    }
    let busy: Vec<_> = keys()
        .map(|key| {
            let limiter = limiter.clone();
            tokio::spawn(async move {
                loop {
                    let _ = check(&limiter, &API, &key, 1).await;
                    tokio::task::yield_now().await;
                }
            })
        })
        .collect();
    limiter.shutdown(TEST_TIMEOUT).await.unwrap();
    busy.iter().for_each(tokio::task::JoinHandle::abort);
}

/// The time that it is given, and some for a busy machine.
#[tokio::test]
async fn giving_back_to_a_store_that_fails_ends_in_time() {
    let mut server = RedisServer::start();
    let limiter = limiter(&server);
    hold(&server, &limiter, &API, "ada").await;
    server.kill();
    let begun = SystemInstant::now();
    let ended = limiter.shutdown(Duration::from_secs(5)).await;
    assert!(
        matches!(ended, Err(tower_sliding_window::Error::TimedOut { .. })),
        "{ended:?}"
    );
    assert!(
        begun.elapsed() < Duration::from_secs(11),
        "{:?}",
        begun.elapsed()
    );
}

#[test]
fn giving_back_ends_after_ten_seconds_although_a_runtime_is_not_driven() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let limiter = limiter_by(&server, &clock);
    let idle = one_thread();
    idle.block_on(hold(&server, &limiter, &API, "ada"));
    let ended = limiter.shutdown(Duration::from_secs(10));
    let ended =
        one_thread().block_on(async { tokio::time::timeout(TEST_TIMEOUT, ended).await.unwrap() });
    assert!(
        matches!(ended, Err(tower_sliding_window::Error::TimedOut { .. })),
        "{ended:?}"
    );
    drop(idle);
}

/// A prefetch that the store refuses meanwhile is not waited for.
#[tokio::test]
async fn giving_back_while_a_prefetch_is_being_refused_ends_with_the_reply() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let (limiter, other) = (limiter_by(&server, &clock), limiter_by(&server, &clock));
    let limit = Limit::per_minute("limit", 1_000).prefetch(DEFAULT_LIFE);
    hold(&server, &limiter, &limit, "ada").await;
    let rest = other.peek(&limit, "ada").await.unwrap().remaining();
    assert!(check(&other, &limit, "ada", rest).await.is_allowed());
    server.pause();
    // The last of the prefetch: the task asks for the next one.
    let spending = async { while check(&limiter, &limit, "ada", 1).await.is_allowed() {} };
    assert!(
        tokio::time::timeout(LIFE, spending).await.is_err(),
        "Redis does not reply"
    );
    let begun = SystemInstant::now();
    let resume = async {
        sleep(LIFE).await;
        server.resume();
    };
    assert!(
        tokio::join!(limiter.shutdown(TEST_TIMEOUT), resume)
            .0
            .is_ok()
    );
    assert!(
        begun.elapsed() < Duration::from_secs(8),
        "{:?}",
        begun.elapsed()
    );
    assert_eq!(used(&server, &clock, &limit, "ada").await.1, 0);
}

/// Giving back a prefetch of one key says nothing about the refusals of another.
#[tokio::test]
async fn prefetches_of_a_key_leave_the_refusals_of_others_in_the_refusal_cache() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let limiter = limiter_by(&server, &clock);
    let _ = check(&limiter, &API, "mallory", API.units()).await;
    assert!(!check(&limiter, &API, "mallory", 1).await.is_allowed());
    hold(&server, &limiter, &API, "ada").await;
    limiter.shutdown(TEST_TIMEOUT).await.unwrap();
    let scripts = server.script_calls();
    assert!(!check(&limiter, &API, "mallory", 1).await.is_allowed());
    assert_eq!(server.script_calls(), scripts, "the refusal is known");
}

/// Rule 3: a prefetch has at most the units that were spent in the last life.
#[tokio::test]
async fn a_first_prefetch_is_no_larger_than_what_was_spent() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let limiter = limiter_by(&server, &clock);
    for _ in 0..15 {
        let _ = check(&limiter, &API, "ada", 1).await;
    }
    let _ = check(&limiter, &API, "ada", 1_000).await;
    sleep(LIFE).await;
    let (_, held) = used(&server, &clock, &API, "ada").await;
    assert!(held <= 1_015, "{held} units are held, 1,015 were spent");
}

/// A limit of the longest window and the most units, and costs that overflow if multiplied.
#[tokio::test]
async fn the_largest_numbers_fit() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let limiter = limiter_by(&server, &clock);
    let limit = Limit::per("large", Limit::MAX_UNITS, Limit::MAX_WINDOW).prefetch(MAX_LIFE);
    hold(&server, &limiter, &limit, "ada").await;
    for cost in [1 << 51, 1 << 50, 1 << 49, 1 << 40, 1 << 31] {
        for _ in 0..16 {
            let _ = limiter.check(&limit, "ada", cost).await.unwrap();
        }
    }
    limiter.shutdown(TEST_TIMEOUT).await.unwrap();
    clock.advance(Limit::MAX_WINDOW + MAX_LIFE);
    assert_eq!(used(&server, &clock, &limit, "ada").await, (0, 0));
    clock.step_back(Duration::from_secs(1 << 40));
    hold(&server, &limiter, &limit, "ada").await;
    limiter.shutdown(TEST_TIMEOUT).await.unwrap();
}

/// Life and window are the shortest, so that each prefetch ends before it arrives.
#[tokio::test]
async fn the_shortest_life_and_window_admit_and_leave_nothing() {
    let server = RedisServer::start();
    let limiter = limiter(&server);
    let limit = Limit::per("short", 1_000_000, MIN_LIFE).prefetch(MIN_LIFE);
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_millis(300) {
        let checks = (0..64).map(|_| check(&limiter, &limit, "ada", 1));
        assert!(join_all(checks).await.iter().all(Decision::is_allowed));
    }
    limiter.shutdown(TEST_TIMEOUT).await.unwrap();
    sleep(Duration::from_millis(1_200)).await;
    assert_eq!(server.run::<u64>("DBSIZE"), 0);
}

/// Checks of the same limits in different orders, on several threads, with resets and giving back
/// in between.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn checks_of_several_limits_never_wait_for_each_other() {
    use tower_sliding_window::{Charge, Check};
    let server = RedisServer::start();
    let limiter = limiter(&server);
    let limits: [Limit; 3] =
        ["a", "b", "c"].map(|name| Limit::per_minute(name, 100_000_000).prefetch(2 * LIFE));
    let tasks: Vec<_> = (0..12)
        .map(|number| {
            let (limiter, mut limits) = (limiter.clone(), limits.clone());
            limits.rotate_left(number % 3);
            if number % 2 == 0 {
                limits.swap(0, 1);
            }
            tokio::spawn(async move {
                for round in 0..3_000 {
                    let charge = |limit: &Limit| Charge::new(limit.clone(), "ada", 1).unwrap();
                    let check = Check::new(charge(&limits[0]))
                        .and(charge(&limits[1]))
                        .unwrap();
                    let check = check.and(charge(&limits[2])).unwrap();
                    assert!(limiter.check_all(check).await.unwrap().is_allowed());
                    if round % 1_000 == 999 && number == 0 {
                        limiter.reset(&limits[0], "ada").await.unwrap();
                    }
                    if round % 64 == 0 {
                        tokio::task::yield_now().await;
                    }
                }
            })
        })
        .collect();
    for task in tasks {
        tokio::time::timeout(TEST_TIMEOUT, task)
            .await
            .unwrap()
            .unwrap();
    }
    limiter.shutdown(TEST_TIMEOUT).await.unwrap();
}

/// Endless keys, each asked for just often enough to get a prefetch.
#[tokio::test]
async fn many_keys_leave_no_task_and_no_held_unit() {
    let server = RedisServer::start();
    let limiter = limiter(&server);
    let tasks = || {
        tokio::runtime::Handle::current()
            .metrics()
            .num_alive_tasks()
    };
    for round in 0..40 {
        let checks = (0..250).flat_map(|key| {
            let limiter = limiter.clone();
            (0..17).map(move |_| {
                let limiter = limiter.clone();
                async move { check(&limiter, &API, &format!("{round}-{key}"), 1).await }
            })
        });
        join_all(checks).await;
    }
    limiter.shutdown(TEST_TIMEOUT).await.unwrap();
    assert!(tasks() < 10, "{} tasks", tasks());
    // Of the last round: on a slow machine, the first one has left the window.
    let decision = limiter.peek(&API, "39-0").await.unwrap();
    assert_eq!(
        (decision.binding().used, decision.binding().reserved),
        (17, 0)
    );
}

/// A server without memory refuses prefetches, and takes back those that were taken before.
#[tokio::test]
async fn a_server_without_memory_takes_prefetches_back() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let limiter = limiter_by(&server, &clock);
    let requests = hold(&server, &limiter, &API, "ada").await;
    server.run::<()>("CONFIG SET maxmemory 1");
    assert!(is_in_process(&server, &limiter, &API, "ada").await);
    clock.advance(LIFE);
    sleep(2 * LIFE).await;
    server.run::<()>("CONFIG SET maxmemory 0");
    limiter.shutdown(TEST_TIMEOUT).await.unwrap();
    wait_until_used(&server, &clock, &API, "ada", requests + 1).await;
}

/// A check under a shorter window of the same name touches no unit of the longer one.
#[tokio::test]
async fn units_of_prefetches_stay_counted_after_a_process_with_a_shorter_window_has_asked() {
    // A check that asks the store sets the expiry, too. With several keys, some have only
    // prefetches.
    const KEYS: [&str; 5] = ["ada", "bob", "cyd", "dan", "eve"];
    let server = RedisServer::start();
    let (limiter, earlier, later) = (limiter(&server), limiter(&server), limiter(&server));
    let limit = Limit::per_minute("limit", 100_000_000).prefetch(DEFAULT_LIFE);
    let short = Limit::per("limit", 100_000_000, Duration::from_millis(200));
    let spend = async |time: u64| {
        let (begun, mut admitted) = (Instant::now(), [0; KEYS.len()]);
        while begun.elapsed() < Duration::from_millis(time) {
            for (key, admitted) in KEYS.iter().zip(&mut admitted) {
                for _ in 0..10 {
                    *admitted += u64::from(check(&limiter, &limit, key, 1).await.is_allowed());
                }
            }
            sleep(Duration::from_millis(1)).await;
        }
        admitted
    };
    spend(500).await;
    // In one key for both, it would drop the entries of more than 200 milliseconds ago.
    for key in KEYS {
        assert_eq!(check(&earlier, &short, key, 1).await.binding().used, 1);
    }
    for (key, admitted) in KEYS.iter().zip(spend(1_800).await) {
        let used = check(&later, &limit, key, 0).await.binding().used;
        assert!(
            used >= admitted,
            "{used} used after {admitted} were admitted for {key}"
        );
    }
}

/// Two threads that are first at the same moment must not start a task each: one of them would hold
/// units that no request can spend.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn requests_that_are_first_together_share_their_prefetches() {
    let server = RedisServer::start();
    let limit = API.prefetch(MAX_LIFE);
    let mut late = 0;
    for number in 0..100 {
        let (limiter, key, barrier) = (
            limiter(&server),
            format!("key-{number}"),
            Arc::new(Barrier::new(40)),
        );
        let mut tasks = JoinSet::new();
        for _ in 0..40 {
            let (limiter, limit, key, barrier) = (
                limiter.clone(),
                limit.clone(),
                key.clone(),
                Arc::clone(&barrier),
            );
            tasks.spawn(async move {
                barrier.wait().await;
                check(&limiter, &limit, &key, 1).await
            });
        }
        tasks.join_all().await;
        sleep(Duration::from_millis(10)).await;
        // What no table knows is only given back when its life ends.
        let begun = Instant::now();
        limiter.shutdown(TEST_TIMEOUT).await.unwrap();
        late += u64::from(begun.elapsed() > MAX_LIFE * 3 / 4);
    }
    // A busy machine may delay a few. With two tasks a key, about eleven are late.
    assert!(late <= 3, "{late} of 100");
}
