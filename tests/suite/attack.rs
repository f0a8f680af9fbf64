//! States that are rare, and limits at their edges: ids that have left and are there still, leases that end before the answer,
//! more units than a number holds.

use std::{convert::Infallible, time::Duration};

use axum::body::Body;
use http::{Request, Response};
use tokio::time::{advance, sleep};
use tower::{Layer, ServiceExt, service_fn};
use tower_sliding_window::{
    AdmissionId, Algorithm, Charge, Check, Limit, Limiter, MemoryStore, RateLimitLayer, RedisStore, Settlement, Store,
};

use crate::support::{
    Fixture, PATIENCE, for_every_store,
    redis_server::RedisServer,
    requests::{anyone, request},
};

/// How long an answer takes, to the nanosecond.
const TIMES: [Duration; 3] =
    [Duration::from_nanos(300_001_500), Duration::from_nanos(999_999_999), Duration::from_secs(3)];
const MICRO: Duration = Duration::from_micros(1);
const MANY: Limit = Limit::per_minute("many", 1_200);

fn of_one(id: u64) -> Check {
    Check::new(Charge::new(MANY, "ada", 1).unwrap()).with_id(AdmissionId::from(id))
}

/// More have left than are dropped at once, so that one which has left is still there.
async fn with_many_that_have_left(test: &Fixture<impl Store>) {
    for id in 0..600 {
        assert!(test.limiter.check_all(of_one(id)).await.unwrap().is_allowed());
        test.clock.advance(MICRO);
    }
    test.clock.advance(MANY.window() / 2);
    for id in 600..1_200 {
        assert!(test.limiter.check_all(of_one(id)).await.unwrap().is_allowed());
    }
    test.clock.advance(MANY.window() / 2);
}

async fn an_id_that_has_left_the_window_counts_anew(test: Fixture<impl Store>) {
    let test = test.asking_every_time();
    with_many_that_have_left(&test).await;
    let now = test.clock.now();
    let again = test.limiter.check_all(of_one(599)).await.unwrap();
    assert_eq!((again.at(), again.used()), (now, 601));
}

async fn what_has_left_the_window_is_not_settled(test: Fixture<impl Store>) {
    let test = test.asking_every_time();
    with_many_that_have_left(&test).await;
    let refund = Settlement::by_id(of_one(599), AdmissionId::from(599), test.clock.now(), |_| Some(0));
    let settled = test.limiter.settle(refund).await.unwrap();
    assert_eq!((settled.was_applied(), settled.decision().used()), (false, 600));
}

async fn spent_without_end_never_opens_a_limit(test: Fixture<impl Store>) {
    for algorithm in [Algorithm::log(), Algorithm::fixed(), Algorithm::compact(16), Algorithm::counter()] {
        let limit = Limit::per_day("huge", Limit::MAX_UNITS).with_algorithm(algorithm);
        for _ in 0..4_100 {
            let spent = Check::new(Charge::spent(limit.clone(), "ada", u64::MAX));
            let _ = test.limiter.check_all(spent).await.unwrap();
        }
        assert!(!test.limiter.check(&limit, "ada", 1).await.unwrap().is_allowed(), "{algorithm:?}");
        test.limiter.reset(&limit, "ada").await.unwrap();
    }
}

for_every_store! {
    an_id_that_has_left_the_window_counts_anew
    what_has_left_the_window_is_not_settled
    spent_without_end_never_opens_a_limit
}

