//! Many checks at once, and those of others behind them in the queue.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::{task::JoinSet, time::sleep};
use tower_sliding_window::{
    Charge, Check, Decision, Error, Limit, Limiter, RedisStore, limiter::Breaker,
};

use crate::support::{TEST_TIMEOUT, ms, proxy::Proxy, redis_server::RedisServer, seconds};

const CALLS: Limit = Limit::per_hour("calls", 100_000_000);

const CROWD: usize = 8_000;

/// A limiter on a store whose replies take this long.
async fn slow(proxy: &Proxy, delay: Duration, connections: u32) -> Limiter {
    let store = RedisStore::builder(proxy.url())
        .connections(connections)
        .connect_timeout(TEST_TIMEOUT)
        .reply_timeout(TEST_TIMEOUT);
    // All connections are open before. One that opens behind the delay takes it for distance, and a
    // distant server gets many batches at once.
    let store = store.connect().await.unwrap();
    let limiter = Limiter::new(store)
        .refusal_cache(Duration::ZERO)
        .deadline(TEST_TIMEOUT);
    assert!(
        limiter
            .check(&CALLS, "first", 1)
            .await
            .unwrap()
            .is_allowed()
    );
    proxy.delay_replies(delay);
    limiter
}

/// Checks that wait for their turn until their deadline say nothing about a store that answers all
/// the time.
#[tokio::test]
async fn checks_that_were_never_sent_open_no_breaker() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server).await;
    let patient = slow(&proxy, ms(50), 2).await;
    let limiter = patient.clone().deadline(ms(400));
    let (mut crowd, mut timed_out) = (JoinSet::new(), 0);
    for number in 0..2_500 {
        let check = limiter.check(&CALLS, number.to_string(), 1);
        crowd.spawn(async move { (number, check.await) });
    }
    while let Some(Ok((number, outcome))) = crowd.join_next().await {
        match outcome {
            Err(Error::TimedOut { .. }) => timed_out += 1,
            outcome => assert!(
                outcome.is_ok(),
                "{number}, after {timed_out} had timed out: {outcome:?}"
            ),
        }
    }
    assert!(timed_out > 100, "only {timed_out} timed out");
    let outcome = patient.deadline(ms(400)).check(&CALLS, "ada", 1).await;
    assert!(
        !matches!(outcome, Err(Error::BreakerOpen(_))),
        "after {timed_out} had timed out: {outcome:?}"
    );
}

/// A store answers within 600 ms, under a deadline of a second. A check that waits for one batch
/// before its own is late, and the reply to that first batch shows that the store answers in time.
#[tokio::test]
async fn checks_behind_a_batch_in_flight_open_no_breaker() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server).await;
    let limiter = slow(&proxy, ms(600), 1).await.deadline(ms(1_000));
    let mut flood = JoinSet::new();
    flood.spawn(limiter.check(&CALLS, "mallory", 1));
    sleep(ms(50)).await;
    for _ in 1..300 {
        flood.spawn(limiter.check(&CALLS, "mallory", 1));
    }
    let mut timed_out = 0;
    while let Some(Ok(outcome)) = flood.join_next().await {
        timed_out += u32::from(matches!(outcome, Err(Error::TimedOut { .. })));
    }
    assert!(timed_out > 5, "only {timed_out} timed out");
    proxy.delay_replies(ms(0));
    let outcome = limiter.check(&CALLS, "ada", 1).await;
    assert!(
        !matches!(outcome, Err(Error::BreakerOpen(_))),
        "after {timed_out} had timed out: {outcome:?}"
    );
}

