//! The largest limit, and the shortest and the longest window, from a text to the headers.

use axum::body::Body;
use tower::{Layer, ServiceExt, service_fn};
use tower_sliding_window::{HeaderSets, Limit, RateLimitLayer, Store};

use crate::support::{
    Fixture, for_every_store,
    requests::{anyone, figures, hello, request},
};

/// A limit's policy and figures after its first request, and the same as `X-RateLimit-*`.
async fn headers<S: Store + Clone>(test: &Fixture<S>, limit: &str) -> [String; 4] {
    let limit: Limit = limit.parse().unwrap();
    let layer = RateLimitLayer::new(test.limiter.clone())
        .limit(limit.by(anyone))
        .headers(HeaderSets::BOTH);
    let response = layer
        .layer(service_fn(hello))
        .oneshot(request())
        .await
        .unwrap()
        .map(Body::new);
    let text = |name| {
        response
            .headers()
            .get(name)
            .map_or("", |value| value.to_str().unwrap())
            .to_owned()
    };
    let [limit, remaining, ..] =
        figures(response.headers()).map(|figure| figure.unwrap_or_default().to_owned());
    [
        text("ratelimit-policy"),
        text("ratelimit"),
        limit,
        remaining,
    ]
}

/// No Integer of a Structured Field is above 999,999,999,999,999.
async fn the_largest_limit_has_figures_that_every_parser_reads(
    test: Fixture<impl Store + std::clone::Clone>,
) {
    let [policy, quota, limit, remaining] = headers(&test, "huge=4503599627370496/d").await;
    assert_eq!(policy, "\"huge\";q=999999999999999;w=86400");
    assert_eq!(quota, "\"huge\";r=999999999999999;t=86400");
    assert_eq!([limit, remaining], ["4503599627370496", "4503599627370495"]);
}

async fn the_shortest_window_has_no_length_in_seconds(
    test: Fixture<impl Store + std::clone::Clone>,
) {
    let [policy, quota, ..] = headers(&test, "short=3/ms").await;
    assert_eq!([policy, quota], ["\"short\";q=3", "\"short\";r=2;t=1"]);
}

async fn the_longest_window_is_a_year(test: Fixture<impl Store + std::clone::Clone>) {
    let [policy, quota, ..] = headers(&test, "long=3/365d").await;
    assert_eq!(
        [policy, quota],
        ["\"long\";q=3;w=31536000", "\"long\";r=2;t=31536000"]
    );
}

for_every_store! {
    the_largest_limit_has_figures_that_every_parser_reads
    the_shortest_window_has_no_length_in_seconds
    the_longest_window_is_a_year
}
