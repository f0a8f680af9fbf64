//! A full in-process store: every key of every limit is still decided, and no window admits more
//! than its limit.

use std::{
    cell::Cell,
    collections::HashMap,
    env, fs,
    net::SocketAddr,
    time::{Duration, UNIX_EPOCH},
};

use axum::{body::Body, extract::ConnectInfo};
use http::Request;
use proptest::{
    collection::vec,
    prop_assert,
    test_runner::{Config, TestRunner},
};
use tower::{Layer, Service, ServiceExt, service_fn};
use tower_sliding_window::{
    Algorithm, Charge, Check, Limit, Limiter, MemoryStore, PeerIp, RateLimitLayer,
    check::AdmissionId, limiter::Reservation, store::ManualClock,
};

use crate::support::requests::hello;

const MINUTE: Duration = Duration::from_secs(60);

fn from_address(address: &str) -> Request<Body> {
    let address: SocketAddr = address.parse().unwrap();
    Request::builder()
        .extension(ConnectInfo(address))
        .body(Body::empty())
        .unwrap()
}

/// One client has a /48, and so 65,536 keys. It sends one request from each of many, within both
/// limits.
#[tokio::test]
async fn a_client_with_endless_keys_ends_no_limit() {
    for (is_closed, pause) in [
        (false, 0),
        (false, 5),
        (false, 1_800),
        (true, 0),
        (true, 5),
        (true, 1_800),
    ] {
        let clock = ManualClock::new();
        let store = MemoryStore::new().capacity(2_000).clock(&clock);
        let layer = RateLimitLayer::new(store.clone())
            .limit(Limit::per_second("burst", 10).by(PeerIp::new()))
            .limit(Limit::per_hour("sustained", 1_000).by(PeerIp::new()));
        let mut app = if is_closed {
            layer.fail_closed()
        } else {
            layer
        }
        .layer(service_fn(hello));
        for network in 0..5_000 {
            let request = from_address(&format!("[2001:db8:7:{network:x}::1]:9"));
            drop(app.ready().await.unwrap().call(request).await.unwrap());
        }
        clock.advance(Duration::from_secs(pause));
        let mut statuses = HashMap::<u16, usize>::new();
        for _ in 0..5_000 {
            let response = app
                .ready()
                .await
                .unwrap()
                .call(from_address("192.0.2.1:9"))
                .await
                .unwrap();
            *statuses.entry(response.status().as_u16()).or_default() += 1;
        }
        let (admitted, refused) = (statuses.get(&200), statuses.get(&429));
        assert!(
            admitted <= Some(&10) && admitted >= Some(&1),
            "{statuses:?}"
        );
        assert!(
            pause == 0 || admitted == Some(&10),
            "the cells of a second are empty: {statuses:?}"
        );
        assert_eq!(refused, Some(&(5_000 - admitted.unwrap())), "{statuses:?}");
        assert!(store.keys() <= 2_000);
    }
}

/// What a store has to count at least: the units of one limit and key, each with its time and until
/// when it counts.
#[derive(Default)]
struct Truth(HashMap<(usize, u8), Vec<Units>>);

#[derive(Clone, Copy)]
struct Units {
    id: usize,
    at: u64,
    until: u64,
    units: u64,
}

fn limits() -> [Limit; 6] {
    let limit = |name: &'static str, units, millis, algorithm| {
        Limit::new(name, units, Duration::from_millis(millis))
            .unwrap()
            .with_algorithm(algorithm)
    };
    [
        limit("log", 5, 1_000, Algorithm::SLIDING_LOG),
        limit("log", 8, 7_000, Algorithm::SLIDING_LOG),
        limit("compact", 6, 3_000, Algorithm::compact_log(5)),
        limit("wide", 20, 60_000, Algorithm::SLIDING_LOG),
        limit("fixed", 4, 2_000, Algorithm::FIXED_WINDOW),
        limit("counter", 6, 2_000, Algorithm::SLIDING_WINDOW_COUNTER),
    ]
}

impl Truth {
    fn add(&mut self, (limit, key): (usize, u8), units: Units) {
        self.0.entry((limit, key)).or_default().push(units);
    }

    /// What has left stays away, and nothing else counts as later than now.
    fn step_back(&mut self, before: u64, now: u64) {
        for ((limit, _), all) in &mut self.0 {
            let start = if limits()[*limit].name() == "fixed" {
                before - before % window(*limit)
            } else {
                0
            };
            all.retain(|one| one.until > before && one.at >= start);
            for one in all {
                one.at = one.at.min(now);
                one.until = one.until.min(now + window(*limit));
            }
        }
    }