/// The same timeouts, of a store that does not answer.
#[tokio::test]
async fn checks_that_wait_for_a_silent_server_open_the_breaker() {
    let server = RedisServer::start();
    for connections in [1, 2] {
        let limiter = Limiter::new(server.store().connections(connections).build().unwrap());
        assert!(
            limiter
                .clone()
                .deadline(TEST_TIMEOUT)
                .check(&CALLS, "first", 1)
                .await
                .unwrap()
                .is_allowed()
        );
        server.pause();
        for number in 0..5 {
            let outcome = limiter.check(&CALLS, "ada", 1).await;
            assert!(
                matches!(outcome, Err(Error::TimedOut { .. })),
                "{number}: {outcome:?}"
            );
        }
        // A timeout that a busy machine notices late does not count.
        let begun = Instant::now();
        while !matches!(
            limiter.check(&CALLS, "ada", 1).await,
            Err(Error::BreakerOpen(_))
        ) {
            assert!(
                begun.elapsed() < TEST_TIMEOUT,
                "{connections}: the breaker stays closed"
            );
        }
        server.resume();
    }
}

/// A check behind as many equal ones as its limit admits is refused before Redis is asked. The
/// refusal tells what is known, and nothing of it is remembered.
#[tokio::test]
async fn a_check_behind_as_many_as_its_limit_admits_is_refused_at_once() {
    let server = RedisServer::start();
    let limiter = Limiter::new(server.store().build().unwrap()).deadline(TEST_TIMEOUT);
    let few = Limit::per_hour("few", 4);
    assert!(limiter.check(&few, "first", 1).await.unwrap().is_allowed());
    server.pause();
    let charge = |limit, cost| Charge::new(limit, "mallory", cost).unwrap();
    let mut crowd = JoinSet::new();
    for _ in 0..2_000 {
        let check = Check::new(charge(few.clone(), 3))
            .and(charge(CALLS, 1))
            .unwrap();
        crowd.spawn(limiter.check_all(check));
    }
    for number in 0..1_500 {
        let refusal = crowd.join_next().await.unwrap().unwrap().unwrap();
        assert_eq!(refusal.retry_after(), Some(seconds(1)), "{number}");
        let (shown, other) = (
            refusal.visible().unwrap(),
            refusal.statuses().nth(1).unwrap(),
        );
        assert_eq!(
            (&shown.limit, shown.remaining(), shown.reset_after()),
            (&few, 0, few.window()),
            "{number}"
        );
        assert!(
            other.retry_after().is_none() && other.is_hidden(),
            "{number}: {other:?}"
        );
    }
    crowd.shutdown().await;
    server.resume();
    // One of the crowd may have been admitted.
    assert!(
        limiter
            .check(&few, "mallory", 1)
            .await
            .unwrap()
            .is_allowed()
    );
}

/// Redis stands still. The timeouts of clients within their limits open the breaker, although
/// another client floods its own limit, or one that all share.
#[tokio::test]
async fn a_crowd_keeps_no_breaker_closed() {
    let (few, all) = (Limit::per_hour("few", 3), Limit::per_hour("all", 20));
    let of_all = Charge::new(all, "all", 1).unwrap();
    let ask = |key: u64| {
        let check = Check::new(Charge::new(few.clone(), key, 1).unwrap());
        check.and(of_all.clone()).unwrap()
    };
    for flood in [ask(0), Check::new(of_all.clone())] {
        let server = RedisServer::start();
        let limiter = Limiter::new(server.store().build().unwrap()).deadline(ms(50));
        assert!(limiter.check_all(ask(1_000)).await.unwrap().is_allowed());
        server.pause();
        let (mut asked, mut crowd) = (JoinSet::new(), JoinSet::new());
        for number in 0..500 {
            for _ in 0..4 {
                crowd.spawn(limiter.check_all(flood.clone()));
            }
            if number % 10 == 9 {
                asked.spawn(limiter.check_all(ask(number)));
            }
            sleep(ms(2)).await;
        }
        let outcomes = asked.join_all().await;
        crowd.join_all().await;
        server.resume();
        let open = outcomes.iter().filter(|outcome| is_open(outcome)).count();
        assert!(
            open > 25,
            "of 50 checks, only {open} met an open breaker: {flood:?}"
        );
    }
}

