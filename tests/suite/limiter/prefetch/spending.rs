//! Which checks are decided in the process, and with which figures.

use tower_sliding_window::{
    Algorithm, Charge, Check, MemoryStore, check::AdmissionId, settlement::Settlement,
};

use super::*;
use crate::support::MICROSECOND;

#[tokio::test]
async fn a_hot_key_hardly_asks_redis() {
    let server = RedisServer::start();
    let limiter = limiter(&server);
    hold(&server, &limiter, &API, "ada").await;
    let before = server.script_calls();
    for _ in 0..20_000 {
        assert!(check(&limiter, &API, "ada", 1).await.is_allowed());
        tokio::task::yield_now().await;
    }
    let calls = server.script_calls() - before;
    assert!(calls <= 100, "{calls} scripts for 20,000 requests");
}

#[tokio::test]
async fn a_prefetch_is_spent_until_the_end_of_its_life() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let limiter = limiter_by(&server, &clock);
    hold(&server, &limiter, &API, "ada").await;
    clock.advance(LIFE - MICROSECOND);
    assert!(is_in_process(&server, &limiter, &API, "ada").await);
    clock.advance(MICROSECOND);
    assert!(!is_in_process(&server, &limiter, &API, "ada").await);
}

#[tokio::test]
async fn a_rare_key_always_asks_redis() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let limiter = limiter_by(&server, &clock);
    for _ in 0..50 {
        assert!(!is_in_process(&server, &limiter, &API, "ada").await);
        clock.advance(LIFE / 4);
    }
    assert_eq!(used(&server, &clock, &API, "ada").await, (50, 0));
}

#[tokio::test]
async fn figures_count_what_this_process_has_spent() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let (limiter, other) = (limiter_by(&server, &clock), limiter_by(&server, &clock));
    // So that the first prefetch is as large as the rate allows.
    assert_eq!(
        check(&other, &API, "ada", 1_000).await.binding().used,
        1_000
    );
    let used_before = 1_000 + hold(&server, &limiter, &API, "ada").await;
    // Redis counts the whole prefetch. The limiter knows which part of it is its own.
    let peek = async || limiter.peek(&API, "ada").await.unwrap();
    assert_eq!(
        (peek().await.binding().used, peek().await.binding().reserved),
        (used_before, 0)
    );
    for more in 1..=5 {
        let decision = check(&limiter, &API, "ada", 1).await;
        let status = decision.binding();
        assert_eq!((status.used, status.reserved), (used_before + more, 0));
        assert_eq!(decision.remaining(), API.units() - used_before - more);
        assert!(
            decision.binding().reset_after() <= API.window() + LIFE,
            "{decision:?}"
        );
    }
    assert_eq!(
        (peek().await.binding().used, peek().await.binding().reserved),
        (used_before + 5, 0)
    );
    assert!(used(&server, &clock, &API, "ada").await.1 >= 64);
}

#[tokio::test]
async fn the_time_of_a_decision_is_that_of_the_store() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let limiter = limiter_by(&server, &clock);
    hold(&server, &limiter, &API, "ada").await;
    clock.advance(LIFE / 2);
    let (before, decision) = (server.script_calls(), check(&limiter, &API, "ada", 1).await);
    assert_eq!(
        (server.script_calls(), decision.at()),
        (before, clock.now())
    );
}

#[tokio::test]
async fn a_check_of_several_limits_is_decided_in_the_process_if_all_of_them_are_held() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let limiter = limiter_by(&server, &clock);
    let hourly = Limit::per_hour("hourly", 1_000_000).prefetch(DEFAULT_LIFE);
    let charge = |limit: &Limit, cost| Charge::new(limit.clone(), "ada", cost).unwrap();
    let both = |cost| {
        Check::new(charge(&API, 1))
            .and(charge(&hourly, cost))
            .unwrap()
    };
    hold(&server, &limiter, &API, "ada").await;
    let scripts = server.script_calls();
    assert!(limiter.check_all(both(1)).await.unwrap().is_allowed());
    assert!(server.script_calls() > scripts, "one of them is not held");

    hold(&server, &limiter, &hourly, "ada").await;
    let (api, scripts) = (
        limiter.peek(&API, "ada").await.unwrap().binding().used,
        server.script_calls(),
    );
    let decision = limiter.check_all(both(2)).await.unwrap();
    assert!(decision.is_allowed() && decision.statuses().next().unwrap().used == api + 1);
    assert_eq!(server.script_calls(), scripts);

    // More of one limit than is held: nothing of the other is spent in the process.
    let decision = limiter.check_all(both(500_000)).await.unwrap();
    assert!(decision.is_allowed() && decision.statuses().next().unwrap().used == api + 2);
    assert!(server.script_calls() > scripts);
}

