//! Stacked layers: a layer adds to what the layers further out have left on a request.

use std::{
    convert::Infallible,
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{Extension, Router, body::Body, extract::ws::WebSocketUpgrade, routing::any};
use http::{Request, Response};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::{sleep, timeout},
};
use tower::{Layer, ServiceExt, retry, service_fn};
use tower_sliding_window::{
    Charge, Check, Decision, Key, Limit, Limiter, MemoryStore, RateLimitLayer, RedisStore,
    limiter::Share, middleware::Degraded, settlement::Settlement, testing::Fault,
};

use crate::support::{
    TEST_TIMEOUT,
    http_server::serve,
    log::Log,
    ms,
    redis_server::RedisServer,
    requests::{anyone, request},
    services::{App, around},
    stores::with_fault,
};

const FOR_ALL: Limit = Limit::concurrent("for-all", 1);
const OF_CLIENT: Limit = Limit::concurrent("of-client", 100);
const CALLS: Limit = Limit::per_hour("calls", 1_000);

fn key() -> Key {
    anyone(&request().into_parts().0).unwrap()
}

async fn used(limiter: &Limiter, limit: &Limit) -> u64 {
    limiter.peek(limit, key()).await.unwrap().binding().used
}

async fn until_free(limiter: &Limiter, limit: &Limit) {
    let free = async {
        while used(limiter, limit).await > 0 {
            sleep(ms(5)).await;
        }
    };
    timeout(TEST_TIMEOUT, free).await.unwrap();
}

/// The handler of the guide.
async fn socket(
    place: Option<Extension<Decision>>,
    upgrade: WebSocketUpgrade,
) -> axum::response::Response {
    upgrade.on_upgrade(async move |mut socket| {
        while let Some(Ok(message)) = socket.recv().await {
            if socket.send(message).await.is_err() {
                break;
            }
        }
        drop(place);
    })
}

/// `None` if the server refuses the socket.
async fn connect(url: &str) -> Option<TcpStream> {
    let mut socket = TcpStream::connect(url.trim_start_matches("http://"))
        .await
        .unwrap();
    let fields = "host: app\r\nconnection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n\
        sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==";
    socket
        .write_all(format!("GET / HTTP/1.1\r\n{fields}\r\n\r\n").as_bytes())
        .await
        .unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(socket.read_u8().await.unwrap());
    }
    head.starts_with(b"HTTP/1.1 101 ").then_some(socket)
}

/// Ten clients connect to a server with these layers, from the outside in. The number of open
/// sockets.
async fn open_sockets(limiter: &Limiter, limits: &[Limit]) -> usize {
    let layers = limits
        .iter()
        .rev()
        .map(|limit| RateLimitLayer::new(limiter.clone()).limit(limit.clone().by(anyone)));
    let url = serve(layers.fold(Router::new().route("/", any(socket)), Router::layer)).await;
    let mut sockets = Vec::new();
    for _ in 0..10 {
        sockets.push(connect(&url).await);
        // The layers have dropped their own clones.
        sleep(ms(10)).await;
    }
    let open = sockets.iter().flatten().count();
    for limit in limits.iter().filter(|limit| limit.name() != CALLS.name()) {
        assert_eq!(used(limiter, limit).await, open as u64, "{limit:?}");
    }
    drop(sockets);
    for limit in limits.iter().filter(|limit| limit.name() != CALLS.name()) {
        until_free(limiter, limit).await;
    }
    let again = timeout(TEST_TIMEOUT, connect(&url)).await.unwrap();
    assert!(
        again.is_some(),
        "a place that was given back is taken again"
    );
    open
}

#[tokio::test]
async fn a_socket_holds_the_places_of_all_layers() {
    let server = RedisServer::start();
    let memory = || Limiter::new(MemoryStore::new());
    let redis =
        Limiter::new(RedisStore::connect(&server.url()).await.unwrap()).deadline(TEST_TIMEOUT);
    let mut open = Vec::new();
    open.push(open_sockets(&memory(), &[FOR_ALL, CALLS]).await);
    open.push(open_sockets(&memory(), &[CALLS, FOR_ALL]).await);
    open.push(open_sockets(&memory(), &[FOR_ALL, OF_CLIENT]).await);
    open.push(open_sockets(&memory(), &[CALLS, FOR_ALL, OF_CLIENT]).await);
    open.push(open_sockets(&memory(), &[FOR_ALL, CALLS, OF_CLIENT]).await);
    open.push(open_sockets(&redis, &[OF_CLIENT, FOR_ALL, CALLS]).await);
    assert_eq!(open, [1; 6]);
}

/// The decisions that requests have in the innermost service.
#[derive(Clone, Default)]
struct Seen(Arc<Mutex<Vec<Option<Decision>>>>);