/// Redis stands still, and one key floods it. Its own failures open no breaker, so it passes no
/// more than its limit by fail-open.
#[tokio::test]
async fn a_crowd_opens_no_breaker() {
    for deadline in [200, 1_200] {
        let server = RedisServer::start();
        // Behind the longer deadline, the reply timeout ends the checks.
        let store = server.store().reply_timeout(ms(300)).build().unwrap();
        let limiter = Limiter::new(store).deadline(ms(deadline));
        let few = Limit::per_hour("few", 10);
        assert!(limiter.check(&few, "first", 1).await.unwrap().is_allowed());
        server.pause();
        let mut crowd = JoinSet::new();
        for _ in 0..500 {
            crowd.spawn(limiter.check(&few, "mallory", 1));
            sleep(ms(1)).await;
        }
        let outcomes = crowd.join_all().await;
        server.resume();
        assert!(!outcomes.iter().any(is_open), "{deadline} ms");
        let failed = outcomes.iter().filter(|outcome| outcome.is_err()).count();
        // Ten more may fail in each reply timeout.
        let most = if deadline > 200 { 44 } else { 14 };
        assert!(
            (10..=most).contains(&failed),
            "{deadline} ms: {failed} of 10 have no answer"
        );
    }
}

/// A check with a short deadline comes in the middle of a crowd with a longer one.
#[tokio::test]
async fn a_short_deadline_ends_no_crowd_of_a_longer_one() {
    let server = RedisServer::start();
    let long = Limiter::new(server.store().build().unwrap()).deadline(ms(600));
    let short = long.clone().deadline(ms(50));
    let few = Limit::per_hour("few", 10);
    assert!(long.check(&few, "first", 1).await.unwrap().is_allowed());
    server.pause();
    let mut crowd = JoinSet::new();
    for _ in 0..30 {
        crowd.spawn(long.check(&few, "mallory", 1));
    }
    sleep(ms(200)).await;
    let _ = short.check(&few, "mallory", 1).await;
    let outcomes = crowd.join_all().await;
    assert!(!outcomes.iter().any(is_open));
    let later = long.check(&few, "mallory", 1).await;
    server.resume();
    assert!(!is_open(&later), "{later:?}");
}

fn is_open(outcome: &Result<Decision, Error>) -> bool {
    matches!(outcome, Err(Error::BreakerOpen(_)))
}

/// One key sends thousands of checks at once. The checks of others do not wait for all of them.
#[tokio::test]
async fn a_key_that_floods_the_queue_delays_itself_first() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server).await;
    let limiter = slow(&proxy, ms(5), 2).await;
    let decided = Arc::new(AtomicUsize::new(0));
    let mut crowd = JoinSet::new();
    for number in 0..CROWD {
        let (check, decided) = (
            limiter.check(&CALLS, "mallory", 1 + number as u64 % 2),
            Arc::clone(&decided),
        );
        crowd.spawn(async move {
            assert!(check.await.unwrap().is_allowed());
            decided.fetch_add(1, Ordering::SeqCst);
        });
    }
    // All of them are in the queue.
    sleep(ms(1)).await;
    for other in ["ada", "bob", "eve"] {
        let before = decided.load(Ordering::SeqCst);
        assert!(limiter.check(&CALLS, other, 1).await.unwrap().is_allowed());
        let overtaken_by = decided.load(Ordering::SeqCst) - before;
        assert!(
            overtaken_by < 1_000,
            "{overtaken_by} of {CROWD} were decided before the check of {other}"
        );
    }
    tokio::time::timeout(seconds(20), crowd.join_all())
        .await
        .unwrap();
}

