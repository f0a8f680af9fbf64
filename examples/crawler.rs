//! Outbound calls: a crawler that stays within the 5000 calls an hour that an API gives each access token.
//!
//! ```sh
//! cargo run --example crawler
//! CALLS=5 WINDOW=1 PAGES=12 cargo run --example crawler
//! ```
//!
//! | variable | meaning | default |
//! |---|---|---|
//! | `CALLS`, `WINDOW` | so many calls of a token in any so many seconds | 5000, 3600 |
//! | `WORKERS`, `PAGES` | so many workers fetch so many pages | 4, 20 |
//! | `PATIENCE` | seconds that a page may wait for room | 60 |
//! | `TOKEN` | the access token | a made-up one |
//! | `API_KEY_SECRET` | what tokens are hashed with, the same for all crawlers on one Redis | a public one |
//! | `REDIS_URL` | count together with the crawlers of other processes on this Redis | the in-process store |

use std::{
    env,
    error::Error,
    fmt,
    process::ExitCode,
    str::FromStr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::{task::JoinSet, time::sleep};
use tower_sliding_window::{Error as LimiterError, Key, Limit, Limiter, MemoryStore, RedisStore, Secret, Store};

/// Good enough to try things out. A crawler that means it sets `API_KEY_SECRET`.
const EXAMPLE_SECRET: &str = "everybody can read this secret";

#[tokio::main]
async fn main() -> ExitCode {
    match run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

async fn run() -> Result<(), Box<dyn Error>> {
    let window = Duration::try_from_secs_f64(setting("WINDOW", 3_600.0)?)?;
    let limit = Limit::new("calls", setting("CALLS", 5_000)?, window)?;
    match env::var("REDIS_URL") {
        Ok(url) => crawl(Limiter::new(RedisStore::builder(&url).build()?), limit).await,
        Err(_) => crawl(Limiter::new(MemoryStore::new()), limit).await,
    }
}

async fn crawl<S: Store>(limiter: Limiter<S>, limit: Limit) -> Result<(), Box<dyn Error>> {
    let (workers, pages) = (setting("WORKERS", 4)?, setting("PAGES", 20)?);
    let secret = Secret::new(env::var("API_KEY_SECRET").unwrap_or_else(|_| EXAMPLE_SECRET.to_owned()))?;
    let crawler = Arc::new(Crawler {
        // A crawler has more time than a web server.
        limiter: limiter.deadline(Duration::from_secs(1)),
        limit,
        // A keyed hash of it is all that the limiter and Redis get: the token itself goes nowhere but to the API.
        token: secret.key("token", &env::var("TOKEN").unwrap_or_else(|_| "example-token".to_owned())),
        patience: Duration::try_from_secs_f64(setting("PATIENCE", 60.0)?)?,
        api: Api::default(),
        next_page: AtomicU64::new(1),
    });
    println!(
        "{} calls in any {:?}: {} left",
        crawler.limit.units(),
        crawler.limit.window(),
        crawler.remaining().await?
    );

    let begun = Instant::now();
    let mut working: JoinSet<Result<Work, Unavailable>> =
        (0..workers).map(|_| Arc::clone(&crawler).work(pages)).collect();
    let mut done = Work::default();
    while let Some(work) = working.join_next().await {
        // The first that finds no limiter ends all of them.
        let work = work??;
        done = Work { fetched: done.fetched + work.fetched, refused: done.refused + work.refused };
    }
    println!("{} pages fetched and {} put off in {:.1?}", done.fetched, done.refused, begun.elapsed());
    println!("the API was called {} times; {} left", crawler.api.calls(), crawler.remaining().await?);
    Ok(())
}

/// What the workers share.
struct Crawler<S> {
    limiter: Limiter<S>,
    limit: Limit,
    token: Key,
    patience: Duration,
    api: Api,
    next_page: AtomicU64,
}

/// What came of a worker's pages.
#[derive(Default)]
struct Work {
    fetched: u64,
    refused: u64,
}

impl<S: Store> Crawler<S> {
    /// How many calls remain, without spending one.
    async fn remaining(&self) -> Result<u64, Unavailable> {
        Ok(self.limiter.peek(&self.limit, self.token.clone()).await?.remaining())
    }

    async fn work(self: Arc<Self>, pages: u64) -> Result<Work, Unavailable> {
        let mut work = Work::default();
        loop {
            let page = self.next_page.fetch_add(1, Ordering::Relaxed);
            if page > pages {
                return Ok(work);
            }
            let asked = Instant::now();
            // Workers wait in the order in which they have asked. A refusal takes nothing, so the next page, or the
            // next process, finds the window as it was.
            let decision = self.limiter.acquire(&self.limit, self.token.clone(), 1, self.patience).await?;
            if let Some(wait) = decision.retry_after() {
                println!("page {page}: put off, there is room in {wait:.1?}");
                work.refused += 1;
                continue;
            }
            self.api.fetch(page).await;
            println!("page {page}: fetched after {:.1?}, {} left", asked.elapsed(), decision.remaining());
            work.fetched += 1;
        }
    }
}

/// Nobody knows how many calls are left. A crawler that went on would risk its token, so it stops.
#[derive(Debug)]
struct Unavailable(LimiterError);

impl From<LimiterError> for Unavailable {
    fn from(error: LimiterError) -> Self {
        Self(error)
    }
}

impl fmt::Display for Unavailable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "stopped: {}", self.0)?;
        let mut error: &dyn Error = &self.0;
        while let Some(cause) = error.source() {
            write!(f, ": {cause}")?;
            error = cause;
        }
        Ok(())
    }
}

impl Error for Unavailable {}

/// Stands for the API.
#[derive(Default)]
struct Api {
    calls: AtomicU64,
}

impl Api {
    async fn fetch(&self, _page: u64) {
        self.calls.fetch_add(1, Ordering::Relaxed);
        sleep(Duration::from_millis(10)).await;
    }

    fn calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }
}

fn setting<T: FromStr<Err: fmt::Display>>(name: &str, default: T) -> Result<T, String> {
    let Ok(text) = env::var(name) else { return Ok(default) };
    text.parse().map_err(|error| format!("{name}={text:?} is not a number: {error}"))
}
