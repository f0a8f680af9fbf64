//! A server that is far away: default settings suit any round trip, and a deadline that does not
//! suit it is explained.

use std::{
    error::Error as _,
    future::{Future, poll_fn},
    task::Poll,
    time::{Duration, Instant},
};

use tokio::{
    task::JoinSet,
    time::{interval, sleep},
};
use tower_sliding_window::{
    Error, Everyone, Limit, Limiter, RateLimitLayer, RedisStore, limit::prefetch::DEFAULT_LIFE,
    limiter::Breaker,
};

use crate::support::{
    TEST_TIMEOUT,
    log::Log,
    ms,
    proxy::{Cut, Proxy},
    redis_server::RedisServer,
};

const CALLS: Limit = Limit::per_hour("calls", 1_000_000);

/// A limiter through a proxy whose replies arrive so much later.
async fn at_a_distance(millis: u64) -> (RedisServer, Proxy) {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server).await;
    proxy.delay_replies(ms(millis));
    (server, proxy)
}

/// So many checks at once, one for each key. All are decided.
async fn assert_decides(limiter: &Limiter, checks: u64, case: &str) {
    let mut asked = JoinSet::new();
    for key in 0..checks {
        asked.spawn(limiter.check(&CALLS, key, 1));
    }
    for outcome in asked.join_all().await {
        assert!(
            outcome.as_ref().is_ok_and(|decision| decision.is_allowed()),
            "{case}: {outcome:?}"
        );
    }
}

/// From the first check on: one that has to connect, a ramp, and a thousand at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn default_settings_decide_at_any_distance() {
    for millis in [40, 80, 200] {
        for is_connected in [false, true] {
            let (_server, proxy) = at_a_distance(millis).await;
            let store = match is_connected {
                true => RedisStore::connect(proxy.url()).await.unwrap(),
                false => RedisStore::builder(proxy.url()).build().unwrap(),
            };
            let limiter = Limiter::new(store);
            for checks in [1, 1, 2, 10, 100, 1_000] {
                assert_decides(
                    &limiter,
                    checks,
                    &format!("{millis} ms, connected: {is_connected}, {checks}"),
                )
                .await;
            }
        }
    }
}

#[tokio::test]
async fn a_store_that_has_connected_has_all_its_connections() {
    let server = RedisServer::start();
    let store = RedisStore::builder(server.url())
        .connections(7)
        .connect()
        .await
        .unwrap();
    let clients: String = server.run("CLIENT LIST TYPE normal");
    // And the one that asks.
    assert_eq!(clients.lines().count(), 7 + 1, "{clients}");
    drop(store);
}

/// The server moves away while nobody waits for long enough to hear a reply, and comes back. Then
/// the line stalls for longer than the longest deadline, again and again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_default_deadline_follows_a_round_trip_that_jumps() {
    let (_server, proxy) = at_a_distance(0).await;
    let limiter = Limiter::new(RedisStore::connect(proxy.url()).await.unwrap());
    for millis in [300, 0, 80, 0] {
        proxy.delay_replies(ms(millis));
        let jumped = Instant::now();
        while limiter.check(&CALLS, "ada", 1).await.is_err() {
            assert!(jumped.elapsed() < TEST_TIMEOUT, "{millis} ms");
            sleep(ms(10)).await;
        }
        assert_decides(&limiter, 100, &format!("after a jump to {millis} ms")).await;
    }
    for stall in 0..2 {
        proxy.delay_replies(ms(2_000));
        let stalled = Instant::now();
        while stalled.elapsed() < ms(2_000) {
            let _ = limiter.check(&CALLS, "ada", 1).await;
            sleep(ms(10)).await;
        }
        proxy.delay_replies(ms(0));
        let over = Instant::now();
        while limiter.check(&CALLS, "ada", 1).await.is_err() {
            assert!(over.elapsed() < TEST_TIMEOUT, "stall {stall}");
            sleep(ms(10)).await;
        }
    }
}

