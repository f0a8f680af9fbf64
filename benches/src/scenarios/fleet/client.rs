//! One process of a fleet: a thread of tokio that gets requests at random times, whether or not
//! there are replies.
//!
//! A second thread sends them. It wakes the first one for each, as a socket does. The timers of
//! tokio tell milliseconds, so requests that are due within one would begin together.

use std::{
    fs,
    io::{self, BufRead, Read, Write},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use http::StatusCode;
use tokio::{runtime::Builder, sync::mpsc, task::JoinSet};

use super::Side;
use crate::{
    contenders::{
        Contender, Floor, Quota, nothing, ours, ours_in_process, ours_with_prefetch,
        tower_governor, tower_rate_limit_redis, wide,
    },
    dice::Dice,
    load::KEYS,
    server::Server,
};

/// The first argument of a process that is a client.
pub(crate) const CLIENT: &str = "fleet-client";

/// Before the load, to open connections and to load the script.
const WARM_UP: usize = 50;

/// A limit in process that is never reached.
const WIDE: Quota = Quota {
    units: 1_000_000,
    window: Duration::from_secs(1),
};

/// A process of the fleet, which waits for its start.
pub(super) struct Client {
    process: Child,
    input: ChildStdin,
    output: ChildStdout,
}

/// What one process has measured.
pub(super) struct Outcome {
    /// Microseconds from the time at which a request was due to its answer.
    pub(super) times: Vec<u32>,
    pub(super) errors: u32,
    /// Processor time of the client, in microseconds.
    pub(super) processor: u32,
    /// The system calls of the client that write: to its connections, and to wake itself.
    pub(super) writes: u32,
}

impl Client {
    /// Returns once it is ready.
    pub(super) fn start(
        server: &Server,
        side: Side,
        rate: f64,
        lasting: Duration,
        seed: u64,
    ) -> Self {
        let mut process = Command::new(std::env::current_exe().expect("this program"))
            .args([
                CLIENT,
                side.name(),
                &server.port().to_string(),
                &rate.to_string(),
            ])
            .args([lasting.as_secs_f64().to_string(), seed.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("this program runs");
        let input = process.stdin.take().expect("a pipe");
        let output = process.stdout.take().expect("a pipe");
        Self {
            process,
            input,
            output,
        }
    }

    pub(super) fn wait_until_ready(&mut self) {
        self.output.read_exact(&mut [0]).expect("a client is ready");
    }

    pub(super) fn begin(&mut self) {
        self.input.write_all(b"\n").expect("a client is ready");
    }

    pub(super) fn outcome(mut self) -> Outcome {
        let mut bytes = Vec::new();
        self.output
            .read_to_end(&mut bytes)
            .expect("a client ends in order");
        self.process.wait().expect("a client ends in order");
        let (numbers, _) = bytes.as_chunks::<4>();
        let mut numbers = numbers.iter().map(|number| u32::from_le_bytes(*number));
        let errors = numbers.next().expect("a client ends in order");
        let processor = numbers.next().expect("a client ends in order");
        let writes = numbers.next().expect("a client ends in order");
        Outcome {
            times: numbers.collect(),
            errors,
            processor,
            writes,
        }
    }
}

/// Runs as a client with the arguments that follow [`CLIENT`].
pub(crate) fn run(arguments: &[String]) {
    let number = |place: usize| arguments[place].parse::<f64>().expect("a number");
    let (server, rate, lasting) = (
        Server::at(number(1) as u16),
        number(2),
        Duration::from_secs_f64(number(3)),
    );
    let seed = number(4) as u64;
    let runtime = Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    runtime.block_on(async {
        match Side::named(&arguments[0]) {
            Side::Ours => load(ours(&server, wide()).await, rate, lasting, seed).await,
            Side::Rival => load(tower_rate_limit_redis(&server).await, rate, lasting, seed).await,
            Side::Floor => load(Floor::new(&server).await, rate, lasting, seed).await,
            Side::Nothing => load(nothing(), rate, lasting, seed).await,
            Side::Prefetch => {
                load(
                    ours_with_prefetch(&server, wide()).await,
                    rate,
                    lasting,
                    seed,
                )
                .await;
            }
            Side::InProcess => load(ours_in_process(WIDE, 10_000_000), rate, lasting, seed).await,
            Side::Governor => load(tower_governor(WIDE), rate, lasting, seed).await,
        }
    });
}

async fn load(mut contender: impl Contender, rate: f64, lasting: Duration, seed: u64) {
    let mut dice = Dice::new(seed);
    for _ in 0..WARM_UP {
        contender.decide(dice.below(KEYS)).await;
    }
    let mut out = io::stdout().lock();
    out.write_all(b"r")
        .and_then(|()| out.flush())
        .expect("somebody reads");
    io::stdin()
        .lock()
        .read_line(&mut String::new())
        .expect("somebody writes");
    let before = (processor_micros(), writes());
    let mut arrivals = arrivals(rate, lasting, seed);
    let mut requests = JoinSet::new();
    let mut times = Vec::new();
    let mut errors = 0_u32;
    let mut note = |answer: (u32, Result<bool, StatusCode>)| {
        times.push(answer.0);
        errors += u32::from(answer.1.is_err());
    };
    while let Some(due) = arrivals.recv().await {
        let (mut contender, key) = (contender.clone(), dice.below(KEYS));
        requests.spawn(async move {
            let answer = contender.try_decide(key).await;
            (due.elapsed().as_micros() as u32, answer)
        });
        while let Some(answer) = requests.try_join_next() {
            note(answer.expect("a request ends"));
        }
    }
    while let Some(answer) = requests.join_next().await {
        note(answer.expect("a request ends"));
    }
    let processor = (processor_micros() - before.0) as u32;
    let writes = (writes() - before.1) as u32;
    for number in [errors, processor, writes].into_iter().chain(times) {
        out.write_all(&number.to_le_bytes())
            .expect("somebody reads");
    }
}

/// The times at which requests are due. The times between them are exponential, as between
/// independent clients.
fn arrivals(rate: f64, lasting: Duration, seed: u64) -> mpsc::UnboundedReceiver<Instant> {
    let mut dice = Dice::new(!seed);
    let (arrive, arrivals) = mpsc::unbounded_channel();
    thread::spawn(move || {
        let began = Instant::now();
        let mut due = began;
        while due < began + lasting {
            due += Duration::from_secs_f64(-(1.0 - dice.fraction()).ln() / rate);
            thread::sleep(due.saturating_duration_since(Instant::now()));
            arrive.send(due).expect("the load goes on");
        }
    });
    arrivals
}

/// The processor time of the thread that asks, which is the main thread.
fn processor_micros() -> u64 {
    let times =
        fs::read_to_string("/proc/self/schedstat").expect("Linux tells the time of a process");
    times
        .split(' ')
        .next()
        .and_then(|nanos| nanos.parse::<u64>().ok())
        .expect("a number")
        / 1_000
}

/// The system calls of this thread that have written.
fn writes() -> u64 {
    let io =
        fs::read_to_string("/proc/thread-self/io").expect("Linux counts the calls of a thread");
    let calls = io.lines().find_map(|line| line.strip_prefix("syscw: "));
    calls
        .and_then(|calls| calls.parse().ok())
        .expect("a number")
}
