//! Random histories of callers, settlements and checks, whose calls and replies are late. In the
//! end nobody waits for units that are left.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::{
    task::JoinSet,
    time::{Instant, sleep, timeout},
};
use tower_sliding_window::{
    Charge, Check, Decision, Key, Limit, Limiter, MemoryStore, Store,
    settlement::{Settled, Settlement},
    store::StoreFuture,
};

use crate::support::{Numbers, check_of, ms};

fn of(limit: &Limit, key: impl Into<Key>, cost: u64) -> Charge {
    Charge::new(limit.clone(), key, cost).unwrap()
}

/// A store whose calls arrive and are answered after delays of the test.
#[derive(Clone)]
struct Delayed {
    store: MemoryStore,
    delays: Arc<Mutex<Numbers>>,
    most: u64,
}

impl Delayed {
    fn new(seed: u64, most: u64) -> Self {
        Self {
            store: MemoryStore::new(),
            delays: Arc::new(Mutex::new(Numbers(seed))),
            most,
        }
    }

    fn delay(&self) -> Duration {
        ms(self.delays.lock().unwrap().below(self.most + 1))
    }
}

impl std::fmt::Debug for Delayed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Delayed")
    }
}

impl Store for Delayed {
    fn decide(&self, check: Check) -> StoreFuture<Decision> {
        let (store, before, after) = (self.store.clone(), self.delay(), self.delay());
        Box::pin(async move {
            sleep(before).await;
            let reply = store.decide(check).await;
            sleep(after).await;
            reply
        })
    }

    fn settle(&self, settlement: Settlement) -> StoreFuture<Settled> {
        let (store, before, after) = (self.store.clone(), self.delay(), self.delay());
        Box::pin(async move {
            sleep(before).await;
            let reply = store.settle(settlement).await;
            sleep(after).await;
            reply
        })
    }

    fn reset(&self, limit: Limit, key: Key) -> StoreFuture<()> {
        self.store.reset(limit, key)
    }
}

#[derive(Clone, Copy, Debug)]
struct Kind {
    /// The cost of all callers, since a woken caller that needs more than is left wakes no other.
    cost: u64,
    /// If callers are in one of two lines, and not in a line each.
    has_two_lines: bool,
    /// If some callers hang up.
    hang_up: bool,
    /// If checks outside of the lines take units.
    has_checks: bool,
    /// The most milliseconds of a call before the store decides, and of its reply.
    most_delay: u64,
}

/// Eight units are used under a limit that all callers share. Some of them return. In the end
/// nobody waits for units that are left.
async fn history(seed: u64, kind: Kind) -> Result<(), String> {
    let mut numbers = Numbers(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let store = Delayed::new(seed, kind.most_delay);
    let limiter = Limiter::new(store.clone()).deadline(Duration::from_secs(100));
    let (shared, own) = (Limit::per_hour("shared", 8), Limit::per_hour("own", 1_000));
    let mut spent = Vec::new();
    for _ in 0..8 {
        let check = Check::new(of(&shared, "all", 1));
        let decision = store.store.decide(check.clone()).await.unwrap();
        spent.push((check, decision));
    }
    let events: Arc<Mutex<Vec<String>>> = Arc::default();
    let begun = Instant::now();
    let log = move |events: &Mutex<Vec<String>>, event: String| {
        events
            .lock()
            .unwrap()
            .push(format!("{:?} {event}", begun.elapsed()));
    };
    // The cost and the line of each caller.
    let waiting: Arc<Mutex<BTreeMap<u64, (u64, u64)>>> = Arc::default();
    let (mut callers, mut others) = (JoinSet::new(), JoinSet::new());
    for number in 0..numbers.below(4) + 2 {
        let (at, cost) = (ms(numbers.below(40)), kind.cost);
        let line = if kind.has_two_lines {
            numbers.below(2)
        } else {
            number
        };
        let patience = if kind.hang_up && numbers.below(2) == 0 {
            ms(1 + numbers.below(60))
        } else {
            Duration::MAX
        };
        let check = check_of([of(&shared, "all", cost), of(&own, line, 1)]);
        let (limiter, waiting, events) = (limiter.clone(), waiting.clone(), events.clone());
        callers.spawn(async move {
            sleep(at).await;
            waiting.lock().unwrap().insert(number, (cost, line));
            log(
                &events,
                format!("caller {number} of {cost} arrives in line {line}"),
            );
            let outcome = timeout(patience, limiter.acquire_all(check, Duration::MAX)).await;
            let outcome = outcome.map(|decision| decision.unwrap().is_allowed());
            log(&events, format!("caller {number} leaves: {outcome:?}"));
            waiting.lock().unwrap().remove(&number);
        });
    }
    for (check, decision) in spent {
        let (at, returns) = (ms(numbers.below(60)), numbers.below(4) > 0);
        let (limiter, events) = (limiter.clone(), events.clone());
        others.spawn(async move {
            if returns {
                sleep(at).await;
                log(&events, "a settlement begins".to_owned());
                let settled = limiter
                    .settle(Settlement::new(check, &decision, |_| Some(0)))
                    .await
                    .unwrap();
                log(
                    &events,
                    format!("settled: {} left", settled.decision.remaining()),
                );
            }
        });
    }
    for _ in 0..if kind.has_checks { numbers.below(3) } else { 0 } {
        let (at, cost) = (ms(numbers.below(60)), numbers.below(3) + 1);
        let (limiter, events, shared) = (limiter.clone(), events.clone(), shared.clone());
        others.spawn(async move {
            sleep(at).await;
            let is_allowed = limiter
                .check(&shared, "all", cost)
                .await
                .unwrap()
                .is_allowed();
            log(&events, format!("a check of {cost}: {is_allowed}"));
        });
    }
    others.join_all().await;
    sleep(Duration::from_secs(2)).await;
    let left = Limiter::new(store.store)
        .peek(&shared, "all")
        .await
        .unwrap()
        .remaining();
    let waiting = waiting.lock().unwrap().clone();
    callers.abort_all();
    // Of several callers in a line, the one that was refused first is the first.
    let fits = |line: u64| {
        waiting
            .values()
            .filter(|(_, of)| *of == line)
            .all(|(cost, _)| *cost <= left)
    };
    let lost: Vec<_> = waiting
        .iter()
        .filter(|(_, (_, line))| fits(*line))
        .collect();
    if lost.is_empty() {
        return Ok(());
    }
    let events = events.lock().unwrap().join("\n");
    Err(format!(
        "seed {seed}, {kind:?}: {left} left, and (caller, (cost, line)) wait: {lost:?}\n{events}"
    ))
}

#[tokio::test(start_paused = true)]
async fn no_caller_waits_for_units_that_are_left() {
    let mut failures = Vec::new();
    for seed in 0..3_000 {
        let chosen = |bit: u64| seed >> bit & 1 == 1;
        let (has_two_lines, hang_up, has_checks) = (chosen(0), chosen(1), chosen(2));
        let (cost, most_delay) = (
            if chosen(3) { 1 } else { 1 + seed % 5 },
            if chosen(4) && chosen(5) { 0 } else { 8 },
        );
        let kind = Kind {
            cost,
            has_two_lines,
            hang_up,
            has_checks,
            most_delay,
        };
        failures.extend(history(seed, kind).await.err());
    }
    let shortest = failures.iter().min_by_key(|failure| failure.len());
    assert!(
        failures.is_empty(),
        "{} of 3,000 histories; the shortest: {}",
        failures.len(),
        shortest.unwrap()
    );
}