impl Seen {
    fn handler(&self) -> App {
        let seen = Arc::clone(&self.0);
        App::new(service_fn(move |mut request: Request<Body>| {
            seen.lock().unwrap().push(request.extensions_mut().remove());
            async { Ok::<_, Infallible>(Response::new(Body::from("hello"))) }
        }))
    }

    fn last(&self) -> Decision {
        self.0.lock().unwrap().pop().unwrap().unwrap()
    }
}

fn names(decision: &Decision) -> Vec<&str> {
    decision
        .statuses()
        .map(|status| status.limit.name())
        .collect()
}

#[tokio::test]
async fn the_decision_is_that_of_three_layers() {
    let (limiter, seen) = (Limiter::new(MemoryStore::new()), Seen::default());
    let layer = || RateLimitLayer::new(limiter.clone());
    let app = around(
        &layer().limit(CALLS.by(anyone)).limit(OF_CLIENT.by(anyone)),
        seen.handler(),
    );
    let tried = Limit::per_hour("tried", 1);
    let app = around(
        &layer()
            .limit(Limit::per_hour("least", 5).by(anyone))
            .limit(tried.by(anyone).in_shadow()),
        app,
    );
    let app = around(
        &layer()
            .limit(FOR_ALL.by(anyone))
            .limit(Limit::per_hour("secret", 3).by(anyone).hidden()),
        app,
    );
    drop(app.clone().oneshot(request()).await.unwrap());
    drop(seen.last());
    drop(app.oneshot(request()).await.unwrap());
    let decision = seen.last();
    assert_eq!(
        names(&decision),
        ["calls", "of-client", "least", "tried", "for-all", "secret"]
    );
    assert!(decision.is_allowed() && decision.holds_place() && !decision.has_lost_place());
    assert_eq!(
        (
            decision.binding().limit.name(),
            decision.remaining(),
            decision.binding().used
        ),
        ("secret", 1, 2)
    );
    assert_eq!(
        decision.visible().map(|status| status.limit.name()),
        Some("least")
    );
    assert_eq!(
        decision
            .shadow_refusals()
            .map(|status| status.limit.name())
            .collect::<Vec<_>>(),
        ["tried"]
    );
    let mut headers = http::HeaderMap::new();
    decision.write_headers(tower_sliding_window::HeaderSets::BOTH, &mut headers);
    assert_eq!(headers["x-ratelimit-remaining"], "3");
    assert!(
        headers["ratelimit-policy"]
            .to_str()
            .unwrap()
            .contains("for-all"),
        "{headers:?}"
    );
    // Both places until the last clone is dropped.
    let clone = decision.clone();
    drop(decision);
    assert_eq!(
        (
            used(&limiter, &FOR_ALL).await,
            used(&limiter, &OF_CLIENT).await
        ),
        (1, 1)
    );
    drop(clone);
    assert_eq!(
        (
            used(&limiter, &FOR_ALL).await,
            used(&limiter, &OF_CLIENT).await
        ),
        (0, 0)
    );
}

/// A layer settles its own admission, whatever the layers around it and in it do.
#[tokio::test]
async fn each_layer_settles_and_resets_its_own_limits() {
    let (limiter, seen) = (Limiter::new(MemoryStore::new()), Seen::default());
    let [outer, inner] =
        ["outer", "inner"].map(|name| Limit::new(name, 100, Duration::from_secs(3_600)).unwrap());
    let layer = |limit: &Limit, before, after| {
        let limit = limit
            .clone()
            .by(anyone)
            .cost(move |_| before)
            .settle(move |_| after);
        RateLimitLayer::new(limiter.clone())
            .limit(limit)
            .limit(OF_CLIENT.by(anyone))
    };
    let outermost = layer(&outer, 10, 3);
    let app = around(&outermost, around(&layer(&inner, 20, 7), seen.handler()));
    for requests in 1..=3 {
        let response = app.clone().oneshot(request()).await.unwrap();
        assert_eq!(
            used(&limiter, &OF_CLIENT).await,
            2,
            "two layers, two places"
        );
        drop(response);
        assert_eq!(
            used(&limiter, &OF_CLIENT).await,
            2,
            "the handler has kept both"
        );
        let decision = seen.last();
        assert_eq!(decision.binding().used, 20 + 7 * (requests - 1));
        drop(decision);
        assert_eq!(used(&limiter, &OF_CLIENT).await, 0);
        assert_eq!(
            (used(&limiter, &outer).await, used(&limiter, &inner).await),
            (3 * requests, 7 * requests)
        );
    }
}