#[tokio::test]
async fn checks_that_the_store_has_to_know_always_ask_it() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let limiter = limiter_by(&server, &clock);
    hold(&server, &limiter, &API, "ada").await;
    let charge = || Charge::new(API, "ada", 1).unwrap();
    let plain = Limit::per_hour("plain", 1_000_000);
    for check in [
        Check::new(charge()).with_id(AdmissionId::fresh()),
        Check::new(charge().reserve(LIFE)),
        Check::new(Charge::any_left(API, "ada").unwrap()),
        Check::new(Charge::spent(API, "ada", 1)),
        Check::new(Charge::new(API, "ada", 0).unwrap()),
        Check::new(charge())
            .and(Charge::new(plain, "ada", 1).unwrap())
            .unwrap(),
    ] {
        let scripts = server.script_calls();
        assert!(limiter.check_all(check.clone()).await.unwrap().is_allowed());
        assert!(server.script_calls() > scripts, "{check:?}");
    }
    assert!(
        is_in_process(&server, &limiter, &API, "ada").await,
        "the prefetch is there all the time"
    );
}

#[tokio::test]
async fn limits_in_the_shadow_and_hidden_ones_are_decided_in_the_process() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let limiter = limiter_by(&server, &clock);
    hold(&server, &limiter, &API, "ada").await;
    let charge = || Charge::new(API, "ada", 1).unwrap();
    for (charge, is_shadow, is_hidden) in [
        (charge().in_shadow(), true, false),
        (charge().hidden(), false, true),
    ] {
        let scripts = server.script_calls();
        let decision = limiter.check_all(Check::new(charge.clone())).await.unwrap();
        let status = decision.binding();
        assert_eq!(
            (status.is_shadow, status.is_hidden()),
            (is_shadow, is_hidden)
        );
        assert!(decision.is_allowed() && server.script_calls() == scripts);
    }
}

#[tokio::test]
async fn an_admission_in_the_process_cannot_be_settled() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let limiter = limiter_by(&server, &clock);
    hold(&server, &limiter, &API, "ada").await;
    let one = Check::new(Charge::new(API, "ada", 1).unwrap());
    let decision = limiter.check_all(one.clone()).await.unwrap();
    assert!(
        !limiter
            .settle(Settlement::new(one, &decision, |_| Some(0)))
            .await
            .unwrap()
            .was_applied
    );
}

#[tokio::test]
async fn a_limit_that_has_changed_does_not_spend_earlier_prefetches() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let limiter = limiter_by(&server, &clock);
    let requests = hold(&server, &limiter, &API, "ada").await;
    let lowered = Limit::per_minute("api", requests + 3).prefetch(DEFAULT_LIFE);
    let scripts = server.script_calls();
    // Redis counts what is held as well, so it refuses until that is given back.
    let decision = check(&limiter, &lowered, "ada", 4).await;
    assert_eq!(
        (
            is_refused_by_reservations(&decision),
            decision.retry_after()
        ),
        (true, Some(LIFE))
    );
    assert!(server.script_calls() > scripts);
    assert!(is_in_process(&server, &limiter, &API, "ada").await);
}

#[tokio::test]
async fn a_compact_log_is_held_and_given_back() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let limiter = limiter_by(&server, &clock);
    let limit = Limit::per_minute("rough", 1_000_000)
        .with_algorithm(Algorithm::compact_log(16))
        .prefetch(DEFAULT_LIFE);
    let requests = hold(&server, &limiter, &limit, "ada").await;
    assert!(used(&server, &clock, &limit, "ada").await.1 >= 8);
    limiter.shutdown(TEST_TIMEOUT).await.unwrap();
    assert_eq!(used(&server, &clock, &limit, "ada").await, (requests, 0));
}