    /// The units of a limit and key now.
    fn used(&self, (limit, key): (usize, u8), now: u64) -> u64 {
        let all = self.0.get(&(limit, key)).map_or(&[][..], Vec::as_slice);
        let sum = |counts: &dyn Fn(&Units) -> bool| {
            all.iter()
                .filter(|one| counts(one))
                .map(|one| one.units)
                .sum::<u64>()
        };
        let start = now - now % window(limit);
        match limits()[limit].name() {
            "fixed" => sum(&|one| one.at >= start),
            "counter" => {
                // Cells count units in full, and for a window only.
                let previous = sum(&|one| one.at < start && one.at > now - window(limit)) as f64;
                let overlap = (start + window(limit) - now) as f64 / window(limit) as f64;
                sum(&|one| one.at >= start) + (previous * overlap - 1e-6).ceil() as u64
            }
            _ => sum(&|one| one.until > now),
        }
    }
}

fn window(limit: usize) -> u64 {
    limits()[limit].window().as_micros() as u64
}

fn micros(clock: &ManualClock) -> u64 {
    clock.now().duration_since(UNIX_EPOCH).unwrap().as_micros() as u64
}

/// Random checks, reservations and settlements of keys that find room, find none, and find room
/// again, while the clock goes on and steps back. Whatever is admitted, the units that were truly
/// spent stay within the limit.
#[test]
fn a_full_store_never_admits_more_than_a_limit() {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let step = (0..14_u8, 0..6_usize, 0..24_u8, 0..5_u64, 0..4_000_u64);
    let overflowed = Cell::new(0);
    let mut random = TestRunner::new(Config {
        cases: 64,
        max_shrink_iters: 0,
        failure_persistence: None,
        ..Config::default()
    });
    let outcome = random.run(&(vec(step, 1..300), 0..24_usize), |(steps, capacity)| {
        let clock = ManualClock::new();
        clock.step_back(Duration::MAX);
        clock.advance(Duration::from_secs(1_000_000));
        let store = MemoryStore::new().capacity(capacity).clock(&clock);
        let limiter = Limiter::new(store.clone());
        let (mut truth, mut open) = (
            Truth::default(),
            Vec::<(Reservation, (usize, u8), usize)>::new(),
        );
        for (id, (kind, place, key, cost, millis)) in steps.into_iter().enumerate() {
            let (now, limits) = (micros(&clock), limits());
            let charge = |place: usize| {
                Charge::new(limits[place % 6].clone(), key.to_string(), cost.min(4)).unwrap()
            };
            let decide = |check: Check| runtime.block_on(limiter.check_all(check)).unwrap();
            let mut admitted = Vec::new();
            match kind {
                0..=3 => {
                    let all = Check::new(charge(place))
                        .and(charge(place + 1))
                        .unwrap()
                        .and(charge(place + 2))
                        .unwrap();
                    let all = if kind == 0 {
                        all
                    } else {
                        all.with_id(AdmissionId(id as u64))
                    };
                    let decision = decide(all.clone());
                    if decision.is_allowed() {
                        admitted = (0..3).map(|number| ((place + number) % 6, cost)).collect();
                    }
                    // A repeated check may count again, and no less.
                    drop((kind > 1).then(|| decide(all)));
                }
                4 | 5 if decide(Check::new(charge(place))).is_allowed() => {
                    admitted.push((place, cost));
                }
                6 => {
                    let any = Check::new(
                        Charge::any_left(limits[place].clone(), key.to_string()).unwrap(),
                    );
                    let before = truth.used((place, key), now);
                    prop_assert!(
                        !decide(any).is_allowed() || before < limits[place].units(),
                        "{before} of {}",
                        limits[place]
                    );
                }
                7 => {
                    let (spent, shadow) = (
                        Charge::spent(limits[place].clone(), key.to_string(), cost),
                        charge(place + 1),
                    );
                    let decision = decide(Check::new(spent).and(shadow.in_shadow()).unwrap());
                    truth.add(
                        (place, key),
                        Units {
                            id,
                            at: now,
                            until: now + window(place),
                            units: cost,
                        },
                    );
                    if decision.statuses().nth(1).unwrap().retry_after().is_none() {
                        admitted.push(((place + 1) % 6, cost));
                    }
                }
                8 | 9 if cost > 0 => {
                    let (place, lease) = (
                        place % 4,
                        Duration::from_millis(1 + millis).min(limits[place % 4].window()),
                    );
                    let reserved = runtime
                        .block_on(limiter.reserve(&limits[place], key.to_string(), cost, lease))
                        .unwrap();
                    if let Ok(reservation) = reserved {
                        let until = now + lease.as_micros() as u64;
                        truth.add(
                            (place, key),
                            Units {
                                id,
                                at: now,
                                until,
                                units: cost,
                            },
                        );
                        let used = truth.used((place, key), now);
                        prop_assert!(used <= limits[place].units(), "{used} of {}", limits[place]);
                        open.push((reservation, (place, key), id));
                    }
                }
                10 | 11 if !open.is_empty() => {
                    let (reservation, of, id) = open.remove(millis as usize % open.len());
                    let settled = runtime.block_on(reservation.settle(2 * cost)).unwrap();
                    prop_assert!(settled.decision.is_allowed());
                    let all = truth.0.get_mut(&of).unwrap();
                    all.iter_mut().filter(|one| one.id == id).for_each(|one| {
                        (one.units, one.until) = (2 * cost, one.at + window(of.0));
                    });
                }
                12 if millis < 1_000 => {
                    runtime
                        .block_on(limiter.reset(&limits[place], key.to_string()))
                        .unwrap();
                    truth.0.remove(&(place, key));
                    open.retain(|(_, of, _)| *of != (place, key));
                }
                12 if millis < 1_300 => {
                    clock.step_back(Duration::from_millis(10 * millis));
                    truth.step_back(now, micros(&clock));
                    open.clear();
                }
                _ => clock.advance(Duration::from_millis(millis)),
            }
            for (place, units) in admitted {
                truth.add(
                    (place, key),
                    Units {
                        id,
                        at: now,
                        until: now + window(place),
                        units,
                    },
                );
                let used = truth.used((place, key), now);
                prop_assert!(
                    units == 0 || used <= limits[place].units(),
                    "{used} of {}",
                    limits[place]
                );
            }
            prop_assert!(store.keys() <= capacity);
            let live = truth
                .0
                .keys()
                .filter(|of| truth.used(**of, now) > 0)
                .count();
            overflowed.set(overflowed.get() + usize::from(live > store.keys()));
        }
        clock.advance(3 * MINUTE);
        for _ in 0..130 {
            clock.advance(Duration::from_millis(20));
            assert!(
                runtime
                    .block_on(limiter.peek(&limits()[0], "ada"))
                    .unwrap()
                    .is_allowed()
            );
        }
        prop_assert!(
            format!("{store:?}").contains("admissions: 0, limits: 0"),
            "{store:?}"
        );
        Ok(())
    });
    outcome.unwrap();
    assert!(overflowed.get() > 200, "{overflowed:?}");
}

