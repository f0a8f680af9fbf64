//! Eight regions share an upstream's daily quota of 10,000 units, with cheap and expensive calls.
//!
//! ```sh
//! cargo run --example quota
//! ```
//!
//! Our limit is 9,500, below the real quota. A `list` costs 1 unit. A `search` costs 100, and has a
//! daily limit of its own; both limits are decided together, all or nothing. While the limiter is
//! unavailable, regions make lists (fail-open) but no searches (fail-closed).
//!
//! | variable | meaning | default |
//! |---|---|---|
//! | `LISTS`, `SEARCHES` | calls that each region wants to make | 600, 20 |
//! | `CALL_MILLIS` | milliseconds that the upstream takes for a call | 1 |
//! | `REDIS_URL` | the Redis through which processes share the quota | the in-process store |

use std::{
    env,
    error::Error,
    fmt,
    process::ExitCode,
    str::FromStr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{task::JoinSet, time::sleep};
use tower_sliding_window::{
    Charge, Check, Error as LimiterError, Limit, Limiter, MemoryStore, RedisStore,
};

const QUOTA: Limit = Limit::per_day("quota", 9_500);
const SEARCHES: Limit = Limit::per_day("searches", 60);

const REGIONS: [&str; 8] = ["us", "gb", "de", "fr", "jp", "kr", "br", "in"];
/// The upstream counts by account, so all regions spend in the name of one key.
const ACCOUNT: &str = "account-1";

type Failure = Box<dyn Error + Send + Sync>;

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

async fn run() -> Result<(), Failure> {
    match env::var("REDIS_URL") {
        Ok(url) => share(Limiter::new(RedisStore::builder(&url).build()?)).await,
        Err(_) => share(Limiter::new(MemoryStore::new())).await,
    }
}

async fn share(limiter: Limiter) -> Result<(), Failure> {
    // A job has more time than a web server.
    let limiter = limiter.deadline(Duration::from_millis(500));
    if let Err(error) = Call::Export.check() {
        println!("no export: {error}");
    }
    let (lists, searches) = (setting("LISTS", 600)?, setting("SEARCHES", 20)?);
    let upstream = Duration::from_millis(setting("CALL_MILLIS", 1)?);
    let is_stopped = Arc::new(AtomicBool::new(false));
    let mut regions = JoinSet::new();
    for name in REGIONS {
        let region = Region {
            name,
            limiter: limiter.clone(),
            upstream,
            is_stopped: Arc::clone(&is_stopped),
        };
        regions.spawn(region.work(lists, searches));
    }
    println!("{} regions share {} units", regions.len(), QUOTA.units());

    let mut total = Tally::default();
    let interrupt = tokio::signal::ctrl_c();
    tokio::pin!(interrupt);
    loop {
        tokio::select! {
            region = regions.join_next() => match region {
                Some(region) => {
                    let (name, tally) = region??;
                    println!("{name}: {tally}");
                    total.add(&tally);
                }
                None => break,
            },
            // Regions finish the call that they are in.
            interrupted = &mut interrupt, if !is_stopped.load(Ordering::Relaxed) => {
                interrupted?;
                println!("stopping");
                is_stopped.store(true, Ordering::Relaxed);
            }
        }
    }
    println!("all: {total}");
    println!("spent {} of {} units", total.units(), QUOTA.units());
    Ok(())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Call {
    List,
    Search,
    /// Costs more than a day's quota.
    Export,
}

impl Call {
    const fn cost(self) -> u64 {
        match self {
            Self::List => 1,
            Self::Search => 100,
            Self::Export => 10_000,
        }
    }

    /// Takes the cost from the quota. A search also takes one of the day's searches.
    fn check(self) -> Result<Check, Failure> {
        let check = Check::new(Charge::new(QUOTA, ACCOUNT, self.cost())?);
        Ok(if self == Self::Search {
            check.and(Charge::new(SEARCHES, ACCOUNT, 1)?)?
        } else {
            check
        })
    }
}

struct Region {
    name: &'static str,
    limiter: Limiter,
    upstream: Duration,
    is_stopped: Arc<AtomicBool>,
}

enum CallOutcome {
    Made,
    MadeUncounted,
    Refused,
    NotDared,
}

impl Region {
    /// Makes its calls, with the searches spread among the lists, until all are made or the quota
    /// is spent.
    async fn work(self, lists: u64, searches: u64) -> Result<(&'static str, Tally), Failure> {
        let mut tally = Tally::default();
        let every = (lists / searches.max(1)).max(1);
        for number in 0..lists {
            if number % every == 0 && number / every < searches {
                // If a search is refused, cheap lists may still fit.
                let outcome = self.call(Call::Search).await?;
                tally.count(Call::Search, &outcome);
            }
            let outcome = self.call(Call::List).await?;
            tally.count(Call::List, &outcome);
            if matches!(outcome, CallOutcome::Refused) || self.is_stopped.load(Ordering::Relaxed) {
                break;
            }
        }
        Ok((self.name, tally))
    }

    async fn call(&self, call: Call) -> Result<CallOutcome, Failure> {
        let outcome = match self.limiter.check_all(call.check()?).await {
            Ok(decision) if decision.is_allowed() => CallOutcome::Made,
            Ok(_) => CallOutcome::Refused,
            Err(LimiterError::NeverFits(never)) => return Err(never.into()),
            // The store is slow or gone.
            Err(_) if call == Call::List => CallOutcome::MadeUncounted,
            Err(_) => CallOutcome::NotDared,
        };
        if matches!(outcome, CallOutcome::Made | CallOutcome::MadeUncounted) {
            sleep(self.upstream).await;
        }
        Ok(outcome)
    }
}

/// Calls that were made, and calls that were not, by reason.
#[derive(Default)]
struct Tally {
    lists: u64,
    searches: u64,
    uncounted: u64,
    refused: u64,
    not_dared: u64,
}

impl Tally {
    fn count(&mut self, call: Call, outcome: &CallOutcome) {
        let counter = match (outcome, call) {
            (CallOutcome::Made, Call::Search) => &mut self.searches,
            (CallOutcome::Made, _) => &mut self.lists,
            (CallOutcome::MadeUncounted, _) => &mut self.uncounted,
            (CallOutcome::Refused, _) => &mut self.refused,
            (CallOutcome::NotDared, _) => &mut self.not_dared,
        };
        *counter += 1;
    }

    fn add(&mut self, other: &Self) {
        self.lists += other.lists;
        self.searches += other.searches;
        self.uncounted += other.uncounted;
        self.refused += other.refused;
        self.not_dared += other.not_dared;
    }

    fn units(&self) -> u64 {
        self.lists * Call::List.cost() + self.searches * Call::Search.cost()
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} lists, {} searches, {} refused",
            self.lists, self.searches, self.refused
        )?;
        if self.uncounted + self.not_dared > 0 {
            write!(
                f,
                "; without a limiter {} lists made, {} searches not",
                self.uncounted, self.not_dared
            )?;
        }
        Ok(())
    }
}

fn setting<T: FromStr<Err: fmt::Display>>(name: &str, default: T) -> Result<T, String> {
    let Ok(text) = env::var(name) else {
        return Ok(default);
    };
    text.parse()
        .map_err(|error| format!("{name}={text:?} is not a number: {error}"))
}
