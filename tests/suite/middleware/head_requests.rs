//! Rejections of `HEAD` have the headers of a rejected `GET`, and no content.

use std::convert::Infallible;

use axum::{Router, body::Body, routing::get};
use http::{Request, Response};
use http_body_util::{BodyExt, Full, combinators::BoxBody};
use hyper::body::Bytes;
use tower::{Layer, service_fn};
use tower_sliding_window::{
    Limit, MemoryStore, RateLimitLayer, Rejection, middleware::RejectionResponse,
};

use crate::support::{http_client::HttpClient, http_server::serve_by_hyper, requests::anyone};

fn layer() -> RateLimitLayer {
    RateLimitLayer::new(MemoryStore::new()).limit(Limit::per_hour("calls", 1).by(anyone))
}

/// Asks for `HEAD` and `GET` over both versions.
async fn asks(what: &str, url: &str) {
    for (version, client) in [
        ("HTTP/1.1", HttpClient::new()),
        ("HTTP/2", HttpClient::http2()),
    ] {
        let what = format!("{what} over {version}");
        client.get(url).await;
        // The second one finds the connection as the first has left it.
        for _ in 0..2 {
            let head = client.send("HEAD", url, &[]).await;
            assert_eq!((head.status.as_u16(), &*head.body), (429, ""), "{what}");
            let get = client.get(url).await;
            assert_eq!(
                (get.status.as_u16(), get.body.is_empty()),
                (429, false),
                "{what}"
            );
            for name in [
                "retry-after",
                "x-ratelimit-limit",
                "cache-control",
                "content-type",
                "content-length",
            ] {
                assert_eq!(
                    head.headers.get(name),
                    get.headers.get(name),
                    "{what}: {name}"
                );
            }
            assert_eq!(
                get.number("content-length"),
                Some(get.body.len() as u64),
                "{what}"
            );
        }
    }
}

async fn asks_a_service<B>(
    what: &str,
    layer: RateLimitLayer<impl RejectionResponse<B> + Send + Sync + 'static>,
) where
    B: http_body::Body<Data = Bytes, Error = Infallible> + From<&'static str> + Send + 'static,
{
    let service =
        service_fn(async |_: Request<Body>| Ok::<_, Infallible>(Response::new(B::from("hello"))));
    asks(what, &serve_by_hyper(layer.layer(service)).await).await;
}

#[tokio::test]
async fn a_rejection_of_head_has_no_content() {
    let router = || Router::new().route("/", get(async || "hello"));
    asks(
        "around a router",
        &serve_by_hyper(layer().layer(router())).await,
    )
    .await;
    asks(
        "on a router",
        &serve_by_hyper(router().layer(layer())).await,
    )
    .await;
    asks_a_service::<Full<Bytes>>("a buffer", layer()).await;
    asks_a_service::<String>("a text", layer()).await;
    let closure = |rejection: &Rejection, head: Response<()>| {
        rejection
            .problem(head)
            .map(|text| BoxBody::<Bytes, Infallible>::new(Full::from(text)))
    };
    let service = service_fn(async |_: Request<Body>| {
        Ok::<_, Infallible>(Response::new(BoxBody::<Bytes, Infallible>::new(
            Full::from("hello"),
        )))
    });
    let service = layer().respond_with(closure).layer(service);
    asks("a box", &serve_by_hyper(service).await).await;
}

/// A responder may set the length itself.
#[tokio::test]
async fn a_length_that_is_set_stays() {
    let closure = |_: &Rejection, mut head: Response<()>| {
        head.headers_mut().insert("content-length", 5.into());
        head.map(|()| Body::from("brief"))
    };
    let service = layer()
        .respond_with(closure)
        .layer(Router::new().route("/", get(async || "hello")));
    let url = serve_by_hyper(service).await;
    for client in [HttpClient::new(), HttpClient::http2()] {
        client.get(&url).await;
        let head = client.send("HEAD", &url, &[]).await;
        assert_eq!(
            (
                head.status.as_u16(),
                head.number("content-length"),
                &*head.body
            ),
            (429, Some(5), "")
        );
    }
    let response = layer()
        .respond_with(closure)
        .deny(|_| true)
        .layer(Router::new());
    let request = Request::head("/").body(Body::empty()).unwrap();
    let response = tower::ServiceExt::oneshot(response, request).await.unwrap();
    assert!(
        response
            .into_body()
            .collect()
            .await
            .unwrap()
            .to_bytes()
            .is_empty()
    );
}
