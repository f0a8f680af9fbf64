//! Clients that send checks for as long as a test runs, and a report of the decisions.

use std::{
    mem,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use tokio::{task::JoinSet, time::sleep};
use tower_sliding_window::{Check, Limiter};

use super::{TEST_TIMEOUT, outage::CLIENTS};

/// The pause of a client between two checks.
const PAUSE: Duration = Duration::from_millis(10);

pub(crate) struct Load {
    clients: JoinSet<()>,
    is_over: Arc<AtomicBool>,
    report: Arc<Mutex<Report>>,
}

/// The decisions of all clients since the last report.
#[derive(Debug, Default)]
pub(crate) struct Report {
    pub(crate) admitted: u64,
    pub(crate) decided: u64,
    pub(crate) failed: u64,
    pub(crate) slowest: Duration,
    /// The longest time without any decision.
    pub(crate) longest_gap: Duration,
    last_decision: Option<Instant>,
    last_failure: Option<Instant>,
}

impl Load {
    /// Each client has a number. `ask` returns whether it was admitted, or `None` if there was no
    /// decision.
    pub(crate) fn start<F>(ask: impl Fn(usize) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Option<bool>> + Send,
    {
        let (ask, is_over, report) = (
            Arc::new(ask),
            Arc::<AtomicBool>::default(),
            Arc::<Mutex<Report>>::default(),
        );
        let mut clients = JoinSet::new();
        for number in 0..CLIENTS {
            let (ask, is_over, report) =
                (Arc::clone(&ask), Arc::clone(&is_over), Arc::clone(&report));
            clients.spawn(async move {
                while !is_over.load(Ordering::SeqCst) {
                    let asked = Instant::now();
                    let answer = ask(number).await;
                    report.lock().unwrap().record(answer, asked);
                    sleep(PAUSE).await;
                }
            });
        }
        Self {
            clients,
            is_over,
            report,
        }
    }

    /// Each client sends the check of its number to the limiter.
    pub(crate) fn of_checks(
        limiter: &Limiter,
        check: impl Fn(usize) -> Check + Send + Sync + 'static,
    ) -> Self {
        let limiter = limiter.clone();
        Self::start(move |number| {
            let decision = limiter.check_all(check(number));
            async { decision.await.ok().map(|decision| decision.is_allowed()) }
        })
    }

    /// Returns the report since the last call.
    pub(crate) fn report(&self) -> Report {
        mem::take(&mut *self.report.lock().unwrap())
    }

    /// Waits until more checks are decided.
    pub(crate) async fn goes_on(&self) {
        let (before, asked) = (self.report.lock().unwrap().decided, Instant::now());
        // A busy machine needs time to find the new primary of a cluster.
        while self.report.lock().unwrap().decided <= before + 500 {
            assert!(asked.elapsed() < 3 * TEST_TIMEOUT, "nothing is decided");
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// Waits for the last decision of every client.
    pub(crate) async fn end(self) -> Report {
        self.is_over.store(true, Ordering::SeqCst);
        let report = Arc::clone(&self.report);
        self.clients.join_all().await;
        mem::take(&mut *report.lock().unwrap())
    }
}

impl Report {
    fn record(&mut self, is_admitted: Option<bool>, asked: Instant) {
        let now = Instant::now();
        self.slowest = self.slowest.max(now - asked);
        match is_admitted {
            Some(is_admitted) => {
                self.admitted += u64::from(is_admitted);
                self.decided += 1;
                let last = self.last_decision.replace(now);
                self.longest_gap = self
                    .longest_gap
                    .max(last.map(|last| now - last).unwrap_or_default());
            }
            None => {
                self.failed += 1;
                self.last_failure = Some(now);
            }
        }
    }

    /// The time from this moment to the last failure.
    pub(crate) fn failed_after(&self, moment: Instant) -> Duration {
        self.last_failure
            .map(|failure| failure.saturating_duration_since(moment))
            .unwrap_or_default()
    }
}
