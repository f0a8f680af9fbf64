//! How checks travel to Redis in batches.
//!
//! The random histories in `decision/properties` show that a batch decides like the same checks one
//! by one.

use std::{
    future::{Future, poll_fn},
    iter,
    task::Poll,
    time::Duration,
};

use tokio::{
    runtime::Handle,
    task::{JoinHandle, JoinSet, yield_now},
    time::{Instant, sleep},
};
use tower_sliding_window::{
    Decision, Error, Limit, Limiter, RedisStore,
    limiter::Breaker,
    store::{ManualClock, RedisStoreBuilder},
};

use crate::support::{TEST_TIMEOUT, ms, proxy::Proxy, redis_server::RedisServer};

const CALLS: Limit = Limit::per_hour("calls", 100_000);

fn patient(url: &str) -> RedisStoreBuilder {
    RedisStore::builder(url)
        .connect_timeout(TEST_TIMEOUT)
        .reply_timeout(TEST_TIMEOUT)
}

/// By a test's clock, a busy machine does not make the server seem far away, to which more batches
/// are in flight.
fn limiter_with(connections: u32, url: &str) -> Limiter {
    let store = patient(url)
        .connections(connections)
        .clock(&ManualClock::new())
        .build()
        .unwrap();
    Limiter::new(store).deadline(TEST_TIMEOUT)
}

/// With one batch in flight at a time.
fn limiter(url: &str) -> Limiter {
    limiter_with(1, url)
}

/// On a runtime of one thread, all of these checks are queued before the first is sent.
fn ask(
    limiter: &Limiter,
    keys: impl IntoIterator<Item = &'static str>,
) -> Vec<JoinHandle<Result<Decision, Error>>> {
    keys.into_iter()
        .map(|key| tokio::spawn(limiter.check(&CALLS, key, 1)))
        .collect()
}

async fn used(answers: Vec<JoinHandle<Result<Decision, Error>>>) -> Vec<u64> {
    let mut used = Vec::new();
    for answer in answers {
        used.push(answer.await.unwrap().unwrap().binding().used);
    }
    used
}

async fn turns(number: usize) {
    for _ in 0..number {
        yield_now().await;
    }
}

#[tokio::test]
async fn checks_that_arrive_together_are_one_batch_decided_in_order() {
    let server = RedisServer::start();
    let limiter = limiter(&server.url());
    assert!(limiter.peek(&CALLS, "ada").await.unwrap().is_allowed());
    server.run::<()>("CONFIG RESETSTAT");
    let keys = ["ada", "bob", "ada", "eve", "ada", "bob"];
    assert_eq!(used(ask(&limiter, keys)).await, [1, 1, 2, 1, 3, 2]);
    assert_eq!(server.script_calls(), 1);
}

#[tokio::test]
async fn equal_checks_share_one_entry_and_keep_their_own_ids() {
    let server = RedisServer::start();
    let limiter = limiter(&server.url());
    let mut ids = Vec::new();
    for answer in ask(&limiter, ["ada"; 100]) {
        ids.push(answer.await.unwrap().unwrap().id());
    }
    let key = server.keys().remove(0);
    let entries: Vec<(Vec<u8>, i64)> = server.run(&format!("ZREVRANGE {key} 0 -1 WITHSCORES"));
    assert_eq!(entries.len(), 2);
    assert_eq!(entries[0], (b"used".to_vec(), 100));
    assert_eq!(&entries[1].0[8..], b"100*1", "so many of so much each");
    ids.sort_by_key(|id| id.0);
    ids.dedup();
    assert_eq!(ids.len(), 100);
}