/// What a handler settles is the admission of the innermost layer, also if an outer one has decided
/// in the store's place.
#[tokio::test]
async fn a_handler_settles_the_innermost_admission() {
    let (limiter, seen) = (Limiter::new(MemoryStore::new()), Seen::default());
    let app = around(
        &RateLimitLayer::new(limiter.clone())
            .limit(CALLS.by(anyone))
            .cost(|_| 9),
        seen.handler(),
    );
    let outer = RateLimitLayer::new(with_fault(Fault::Fails)).limit(CALLS.by(anyone));
    let app = around(&outer.fail_local(Share::one_of(2)), app);
    assert_eq!(app.oneshot(request()).await.unwrap().status(), 200);
    let decision = seen.last();
    assert!(decision.local_cause().is_some());
    let check = Check::new(Charge::new(CALLS, key(), 9).unwrap());
    let settled = limiter
        .settle(Settlement::new(check, &decision, |_| Some(2)))
        .await
        .unwrap();
    assert!(settled.was_applied);
    assert_eq!(used(&limiter, &CALLS).await, 2);
}

/// Three tries, whatever the response.
#[derive(Clone)]
struct Thrice(u8);

impl retry::Policy<Request<Body>, Response<Body>, Infallible> for Thrice {
    type Future = std::future::Ready<()>;

    fn retry(
        &mut self,
        _: &mut Request<Body>,
        _: &mut Result<Response<Body>, Infallible>,
    ) -> Option<Self::Future> {
        self.0 += 1;
        (self.0 < 3).then(|| std::future::ready(()))
    }

    fn clone_request(&mut self, request: &Request<Body>) -> Option<Request<Body>> {
        let mut clone = Request::new(Body::empty());
        *clone.extensions_mut() = request.extensions().clone();
        Some(clone)
    }
}

#[tokio::test]
async fn each_try_of_a_retry_layer_has_its_own_decision_within_the_outer_one() {
    let (limiter, seen, log) = (
        Limiter::new(MemoryStore::new()),
        Seen::default(),
        Log::start(),
    );
    let layer = |limit: Limit| RateLimitLayer::new(limiter.clone()).limit(limit.by(anyone));
    let app =
        App::new(retry::RetryLayer::new(Thrice(0)).layer(around(&layer(CALLS), seen.handler())));
    let app = around(&layer(FOR_ALL), app);
    drop(app.clone().oneshot(request()).await.unwrap());
    let tries: Vec<_> = std::iter::repeat_with(|| seen.last()).take(3).collect();
    assert!(seen.0.lock().unwrap().is_empty());
    for (decision, used) in tries.iter().zip([3, 2, 1]) {
        assert_eq!(names(decision), ["calls", "for-all"]);
        assert_eq!(decision.statuses().next().unwrap().used, used);
    }
    let mut tries = tries.into_iter();
    for held in [1, 1, 0] {
        drop(tries.next());
        assert_eq!(
            used(&limiter, &FOR_ALL).await,
            held,
            "until the last of them is dropped"
        );
    }
    // Around both layers: each try passes both anew.
    let app = retry::RetryLayer::new(Thrice(0)).layer(around(&layer(OF_CLIENT), seen.handler()));
    drop(app.oneshot(request()).await.unwrap());
    assert_eq!(names(&seen.last()), ["of-client"]);
    assert!(!log.text().contains("twice"), "{}", log.text());
}

#[tokio::test]
async fn a_layer_without_a_decision_leaves_that_of_the_others() {
    let (limiter, seen) = (Limiter::new(MemoryStore::new()), Seen::default());
    let working = RateLimitLayer::new(limiter.clone()).limit(FOR_ALL.by(anyone));
    let broken =
        |limit: Limit| RateLimitLayer::new(with_fault(Fault::Fails)).limit(limit.by(anyone));
    let stacks: [(&str, RateLimitLayer, &[&str], bool); 2] = [
        ("open", broken(OF_CLIENT).fail_open(), &["for-all"], false),
        (
            "local",
            broken(OF_CLIENT).fail_local(Share::one_of(2)),
            &["of-client", "for-all"],
            true,
        ),
    ];
    for (mode, failing, expected, is_local) in stacks {
        for (is_outer, outer, inner) in [(true, &failing, &working), (false, &working, &failing)] {
            let what = format!(
                "fail-{mode}, {}",
                if is_outer { "outside" } else { "inside" }
            );
            let response = around(outer, around(inner, seen.handler()))
                .oneshot(request())
                .await
                .unwrap();
            assert!(response.extensions().get::<Degraded>().is_some(), "{what}");
            drop(response);
            let decision = seen.last();
            let mut names = names(&decision);
            names.sort_by(|one, other| other.cmp(one));
            assert_eq!(names, expected, "{what}");
            assert_eq!(decision.local_cause().is_some(), is_local, "{what}");
            assert!(decision.holds_place(), "{what}");
            assert_eq!(used(&limiter, &FOR_ALL).await, 1, "{what}");
            drop(decision);
            assert_eq!(used(&limiter, &FOR_ALL).await, 0, "{what}");
        }
    }
    // A layer that fails closed rejects, and gives back what the layers around it hold.
    for (outer, inner) in [
        (&working, &broken(CALLS).fail_closed()),
        (&broken(CALLS).fail_closed(), &working),
    ] {
        let response = around(outer, around(inner, seen.handler()))
            .oneshot(request())
            .await
            .unwrap();
        assert_eq!(response.status(), 503);
        drop(response);
        assert_eq!(used(&limiter, &FOR_ALL).await, 0);
    }
}

