//! Requests and tokens a minute for each API key, as services of language models count: an estimate is reserved, and
//! what the answer has used is what counts, be it whole or streamed word by word.
//!
//! ```sh
//! cargo run --example llm_tokens
//! REDIS_URL=redis://127.0.0.1:6379/ PORT=0 cargo run --example llm_tokens
//! ```

use std::{env, error::Error, time::Duration};

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
    time::{sleep, timeout},
};
use tower_sliding_window::{
    ApiKey, Exchange, KeyExtractor, Limit, Limiter, MemoryStore, RateLimitLayer, RedisStore, Rejection, Secret, Store,
};

const REQUESTS: Limit = Limit::per_minute("requests", 60);
const TOKENS: Limit = Limit::per_minute("tokens", 400);

/// How long an answer may be, and is if the request says nothing.
const MAX_TOKENS: u64 = 100;

/// No answer takes longer, however slowly its client reads.
const LONGEST: Duration = Duration::from_secs(15);

/// What is not settled by then, since the server has crashed, is given back.
const LEASE: Duration = Duration::from_secs(20);

/// Beside the time of an answer it does not matter much, and what is not settled is lost.
const DEADLINE: Duration = Duration::from_secs(1);

/// How long a model takes for a word that it streams.
const WORD: Duration = Duration::from_millis(20);

/// Good enough to try things out. A server that means it has one of its own.
const EXAMPLE_SECRET: &str = "everybody can read this secret";

/// What handlers need that count by themselves.
#[derive(Clone)]
struct Counting<S> {
    limiter: Limiter<S>,
    api_key: ApiKey,
}

fn app<S: Store>(store: S) -> Result<Router, Box<dyn Error>> {
    let (limiter, api_key) =
        (Limiter::new(store).deadline(DEADLINE), ApiKey::header("x-api-key", &Secret::new(EXAMPLE_SECRET)?));
    let requests = || RateLimitLayer::on(limiter.clone()).limit(REQUESTS.by(api_key.clone()));
    let requests_and_tokens = requests().limit(TOKENS.by(api_key.clone()).cost(estimate).settle(used).lease(LEASE));
    Ok(Router::new()
        .route("/complete", post(complete).layer(requests_and_tokens))
        .route("/stream", post(stream).layer(requests()))
        .with_state(Counting { limiter, api_key }))
}

/// The most that a request can use: its prompt, at about four bytes a token, and the longest answer.
fn estimate(request: &Parts) -> u64 {
    number(&request.headers, CONTENT_LENGTH.as_str()).unwrap_or_default().div_ceil(4) + longest_answer(&request.headers)
}

/// What it has used, as the answer says. One that says nothing is an error, and free.
fn used(outcome: &Exchange<'_>) -> u64 {
    number(&outcome.response().headers, "x-tokens-used").unwrap_or_default()
}

/// A model that repeats the prompt, a token a word.
async fn complete(headers: HeaderMap, prompt: String) -> Response {
    let longest = usize::try_from(longest_answer(&headers)).unwrap_or(usize::MAX);
    let answer: Vec<&str> = prompt.split_whitespace().take(longest).collect();
    let used = prompt.split_whitespace().count() + answer.len();
    ([("x-tokens-used", used.to_string())], answer.join(" ") + "\n").into_response()
}

/// The same, word by word. The head of such a response cannot say what its body is going to use: so the handler reserves,
/// and whoever writes the body settles, also if the client leaves before its end.
async fn stream<S: Store>(
    State(Counting { limiter, api_key }): State<Counting<S>>,
    request: Parts,
    prompt: String,
) -> Result<Response, Rejection> {
    let key = api_key.extract(&request)?;
    let reservation = limiter.reserve(&TOKENS, key, estimate(&request), LEASE).await?.map_err(Rejection::Limited)?;
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
    let app = match env::var("REDIS_URL") {
        Ok(url) => app(RedisStore::builder(&url).build()?)?,
        Err(_) => app(MemoryStore::new())?,
    };
    let port = env::var("PORT").map_or(Ok(3000), |port| port.parse::<u16>())?;
    let listener = TcpListener::bind(("127.0.0.1", port)).await?;
    let url = format!("http://{}", listener.local_addr()?);
    println!("listening on {url}");
    println!("try: curl -i -H 'x-api-key: ada' -H 'x-max-tokens: 50' -d 'tell me a story' {url}/complete");
    println!("and word by word: curl -iN -H 'x-api-key: ada' -d 'tell me a long story' {url}/stream");
    axum::serve(listener, app).await?;
    Ok(())
}