/// Five copies at a cost of 3 share an entry. Once it has left the window, the total is that of the
/// later check.
#[tokio::test]
async fn copies_leave_the_window_with_all_of_their_units() {
    let (server, limit) = (RedisServer::start(), Limit::per("short", 100, ms(1_000)));
    let limiter = limiter(&server.url());
    let copies: Vec<_> = (0..5)
        .map(|_| tokio::spawn(limiter.check(&limit, "ada", 3)))
        .collect();
    let mut decisions = Vec::new();
    for copy in copies {
        decisions.push(copy.await.unwrap().unwrap());
    }
    assert!(
        server.run::<Vec<Vec<u8>>>(&format!("ZREVRANGE {} 0 -1", server.only_key()))[1]
            .ends_with(b"5*3")
    );
    for (wait, cost) in [(600, 3), (450, 1), (50, 2)] {
        sleep(ms(wait)).await;
        decisions.push(limiter.check(&limit, "ada", cost).await.unwrap());
        let now = decisions.last().unwrap().at();
        let costs = [3; 5].into_iter().chain([3, 1, 2]);
        let counted = decisions
            .iter()
            .zip(costs)
            .filter(|(decision, _)| decision.at() + limit.window() > now);
        assert_eq!(
            decisions.last().unwrap().binding().used,
            counted.map(|(_, cost)| cost).sum::<u64>()
        );
    }
}

/// A batch holds at most 64 different checks, or 128 copies of one.
#[tokio::test]
async fn batches_are_bounded() {
    let server = RedisServer::start();
    let limiter = limiter(&server.url());
    assert!(limiter.peek(&CALLS, "ada").await.unwrap().is_allowed());
    for (keys, calls) in [(1, 2), (200, 4)] {
        server.run::<()>("CONFIG RESETSTAT");
        let ask =
            |number: usize| tokio::spawn(limiter.check(&CALLS, (number % keys).to_string(), 1));
        used((0..200).map(ask).collect()).await;
        assert_eq!(server.script_calls(), calls, "{keys}");
    }
}

#[tokio::test]
async fn a_batch_that_exhausts_a_limit_admits_its_first_checks() {
    let server = RedisServer::start();
    let limiter = limiter(&server.url());
    let limit = Limit::per_hour("ten", 10);
    let answers: Vec<_> = (0..25)
        .map(|_| tokio::spawn(limiter.check(&limit, "ada", 3)))
        .collect();
    for (number, answer) in answers.into_iter().enumerate() {
        let decision = answer.await.unwrap().unwrap();
        assert_eq!(decision.is_allowed(), number < 3, "{number}");
        assert_eq!(
            decision.binding().used,
            [3, 6, 9].get(number).copied().unwrap_or(9)
        );
    }
}

/// A key of a wrong type fails only its own check in the batch.
#[tokio::test]
async fn an_unreadable_key_fails_no_other_check() {
    let server = RedisServer::start();
    let limiter = limiter(&server.url());
    assert!(limiter.check(&CALLS, "bob", 1).await.unwrap().is_allowed());
    let key = server.keys().remove(0);
    server.run::<()>(&format!("SET {key} text"));
    let outcomes = ask(&limiter, ["ada", "bob", "ada"]);
    let mut allowed = Vec::new();
    for outcome in outcomes {
        allowed.push(
            outcome
                .await
                .unwrap()
                .map(|decision| decision.binding().used)
                .ok(),
        );
    }
    assert_eq!(allowed, [Some(1), None, Some(2)]);
}

/// Most checks of a batch are decided in a quick way. Some that are not stand between them.
#[tokio::test]
async fn checks_in_different_ways_get_their_own_decisions() {
    const TWO: Limit = Limit::per_hour("two", 2);
    let server = RedisServer::start();
    let limiter = limiter(&server.url());
    let check = async |limit: &Limit, key, cost| {
        limiter
            .check(limit, key, cost)
            .await
            .unwrap()
            .binding()
            .used
    };
    assert_eq!(
        (
            check(&TWO, "full", 2).await,
            check(&CALLS, "summed", 5).await
        ),
        (2, 5)
    );
    assert_eq!(check(&CALLS, "unreadable", 1).await, 1);
    let unreadable = server
        .keys()
        .into_iter()
        .find(|key| server.run::<i64>(&format!("ZCARD {key}")) == 1)
        .unwrap();
    server.run::<()>(&format!("SET {unreadable} text"));
    server.run::<()>("CONFIG RESETSTAT");

    let calls = |key, cost| tokio::spawn(limiter.check(&CALLS, key, cost));
    let asked = [
        (calls("summed", 1), Ok(6)),
        (calls("ada", 1), Ok(1)),
        (tokio::spawn(limiter.check(&TWO, "full", 1)), Err(Some(2))),
        (calls("bob", 1), Ok(1)),
        (calls("many", 7), Ok(7)),
        (calls("unreadable", 1), Err(None)),
        (calls("eve", 1), Ok(1)),
        (calls("ada", 1), Ok(2)),
        (calls("summed", 1), Ok(7)),
        (calls("many", 1), Ok(8)),
        (tokio::spawn(limiter.check(&TWO, "joe", 1)), Ok(1)),
    ];
    for (place, (answer, expected)) in asked.into_iter().enumerate() {
        let decision = answer.await.unwrap().map_err(|_| None);
        let outcome = decision.and_then(|decision| {
            if decision.is_allowed() {
                Ok(decision.binding().used)
            } else {
                Err(Some(decision.binding().used))
            }
        });
        assert_eq!(outcome, expected, "{place}");
    }
    assert_eq!(server.script_calls(), 1);
}

