//! Replays a history on a store and on the oracle, step by step.

use std::{collections::HashMap, mem, time::Duration};

use tokio::time::{Instant, timeout};
use tower_sliding_window::{Charge, Check, Decision, Key, Limit, Store, settlement::Settlement};

use crate::{
    history::{History, Step, described, for_the_other_key},
    oracle::Oracle,
    trial::Trial,
};

/// A store may look at so many entries for a retry time.
const ENTRIES_READ: usize = 100;

/// How long a history is shrunk, and a try of it may take.
const SHRINKING: Duration = Duration::from_secs(10);

struct Replay<'a> {
    trial: &'a Trial,
    oracle: Oracle,
    number: u64,
    /// The admitted checks, by the number of their step.
    admitted: HashMap<u64, (Check, Decision)>,
    refused: Option<(Check, Duration)>,
}

/// Replays a history, until a reply differs from the oracle's. Returns the place of the step that
/// differs, and how it does.
pub(crate) async fn replay(trial: &Trial, history: &History) -> Result<(), (usize, String)> {
    trial.clock.step_back(Duration::MAX);
    trial.clock.advance(history.begins);
    let oracle = Oracle::new().reading_entries(ENTRIES_READ);
    let mut replay = Replay {
        trial,
        oracle,
        number: 0,
        admitted: HashMap::new(),
        refused: None,
    };
    for (place, (number, step)) in history.steps.iter().enumerate() {
        replay.number = *number;
        replay
            .take(step, &history.probes)
            .await
            .map_err(|difference| (place, difference))?;
    }
    Ok(())
}

impl Replay<'_> {
    async fn take(&mut self, step: &Step, probes: &[Charge]) -> Result<(), String> {
        let clock = &self.trial.clock;
        match step {
            Step::Advance(time) => clock.advance(*time),
            Step::ClockBack(time) => {
                // A store may forget units that have left at once, or when it next writes.
                for probe in probes {
                    let limit = probe.limit();
                    let key = probe.key();
                    match self
                        .decide(&Check::new(probe.clone()))
                        .await?
                        .binding()
                        .used
                    {
                        0 => self.reset(limit, key).await?,
                        _ => drop(
                            self.decide(&Check::new(Charge::spent(limit.clone(), key, 1)))
                                .await?,
                        ),
                    }
                }
                clock.step_back(*time);
                for probe in probes {
                    let check = Check::new(probe.clone());
                    let used = self.decide(&check).await?.binding().used;
                    // A refusal may move a hundred entries only.
                    for _ in 0..used.min(1_000) / 100 {
                        let _ = self.decide(&check).await?;
                    }
                }
            }
            Step::Decide { check, times } => {
                for _ in 0..*times {
                    let _ = self.decide(check).await?;
                }
            }
            Step::Retry(early) => {
                if let Some((check, wait)) = self.refused.take() {
                    clock.advance(wait.saturating_sub(*early));
                    let _ = self.decide(&check).await?;
                }
            }
            Step::Repeat { step, is_elsewhere } => {
                let check = self.admitted.get(step).map(|(check, _)| check);
                let check = if *is_elsewhere {
                    check.and_then(for_the_other_key)
                } else {
                    check.cloned()
                };
                if let Some(check) = check {
                    let _ = self.decide(&check).await?;
                }
            }
            Step::Settle {
                step,
                is_of_first,
                cost,
            } => {
                if let Some((check, decision)) = self.admitted.get(step) {
                    let mut is_first = true;
                    let cost = |_: &_| (mem::take(&mut is_first) || !is_of_first).then_some(*cost);
                    self.settle(Settlement::new(check.clone(), decision, cost))
                        .await?;
                }
            }
            Step::Reset(limit, key) => self.reset(limit, key).await?,
        }
        Ok(())
    }

    /// The store and its clone take turns.
    fn store(&self) -> &dyn Store {
        &*self.trial.handles[usize::from(self.number.is_multiple_of(2))]
    }

    async fn reset(&mut self, limit: &Limit, key: &Key) -> Result<(), String> {
        self.oracle.reset(limit, key);
        let reset = self.store().reset(limit.clone(), key.clone()).await;
        reset.map_err(|error| format!("expected a reset of {:?}, got {error:?}", limit.name()))
    }

    async fn decide(&mut self, check: &Check) -> Result<Decision, String> {
        let now = self.trial.clock.now();
        let at_once = if self.number.is_multiple_of(3) {
            self.store().decide_now(check)
        } else {
            None
        };
        let decided = match at_once {
            Some(decided) => decided,
            None => self.store().decide(check.clone()).await,
        };
        let differs = |difference: String| format!("{}: {difference}", described(check));
        let decision =
            decided.map_err(|error| differs(format!("expected a decision, got {error:?}")))?;
        self.oracle.decide(now, check, &decision).map_err(differs)?;
        match decision.retry_after() {
            Some(wait) => self.refused = Some((check.clone(), wait)),
            None => drop(
                self.admitted
                    .insert(self.number, (check.clone(), decision.clone())),
            ),
        }
        Ok(decision)
    }

    async fn settle(&mut self, settlement: Settlement) -> Result<(), String> {
        let differs = |difference: String| {
            format!(
                "a settlement of the {}: {difference}",
                described(&settlement.check)
            )
        };
        let settled = self.store().settle(settlement.clone()).await;
        let settled =
            settled.map_err(|error| differs(format!("expected a reply, got {error:?}")))?;
        self.oracle
            .settle(self.trial.clock.now(), &settlement, &settled)
            .map_err(differs)
    }
}

/// Drops steps while the store still differs, and tells what is left; `None` if it differs no more.
pub(crate) async fn shrink(make: &impl AsyncFn() -> Trial, history: History) -> Option<String> {
    let started = Instant::now();
    let failure_of = async |mut history: History| {
        let replayed = timeout(SHRINKING, async {
            replay(&make().await, &history).await.err()
        })
        .await;
        let (place, difference) = replayed.unwrap_or_default()?;
        history.steps.truncate(place + 1);
        Some((history, difference))
    };
    let (mut history, mut difference) = failure_of(history).await?;
    let mut dropped = history.steps.len();
    while dropped > 0 {
        let mut from = 0;
        while from + dropped < history.steps.len() && started.elapsed() < SHRINKING {
            let mut shorter = history.clone();
            shorter.steps.drain(from..from + dropped);
            match failure_of(shorter).await {
                Some(failure) => (history, difference) = failure,
                None => from += dropped,
            }
        }
        dropped /= 2;
    }
    let steps = history
        .steps
        .iter()
        .map(|(number, step)| format!("\n    step {number}: {step}"));
    Some(format!(
        "{difference}. The steps that lead there:{}",
        steps.collect::<String>()
    ))
}