/// What a response has cost, also where it counts as of the answer: whether its lease is over by then or not.
#[tokio::test(start_paused = true)]
async fn an_answer_counts_where_an_upstream_is_heeded_whenever_its_lease_ends() {
    let key = || anyone(&request().into_parts().0).unwrap();
    for algorithm in [Algorithm::log(), Algorithm::compact(16), Algorithm::fixed(), Algorithm::counter()] {
        for (heeds, took) in [false, true].into_iter().flat_map(|heeds| TIMES.map(|took| (heeds, took))) {
            let limit = Limit::per_hour("calls", 10).with_algorithm(algorithm);
            let limiter = Limiter::new(MemoryStore::new());
            let keyed = limit.clone().by(anyone).settle(|_| 5).lease(Duration::from_secs(1)).heed_upstream(heeds);
            let upstream = service_fn(move |_: Request<Body>| async move {
                advance(took).await;
                Ok::<_, Infallible>(Response::new(Body::empty()))
            });
            let app = RateLimitLayer::on(limiter.clone()).limit(keyed).heed_upstream().layer(upstream);
            assert_eq!(app.oneshot(request()).await.unwrap().status(), 200);
            let standing = limiter.peek(&limit, key()).await.unwrap();
            let reserved = standing.binding().reserved();
            assert_eq!((standing.used(), reserved), (5, 0), "{algorithm:?}, heeds: {heeds}, {took:?}");
        }
    }
}

/// The same on Redis.
#[tokio::test]
async fn an_answer_after_its_lease_counts_on_redis_where_an_upstream_is_heeded() {
    let server = RedisServer::start();
    let limiter = Limiter::new(RedisStore::builder(&server.url()).build().unwrap()).deadline(PATIENCE);
    for algorithm in [Algorithm::log(), Algorithm::compact(16), Algorithm::fixed(), Algorithm::counter()] {
        let limit = Limit::per_day("calls", 10).with_algorithm(algorithm);
        let keyed = limit.clone().by(anyone).settle(|_| 5).lease(Duration::from_millis(50)).heed_upstream(true);
        let upstream = service_fn(|_: Request<Body>| async {
            sleep(Duration::from_millis(120)).await;
            Ok::<_, Infallible>(Response::new(Body::empty()))
        });
        let app = RateLimitLayer::on(limiter.clone()).limit(keyed).heed_upstream().layer(upstream);
        assert_eq!(app.oneshot(request()).await.unwrap().status(), 200);
        let key = anyone(&request().into_parts().0).unwrap();
        assert_eq!(limiter.peek(&limit, key.clone()).await.unwrap().used(), 5, "{algorithm:?}");
        limiter.reset(&limit, key).await.unwrap();
    }
}

/// The sum counts, whatever stands behind it.
#[tokio::test]
async fn a_sum_of_reserved_units_above_the_sum_does_not_open_a_limit() {
    let server = RedisServer::start();
    let limiter = Limiter::new(RedisStore::builder(&server.url()).build().unwrap()).deadline(PATIENCE);
    let limit = Limit::per_minute("calls", 10);
    assert!(limiter.check(&limit, "ada", 10).await.unwrap().is_allowed());
    let key = server.keys().remove(0);
    server.run::<()>(&format!("ZADD {key} 100 held"));
    assert!(!limiter.check(&limit, "ada", 1).await.unwrap().is_allowed());
}

/// Asking again takes at least a moment, however short the time is that was said.
#[tokio::test(start_paused = true)]
async fn no_time_and_endless_times_until_reserved_units_may_be_given_back() {
    let limit = Limit::per_minute("calls", 10);
    for wait in [Duration::ZERO, Duration::MAX] {
        let limiter = Limiter::new(MemoryStore::new()).retry_reserved_after(wait).deadline(Duration::MAX);
        let held = limiter.reserve(&limit, "ada", 10, Duration::from_secs(30)).await.unwrap().unwrap();
        let refused = limiter.check(&limit, "ada", 1).await.unwrap();
        assert!(refused.is_refused_by_reservations());
        assert_eq!(refused.retry_after(), Some(wait.min(Duration::from_secs(30))));
        assert!(limiter.acquire(&limit, "ada", 1, Duration::from_secs(31)).await.unwrap().is_allowed());
        drop(held);
        limiter.pause(&limit, "ada", Duration::MAX).await.unwrap();
        limiter.pause(&limit, "ada", Duration::ZERO).await.unwrap();
        assert_eq!(limiter.check(&limit, "ada", 1).await.unwrap().retry_after(), Some(limit.window()));
    }
}