/// Replies are slow. Checks that would wait for longer than their deadline are refused at once, and
/// all others are decided.
#[tokio::test]
async fn a_queue_refuses_by_the_time_that_waiting_would_take() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server).await;
    let patient = slow(&proxy, ms(50), 2).await;
    let mut crowd = JoinSet::new();
    for number in 0..6_000_u64 {
        // Half of them have one key.
        let key = if number % 2 == 0 { 0 } else { number };
        crowd.spawn(patient.check(&CALLS, key, 1 + number / 2 % 2));
    }
    // They tell how long a batch takes. The checks that wait then take nearly two more seconds.
    for _ in 0..1_500 {
        assert!(
            crowd
                .join_next()
                .await
                .unwrap()
                .unwrap()
                .unwrap()
                .is_allowed()
        );
    }
    let hurried = patient.clone().deadline(ms(300));
    for key in ["ada", "bob", "eve"] {
        let outcome = hurried.check(&CALLS, key, 1).await;
        let error = format!("{:?}", outcome.unwrap_err());
        assert!(
            error.contains("are waiting for Redis, which takes about"),
            "{error}"
        );
    }
    assert!(patient.check(&CALLS, "joe", 1).await.unwrap().is_allowed());
    while let Some(outcome) = crowd.join_next().await {
        assert!(outcome.unwrap().unwrap().is_allowed());
    }
    assert!(hurried.check(&CALLS, "ada", 1).await.unwrap().is_allowed());
}

/// One key has thousands of checks in the queue of a slow server. It is refused more of them, and
/// no other key is.
#[tokio::test]
async fn a_key_that_floods_the_queue_is_refused_first() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server).await;
    let patient = slow(&proxy, ms(50), 2).await;
    let mut crowd = JoinSet::new();
    for number in 0..6_000_u64 {
        crowd.spawn(patient.check(&CALLS, "mallory", 1 + number % 2));
    }
    for _ in 0..1_500 {
        assert!(
            crowd
                .join_next()
                .await
                .unwrap()
                .unwrap()
                .unwrap()
                .is_allowed()
        );
    }
    let hurried = patient.clone().deadline(seconds(1));
    assert!(matches!(
        hurried.check(&CALLS, "mallory", 1).await,
        Err(Error::Unavailable(_))
    ));
    for key in ["ada", "bob", "eve"] {
        assert!(hurried.check(&CALLS, key, 1).await.unwrap().is_allowed());
    }
    tokio::time::timeout(TEST_TIMEOUT, crowd.join_all())
        .await
        .unwrap();
}

/// A batch of 64 takes 50 ms, and a few more checks come than that. Those that wait until their
/// answer is too late would take the places of those that come after them, and no check would be
/// decided in time any more.
#[tokio::test]
async fn a_slow_server_decides_in_time_what_it_can() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server).await;
    let limiter = slow(&proxy, ms(50), 1)
        .await
        .deadline(ms(200))
        .breaker(Breaker::OFF);
    let (decided, begun, mut key) = (Arc::<AtomicUsize>::default(), Instant::now(), 0_u64);
    // Of the first second, most are decided in any case.
    while decided.load(Ordering::SeqCst) < 1_000 {
        let now = begun.elapsed();
        assert!(
            now < TEST_TIMEOUT,
            "of {key} checks {decided:?} are decided in time"
        );
        while key < now.as_millis() as u64 * 3 / 2 {
            let (check, decided) = (limiter.check(&CALLS, key, 1), Arc::clone(&decided));
            tokio::spawn(async move {
                let is_decided = check.await.is_ok() && now > seconds(1);
                decided.fetch_add(is_decided.into(), Ordering::SeqCst);
            });
            key += 1;
        }
        sleep(ms(1)).await;
    }
}

/// The checks of one key are decided in their order, wherever they wait.
#[tokio::test]
async fn a_flood_of_one_key_is_decided_in_order() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server).await;
    let limiter = slow(&proxy, ms(5), 1).await;
    let mut crowd = JoinSet::new();
    for number in 0..2_000_u64 {
        let (flood, other) = (
            limiter.check(&CALLS, "mallory", 1 + number % 2),
            limiter.check(&CALLS, format!("{}", number % 7), 1),
        );
        crowd.spawn(async move {
            (
                number,
                flood.await.unwrap().binding().used,
                other.await.unwrap().binding().used,
            )
        });
    }
    let mut used = crowd.join_all().await;
    used.sort_unstable();
    let floods: Vec<_> = used.iter().map(|(_, flood, _)| *flood).collect();
    assert!(floods.is_sorted(), "{floods:?}");
}
