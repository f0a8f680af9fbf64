//! The memory that a key and an admission take in the in-process store.

use std::{env, fs, process::Command};

use tower_sliding_window::{Charge, Check, Key, Limit, MemoryStore, Store};

const LIMIT: Limit = Limit::per_hour("calls", 1_000);

/// With this number of keys, the tables of the shards have just grown, so they are half empty.
const KEYS: u32 = 60_000;

/// The bytes that the process has in memory, without its code.
fn resident() -> u64 {
    let pages = fs::read_to_string("/proc/self/statm").unwrap();
    let page = |number| {
        pages
            .split(' ')
            .nth(number)
            .unwrap()
            .parse::<u64>()
            .unwrap()
    };
    4_096 * (page(1) - page(2))
}

/// Runs in a process of its own, and prints the bytes that each key has taken.
#[test]
#[ignore = "a child process of `a_key_takes_little_memory_whatever_its_length` runs it"]
fn fill() {
    let number = |name| env::var(name).unwrap().parse::<usize>().unwrap();
    let (length, admissions) = (number("LENGTH"), number("ADMISSIONS"));
    let store = MemoryStore::new().capacity(10_000_000);
    let before = resident();
    for _ in 0..admissions {
        for key in 0..KEYS {
            let key = Key::from(format!("{key:0length$}"));
            let check = Check::new(Charge::new(LIMIT, key, 1).unwrap());
            assert!(store.decide_now(&check).unwrap().unwrap().is_allowed());
        }
    }
    assert_eq!(store.keys(), KEYS as usize);
    println!("bytes: {}", (resident() - before) / u64::from(KEYS));
}

fn bytes(length: usize, admissions: usize) -> u64 {
    let child = Command::new(env::current_exe().unwrap())
        .args([
            "--ignored",
            "--exact",
            "--nocapture",
            "stores::memory_per_key::fill",
        ])
        .env("LENGTH", length.to_string())
        .env("ADMISSIONS", admissions.to_string())
        // What is freed goes back to the system, so that only what is used is counted.
        .env("MALLOC_MMAP_THRESHOLD_", "16384")
        .output()
        .unwrap();
    let output = String::from_utf8(child.stdout).unwrap();
    let bytes = output.split("bytes: ").nth(1).unwrap();
    let bytes = bytes.split_whitespace().next().unwrap().parse().unwrap();
    println!("{admissions} admissions of keys of {length} bytes: {bytes} bytes a key");
    bytes
}

/// [`MemoryStore::capacity`] tells these figures.
#[test]
fn a_key_takes_little_memory_whatever_its_length() {
    for length in [8, 64, 4_000] {
        let bytes = bytes(length, 1);
        assert!(bytes <= 160, "{bytes} bytes for a key of {length} bytes");
    }
}

/// A list doubles when it is full.
#[test]
fn a_further_admission_takes_sixteen_to_thirty_two_bytes() {
    let bytes = (bytes(8, 20) - bytes(8, 1)) / 19;
    assert!((16..=34).contains(&bytes), "{bytes} bytes an admission");
}