/// By the server's clock, single checks of one limit travel in a short form.
#[tokio::test]
async fn single_checks_of_one_limit_get_their_own_decisions() {
    const TWO: Limit = Limit::per_hour("two", 2);
    let server = RedisServer::start();
    let limiter =
        Limiter::new(patient(&server.url()).connections(1).build().unwrap()).deadline(TEST_TIMEOUT);
    let check = |key: &'static str| tokio::spawn(limiter.check(&TWO, key, 1));
    assert_eq!(used(vec![check("unreadable")]).await, [1]);
    server.run::<()>(&format!("SET {} text", server.only_key()));
    assert_eq!(used(vec![check("full"), check("one")]).await, [1, 1]);
    assert_eq!(used(vec![check("full")]).await, [2]);
    for (keys, expected) in [
        (["one", "new", "other"], [Ok(2), Ok(1), Ok(1)]),
        (["full", "new", "other"], [Err(Some(2)), Ok(2), Ok(2)]),
        (["fresh", "unreadable", "last"], [Ok(1), Err(None), Ok(1)]),
        (["fresh", "last", "full"], [Ok(2), Ok(2), Err(Some(2))]),
        (
            ["unreadable", "full", "one"],
            [Err(None), Err(Some(2)), Err(Some(2))],
        ),
    ] {
        // So that the refusal is not known.
        let limiter = limiter.clone().refusal_cache(Duration::ZERO);
        server.run::<()>("CONFIG RESETSTAT");
        let answers = keys.map(|key| tokio::spawn(limiter.check(&TWO, key, 1)));
        for (answer, expected) in answers.into_iter().zip(expected) {
            let outcome = answer
                .await
                .unwrap()
                .map_err(|_| None)
                .and_then(|decision| {
                    if decision.is_allowed() {
                        Ok(decision.binding().used)
                    } else {
                        Err(Some(decision.binding().used))
                    }
                });
            assert_eq!(outcome, expected, "{keys:?}");
        }
        assert_eq!(server.script_calls(), 1, "{keys:?}");
    }
}

/// The first four of them leave alone, and what comes with them in a batch. From then on they are
/// one batch.
#[tokio::test]
async fn checks_that_come_together_again_and_again_are_one_batch() {
    let server = RedisServer::start();
    let limiter =
        Limiter::new(patient(&server.url()).connect().await.unwrap()).deadline(TEST_TIMEOUT);
    let mut calls = Vec::new();
    for _ in 0..4 {
        server.run::<()>("CONFIG RESETSTAT");
        used(ask(&limiter, ["ada", "bob", "cy", "dan", "eve"])).await;
        calls.push(server.script_calls());
    }
    assert_eq!(calls, [5, 1, 1, 1]);
}

