//! Reserved units beside plain ones and beside ids of any bytes, and the extremes of
//! `retry_reserved_after`.

use std::time::Duration;

use tower_sliding_window::{Check, Limit, Limiter, MemoryStore, check::AdmissionId};

use crate::support::{
    TEST_TIMEOUT, charge, is_refused_by_reservations, redis_server::RedisServer, seconds,
};

const SECOND: Duration = Duration::from_secs(1);
const TOKENS: Limit = Limit::per_minute("tokens", 100);

/// By the server's own clock, a plain check meets a log with reserved units.
#[tokio::test]
async fn a_plain_check_counts_reserved_units() {
    let server = RedisServer::start();
    let store = server.store().build().unwrap();
    let limiter = Limiter::new(store)
        .deadline(TEST_TIMEOUT)
        .refusal_cache(Duration::ZERO);
    for (settled, reserved) in [(0, 10), (1, 9), (4, 6), (9, 1)] {
        let limit = Limit::per_hour("calls", 10);
        assert!(
            limiter
                .check(&limit, "ada", settled)
                .await
                .unwrap()
                .is_allowed()
        );
        let reservation = limiter
            .reserve(&limit, "ada", reserved, seconds(600))
            .await
            .unwrap()
            .unwrap();
        for _ in 0..3 {
            let refused = limiter.check(&limit, "ada", 1).await.unwrap();
            let reported = (
                refused.is_allowed(),
                refused.binding().used,
                refused.binding().reserved,
                refused.retry_after(),
            );
            assert_eq!(
                reported,
                (false, 10, reserved, Some(SECOND)),
                "{settled} {reserved}"
            );
        }
        assert_eq!(
            reservation.settle(0).await.unwrap().decision.binding().used,
            settled
        );
        assert_eq!(
            limiter
                .check(&limit, "ada", 1)
                .await
                .unwrap()
                .binding()
                .used,
            settled + 1
        );
        limiter.reset(&limit, "ada").await.unwrap();
    }
}

/// An application may use any eight bytes as an id, also those of a member that the log uses for a
/// sum.
#[tokio::test]
async fn no_id_is_mistaken_for_a_sum() {
    let server = RedisServer::start();
    let store = server.store().build().unwrap();
    let limiter = Limiter::new(store)
        .deadline(TEST_TIMEOUT)
        .refusal_cache(Duration::ZERO);
    for id in [*b"reserved", *b"used    ", *b"held    ", *b"used\0\0\0\0"] {
        let id = AdmissionId(u64::from_be_bytes(id));
        assert!(
            limiter
                .check_all(Check::new(charge(&TOKENS, 1)).with_id(id))
                .await
                .unwrap()
                .is_allowed()
        );
        let reservation = limiter
            .reserve(&TOKENS, "ada", 40, seconds(600))
            .await
            .unwrap()
            .unwrap();
        assert_eq!(reservation.decision().binding().used, 41);
        let again = limiter
            .check_all(Check::new(charge(&TOKENS, 1)).with_id(id))
            .await
            .unwrap();
        assert_eq!((again.binding().used, again.binding().reserved), (41, 40));
        assert_eq!(
            reservation.settle(2).await.unwrap().decision.binding().used,
            3
        );
        limiter.reset(&TOKENS, "ada").await.unwrap();
    }
}

/// Between two checks `acquire` pauses for a moment, however short the retry time is.
#[tokio::test(start_paused = true)]
async fn retry_reserved_after_may_be_zero_or_endless() {
    let limit = Limit::per_minute("calls", 10);
    for wait in [Duration::ZERO, Duration::MAX] {
        let limiter = Limiter::new(MemoryStore::new())
            .retry_reserved_after(wait)
            .deadline(Duration::MAX);
        let held = limiter
            .reserve(&limit, "ada", 10, Duration::from_secs(30))
            .await
            .unwrap()
            .unwrap();
        let refused = limiter.check(&limit, "ada", 1).await.unwrap();
        assert!(is_refused_by_reservations(&refused));
        assert_eq!(
            refused.retry_after(),
            Some(wait.min(Duration::from_secs(30)))
        );
        assert!(
            limiter
                .acquire(&limit, "ada", 1, Duration::from_secs(31))
                .await
                .unwrap()
                .is_allowed()
        );
        drop(held);
        limiter.block(&limit, "ada", Duration::MAX).await.unwrap();
        limiter.block(&limit, "ada", Duration::ZERO).await.unwrap();
        assert_eq!(
            limiter.check(&limit, "ada", 1).await.unwrap().retry_after(),
            Some(limit.window())
        );
    }
}
