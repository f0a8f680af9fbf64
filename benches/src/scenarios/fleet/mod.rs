//! Many processes that share one Redis, as where users outgrow one machine: what a decision costs
//! Redis, and how long it takes.
//!
//! Each process has one thread of tokio and connections of its own. Requests are due at random
//! times, whether or not there are replies to those before, and a time counts from when the request
//! was due. All processes and Redis share the machine.

mod client;

use std::{thread::sleep, time::Duration};

use self::client::Client;
pub(crate) use self::client::{CLIENT, run as run_client};
use super::Outcome;
use crate::{
    contenders::{Floor, OURS, OURS_WITH_PREFETCH, TOWER_GOVERNOR, TOWER_RATE_LIMIT_REDIS},
    measure::{Comparison, Effort, Sides, Spread, Unit},
    server::Server,
};

/// Processes, and the requests a second of all together.
const FLEETS: [(usize, f64); 7] = [
    (1, 15_000.0),
    (8, 5_000.0),
    (8, 8_000.0),
    (8, 15_000.0),
    (32, 15_000.0),
    (8, 25_000.0),
    (32, 25_000.0),
];

/// The processes that are asked for ever more, by this many requests a second, and the time in
/// which 99 % of those have an answer.
const ASKED_FOR_MORE: usize = 8;
const STEP: f64 = 5_000.0;
const MOST: f64 = 10_000.0;

/// The processes whose longest times are measured, at these parts of the most that both they and
/// the rival's answer in time.
const WITH_TAILS: [usize; 2] = [1, 8];
const LOADS: [f64; 3] = [0.2, 0.5, 0.8];

/// Of 10,000 requests.
const PARTS: [usize; 4] = [5_000, 9_900, 9_990, 9_999];

/// The limiter of all processes.
#[derive(Clone, Copy)]
enum Side {
    Ours,
    Rival,
    Floor,
    Nothing,
    Prefetch,
    InProcess,
    Governor,
}

impl Side {
    const ALL: [Self; 7] = [
        Self::Ours,
        Self::Rival,
        Self::Floor,
        Self::Nothing,
        Self::Prefetch,
        Self::InProcess,
        Self::Governor,
    ];
    /// Those that ask Redis for each decision, and no limiter.
    const OF_A_FLEET: [Self; 4] = [Self::Ours, Self::Rival, Self::Floor, Self::Nothing];

    fn name(self) -> &'static str {
        match self {
            Self::Ours => OURS,
            Self::Rival => TOWER_RATE_LIMIT_REDIS,
            Self::Floor => Floor::LABEL,
            Self::Nothing => "no limiter",
            Self::Prefetch => OURS_WITH_PREFETCH,
            Self::InProcess => "tower-sliding-window, in process",
            Self::Governor => TOWER_GOVERNOR,
        }
    }

    fn named(name: &str) -> Self {
        Self::ALL
            .into_iter()
            .find(|side| side.name() == name)
            .expect("a side")
    }
}

/// What one round of a fleet has shown. Of Redis, all is for one decision.
struct Round {
    /// Microseconds, sorted.
    times: Vec<u32>,
    errors: f64,
    user: f64,
    system: f64,
    scripts: f64,
    reads: f64,
    writes: f64,
    bytes: f64,
    /// Processor time of the clients for one decision.
    client: f64,
    /// Their system calls that write, for one decision.
    client_writes: f64,
}

impl Round {
    fn redis(&self) -> f64 {
        self.user + self.system
    }

    /// The time that so many of 10,000 requests took at most.
    fn part(&self, part: usize) -> f64 {
        f64::from(self.times[(self.times.len() - 1) * part / 10_000])
    }
}

pub(crate) fn run(effort: Effort) -> Outcome {
    println!(
        "\nOf Redis, all is for one decision; the times that so many percent of the requests took at most are in milliseconds"
    );
    println!(
        "| processes, requests a second | side | Redis us: user + system | scripts | reads | writes | bytes in | client us | client writes | 50 % | 99 % | 99.9 % | 99.99 % |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|---|---|");
    let mut comparisons = Vec::new();
    for (processes, rate) in FLEETS {
        let name = format!("{processes}, {rate}");
        let measured = measure_all(&Side::OF_A_FLEET, effort.rounds, |side, server| {
            measure(server, side, processes, rate, effort.round)
        });
        measured
            .iter()
            .for_each(|(side, rounds)| print_row(&name, side, rounds));
        let redis_time = Comparison::of(
            format!("Redis time, {name}"),
            Unit::Micros,
            &measured[..2],
            Round::redis,
        );
        let p99 = Comparison::of(
            format!("p99, {name}"),
            Unit::Micros,
            &measured[..2],
            |round| round.part(9_900),
        );
        // The last side has no limiter: the rest is what the requests themselves take.
        let without = Spread::of(measured[3].1.iter().map(|round| round.client)).median;
        let client = Comparison::of(
            format!("client time above no limiter, {name}"),
            Unit::Micros,
            &measured[..2],
            |round| round.client - without,
        );
        comparisons.extend([redis_time, client, p99]);
    }
    let most = measure_all(
        &Side::OF_A_FLEET,
        effort.rounds.div_ceil(3),
        |side, server| most_in_time(server, side, ASKED_FOR_MORE, effort.round),
    );
    comparisons.push(Comparison::of(
        "most at a p99 of 10 ms",
        Unit::PerSecond,
        &most[..2],
        |most| *most,
    ));
    Ok(comparisons)
}

