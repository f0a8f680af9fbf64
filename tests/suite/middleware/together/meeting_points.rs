//! Where two parts meet: known refusals beside the settlements of others and blocks by hand, equal
//! checks beside callers that do not poll, and the calls of each option.

use std::{
    future::Future,
    ops::Range,
    task::{Context, Waker},
};

use futures_util::future::join_all;
use tokio::time::sleep;
use tower_sliding_window::{Limit, Limiter, RateLimitLayer, limiter::Breaker};

use super::{BAN, LOGIN, ask, by_user, login, start, user};
use crate::support::{TEST_TIMEOUT, ms, redis_server::RedisServer, seconds, two_threads};

const PLACES: Limit = Limit::concurrent("places", 4);

async fn ask_as(layer: &RateLimitLayer, users: Range<u32>) {
    for first in users.clone().step_by(200) {
        let names: Vec<_> = (first..users.end.min(first + 200))
            .map(|user| format!("user-{user}"))
            .collect();
        join_all(names.iter().map(|name| ask(layer, name))).await;
    }
}

/// Bans twenty users, and returns their names.
async fn ban_twenty(limiter: &Limiter, layer: &RateLimitLayer) -> Vec<String> {
    let banned: Vec<_> = (0..20).map(|number| format!("banned-{number}")).collect();
    for name in &banned {
        limiter.block(&BAN, user(name), seconds(900)).await.unwrap();
        assert_eq!(ask(layer, name).await, 403);
    }
    banned
}

/// As many clients log in as in a minute of a busy application.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_known_ban_stands_however_many_others_have_settled() {
    let mut stood = Vec::new();
    for others in [0, 2_000, 20_000, 40_000] {
        let (mut server, _clock, store) = start();
        let limiter = Limiter::new(store).deadline(TEST_TIMEOUT);
        let layer = login(limiter.clone());
        let banned = ban_twenty(&limiter, &layer).await;
        ask_as(&layer, 0..others).await;
        server.kill();
        let layer = layer.fail_open();
        let refused = join_all(banned.iter().map(|name| ask(&layer, name))).await;
        stood.push((
            others,
            refused.iter().filter(|status| **status == 403).count(),
        ));
    }
    println!("others that settled, and bans of 20 that stand: {stood:?}");
    assert!(stood.iter().all(|(_, bans)| *bans == 20), "{stood:?}");
}

/// Each of ten thousand addresses of an attacker is refused once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_known_ban_stands_however_many_others_are_refused() {
    let (mut server, _clock, store) = start();
    let limiter = Limiter::new(store).deadline(TEST_TIMEOUT);
    let layer = login(limiter.clone());
    let banned = ban_twenty(&limiter, &layer).await;
    for name in &banned {
        assert_eq!([ask(&layer, name).await, ask(&layer, name).await], [403; 2]);
    }
    let once = RateLimitLayer::new(limiter).limit(Limit::per_hour("once", 1).by(by_user()));
    ask_as(&once, 0..12_000).await;
    ask_as(&once, 0..12_000).await;
    server.kill();
    let layer = layer.fail_open();
    let refused = join_all(banned.iter().map(|name| ask(&layer, name))).await;
    assert_eq!(refused, [403; 20]);
}

/// The futures are kept and not polled any more. Their checks have been answered an hour ago.
#[tokio::test]
async fn callers_that_are_not_polled_refuse_no_other() {
    let (server, clock, store) = start();
    let limiter = Limiter::new(store).deadline(TEST_TIMEOUT);
    let many = Limit::per_day("many", 1_000_000);
    drop(limiter.check(&many, "first", 1).await.unwrap());
    server.pause();
    let flood = |part: u32| {
        let limiter = limiter.clone();
        (0..600).map(move |user| {
            tokio::spawn(limiter.check(
                &Limit::per_day("many", 1_000_000),
                format!("{part}-{user}"),
                1,
            ))
        })
    };
    let first: Vec<_> = flood(0).collect();
    sleep(ms(50)).await;
    let mut kept: Vec<_> = (0..5)
        .map(|_| Box::pin(limiter.check(&LOGIN, "ada", 1)))
        .collect();
    for future in &mut kept {
        assert!(
            future
                .as_mut()
                .poll(&mut Context::from_waker(Waker::noop()))
                .is_pending()
        );
    }
    server.resume();
    join_all(first).await;
    while limiter.peek(&LOGIN, "ada").await.unwrap().binding().used < 5 {
        sleep(ms(5)).await;
    }
    clock.advance(seconds(3_600));
    assert_eq!(limiter.peek(&LOGIN, "ada").await.unwrap().binding().used, 0);
    server.pause();
    let second: Vec<_> = flood(1).collect();
    sleep(ms(50)).await;
    let honest = tokio::spawn(limiter.check(&LOGIN, "ada", 1));
    sleep(ms(50)).await;
    let was_decided_without_redis = honest.is_finished();
    server.resume();
    let decision = honest.await.unwrap().unwrap();
    join_all(second).await;
    drop(kept);
    assert!(
        decision.is_allowed(),
        "refused without Redis: {was_decided_without_redis}: {decision:?}"
    );
}

