//! Clients that send checks as fast as they get decisions, and a report of those decisions.

use std::{
    collections::BTreeMap,
    error::Error as _,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, SystemTime},
};

use tokio::{
    sync::{Mutex, OwnedMutexGuard, RwLock},
    task::JoinSet,
    time::{Instant, sleep, timeout},
};
use tower_sliding_window::{Charge, Check, Error, Limit, Limiter, limiter::Breaker};

use super::reached;
use crate::support::{TEST_TIMEOUT, redis_server::store_at};

/// Exhausted many times within a run.
const BURST: Limit = Limit::per("burst", 20, Duration::from_millis(100));
/// Counts all admissions of the keys that are charged twice.
const TOTAL: Limit = Limit::per_day("total", 100_000_000);
const KEYS: [&str; 8] = ["ada", "bob", "cy", "dee", "eve", "flo", "gus", "hal"];
/// The first keys are charged twice. The others are charged once, which the script decides in a
/// shorter way.
const CHARGED_TWICE: usize = 4;

/// A check that takes so much longer than its deadline is stuck.
const STUCK: Duration = Duration::from_secs(10);

/// The pause of a client between two checks.
const PAUSE: Duration = Duration::from_millis(4);

/// Clients that send checks until `end`.
pub(super) struct Load {
    limiters: Vec<Limiter>,
    clients: JoinSet<Seen>,
    number: usize,
    is_over: Arc<AtomicBool>,
    /// Read by each check that is on its way.
    underway: Arc<RwLock<()>>,
    _turn: OwnedMutexGuard<()>,
}

impl Load {
    /// Starts two limiters, as two processes would have, and the clients. Waits until no other load
    /// runs.
    pub(super) async fn start(url: &str, clients: usize, deadline: Duration) -> Self {
        static TURN: std::sync::LazyLock<Arc<Mutex<()>>> = std::sync::LazyLock::new(Arc::default);

        let turn = Arc::clone(&TURN).lock_owned().await;
        let limiters: Vec<_> = (0..2)
            .map(|_| Limiter::new(store_at(url).build().unwrap()))
            // Every check must reach the server.
            .map(|limiter| limiter.deadline(deadline).refusal_cache(Duration::ZERO))
            .collect();
        let (is_over, underway) = (Arc::new(AtomicBool::new(false)), Arc::default());
        let mut tasks = JoinSet::new();
        for number in 0..clients {
            let (limiter, is_over) = (
                limiters[number % limiters.len()].clone(),
                Arc::clone(&is_over),
            );
            let underway: Arc<RwLock<()>> = Arc::clone(&underway);
            tasks.spawn(async move {
                let mut seen = Seen::default();
                while !is_over.load(Ordering::Relaxed) {
                    let asking = underway.read().await;
                    seen.ask(&limiter, number % KEYS.len(), deadline).await;
                    drop(asking);
                    sleep(PAUSE).await;
                }
                seen
            });
        }
        Self {
            limiters,
            clients: tasks,
            number: clients,
            is_over,
            underway,
            _turn: turn,
        }
    }

    /// A limiter of one of the processes.
    pub(super) fn limiter(&self) -> &Limiter {
        &self.limiters[0]
    }

    /// Waits until all checks that are on their way are answered, and the server answers both
    /// limiters again.
    pub(super) async fn goes_on(&self) {
        let healed = Instant::now();
        drop(self.underway.write().await);
        for limiter in &self.limiters {
            let limiter = limiter.clone().deadline(TEST_TIMEOUT);
            while limiter.peek(&TOTAL, "all").await.is_err() {
                assert!(
                    healed.elapsed() < TEST_TIMEOUT,
                    "nothing is decided any more"
                );
                sleep(PAUSE).await;
            }
        }
    }

    /// Waits until the server answers again, and a little longer.
    pub(super) async fn recover(&self) {
        self.goes_on().await;
        sleep(Duration::from_millis(200)).await;
    }

    /// Waits for the last decision of every client, and reads the count of the server.
    pub(super) async fn end(mut self) -> LoadReport {
        self.is_over.store(true, Ordering::Relaxed);
        let mut seen = Seen::default();
        while let Some(client) = self.clients.join_next().await {
            seen.join(client.unwrap());
        }
        // Without the breaker, which the last checks may have opened.
        let limiter = self
            .limiter()
            .clone()
            .breaker(Breaker::OFF)
            .deadline(TEST_TIMEOUT);
        let counted = limiter.peek(&TOTAL, "all").await.unwrap().binding().used;
        LoadReport {
            seen,
            counted,
            clients: self.number,
        }
    }
}

/// Events that the rules allow for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum History {
    /// Everything is sent once, and the server keeps it.
    Exact,
    /// A check that was sent twice reports the time of the second try, and counts from the first.
    Resent,
    /// The server has lost its data, so many times.
    Forgotten(usize),
}

/// When a check was sent, and when the server decided it.
#[derive(Clone, Copy, Debug)]
struct Admitted {
    asked: SystemTime,
    at: SystemTime,
}

/// The decisions that a client got.
#[derive(Debug, Default)]
pub(super) struct Seen {
    /// By key.
    admitted: [Vec<Admitted>; KEYS.len()],
    refused: usize,
    /// By their innermost cause.
    failed: BTreeMap<String, usize>,
    slowest: Duration,
    /// The memory used by the lists of the clients that have joined, including their spare
    /// capacity.
    joined_bytes: usize,
}

