//! The code, the message, the details and the metadata of a rejected call.

use http::{StatusCode, request::Parts};
use tokio::time::sleep;
use tonic::{Code, Status};
use tonic_types::StatusExt;
use tower_sliding_window::{
    ApiKey, Header, Key, KeyExtractor, KeyedLimit, Limit, Limiter, MemoryStore, PeerIp,
    RateLimitLayer, Rejection, Secret, extract::KeyError, middleware::GrpcResponse,
};

use super::{CALLS, by_peer};
use crate::support::{
    TEST_TIMEOUT,
    grpc::{check, connect, serve, text},
    ms,
    redis_server::RedisServer,
    seconds,
    stores::failing,
};

/// The names of the limits in the `QuotaFailure`.
fn violated(status: &Status) -> Vec<String> {
    let failure = status.get_details_quota_failure();
    failure
        .map(|failure| {
            failure
                .violations
                .into_iter()
                .map(|violation| violation.subject)
                .collect()
        })
        .unwrap_or_default()
}

fn pushback(status: &Status) -> i32 {
    text(status.metadata(), "grpc-retry-pushback-ms")
        .unwrap()
        .parse()
        .unwrap()
}

/// The wait of the `RetryInfo` in milliseconds.
fn retry_info(status: &Status) -> Option<u128> {
    let wait = status.get_details_retry_info()?.retry_delay?;
    assert_eq!(wait.subsec_nanos() % 1_000_000, 0, "it is rounded");
    Some(wait.as_millis())
}

#[tokio::test]
async fn a_client_that_waits_for_the_retry_info_is_admitted() {
    let limit = Limit::per("calls", 2, ms(1_500));
    let layer = RateLimitLayer::new(MemoryStore::new())
        .limit(limit.by(PeerIp::new()))
        .respond_with(GrpcResponse);
    let mut client = connect(&serve(layer).await).await;
    for remaining in ["1", "0"] {
        assert_eq!(
            text(&check(&mut client).await.unwrap(), "x-ratelimit-remaining"),
            Some(remaining)
        );
    }

    let refused = check(&mut client).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted);
    assert!(
        refused
            .message()
            .starts_with("The limit 'calls' is used up. Retry in "),
        "{refused}"
    );
    assert_eq!(violated(&refused), ["calls"]);
    let wait = retry_info(&refused).unwrap();
    assert!((1..=1_500).contains(&wait), "{wait}");
    assert_eq!(u128::try_from(pushback(&refused)).unwrap(), wait);
    let metadata = |name| text(refused.metadata(), name);
    assert_eq!(
        (
            metadata("x-ratelimit-limit"),
            metadata("x-ratelimit-remaining")
        ),
        (Some("2"), Some("0"))
    );
    assert_eq!(metadata("cache-control"), Some("no-store"));
    let retry_after: u128 = metadata("retry-after").unwrap().parse().unwrap();
    assert!(wait <= 1_000 * retry_after);

    sleep(
        refused
            .get_details_retry_info()
            .unwrap()
            .retry_delay
            .unwrap(),
    )
    .await;
    check(&mut client).await.unwrap();
}

fn by(limit: KeyedLimit) -> RateLimitLayer<GrpcResponse> {
    RateLimitLayer::new(MemoryStore::new())
        .limit(limit)
        .respond_with(GrpcResponse)
}

/// Every call has this error in the place of its key.
fn without_key(status: u16) -> RateLimitLayer<GrpcResponse> {
    let error = KeyError::invalid("tenant", "10.0.0.7 has no \u{e9}\n")
        .with_status(StatusCode::from_u16(status).unwrap());
    by(CALLS.by(move |_: &Parts| -> Result<Key, KeyError> { Err(error.clone()) }))
}

#[tokio::test]
async fn each_rejection_that_no_wait_ends_has_its_code_and_no_retry_time() {
    let secret = Secret::new("a secret that only the tests know").unwrap();
    let peer = PeerIp::new();
    let localhost = peer.key([127, 0, 0, 1].into());
    let unreadable = "The request cannot be counted: tenant: 10.0.0.7 has no \u{e9}\n.";
    let never_fits = "The request costs 3 units. The limit 'calls' never admits more than 2.";
    let cases = [
        (by_peer().cost(|_| 3), Code::ResourceExhausted, never_fits),
        (
            by(CALLS.by(ApiKey::header("x-api-key", &secret))),
            Code::Unauthenticated,
            "The request cannot be counted: x-api-key: missing.",
        ),
        (
            by(CALLS.by(Header::new("x-tenant"))),
            Code::InvalidArgument,
            "The request cannot be counted: x-tenant: missing.",
        ),
        (
            by_peer().deny(peer.one_of([localhost])),
            Code::PermissionDenied,
            "The server does not take requests from this client.",
        ),
        (
            without_key(500),
            Code::Internal,
            "The server has made a mistake.",
        ),
        (
            without_key(503),
            Code::Unavailable,
            "The server has made a mistake.",
        ),
        (without_key(429), Code::ResourceExhausted, unreadable),
        (without_key(403), Code::PermissionDenied, unreadable),
        (without_key(404), Code::InvalidArgument, unreadable),
        (without_key(302), Code::Internal, unreadable),
    ];
    for (layer, code, message) in cases {
        let rejected = check(&mut connect(&serve(layer).await).await)
            .await
            .unwrap_err();
        assert_eq!((rejected.code(), rejected.message()), (code, message));
        assert_eq!(
            (pushback(&rejected), retry_info(&rejected)),
            (-1, None),
            "{code:?}"
        );
        assert_eq!(
            violated(&rejected),
            if message == never_fits {
                &["calls"][..]
            } else {
                &[]
            }
        );
        assert_eq!(text(rejected.metadata(), "retry-after"), None);
        assert_eq!(
            text(rejected.metadata(), "www-authenticate").is_some(),
            code == Code::Unauthenticated
        );
    }
}