/// The deadlines of the first checks have passed: none of them is sent any more.
#[tokio::test]
async fn checks_of_places_that_have_timed_out_refuse_no_other() {
    let (server, _clock, store) = start();
    let limiter = Limiter::new(store.clone()).deadline(TEST_TIMEOUT);
    drop(limiter.check(&LOGIN, "first", 1).await.unwrap());
    let hasty = Limiter::new(store).deadline(ms(60)).breaker(Breaker::OFF);
    let layer = RateLimitLayer::new(hasty)
        .limit(PLACES.by(by_user()))
        .fail_open();
    server.pause();
    let many = Limit::per_day("many", 1_000_000);
    let flood: Vec<_> = (0..600)
        .map(|user| tokio::spawn(limiter.check(&many, format!("{user}"), 1)))
        .collect();
    sleep(ms(50)).await;
    let mut statuses = Vec::new();
    for _ in 0..8 {
        statuses.push(ask(&layer, "bob").await);
    }
    server.resume();
    join_all(flood).await;
    assert_eq!(
        statuses, [200; 8],
        "one after the other, under fail-open, with a limit of 4 at once"
    );
}

/// Ten thousand streams of other clients end while Redis does not answer. The banned clients ask
/// all the time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_known_ban_stands_while_the_streams_of_others_end() {
    let (server, _clock, store) = start();
    let limiter = Limiter::new(store).deadline(TEST_TIMEOUT);
    let layer = login(limiter.clone());
    let mut streams = Vec::new();
    for first in (0..10_000).step_by(200) {
        let open =
            (first..first + 200).map(|user| limiter.check(&PLACES, format!("user-{user}"), 1));
        streams.extend(join_all(open).await);
    }
    let banned = ban_twenty(&limiter, &layer).await;
    server.pause();
    let hasty = layer.deadline(ms(50)).fail_open();
    assert_eq!(
        join_all(banned.iter().map(|name| ask(&hasty, name))).await,
        [403; 20]
    );
    drop(streams);
    sleep(ms(300)).await;
    let statuses = join_all(banned.iter().map(|name| ask(&hasty, name))).await;
    server.resume();
    let stand = statuses.iter().filter(|status| **status == 403).count();
    assert_eq!(stand, 20, "of 20: {statuses:?}");
}

/// An operator prolongs a ban while Redis does not answer.
#[tokio::test]
async fn a_known_ban_stands_if_it_cannot_be_prolonged() {
    let (mut server, _clock, store) = start();
    let limiter = Limiter::new(store).deadline(TEST_TIMEOUT);
    let layer = login(limiter.clone()).fail_open();
    limiter
        .block(&BAN, user("bob"), seconds(900))
        .await
        .unwrap();
    assert_eq!(ask(&layer, "bob").await, 403);
    server.kill();
    assert_eq!(ask(&layer, "bob").await, 403);
    assert!(
        limiter
            .block(&BAN, user("bob"), seconds(3_600))
            .await
            .is_err()
    );
    assert_eq!(ask(&layer, "bob").await, 403);
}

/// Requests that have begun before the limiter ends, and whose replies come meanwhile.
#[tokio::test]
async fn places_of_checks_on_their_way_are_free_when_the_limiter_has_ended() {
    let (server, _clock, store) = start();
    let limiter = Limiter::new(store).deadline(TEST_TIMEOUT);
    drop(limiter.check(&PLACES, "ada", 1).await.unwrap());
    server.pause();
    let asking: Vec<_> = (0..4)
        .map(|_| tokio::spawn(limiter.check(&PLACES, "ada", 1)))
        .collect();
    sleep(ms(50)).await;
    let ending = tokio::spawn({
        let limiter = limiter.clone();
        async move { limiter.shutdown(TEST_TIMEOUT).await }
    });
    sleep(ms(50)).await;
    server.resume();
    ending.await.unwrap().unwrap();
    sleep(ms(100)).await;
    let decisions = join_all(asking).await;
    let used = limiter.peek(&PLACES, "ada").await.unwrap().binding().used;
    drop(decisions);
    assert_eq!(used, 0);
}