impl Seen {
    async fn ask(&mut self, limiter: &Limiter, key: usize, deadline: Duration) {
        let mut check = Check::new(Charge::new(BURST, KEYS[key], 1).unwrap());
        if key < CHARGED_TWICE {
            check = check.and(Charge::new(TOTAL, "all", 1).unwrap()).unwrap();
        }
        let (asked, asked_at) = (Instant::now(), SystemTime::now());
        let answer = timeout(deadline + STUCK, limiter.check_all(check))
            .await
            .expect("a request is stuck");
        self.slowest = self.slowest.max(asked.elapsed());
        match answer {
            Ok(decision) if decision.is_allowed() => {
                self.admitted[key].push(Admitted {
                    asked: asked_at,
                    at: decision.at(),
                });
            }
            Ok(_) => self.refused += 1,
            Err(error) => *self.failed.entry(innermost(&error)).or_default() += 1,
        }
    }

    fn join(&mut self, other: Self) {
        self.joined_bytes +=
            other.admitted.iter().map(Vec::capacity).sum::<usize>() * size_of::<Admitted>();
        self.admitted
            .iter_mut()
            .zip(other.admitted)
            .for_each(|(mine, others)| mine.extend(others));
        self.refused += other.refused;
        other
            .failed
            .into_iter()
            .for_each(|(cause, times)| *self.failed.entry(cause).or_default() += times);
        self.slowest = self.slowest.max(other.slowest);
    }
}

/// The innermost cause of an error.
fn innermost(error: &Error) -> String {
    if let Error::TimedOut { .. } = error {
        return "timed out".to_owned();
    }
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = error.to_string();
        cause = error.source();
    }
    text
}

/// The decisions that all clients got, and the count of the server.
#[derive(Debug)]
pub(super) struct LoadReport {
    seen: Seen,
    counted: u64,
    clients: usize,
}

impl LoadReport {
    /// Prints the report, and checks it against the rules.
    pub(super) fn keeps_the_rules(mut self, fault: &str, history: History) -> Self {
        reached(fault, self.clients, &self);
        assert!(self.admitted() > 0, "nothing was decided: {self}");
        // A task that panics drops the channel to its caller, which causes this error.
        assert!(
            !self.seen.failed.contains_key("channel closed"),
            "a task has panicked: {self}"
        );
        let lives = match history {
            History::Forgotten(times) => 1 + times,
            History::Exact | History::Resent => {
                let admitted = self.admitted_twice() as u64;
                assert!(
                    self.counted >= admitted,
                    "every admission was counted: {self}"
                );
                assert!(
                    self.counted <= admitted + self.failed() as u64,
                    "only admitted and failed checks were counted: {self}"
                );
                1
            }
        };
        let units = lives * usize::try_from(BURST.units()).unwrap();
        for (key, admitted) in self.seen.admitted.iter_mut().enumerate() {
            let first = |unit: &Admitted| {
                if history == History::Exact {
                    unit.at
                } else {
                    unit.asked
                }
            };
            admitted.sort_by_key(first);
            for (place, earliest) in admitted.iter().enumerate() {
                let end = first(earliest) + BURST.window();
                let same_window = admitted[place..]
                    .iter()
                    .take_while(|unit| first(unit) < end);
                let count = same_window.filter(|unit| unit.at < end).count();
                assert!(
                    count <= units,
                    "{} has {count} units in a window of {units}",
                    KEYS[key]
                );
            }
        }
        self
    }

    pub(super) fn decided(&self) -> usize {
        self.admitted() + self.seen.refused
    }

    pub(super) fn admitted(&self) -> usize {
        self.seen.admitted.iter().map(Vec::len).sum()
    }

    /// Of these, the admissions that were charged twice.
    fn admitted_twice(&self) -> usize {
        self.seen.admitted[..CHARGED_TWICE]
            .iter()
            .map(Vec::len)
            .sum()
    }

    pub(super) fn remembered_bytes(&self) -> usize {
        self.seen.joined_bytes
    }

    pub(super) fn slowest(&self) -> Duration {
        self.seen.slowest
    }

    pub(super) fn failed(&self) -> usize {
        self.seen.failed.values().sum()
    }

    /// The number of failures whose cause contains this text.
    pub(super) fn failed_with(&self, cause: &str) -> usize {
        self.seen
            .failed
            .iter()
            .filter(|(text, _)| text.contains(cause))
            .map(|(_, times)| times)
            .sum()
    }
}

impl fmt::Display for LoadReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (admitted, twice, counted) = (self.admitted(), self.admitted_twice(), self.counted);
        write!(
            f,
            "admitted {admitted}, {twice} of them twice, which counted {counted}, "
        )?;
        write!(f, "refused {}, failed {}", self.seen.refused, self.failed())?;
        let causes = self
            .seen
            .failed
            .iter()
            .map(|(cause, times)| format!("{times} {cause:.48}"))
            .collect::<Vec<_>>();
        write!(
            f,
            " ({}), slowest {:?}",
            causes.join("; "),
            self.seen.slowest
        )
    }
}