/// A caller that asks without a pause sends its checks itself, and does not stay in the queue,
/// which needs a task. The first check of a store is sent by a task.
#[tokio::test]
async fn a_check_after_one_that_was_alone_is_sent_by_its_caller() {
    let server = RedisServer::start();
    let store = patient(&server.url()).build().unwrap();
    let limiter = Limiter::new(store).deadline(TEST_TIMEOUT);
    for _ in 0..3 {
        assert!(limiter.check(&CALLS, "ada", 1).await.unwrap().is_allowed());
    }
    let tasks = || Handle::current().metrics().num_alive_tasks();
    let before = tasks();
    let mut check = Box::pin(limiter.check(&CALLS, "ada", 1));
    assert!(poll_fn(|cx| Poll::Ready(check.as_mut().poll(cx).is_pending())).await);
    assert_eq!(tasks(), before);
    assert_eq!(check.await.unwrap().binding().used, 4);
}

/// Over one connection, the checks of two callers that ask without a pause are two in a script, not
/// one by one in turn.
#[tokio::test]
async fn two_callers_over_one_connection_share_scripts() {
    let server = RedisServer::start();
    let store = patient(&server.url())
        .connections(1)
        .connect()
        .await
        .unwrap();
    let limiter = Limiter::new(store).deadline(TEST_TIMEOUT);
    server.run::<()>("CONFIG RESETSTAT");
    let mut callers = JoinSet::new();
    for key in ["ada", "bob"] {
        let limiter = limiter.clone();
        callers.spawn(async move {
            for _ in 0..500 {
                assert!(limiter.check(&CALLS, key, 1).await.unwrap().is_allowed());
            }
        });
    }
    callers.join_all().await;
    let calls = server.script_calls();
    assert!(calls < 750, "{calls} scripts for 1,000 checks");
}

/// A check that is refused, and one of a larger limit on the same key.
#[tokio::test]
async fn checks_of_one_key_are_decided_in_order() {
    let server = RedisServer::start();
    let limiter = limiter(&server.url());
    let [small, large] = [2, 3].map(|units| Limit::per_hour("calls", units));
    for used in 1..=2 {
        assert_eq!(
            limiter
                .check(&small, "ada", 1)
                .await
                .unwrap()
                .binding()
                .used,
            used
        );
    }
    server.run::<()>("CONFIG RESETSTAT");
    let [bob, refused, admitted] = [(&small, "bob"), (&small, "ada"), (&large, "ada")]
        .map(|(limit, key)| tokio::spawn(limiter.check(limit, key, 1)));
    assert_eq!(used(vec![bob, refused, admitted]).await, [1, 2, 3]);
    assert_eq!(server.script_calls(), 1);
}

/// Four single checks and two batches are in flight while the server hangs. Half of the checks that
/// wait behind them give up.
#[tokio::test]
async fn an_abandoned_check_is_not_sent_and_fails_no_other() {
    let server = RedisServer::start();
    let limiter = limiter_with(2, &server.url());
    used(ask(&limiter, ["ada"])).await;
    server.pause();
    let mut answers = Vec::new();
    for _ in 0..10 {
        answers.extend(ask(&limiter, ["ada"]));
        // Lets the store send all that it can.
        turns(10).await;
    }
    let (gone, waiting): (Vec<_>, Vec<_>) = answers
        .into_iter()
        .enumerate()
        .partition(|(number, _)| number % 2 == 1);
    for (_, answer) in gone {
        answer.abort();
        let _ = answer.await;
    }
    server.resume();
    for (_, answer) in waiting {
        assert!(answer.await.unwrap().unwrap().is_allowed());
    }
    // One check before, six in flight (three of them abandoned), and two of the four that were
    // queued.
    assert_eq!(
        limiter.peek(&CALLS, "ada").await.unwrap().binding().used,
        1 + 6 + 2
    );
}

/// The same while the first connection is opened. Equal checks, of which half wait on.
#[tokio::test]
async fn a_check_abandoned_before_there_is_a_connection_is_not_sent() {
    let server = RedisServer::start();
    for waiting in [0, 5] {
        let proxy = Proxy::start(&server).await;
        proxy.delay_replies(ms(200));
        let limiter = limiter(proxy.url()).breaker(Breaker::OFF);
        let answers = ask(&limiter, iter::repeat_n("ada", waiting));
        for abandoned in ask(&limiter.clone().deadline(ms(50)), ["ada"; 5]) {
            assert!(
                matches!(abandoned.await.unwrap(), Err(Error::TimedOut { .. })),
                "the connection is open"
            );
        }
        proxy.delay_replies(Duration::ZERO);
        assert_eq!(used(answers).await, Vec::from_iter(1..=waiting as u64));
        assert_eq!(
            limiter.peek(&CALLS, "ada").await.unwrap().binding().used,
            waiting as u64
        );
    }
}

