//! All pairs of options, each in a small app through which one script of traffic goes: so a fault
//! in which two parts meet is found here.
//!
//! `table.rs` has the options. `completeness.rs` fails if one is missing, `covering.rs` makes rows
//! of them. A row is an app (`app.rs`) on one of the stores (`stores.rs`). Its handler keeps a book
//! (`book.rs`), which `script.rs` compares with what the options mean (`expected.rs`).
//!
//! `PAIRS_SEED` chooses other rows, `PAIRS_ROWS` adds random ones, and `PAIRS_ROW` runs one of them
//! alone.

mod app;
mod book;
mod completeness;
mod covering;
mod expected;
mod script;
mod stores;
mod table;

use std::{
    collections::{BTreeMap, VecDeque},
    env,
    sync::Mutex,
    time::Instant,
};

use futures_util::future::join_all;
use tokio::time::sleep;

use self::{
    app::App,
    covering::Row,
    script::{Report, Run},
    stores::Stores,
    table::DEADLINE,
};
use crate::support::two_threads;

/// So many rows share servers at a time, and so many such groups run at once.
const GROUP: usize = 20;
const LANES: usize = 2;

fn setting(name: &str) -> Option<u64> {
    env::var(name).ok().map(|text| {
        text.parse()
            .unwrap_or_else(|_| panic!("{name} is a number, not {text}"))
    })
}

/// The sentences with which building has refused rows, and how many.
type Refused = Mutex<BTreeMap<String, usize>>;

async fn run_group(rows: Vec<Row>, stores: &mut Stores, report: &Report, refused: &Refused) {
    let mut runs = Vec::new();
    for row in rows {
        match App::build(row, stores).await {
            Ok(app) => runs.push(Run::new(app, report)),
            Err((_, sentence)) => *refused.lock().unwrap().entry(sentence).or_default() += 1,
        }
    }
    join_all(runs.iter().map(Run::recover)).await;
    join_all(runs.iter().map(Run::in_order)).await;
    runs.retain(|run| run.app.can_be_lost());

    stores.pause();
    tokio::join!(
        join_all(runs.iter().map(Run::while_paused)),
        sleep(DEADLINE * 3 / 2)
    );
    stores.resume();
    join_all(runs.iter().map(Run::recover)).await;
    join_all(
        runs.iter()
            .map(|run| run.quiet("after a pause of the store")),
    )
    .await;

    join_all(runs.iter().map(Run::before_the_loss)).await;
    stores.lose();
    join_all(runs.iter().map(Run::while_lost)).await;
    stores.restore().await;
    join_all(runs.iter().map(Run::recover)).await;
    join_all(
        runs.iter()
            .map(|run| run.quiet("after a loss of the store")),
    )
    .await;
}

#[test]
fn all_pairs_keep_the_rules() {
    let began = Instant::now();
    let mut rows = covering::rows(
        setting("PAIRS_SEED").unwrap_or(1),
        setting("PAIRS_ROWS").unwrap_or(0) as usize,
    );
    if let Some(only) = setting("PAIRS_ROW") {
        rows.retain(|row| row.number as u64 == only);
    }
    let number = rows.len();
    let (mut groups, mut rows) = (VecDeque::new(), rows.into_iter().peekable());
    while rows.peek().is_some() {
        groups.push_back(rows.by_ref().take(GROUP).collect::<Vec<_>>());
    }
    let (groups, report, refused) = (Mutex::new(groups), Report::default(), Refused::default());
    two_threads().block_on(async {
        let lane = async || {
            let mut stores = Stores::start().await;
            loop {
                let Some(group) = groups.lock().unwrap().pop_front() else {
                    break;
                };
                run_group(group, &mut stores, &report, &refused).await;
            }
        };
        join_all((0..LANES).map(|_| lane())).await;
    });
    let (mut failures, compared) = report.take();
    for (sentence, rows) in refused.into_inner().unwrap() {
        println!("building refuses {rows} rows: {sentence}");
        // A mistake in the table is no refusal.
        if sentence.contains("unwrap()") {
            failures.push(sentence);
        }
    }
    for (invariant, times) in compared {
        println!("{times} times: {invariant}");
    }
    println!("{number} rows in {} s", began.elapsed().as_secs());
    assert!(
        failures.is_empty(),
        "{} failures:\n{}",
        failures.len(),
        failures.join("\n")
    );
}
