//! What an adversary has tried: each of these once broke a promise.

use std::time::Duration;

use tower_sliding_window::{Algorithm, Charge, Check, DenyCache, Limit, Limiter, ManualClock, RedisStore, Settlement};

use crate::support::{PATIENCE, redis_server::RedisServer};

const MILLISECOND: Duration = Duration::from_millis(1);
const HOUR: Duration = Duration::from_secs(3_600);

fn limiter(server: &RedisServer, clock: &ManualClock) -> Limiter<RedisStore> {
    let store = RedisStore::builder(&server.url()).clock(clock).connect_timeout(PATIENCE).build().unwrap();
    Limiter::new(store).deadline(PATIENCE).deny_cache(DenyCache::off())
}

/// Single units that have left and are not dropped yet, and then a cost of 2: the sum is begun without them, and they are
/// taken out of it when they are dropped.
#[tokio::test]
async fn a_sum_begins_with_the_single_units_that_are_left_behind() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let limiter = limiter(&server, &clock);
    let calls = Limit::per_hour("calls", 3_000);
    for _ in 0..1_700 {
        assert!(limiter.check(&calls, "ada", 1).await.unwrap().is_allowed());
    }
    clock.advance(HOUR / 2);
    for _ in 0..600 {
        assert!(limiter.check(&calls, "ada", 1).await.unwrap().is_allowed());
    }
    clock.advance(HOUR / 2 + MILLISECOND);
    // 1,700 have left, 600 count.
    let mut used = 600;
    let mut told = Vec::new();
    for _ in 0..4 {
        let decision = limiter.check(&calls, "ada", 2).await.unwrap();
        used += 2;
        told.push((decision.used(), used));
    }
    let mut admitted = used;
    while limiter.check(&calls, "ada", 100).await.unwrap().is_allowed() {
        admitted += 100;
    }
    assert!(admitted <= 3_000, "{admitted} units of 3,000 admitted in one window; (told, true) {told:?}");
}

/// Callers without a runtime are nobody else's failure.
#[test]
fn callers_without_a_runtime_open_no_breaker() {
    let server = RedisServer::start();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let store = RedisStore::builder(&server.url()).connect_timeout(PATIENCE).build().unwrap();
    let calls = Limit::per_hour("calls", 3_000);
    let healthy = Limiter::new(store.clone());
    drop(runtime.block_on(async { healthy.check(&calls, "ada", 1).await.unwrap() }));
    let stray = Limiter::new(store);
    for _ in 0..5 {
        let mut check = Box::pin(stray.check(&calls, "eve", 1));
        let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
        assert!(check.as_mut().poll(&mut cx).is_ready());
    }
    let outcome = runtime.block_on(async { healthy.check(&calls, "ada", 1).await });
    assert!(outcome.is_ok(), "a healthy store is not asked: {:?}", outcome.unwrap_err());
}

/// A future that was begun in a runtime that has ended.
#[test]
fn futures_of_an_ended_runtime_open_no_breaker() {
    use std::{future::poll_fn, task::Poll};
    let server = RedisServer::start();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let store = RedisStore::builder(&server.url()).connect_timeout(PATIENCE).build().unwrap();
    let calls = Limit::per_hour("calls", 3_000);
    let healthy = Limiter::new(store.clone());
    drop(runtime.block_on(async { healthy.check(&calls, "ada", 1).await.unwrap() }));
    let stray = Limiter::new(store).deadline(PATIENCE);
    let begun: Vec<_> = {
        let ended = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        ended.block_on(async {
            let mut all: Vec<_> = (0..8).map(|_| Box::pin(stray.check(&calls, "eve", 1))).collect();
            poll_fn(|cx| {
                for one in &mut all {
                    let _ = one.as_mut().poll(cx).is_ready();
                }
                Poll::Ready(())
            })
            .await;
            all
        })
    };
    runtime.block_on(async {
        for one in begun {
            drop(one.await);
        }
        let outcome = healthy.check(&calls, "ada", 1).await;
        assert!(outcome.is_ok(), "a healthy store is not asked: {:?}", outcome.unwrap_err());
    });
}

