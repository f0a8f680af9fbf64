//! The layer in stacks with layers of `tower-http`, in each order, over real sockets.

use std::{convert::Infallible, time::Duration};

use axum::{Router, body::Body, routing::get};
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, combinators::BoxBody};
use hyper::{
    body::{Body as HttpBody, Bytes, Incoming},
    server::conn::http1,
};
use hyper_util::{rt::TokioIo, service::TowerToHyperService};
use tokio::{net::TcpListener, time::sleep};
use tower::{Service, ServiceBuilder, service_fn};
use tower_http::{
    classify::{ServerErrorsAsFailures, SharedClassifier},
    compression::CompressionLayer,
    cors::{Any, CorsLayer},
    timeout::TimeoutLayer,
    trace::TraceLayer,
};
use tower_sliding_window::{
    Limit, MemoryStore, RateLimitLayer, Rejection, Store, middleware::exposed_headers,
};

use crate::support::{
    TEST_TIMEOUT,
    http_client::{Answer, HttpClient},
    http_server::serve,
    log::Log,
    requests::{anyone, figures},
    stores::silent,
};

const CALLS: Limit = Limit::per_hour("calls", 2);

fn limits() -> RateLimitLayer {
    on(MemoryStore::new())
}

fn on<S: Store>(store: S) -> RateLimitLayer {
    RateLimitLayer::new(store)
        .limit(CALLS.by(anyone))
        .deadline(TEST_TIMEOUT)
}

fn routes() -> Router {
    Router::new().route("/", get(|| async { "hello ".repeat(20) }))
}

fn timeout() -> TimeoutLayer {
    TimeoutLayer::with_status_code(StatusCode::REQUEST_TIMEOUT, TEST_TIMEOUT)
}

fn trace() -> TraceLayer<SharedClassifier<ServerErrorsAsFailures>> {
    TraceLayer::new_for_http()
}

fn cors() -> CorsLayer {
    CorsLayer::new()
        .allow_origin(Any)
        .expose_headers(exposed_headers())
}

/// Sends three calls, and checks that two are admitted, with the right figures.
async fn limited(order: &str, url: &str) -> [Answer; 3] {
    let client = HttpClient::new();
    let headers = [
        ("origin", "https://example.org"),
        ("accept-encoding", "gzip"),
    ];
    let mut answers = Vec::new();
    for (status, left) in [(200, "1"), (200, "0"), (429, "0")] {
        let answer = client.send("GET", url, &headers).await;
        let [limit, remaining, reset, retry_after] = figures(&answer.headers);
        assert_eq!(
            (answer.status.as_u16(), limit, remaining),
            (status, Some("2"), Some(left)),
            "{order}"
        );
        let refused = (status == 429).then_some(reset).flatten();
        assert_eq!(retry_after, refused, "{order}");
        if refused.is_some() {
            assert_eq!(
                answer.headers["content-type"], "application/problem+json",
                "{order}"
            );
        }
        answers.push(answer);
    }
    answers
        .try_into()
        .unwrap_or_else(|_| unreachable!("three calls"))
}

/// `Router::layer` boxes the body after each layer, so every order compiles.
#[tokio::test]
async fn every_order_on_a_router_serves_and_refuses() {
    let orders = [
        (
            "limits inside of all",
            routes()
                .layer(limits())
                .layer(CompressionLayer::new())
                .layer(timeout())
                .layer(trace()),
        ),
        (
            "limits outside of all",
            routes()
                .layer(trace())
                .layer(timeout())
                .layer(CompressionLayer::new())
                .layer(limits()),
        ),
        (
            "limits outside of compression",
            routes()
                .layer(CompressionLayer::new())
                .layer(limits())
                .layer(trace()),
        ),
        (
            "limits outside of a timeout",
            routes()
                .layer(timeout())
                .layer(limits())
                .layer(CompressionLayer::new()),
        ),
        (
            "limits outside of a trace",
            routes().layer(trace()).layer(limits()).layer(timeout()),
        ),
    ];
    for (order, app) in orders {
        limited(order, &serve(app).await).await;
    }
}

/// The first layer of a `ServiceBuilder` is the outermost one. A layer that wraps the body, inside
/// of the limits, needs `map_response` between them.
#[tokio::test]
async fn every_order_in_a_service_builder_serves_and_refuses() {
    let inside = ServiceBuilder::new()
        .layer(trace())
        .layer(timeout())
        .layer(CompressionLayer::new())
        .layer(limits());
    limited("limits inside of all", &serve(routes().layer(inside)).await).await;
    let outside = ServiceBuilder::new()
        .layer(limits())
        .map_response(|response: Response<_>| response.map(Body::new))
        .layer(trace())
        .layer(timeout())
        .layer(CompressionLayer::new());
    limited(
        "limits outside of all",
        &serve(routes().layer(outside)).await,
    )
    .await;
    let of_plain = ServiceBuilder::new()
        .layer(limits())
        .layer(timeout())
        .layer(cors());
    limited(
        "limits outside of layers that keep the body",
        &serve(routes().layer(of_plain)).await,
    )
    .await;
}

/// The layer makes the refusal, so only an outer layer compresses it.
#[tokio::test]
async fn compression_outside_of_the_limits_compresses_refusals() {
    for (is_outside, app) in [
        (
            true,
            routes().layer(limits()).layer(CompressionLayer::new()),
        ),
        (
            false,
            routes().layer(CompressionLayer::new()).layer(limits()),
        ),
    ] {
        let answers = limited("compression", &serve(app).await).await;
        let is_compressed = answers
            .each_ref()
            .map(|answer| answer.headers.contains_key("content-encoding"));
        assert_eq!(is_compressed, [true, true, is_outside]);
    }
}

