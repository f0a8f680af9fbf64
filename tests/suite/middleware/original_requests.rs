//! `OriginalRequestLayer`: a proxy's question becomes the request that it is about, and no client
//! chooses the route, the method or the key by headers of its own.

use std::{
    convert::Infallible,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use axum::{
    Extension, Router,
    body::{Body, to_bytes},
    routing::{get, post},
};
use http::{HeaderName, HeaderValue, Method, Request, Response, StatusCode, request::Parts};
use http_body_util::Full;
use hyper::body::Bytes;
use tower::{Layer, Service, ServiceExt, limit::ConcurrencyLimit, service_fn};
use tower_sliding_window::{
    ClientIp, Decision, Everyone, Limit, MemoryStore, RateLimitLayer, Rejection, middleware::OriginalRequestLayer,
};

use crate::support::{
    http_client::HttpClient,
    requests::{figures, json},
};

const PROXY: &str = "10.0.0.1";

const LOGINS: Limit = Limit::per_hour("logins", 2);

/// The headers from which servers and applications take a path or a method.
const WELL_KNOWN: [&str; 6] =
    ["x-forwarded-method", "x-forwarded-uri", "x-original-method", "x-original-uri", "x-original-url", "x-rewrite-url"];

fn behind() -> OriginalRequestLayer {
    OriginalRequestLayer::behind(["10.0.0.0/28", "2001:db8:ffff::/64"]).unwrap()
}

fn question(method: &str, uri: &str, peer: &str, lines: &[(&str, &str)]) -> Request<Body> {
    let mut request = Request::builder().method(method).uri(uri).body(Body::from("a body")).unwrap();
    for (name, value) in lines {
        request
            .headers_mut()
            .append(HeaderName::try_from(*name).unwrap(), HeaderValue::from_bytes(value.as_bytes()).unwrap());
    }
    request.extensions_mut().insert(SocketAddr::new(peer.parse().unwrap(), 50_000));
    request
}

fn asked(method: &str, path: &str) -> Request<Body> {
    question("GET", "/auth", PROXY, &[("x-forwarded-method", method), ("x-forwarded-uri", path)])
}

/// Answers with the request as it has come: its method, its URI, the names of its headers, and its
/// body.
async fn echo(request: Request<Body>) -> Result<Response<Body>, Infallible> {
    let (parts, body) = request.into_parts();
    let body = to_bytes(body, 99).await.unwrap();
    let mut names: Vec<_> = parts.headers.keys().map(HeaderName::as_str).collect();
    names.sort_unstable();
    let Parts { method, uri, .. } = &parts;
    Ok(Response::new(Body::from(format!("{method} {uri} {names:?} {body:?}"))))
}

/// The status and the body of the answer.
async fn answer(layer: &OriginalRequestLayer, request: Request<Body>) -> (u16, String) {
    let response = layer.layer(service_fn(echo)).oneshot(request).await.unwrap();
    (response.status().as_u16(), json(response).await)
}

#[tokio::test]
async fn the_service_gets_the_method_the_path_and_the_query_of_the_pair() {
    for (method, path) in [
        ("POST", "/login"),
        ("GET", "/search?q=a%20b&page=2"),
        ("DELETE", "//double"),
        ("PURGE", "/a/../b;c=d"),
        ("HEAD", "/%E4%BD%A0?%2F"),
    ] {
        let (status, text) = answer(&behind(), asked(method, path)).await;
        assert_eq!((status, text), (200, format!("{method} {path} [] b\"\"")));
    }
    let long = format!("/search?q={}", "a".repeat(20_000));
    assert_eq!(answer(&behind(), asked("GET", &long)).await.0, 200);
}

#[tokio::test]
async fn a_named_pair_is_read_instead() {
    let layer = behind().headers("x-original-method", HeaderName::from_static("x-original-uri"));
    let lines = [("x-original-method", "PUT"), ("x-original-uri", "/a?b"), ("x-kept", "1")];
    assert_eq!(answer(&layer, question("GET", "/auth", PROXY, &lines)).await.1, r#"PUT /a?b ["x-kept"] b"""#);
    let layer = behind().headers("x-method", "x-path");
    let lines = [("x-method", "PUT"), ("x-path", "/a?b")];
    assert_eq!(answer(&layer, question("GET", "/auth", PROXY, &lines)).await.1, r#"PUT /a?b [] b"""#);
}

/// As Envoy asks.
#[tokio::test]
async fn a_request_as_it_was_sent_loses_its_prefix() {
    for (prefix, uri, path) in [
        ("/auth", "/auth/login?a=b", "/login?a=b"),
        ("/auth/", "/auth/login", "/login"),
        ("/auth", "/auth/", "/"),
        ("/auth", "/auth/auth/x", "/auth/x"),
        ("", "/login", "/login"),
        ("/", "/login", "/login"),
        ("/auth", "http://app/auth/login", "/login"),
    ] {
        let (status, text) = answer(&behind().as_sent(prefix), question("PATCH", uri, PROXY, &[])).await;
        assert_eq!((status, text), (200, format!("PATCH {path} [] b\"\"")), "{prefix} {uri}");
    }
    for (prefix, uri) in
        [("/auth", "/login"), ("/auth", "/authentic"), ("/auth", "/auth"), ("/auth", "/auth?a"), ("", "*")]
    {
        let (status, text) = answer(&behind().as_sent(prefix), question("OPTIONS", uri, PROXY, &[])).await;
        assert_eq!(status, 400, "{prefix} {uri}: {text}");
    }
}

/// A proxy passes on each header that it does not write.
#[tokio::test]
async fn no_other_header_chooses_the_route_or_reaches_the_service() {
    let pairs = [
        (behind(), ["x-forwarded-method", "x-forwarded-uri"]),
        (behind().headers("x-original-method", "x-original-uri"), ["x-original-method", "x-original-uri"]),
        (behind().headers("x-original-method", "x-forwarded-uri"), ["x-original-method", "x-forwarded-uri"]),
        (behind().headers("x-ask-method", "x-ask-path"), ["x-ask-method", "x-ask-path"]),
    ];
    for (layer, [method, path]) in pairs {
        for forged in WELL_KNOWN.into_iter().filter(|name| ![method, path].contains(name)) {
            let value = if forged.ends_with("method") { "GET" } else { "/free" };
            let lines = [(method, "POST"), (path, "/login"), (forged, value), (forged, value)];
            let (status, text) = answer(&layer, question("GET", "/auth", PROXY, &lines)).await;
            assert_eq!((status, &*text), (200, r#"POST /login [] b"""#), "{forged}");
        }
    }
    for forged in WELL_KNOWN {
        let value = if forged.ends_with("method") { "GET" } else { "/free" };
        let request = question("POST", "/auth/login", PROXY, &[(forged, value)]);
        assert_eq!(answer(&behind().as_sent("/auth"), request).await.1, r#"POST /login [] b"""#, "{forged}");
    }
}

#[tokio::test]
async fn the_body_of_a_question_and_its_headers_are_removed() {
    let lines = [
        ("x-forwarded-method", "POST"),
        ("x-forwarded-uri", "/"),
        ("content-length", "6"),
        ("transfer-encoding", "chunked"),
        ("expect", "100-continue"),
        ("content-type", "text/plain"),
        ("authorization", "Bearer t0ken"),
    ];
    let (_, text) = answer(&behind(), question("POST", "/auth", PROXY, &lines)).await;
    assert_eq!(text, r#"POST / ["authorization", "content-type"] b"""#);
}

/// All of these, and nothing is charged.
#[tokio::test]
async fn a_question_without_one_readable_pair_gets_a_400_and_is_not_charged() {
    let (method, path) = ("x-forwarded-method", "x-forwarded-uri");
    let mut questions = vec![
        vec![],
        vec![(method, "GET")],
        vec![(path, "/")],
        vec![(method, "GET"), (path, "/"), (path, "/")],
        vec![(method, "GET"), (method, "GET"), (path, "/")],
        vec![("x-original-method", "GET"), ("x-original-uri", "/")],
        vec![(method, "GET"), ("x-original-uri", "/")],
    ];
    let no_paths = [
        "",
        "*",
        "login",
        "?a",
        "http://app/login",
        "https://app/",
        "app:80",
        "/a#b",
        "#",
        "/a b",
        "/a, /b",
        "/a\tb",
        " /a",
        "/<",
        "\\a",
    ];
    questions.extend(no_paths.map(|value| vec![(method, "GET"), (path, value)]));
    questions.extend(
        ["", "GET POST", "GET,POST", " GET", "GET ", "G\u{e9}T", "GET/"]
            .map(|value| vec![(method, value), (path, "/")]),
    );
    let limits = RateLimitLayer::new(MemoryStore::new()).limit(Limit::per_hour("all", 1).by(Everyone));
    let app = behind().layer(Router::new().fallback(get(|| async {})).layer(limits));
    for lines in questions {
        let response = app.clone().oneshot(question("GET", "/auth", PROXY, &lines)).await.unwrap();
        assert_eq!((response.status(), figures(response.headers())), (StatusCode::BAD_REQUEST, [None; 4]), "{lines:?}");
        assert_eq!(response.headers()["content-type"], "application/problem+json");
        assert!(matches!(response.extensions().get(), Some(Rejection::NoKey(_))));
    }
    for status in [200, 429] {
        assert_eq!(app.clone().oneshot(asked("GET", "/")).await.unwrap().status(), status);
    }
}

/// A control character cannot be in a header. It can be in a value that a layer has made.
#[tokio::test]
async fn bytes_that_no_path_has_get_a_400() {
    for byte in (0x80..=0xff).chain([b'\t', b' ', b'"', b'<', b'>', b'^', b'`']) {
        let mut request = asked("GET", "/");
        let Ok(value) = HeaderValue::from_bytes(&[b'/', byte]) else { continue };
        request.headers_mut().insert("x-forwarded-uri", value);
        let (status, text) = answer(&behind(), request).await;
        // A path that hyper would take from a client: the text is the same.
        let is_path = http::Uri::try_from(&[b'/', byte][..]).is_ok();
        assert_eq!(status, if is_path { 200 } else { 400 }, "{byte:#x}: {text}");
    }
}

#[tokio::test]
async fn a_refused_question_says_why() {
    let detail = async |request| answer(&behind(), request).await.1;
    let missing = detail(question("GET", "/auth", PROXY, &[("x-forwarded-method", "GET")])).await;
    assert_eq!(
        missing,
        r#"{"title":"Bad Request","status":400,"detail":"The request cannot be counted: x-forwarded-uri: missing."}"#
    );
    let foreign = detail(question("GET", "/auth", "192.0.2.1", &[])).await;
    assert_eq!(
        foreign,
        r#"{"title":"Forbidden","status":403,"detail":"The request cannot be counted: peer: no proxy of this service."}"#
    );
    let repeated = [("x-forwarded-method", "GET"), ("x-forwarded-uri", "/"), ("x-forwarded-uri", "/free")];
    assert!(detail(question("GET", "/auth", PROXY, &repeated)).await.contains("x-forwarded-uri: repeated"));
    assert!(detail(asked("GET", "login")).await.contains("x-forwarded-uri: no path"));
    assert!(detail(asked("G T", "/")).await.contains("x-forwarded-method: no method"));
}

#[tokio::test]
async fn a_peer_that_is_no_proxy_gets_a_403_whatever_it_sends() {
    let pair = [("x-forwarded-method", "GET"), ("x-forwarded-uri", "/"), ("x-forwarded-for", "10.0.0.1")];
    for layer in [behind(), behind().as_sent("")] {
        for (peer, status) in [
            ("10.0.0.1", 200),
            ("::ffff:10.0.0.1", 200),
            ("2001:db8:ffff::7", 200),
            ("10.0.0.16", 403),
            ("127.0.0.1", 403),
            ("::ffff:10.0.0.16", 403),
            ("2001:db8::7", 403),
        ] {
            assert_eq!(answer(&layer, question("GET", "/", peer, &pair)).await.0, status, "{peer}");
        }
    }
    let nobody = OriginalRequestLayer::behind([""; 0]).unwrap();
    assert_eq!(answer(&nobody, asked("GET", "/")).await.0, 403);
    assert_eq!(
        OriginalRequestLayer::behind(["proxy"]).unwrap_err().to_string(),
        "\"proxy\" is not an address range such as 10.1.2.0/28 or 2001:db8::/32"
    );
}

/// As `ClientIp` does.
#[tokio::test]
async fn a_peer_without_an_address_gets_a_500() {
    let mut request = asked("GET", "/");
    request.extensions_mut().clear();
    let (status, text) = answer(&behind(), request).await;
    assert_eq!((status, text.contains("The server has made a mistake.")), (500, true), "{text}");
}

#[cfg(unix)]
#[tokio::test]
async fn a_unix_socket_has_the_peer_that_the_app_names() {
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::{UnixListener, UnixStream},
    };

    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("http.sock");
    let routes = Router::new().route("/login", post(|| async { "asked" }));
    let app = behind().layer(routes);
    let app = Extension(SocketAddr::new(PROXY.parse().unwrap(), 0)).layer(app);
    let listener = UnixListener::bind(&socket).unwrap();
    let app = axum::ServiceExt::<Request<Body>>::into_make_service(app);
    tokio::spawn(async move { axum::serve(listener, app).await });
    for (path, status) in [("/login", "200"), ("/", "404")] {
        let mut stream = UnixStream::connect(&socket).await.unwrap();
        let head = format!(
            "GET /auth HTTP/1.1\r\nhost: app\r\nx-forwarded-method: POST\r\nx-forwarded-uri: {path}\r\nconnection: close\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        assert_eq!(&answer[9..12], status, "{answer}");
    }
}

/// Over real connections of IPv4 and IPv6: axum names the peer.
#[tokio::test]
async fn a_question_over_a_socket_is_answered() {
    for (address, proxy) in [("127.0.0.1:0", "127.0.0.1"), ("[::1]:0", "::1")] {
        let listener = tokio::net::TcpListener::bind(address).await.unwrap();
        let url = format!("http://{}/auth", listener.local_addr().unwrap());
        let routes = Router::new().route("/login", post(|| async { "asked" }));
        let app = OriginalRequestLayer::behind([proxy]).unwrap().layer(routes);
        let app = axum::ServiceExt::<Request<Body>>::into_make_service_with_connect_info::<SocketAddr>(app);
        tokio::spawn(async move { axum::serve(listener, app).await });
        for client in [HttpClient::new(), HttpClient::http2()] {
            let pair = [("x-forwarded-method", "POST"), ("x-forwarded-uri", "/login")];
            // With a body, which nobody reads, the connection can be used again.
            for body in ["", "a body"] {
                let answer = client.send_with("GET", &url, &pair, body).await;
                assert_eq!((answer.status.as_u16(), &*answer.body), (200, "asked"), "{url}");
            }
            assert_eq!(client.get(&url).await.status, 400, "{url}");
        }
    }
}

/// The routes of an app with limits, in front of which a proxy asks.
fn limited() -> impl Service<Request<Body>, Response = Response<Body>, Error = Infallible, Future: Send> + Clone {
    let client = ClientIp::behind([PROXY]).unwrap();
    let store = MemoryStore::new();
    let login = RateLimitLayer::new(store.clone()).limit(LOGINS.by(client.clone()));
    let all = RateLimitLayer::new(store)
        .limit(Limit::per_hour("all", 100).by(client))
        .cost(|request: &Parts| if request.uri.query() == Some("dear") { 10 } else { 1 })
        .skip(|request: &Parts| request.method == Method::OPTIONS);
    let routes = Router::new().route("/login", post(|| async {}).route_layer(login)).fallback(|| async {});
    behind().layer(routes.layer(all))
}

/// A question of this client, and the figures of the answer.
async fn ask(
    app: &(impl Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone),
    client: &str,
    method: &str,
    path: &str,
) -> (u16, Option<u64>) {
    let lines = [("x-forwarded-method", method), ("x-forwarded-uri", path), ("x-forwarded-for", client)];
    let response = app.clone().oneshot(question("GET", "/auth", PROXY, &lines)).await.unwrap();
    let remaining = response.headers().get("x-ratelimit-remaining");
    (response.status().as_u16(), remaining.map(|left| left.to_str().unwrap().parse().unwrap()))
}

#[tokio::test]
async fn routes_keys_costs_and_skip_see_the_original_request() {
    let app = limited();
    assert_eq!(ask(&app, "203.0.113.1", "POST", "/login").await, (200, Some(1)));
    assert_eq!(ask(&app, "203.0.113.1", "POST", "/login?dear").await, (200, Some(0)));
    assert_eq!(ask(&app, "203.0.113.1", "POST", "/login").await.0, 429);
    // Another method of the route, another path, another client.
    assert_eq!(ask(&app, "203.0.113.1", "GET", "/login").await.0, 405);
    assert_eq!(ask(&app, "203.0.113.1", "OPTIONS", "/").await, (200, None));
    assert_eq!(ask(&app, "203.0.113.1", "GET", "/?dear").await, (200, Some(77)));
    assert_eq!(ask(&app, "203.0.113.2", "GET", "/").await, (200, Some(99)));
    assert_eq!(ask(&app, "203.0.113.2", "POST", "/login").await, (200, Some(1)));
}

/// The address is that of the proxy's header, for IPv6 by its /64.
#[tokio::test]
async fn the_key_is_the_client_behind_the_proxy() {
    let app = limited();
    for (client, remaining) in
        [("2001:db8::1", 1), ("2001:db8::2", 0), ("2001:db8:1::1", 1), ("198.51.100.1, 2001:db8:1::9", 0)]
    {
        assert_eq!(ask(&app, client, "POST", "/login").await, (200, Some(remaining)), "{client}");
    }
}

/// The place is held until the answer has ended, as that of a request is.
#[tokio::test]
async fn a_concurrent_limit_holds_a_place_while_the_question_is_answered() {
    let limits = RateLimitLayer::new(MemoryStore::new()).limit(Limit::concurrent("questions", 1).by(Everyone));
    let app = behind().layer(Router::new().fallback(|| async { "a body" }).layer(limits));
    let first = app.clone().oneshot(asked("GET", "/")).await.unwrap();
    assert_eq!(app.clone().oneshot(asked("GET", "/")).await.unwrap().status(), 429);
    assert_eq!(json(first).await, "a body");
    assert_eq!(app.oneshot(asked("GET", "/")).await.unwrap().status(), 200);
}

/// A layer of limits may also be outside: it counts questions, and sees them as they come.
#[tokio::test]
async fn limits_outside_count_the_questions_themselves() {
    let outer = RateLimitLayer::new(MemoryStore::new()).limit(Limit::per_hour("questions", 3).by(|parts: &Parts| {
        assert_eq!((parts.method.as_str(), parts.uri.path()), ("GET", "/auth"));
        Ok("all".into())
    }));
    let inner = RateLimitLayer::new(MemoryStore::new()).limit(LOGINS.by(Everyone));
    let statuses =
        |parts: Parts| async move { parts.extensions.get::<Decision>().unwrap().statuses().count().to_string() };
    let app = outer.layer(behind().layer(Router::new().fallback(statuses).layer(inner)));
    assert_eq!(json(app.clone().oneshot(asked("GET", "/")).await.unwrap()).await, "2");
    // This one is charged outside, and not inside.
    assert_eq!(app.clone().oneshot(asked("GET", "*")).await.unwrap().status(), 400);
    let last = app.clone().oneshot(asked("GET", "/")).await.unwrap();
    assert_eq!((last.status().as_u16(), figures(last.headers())[1]), (200, Some("0")));
    assert_eq!(app.oneshot(asked("GET", "/")).await.unwrap().status(), 429);
}

#[tokio::test]
async fn a_refused_question_frees_the_permit_of_the_ready_instance() {
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&calls);
    let inner = service_fn(move |_: Request<Full<Bytes>>| {
        counted.fetch_add(1, Ordering::Relaxed);
        async { Ok::<_, Infallible>(Response::new(String::new())) }
    });
    let mut app = behind().layer(ConcurrencyLimit::new(inner, 1));
    for (path, status) in [("*", 400), ("/", 200), ("*", 400), ("/", 200)] {
        let response = app.ready().await.unwrap().call(asked("GET", path).map(|_| Full::default()));
        // The future of the refused question still lives.
        let mut other = app.clone();
        if status == 400 {
            other.ready().await.unwrap();
        }
        assert_eq!(response.await.unwrap().status(), status);
    }
    assert_eq!(calls.load(Ordering::Relaxed), 2);
}

#[test]
#[should_panic = "a header name must be a token"]
fn a_text_that_is_no_header_name_panics() {
    drop(behind().headers("x-original-method", "x original uri"));
}

#[test]
#[should_panic = "a prefix must begin with `/`, or be empty"]
fn a_prefix_without_a_slash_panics() {
    drop(behind().as_sent("auth"));
}