/// The same by a settlement.
#[tokio::test]
async fn a_settlement_begins_a_sum_with_what_is_left_behind() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let limiter = limiter(&server, &clock);
    let calls = Limit::per_hour("calls", 3_000);
    for _ in 0..1_700 {
        assert!(limiter.check(&calls, "ada", 1).await.unwrap().is_allowed());
    }
    clock.advance(HOUR / 2);
    let check = Check::new(Charge::new(calls.clone(), "ada", 1).unwrap());
    let mut last = None;
    for _ in 0..600 {
        last = Some(limiter.check_all(check.clone()).await.unwrap());
    }
    clock.advance(HOUR / 2 + MILLISECOND);
    let settled = limiter.settle(Settlement::new(check, &last.unwrap(), |_| Some(3))).await.unwrap();
    assert!(settled.was_applied());
    let mut told = Vec::new();
    for _ in 0..4 {
        told.push(limiter.peek(&calls, "ada").await.unwrap().used());
    }
    assert!(told[3] == 602, "602 are used, told {told:?}");
}

/// Foreign members that have left at the key of a counter, and nothing else there: one key fails a whole batch.
#[tokio::test]
async fn foreign_members_that_have_left_fail_no_other_check() {
    let server = RedisServer::start();
    let store = RedisStore::builder(&server.url()).connect_timeout(PATIENCE).build().unwrap();
    let limiter = Limiter::new(store).deadline(PATIENCE).deny_cache(DenyCache::off());
    let counter = Limit::per_hour("calls", 3_000).with_algorithm(Algorithm::counter());
    for n in 0..5 {
        assert!(limiter.check(&counter, format!("key {n}"), 1).await.unwrap().is_allowed());
    }
    let members: String = (0..600).map(|n| format!(" -1 m{n}")).collect();
    for key in server.keys() {
        let _: () = server.run(&format!("DEL {key}"));
        let _: () = server.run(&format!("ZADD {key}{members}"));
    }
    let mut told = Vec::new();
    for n in 0..5 {
        told.push(limiter.check(&counter, format!("key {n}"), 1).await.map(|decision| decision.used()));
    }
    let honest = limiter.check(&Limit::per_hour("login", 5), "honest", 1).await;
    assert!(honest.is_ok(), "{:?}\nhonest: {honest:?}", told[0]);
}

/// A worker whose thread is busy for a while, on a runtime of its own: its timeouts are nobody else's.
#[test]
fn a_runtime_that_stands_still_opens_no_breaker_for_others() {
    let server = RedisServer::start();
    let store = RedisStore::builder(&server.url()).connect_timeout(PATIENCE).build().unwrap();
    let calls = Limit::per_hour("calls", 3_000_000);
    let healthy = Limiter::new(store.clone());
    let (first, busy) = (Limiter::new(store.clone()).deadline(PATIENCE), Limiter::new(store));
    let calls2 = calls.clone();
    let worker = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let mut timed_out = 0;
        runtime.block_on(async {
            assert!(first.check(&calls2, "eve", 1).await.unwrap().is_allowed());
            std::thread::sleep(Duration::from_millis(300));
            for _ in 0..10 {
                let all: Vec<_> = (0..64).map(|_| tokio::spawn(busy.check(&calls2, "eve", 1))).collect();
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
            tokio::time::sleep(MILLISECOND).await;
        }
    });
    let timed_out = worker.join().unwrap();
    assert_eq!(
        open, 0,
        "of {asked} checks of a runtime that is not busy, {open} found the breaker open, {other} failed otherwise; the busy one had {timed_out} without an answer"
    );
}