/// A place is lost if that of any layer is.
#[tokio::test]
async fn a_place_of_an_outer_layer_may_be_lost() {
    let (server, seen) = (RedisServer::start(), Seen::default());
    let redis =
        Limiter::new(RedisStore::connect(&server.url()).await.unwrap()).deadline(TEST_TIMEOUT);
    let short = FOR_ALL.freed_after(Duration::from_secs(1));
    let app = around(
        &RateLimitLayer::new(MemoryStore::new()).limit(OF_CLIENT.by(anyone)),
        seen.handler(),
    );
    let app = around(&RateLimitLayer::new(redis).limit(short.by(anyone)), app);
    drop(app.oneshot(request()).await.unwrap());
    let decision = seen.last();
    assert!(decision.holds_place() && !decision.has_lost_place());
    server.pause();
    timeout(TEST_TIMEOUT, async {
        while !decision.has_lost_place() {
            sleep(ms(20)).await;
        }
    })
    .await
    .unwrap();
    server.resume();
}

/// Of all layers that could not decide, each has its report.
#[tokio::test]
async fn a_report_of_failure_keeps_those_of_the_layers_further_in() {
    let broken = |name| {
        let layer = RateLimitLayer::new(with_fault(Fault::Fails));
        layer.limit(
            Limit::new(name, 5, Duration::from_secs(60))
                .unwrap()
                .by(anyone),
        )
    };
    let app = around(&broken("inner"), Seen::default().handler());
    let app = around(&broken("middle").fail_local(Share::one_of(2)), app);
    let app = around(&broken("outer").fail_open(), app);
    let response = app.oneshot(request()).await.unwrap();
    let outer = response.extensions().get::<Degraded>().unwrap();
    let inner = std::iter::successors(Some(outer), |degraded| degraded.inner.as_deref());
    let modes: Vec<_> = inner
        .map(|degraded| format!("{:?}", degraded.mode))
        .collect();
    assert_eq!(
        modes.iter().map(|mode| &mode[..4]).collect::<Vec<_>>(),
        ["Open", "Loca", "Open"]
    );
}

#[tokio::test]
async fn one_layer_in_two_places_is_said_once() {
    let (limiter, log) = (Limiter::new(MemoryStore::new()), Log::start());
    let layer = RateLimitLayer::new(limiter.clone())
        .limit(CALLS.by(anyone))
        .named("api");
    let nested = Router::new()
        .route("/items", any(async || "items"))
        .layer(layer.clone());
    // Other layers between the two make no difference.
    let other = RateLimitLayer::new(limiter.clone())
        .limit(CALLS.by(anyone))
        .limit(OF_CLIENT.by(anyone));
    let app = Router::new().nest("/api", nested).layer(other).layer(layer);
    for _ in 0..3 {
        let request = Request::get("/api/items").body(Body::empty()).unwrap();
        assert_eq!(app.clone().oneshot(request).await.unwrap().status(), 200);
    }
    let lines = log.text();
    let told: Vec<_> = lines
        .lines()
        .filter(|line| line.contains("twice"))
        .collect();
    assert_eq!(told.len(), 1, "{lines}");
    for word in [
        "WARN",
        "layer=\"api\"",
        "limits=\"calls\"",
        "remove it from the outer router or the inner one",
    ] {
        assert!(told[0].contains(word), "{word}: {}", told[0]);
    }
}

/// Two layers of one limit may be meant.
#[tokio::test]
async fn two_layers_of_one_limit_are_not_one_layer() {
    let (limiter, log, seen) = (
        Limiter::new(MemoryStore::new()),
        Log::start(),
        Seen::default(),
    );
    let layer = RateLimitLayer::new(limiter.clone()).limit(CALLS.by(anyone));
    let of_another = RateLimitLayer::new(limiter).limit(CALLS.by(anyone));
    let app = around(&layer, around(&of_another, seen.handler()));
    assert_eq!(app.oneshot(request()).await.unwrap().status(), 200);
    // And one after the other is not one in the other.
    for _ in 0..2 {
        assert_eq!(
            around(&layer, seen.handler())
                .oneshot(request())
                .await
                .unwrap()
                .status(),
            200
        );
    }
    assert!(!log.text().contains("twice"), "{}", log.text());
}