/// The callers of a few checks send those themselves. If they never poll them again, others still
/// proceed.
#[tokio::test]
async fn an_unpolled_check_blocks_no_other() {
    let server = RedisServer::start();
    let limiter = limiter_with(2, &server.url());
    used(ask(&limiter, ["ada"])).await;
    let mut unpolled: Vec<_> = (0..5)
        .map(|_| Box::pin(limiter.check(&CALLS, "ada", 1)))
        .collect();
    for check in &mut unpolled {
        assert!(poll_fn(|cx| Poll::Ready(check.as_mut().poll(cx).is_pending())).await);
    }
    for round in 0..20 {
        used(ask(&limiter, ["bob", "eve", "bob"])).await;
        assert_eq!(
            limiter.peek(&CALLS, "bob").await.unwrap().binding().used,
            2 * (round + 1)
        );
    }
    for check in unpolled {
        assert!(check.await.unwrap().is_allowed());
    }
}

/// A check that was sent alone and dropped before its reply does not block the connection.
#[tokio::test]
async fn a_check_dropped_in_flight_blocks_no_other() {
    let server = RedisServer::start();
    let limiter = limiter_with(2, &server.url());
    for round in 0..20 {
        let mut dropped = Box::pin(limiter.check(&CALLS, "ada", 1));
        assert!(poll_fn(|cx| Poll::Ready(dropped.as_mut().poll(cx).is_pending())).await);
        drop(dropped);
        assert_eq!(used(ask(&limiter, ["bob"])).await, [round + 1]);
    }
}

/// Many more checks at once than are in flight, with a key each. All of them can be decided in
/// time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_burst_waits_within_its_deadline() {
    let server = RedisServer::start();
    // On a busy machine a check takes a hundred times as long as usual.
    let limiter = limiter_with(4, &server.url()).deadline(20 * TEST_TIMEOUT);
    for tasks in [10_000, 30_000] {
        let burst: Vec<_> = (0..tasks)
            .map(|key: u64| tokio::spawn(limiter.check(&CALLS, key, 1)))
            .collect();
        for answer in burst {
            assert!(answer.await.unwrap().unwrap().is_allowed());
        }
    }
}

/// The server hangs, so nothing tells how long the wait is. The number of those that wait is
/// bounded nevertheless.
#[tokio::test]
async fn a_full_queue_is_an_error() {
    let server = RedisServer::start();
    let limiter = limiter(&server.url());
    used(ask(&limiter, ["ada"])).await;
    server.pause();
    let answers = ask(&limiter, iter::repeat_n("ada", 70_000));
    while !answers[69_999].is_finished() {
        yield_now().await;
    }
    server.resume();
    let mut refused = 0;
    for answer in answers {
        match answer.await.unwrap() {
            Ok(decision) => assert!(decision.is_allowed()),
            Err(Error::Unavailable(error)) => {
                assert!(
                    format!("{error:?}").contains("are waiting for Redis"),
                    "{error:?}"
                );
                refused += 1;
            }
            Err(error) => panic!("{error}"),
        }
    }
    assert!((4_000..=5_000).contains(&refused), "{refused}");
}

/// Abandoned checks free their places anywhere in the queue, and no waiting check loses its place.
/// Three crowds of callers give up behind, between and before others that wait.
#[tokio::test]
async fn a_caller_that_gives_up_frees_its_place_in_the_queue() {
    let server = RedisServer::start();
    let limiter = limiter(&server.url()).breaker(Breaker::OFF);
    used(ask(&limiter, ["ada"])).await;
    server.pause();
    let mut waiting = Vec::new();
    for _ in 0..3 {
        waiting.extend(ask(&limiter, ["ada"; 1_000]));
        let gone = ask(&limiter, iter::repeat_n("bob", 30_000));
        turns(10).await;
        for answer in gone {
            answer.abort();
            let _ = answer.await;
        }
    }
    waiting.extend(ask(&limiter, ["ada"; 1_000]));
    turns(10).await;
    server.resume();
    assert_eq!(used(waiting).await, (2..=4_001).collect::<Vec<_>>());
    assert_eq!(limiter.peek(&CALLS, "bob").await.unwrap().binding().used, 0);
}

