//! Header sets, and the reset of stacked layers.

use std::{
    convert::Infallible,
    future::ready,
    time::{Duration, Instant, UNIX_EPOCH},
};

use axum::{
    body::Body,
    response::{IntoResponse, Response},
};
use http::{Request, header::RETRY_AFTER};
use tokio::time::sleep;
use tower::{Layer, ServiceExt, service_fn, util::BoxCloneService};
use tower_sliding_window::{
    HeaderSets, KeyedLimit, Limit, Limiter, MemoryStore, RateLimitLayer, Rejection,
    store::ManualClock,
};

use crate::support::{
    TEST_TIMEOUT,
    log::Log,
    requests::{anyone, figures, json, refusal_body, request, scripted_response},
    services::{App, around, handler},
    stores::failing,
};

/// A limit on the load of the whole service.
const TOTAL: Limit = Limit::per_hour("total", 1);

const MINE: Limit = Limit::per_minute("mine", 5);
const FORMATS: [HeaderSets; 2] = [HeaderSets::X_RATE_LIMIT, HeaderSets::X_RATE_LIMIT_UNIX];

fn layer(limit: KeyedLimit) -> RateLimitLayer {
    RateLimitLayer::new(MemoryStore::new()).limit(limit)
}

async fn ask(app: &App) -> Response {
    app.clone().oneshot(request()).await.unwrap()
}

/// Also if the response of the service forbids caches to store it, as a rejection does.
#[tokio::test]
async fn an_error_of_the_service_shows_the_figures() {
    let service = service_fn(|request: Request<Body>| {
        ready(Ok::<_, Infallible>(scripted_response(request.headers())))
    });
    for status in ["400", "401", "403", "404", "500"] {
        let headers = [("answer", status), ("answer-cache-control", "no-store")];
        let request = headers
            .iter()
            .fold(Request::get("/"), |request, (name, value)| {
                request.header(*name, *value)
            });
        let response = layer(MINE.by(anyone))
            .layer(service)
            .oneshot(request.body(Body::empty()).unwrap());
        let response = response.await.unwrap();
        assert_eq!(
            (response.status().as_str(), figures(response.headers())[1]),
            (status, Some("4"))
        );
    }
}

#[tokio::test]
async fn a_layer_without_header_sets_sends_only_retry_after() {
    let silent = layer(TOTAL.by(anyone)).headers(HeaderSets::NONE);
    let app = around(&silent, handler());
    assert_eq!(figures(ask(&app).await.headers()), [None; 4]);
    let refused = ask(&app).await;
    assert_eq!(figures(refused.headers()), [None, None, None, Some("3600")]);
    assert_eq!(json(refused).await, refusal_body(Some("total"), 3600));

    let down = RateLimitLayer::new(failing())
        .limit(TOTAL.by(anyone))
        .headers(HeaderSets::NONE)
        .fail_closed();
    let response = ask(&around(&down, handler())).await;
    assert!(response.status() == 503 && response.headers().contains_key(RETRY_AFTER));

    // A responder may remove it.
    let bare = silent.respond_with(|_: &Rejection, mut head: http::Response<()>| {
        head.headers_mut().remove(RETRY_AFTER);
        head.map(|()| Body::empty())
    });
    assert_eq!(
        figures(
            bare.layer(handler())
                .oneshot(request())
                .await
                .unwrap()
                .headers()
        ),
        [None; 4]
    );

    let default = layer(MINE.by(anyone))
        .headers(HeaderSets::NONE)
        .headers(HeaderSets::X_RATE_LIMIT);
    assert_eq!(
        figures(ask(&around(&default, handler())).await.headers())[1],
        Some("4")
    );
}

/// The clock is fixed at a moment that is not a whole second.
struct Stacked {
    clock: ManualClock,
    store: MemoryStore,
}