/// What a full store means for honest keys, which ask evenly at half of their limit. `--nocapture`
/// prints the table, and the variables `CAPACITY` and `UNITS` change the store and the limit.
#[test]
fn honest_keys_in_a_full_store() {
    let [capacity, units] = [("CAPACITY", 50), ("UNITS", 10)]
        .map(|(name, usual)| env::var(name).map_or(usual, |text| text.parse().unwrap()));
    println!(
        "| keys / capacity | algorithm | most of {units} | all ask 5: refused | at once: refused | all ask 1: refused of new keys | bytes |\n|---|---|---|---|---|---|---|"
    );
    for (halves, algorithm) in [1, 2, 4, 20]
        .into_iter()
        .flat_map(|part| ["log", "compact(12)", "counter", "fixed"].map(|word| (part, word)))
    {
        let limit: Limit = format!("calls={units}/min {algorithm}").parse().unwrap();
        let (refused, _, most, bytes) = crowd(capacity, &limit, capacity * halves / 2, 5);
        let (_, refused_new, most_then, _) = crowd(capacity, &limit, capacity * halves / 2, 1);
        let most = most.max(most_then);
        let at_once = at_once(capacity, &limit, capacity * halves / 2);
        println!(
            "| {} | {algorithm} | {most} | {refused:.3} | {at_once:.3} | {refused_new:.3} | {bytes} |",
            f64::from(halves) / 2.0
        );
        assert!(
            most <= if algorithm == "counter" {
                2 * units
            } else {
                units
            } as usize,
            "{most}"
        );
        // As the guide says for more keys, whose shares scatter less.
        let (in_turn, together) = match halves {
            1 => (0.0..=0.01, 0.0..=0.35),
            2 => (0.0..=0.25, 0.10..=0.45),
            4 => (0.30..=0.55, 0.40..=0.70),
            _ => (0.75..=0.95, 0.75..=0.96),
        };
        let is_as_told = in_turn.contains(&refused) && together.contains(&at_once);
        assert!(
            algorithm != "log" || is_as_told,
            "{halves} halves: {refused} in turn, {at_once} at once"
        );
    }
}