#[tokio::test]
async fn no_task_outlives_the_store() {
    let server = RedisServer::start();
    let before = Handle::current().metrics().num_alive_tasks();
    let limiter = limiter(&server.url());
    used(ask(&limiter, ["ada", "bob"])).await;
    limiter.reset(&CALLS, "ada").await.unwrap();
    assert!(
        Handle::current().metrics().num_alive_tasks() > before,
        "connections have tasks"
    );
    drop(limiter);
    let dropped = Instant::now();
    while Handle::current().metrics().num_alive_tasks() > before {
        assert!(dropped.elapsed() < TEST_TIMEOUT);
        sleep(Duration::from_millis(5)).await;
    }
}

/// The server has counted the check, and its reply is lost. The second try carries the same id, so
/// the check counts once.
#[tokio::test]
async fn a_check_whose_reply_is_lost_counts_once() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server).await;
    // Single checks, and checks that share a batch with copies and other keys.
    let alone = (limiter_with(2, proxy.url()), &["ada"][..]);
    let together = (limiter(proxy.url()), &["ada", "ada", "bob", "ada"][..]);
    for (limiter, _) in [&alone, &together] {
        used(ask(limiter, ["eve"])).await;
    }
    let mut expected = 0;
    for round in 0..100 {
        proxy.lose_replies(1);
        let (limiter, keys) = if round % 2 == 0 { &alone } else { &together };
        let last = used(ask(limiter, keys.iter().copied())).await.pop();
        assert!(proxy.has_lost_them());
        expected += keys.iter().filter(|key| **key == "ada").count() as u64;
        assert_eq!(last, Some(expected), "round {round}");
    }
}

/// One of two equal checks fits, and the reply is lost. By the second try both would fit. The
/// refused one must stay refused, or it would count under the id of the other, which means not at
/// all.
#[tokio::test]
async fn a_refusal_in_a_lost_reply_stays_a_refusal() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server).await;
    let limiter =
        Limiter::new(patient(proxy.url()).connections(1).build().unwrap()).deadline(TEST_TIMEOUT);
    let limit = Limit::per("calls", 2, Duration::from_secs(1));
    let ask = |key: &'static str| limiter.check(&limit, key, 1);
    // If the machine stalls for too long, the round proves nothing.
    for key in ["a", "b", "c", "d", "e", "f", "g", "h"] {
        assert!(ask(key).await.unwrap().is_allowed());
        sleep(Duration::from_millis(700)).await;
        proxy.delay_replies(Duration::from_millis(400));
        proxy.lose_replies(1);
        let sent = Instant::now();
        let answers = [ask(key), ask(key)].map(tokio::spawn);
        while !proxy.has_lost_them() {
            sleep(Duration::from_millis(5)).await;
        }
        proxy.delay_replies(Duration::ZERO);
        let mut admitted = 0;
        for answer in answers {
            admitted += u64::from(answer.await.unwrap().unwrap().is_allowed());
        }
        let used = limiter.peek(&limit, key).await.unwrap().binding().used;
        if sent.elapsed() < Duration::from_millis(900) {
            assert_eq!(admitted, used);
            return;
        }
    }
    panic!("no round was quick enough");
}

/// So none is idle for long: it would be found half open only by a burst.
#[tokio::test]
async fn batches_take_turns_with_the_connections() {
    let server = RedisServer::start();
    let limiter = Limiter::new(
        patient(&server.url())
            .connections(3)
            .connect()
            .await
            .unwrap(),
    )
    .deadline(TEST_TIMEOUT);
    for _ in 0..6 {
        used(ask(&limiter, ["ada"; 12])).await;
    }
    let clients = server.run::<String>("CLIENT LIST");
    assert_eq!(clients.matches("cmd=evalsha").count(), 3, "{clients}");
}
