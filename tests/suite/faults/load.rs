//! Clients that ask as fast as they are answered, and what they were told.

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
    sync::{Mutex, OwnedMutexGuard},
    task::JoinSet,
    time::{Instant, sleep, timeout},
};
use tower_sliding_window::{Breaker, Charge, Check, DenyCache, Error, Limit, Limiter, RedisStore};

use super::reached;
use crate::support::TEST_TIMEOUT;

/// Counted over and over again within a run.
const BURST: Limit = Limit::per("burst", 20, Duration::from_millis(100));
/// Counts everything that was ever admitted of the keys that are charged twice, together.
const TOTAL: Limit = Limit::per_day("total", 100_000_000);
const KEYS: [&str; 8] = ["ada", "bob", "cy", "dee", "eve", "flo", "gus", "hal"];
/// The first of them are charged twice, the others once, for which the script has a way of its own.
const CHARGED_TWICE: usize = 4;

/// An answer that takes so much longer than its deadline will not come at all.
const STUCK: Duration = Duration::from_secs(10);

/// Between two questions of a client.
const PAUSE: Duration = Duration::from_millis(4);

/// Clients at work, until it is ended.
pub(super) struct Load {
    limiters: Vec<Limiter<RedisStore>>,
    clients: JoinSet<Seen>,
    number: usize,
    is_over: Arc<AtomicBool>,
    _turn: OwnedMutexGuard<()>,
}

impl Load {
    /// Two processes' worth of connections, and so many clients. Waits until no other load is at work.
    pub(super) async fn start(url: &str, clients: usize, deadline: Duration) -> Self {
        static TURN: std::sync::LazyLock<Arc<Mutex<()>>> = std::sync::LazyLock::new(Arc::default);

        let turn = Arc::clone(&TURN).lock_owned().await;
        let limiters: Vec<_> = (0..2)
            .map(|_| Limiter::new(RedisStore::builder(url).build().unwrap()))
            // Each question is to reach the server.
            .map(|limiter| limiter.deadline(deadline).deny_cache(DenyCache::off()))
            .collect();
        let is_over = Arc::new(AtomicBool::new(false));
        let mut tasks = JoinSet::new();
        for number in 0..clients {
            let (limiter, is_over) = (limiters[number % limiters.len()].clone(), Arc::clone(&is_over));
            tasks.spawn(async move {
                let mut seen = Seen::default();
                while !is_over.load(Ordering::Relaxed) {
                    seen.ask(&limiter, number % KEYS.len(), deadline).await;
                    sleep(PAUSE).await;
                }
                seen
            });
        }
        Self { limiters, clients: tasks, number: clients, is_over, _turn: turn }
    }

    /// A limiter of one of the processes.
    pub(super) fn limiter(&self) -> &Limiter<RedisStore> {
        &self.limiters[0]
    }

    /// Goes on until the server answers both processes again.
    pub(super) async fn goes_on(&self) {
        let healed = Instant::now();
        for limiter in &self.limiters {
            let limiter = limiter.clone().deadline(TEST_TIMEOUT);
            while limiter.peek(&TOTAL, "all").await.is_err() {
                assert!(healed.elapsed() < TEST_TIMEOUT, "nothing is decided any more");
                sleep(PAUSE).await;
            }
        }
    }

    /// Goes on until the server answers again, and a little longer.
    pub(super) async fn recover(&self) {
        self.goes_on().await;
        sleep(Duration::from_millis(200)).await;
    }

    /// Lets every client hear its last answer, and asks the server what it has counted.
    pub(super) async fn end(mut self) -> LoadReport {
        self.is_over.store(true, Ordering::Relaxed);
        let mut seen = Seen::default();
        while let Some(client) = self.clients.join_next().await {
            seen.join(client.unwrap());
        }
        // Without the breaker, which the last answers may have opened.
        let limiter = self.limiter().clone().breaker(Breaker::off()).deadline(TEST_TIMEOUT);
        let counted = limiter.peek(&TOTAL, "all").await.unwrap().used();
        LoadReport { seen, counted, clients: self.number }
    }
}

/// What the rules have to reckon with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum History {
    /// All is sent once, and remembered.
    Exact,
    /// What was sent twice is told when the second try ran, and counts from when the first did.
    Resent,
    /// The server has forgotten everything, so many times.
    Forgotten(usize),
}

/// When a unit was asked for, and when the server says it was decided.
#[derive(Clone, Copy, Debug)]
struct Admitted {
    asked: SystemTime,
    at: SystemTime,
}

