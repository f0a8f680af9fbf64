//! Which bodies hold places of concurrent limits: any box, and those that are buffered whole need
//! not.

use std::{
    convert::Infallible,
    fmt::Debug,
    future::ready,
    io,
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Poll},
};

use axum::body::Body;
use futures_util::future::join_all;
use http::{Request, Response};
use http_body::Frame;
use http_body_util::{
    BodyExt, Channel, Empty, Full,
    combinators::{BoxBody, UnsyncBoxBody},
};
use hyper::body::Bytes;
use tower::{Layer, ServiceExt, service_fn};
use tower_sliding_window::{Limit, Limiter, MemoryStore, RateLimitLayer, Rejection};

use crate::support::{
    TEST_TIMEOUT,
    http_client::HttpClient,
    http_server::serve_by_hyper,
    log::Log,
    ms,
    requests::{anyone, request},
};

const STREAMS: Limit = Limit::concurrent("streams", 1);

fn layer(limiter: &Limiter) -> RateLimitLayer {
    RateLimitLayer::new(limiter.clone()).limit(STREAMS.by(anyone))
}

async fn held(limiter: &Limiter) -> u64 {
    limiter
        .peek(&STREAMS, anyone(&request().into_parts().0).unwrap())
        .await
        .unwrap()
        .binding()
        .used
}

/// A body that is nobody's.
struct Own<B>(B);

impl<B: http_body::Body + Unpin> http_body::Body for Own<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        Pin::new(&mut self.0).poll_frame(cx)
    }
}

/// One frame, its place, and another that waits for it.
async fn holds<B>(box_of: fn(Channel<Bytes, io::Error>) -> B)
where
    B: http_body::Body<Data: Debug, Error: Debug> + Unpin + 'static,
{
    let (limiter, senders) = (
        Limiter::new(MemoryStore::new()),
        Arc::new(Mutex::new(Vec::new())),
    );
    let begun = Arc::clone(&senders);
    let service = service_fn(move |_: Request<Body>| {
        let (sender, body) = Channel::new(1);
        begun.lock().unwrap().push(sender);
        async move { Ok::<_, Infallible>(Response::new(box_of(body))) }
    });
    let responder =
        move |_: &Rejection, head: Response<()>| head.map(|()| box_of(Channel::new(1).1));
    let service = layer(&limiter).respond_with(responder).layer(service);
    let response = service.clone().oneshot(request()).await.unwrap();
    assert_eq!((response.status().as_u16(), held(&limiter).await), (200, 1));
    assert_eq!(
        service.clone().oneshot(request()).await.unwrap().status(),
        429
    );
    let mut body = response.into_body();
    let mut sender = senders.lock().unwrap().remove(0);
    sender.send_data("data".into()).await.unwrap();
    assert!(body.frame().await.unwrap().unwrap().into_data().is_ok());
    assert_eq!(held(&limiter).await, 1);
    drop(sender);
    assert!(body.frame().await.is_none());
    assert_eq!(held(&limiter).await, 0, "the body has ended");
    let response = service.clone().oneshot(request()).await.unwrap();
    assert_eq!(held(&limiter).await, 1);
    drop(response);
    assert_eq!(held(&limiter).await, 0, "the client has left");
    let early = layer(&limiter).respond_with(responder).free_with_head();
    let response = early.layer(service_fn(move |_: Request<Body>| async move {
        Ok::<_, Infallible>(Response::new(box_of(Channel::new(1).1)))
    }));
    let response = response.oneshot(request()).await.unwrap();
    assert_eq!((response.status().as_u16(), held(&limiter).await), (200, 0));
}

#[tokio::test]
async fn any_box_of_a_body_holds_places() {
    holds(BoxBody::new).await;
    holds(UnsyncBoxBody::new).await;
    // Of another error.
    holds(|body| BoxBody::new(body.map_err(|error: io::Error| error.to_string()))).await;
    holds(Body::new).await;
    #[cfg(feature = "grpc")]
    holds(|body| {
        tonic::body::Body::new(body.map_err(|error| tonic::Status::unknown(error.to_string())))
    })
    .await;
}

