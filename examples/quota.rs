//! An upstream's daily quota of 10,000 units, shared by eight regions, with cheap calls and dear ones.
//!
//! ```sh
//! cargo run --example quota
//! ```
//!
//! Our limit is 9,500, below the real quota. A `list` is 1 unit; a `search` is 100, and has a limit of its own on top:
//! both are decided together, all or nothing. When the limiter is not available, lists are made all the same (fail-open),
//! searches are not (fail-closed).
//!
//! | variable | meaning | default |
//! |---|---|---|
//! | `LISTS`, `SEARCHES` | what each region would like to do | 600, 20 |
//! | `CALL_MILLIS` | how long the upstream takes for a call | 1 |
//! | `REDIS_URL` | share the quota through this Redis | the in-process store |

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
use tower_sliding_window::{Charge, Check, Error as LimiterError, Limit, Limiter, MemoryStore, RedisStore, Store};

const QUOTA: Limit = Limit::per_day("quota", 9_500);
const SEARCHES: Limit = Limit::per_day("searches", 60);

const REGIONS: [&str; 8] = ["us", "gb", "de", "fr", "jp", "kr", "br", "in"];
/// The upstream counts by the key of our account, so all regions spend from one.
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

async fn share<S: Store>(limiter: Limiter<S>) -> Result<(), Failure> {
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
        let region = Region { name, limiter: limiter.clone(), upstream, is_stopped: Arc::clone(&is_stopped) };
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
            // Calls that are on their way come to their end.
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
    /// Dearer than a day's quota.
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

    /// What it takes: from the quota, and for a search one of the day's searches, too.
    fn check(self) -> Result<Check, Failure> {
        let check = Check::new(Charge::new(QUOTA, ACCOUNT, self.cost())?);
        Ok(if self == Self::Search { check.and(Charge::new(SEARCHES, ACCOUNT, 1)?)? } else { check })
    }
}

struct Region<S> {
    name: &'static str,
    limiter: Limiter<S>,
    upstream: Duration,
    is_stopped: Arc<AtomicBool>,
}

/// What became of a call.
enum Exchange {
    Made,
    MadeUncounted,
    Refused,
    NotDared,
}

impl<S: Store> Region<S> {
    /// Makes its calls, the searches spread among the lists, until all are made or the quota is spent.
    async fn work(self, lists: u64, searches: u64) -> Result<(&'static str, Tally), Failure> {
        let mut tally = Tally::default();
        let every = (lists / searches.max(1)).max(1);
        for number in 0..lists {
            if number % every == 0 && number / every < searches {
                // Too dear for now, or no searches left: lists may go on.
                let outcome = self.call(Call::Search).await?;
                tally.count(Call::Search, &outcome);
            }
            let outcome = self.call(Call::List).await?;
            tally.count(Call::List, &outcome);
            if matches!(outcome, Exchange::Refused) || self.is_stopped.load(Ordering::Relaxed) {
                break;
            }
        }
        Ok((self.name, tally))
    }

    async fn call(&self, call: Call) -> Result<Exchange, Failure> {
        let outcome = match self.limiter.check_all(call.check()?).await {
            Ok(decision) if decision.is_allowed() => Exchange::Made,
            Ok(_) => Exchange::Refused,
            Err(LimiterError::NeverFits(never)) => return Err(never.into()),
            // The store is slow or gone.
            Err(_) if call == Call::List => Exchange::MadeUncounted,
            Err(_) => Exchange::NotDared,
        };
        if matches!(outcome, Exchange::Made | Exchange::MadeUncounted) {
            sleep(self.upstream).await;
        }
        Ok(outcome)
    }
}

/// Calls that were made, and why others were not.
#[derive(Default)]
struct Tally {
    lists: u64,
    searches: u64,
    uncounted: u64,
    refused: u64,
    not_dared: u64,
}

impl Tally {
    fn count(&mut self, call: Call, outcome: &Exchange) {
        let counter = match (outcome, call) {
            (Exchange::Made, Call::Search) => &mut self.searches,
            (Exchange::Made, _) => &mut self.lists,
            (Exchange::MadeUncounted, _) => &mut self.uncounted,
            (Exchange::Refused, _) => &mut self.refused,
            (Exchange::NotDared, _) => &mut self.not_dared,
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
        write!(f, "{} lists, {} searches, {} refused", self.lists, self.searches, self.refused)?;
        if self.uncounted + self.not_dared > 0 {
            write!(f, "; without a limiter {} lists made, {} searches not", self.uncounted, self.not_dared)?;
        }
        Ok(())
    }
}

fn setting<T: FromStr<Err: fmt::Display>>(name: &str, default: T) -> Result<T, String> {
    let Ok(text) = env::var(name) else { return Ok(default) };
    text.parse().map_err(|error| format!("{name}={text:?} is not a number: {error}"))
}