#[tokio::test]
async fn without_redis_a_call_that_fails_closed_is_pushed_back() {
    let mut redis = RedisServer::start();
    let store = redis.store().build().unwrap();
    let layer = RateLimitLayer::new(store)
        .limit(CALLS.by(PeerIp::new()))
        .fail_closed()
        .deadline(TEST_TIMEOUT);
    let mut client = connect(&serve(layer.respond_with(GrpcResponse)).await).await;
    assert_eq!(
        text(&check(&mut client).await.unwrap(), "x-ratelimit-remaining"),
        Some("1")
    );

    redis.kill();
    let rejected = check(&mut client).await.unwrap_err();
    assert_eq!(rejected.code(), Code::Unavailable);
    assert_eq!(
        rejected.message(),
        "The server cannot count requests at the moment."
    );
    let wait = pushback(&rejected);
    assert!((1_000..=5_000).contains(&wait), "{wait}");
    assert_eq!(retry_info(&rejected), Some(wait.unsigned_abs().into()));
    assert_eq!(
        text(rejected.metadata(), "retry-after"),
        Some(&*(wait / 1_000).to_string())
    );
    assert!(violated(&rejected).is_empty());
}

#[tokio::test]
async fn hidden_limits_are_in_no_status() {
    let hidden = |units| Limit::per_hour("hidden", units).by(PeerIp::new()).hidden();
    for (units, names) in [(1, &[][..]), (2, &["calls"])] {
        let mut client = connect(&serve(by_peer().limit(hidden(units))).await).await;
        for _ in 0..units {
            check(&mut client).await.unwrap();
        }
        let refused = check(&mut client).await.unwrap_err();
        assert_eq!(refused.code(), Code::ResourceExhausted);
        assert_eq!(violated(&refused), names);
        assert!(retry_info(&refused).is_some() && pushback(&refused) > 0);
        assert_eq!(
            text(refused.metadata(), "x-ratelimit-limit").is_some(),
            units == 2
        );
        assert!(!format!("{refused:?}").contains("hidden"), "{refused:?}");
    }
}

#[tokio::test]
async fn a_wait_that_is_too_long_for_a_pushback_asks_for_no_retry() {
    let monthly = Limit::per("calls", 1, seconds(30 * 86_400));
    let mut client = connect(&serve(by(monthly.by(PeerIp::new()))).await).await;
    check(&mut client).await.unwrap();
    let refused = check(&mut client).await.unwrap_err();
    assert_eq!(pushback(&refused), -1);
    assert!(retry_info(&refused).unwrap() > 29 * 86_400_000);
}

#[tokio::test]
async fn a_method_returns_the_status_of_its_own_rejection() {
    let limiter = Limiter::new(MemoryStore::new());
    let _ = limiter.check(&CALLS, "ada", 2).await.unwrap();
    let refused = Status::from(Rejection::Limited(
        limiter.check(&CALLS, "ada", 1).await.unwrap(),
    ));
    assert_eq!(
        (refused.code(), violated(&refused)),
        (Code::ResourceExhausted, vec!["calls".to_owned()])
    );
    assert_eq!(
        retry_info(&refused),
        u128::try_from(pushback(&refused)).ok()
    );
    assert!(text(refused.metadata(), "retry-after").is_some());

    let never_fits = Status::from(Rejection::from(
        limiter.check(&CALLS, "ada", 3).await.unwrap_err(),
    ));
    assert_eq!(
        (never_fits.code(), pushback(&never_fits)),
        (Code::ResourceExhausted, -1)
    );

    let failed = Limiter::new(failing())
        .check(&CALLS, "ada", 1)
        .await
        .unwrap_err();
    let failed = Status::from(Rejection::from(failed));
    assert_eq!(failed.code(), Code::Unavailable);
    assert!((1_000..=5_000).contains(&pushback(&failed)));
    assert!(
        !format!("{failed:?}").contains("out of order"),
        "{failed:?}"
    );
}