/// The error of each check says how far away the server is, and what to change. So does the log,
/// once that is known.
#[tokio::test]
async fn a_deadline_that_is_too_short_for_the_distance_is_explained() {
    let (_server, proxy) = at_a_distance(80).await;
    let store = RedisStore::builder(proxy.url()).build().unwrap();
    let limiter = Limiter::new(store).deadline(ms(50)).breaker(Breaker::OFF);
    let (mut explained, begun) = (String::new(), Instant::now());
    while !explained.contains("away") {
        assert!(begun.elapsed() < TEST_TIMEOUT, "{explained}");
        explained = limiter
            .check(&CALLS, "ada", 1)
            .await
            .unwrap_err()
            .to_string();
        sleep(ms(10)).await;
    }
    let rule = "did not answer within 50ms: it is ";
    assert!(
        explained.contains(rule) && explained.contains("Set a longer `deadline`, or none"),
        "{explained}"
    );

    // So does the error while the breaker is open, which a probe has left.
    let limiter = limiter.breaker(Breaker::default());
    sleep(ms(500)).await;
    while !explained.contains("failed repeatedly") {
        assert!(begun.elapsed() < TEST_TIMEOUT, "{explained}");
        let error = limiter.check(&CALLS, "ada", 1).await.unwrap_err();
        explained = format!("{error}: {:?}", error.source().map(ToString::to_string));
        sleep(ms(10)).await;
    }
    sleep(ms(500)).await;
    let error = limiter.check(&CALLS, "ada", 1).await.unwrap_err();
    assert!(
        error
            .source()
            .is_some_and(|cause| cause.to_string().contains(rule)),
        "{error:?}"
    );

    let log = Log::start();
    let _ = limiter.clone().deadline(ms(200));
    assert_eq!(log.text(), "");
    let _ = RateLimitLayer::new(limiter)
        .limit(CALLS.by(Everyone))
        .deadline(ms(50));
    assert!(
        log.text()
            .contains("too far away for the deadline: set a longer one, or none"),
        "{}",
        log.text()
    );
}

#[test]
fn an_error_has_a_text_whatever_its_times() {
    let error = Error::TimedOut {
        deadline: ms(50),
        round_trip: Some(Duration::MAX),
    };
    assert!(
        error.to_string().contains("Set a longer `deadline`"),
        "{error}"
    );
}

/// All connections go silent, and new ones work. Each probe of the breaker waits longer than the
/// one before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn half_open_connections_are_given_up_together() {
    let (_server, proxy) = at_a_distance(0).await;
    let limiter = Limiter::new(RedisStore::connect(proxy.url()).await.unwrap());
    assert_decides(&limiter, 100, "near").await;
    proxy.silence_open_connections();
    let (silent, mut key) = (Instant::now(), 0_u64);
    let mut asked = JoinSet::new();
    while !matches!(asked.try_join_next(), Some(Ok(Ok(_)))) {
        assert!(silent.elapsed() < Duration::from_secs(3), "no decision");
        asked.spawn(limiter.check(&CALLS, key, 1));
        key += 1;
        sleep(ms(2)).await;
    }
}

/// Callers that wait for units also wait for a server that hangs for a moment.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_caller_that_waits_outlasts_a_short_outage() {
    let server = RedisServer::start();
    let limiter = Limiter::new(server.store().connect().await.unwrap());
    let limit = Limit::per("upstream", 500, Duration::from_secs(1));
    assert!(
        limiter
            .check(&limit, "ada", 500)
            .await
            .unwrap()
            .is_allowed()
    );
    let mut waiting = JoinSet::new();
    for _ in 0..1_000 {
        let (limiter, limit) = (limiter.clone(), limit.clone());
        waiting.spawn(async move { limiter.acquire(&limit, "ada", 1, TEST_TIMEOUT).await });
    }
    server.pause();
    sleep(ms(1_500)).await;
    server.resume();
    for outcome in waiting.join_all().await {
        assert!(
            outcome.as_ref().is_ok_and(|decision| decision.is_allowed()),
            "{outcome:?}"
        );
    }
    assert!(matches!(
        limiter.acquire(&limit, "ada", 501, TEST_TIMEOUT).await,
        Err(Error::NeverFits(_))
    ));
}

/// A busy key of a process that is far away hardly ever waits for the server, once it has
/// prefetches.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_busy_key_far_away_is_decided_by_prefetches() {
    let (server, proxy) = at_a_distance(80).await;
    let limiter = Limiter::new(RedisStore::connect(proxy.url()).await.unwrap());
    let limit = Limit::per_minute("tenant", 1_000_000).prefetch(DEFAULT_LIFE);
    let (mut asked, mut ticks) = (JoinSet::new(), interval(ms(5)));
    for number in 0..800 {
        ticks.tick().await;
        let (limiter, limit) = (limiter.clone(), limit.clone());
        asked.spawn(async move {
            let check = limiter.check(&limit, "ada", 1);
            let mut check = std::pin::pin!(check);
            let is_at_once = poll_fn(|cx| Poll::Ready(check.as_mut().poll(cx))).await;
            let is_waiting = is_at_once.is_pending();
            let decision = match is_at_once {
                Poll::Ready(decision) => decision,
                Poll::Pending => check.await,
            };
            assert!(decision.unwrap().is_allowed());
            number >= 400 && is_waiting
        });
    }
    let waiting = asked
        .join_all()
        .await
        .into_iter()
        .filter(|is_waiting| *is_waiting)
        .count();
    assert!(
        waiting <= 20,
        "{waiting} of the last 400 waited for the server"
    );

    // Nothing is lost, and what is held is given back.
    limiter.shutdown(TEST_TIMEOUT).await.unwrap();
    let near = Limiter::new(server.store().connect().await.unwrap());
    assert_eq!(near.peek(&limit, "ada").await.unwrap().binding().used, 800);
}

