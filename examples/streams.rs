//! At most two streams of server-sent events for each client, and a page that frees its place when
//! its user leaves it.
//!
//! ```sh
//! cargo run --example streams   # then open http://127.0.0.1:3000 in three tabs
//! ```

use std::{convert::Infallible, env, io, net::SocketAddr, time::Duration};

use axum::{
    Router,
    extract::State,
    response::{
        Html,
        sse::{Event, KeepAlive, Sse},
    },
    routing::get,
};
use futures_util::stream::{self, Stream};
use http::request::Parts;
use tokio::{net::TcpListener, time::sleep};
use tower_sliding_window::{
    KeyExtractor, Limit, Limiter, MemoryStore, PeerIp, RateLimitLayer, Rejection,
};

const STREAMS: Limit = Limit::concurrent("streams", 2);

/// 1. A browser may keep a page that its user has left, with its stream, to show it again at once.
///    So the page closes its stream when it is left, and opens it when it is shown.
/// 2. A script cannot see why a stream is refused, so the page asks `/places`.
/// 3. A stream that is silent for long may be lost, such as after the laptop has slept.
const PAGE: &str = r#"<!doctype html>
<title>Streams</title>
<p>waiting</p>
<script>
  let source, timer;
  const say = (text) => { document.querySelector("p").textContent = text; };
  const openAfter = (milliseconds) => { clearTimeout(timer); timer = setTimeout(open, milliseconds); };
  const close = () => { source?.close(); clearTimeout(timer); };
  const open = () => {
    close();
    source = new EventSource("/events");
    openAfter(10000);
    source.onmessage = (event) => { say(event.data); openAfter(10000); };
    source.onerror = async () => {
      // The browser does not try again by itself after a 429.
      if (source.readyState !== EventSource.CLOSED) return;
      openAfter(1000);
      const places = await fetch("/places").then((answer) => answer.text(), () => "");
      say(places === "0" ? "refused: your two streams are open in other tabs" : "no stream: the server is not ready");
    };
  };
  addEventListener("pageshow", open);
  addEventListener("pagehide", close);
</script>
"#;

async fn events() -> Sse<impl Stream<Item = Result<Event, Infallible>>> {
    let ticks = stream::unfold(0, |tick| async move {
        sleep(Duration::from_millis(if tick == 0 { 0 } else { 1_000 })).await;
        Some((Ok(Event::default().data(format!("event {tick}"))), tick + 1))
    });
    Sse::new(ticks).keep_alive(KeepAlive::default())
}

/// How many places are left for the client of the request.
async fn places(State(limiter): State<Limiter>, request: Parts) -> Result<String, Rejection> {
    let key = PeerIp::new().extract(&request)?;
    Ok(limiter.peek(&STREAMS, key).await?.remaining().to_string())
}

#[tokio::main]
async fn main() -> io::Result<()> {
    let limiter = Limiter::new(MemoryStore::new());
    let streams = RateLimitLayer::new(limiter.clone()).limit(STREAMS.by(PeerIp::new()));
    let app = Router::new()
        .route("/", get(|| async { Html(PAGE) }))
        .route("/events", get(events).layer(streams))
        .route("/places", get(places))
        .with_state(limiter);

    let port = env::var("PORT")
        .ok()
        .and_then(|port| port.parse().ok())
        .unwrap_or(3000);
    let listener = TcpListener::bind(("127.0.0.1", port)).await?;
    println!("listening on http://{}", listener.local_addr()?);
    axum::serve(
        listener,
        app.into_make_service_with_connect_info::<SocketAddr>(),
    )
    .await
}
