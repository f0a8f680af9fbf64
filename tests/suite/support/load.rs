//! Clients that ask for as long as a test runs, and what they are told.

use std::{
    mem,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::{task::JoinSet, time::sleep};
use tower_sliding_window::{Check, Limiter, Store};

use super::{
    TEST_TIMEOUT,
    outage::{CLIENTS, DEADLINE},
};

/// Between two questions of a client.
const PAUSE: Duration = Duration::from_millis(10);

pub(crate) struct Load {
    clients: JoinSet<()>,
    is_over: Arc<AtomicBool>,
    told: Arc<Mutex<Told>>,
}

/// What all clients were told since somebody last asked for it.
#[derive(Debug, Default)]
pub(crate) struct Told {
    pub(crate) admitted: u64,
    pub(crate) decided: u64,
    pub(crate) failed: u64,
    pub(crate) slowest: Duration,
    /// Without any decision.
    pub(crate) longest_gap: Duration,
    last_decision: Option<Instant>,
    last_failure: Option<Instant>,
}

impl Load {
    /// Each client has a number, and asks in its way whether it is admitted. `None` is that there was no decision.
    pub(crate) fn start<F>(ask: impl Fn(usize) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Option<bool>> + Send,
    {
        let (ask, is_over, told) = (Arc::new(ask), Arc::<AtomicBool>::default(), Arc::<Mutex<Told>>::default());
        let mut clients = JoinSet::new();
        for number in 0..CLIENTS {
            let (ask, is_over, told) = (Arc::clone(&ask), Arc::clone(&is_over), Arc::clone(&told));
            clients.spawn(async move {
                while !is_over.load(Ordering::SeqCst) {
                    let asked = Instant::now();
                    let answer = ask(number).await;
                    told.lock().unwrap().hears(answer, asked);
                    sleep(PAUSE).await;
                }
            });
        }
        Self { clients, is_over, told }
    }

    /// Each client asks the limiter for the check of its number, with the usual deadline.
    pub(crate) fn of_checks<S: Store>(
        limiter: &Limiter<S>,
        check: impl Fn(usize) -> Check + Send + Sync + 'static,
    ) -> Self {
        let limiter = limiter.clone().deadline(DEADLINE);
        Self::start(move |number| {
            let decision = limiter.check_all(check(number));
            async { decision.await.ok().map(|decision| decision.is_allowed()) }
        })
    }

    /// What was told since this was last asked.
    pub(crate) fn told(&self) -> Told {
        mem::take(&mut *self.told.lock().unwrap())
    }

    /// Until some more is decided.
    pub(crate) async fn goes_on(&self) {
        let (before, asked) = (self.told.lock().unwrap().decided, Instant::now());
        // A busy machine takes its time to find a cluster's new primary.
        while self.told.lock().unwrap().decided <= before + 500 {
            assert!(asked.elapsed() < 3 * TEST_TIMEOUT, "nothing is decided");
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// Lets every client hear its last answer.
    pub(crate) async fn end(self) -> Told {
        self.is_over.store(true, Ordering::SeqCst);
        let told = Arc::clone(&self.told);
        self.clients.join_all().await;
        mem::take(&mut *told.lock().unwrap())
    }
}

impl Told {
    fn hears(&mut self, is_admitted: Option<bool>, asked: Instant) {
        let now = Instant::now();
        self.slowest = self.slowest.max(now - asked);
        match is_admitted {
            Some(is_admitted) => {
                self.admitted += u64::from(is_admitted);
                self.decided += 1;
                let last = self.last_decision.replace(now);
                self.longest_gap = self.longest_gap.max(last.map(|last| now - last).unwrap_or_default());
            }
            None => {
                self.failed += 1;
                self.last_failure = Some(now);
            }
        }
    }

    /// How long after this moment the last failure was.
    pub(crate) fn failed_after(&self, moment: Instant) -> Duration {
        self.last_failure.map(|failure| failure.saturating_duration_since(moment)).unwrap_or_default()
    }
}
