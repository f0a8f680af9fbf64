//! Processes that are killed or stopped at any moment while they hold places.
//!
//! This program runs itself as those processes. They write down from when until when they certainly
//! held a place: after the decision and before they drop it, by the system's clock. Never are more
//! of these spans open than the limit.
//!
//! A process that stood still, or did not reach Redis, for longer than the life of a place may have
//! lost it, and knows that. Such a span is the one exception, which is counted.

use std::{
    env,
    fs::File,
    io::{Read, Write},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::{SystemTime, UNIX_EPOCH},
};

use super::*;
use crate::support::proxy::Proxy;

const LIFE: Duration = Duration::from_secs(2);
const PLACES: Limit = Limit::concurrent("places", 6).freed_after(LIFE);
const ALL: Limit = Limit::concurrent("all", 9).freed_after(LIFE);
const CALLS: Limit = Limit::per("calls", 100_000, Duration::from_secs(1));

const PROCESSES: usize = 4;
const TASKS: u64 = 8;

/// `PLACES_SECONDS` sets another time.
fn lasting() -> Duration {
    seconds(
        env::var("PLACES_SECONDS")
            .ok()
            .and_then(|text| text.parse().ok())
            .unwrap_or(8),
    )
}

fn now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap()
        .as_micros() as u64
}

/// A process that takes and frees places as often as it can. It writes the key, start and end of
/// each, how often it has asked, and how many places it has lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a process of killed_and_stopped_processes_together_keep_the_limit"]
async fn process() {
    let (url, log) = (env::var("REDIS_URL").unwrap(), env::var("LOG").unwrap());
    let limiter = Limiter::new(RedisStore::builder(&url).build().unwrap());
    let (log, asked) = (
        Arc::new(Mutex::new(File::create(log).unwrap())),
        Arc::new(AtomicU64::new(0)),
    );
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..TASKS {
        let (limiter, log, asked) = (limiter.clone(), Arc::clone(&log), Arc::clone(&asked));
        tasks.spawn(async move {
            let mut numbers = Numbers(now() ^ task);
            loop {
                let key = numbers.below(2);
                let check = Check::new(Charge::new(PLACES, key.to_string(), 1).unwrap())
                    .and(Charge::new(CALLS, key.to_string(), 1).unwrap())
                    .and_then(|check| check.and(Charge::new(ALL, "everybody", 1).unwrap()))
                    .unwrap();
                let outcome = limiter.check_all(check).await;
                asked.fetch_add(1, Ordering::Relaxed);
                let Some(held) = outcome.ok().filter(|decision| decision.is_allowed()) else {
                    sleep(ms(1)).await;
                    continue;
                };
                let start = now();
                // Some are held for longer than a life.
                let planned = if numbers.below(40) == 0 {
                    2_400
                } else {
                    numbers.below(15)
                };
                sleep(ms(planned)).await;
                let end = now();
                let is_lost = held.has_lost_place();
                let fields = [
                    key,
                    start,
                    end,
                    asked.swap(0, Ordering::Relaxed),
                    is_lost.into(),
                ];
                // Under the lock of the file, the place is still held.
                log.lock()
                    .unwrap()
                    .write_all(fields.map(u64::to_le_bytes).as_flattened())
                    .unwrap();
                drop(held);
            }
        });
    }
    tasks.join_all().await;
}

/// Ends with the test, however that ends.
struct Process(Child);

impl Process {
    fn start(url: &str, log: &Path) -> Self {
        let test = concat!(module_path!(), "::process")
            .split_once("::")
            .unwrap()
            .1;
        let process = Command::new(env::current_exe().unwrap())
            .args([test, "--exact", "--ignored"])
            .env("REDIS_URL", url)
            .env("LOG", log)
            .stdout(Stdio::null())
            .spawn();
        Self(process.unwrap())
    }