/// hyper takes all of such a body at once.
async fn frees<B: http_body::Body + Default + 'static>() {
    let limiter = Limiter::new(MemoryStore::new());
    let guard = layer(&limiter)
        .respond_with(|_: &Rejection, head: Response<()>| head.map(|()| B::default()));
    let service = guard.layer(service_fn(async |_: Request<Body>| {
        Ok::<_, Infallible>(Response::new(B::default()))
    }));
    let response = service.oneshot(request()).await.unwrap();
    assert_eq!((response.status().as_u16(), held(&limiter).await), (200, 0));
    drop(response);
}

#[tokio::test]
async fn a_body_that_is_buffered_whole_holds_none() {
    frees::<String>().await;
    frees::<Full<Bytes>>().await;
    frees::<Full<&[u8]>>().await;
    frees::<Empty<Bytes>>().await;
}

fn own(text: &str) -> Own<Full<Bytes>> {
    Own(Full::from(text.to_owned()))
}

#[tokio::test]
async fn a_body_that_cannot_hold_a_place_is_rejected_with_the_words_to_write() {
    let (log, limiter) = (Log::start(), Limiter::new(MemoryStore::new()));
    let guard = |layer: RateLimitLayer| {
        let guard = layer.respond_with(|rejection: &Rejection, head: Response<()>| {
            head.map(|()| own(&rejection.detail()))
        });
        guard.layer(service_fn(|_: Request<Body>| {
            ready(Ok::<_, Infallible>(Response::new(own("hello"))))
        }))
    };
    let response = guard(layer(&limiter).named("own"))
        .oneshot(request())
        .await
        .unwrap();
    assert_eq!((response.status().as_u16(), held(&limiter).await), (500, 0));
    let text = response.into_body().0.collect().await.unwrap().to_bytes();
    assert_eq!(
        text, "The server has made a mistake.",
        "the client learns nothing of the server"
    );
    let lines = log.text();
    assert_eq!(
        lines.lines().filter(|line| line.contains("ERROR")).count(),
        1,
        "{lines}"
    );
    for word in [
        "Own<",
        ".map_response(",
        "BoxBody::new",
        ".free_with_head()",
        "layer=\"own\"",
    ] {
        assert!(lines.contains(word), "{word}: {lines}");
    }
    let early = guard(layer(&limiter).free_with_head())
        .oneshot(request())
        .await
        .unwrap();
    assert_eq!((early.status().as_u16(), held(&limiter).await), (200, 0));
    // Without places, any body will do.
    let window = RateLimitLayer::new(limiter.clone()).limit(Limit::per_hour("calls", 9).by(anyone));
    assert_eq!(
        guard(window).oneshot(request()).await.unwrap().status(),
        200
    );
    // A limit in the shadow refuses nothing. It says so all the same.
    let shadow = RateLimitLayer::new(limiter.clone())
        .limit(STREAMS.by(anyone).in_shadow())
        .named("shadow");
    assert_eq!(
        guard(shadow).oneshot(request()).await.unwrap().status(),
        200
    );
    assert!(log.text().contains("layer=\"shadow\""), "{}", log.text());
}

/// Three streams under a limit of one, on hyper.
#[tokio::test]
async fn hyper_has_one_stream_open_under_a_limit_of_one() {
    let (limiter, senders) = (
        Limiter::new(MemoryStore::new()),
        Arc::new(Mutex::new(Vec::new())),
    );
    let begun = Arc::clone(&senders);
    let service = service_fn(move |_: Request<Body>| {
        let (sender, body) = Channel::<Bytes, io::Error>::new(1);
        begun.lock().unwrap().push(sender);
        async move { Ok::<_, Infallible>(Response::new(BoxBody::new(body))) }
    });
    let responder = |_: &Rejection, head: Response<()>| {
        head.map(|()| BoxBody::new(Empty::new().map_err(|never| match never {})))
    };
    let url = serve_by_hyper(layer(&limiter).respond_with(responder).layer(service)).await;
    for client in [HttpClient::new(), HttpClient::http2()] {
        let streams = join_all((0..3).map(|_| client.open("GET", &url, &[], ""))).await;
        let open = streams
            .iter()
            .filter(|stream| stream.status() == 200)
            .count();
        assert_eq!((open, held(&limiter).await), (1, 1));
        drop(streams);
        senders.lock().unwrap().clear();
        let free = async {
            while held(&limiter).await > 0 {
                tokio::time::sleep(ms(5)).await;
            }
        };
        tokio::time::timeout(TEST_TIMEOUT, free).await.unwrap();
    }
}
