//! The examples without HTTP, run as programs.

use std::{
    io::{BufRead, BufReader, Read},
    process::{Command, Output, Stdio},
    time::Duration,
};

use tokio::time::Instant;

use crate::support::{example::example, redis_server::RedisServer};

/// A port of this machine at which no server listens.
const NOBODY: &str = "redis://127.0.0.1:9/";

struct Run {
    is_success: bool,
    lines: Vec<String>,
    errors: String,
    took: Duration,
}

fn run(name: &str, settings: &[(&str, &str)]) -> Run {
    let begun = Instant::now();
    let Output {
        status,
        stdout,
        stderr,
    } = example(name, settings).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    let lines = text(stdout).lines().map(str::to_owned).collect();
    Run {
        is_success: status.success(),
        lines,
        errors: text(stderr),
        took: begun.elapsed(),
    }
}

impl Run {
    fn ending(&self, line: &str) -> usize {
        self.lines
            .iter()
            .filter(|other| other.ends_with(line))
            .count()
    }

    fn with(&self, part: &str) -> usize {
        self.lines.iter().filter(|line| line.contains(part)).count()
    }
}

/// A fixed window admits twice the limit across a boundary, the sliding log does not.
#[test]
fn the_boundary_lets_100_through_a_fixed_window_and_50_through_a_sliding_one() {
    let run = run("boundary", &[]);
    assert!(run.is_success, "{}", run.errors);
    assert_eq!(
        run.lines[1..],
        [
            "fixed window  50 + 50 = 100 within 2 s",
            "sliding log   50 +  0 =  50 within 2 s"
        ]
    );
}

#[test]
fn the_boundary_is_the_same_on_redis() {
    let server = RedisServer::start();
    let run = run("boundary", &[("REDIS_URL", &server.url())]);
    assert!(run.is_success, "{}", run.errors);
    assert_eq!(
        run.lines[1..],
        [
            "fixed window  50 + 50 = 100 within 2 s",
            "sliding log   50 +  0 =  50 within 2 s"
        ]
    );
}

#[test]
fn the_crawler_waits_for_capacity() {
    let run = run(
        "crawler",
        &[("CALLS", "5"), ("WINDOW", "0.4"), ("PAGES", "12")],
    );
    assert!(run.is_success, "{}", run.errors);
    assert_eq!(run.lines[0], "5 calls in any 400ms: 5 left");
    assert_eq!(
        (
            run.with(": fetched after"),
            run.with("12 pages fetched and 0 put off")
        ),
        (12, 1)
    );
    assert_eq!(run.with("the API was called 12 times"), 1);
    assert!(
        run.took >= Duration::from_millis(800),
        "12 calls at 5 a window are more than two windows: {:?}",
        run.took
    );
}

#[test]
fn the_crawler_postpones_long_waits_and_spends_nothing_on_them() {
    let server = RedisServer::start();
    let settings = [
        ("CALLS", "5"),
        ("PAGES", "8"),
        ("MAX_WAIT", "1"),
        ("TOKEN", "s3cret"),
        ("REDIS_URL", &server.url()),
    ];
    let first = run("crawler", &settings);
    assert!(first.is_success, "{}", first.errors);
    assert_eq!(
        (first.with(": fetched after"), first.with(": put off")),
        (5, 3)
    );
    assert_eq!(
        first.lines.last().unwrap(),
        "the API was called 5 times; 0 left"
    );

    // Another process finds the units that the first has spent, and no more: a sixth call fits into
    // a limit of six.
    let second = run("crawler", &[&settings[1..], &[("CALLS", "6")]].concat());
    assert_eq!(second.lines[0], "6 calls in any 3600s: 1 left");
    assert_eq!(
        (second.with(": fetched after"), second.with(": put off")),
        (1, 7)
    );
    let keys = server.keys();
    assert!(keys.len() == 1 && !keys[0].contains("s3cret"), "{keys:?}");
}

#[test]
fn the_crawler_stops_when_the_limiter_is_unavailable() {
    let run = run("crawler", &[("REDIS_URL", NOBODY)]);
    assert!(!run.is_success);
    assert!(
        run.errors.starts_with("stopped: the rate-limit store "),
        "{}",
        run.errors
    );
    assert_eq!(run.with("fetched"), 0);
}

#[test]
fn the_quota_is_spent_to_its_last_unit_and_never_beyond() {
    let server = RedisServer::start();
    for settings in [&[][..], &[("REDIS_URL", &*server.url())]] {
        let run = run("quota", settings);
        assert!(run.is_success, "{}", run.errors);
        assert_eq!(
            run.lines[0],
            r#"no export: a cost of 10000 never fits into the limit "quota" of 9500"#
        );
        assert_eq!(run.with(" lists, "), 9, "eight regions, and all of them");
        let all = run
            .lines
            .iter()
            .find(|line| line.starts_with("all: "))
            .unwrap();
        let (counted, uncounted) = all
            .split_once("; without a limiter ")
            .unwrap_or((all, "0 lists"));
        assert!(counted.contains(" 3500 lists, 60 searches"), "{all}");
        assert_eq!(
            (run.ending("spent 9500 of 9500 units"), uncounted),
            (1, "0 lists")
        );
    }
}

#[test]
fn without_a_limiter_cheap_calls_proceed_and_expensive_ones_do_not() {
    let run = run(
        "quota",
        &[("REDIS_URL", NOBODY), ("LISTS", "4"), ("SEARCHES", "2")],
    );
    assert!(run.is_success, "{}", run.errors);
    let all =
        "all: 0 lists, 0 searches, 0 refused; without a limiter 32 lists made, 16 searches not";
    assert_eq!(run.ending(all), 1, "{:?}", run.lines);
}

#[cfg(unix)]
#[test]
fn the_quota_stops_cleanly_at_ctrl_c() {
    let mut process = example("quota", &[("CALL_MILLIS", "50"), ("LISTS", "100000")])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut output = BufReader::new(process.stdout.take().unwrap());
    let mut line = String::new();
    while !line.contains("regions share") {
        line.clear();
        assert!(output.read_line(&mut line).unwrap() > 0);
    }
    std::thread::sleep(Duration::from_millis(300));
    Command::new("kill")
        .args(["-INT", &process.id().to_string()])
        .status()
        .unwrap();
    let mut text = String::new();
    output.read_to_string(&mut text).unwrap();
    assert!(process.wait().unwrap().success());
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!((lines[0], lines.len()), ("stopping", 11), "{text}");
    assert!(
        lines[10].starts_with("spent ") && lines[10].ends_with(" of 9500 units"),
        "{text}"
    );
}

#[test]
fn invalid_numbers_are_named() {
    for (name, setting) in [
        ("crawler", "CALLS"),
        ("crawler", "WINDOW"),
        ("quota", "LISTS"),
    ] {
        let run = run(name, &[(setting, "many")]);
        assert!(
            !run.is_success && run.errors.contains(&format!("{setting}=\"many\"")),
            "{}",
            run.errors
        );
    }
}
