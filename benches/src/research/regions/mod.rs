//! A limit that the processes of five regions share for a day, simulated: the demand moves around
//! the earth, and then a region is cut off from the store for ten minutes. It compares this crate
//! with leases as Doorman hands them out, and with a fixed share of each region.
//!
//! Time is virtual, in microseconds, and the seed gives the same requests to all. Of each hour it
//! simulates some seconds.

mod ours;
mod rivals;
// The crate's own rules, which are numbers alone.
#[expect(dead_code, reason = "the simulation has no batches")]
#[path = "../../../../src/local/prefetch/pace.rs"]
mod pace;

use std::{
    array,
    cmp::Reverse,
    collections::{BinaryHeap, VecDeque},
    f64::consts::TAU,
};

use self::{
    ours::Ours,
    rivals::{Doorman, Shares},
};
use crate::{
    dice::Dice,
    measure::{Effort, Outcome},
};

type Time = u64;

const SECOND: Time = 1_000_000;
const MINUTE: Time = 60 * SECOND;
const WINDOW: Time = 10 * SECOND;
/// Units of the limit for each process, and the mean demand of a day for each of them.
const UNITS: usize = 400;
const DEMAND: f64 = 0.9;
const REGIONS: usize = 5;
/// Their round trips to the store, which is in the first, and the hours of their peaks.
const TRIPS: [Time; REGIONS] = [1_000, 80_000, 120_000, 200_000, 250_000];
const PEAKS: [f64; REGIONS] = [19.0, 14.0, 17.0, 5.0, 9.0];
/// The simulated part of an hour. The first half of it is not judged, since the demand has jumped.
const PART: Time = 24 * SECOND;
/// The region that is cut off at its peak, after the first minute of twelve.
const CUT: usize = 1;
const SEED: u64 = 53;

/// Decides the requests of all processes.
trait Scheme {
    fn ask(&mut self, at: Time, process: usize, tally: &mut Tally);

    /// Does what happens until then. A region may be cut off from the store.
    fn advance(&mut self, until: Time, cut: Option<usize>, tally: &mut Tally);
}

pub(crate) fn run(effort: Effort) -> Outcome {
    // Fewer in a quick run.
    let processes = REGIONS * if effort.rounds > 3 { 400 } else { 25 };
    let units = UNITS * processes;
    println!(
        "\n{processes} processes in {REGIONS} regions, {units} units in 10 s, seed {SEED}; in percent of the requests"
    );
    println!(
        "| | units above the limit | refused early | admitted | of an exact log | wait | undecided | messages a second |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    for (is_cut, when) in [(false, "a day"), (true, "a region cut off")] {
        let exact = simulate(&mut Shares::new(1, units), processes, is_cut).admitted;
        let show = |name, scheme: &mut dyn Scheme| {
            simulate(scheme, processes, is_cut).show(&format!("{when}: {name}"), exact);
        };
        show("this crate", &mut Ours::new(processes, units, 0));
        show(
            "with prefetch",
            &mut Ours::new(processes, units, SECOND / 10),
        );
        show(
            "with prefetch of 1 s",
            &mut Ours::new(processes, units, SECOND),
        );
        show("leases as of Doorman", &mut Doorman::new(processes, units));
        show("a fifth for each region", &mut Shares::new(REGIONS, units));
    }
    Ok(Vec::new())
}

fn simulate(scheme: &mut dyn Scheme, processes: usize, is_cut: bool) -> Tally {
    let units = UNITS * processes;
    let (mut dice, mut at, mut tally) = (
        Dice::new(SEED),
        0,
        Tally {
            units,
            ..Tally::default()
        },
    );
    let end = if is_cut { 12 * MINUTE } else { 24 * PART };
    while at < end {
        let hour = if is_cut {
            PEAKS[CUT]
        } else {
            (at / PART) as f64
        };
        let demand = |region: usize| 1.0 + 0.8 * ((hour - PEAKS[region]) / 24.0 * TAU).cos();
        let demands: [f64; REGIONS] = array::from_fn(demand);
        let total: f64 = demands.iter().sum();
        // Exponential, as between independent clients.
        let mean = WINDOW as f64 / (units as f64 * DEMAND * total / REGIONS as f64);
        at += (-(1.0 - dice.fraction()).ln() * mean).round() as Time;
        let (mut place, mut region) = (dice.fraction() * total, 0);
        while region < REGIONS - 1 && place >= demands[region] {
            place -= demands[region];
            region += 1;
        }
        let process = dice.below(processes / REGIONS) * REGIONS + region;
        let cut = (is_cut && (MINUTE..11 * MINUTE).contains(&at)).then_some(CUT);
        tally.is_judged = if is_cut {
            at >= MINUTE
        } else {
            at % PART >= PART / 2
        };
        scheme.advance(at, cut, &mut tally);
        tally.requests += tally.one();
        scheme.ask(at, process, &mut tally);
    }
    tally.seconds = if is_cut { 11 * MINUTE } else { 12 * PART } / SECOND;
    tally
}

fn region(process: usize) -> usize {
    process % REGIONS
}

/// What happens to a process or its message, by the time. The number keeps the order.
struct Events<E>(BinaryHeap<Reverse<(Time, u64, usize, E)>>, u64);

impl<E: Ord> Events<E> {
    fn new() -> Self {
        Self(BinaryHeap::new(), 0)
    }

    fn add(&mut self, at: Time, process: usize, event: E) {
        self.1 += 1;
        self.0.push(Reverse((at, self.1, process, event)));
    }

    fn next(&mut self, until: Time) -> Option<(Time, usize, E)> {
        self.0.peek().filter(|Reverse((at, ..))| *at <= until)?;
        self.0
            .pop()
            .map(|Reverse((at, _, process, event))| (at, process, event))
    }
}

/// What came of the requests.
#[derive(Default)]
struct Tally {
    units: usize,
    /// The admissions of the last window.
    log: VecDeque<Time>,
    most: usize,
    /// A demand that has jumped is not judged at first.
    is_judged: bool,
    seconds: u64,
    requests: u64,
    admitted: u64,
    early: u64,
    /// Requests that ask a store, and those without a reply.
    waits: u64,
    undecided: u64,
    /// Messages that reach a store.
    messages: u64,
}

impl Tally {
    fn one(&self) -> u64 {
        u64::from(self.is_judged)
    }

    fn decide(&mut self, at: Time, is_admitted: bool) {
        while self
            .log
            .front()
            .is_some_and(|admitted| at - admitted >= WINDOW)
        {
            self.log.pop_front();
        }
        if is_admitted {
            self.log.push_back(at);
            self.most = self.most.max(self.log.len());
            self.admitted += self.one();
        } else if self.log.len() < self.units {
            self.early += self.one();
        }
    }

    fn show(&self, name: &str, exact: u64) {
        let percent = |count: u64, of: u64| format!("{:.2}", count as f64 * 100.0 / of as f64);
        let of_requests = |count| percent(count, self.requests);
        let above = self.most.saturating_sub(self.units);
        let [early, admitted, waits, undecided] =
            [self.early, self.admitted, self.waits, self.undecided].map(of_requests);
        let (exact, messages) = (percent(self.admitted, exact), self.messages / self.seconds);
        println!(
            "| {name} | {above} | {early} | {admitted} | {exact} | {waits} | {undecided} | {messages} |"
        );
    }
}
