//! What happens to units that are not spent.

use super::*;
use crate::support::one_thread;

#[tokio::test]
async fn unspent_units_are_given_back_after_the_life_of_a_prefetch() {
    let server = RedisServer::start();
    let (limiter, other) = (limiter(&server), limiter(&server));
    let life = Duration::from_secs(1);
    let limit = API.prefetch(life);
    let requests = hold(&server, &limiter, &limit, "ada").await;
    let held = check(&other, &limit, "ada", 0).await;
    assert!(
        held.binding().used > requests && held.binding().reserved > 0,
        "{held:?}"
    );
    sleep(2 * life).await;
    let decision = check(&other, &limit, "ada", 0).await;
    assert_eq!(
        (decision.binding().used, decision.binding().reserved),
        (requests, 0)
    );
}

#[tokio::test]
async fn all_units_are_given_back_at_once_if_asked() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let limiter = limiter_by(&server, &clock);
    let requests = hold(&server, &limiter, &API, "ada").await;
    limiter.shutdown(TEST_TIMEOUT).await.unwrap();
    assert_eq!(used(&server, &clock, &API, "ada").await, (requests, 0));
    limiter.shutdown(TEST_TIMEOUT).await.unwrap();
}

#[tokio::test]
async fn spent_units_leave_within_a_window_and_a_life() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let limiter = limiter_by(&server, &clock);
    hold(&server, &limiter, &API, "ada").await;
    limiter.shutdown(TEST_TIMEOUT).await.unwrap();
    clock.advance(API.window() + LIFE);
    assert_eq!(used(&server, &clock, &API, "ada").await, (0, 0));
}

#[tokio::test]
async fn nothing_stays_in_redis() {
    let server = RedisServer::start();
    let limit = Limit::per_second("api", 1_000_000).prefetch(DEFAULT_LIFE);
    let limiter = limiter(&server);
    hold(&server, &limiter, &limit, "ada").await;
    // A log lives for two windows and a second after its oldest entry, which may be the end of a
    // prefetch.
    sleep(2 * limit.window() + LIFE + Duration::from_secs(1) + Duration::from_millis(200)).await;
    assert_eq!(server.run::<u64>("DBSIZE"), 0);
}

#[tokio::test]
async fn a_reset_drops_the_prefetches_of_its_key() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let limiter = limiter_by(&server, &clock);
    hold(&server, &limiter, &API, "ada").await;
    hold(&server, &limiter, &API, "bob").await;
    limiter.reset(&API, "ada").await.unwrap();
    assert!(!is_in_process(&server, &limiter, &API, "ada").await);
    assert!(is_in_process(&server, &limiter, &API, "bob").await);
    let (all, held) = used(&server, &clock, &API, "ada").await;
    assert_eq!(all - held, 1, "nothing but what was spent and taken since");
}

#[tokio::test]
async fn a_block_drops_the_prefetches_of_its_key() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let limiter = limiter_by(&server, &clock);
    hold(&server, &limiter, &API, "ada").await;
    limiter.block(&API, "ada", API.window()).await.unwrap();
    assert!(!check(&limiter, &API, "ada", 1).await.is_allowed());
}

/// As if the process was killed: nothing gives back what it holds.
#[test]
fn the_units_of_a_runtime_that_has_ended_count_for_a_window_and_a_life() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let limiter = limiter_by(&server, &clock);
    let requests = one_thread().block_on(hold(&server, &limiter, &API, "ada"));
    one_thread().block_on(async {
        assert!(
            is_in_process(&server, &limiter, &API, "ada").await,
            "another runtime spends the rest"
        );
        let (all, held) = used(&server, &clock, &API, "ada").await;
        assert!(held >= 16 && all > requests);
        clock.advance(API.window() + LIFE - Duration::from_micros(1));
        assert_eq!(
            used(&server, &clock, &API, "ada").await,
            (held, held),
            "single units have left"
        );
        clock.advance(Duration::from_micros(1));
        assert_eq!(used(&server, &clock, &API, "ada").await, (0, 0));
    });
}

/// A second runtime that begins to hold the key gives back what the first has left.
#[test]
fn what_a_runtime_has_left_is_given_back_by_another() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let limiter = limiter_by(&server, &clock);
    let requests = one_thread().block_on(hold(&server, &limiter, &API, "ada"));
    one_thread().block_on(async {
        clock.advance(LIFE);
        let more = hold(&server, &limiter, &API, "ada").await;
        limiter.shutdown(TEST_TIMEOUT).await.unwrap();
        assert_eq!(
            used(&server, &clock, &API, "ada").await,
            (requests + more, 0)
        );
    });
}

/// Redis counts the prefetch, and the runtime that has asked for it never reads the reply.
#[test]
fn a_prefetch_that_an_ended_runtime_has_asked_for_is_given_back_by_another() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let limiter = limiter_by(&server, &clock);
    one_thread().block_on(async {
        for _ in 0..16 {
            assert!(check(&limiter, &API, "ada", 1).await.is_allowed());
        }
        server.pause();
        sleep(Duration::from_millis(20)).await;
    });
    server.resume();
    one_thread().block_on(async {
        let begun = Instant::now();
        while used(&server, &clock, &API, "ada").await.1 == 0 {
            assert!(
                begun.elapsed() < TEST_TIMEOUT,
                "the prefetch was never counted"
            );
            sleep(Duration::from_millis(5)).await;
        }
        limiter.shutdown(TEST_TIMEOUT).await.unwrap();
        assert_eq!(used(&server, &clock, &API, "ada").await, (16, 0));
    });
}
