//! The counts that hold on any machine, and that instructions do not show: what redis-server gets
//! for a decision of a fleet, whether a second thread makes batches smaller, and the system calls
//! of a process.
//!
//! No count depends on times: a process asks again when it has its answers.

use std::{fs, iter, process::Command, thread, time::Duration};

use tokio::{
    runtime::{Builder, Runtime},
    task::{JoinSet, LocalSet},
};
use tower_sliding_window::{Charge, Check, Limiter, RedisStore};

use crate::{
    dice::Dice,
    figures::REDIS_SERVER,
    paths::{MAX_WAIT, limiter, wide},
    server::Server,
};

/// The processes of the fleet, each as a thread with a store of its own.
const PROCESSES: usize = 8;

/// They ask at once in one process.
const TASKS: usize = 256;

/// More than skip the queue. After them, checks that come at once travel together.
const BURST: usize = 16;

/// Of each count: as many for each task, and three at a time.
const DECISIONS: usize = TASKS * 3 * 7;

const KEYS: usize = 10_000;

/// What redis-server gets for a decision.
struct Count {
    scripts: f64,
    reads: f64,
    writes: f64,
}

struct Bound {
    name: &'static str,
    now: f64,
    most: f64,
    /// What a count above it means.
    meaning: &'static str,
}

/// True if no count is above its bound.
pub(crate) fn hold() -> Result<bool, String> {
    let dir = tempfile::tempdir().map_err(|error| format!("no temporary folder: {error}"))?;
    let server = Server::start(Command::new(REDIS_SERVER), dir.path())?;
    let single = fleet(&server, 1)?;
    let three = fleet(&server, 3)?;
    let one_thread = tasks(&server, 1)?;
    let two_threads = tasks(&server, 2)?;
    let writes = writes(&server);
    let bound = |name, now, most, meaning| Bound {
        name,
        now,
        most,
        meaning,
    };
    let again = "Redis is asked more than once";
    let apart = "checks that come at once travel apart, or more than once";
    let bounds = [
        bound(
            "scripts of a fleet, single checks",
            single.scripts,
            1.05,
            again,
        ),
        bound("reads of a fleet, single checks", single.reads, 1.1, again),
        bound(
            "writes of a fleet, single checks",
            single.writes,
            1.1,
            again,
        ),
        bound(
            "scripts of a fleet, three checks at once",
            three.scripts,
            0.5,
            apart,
        ),
        bound(
            "reads of a fleet, three checks at once",
            three.reads,
            0.5,
            apart,
        ),
        bound(
            "writes of a fleet, three checks at once",
            three.writes,
            0.5,
            apart,
        ),
        bound(
            "scripts of 256 tasks on one thread",
            one_thread.scripts,
            0.05,
            "batches have fewer than 20 checks",
        ),
        bound(
            "scripts of 256 tasks on two threads, for one on one thread",
            two_threads.scripts / one_thread.scripts,
            2.0,
            "a second thread makes batches smaller",
        ),
        // Nothing counts them on other systems than Linux.
        bound(
            "writes of a process, single checks",
            writes.unwrap_or_default(),
            1.05,
            "a process wakes itself, such as for a new timer",
        ),
    ];
    println!(
        "{:>9} {:>9}  {:>8}  counts of a decision",
        "at most", "now", ""
    );
    for Bound {
        name, now, most, ..
    } in &bounds
    {
        println!("{most:>9.2} {now:>9.3}  {:>8}  {name}", "");
    }
    let above = bounds.iter().filter(|bound| bound.now > bound.most);
    let failures = above.inspect(
        |Bound {
             name,
             now,
             most,
             meaning,
         }| {
            println!("\n{name}: {now:.3}, above {most}: {meaning}.");
        },
    );
    Ok(failures.count() == 0)
}

/// That of a fleet. Each process asks for so many decisions at once, and for the next when it has
/// them all.
fn fleet(server: &Server, at_once: usize) -> Result<Count, String> {
    let processes: Vec<_> = iter::repeat_with(|| Process::start(server))
        .take(PROCESSES)
        .collect();
    let before = Figures::of(server)?;
    thread::scope(|scope| {
        for (number, process) in processes.iter().enumerate() {
            scope.spawn(move || {
                process.ask(
                    at_once,
                    DECISIONS / PROCESSES / at_once,
                    Dice::new(number as u64),
                );
            });
        }
    });
    Ok(Figures::of(server)?.since(&before))
}

