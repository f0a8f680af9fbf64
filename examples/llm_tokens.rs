//! Requests and tokens a minute, and streams at once, for each API key, as services of language
//! models count them. Each request reserves an estimate, and pays for the tokens that the response
//! used, whether it comes whole or word by word.
//!
//! ```sh
//! cargo run --example llm_tokens
//! REDIS_URL=redis://127.0.0.1:6379/ RATE_LIMIT_SECRET="$(openssl rand -hex 32)" PORT=0 cargo run --example llm_tokens
//! ```

use std::{
    env,
    error::Error,
    hash::{BuildHasher, RandomState},
    sync::Arc,
    time::Duration,
};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::State,
    response::{IntoResponse, Response},
    routing::post,
};
use http::{HeaderMap, header::CONTENT_LENGTH, request::Parts};
use http_body_util::channel::Channel;
use tokio::{
    net::TcpListener,
    signal::ctrl_c,
    time::{sleep, timeout},
};
use tower_sliding_window::{
    ApiKey, KeyExtractor, Limit, Limiter, RateLimitLayer, Rejection, Secret, Store,
    middleware::Exchange, store,
};

const REQUESTS: Limit = Limit::per_minute("requests", 60);
/// A stream holds its place until its body has ended, or its client has left.
const STREAMS: Limit = Limit::concurrent("streams", 4);
const TOKENS: Limit = Limit::per_minute("tokens", 400);

/// The longest response in tokens, and the default of a request that names no length.
const MAX_TOKENS: u64 = 100;

/// A response is cut off after this time, however slowly its client reads.
const LONGEST: Duration = Duration::from_secs(15);

/// If the server crashes, reserved tokens come back after this time.
const LEASE: Duration = Duration::from_secs(20);

/// Longer than the default next to Redis: it is short beside the time of a response, and a
/// settlement should not fail for lack of time.
const DEADLINE: Duration = Duration::from_secs(1);

/// The time that a model takes for each streamed word.
const WORD: Duration = Duration::from_millis(20);

/// For the handler that counts its own tokens.
#[derive(Clone)]
struct Tokens {
    limiter: Limiter,
    api_key: ApiKey,
}

fn app(store: impl Store) -> Result<Router, Box<dyn Error>> {
    // Servers that share a Redis need the same secret. One of its own is enough for a server alone.
    let own = || {
        format!(
            "{:?}",
            [1, 2].map(|number| RandomState::new().hash_one(number))
        )
    };
    let secret = Secret::new(env::var("RATE_LIMIT_SECRET").unwrap_or_else(|_| own()))?;
    let (limiter, api_key) = (
        Limiter::new(store).deadline(DEADLINE),
        ApiKey::header("x-api-key", &secret),
    );
    let requests = || RateLimitLayer::new(limiter.clone()).limit(REQUESTS.by(api_key.clone()));
    let requests_and_tokens = requests().limit(
        TOKENS
            .by(api_key.clone())
            .cost(estimate)
            .settle(used)
            .lease(LEASE),
    );
    Ok(Router::new()
        .route("/complete", post(complete).layer(requests_and_tokens))
        .route(
            "/stream",
            post(stream).layer(requests().limit(STREAMS.by(api_key.clone()))),
        )
        .with_state(Tokens { limiter, api_key }))
}

/// The most tokens that a request can use: its prompt, at about four bytes a token, and the longest
/// response.
fn estimate(request: &Parts) -> u64 {
    number(&request.headers, CONTENT_LENGTH.as_str())
        .unwrap_or_default()
        .div_ceil(4)
        + longest_answer(&request.headers)
}

/// The tokens that the response reports. An error reports none, and is free.
fn used(exchange: &Exchange<'_>) -> u64 {
    number(&exchange.response.headers, "x-tokens-used").unwrap_or_default()
}

/// A model that repeats the prompt, a token a word.
async fn complete(headers: HeaderMap, prompt: String) -> Response {
    let longest = usize::try_from(longest_answer(&headers)).unwrap_or(usize::MAX);
    let answer: Vec<&str> = prompt.split_whitespace().take(longest).collect();
    let used = prompt.split_whitespace().count() + answer.len();
    (
        [("x-tokens-used", used.to_string())],
        answer.join(" ") + "\n",
    )
        .into_response()
}

/// The same, word by word. Response headers cannot report the cost of a streamed body. So the
/// handler reserves, and the task that writes the body settles, even if the client leaves before
/// its end.
async fn stream(
    State(Tokens { limiter, api_key }): State<Tokens>,
    request: Parts,
    prompt: String,
) -> Result<Response, Rejection> {
    let key = api_key.extract(&request)?;
    let reservation = limiter
        .reserve(&TOKENS, key, estimate(&request), LEASE)
        .await?
        .map_err(Rejection::Limited)?;
    let longest = usize::try_from(longest_answer(&request.headers)).unwrap_or(usize::MAX);
    let (mut client, body) = Channel::<Bytes>::new(1);
    tokio::spawn(async move {
        let mut used = prompt.split_whitespace().count() as u64;
        let writing = async {
            for word in prompt.split_whitespace().take(longest) {
                if client.send_data(format!("{word} ").into()).await.is_err() {
                    break;
                }
                used += 1;
                sleep(WORD).await;
            }
        };
        let _ = timeout(LONGEST, writing).await;
        if let Err(error) = reservation.settle(used).await {
            eprintln!("{used} tokens are not settled: {error}");
        }
    });
    Ok(Response::new(Body::new(body)))
}

fn longest_answer(headers: &HeaderMap) -> u64 {
    number(headers, "x-max-tokens").map_or(MAX_TOKENS, |tokens| tokens.min(MAX_TOKENS))
}

fn number(headers: &HeaderMap, name: &str) -> Option<u64> {
    headers.get(name)?.to_str().ok()?.parse().ok()
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let store = store::from_url(&env::var("REDIS_URL").unwrap_or_else(|_| "memory:".to_owned()))?;
    let app = app(Arc::clone(&store))?;
    let port = env::var("PORT").map_or(Ok(3000), |port| port.parse::<u16>())?;
    let listener = TcpListener::bind(("127.0.0.1", port)).await?;
    let url = format!("http://{}", listener.local_addr()?);
    println!("listening on {url}");
    println!(
        "try: curl -i -H 'x-api-key: ada' -H 'x-max-tokens: 50' -d 'tell me a story' {url}/complete"
    );
    println!(
        "and word by word: curl -iN -H 'x-api-key: ada' -d 'tell me a long story' {url}/stream"
    );
    axum::serve(listener, app)
        .with_graceful_shutdown(async { drop(ctrl_c().await) })
        .await?;
    // Completes the settlements that are on their way. In a container, wait for SIGTERM as well, as
    // `server/serve.rs` does.
    Ok(Limiter::new(store).shutdown(Duration::from_secs(5)).await?)
}