/// As documented: a flood of keys lets a small limit refuse all others, for longer than its window.
/// It has no effect on a large limit.
#[tokio::test]
async fn a_flood_of_keys_keeps_new_keys_out_of_a_small_limit() {
    for (units, flood, refused) in [(10, 10_000, 990..=1_000), (1_000, 100_000, 0..=0)] {
        let (limit, clock) = (Limit::per_minute("calls", units), ManualClock::new());
        clock.advance(MINUTE - Duration::from_micros(micros(&clock) % 60_000_000));
        let limiter = Limiter::new(MemoryStore::new().capacity(1_000).clock(&clock));
        for key in 0..flood {
            drop(limiter.check(&limit, format!("{key}"), 1).await.unwrap());
        }
        let any_left =
            |key| Check::new(Charge::any_left(limit.clone(), format!("new-{key}")).unwrap());
        let mut waits = Vec::new();
        for key in 0..1_000 {
            waits.extend(
                limiter
                    .check_all(any_left(key))
                    .await
                    .unwrap()
                    .retry_after(),
            );
        }
        assert!(refused.contains(&waits.len()), "{} of 1,000", waits.len());
        assert!(
            waits
                .iter()
                .all(|wait| (MINUTE..=MINUTE * 3 / 2).contains(wait)),
            "{waits:?}"
        );
        clock.advance(MINUTE * 3 / 2);
        assert!(limiter.check_all(any_left(0)).await.unwrap().is_allowed());
    }
}

/// The share that is refused of the requests of keys that ask five times at once, each in each
/// minute, after the first minute.
fn at_once(capacity: u32, limit: &Limit, keys: u32) -> f64 {
    let clock = ManualClock::new();
    let limiter = Limiter::new(MemoryStore::new().capacity(capacity as usize).clock(&clock));
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    let mut refused = 0;
    for number in 0..3 * keys {
        clock.advance(MINUTE / keys);
        for _ in 0..5 {
            let key = format!("{}", number % keys);
            let is_allowed = runtime
                .block_on(limiter.check(limit, key, 1))
                .unwrap()
                .is_allowed();
            refused += u32::from(!is_allowed && number >= keys);
        }
    }
    f64::from(refused) / f64::from(2 * keys * 5)
}

/// In each of three minutes, each key asks so many times. After the first minute new keys come that
/// ask five times, and one that always asks. Returns the refused share of the keys' requests and of
/// the new keys', the most that any key was admitted within a minute, a fixed window within one of
/// the clock, and the bytes by which the process has grown.
fn crowd(capacity: u32, limit: &Limit, keys: u32, asks: u32) -> (f64, f64, usize, u64) {
    let resident = || {
        fs::read_to_string("/proc/self/statm")
            .unwrap()
            .split(' ')
            .nth(1)
            .unwrap()
            .parse::<u64>()
            .unwrap()
    };
    let (before, clock) = (resident(), ManualClock::new());
    let store = MemoryStore::new().capacity(capacity as usize).clock(&clock);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    let limiter = Limiter::new(store);
    let mut admitted = HashMap::<u32, Vec<u64>>::new();
    let (mut asked, mut refused) = ([0; 3], [0; 3]);
    let mut ask = |kind: usize, key: u32| {
        let is_allowed = runtime
            .block_on(limiter.check(limit, format!("{key}"), 1))
            .unwrap()
            .is_allowed();
        asked[kind] += 1;
        refused[kind] += u32::from(!is_allowed);
        if is_allowed && key.is_multiple_of(16) {
            admitted.entry(key).or_default().push(micros(&clock));
        }
    };
    let bytes = (0..3 * asks * keys).fold(0, |bytes, number| {
        let (minute, number) = (number / (asks * keys), number % (asks * keys));
        clock.advance(MINUTE / (asks * keys));
        ask(usize::from(minute == 0) * 2, number % keys);
        if minute > 0 {
            // Each fifth of a minute each of 32 new keys.
            let (from, to) = (
                number * 160 / (asks * keys),
                (number + 1) * 160 / (asks * keys),
            );
            (from..to).for_each(|turn| ask(1, u32::MAX - turn % 32));
            ask(2, u32::MAX - 47);
        }
        if number % 1_024 > 0 {
            bytes
        } else {
            bytes.max(resident().saturating_sub(before) * 4_096)
        }
    });
    let is_fixed = limit.algorithm() == Algorithm::FIXED_WINDOW;
    let most = admitted.values().map(|times| {
        let within = |from: u64| {
            times
                .iter()
                .filter(|at| (from..from + 60_000_000).contains(at))
                .count()
        };
        times
            .iter()
            .map(|at| within(if is_fixed { at - at % 60_000_000 } else { *at }))
            .max()
            .unwrap()
    });
    let most = most.max().unwrap();
    let share = |kind: usize| f64::from(refused[kind]) / f64::from(asked[kind]);
    (share(0), share(1), most, bytes)
}