#[tokio::test]
async fn prefetches_have_no_effect_in_process() {
    let clock = ManualClock::new();
    let limiter = Limiter::new(MemoryStore::new().clock(&clock));
    for used in 1..=100 {
        assert_eq!(
            limiter.check(&API, "ada", 1).await.unwrap().binding().used,
            used
        );
    }
    limiter.shutdown(TEST_TIMEOUT).await.unwrap();
    clock.advance(API.window());
    assert_eq!(limiter.peek(&API, "ada").await.unwrap().binding().used, 0);
}

#[tokio::test]
async fn a_cost_above_the_prefetch_asks_redis_and_leaves_the_prefetch() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let limiter = limiter_by(&server, &clock);
    let requests = hold(&server, &limiter, &API, "ada").await;
    let scripts = server.script_calls();
    assert_eq!(
        check(&limiter, &API, "ada", 1_000).await.binding().used,
        requests + 1_000
    );
    assert!(server.script_calls() > scripts);
    assert!(is_in_process(&server, &limiter, &API, "ada").await);
}

/// What another process holds stays spendable until its life has ended.
#[tokio::test]
async fn a_reset_reaches_prefetches_of_others_after_a_life() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let (holder, other) = (limiter_by(&server, &clock), limiter_by(&server, &clock));
    let requests = hold(&server, &holder, &API, "ada").await;
    other.reset(&API, "ada").await.unwrap();
    assert!(
        check(&holder, &API, "ada", 0).await.binding().used < requests,
        "a check at no cost asks Redis"
    );
    clock.advance(LIFE);
    let after = check(&holder, &API, "ada", 1).await;
    assert!(
        after.is_allowed() && after.binding().used < requests,
        "{} after {requests}",
        after.binding().used
    );
}

/// Redis's clock goes on while a machine is suspended, and the clock of its process does not.
#[tokio::test]
async fn a_suspended_machine_spends_the_rest_of_its_prefetches() {
    let (server, clock, suspended) = (RedisServer::start(), ManualClock::new(), ManualClock::new());
    let (other, holder) = (limiter_by(&server, &clock), limiter_by(&server, &suspended));
    let limit = Limit::per_minute("api", 1_000).prefetch(DEFAULT_LIFE);
    hold(&server, &holder, &limit, "ada").await;
    clock.advance(limit.window() + 2 * LIFE);
    assert!(
        check(&other, &limit, "ada", 1_000).await.is_allowed(),
        "all units have left the window"
    );
    assert!(
        is_in_process(&server, &holder, &limit, "ada").await,
        "a unit above the limit"
    );
    suspended.advance(limit.window() + 2 * LIFE);
    assert!(!check(&holder, &limit, "ada", 1).await.is_allowed());
}

/// The quiet limit sends every check to Redis, so prefetches of the busy one would be taken in
/// vain.
#[tokio::test]
async fn a_busy_limit_takes_no_prefetches_for_checks_with_a_quiet_one() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let limiter = limiter_by(&server, &clock);
    let quiet = Limit::per_hour("quiet", 1_000_000).prefetch(DEFAULT_LIFE);
    for request in 0..100 {
        let both = Check::new(Charge::new(API, "ada", 1).unwrap());
        let both = both
            .and(Charge::new(quiet.clone(), format!("address-{request}"), 1).unwrap())
            .unwrap();
        assert!(limiter.check_all(both).await.unwrap().is_allowed());
    }
    assert_eq!(used(&server, &clock, &API, "ada").await, (100, 0));
}

#[tokio::test]
async fn checks_of_two_busy_limits_take_prefetches_of_both() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let limiter = limiter_by(&server, &clock);
    let hourly = Limit::per_hour("hourly", 1_000_000).prefetch(DEFAULT_LIFE);
    let both = || {
        Check::new(Charge::new(API, "ada", 1).unwrap())
            .and(Charge::new(hourly.clone(), "ada", 1).unwrap())
            .unwrap()
    };
    let begun = Instant::now();
    loop {
        let scripts = server.script_calls();
        assert!(limiter.check_all(both()).await.unwrap().is_allowed());
        if server.script_calls() == scripts {
            return;
        }
        assert!(begun.elapsed() < TEST_TIMEOUT);
        sleep(Duration::from_millis(1)).await;
    }
}
