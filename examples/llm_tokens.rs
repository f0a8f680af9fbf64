//! Requests and tokens a minute for each API key, as services of language models count: an estimate is reserved, and
//! what the answer has used is what counts.
//!
//! ```sh
//! cargo run --example llm_tokens
//! REDIS_URL=redis://127.0.0.1:6379/ PORT=0 cargo run --example llm_tokens
//! ```

use std::{env, error::Error, time::Duration};

use axum::{
    Router,
    response::{IntoResponse, Response},
    routing::post,
};
use http::{HeaderMap, header::CONTENT_LENGTH, request::Parts};
use tokio::net::TcpListener;
use tower_sliding_window::{ApiKey, Limit, MemoryStore, Outcome, RateLimitLayer, RedisStore, Secret, Store};

const REQUESTS: Limit = Limit::per_minute("requests", 60);
const TOKENS: Limit = Limit::per_minute("tokens", 400);

/// How long an answer may be, and is if the request says nothing.
const MAX_TOKENS: u64 = 100;

/// No answer takes longer. What is not settled by then, since the server has crashed, is given back.
const LONGEST: Duration = Duration::from_secs(20);

/// Good enough to try things out. A server that means it has one of its own.
const EXAMPLE_SECRET: &str = "everybody can read this secret";

fn app<S: Store>(store: S) -> Result<Router, Box<dyn Error>> {
    let api_key = ApiKey::header("x-api-key", &Secret::new(EXAMPLE_SECRET)?);
    let limits = RateLimitLayer::new(store)
        .limit(REQUESTS.by(api_key.clone()))
        .limit(TOKENS.by(api_key).cost(estimate).settle(used).lease(LONGEST));
    Ok(Router::new().route("/complete", post(complete).layer(limits)))
}

/// The most that a request can use: its prompt, at about four bytes a token, and the longest answer.
fn estimate(request: &Parts) -> u64 {
    number(&request.headers, CONTENT_LENGTH.as_str()).unwrap_or_default().div_ceil(4) + longest_answer(&request.headers)
}

/// What it has used, as the answer says. One that says nothing is an error, and free.
fn used(outcome: &Outcome<'_>) -> u64 {
    number(&outcome.response().headers, "x-tokens-used").unwrap_or_default()
}

/// A model that repeats the prompt, a token a word.
async fn complete(headers: HeaderMap, prompt: String) -> Response {
    let longest = usize::try_from(longest_answer(&headers)).unwrap_or(usize::MAX);
    let answer: Vec<&str> = prompt.split_whitespace().take(longest).collect();
    let used = prompt.split_whitespace().count() + answer.len();
    ([("x-tokens-used", used.to_string())], answer.join(" ") + "\n").into_response()
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
    axum::serve(listener, app).await?;
    Ok(())
}