/// A client that hangs up before the reply, three times in a row, costs a connection.
#[tokio::test]
async fn clients_that_hang_up_cost_no_connections() {
    use std::future::Future;
    let server = RedisServer::start();
    let store = RedisStore::builder(&server.url()).connect_timeout(PATIENCE).build().unwrap();
    let calls = Limit::per_hour("calls", 3_000_000);
    let limiter = Limiter::new(store);
    drop(limiter.check(&calls, "ada", 1).await.unwrap());
    let received = || -> u64 {
        let info: String = server.run("INFO stats");
        info.lines().find_map(|line| line.strip_prefix("total_connections_received:")).unwrap().trim().parse().unwrap()
    };
    let before = received();
    for _ in 0..300 {
        let mut check = Box::pin(limiter.check(&calls, "eve", 1));
        let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
        let _ = check.as_mut().poll(&mut cx);
        drop(check);
        tokio::time::sleep(MILLISECOND).await;
    }
    let opened = received() - before;
    assert!(opened < 10, "{opened} connections opened for 300 requests that hung up");
}

/// A layer whose choice takes long, or whose store hangs, and inside of it a login layer on a store that is well.
#[tokio::test]
async fn a_slow_choice_further_out_leaves_time_for_an_inner_limit() {
    use std::convert::Infallible;

    use http::request::Parts;
    use tower::{Layer, ServiceExt, service_fn};
    use tower_sliding_window::{KeyedLimit, RateLimitLayer};

    use crate::support::requests::{anyone, hello, request};

    let server = RedisServer::start();
    let store = RedisStore::builder(&server.url()).connect_timeout(PATIENCE).build().unwrap();
    let _ = Limiter::new(store.clone()).deadline(PATIENCE).peek(&Limit::per_minute("login", 5), "x").await.unwrap();
    let slow = KeyedLimit::chosen(anyone, |_: &Parts| async {
        tokio::time::sleep(Duration::from_millis(200)).await;
        Ok::<_, Infallible>(Limit::per_hour("api", 1_000_000))
    });
    let api = RateLimitLayer::new(store.clone()).limit(slow);
    let login = RateLimitLayer::new(store).limit(Limit::per_minute("login", 5).by(anyone));
    let app = api.layer(login.layer(service_fn(hello)));
    let mut admitted = 0;
    let all: Vec<_> = (0..50).map(|_| tokio::spawn(app.clone().oneshot(request()))).collect();
    for one in all {
        admitted += u32::from(one.await.unwrap().unwrap().status() == 200);
    }
    assert!(admitted <= 5, "login of 5 a minute on a healthy Redis let {admitted} of 50 through");
}

/// Two limits of one name with different windows: the expiry that one has set tells the other a reset that is too late, and the
/// process refuses what the store would admit.
#[tokio::test]
async fn a_refusal_is_remembered_for_no_longer_than_its_own_window_says() {
    let server = RedisServer::start();
    let store = RedisStore::builder(&server.url()).connect_timeout(PATIENCE).build().unwrap();
    let cached = Limiter::new(store.clone()).deadline(PATIENCE);
    let asking = Limiter::new(store).deadline(PATIENCE).deny_cache(DenyCache::off());
    let (long, short) = (Limit::per("calls", 3, MILLISECOND * 3_000), Limit::per("calls", 3, MILLISECOND * 2_000));
    assert!(asking.check(&long, "ada", 1).await.unwrap().is_allowed());
    tokio::time::sleep(MILLISECOND * 1_000).await;
    assert!(asking.check(&long, "ada", 1).await.unwrap().is_allowed());
    assert!(asking.check(&short, "ada", 1).await.unwrap().is_allowed());
    tokio::time::sleep(MILLISECOND * 850).await;
    let refused = cached.check(&short, "ada", 2).await.unwrap();
    assert!(!refused.is_allowed());
    tokio::time::sleep(MILLISECOND * 300).await;
    let here = cached.check(&short, "ada", 1).await.unwrap();
    let there = asking.check(&short, "ada", 1).await.unwrap();
    assert!(
        here.is_allowed() || !there.is_allowed(),
        "refused here for {:?}, admitted by the store; the refusal before had told a reset of {:?}",
        here.retry_after(),
        refused.reset_after()
    );
}
