//! The limiter without HTTP: a job that shares an upstream's daily quota with others, with cheap and dear calls.
//!
//! ```sh
//! cargo run --example limiter
//! ```

use std::{error::Error, time::Duration};

use tokio::time::sleep;
use tower_sliding_window::{Limit, Limiter, MemoryStore};

/// The upstream allows 10 units in 2 seconds.
const QUOTA: Limit = Limit::per("upstream", 10, Duration::from_secs(2));

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let limiter = Limiter::new(MemoryStore::new());
    for (call, cost) in [("list", 1), ("search", 6), ("list", 1), ("search", 6), ("list", 1)] {
        loop {
            let decision = limiter.check(&QUOTA, "token-7", cost).await?;
            let Some(wait) = decision.retry_after() else {
                println!("{call} for {cost}: {} left", decision.remaining());
                break;
            };
            println!("{call} for {cost}: only {} left, waiting {wait:?}", decision.remaining());
            sleep(wait).await;
        }
    }

    if let Err(error) = limiter.check(&QUOTA, "token-7", 11).await {
        println!("export for 11: {error}");
    }
    Ok(())
}
