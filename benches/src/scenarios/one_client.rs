//! The cost of one client for Redis: script time of each kind of check, on one key with so many
//! entries or open reservations.

use std::time::{Duration, UNIX_EPOCH};

use tokio::task::JoinSet;
use tower_sliding_window::{
    Algorithm, Charge, Check, Decision, Limit, Limiter, RedisStore, check::AdmissionId,
    settlement::Settlement, store::ManualClock,
};

use super::Outcome;
use crate::{
    load::{HOUR, TASKS, two_threads},
    measure::Effort,
    server::Server,
};

/// The number of checks behind a figure, which is their mean. They run one at a time.
const SAMPLE: u32 = 20;

/// The content of a key.
#[derive(Clone, Copy)]
enum Filled {
    /// Admissions of this cost.
    Admissions(u64),
    Reservations,
}

const KEYS: [(&str, Algorithm, Filled); 8] = [
    ("log, cost 1", Algorithm::SLIDING_LOG, Filled::Admissions(1)),
    ("log, cost 2", Algorithm::SLIDING_LOG, Filled::Admissions(2)),
    (
        "log, reservations",
        Algorithm::SLIDING_LOG,
        Filled::Reservations,
    ),
    (
        "compact(128), cost 2",
        Algorithm::compact_log(128),
        Filled::Admissions(2),
    ),
    (
        "compact(128), reservations",
        Algorithm::compact_log(128),
        Filled::Reservations,
    ),
    (
        "counter, reservations",
        Algorithm::SLIDING_WINDOW_COUNTER,
        Filled::Reservations,
    ),
    (
        "fixed, cost 2",
        Algorithm::FIXED_WINDOW,
        Filled::Admissions(2),
    ),
    (
        "fixed, reservations",
        Algorithm::FIXED_WINDOW,
        Filled::Reservations,
    ),
];

pub(crate) fn run(effort: Effort) -> Outcome {
    let runtime = two_threads();
    println!("\nus of script, the mean of {SAMPLE} checks; a dash where the case cannot be");
    println!(
        "| key | entries | admission | refusal at cost 1 | refusal at the largest cost | settlement | many leave at once | clock back |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    for (name, algorithm, filled) in KEYS {
        for entries in [10, effort.entries / 100, effort.entries] {
            let row = runtime.block_on(row(algorithm, filled, entries));
            let cells: Vec<String> = row
                .iter()
                .map(|micros| micros.map_or("–".to_owned(), |us| format!("{us:.0}")))
                .collect();
            println!("| {name} | {entries} | {} |", cells.join(" | "));
        }
    }
    Ok(Vec::new())
}

async fn row(algorithm: Algorithm, filled: Filled, entries: usize) -> [Option<f64>; 6] {
    let (server, clock) = (Server::start(), ManualClock::new());
    let store = RedisStore::builder(server.url())
        .clock(&clock)
        .build()
        .expect("valid settings");
    let limiter = Limiter::new(store)
        .deadline(Duration::from_secs(60))
        .refusal_cache(Duration::ZERO);
    // To the start of a fixed window, so that none ends while the key is filled.
    let since = clock
        .now()
        .duration_since(UNIX_EPOCH)
        .expect("a time after 1970");
    clock.advance(HOUR - Duration::from_secs(since.as_secs() % HOUR.as_secs()));
    let limit = |units| {
        Limit::new("calls", units, HOUR)
            .expect("a valid limit")
            .with_algorithm(algorithm)
    };
    let wide = limit(Limit::MAX_UNITS);
    let check = |limit: &Limit, cost| {
        Check::new(Charge::new(limit.clone(), "key", cost).expect("a cost below the limit"))
    };
    let ask = async |check: Check| limiter.check_all(check).await.expect("an answer");
    let mut admitted: Vec<(Check, Decision)> = Vec::new();
    let reserve = || {
        Check::new(
            Charge::new(wide.clone(), "key", 1)
                .expect("a cost of 1")
                .reserve(HOUR),
        )
    };
    for _ in 0..SAMPLE {
        let check = reserve();
        admitted.push((check.clone(), ask(check).await));
    }
    fill(&limiter, &wide, &clock, filled, entries).await;
    let used = limiter
        .peek(&wide, "key")
        .await
        .expect("an answer")
        .binding()
        .used;
    let full = limit(used);
    server.run::<()>("CONFIG RESETSTAT");
    let mut row = [None; 6];
    let measured = |server: &Server| {
        let micros = server.script_micros();
        server.run::<()>("CONFIG RESETSTAT");
        Some(micros)
    };
    for _ in 0..SAMPLE {
        assert!(!ask(check(&full, 1)).await.is_allowed());
    }
    row[1] = measured(&server);
    for _ in 0..SAMPLE {
        assert!(!ask(check(&full, used)).await.is_allowed());
    }
    row[2] = measured(&server);
    for (check, decision) in &admitted {
        let settlement = Settlement::new(check.clone(), decision, |_| Some(3));
        assert!(
            limiter
                .settle(settlement)
                .await
                .expect("an answer")
                .was_applied
        );
    }
    row[3] = measured(&server);
    for _ in 0..SAMPLE {
        assert!(ask(check(&wide, 1)).await.is_allowed());
    }
    row[0] = measured(&server);
    // Of 2,000 seconds of entries, the later half is ahead of the clock, and the earlier half has
    // expired by then.
    clock.step_back(Duration::from_secs(1_000));
    for _ in 0..SAMPLE {
        let _ = ask(check(&full, used)).await;
    }
    row[5] = measured(&server);
    clock.advance(HOUR);
    for _ in 0..SAMPLE {
        let _ = ask(check(&wide, 1)).await;
    }
    row[4] = measured(&server);
    row
}

/// Spread over 2,000 seconds. Each has its own id, so that those of one batch do not share an
/// entry.
async fn fill(
    limiter: &Limiter,
    limit: &Limit,
    clock: &ManualClock,
    filled: Filled,
    entries: usize,
) {
    const STEPS: usize = 100;
    for step in 0..STEPS {
        let numbers = entries * step / STEPS..entries * (step + 1) / STEPS;
        let mut tasks = JoinSet::new();
        for task in 0..TASKS {
            let (limiter, limit, numbers) = (limiter.clone(), limit.clone(), numbers.clone());
            tasks.spawn(async move {
                for number in numbers.skip(task).step_by(TASKS) {
                    let cost = if let Filled::Admissions(cost) = filled {
                        cost
                    } else {
                        1
                    };
                    let charge =
                        Charge::new(limit.clone(), "key", cost).expect("a cost below the limit");
                    let check = match filled {
                        Filled::Admissions(_) if limit.algorithm() != Algorithm::SLIDING_LOG => {
                            Check::new(charge)
                        }
                        Filled::Admissions(_) => {
                            Check::new(charge).with_id(AdmissionId(number as u64))
                        }
                        Filled::Reservations => Check::new(charge.reserve(HOUR)),
                    };
                    assert!(
                        limiter
                            .check_all(check)
                            .await
                            .expect("an answer")
                            .is_allowed()
                    );
                }
            });
        }
        tasks.join_all().await;
        clock.advance(Duration::from_secs(20));
    }
}
