//! A crawler that stays within the 5,000 calls an hour that an API allows for each access token.
//!
//! ```sh
//! cargo run --example crawler
//! CALLS=5 WINDOW=1 PAGES=12 cargo run --example crawler
//! ```
//!
//! | variable | meaning | default |
//! |---|---|---|
//! | `CALLS`, `WINDOW` | calls that a token has in any window; seconds of the window | 5000, 3600 |
//! | `WORKERS`, `PAGES` | number of workers, number of pages that they fetch | 4, 20 |
//! | `MAX_WAIT` | seconds that a page may wait for its call | 60 |
//! | `TOKEN` | the access token | an example |
//! | `RATE_LIMIT_SECRET` | the secret that tokens are hashed under, the same for all crawlers on one Redis: `openssl rand -hex 32` | one of this process alone |
//! | `REDIS_URL` | the Redis that crawlers in several processes share | the in-process store |

use std::{
    env,
    error::Error,
    fmt,
    hash::{BuildHasher, RandomState},
    process::ExitCode,
    str::FromStr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::{task::JoinSet, time::sleep};
use tower_sliding_window::{
    Error as LimiterError, Key, Limit, Limiter, MemoryStore, RedisStore, Secret,
};

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

async fn crawl(limiter: Limiter, limit: Limit) -> Result<(), Box<dyn Error>> {
    let (workers, pages) = (setting("WORKERS", 4)?, setting("PAGES", 20)?);
    let own = || {
        format!(
            "{:?}",
            [1, 2].map(|number| RandomState::new().hash_one(number))
        )
    };
    let secret = Secret::new(env::var("RATE_LIMIT_SECRET").unwrap_or_else(|_| own()))?;
    let crawler = Arc::new(Crawler {
        // A crawler has more time than a web server.
        limiter: limiter.deadline(Duration::from_secs(1)),
        limit,
        // The limiter and Redis get a keyed hash. Only the API gets the token itself.
        token: secret.key(
            "token",
            &env::var("TOKEN").unwrap_or_else(|_| "example-token".to_owned()),
        ),
        max_wait: Duration::try_from_secs_f64(setting("MAX_WAIT", 60.0)?)?,
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
    let mut working: JoinSet<Result<Tally, Unavailable>> = (0..workers)
        .map(|_| Arc::clone(&crawler).work(pages))
        .collect();
    let mut total = Tally::default();
    while let Some(tally) = working.join_next().await {
        // The first worker that has no limiter ends the program, and with it the others.
        let tally = tally??;
        total = Tally {
            fetched: total.fetched + tally.fetched,
            refused: total.refused + tally.refused,
        };
    }
    println!(
        "{} pages fetched and {} put off in {:.1?}",
        total.fetched,
        total.refused,
        begun.elapsed()
    );
    println!(
        "the API was called {} times; {} left",
        crawler.api.calls(),
        crawler.remaining().await?
    );
    crawler.limiter.shutdown(Duration::from_secs(5)).await?;
    Ok(())
}

/// Shared by all workers.
struct Crawler {
    limiter: Limiter,
    limit: Limit,
    token: Key,
    max_wait: Duration,
    api: Api,
    next_page: AtomicU64,
}

/// A worker's pages.
#[derive(Default)]
struct Tally {
    fetched: u64,
    refused: u64,
}

impl Crawler {
    /// The calls that are left. Asking spends none.
    async fn remaining(&self) -> Result<u64, Unavailable> {
        Ok(self
            .limiter
            .peek(&self.limit, self.token.clone())
            .await?
            .remaining())
    }

    async fn work(self: Arc<Self>, pages: u64) -> Result<Tally, Unavailable> {
        let mut tally = Tally::default();
        loop {
            let page = self.next_page.fetch_add(1, Ordering::Relaxed);
            if page > pages {
                return Ok(tally);
            }
            let asked = Instant::now();
            // Workers wait in line, first come first served. A refusal takes nothing.
            let decision = self
                .limiter
                .acquire(&self.limit, self.token.clone(), 1, self.max_wait)
                .await?;
            if let Some(wait) = decision.retry_after() {
                println!("page {page}: put off, the next call is free in {wait:.1?}");
                tally.refused += 1;
                continue;
            }
            self.api.fetch(page).await;
            println!(
                "page {page}: fetched after {:.1?}, {} left",
                asked.elapsed(),
                decision.remaining()
            );
            tally.fetched += 1;
        }
    }
}

/// The limiter cannot tell how many calls are left. A crawler that went on would risk its token, so
/// it stops.
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

/// Takes the place of the API.
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
    let Ok(text) = env::var(name) else {
        return Ok(default);
    };
    text.parse()
        .map_err(|error| format!("{name}={text:?} is not a number: {error}"))
}
