//! The speed ratchet: no path of a request may need more instructions than figures.txt says, unless
//! a change says why.
//!
//! ```sh
//! cargo run --profile ratchet -p ratchet             # compares
//! cargo run --profile ratchet -p ratchet -- --write  # accepts the figures of this machine
//! ```
//!
//! It counts in valgrind, so that a busy machine makes no difference. A harness for that exists,
//! `gungraun`. It needs a runner of its very version installed, keeps its baselines outside of the
//! repository, and does not count redis-server beside the process that is measured.
//!
//! What instructions do not show has bounds, which hold on any machine: see `counts.rs`.

#![allow(
    clippy::expect_used,
    reason = "a measurement that cannot continue must stop"
)]

mod counts;
// That of the benchmarks.
#[path = "../../src/dice.rs"]
mod dice;
mod figures;
mod paths;
mod server;
mod valgrind;
mod way;

use std::{
    env,
    process::ExitCode,
    sync::{Mutex, PoisonError},
    thread,
};

use crate::{
    figures::{FILE, Figures, REDIS_SERVER, RUN, Versions, least},
    paths::{Load, PATHS, Path, Redis},
    valgrind::{ASKED, Count, count},
};

/// A path may need so many percent more than its figure.
const TOLERANCE: f64 = 1.0;

/// A path keeps its figure if it differs by no more: by so much, two counts of the same code may
/// differ.
const NOISE: f64 = 0.3;

/// A path that seems to need more is counted so often, and the least counts.
const TRIES: usize = 3;

/// As many as there are processors on the smallest machine.
const AT_ONCE: usize = 2;

/// Of the functions that grew.
const MOST_NAMED: usize = 8;

fn main() -> ExitCode {
    if let Ok(asked) = env::var(ASKED) {
        send(&asked);
        return ExitCode::SUCCESS;
    }
    let arguments: Vec<_> = env::args().skip(1).collect();
    let result = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => counts::hold().and_then(|holds| Ok(compare()? && holds)),
        ["--write"] => write(),
        _ => Err(format!(
            "unknown arguments {arguments:?}: it takes none, or --write"
        )),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(problem) => {
            eprintln!("ratchet: {problem}");
            ExitCode::FAILURE
        }
    }
}

/// What a process under valgrind does.
fn send(asked: &str) {
    let mut words = asked.splitn(3, ' ');
    let mut word = || words.next().expect("three words");
    let (requests, redis, name) = (word().parse().expect("a number"), word().to_owned(), word());
    let path = PATHS.iter().find(|path| path.name == name).expect("a path");
    Load::send(path, requests, redis);
}

/// True if no path needs more.
fn compare() -> Result<bool, String> {
    let (here, accepted) = (Versions::here()?, Figures::read()?);
    let hint = format!(
        "To compare, count without your change first, by `{RUN} -- --write`, and then with it"
    );
    if let Some(difference) = here.difference(&accepted.versions) {
        println!("ratchet: NOT compared, because {difference}. {hint}.");
        return Ok(true);
    }
    let other_redis = here.difference_of(REDIS_SERVER, &accepted.versions);
    if let Some(difference) = &other_redis {
        println!("ratchet: Redis's own shares are NOT compared, because {difference}. {hint}.");
    }
    let is_of_redis = |name| {
        PATHS
            .iter()
            .any(|path| matches!(path.redis, Redis::Counted(own) if own == name))
    };
    let mut rows = Vec::new();
    for counts in count_all(|path| count_again_if_above(path, &accepted))? {
        rows.extend(
            counts
                .into_iter()
                .filter(|(name, _)| other_redis.is_none() || !is_of_redis(*name)),
        );
    }
    println!(
        "{:>9} {:>9}  {:>8}  instructions of a request",
        "accepted", "now", ""
    );
    let (mut more, mut less) = (Vec::new(), false);
    for (name, now) in &rows {
        let before = accepted
            .count(name)
            .ok_or_else(|| format!("{FILE} has no figure of {name:?}: {ACCEPT}"))?;
        let percent = difference(before, now);
        println!(
            "{:>9} {:>9}  {percent:>+6.1} %  {name}",
            before.instructions, now.instructions
        );
        less |= percent < -TOLERANCE;
        if percent > TOLERANCE {
            more.push((name, before, now));
        }
    }
    let plain = rows
        .iter()
        .find(|(name, _)| *name == way::PATH)
        .ok_or("the plain request has no path")?;
    let is_short = way::holds(&plain.1)?;
    for (name, before, now) in &more {
        println!(
            "\n{name}: more than {TOLERANCE} % above its figure in {FILE}. These functions grew:"
        );
        for (function, growth) in grown(before, now) {
            println!("{growth:>+9}  {function}");
        }
    }
    if more.is_empty() && less {
        println!("\nA path has become cheaper. {ACCEPT}, so that it stays so.");
    } else if !more.is_empty() {
        println!("\n{ACCEPT}, if the change is worth it, and say why in its message.");
    }
    Ok(more.is_empty() && is_short)
}