/// That of tasks on so many threads. Each asks again after its answer.
fn tasks(server: &Server, threads: usize) -> Result<Count, String> {
    let process = Process::start(server);
    let before = Figures::of(server)?;
    thread::scope(|scope| {
        for thread in 0..threads {
            let process = &process;
            scope.spawn(move || process.run(TASKS / threads, DECISIONS / TASKS, thread as u64));
        }
    });
    Ok(Figures::of(server)?.since(&before))
}

/// The system calls that write, of a process that asks for one decision after the other. One of
/// them sends the check.
fn writes(server: &Server) -> Option<f64> {
    let mut process = Process::start(server);
    // With a longer deadline, each decision has a new timer.
    process.limiter = process.limiter.deadline(Duration::from_secs(1));
    let written = || {
        let io = fs::read_to_string("/proc/self/io").ok()?;
        let calls = io.lines().find_map(|line| line.strip_prefix("syscw: "))?;
        calls.parse::<u64>().ok()
    };
    let before = written()?;
    process.ask(1, DECISIONS, Dice::new(0));
    Some((written()? - before) as f64 / DECISIONS as f64)
}

struct Process {
    runtime: Runtime,
    limiter: Limiter,
}

impl Process {
    /// A burst is behind it.
    fn start(server: &Server) -> Self {
        let runtime = Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        let store = RedisStore::builder(server.url())
            .connect_timeout(MAX_WAIT)
            .reply_timeout(MAX_WAIT);
        let limiter = limiter(runtime.block_on(store.connect()).expect("the server is up"));
        let process = Self { runtime, limiter };
        process.ask(BURST, 1, Dice::new(0));
        process
    }

    fn ask(&self, at_once: usize, times: usize, mut dice: Dice) {
        self.runtime.block_on(async {
            for _ in 0..times {
                let mut checks = JoinSet::new();
                for _ in 0..at_once {
                    checks.spawn(decide(self.limiter.clone(), dice.below(KEYS)));
                }
                checks.join_all().await;
            }
        });
    }

    /// Several threads may do so at once. One of them runs what all need, such as connections,
    /// until its tasks end, and then another. A runtime of several threads would change tokio, and
    /// with it the instructions of all paths.
    fn run(&self, tasks: usize, checks_of_each: usize, seed: u64) {
        let local = LocalSet::new();
        let mut dice = Dice::new(seed);
        let mut all = JoinSet::new();
        for _ in 0..tasks {
            let limiter = self.limiter.clone();
            let keys: Vec<_> = iter::repeat_with(|| dice.below(KEYS))
                .take(checks_of_each)
                .collect();
            let checks = async move {
                for key in keys {
                    decide(limiter.clone(), key).await;
                }
            };
            all.spawn_local_on(checks, &local);
        }
        local.block_on(&self.runtime, all.join_all());
    }
}

async fn decide(limiter: Limiter, key: usize) {
    let charge = Charge::new(wide(), key as u64, 1).expect("it fits");
    // Beside a second `Limiter::check`, the compiler would no longer inline the one whose
    // instructions count.
    let decision = limiter.check_all(Check::new(charge)).await;
    assert!(decision.expect("a decision").is_allowed());
}

/// What redis-server has got so far.
struct Figures {
    scripts: u64,
    reads: u64,
    writes: u64,
}

impl Figures {
    fn of(server: &Server) -> Result<Self, String> {
        let info = server.info()?;
        let figure = |name| {
            let line = info.lines().find_map(|line| line.strip_prefix(name));
            let number = line
                .and_then(|line| line.split(',').next())
                .and_then(|number| number.parse().ok());
            number.ok_or_else(|| format!("redis-server does not tell {name:?}"))
        };
        Ok(Self {
            scripts: figure("cmdstat_evalsha:calls=")?,
            reads: figure("total_reads_processed:")?,
            writes: figure("total_writes_processed:")?,
        })
    }

    fn since(&self, before: &Self) -> Count {
        let for_a_decision = |now: u64, before: u64| (now - before) as f64 / DECISIONS as f64;
        Count {
            scripts: for_a_decision(self.scripts, before.scripts),
            reads: for_a_decision(self.reads, before.reads),
            writes: for_a_decision(self.writes, before.writes),
        }
    }
}