impl Stacked {
    fn new() -> Self {
        let clock = ManualClock::new();
        clock.advance(Duration::from_micros(1));
        let store = MemoryStore::new().clock(&clock);
        Self { clock, store }
    }

    fn layer(&self, limit: Limit, format: HeaderSets) -> RateLimitLayer {
        RateLimitLayer::new(self.store.clone())
            .limit(limit.by(anyone))
            .headers(format)
    }

    /// The reset of an unused window in this format.
    fn reset(&self, limit: &Limit, format: HeaderSets) -> String {
        let now = if format == FORMATS[1] {
            self.clock.now().duration_since(UNIX_EPOCH).unwrap()
        } else {
            Duration::ZERO
        };
        (now + limit.window())
            .as_micros()
            .div_ceil(1_000_000)
            .to_string()
    }
}

/// Whichever layer sets the headers, and whichever refuses.
#[tokio::test]
async fn stacked_layers_show_the_reset_of_the_limit_with_the_least_left() {
    let mut wrong = Vec::new();
    let pairs = FORMATS
        .map(|outer| FORMATS.map(|inner| vec![outer, inner]))
        .concat();
    let triples = pairs
        .iter()
        .flat_map(|pair| FORMATS.map(|inner| [&pair[..], &[inner]].concat()));
    for formats in triples.chain(pairs.clone()) {
        for tight in 0..formats.len() {
            let test = Stacked::new();
            let units = |place| if place == tight { 1 } else { 5 };
            let limits = [("a", 60), ("b", 3_600), ("c", 86_400)]
                .into_iter()
                .enumerate()
                .map(|(place, (name, window))| {
                    Limit::new(name, units(place), Duration::from_secs(window)).unwrap()
                });
            let limits: Vec<_> = limits.take(formats.len()).collect();
            let app = formats
                .iter()
                .zip(&limits)
                .rev()
                .fold(handler(), |app, (format, limit)| {
                    around(&test.layer(limit.clone(), *format), app)
                });
            let expected = test.reset(&limits[tight], formats[tight]);
            for status in [200, 429] {
                let response = ask(&app).await;
                let [limit, remaining, reset, _] = figures(response.headers());
                assert_eq!(
                    (response.status().as_u16(), limit, remaining),
                    (status, Some("1"), Some("0"))
                );
                if reset != Some(&*expected) {
                    wrong.push(format!(
                        "{formats:?}: {reset:?} on {status} by number {tight}"
                    ));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// The line is one of the process, and at most one a second.
#[tokio::test]
async fn stacked_layers_with_two_formats_of_the_reset_are_logged() {
    let log = Log::start();
    let [seconds, unix_time] = FORMATS;
    let stacked = |outer, inner| {
        layer(MINE.by(anyone))
            .headers(outer)
            .layer(around(&layer(TOTAL.by(anyone)).headers(inner), handler()))
    };
    for (outer, inner) in [(seconds, seconds), (unix_time, unix_time)] {
        assert_eq!(
            stacked(outer, inner)
                .oneshot(request())
                .await
                .unwrap()
                .status(),
            200
        );
        assert!(!log.text().contains("two formats"));
    }
    for (outer, inner) in [(seconds, unix_time), (unix_time, seconds)] {
        let (log, begun) = (Log::start(), Instant::now());
        while !log.text().contains(
            "X-RateLimit-Reset has two formats: send `X_RATE_LIMIT_UNIX` by all stacked layers",
        ) {
            assert_eq!(
                stacked(outer, inner)
                    .oneshot(request())
                    .await
                    .unwrap()
                    .status(),
                200
            );
            assert!(begun.elapsed() < TEST_TIMEOUT, "{}", log.text());
            sleep(Duration::from_millis(20)).await;
        }
    }
}

/// Its limit has no reset, so the client sees one format.
#[tokio::test]
async fn a_concurrent_limit_around_another_format_of_the_reset_is_not_logged() {
    let (log, begun) = (Log::start(), Instant::now());
    let app = around(&layer(TOTAL.by(anyone)).headers(FORMATS[1]), handler());
    let outer = layer(Limit::concurrent("open", 9).by(anyone)).layer(app);
    // Another test may have logged the line of this second.
    while begun.elapsed() < Duration::from_millis(1_100) {
        let response = outer.clone().oneshot(request()).await.unwrap();
        assert_eq!(figures(response.headers())[0], Some("1"));
        assert!(!log.text().contains("two formats"), "{}", log.text());
        sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn a_layer_without_figures_leaves_those_of_an_inner_layer() {
    for [outer, inner] in [[0, 1], [1, 0]].map(|places| places.map(|place: usize| FORMATS[place])) {
        let test = Stacked::new();
        let layer = |limit| {
            RateLimitLayer::new(test.store.clone())
                .limit(limit)
                .headers(outer)
        };
        let app = around(&test.layer(Limit::per_minute("inner", 9), inner), handler());
        let undecided = RateLimitLayer::new(failing())
            .limit(TOTAL.by(anyone))
            .headers(outer);
        let unlimited = KeyedLimit::chosen(anyone, |_| None::<Limit>);
        for app in [
            around(&layer(TOTAL.by(anyone).hidden()), app.clone()),
            around(&layer(TOTAL.by(anyone)).exempt(|_| true), app.clone()),
            around(&layer(unlimited), app.clone()),
            around(&undecided, app.clone()),
            around(
                &layer(MINE.by(anyone)).headers(HeaderSets::NONE),
                app.clone(),
            ),
            around(
                &layer(Limit::per_minute("calls", 9).by(anyone).heed_upstream()),
                app.clone(),
            ),
        ] {
            assert_eq!(
                figures(ask(&app).await.headers())[2],
                Some(&*test.reset(&MINE, inner))
            );
        }
    }
}

#[tokio::test]
async fn a_handlers_rejection_keeps_its_seconds_under_a_layer() {
    for format in FORMATS {
        let test = Stacked::new();
        let limiter = Limiter::new(test.store.clone());
        let handler = BoxCloneService::new(service_fn(move |_: Request<Body>| {
            let limiter = limiter.clone();
            async move {
                let decision = limiter.check(&TOTAL, "all", 1).await.unwrap();
                if decision.is_allowed() {
                    let mut response = Response::new(Body::empty());
                    decision.write_headers(format, response.headers_mut());
                    return Ok(response);
                }
                Ok::<_, Infallible>(Rejection::Limited(decision).into_response())
            }
        }));
        let app = around(&test.layer(MINE, format), handler);
        for (status, format) in [(200, format), (429, FORMATS[0])] {
            let response = ask(&app).await;
            let [limit, remaining, reset, _] = figures(response.headers());
            assert_eq!(
                (response.status().as_u16(), limit, remaining),
                (status, Some("1"), Some("0"))
            );
            assert_eq!(reset, Some(&*test.reset(&TOTAL, format)));
        }
    }
}

/// The header may have another meaning.
#[tokio::test]
async fn a_reset_written_by_a_responder_is_kept() {
    for own in [Some("soon"), Some("7"), None] {
        for [outer, inner] in
            [[0, 1], [1, 0]].map(|places| places.map(|place: usize| FORMATS[place]))
        {
            let test = Stacked::new();
            let inner = test.layer(TOTAL, inner).respond_with(
                move |_: &Rejection, mut head: http::Response<()>| {
                    head.headers_mut().remove("x-ratelimit-reset");
                    own.map(|own| {
                        head.headers_mut()
                            .insert("x-ratelimit-reset", own.parse().unwrap())
                    });
                    head.map(|()| Body::empty())
                },
            );
            let app = around(
                &test.layer(MINE, outer),
                BoxCloneService::new(inner.layer(handler())),
            );
            ask(&app).await;
            assert_eq!(figures(ask(&app).await.headers())[2], own);
        }
    }
}