/// What a limiter adds to the times of requests, at a part of the most that are answered in time.
pub(crate) fn tails(effort: Effort) -> Outcome {
    println!(
        "\nThe times that so many percent of the requests took at most, in milliseconds, above those without a limiter"
    );
    println!("| processes, requests a second | side | 50 % | 99 % | 99.9 % | 99.99 % |");
    println!("|---|---|---|---|---|---|");
    let mut comparisons = Vec::new();
    for processes in WITH_TAILS {
        let most = measure_all(
            &Side::OF_A_FLEET[..2],
            effort.rounds.div_ceil(3),
            |side, server| most_in_time(server, side, processes, effort.round),
        );
        let most = most
            .iter()
            .map(|(_, most)| Spread::of(most.iter().copied()).median)
            .fold(f64::INFINITY, f64::min);
        for load in LOADS {
            let rate = load * most;
            let name = format!("{processes}, {rate:.0}, {:.0} % of the most", load * 100.0);
            let mut measured = measure_all(&Side::ALL, effort.rounds, |side, server| {
                measure(server, side, processes, rate, effort.round)
            });
            let (_, without) = measured.remove(Side::Nothing as usize);
            let added = |rounds: &[Round], part| {
                let added = rounds
                    .iter()
                    .zip(&without)
                    .map(|(round, without)| round.part(part) - without.part(part));
                added.collect::<Vec<_>>()
            };
            for (side, rounds) in &measured {
                let cells = PARTS.map(|part| {
                    format!(
                        "{:.2}",
                        Spread::of(added(rounds, part).into_iter()).median / 1e3
                    )
                });
                println!("| {name} | {side} | {} |", cells.join(" | "));
            }
            let of_both: Vec<_> = measured[..2]
                .iter()
                .map(|(side, rounds)| (side.clone(), added(rounds, 9_990)))
                .collect();
            comparisons.push(Comparison::of(
                format!("p99.9 added, {name}"),
                Unit::Micros,
                &of_both,
                |added| *added,
            ));
        }
    }
    Ok(comparisons)
}

/// Measures sides in turn, each on its own server.
fn measure_all<T>(
    all: &[Side],
    rounds: usize,
    measure: impl Fn(Side, &Server) -> T,
) -> Vec<(String, Vec<T>)> {
    let servers: Vec<_> = all.iter().map(|side| (*side, Server::start())).collect();
    let mut sides = Sides::new();
    for (side, server) in &servers {
        sides = sides.side(side.name(), || measure(*side, server));
    }
    sides.measure(rounds)
}

fn print_row(name: &str, side: &str, rounds: &[Round]) {
    let median = |figure: &dyn Fn(&Round) -> f64| Spread::of(rounds.iter().map(figure)).median;
    let errors = median(&|round| round.errors);
    let note = if errors > 0.0 {
        format!(" ({errors} without a decision)")
    } else {
        String::new()
    };
    println!(
        "| {name} | {side}{note} | {:.1} = {:.1} + {:.1} | {:.2} | {:.2} | {:.2} | {:.0} | {:.1} | {:.2} | {} |",
        median(&Round::redis),
        median(&|round| round.user),
        median(&|round| round.system),
        median(&|round| round.scripts),
        median(&|round| round.reads),
        median(&|round| round.writes),
        median(&|round| round.bytes),
        median(&|round| round.client),
        median(&|round| round.client_writes),
        PARTS
            .map(|part| format!("{:.2}", median(&|round| round.part(part) / 1e3)))
            .join(" | "),
    );
}

/// The most requests a second, in steps, of which 99 % have their answer in time.
fn most_in_time(server: &Server, side: Side, processes: usize, lasting: Duration) -> f64 {
    let rates = (1..).map(|steps| f64::from(steps) * STEP);
    let is_in_time = |rate: &f64| {
        let round = measure(server, side, processes, *rate, lasting);
        round.errors == 0.0 && round.part(9_900) < MOST
    };
    rates.take_while(is_in_time).last().unwrap_or(0.0)
}

fn measure(server: &Server, side: Side, processes: usize, rate: f64, lasting: Duration) -> Round {
    let client = |number| {
        Client::start(
            server,
            side,
            rate / processes as f64,
            lasting,
            number as u64,
        )
    };
    let mut clients: Vec<_> = (0..processes).map(client).collect();
    clients.iter_mut().for_each(Client::wait_until_ready);
    sleep(Duration::from_millis(50));
    server.run::<()>("CONFIG RESETSTAT");
    let names = [
        "used_cpu_user_main_thread",
        "used_cpu_sys_main_thread",
        "total_reads_processed",
        "total_writes_processed",
        "total_net_input_bytes",
    ];
    let before = names.map(|name| server.stat(name));
    clients.iter_mut().for_each(Client::begin);
    let outcomes: Vec<_> = clients.into_iter().map(Client::outcome).collect();
    let after = names.map(|name| server.stat(name));
    let mut times: Vec<u32> = outcomes
        .iter()
        .flat_map(|outcome| outcome.times.iter().copied())
        .collect();
    times.sort_unstable();
    let decisions = times.len() as f64;
    let [user, system, reads, writes, bytes] =
        std::array::from_fn(|index| (after[index] - before[index]) / decisions);
    Round {
        errors: outcomes
            .iter()
            .map(|outcome| f64::from(outcome.errors))
            .sum(),
        user: user * 1e6,
        system: system * 1e6,
        scripts: server.script_calls() / decisions,
        reads,
        writes,
        bytes,
        client: outcomes
            .iter()
            .map(|outcome| f64::from(outcome.processor))
            .sum::<f64>()
            / decisions,
        client_writes: outcomes
            .iter()
            .map(|outcome| f64::from(outcome.writes))
            .sum::<f64>()
            / decisions,
        times,
    }
}