const ACCEPT: &str = "`cargo run --profile ratchet -p ratchet -- --write` accepts the new figures";

/// Writes the figures. Those that differ by noise alone stay, so that a diff shows what has
/// changed.
fn write() -> Result<bool, String> {
    let versions = Versions::here()?;
    let before = Figures::read()
        .ok()
        .filter(|before| before.versions == versions)
        .unwrap_or_default();
    let counts = count_all(count)?.into_iter().flatten();
    let counts = counts.map(|(name, now)| match before.count(name) {
        Some(before) if difference(before, &now).abs() <= NOISE => {
            (name.to_owned(), before.clone())
        }
        _ => (name.to_owned(), now),
    });
    Figures {
        versions,
        counts: counts.collect(),
    }
    .write()?;
    println!("written: {FILE}");
    Ok(true)
}

type Counts = Vec<(&'static str, Count)>;

/// Of all paths, some of them at once.
fn count_all(
    count: impl Fn(&'static Path) -> Result<Counts, String> + Sync,
) -> Result<Vec<Counts>, String> {
    let (next, counts) = (Mutex::new(PATHS.iter().enumerate()), Mutex::new(Vec::new()));
    let take = || next.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work = || {
        while let Some((number, path)) = take() {
            let result = count(path);
            counts
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push((number, result));
        }
    };
    thread::scope(|scope| (0..AT_ONCE).for_each(|_| drop(scope.spawn(work))));
    let mut counts = counts.into_inner().unwrap_or_else(PoisonError::into_inner);
    counts.sort_by_key(|(number, _)| *number);
    counts.into_iter().map(|(_, result)| result).collect()
}

/// The least counts of a path that seems to need more.
fn count_again_if_above(path: &'static Path, accepted: &Figures) -> Result<Counts, String> {
    let is_above = |(name, now): &(&str, Count)| {
        accepted
            .count(name)
            .is_some_and(|before| difference(before, now) > TOLERANCE)
    };
    let mut least = count(path)?;
    for _ in 1..TRIES {
        if !least.iter().any(is_above) {
            break;
        }
        for (least, again) in least.iter_mut().zip(count(path)?) {
            if again.1.instructions < least.1.instructions {
                *least = again;
            }
        }
    }
    Ok(least)
}

/// In percent.
fn difference(before: &Count, now: &Count) -> f64 {
    (now.instructions as f64 / before.instructions as f64 - 1.0) * 100.0
}

/// The functions that need more, with how much more. One that is not in the file may have been just
/// too small for it.
fn grown(before: &Count, now: &Count) -> Vec<(String, u64)> {
    let of = |function: &str| {
        before
            .functions
            .get(function)
            .copied()
            .unwrap_or(least(before))
    };
    let growth = now
        .functions
        .iter()
        .map(|(function, own)| (function.clone(), own.saturating_sub(of(function))));
    let mut grown: Vec<_> = growth.filter(|(_, growth)| *growth > 0).collect();
    grown.sort_by_key(|(_, growth)| std::cmp::Reverse(*growth));
    grown.truncate(MOST_NAMED);
    grown
}
