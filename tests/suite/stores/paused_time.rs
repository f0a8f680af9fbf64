//! The in-process store follows tokio's time, so a test that pauses it controls the windows.

use std::{thread, time::Duration};

use tokio::time::{Instant, advance};
use tower::{Layer, ServiceExt, service_fn};
use tower_sliding_window::{
    Algorithm, Charge, Check, Limit, Limiter, MemoryStore, RateLimitLayer, Store,
    testing::FaultyStore,
};

use crate::support::requests::{anyone, figures, hello, request};

const ONE: Limit = Limit::per_minute("one", 1);
const MINUTE: Duration = Duration::from_secs(60);

#[tokio::test(start_paused = true)]
async fn a_window_ends_when_the_test_advances_time() {
    let app = RateLimitLayer::new(MemoryStore::new())
        .limit(ONE.by(anyone))
        .layer(service_fn(hello));
    let asked = async |status, retry_after| {
        let response = app.clone().oneshot(request()).await.unwrap();
        assert_eq!(
            (response.status().as_u16(), figures(response.headers())[3]),
            (status, retry_after)
        );
    };
    asked(200, None).await;
    asked(429, Some("60")).await;
    advance(MINUTE - Duration::from_millis(1)).await;
    asked(429, Some("1")).await;
    advance(Duration::from_millis(1)).await;
    asked(200, None).await;
}

/// The runtime advances the blocked clock itself when it has nothing else to do.
#[tokio::test(start_paused = true)]
async fn a_wait_takes_no_real_time() {
    let (limiter, begun) = (Limiter::new(MemoryStore::new()), Instant::now());
    for _ in 0..3 {
        assert!(
            limiter
                .acquire(&ONE, "ada", 1, 10 * MINUTE)
                .await
                .unwrap()
                .is_allowed()
        );
    }
    let waited = begun.elapsed();
    assert!(
        (2 * MINUTE..2 * MINUTE + Duration::from_secs(1)).contains(&waited),
        "{waited:?}"
    );
}

/// A cached refusal is at most a second old.
#[tokio::test(start_paused = true)]
async fn the_refusal_cache_follows_paused_time() {
    let store = FaultyStore::new(MemoryStore::new()).with_local_state();
    let limiter = Limiter::new(store.clone());
    for (allowed, asked) in [(true, 1), (false, 2), (false, 2)] {
        assert_eq!(
            limiter.check(&ONE, "ada", 1).await.unwrap().is_allowed(),
            allowed
        );
        assert_eq!(store.calls(), asked);
    }
    advance(Duration::from_secs(1)).await;
    let refused = limiter.check(&ONE, "ada", 1).await.unwrap();
    assert_eq!(
        (refused.retry_after(), store.calls()),
        (Some(MINUTE - Duration::from_secs(1)), 3)
    );
    advance(MINUTE).await;
    assert!(limiter.check(&ONE, "ada", 1).await.unwrap().is_allowed());
}

/// A thread outside of the runtime uses real time, so the store sees the clock step back. Nothing
/// is admitted beyond the limit, and no key is refused for longer than one full window.
#[tokio::test(start_paused = true)]
async fn a_thread_outside_the_runtime_admits_nothing_extra() {
    for algorithm in [
        Algorithm::SLIDING_LOG,
        Algorithm::compact_log(16),
        Algorithm::SLIDING_WINDOW_COUNTER,
        Algorithm::FIXED_WINDOW,
    ] {
        let (store, two) = (
            MemoryStore::new(),
            Limit::per_minute("two", 2).with_algorithm(algorithm),
        );
        let check = Check::new(Charge::new(two, "ada", 1).unwrap());
        for _ in 0..3 {
            advance(1_000 * MINUTE).await;
            assert_eq!(
                store.decide_now(&check).unwrap().unwrap().binding().used,
                1,
                "{algorithm:?}"
            );
            let (outside, check) = (store.clone(), check.clone());
            let asked = thread::spawn(move || {
                [(); 3].map(|()| outside.decide_now(&check).unwrap().unwrap())
            });
            let [second, refused, again] = asked.join().unwrap();
            assert!(
                second.is_allowed() && !refused.is_allowed() && !again.is_allowed(),
                "{algorithm:?}"
            );
            assert!(
                again.retry_after().is_some_and(|wait| wait <= 2 * MINUTE),
                "{again:?}"
            );
        }
    }
}
