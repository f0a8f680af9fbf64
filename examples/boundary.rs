//! Across a minute's boundary, a fixed window of 50 a minute admits 100 calls within two seconds,
//! the sliding log 50.
//!
//! ```sh
//! cargo run --example boundary
//! REDIS_URL=redis://127.0.0.1:6379/ cargo run --example boundary
//! ```
//!
//! A manual clock moves the time, so the program does not wait for the boundary.

use std::{
    env,
    error::Error,
    process::{self, ExitCode},
    time::{Duration, UNIX_EPOCH},
};

use tower_sliding_window::{
    Algorithm, Error as LimiterError, Limit, Limiter, MemoryStore, RedisStore, Store,
    store::ManualClock,
};

const LIMIT: Limit = Limit::per_minute("boundary", 50);
const SECOND: Duration = Duration::from_secs(1);

#[tokio::main(flavor = "current_thread")]
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
    let clock = ManualClock::new();
    match env::var("REDIS_URL") {
        Ok(url) => compare(RedisStore::builder(&url).clock(&clock).build()?, &clock).await?,
        Err(_) => compare(MemoryStore::new().clock(&clock), &clock).await?,
    }
    Ok(())
}

async fn compare(store: impl Store, clock: &ManualClock) -> Result<(), LimiterError> {
    let limiter = Limiter::new(store);
    println!(
        "{} calls a minute; 100 calls arrive 1 s before a minute ends, and 100 more 1 s after",
        LIMIT.units()
    );
    for (name, algorithm) in [
        ("fixed window", Algorithm::FIXED_WINDOW),
        ("sliding log", Algorithm::SLIDING_LOG),
    ] {
        let limit = LIMIT.with_algorithm(algorithm);
        // A key for each process, since several of these may run on one Redis.
        let key = format!("{name} {}", process::id());
        wait_for_the_last_second(clock);
        let before = admitted(&limiter, &limit, &key).await?;
        clock.advance(2 * SECOND);
        let after = admitted(&limiter, &limit, &key).await?;
        println!(
            "{name:12}  {before} + {after:2} = {:3} within 2 s",
            before + after
        );
        limiter.reset(&limit, key).await?;
    }
    Ok(())
}

fn wait_for_the_last_second(clock: &ManualClock) {
    let window = LIMIT.window().as_micros();
    let gone = clock
        .now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_micros()
        % window;
    let left = u64::try_from(window - gone).unwrap_or_default();
    clock.advance(Duration::from_micros(left) + LIMIT.window() - SECOND);
}

/// How many of 100 calls get through.
async fn admitted(limiter: &Limiter, limit: &Limit, key: &str) -> Result<u64, LimiterError> {
    let mut admitted = 0;
    for _ in 0..100 {
        admitted += u64::from(limiter.check(limit, key, 1).await?.is_allowed());
    }
    Ok(admitted)
}