/// The caller has left with its runtime. The process goes on.
#[test]
fn a_place_is_given_back_if_the_runtime_ends_before_the_reply() {
    let (server, _clock, store) = start();
    let limiter = Limiter::new(store).deadline(TEST_TIMEOUT);
    let (one, other) = (two_threads(), two_threads());
    other.block_on(async { drop(limiter.check(&PLACES, "bob", 1).await.unwrap()) });
    one.block_on(async { drop(limiter.check(&PLACES, "ada", 1).await.unwrap()) });
    server.pause();
    for _ in 0..4 {
        one.spawn(limiter.check(&PLACES, "ada", 1));
    }
    std::thread::sleep(ms(100));
    drop(one);
    server.resume();
    let used = other.block_on(async {
        sleep(ms(1_000)).await;
        limiter.peek(&PLACES, "ada").await.unwrap().binding().used
    });
    assert_eq!(used, 0, "a second later");
}

/// The key is shared. Its ban is lifted by another process. One client asks, and hangs up at once.
#[tokio::test]
async fn a_client_that_hangs_up_keeps_no_lifted_refusal_in_force() {
    let (server, clock, store) = start();
    let shared = Limit::per_day("shared", 1);
    let limiter = Limiter::new(store).deadline(TEST_TIMEOUT);
    for _ in 0..2 {
        drop(limiter.check(&shared, "all", 1).await.unwrap());
    }
    let other = Limiter::new(server.store().clock(&clock).build().unwrap()).deadline(TEST_TIMEOUT);
    other.reset(&shared, "all").await.unwrap();
    clock.advance(seconds(1));
    let (mut tries, mut refused) = (0, true);
    while refused && tries < 300 {
        clock.advance(ms(110));
        let mut hanging_up = Box::pin(limiter.check(&shared, "all", 1));
        let is_pending = hanging_up
            .as_mut()
            .poll(&mut Context::from_waker(Waker::noop()))
            .is_pending();
        // As long as Redis takes for the reply.
        sleep(ms(2)).await;
        drop(hanging_up);
        // Also units that it has taken are given back.
        if is_pending {
            other.reset(&shared, "all").await.unwrap();
        }
        refused = !limiter.check(&shared, "all", 1).await.unwrap().is_allowed();
        tries += 1;
    }
    assert!(
        !refused,
        "refused for {:?} after the reset",
        ms(110 * tries) + seconds(1)
    );
}

/// How often requests ask Redis, with each option.
#[tokio::test]
async fn options_cost_no_calls_that_they_do_not_need() {
    let server = RedisServer::start();
    let calls = Limit::per_hour("calls", 1_000);
    let limit = || calls.clone().by(by_user());
    let store = server.store().build().unwrap();
    let limiter = Limiter::new(store).deadline(TEST_TIMEOUT);
    let layer = || RateLimitLayer::new(limiter.clone());
    let layers = [
        ("plain", layer().limit(limit()), 1),
        ("hidden", layer().limit(limit().hidden()), 1),
        ("shadow", layer().limit(limit().in_shadow()), 1),
        ("ban", layer().limit(limit().ban(BAN, seconds(9))), 1),
        ("wait", layer().limit(limit()).wait_up_to(seconds(1)), 1),
        ("open", layer().limit(limit()).fail_open(), 1),
        (
            "breaker",
            RateLimitLayer::new(limiter.clone().breaker(Breaker::default())).limit(limit()),
            1,
        ),
        (
            "no cache",
            RateLimitLayer::new(limiter.clone().refusal_cache(ms(0))).limit(limit()),
            1,
        ),
        (
            "place",
            layer().limit(limit()).limit(PLACES.by(by_user())),
            2,
        ),
        (
            "head",
            layer()
                .limit(limit())
                .limit(PLACES.by(by_user()))
                .free_with_head(),
            2,
        ),
        ("settles", layer().limit(limit().settle(|_| 1)), 2),
        (
            "afterwards, none",
            layer().limit(limit().count_afterwards(|_| 0)),
            1,
        ),
        ("heeds upstream", layer().limit(limit().heed_upstream()), 2),
    ];
    let mut found = Vec::new();
    for (name, layer, most) in layers {
        ask(&layer, "warm").await;
        sleep(ms(30)).await;
        // A release is a command of its own; in a script, the same command is part of a call.
        let calls = || {
            server.script_calls()
                + if most == 2 && name.len() < 6 {
                    server.calls("zrem")
                } else {
                    0
                }
        };
        let before = calls();
        for user in 0..20 {
            assert_eq!(ask(&layer, &format!("{name}-{user}")).await, 200);
        }
        sleep(ms(50)).await;
        found.push((name, calls() - before, 20 * most));
    }
    println!("{found:?}");
    assert!(
        found.iter().all(|(_, calls, most)| calls <= most),
        "{found:?}"
    );
}