/// What a client was told.
#[derive(Debug, Default)]
pub(super) struct Seen {
    /// By key.
    admitted: [Vec<Admitted>; KEYS.len()],
    refused: usize,
    /// By their innermost cause.
    failed: BTreeMap<String, usize>,
    slowest: Duration,
    /// What those who have joined it took in memory, with the room that a list keeps to grow.
    joined_bytes: usize,
}

impl Seen {
    async fn ask(&mut self, limiter: &Limiter<RedisStore>, key: usize, deadline: Duration) {
        let mut check = Check::new(Charge::new(BURST, KEYS[key], 1).unwrap());
        if key < CHARGED_TWICE {
            check = check.and(Charge::new(TOTAL, "all", 1).unwrap()).unwrap();
        }
        let (asked, asked_at) = (Instant::now(), SystemTime::now());
        let answer = timeout(deadline + STUCK, limiter.check_all(check)).await.expect("a request is stuck");
        self.slowest = self.slowest.max(asked.elapsed());
        match answer {
            Ok(decision) if decision.is_allowed() => {
                self.admitted[key].push(Admitted { asked: asked_at, at: decision.at() });
            }
            Ok(_) => self.refused += 1,
            Err(error) => *self.failed.entry(innermost(&error)).or_default() += 1,
        }
    }

    fn join(&mut self, other: Self) {
        self.joined_bytes += other.admitted.iter().map(Vec::capacity).sum::<usize>() * size_of::<Admitted>();
        self.admitted.iter_mut().zip(other.admitted).for_each(|(mine, others)| mine.extend(others));
        self.refused += other.refused;
        other.failed.into_iter().for_each(|(cause, times)| *self.failed.entry(cause).or_default() += times);
        self.slowest = self.slowest.max(other.slowest);
    }
}

/// The cause that has no other.
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

/// What all clients were told, and what the server has counted.
#[derive(Debug)]
pub(super) struct LoadReport {
    seen: Seen,
    counted: u64,
    clients: usize,
}

impl LoadReport {
    /// Prints what was reached, and holds it against the rules.
    pub(super) fn keeps_the_rules(mut self, fault: &str, history: History) -> Self {
        reached(fault, self.clients, &self);
        assert!(self.admitted() > 0, "nothing was decided: {self}");
        // Whoever is to answer a request, and panics, lets go of it: this is what is then said.
        assert!(!self.seen.failed.contains_key("channel closed"), "a task has panicked: {self}");
        let lives = match history {
            History::Forgotten(times) => 1 + times,
            History::Exact | History::Resent => {
                let admitted = self.admitted_twice() as u64;
                assert!(self.counted >= admitted, "what was admitted was counted: {self}");
                assert!(
                    self.counted <= admitted + self.failed() as u64,
                    "nothing else but what failed was counted: {self}"
                );
                1
            }
        };
        let units = lives * usize::try_from(BURST.units()).unwrap();
        for (key, admitted) in self.seen.admitted.iter_mut().enumerate() {
            let first = |unit: &Admitted| if history == History::Exact { unit.at } else { unit.asked };
            admitted.sort_by_key(first);
            for (place, earliest) in admitted.iter().enumerate() {
                let end = first(earliest) + BURST.window();
                let same_window = admitted[place..].iter().take_while(|unit| first(unit) < end);
                let count = same_window.filter(|unit| unit.at < end).count();
                assert!(count <= units, "{} has {count} units in a window of {units}", KEYS[key]);
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

    /// Of these, how many were charged twice.
    fn admitted_twice(&self) -> usize {
        self.seen.admitted[..CHARGED_TWICE].iter().map(Vec::len).sum()
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

    /// How many have failed with a cause that says this.
    pub(super) fn failed_with(&self, cause: &str) -> usize {
        self.seen.failed.iter().filter(|(text, _)| text.contains(cause)).map(|(_, times)| times).sum()
    }
}

impl fmt::Display for LoadReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (admitted, twice, counted) = (self.admitted(), self.admitted_twice(), self.counted);
        write!(f, "admitted {admitted}, {twice} of them twice, which counted {counted}, ")?;
        write!(f, "refused {}, failed {}", self.seen.refused, self.failed())?;
        let causes = self.seen.failed.iter().map(|(cause, times)| format!("{times} {cause:.48}")).collect::<Vec<_>>();
        write!(f, " ({}), slowest {:?}", causes.join("; "), self.seen.slowest)
    }
}