/// Units that nobody asks for any more are soon there for others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_that_falls_quiet_takes_no_more_prefetches() {
    let (server, proxy) = at_a_distance(80).await;
    let limiter = Limiter::new(RedisStore::connect(proxy.url()).await.unwrap());
    let limit = Limit::per_minute("tenant", 100_000_000).prefetch(DEFAULT_LIFE);
    let (mut asked, mut ticks) = (JoinSet::new(), interval(ms(1)));
    for _ in 0..1_000 {
        ticks.tick().await;
        asked.spawn(limiter.check(&limit, "ada", 100));
    }
    assert!(
        asked
            .join_all()
            .await
            .iter()
            .all(|outcome| outcome.as_ref().is_ok_and(|decision| decision.is_allowed()))
    );
    // The longest life of the last one, and of one more that was asked for before it ended.
    sleep(ms(2_000)).await;
    server.run::<()>("CONFIG RESETSTAT");
    sleep(ms(1_000)).await;
    assert_eq!(server.script_calls(), 0, "prefetches for nobody");
}

/// Its life is no longer than the window.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prefetch_that_would_end_on_its_way_is_not_taken() {
    let (server, proxy) = at_a_distance(80).await;
    let limiter = Limiter::new(RedisStore::connect(proxy.url()).await.unwrap());
    let near = Limiter::new(server.store().connect().await.unwrap());
    let limit = Limit::per("brief", 1_000_000, ms(50)).prefetch(ms(50));
    let (mut asked, mut ticks) = (JoinSet::new(), interval(ms(1)));
    for number in 0..500 {
        ticks.tick().await;
        asked.spawn(limiter.check(&limit, "ada", 1));
        if number % 10 == 0 {
            let reserved = near.peek(&limit, "ada").await.unwrap().binding().reserved;
            assert_eq!(reserved, 0, "held and never spent");
        }
    }
}

/// A near and a far process spend one limit together, up to its end and beyond.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_near_and_a_far_process_keep_a_limit_together() {
    let (server, proxy) = at_a_distance(80).await;
    let limit = Limit::per("shared", 500, Duration::from_secs(2)).prefetch(DEFAULT_LIFE);
    let mut callers = JoinSet::new();
    for url in [server.url(), proxy.url().to_owned()] {
        let limiter = Limiter::new(RedisStore::connect(&url).await.unwrap());
        for caller in 0..4_u64 {
            let (limiter, limit, mut ticks) =
                (limiter.clone(), limit.clone(), interval(ms(5 + caller)));
            callers.spawn(async move {
                let (begun, mut admitted) = (Instant::now(), Vec::new());
                while begun.elapsed() < Duration::from_secs(6) {
                    ticks.tick().await;
                    let asked = Instant::now();
                    // On a busy machine, a near process may miss its deadline.
                    let decision = limiter.check(&limit, "ada", 1).await;
                    if decision.is_ok_and(|decision| decision.is_allowed()) {
                        // Its moment is between the two.
                        admitted.push((asked, Instant::now()));
                    }
                }
                admitted
            });
        }
    }
    let admitted: Vec<(Instant, Instant)> =
        callers.join_all().await.into_iter().flatten().collect();
    for (_, began) in &admitted {
        let within = |(asked, ended): &&(Instant, Instant)| {
            asked >= began && *ended < *began + limit.window()
        };
        let count = admitted.iter().filter(within).count();
        assert!(count <= 500, "{count} within one window");
    }
    assert!(
        admitted.len() > 900,
        "only {} were admitted in three windows",
        admitted.len()
    );
}

/// The first in line asks so early that its check arrives when a unit has left.
#[tokio::test]
async fn a_line_loses_no_round_trip_in_each_window() {
    let (_server, proxy) = at_a_distance(100).await;
    let limiter = Limiter::new(RedisStore::connect(proxy.url()).await.unwrap());
    let calls = Limit::per("calls", 1, ms(300));
    let mut callers = JoinSet::new();
    for _ in 0..8 {
        let (limiter, calls) = (limiter.clone(), calls.clone());
        callers.spawn(async move {
            limiter
                .acquire(&calls, "ada", 1, TEST_TIMEOUT)
                .await
                .unwrap()
                .at()
        });
    }
    let mut admitted = callers.join_all().await;
    admitted.sort_unstable();
    let mut gaps: Vec<Duration> = admitted
        .windows(2)
        .map(|pair| pair[1].duration_since(pair[0]).unwrap())
        .collect();
    gaps.sort_unstable();
    // The machine may be late for some of them.
    assert!(
        gaps[0] >= ms(300) && gaps[gaps.len() / 2] < ms(350),
        "{gaps:?}"
    );
}

