//! Near the limit every unit is one of its own.

use super::*;

/// An eighth of it is a single unit, so it has none on a busy machine either, where a server seems
/// to be far away.
#[tokio::test]
async fn a_small_limit_has_no_prefetches() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let limiter = limiter_by(&server, &clock);
    let small = Limit::per_minute("small", 15).prefetch(DEFAULT_LIFE);
    for used in 1..=15 {
        assert!(!is_in_process(&server, &limiter, &small, "ada").await);
        assert_eq!(
            limiter.peek(&small, "ada").await.unwrap().binding().used,
            used
        );
    }
    assert_eq!(
        check(&limiter, &small, "ada", 1).await.retry_after(),
        Some(small.window())
    );
}

/// An eighth of them is less than the sixteen requests that a prefetch is taken for.
#[tokio::test]
async fn a_limit_of_fewer_than_128_units_has_no_prefetches_nearby() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let limiter = limiter_by(&server, &clock);
    let small = Limit::per_minute("small", 127).prefetch(DEFAULT_LIFE);
    for _ in 0..127 {
        assert!(!is_in_process(&server, &limiter, &small, "ada").await);
    }
    let larger = Limit::per_minute("larger", 1_000).prefetch(DEFAULT_LIFE);
    hold(&server, &limiter, &larger, "ada").await;
}

#[tokio::test]
async fn a_prefetch_is_at_most_an_eighth_of_the_rest() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let limiter = limiter_by(&server, &clock);
    let limit = Limit::per_minute("limit", 1_000).prefetch(DEFAULT_LIFE);
    for before in 0..1_000 {
        // An eighth, and at most a quarter of the prefetch before.
        let (unspent, rest) = (
            used(&server, &clock, &limit, "ada").await.0 - before,
            1_000 - before,
        );
        assert!(5 * unspent <= rest, "{unspent} of {rest}");
        assert!(
            check(&limiter, &limit, "ada", 1).await.is_allowed(),
            "after {before} units"
        );
        sleep(Duration::from_micros(100)).await;
    }
    clock.advance(LIFE);
    wait_until_used(&server, &clock, &limit, "ada", 1_000).await;
    assert!(!check(&limiter, &limit, "ada", 1).await.is_allowed());
}

/// The last tenth of the limit is admitted as an exact log would, but for units that others hold,
/// for a life.
#[tokio::test]
async fn four_processes_admit_the_whole_limit() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let processes: Vec<_> = (0..4).map(|_| limiter_by(&server, &clock)).collect();
    let limit = Limit::per_minute("limit", 1_000).prefetch(DEFAULT_LIFE);
    let (mut admitted, mut refused_early) = (0, 0);
    for request in 0..1_000 {
        // The last 50 are those of a life later, when nothing is held.
        if request == 950 {
            clock.advance(LIFE);
            for process in &processes {
                process.shutdown(TEST_TIMEOUT).await.unwrap();
            }
        }
        let decision = check(&processes[request % 4], &limit, "ada", 1).await;
        admitted += u64::from(decision.is_allowed());
        refused_early += u64::from(!decision.is_allowed());
        assert!(
            request < 950 || decision.is_allowed(),
            "request {request}, {admitted} admitted"
        );
        if let Some(wait) = decision.retry_after() {
            // Only held units refuse, so the retry time is that of a prefetch.
            assert!(
                wait <= LIFE && is_refused_by_reservations(&decision),
                "{decision:?}"
            );
        }
    }
    assert_eq!(admitted + refused_early, 1_000);
    for _ in 0..refused_early {
        assert!(check(&processes[0], &limit, "ada", 1).await.is_allowed());
    }
    assert!(
        !check(&processes[1], &limit, "ada", 1).await.is_allowed(),
        "1,000 units are spent"
    );
}

#[tokio::test]
async fn a_thousand_processes_on_a_limit_of_ten_are_exact() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let limit = Limit::per_minute("limit", 10).prefetch(DEFAULT_LIFE);
    let mut admitted = 0;
    for _ in 0..1_000 {
        admitted += u64::from(
            check(&limiter_by(&server, &clock), &limit, "ada", 1)
                .await
                .is_allowed(),
        );
    }
    assert_eq!(admitted, 10);
}