    fn signal(&self, signal: &str) {
        assert!(
            Command::new("kill")
                .args([signal, &self.0.id().to_string()])
                .status()
                .unwrap()
                .success()
        );
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // SIGKILL.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What the processes have written down.
#[derive(Default)]
struct Held {
    /// Key, start and end.
    spans: Vec<[u64; 3]>,
    asked: u64,
    exceptions: u64,
}

impl Held {
    fn read(logs: &[PathBuf]) -> Self {
        let mut held = Self::default();
        for log in logs {
            let mut bytes = Vec::new();
            File::open(log)
                .map(|mut file| file.read_to_end(&mut bytes).unwrap())
                .unwrap_or_default();
            for entry in bytes.chunks_exact(40) {
                let field = |place: usize| {
                    u64::from_le_bytes(entry[8 * place..8 * place + 8].try_into().unwrap())
                };
                if field(4) == 0 {
                    held.spans.push([field(0), field(1), field(2)]);
                }
                held.asked += field(3);
                held.exceptions += field(4);
            }
        }
        held
    }

    /// The most that certainly were held at once, of a key, or of all.
    fn most(&self, key: Option<u64>) -> i64 {
        let of_key = self
            .spans
            .iter()
            .filter(|[of, ..]| key.is_none_or(|key| key == *of));
        // An end comes before a start of the same time.
        let mut steps: Vec<(u64, i64)> = of_key
            .flat_map(|[_, start, end]| [(*start, 1), (*end, -1)])
            .collect();
        steps.sort_unstable();
        let (mut open, mut most) = (0, 0);
        for (_, step) in steps {
            open += step;
            most = most.max(open);
        }
        most
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_and_stopped_processes_together_keep_the_limit() {
    let (server, dir) = (RedisServer::start(), tempfile::tempdir().unwrap());
    let proxy = Proxy::start(&server).await;
    let mut logs: Vec<PathBuf> = Vec::new();
    let start = |logs: &mut Vec<PathBuf>| {
        logs.push(dir.path().join(logs.len().to_string()));
        Process::start(proxy.url(), &logs[logs.len() - 1])
    };
    let mut processes: Vec<Process> = (0..PROCESSES).map(|_| start(&mut logs)).collect();
    let (begun, mut numbers) = (Instant::now(), Numbers(now()));
    println!("seed {}", numbers.0);
    let is_enough = |logs: &[PathBuf]| {
        let held = Held::read(logs);
        held.most(Some(0)) == 6 && held.most(None) == 9 && held.exceptions > 0
    };
    while begun.elapsed() < lasting() || begun.elapsed() < 4 * lasting() && !is_enough(&logs) {
        sleep(ms(30 + numbers.below(200))).await;
        // In the end only stops that are longer than a life, if no place has been lost yet.
        let is_overtime = begun.elapsed() > lasting();
        match if is_overtime { 3 } else { numbers.below(8) } {
            0..3 => {
                processes.remove(0);
                processes.push(start(&mut logs));
            }
            3..5 => {
                let millis = if !is_overtime && numbers.below(2) == 0 {
                    400
                } else {
                    3_000
                };
                // Any of them: the places stay mostly in the processes that have some.
                let stopped = &processes[numbers.below(PROCESSES as u64) as usize];
                stopped.signal("-STOP");
                sleep(ms(millis)).await;
                stopped.signal("-CONT");
            }
            _ => proxy.lose_replies(20),
        }
    }
    drop(processes);

    let held = Held::read(&logs);
    let most = [held.most(Some(0)), held.most(Some(1)), held.most(None)];
    let (processes, places) = (logs.len(), held.spans.len());
    println!(
        "{processes} processes asked {} times and held {places} places, at most {most:?} at once; {} may have been lost",
        held.asked, held.exceptions
    );
    assert!(
        most[0] <= 6 && most[1] <= 6 && most[2] <= 9,
        "{most:?} at once"
    );
    assert!(
        is_enough(&logs),
        "{most:?} of {places}: the limits are never reached, or no place is lost"
    );
    // Nothing of them stays.
    let limiter = Limiter::new(RedisStore::connect(&server.url()).await.unwrap());
    let died = Instant::now();
    while limiter
        .peek(&ALL, "everybody")
        .await
        .unwrap()
        .binding()
        .used
        > 0
    {
        assert!(
            died.elapsed() < LIFE + ms(500),
            "the places of killed processes are still held"
        );
        sleep(ms(10)).await;
    }
    println!("all places were free after {:?}", died.elapsed());
}