#[tokio::test]
async fn cors_outside_of_the_limits_shows_refusals_to_browsers() {
    for app in [
        routes().layer(limits()).layer(cors()),
        routes().layer(ServiceBuilder::new().layer(cors()).layer(limits())),
    ] {
        let url = serve(app).await;
        assert_preflight_is_free(&url).await;
        for answer in limited("CORS outside", &url).await {
            assert_eq!(answer.headers["access-control-allow-origin"], "*");
            let exposed = answer.headers["access-control-expose-headers"]
                .to_str()
                .unwrap();
            assert!(
                exposed_headers()
                    .iter()
                    .all(|name| exposed.contains(name.as_str())),
                "{exposed}"
            );
        }
    }
}

#[tokio::test]
async fn cors_inside_of_the_limits_answers_preflights_if_they_are_skipped_and_hides_refusals() {
    let limits = || limits().exempt(|request| request.method == Method::OPTIONS);
    for app in [
        routes().layer(cors()).layer(limits()),
        routes().layer(ServiceBuilder::new().layer(limits()).layer(cors())),
    ] {
        let url = serve(app).await;
        assert_preflight_is_free(&url).await;
        let answers = limited("CORS inside", &url).await;
        let is_readable =
            answers.map(|answer| answer.headers.contains_key("access-control-allow-origin"));
        assert_eq!(is_readable, [true, true, false]);
    }
}

/// More preflights than the limit admits. That none was counted shows in the calls that follow.
async fn assert_preflight_is_free(url: &str) {
    let headers = [
        ("origin", "https://example.org"),
        ("access-control-request-method", "GET"),
    ];
    for _ in 0..3 {
        let answer = HttpClient::new()
            .send(Method::OPTIONS.as_str(), url, &headers)
            .await;
        assert_eq!(
            (answer.status.as_u16(), figures(&answer.headers)),
            (200, [None; 4])
        );
        assert_eq!(answer.headers["access-control-allow-origin"], "*");
    }
}

/// A handler that is too slow has been charged. A layer that waits for its store has not answered
/// yet.
#[tokio::test]
async fn a_timeout_covers_the_decision_only_outside_of_the_limits() {
    let timeout =
        || TimeoutLayer::with_status_code(StatusCode::REQUEST_TIMEOUT, Duration::from_millis(50));
    let slow = Router::new().route("/", get(|| sleep(TEST_TIMEOUT)));
    let answer = HttpClient::new()
        .get(&serve(slow.layer(timeout()).layer(limits())).await)
        .await;
    assert_eq!(
        (
            answer.status.as_u16(),
            answer.number("x-ratelimit-remaining")
        ),
        (408, Some(1))
    );
    let answer = HttpClient::new()
        .get(&serve(routes().layer(on(silent())).layer(timeout())).await)
        .await;
    assert_eq!(
        (
            answer.status.as_u16(),
            answer.number("x-ratelimit-remaining")
        ),
        (408, None)
    );
}

#[tokio::test]
async fn a_trace_outside_of_the_limits_reports_refusals() {
    for (is_outside, app) in [
        (true, routes().layer(limits()).layer(trace())),
        (false, routes().layer(trace()).layer(limits())),
    ] {
        let log = Log::start();
        limited("trace", &serve(app).await).await;
        let log = log.text();
        assert!(log.contains("status=200"), "{log}");
        assert_eq!(log.contains("status=429"), is_outside, "{log}");
    }
}

async fn hello(_: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    Ok(Response::new(Full::from("hello ".repeat(20))))
}

/// Serves a tower service by hyper alone, until the test ends.
async fn serve_by_hyper<S, B>(service: S) -> String
where
    S: Service<Request<Incoming>, Response = Response<B>, Error = Infallible>
        + Clone
        + Send
        + 'static,
    S::Future: Send,
    B: HttpBody<Data: Send, Error: Into<Box<dyn std::error::Error + Send + Sync>>> + Send + 'static,
{
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let service = TowerToHyperService::new(service.clone());
            tokio::spawn(http1::Builder::new().serve_connection(TokioIo::new(stream), service));
        }
    });
    url
}

#[tokio::test]
async fn a_tower_stack_under_hyper_serves_and_refuses_in_each_order() {
    let inside = ServiceBuilder::new()
        .layer(trace())
        .layer(CompressionLayer::new())
        .layer(limits());
    limited(
        "limits inside",
        &serve_by_hyper(inside.service(service_fn(hello))).await,
    )
    .await;
    let outside = ServiceBuilder::new()
        .layer(limits())
        .map_response(|response: Response<_>| response.map(Body::new))
        .layer(trace())
        .layer(CompressionLayer::new());
    limited(
        "limits outside",
        &serve_by_hyper(outside.service(service_fn(hello))).await,
    )
    .await;
}

#[tokio::test]
async fn a_body_that_is_not_made_of_a_string_is_made_by_a_closure() {
    let boxed = |rejection: &Rejection, head: Response<()>| {
        rejection
            .problem(head)
            .map(|text| BoxBody::<Bytes, Infallible>::new(Full::from(text)))
    };
    let stack = ServiceBuilder::new()
        .layer(limits().respond_with(boxed))
        .map_response(|response: Response<Full<Bytes>>| response.map(BodyExt::boxed));
    let answers = limited(
        "a boxed body",
        &serve_by_hyper(stack.service(service_fn(hello))).await,
    )
    .await;
    let bodies = answers.map(|answer| answer.body);
    assert!(
        bodies[2].contains("\"violated-policies\":[\"calls\"]"),
        "{bodies:?}"
    );
}
