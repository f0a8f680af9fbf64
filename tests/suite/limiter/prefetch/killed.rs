//! Processes that are killed at any moment, while they hold units.
//!
//! This program runs itself as those processes. They write down what they admit, and when: before
//! and after each call, by the system's clock. So an admission lies between two times, and a window
//! has too many units only if it has too many such spans.

use std::{
    env,
    fs::File,
    io::{Read, Write},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{SystemTime, UNIX_EPOCH},
};

use super::*;

/// Long enough for several windows, which are short so that they often are full.
const LASTING: Duration = Duration::from_secs(6);

const LIMIT: Limit =
    Limit::per("calls", 1_000, Duration::from_millis(400)).prefetch(Duration::from_millis(40));

const PROCESSES: usize = 4;

fn now() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap()
        .as_micros() as u64
}

/// A process that asks as often as it can for a while, and then for another while not at all.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "a process of killed_processes_together_keep_the_limit"]
async fn process() {
    let (url, log) = (env::var("REDIS_URL").unwrap(), env::var("LOG").unwrap());
    let (limiter, mut log) = (
        Limiter::new(RedisStore::builder(&url).build().unwrap()),
        File::create(log).unwrap(),
    );
    for number in 0_u64.. {
        let block = Duration::from_millis(100 + 97 * number % 500);
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_millis(250) {
            let mut spans = Vec::new();
            for _ in 0..20 {
                let before = now();
                let is_admitted = limiter
                    .check(&LIMIT, "ada", 1)
                    .await
                    .is_ok_and(|decision| decision.is_allowed());
                if is_admitted {
                    spans.extend([before, now()].map(u64::to_le_bytes).concat());
                }
            }
            log.write_all(&spans).unwrap();
            sleep(Duration::from_micros(500)).await;
        }
        sleep(block).await;
    }
}

/// Ends with the test, however that ends.
struct Process(Child);

impl Process {
    fn start(server: &RedisServer, log: &Path) -> Self {
        let test = concat!(module_path!(), "::process")
            .split_once("::")
            .unwrap()
            .1;
        let process = Command::new(env::current_exe().unwrap())
            .args([test, "--exact", "--ignored"])
            .env("REDIS_URL", server.url())
            .env("LOG", log)
            .stdout(Stdio::null())
            .spawn();
        Self(process.unwrap())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // SIGKILL.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The spans of all admissions that the processes have written down, in order.
struct Admitted {
    starts: Vec<u64>,
    ends: Vec<u64>,
}

impl Admitted {
    fn read(logs: &[PathBuf]) -> Self {
        let (mut starts, mut ends) = (Vec::new(), Vec::new());
        for log in logs {
            let mut bytes = Vec::new();
            File::open(log)
                .map(|mut file| file.read_to_end(&mut bytes).unwrap())
                .unwrap_or_default();
            for span in bytes.chunks_exact(16) {
                let time =
                    |place: usize| u64::from_le_bytes(span[place..place + 8].try_into().unwrap());
                starts.push(time(0));
                ends.push(time(8));
            }
        }
        starts.sort_unstable();
        ends.sort_unstable();
        Self { starts, ends }
    }

    /// The most that certainly were in one window.
    fn most_in_a_window(&self) -> u64 {
        let window = LIMIT.window().as_micros() as u64;
        let most = self.ends.iter().enumerate().map(|(index, end)| {
            let before = self.starts.partition_point(|start| *start <= end - window);
            (index + 1).saturating_sub(before)
        });
        most.max().unwrap_or(0) as u64
    }

    /// True if the limit was near, so that a unit too many would be seen.
    fn are_enough(&self) -> bool {
        self.most_in_a_window() > LIMIT.units() / 2 && self.ends.len() as u64 > 2 * LIMIT.units()
    }
}

#[tokio::test]
async fn killed_processes_together_keep_the_limit() {
    let (server, dir) = (RedisServer::start(), tempfile::tempdir().unwrap());
    let mut logs: Vec<PathBuf> = Vec::new();
    let start = |logs: &mut Vec<PathBuf>| {
        logs.push(dir.path().join(logs.len().to_string()));
        Process::start(&server, &logs[logs.len() - 1])
    };
    let mut processes: Vec<Process> = (0..PROCESSES).map(|_| start(&mut logs)).collect();
    let begun = Instant::now();
    for number in 0_u64.. {
        sleep(Duration::from_millis(40 + 61 * number % 170)).await;
        // A slow machine takes longer to come near the limit.
        if begun.elapsed() > LASTING
            && (Admitted::read(&logs).are_enough() || begun.elapsed() > 5 * LASTING)
        {
            break;
        }
        processes.remove(0);
        processes.push(start(&mut logs));
    }
    drop(processes);

    let admitted = Admitted::read(&logs);
    let most = admitted.most_in_a_window();
    let (processes, checks, scripts) = (logs.len(), admitted.ends.len(), server.script_calls());
    println!(
        "{processes} processes admitted {checks} checks with {scripts} scripts, at most {most} in a window"
    );
    assert!(most <= LIMIT.units(), "{most} in a window");
    assert!(
        admitted.are_enough(),
        "{most} of {checks} in a window: the limit is never near"
    );
}