/// A connection is found to be cut, another is opened, and the check is sent again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cut_of_all_connections_loses_no_decision_far_away() {
    for millis in [20, 80] {
        let (_server, proxy) = at_a_distance(millis).await;
        let limiter = Limiter::new(RedisStore::connect(proxy.url()).await.unwrap());
        assert_decides(&limiter, 100, "before").await;
        let mut asked = JoinSet::new();
        for number in 0..200_u64 {
            asked.spawn(limiter.check(&CALLS, number, 1));
            if number == 100 {
                proxy.cut(Cut::Reset);
            }
            sleep(ms(2)).await;
        }
        for outcome in asked.join_all().await {
            assert!(outcome.is_ok(), "{millis} ms: {outcome:?}");
        }
    }
}

/// Requests that are in flight together say no more of a connection than one of them.
#[tokio::test]
async fn callers_that_leave_together_end_no_connection() {
    let (server, proxy) = at_a_distance(60).await;
    let limiter = Limiter::new(server_at(proxy.url()).await).deadline(TEST_TIMEOUT);
    assert!(limiter.check(&CALLS, "ada", 1).await.unwrap().is_allowed());
    let opened = server.opened();
    for _ in 0..3 {
        let mut callers: JoinSet<_> = (0..4)
            .map(|caller: u64| limiter.check(&CALLS, caller, 1))
            .collect();
        sleep(ms(25)).await;
        callers.abort_all();
        while callers.join_next().await.is_some() {}
        assert!(limiter.check(&CALLS, "ada", 1).await.unwrap().is_allowed());
    }
    assert_eq!(server.opened(), opened + 1);
}

/// Nobody has polled the first check, whose reply has come before those of the others.
#[tokio::test]
async fn a_check_that_is_not_polled_ends_no_connection() {
    let server = RedisServer::start();
    let limiter = Limiter::new(server_at(&server.url()).await).deadline(TEST_TIMEOUT);
    assert!(limiter.check(&CALLS, "ada", 1).await.unwrap().is_allowed());
    let mut unpolled = Box::pin(limiter.check(&CALLS, "eve", 1));
    assert!(poll_fn(|cx| Poll::Ready(unpolled.as_mut().poll(cx).is_pending())).await);
    let opened = server.opened();
    for _ in 0..12 {
        assert!(limiter.check(&CALLS, "ada", 1).await.unwrap().is_allowed());
        sleep(ms(100)).await;
    }
    drop(unpolled);
    for used in 14..20 {
        assert_eq!(
            limiter
                .check(&CALLS, "ada", 1)
                .await
                .unwrap()
                .binding()
                .used,
            used
        );
    }
    assert_eq!(server.opened(), opened + 1);
}

/// A reply that comes too late tells how far away the server is, also to callers that came alone.
#[tokio::test]
async fn few_checks_fail_while_the_server_moves_away() {
    for together in [2, 4] {
        // A pause of the machine fails some more.
        let mut least = u64::MAX;
        for _ in 0..3 {
            least = least.min(failed_after_a_move(together).await);
        }
        assert!(least < 4 * together, "{least} with {together} at once");
    }
}

/// The checks, so many at once, that fail once the server is 90 ms away.
async fn failed_after_a_move(together: u64) -> u64 {
    let (_server, proxy) = at_a_distance(0).await;
    let limiter = Limiter::new(server_at(proxy.url()).await).breaker(Breaker::OFF);
    for _ in 0..200 {
        let _ = limiter.check(&CALLS, "ada", 1).await;
    }
    proxy.delay_replies(ms(90));
    let mut failed = 0;
    for _ in 0..20 {
        let mut checks: JoinSet<_> = (0..together)
            .map(|key: u64| limiter.check(&CALLS, key, 1))
            .collect();
        while let Some(outcome) = checks.join_next().await {
            failed += u64::from(outcome.unwrap().is_err());
        }
        sleep(ms(20)).await;
    }
    failed
}

async fn server_at(url: &str) -> RedisStore {
    RedisStore::builder(url)
        .connect_timeout(TEST_TIMEOUT)
        .connect()
        .await
        .unwrap()
}
