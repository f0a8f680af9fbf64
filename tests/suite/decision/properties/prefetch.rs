//! Random histories of several processes that hold prefetches, on one Redis, with the time passed
//! in.
//!
//! Each process has a runtime and a limiter of its own. It is driven only while it makes a request,
//! so others act while it holds units, has asked for some, or has not read a reply. Processes are
//! killed, replies are lost, limits change, and the server's clock steps back.
//!
//! 1. No admission is one too many for an exact log of all admissions, by a clock that never steps.
//! 2. A refusal is justified by the units that Redis counts: those that were admitted, and those
//!    that processes hold or have lost. They count for the life of a prefetch longer than a window
//!    at most.
//!
//! `PREFETCH_STEPS` is the number of steps.

use std::{
    collections::HashMap,
    env,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use proptest::prelude::Rng;
use tokio::{runtime::Runtime, time::sleep};
use tower_sliding_window::{
    Algorithm, Charge, Check, Decision, Error, Key, Limit, Limiter, RedisStore, Store,
    check::AdmissionId,
    error::{StoreError, StoreErrorKind},
    settlement::{Settled, Settlement},
    store::{LocalState, ManualClock, StoreFuture},
};

use super::{micros, random_seed};
use crate::support::{TEST_TIMEOUT, one_thread, redis_server::RedisServer};

const LIFE: Duration = Duration::from_secs(1);

/// Redis lets a key expire by its own clock, which must not happen while the test's clock stands
/// still. So windows are longer than a slow machine leaves a key alone.
const WINDOW: Duration = Duration::from_secs(10);

/// The sub-windows of the compact log.
const PARTS: u32 = 14;

const KEYS: [&str; 2] = ["ada", "bob"];

/// `life` is what the limits ask for. Prefetches of a process that is far away live longer, for
/// `LIFE` at most.
fn limits(units: u64, life: Duration) -> [Limit; 3] {
    let prefetches = life;
    [
        Limit::per("exact", units, WINDOW).prefetch(prefetches),
        Limit::per("compact", units, WINDOW)
            .with_algorithm(Algorithm::compact_log(PARTS as u16 + 2))
            .prefetch(prefetches),
        Limit::per("plain", units, WINDOW),
    ]
}

type Counter = (usize, &'static str);

/// All that happens to the limits, by the time that never steps.
struct World {
    /// The server's clock, and how far it is behind the time.
    clock: ManualClock,
    behind: u64,
    admitted: HashMap<Counter, Vec<(u64, u64)>>,
    /// The units that Redis may count, and until when.
    charged: HashMap<Counter, Vec<Charged>>,
    asked: u64,
    /// Until when the limits had these units.
    earlier_units: Vec<(u64, u64)>,
}

#[derive(Clone, Debug)]
struct Charged {
    asked: u64,
    units: u64,
    until: u64,
    prefetch: Option<AdmissionId>,
}

impl World {
    fn now(&self) -> u64 {
        micros(self.clock.now()) + self.behind
    }

    fn of(charge: &Charge) -> Counter {
        let name = |limit: &Limit| limit.name() == charge.limit().name();
        let key = |key: &&str| Key::from(*key) == *charge.key();
        (
            limits(1, LIFE).iter().position(name).unwrap(),
            KEYS.into_iter().find(key).unwrap(),
        )
    }

    /// Units of a compact log count until the end of their sub-window.
    fn rounding(counter: Counter) -> u64 {
        if counter.0 == 1 {
            (WINDOW / PARTS).as_micros() as u64 + 1
        } else {
            0
        }
    }

    /// A prefetch that was taken under earlier units may be spent after the limit has these units
    /// again.
    fn most_units(&self, units: u64) -> u64 {
        let since = self.now() - LIFE.as_micros() as u64;
        let earlier = self
            .earlier_units
            .iter()
            .filter(|(until, _)| *until > since)
            .map(|(_, units)| *units);
        earlier.fold(units, u64::max)
    }

    /// Notes an admission in the exact log of all processes, unless it is one too many for a limit
    /// of these units.
    fn admit(&mut self, check: &Check, units: u64) -> Result<(), String> {
        let now = self.now();
        for charge in check.charges() {
            let admitted = self.admitted.entry(Self::of(charge)).or_default();
            admitted.retain(|(at, _)| at + charge.limit().window().as_micros() as u64 > now);
            let used: u64 = admitted.iter().map(|(_, units)| units).sum();
            if used + charge.cost() > units {
                return Err(format!(
                    "{used} units are used, and {charge:?} was admitted"
                ));
            }
            admitted.push((now, charge.cost()));
        }
        Ok(())
    }

    /// The units that Redis may count, of each charge.
    fn charged_units(&mut self, check: &Check) -> Vec<u64> {
        let now = self.now();
        let units = check.charges().map(|charge| {
            let charged = self.charged.entry(Self::of(charge)).or_default();
            charged.retain(|charged| charged.until > now);
            charged.iter().map(|charged| charged.units).sum()
        });
        units.collect()
    }

    /// The same, but only those that were asked for after this check.
    fn charged_since(&self, asked: u64, charge: &Charge) -> u64 {
        let charged = self.charged.get(&Self::of(charge)).into_iter().flatten();
        charged
            .filter(|charged| charged.asked > asked)
            .map(|charged| charged.units)
            .sum()
    }

    /// Redis may count a check from now on.
    fn charge(&mut self, check: &Check) -> u64 {
        self.asked += 1;
        for charge in check.charges().filter(|charge| charge.cost() > 0) {
            let (units, prefetch) = (charge.cost(), charge.lease().and_then(|_| check.id()));
            let charged = Charged {
                asked: self.asked,
                units,
                until: u64::MAX,
                prefetch,
            };
            self.charged
                .entry(Self::of(charge))
                .or_default()
                .push(charged);
        }
        self.asked
    }

    /// Redis has counted a check at this time at the latest; or never.
    fn has_charged(&mut self, check: &Check, asked: u64, at: Option<u64>) {
        for charge in check.charges() {
            let counter = Self::of(charge);
            let charged = self.charged.entry(counter).or_default();
            let Some(at) = at else {
                charged.retain(|charged| charged.asked != asked);
                continue;
            };
            let counts_for = charge
                .lease()
                .unwrap_or_else(|| charge.limit().window())
                .as_micros() as u64;
            for charged in charged.iter_mut().filter(|charged| charged.asked == asked) {
                charged.until = at + counts_for + Self::rounding(counter);
            }
        }
    }

    fn settle(&mut self, settlement: &Settlement, now: u64) {
        for (charge, units) in settlement.accounts() {
            let (counter, units) = (Self::of(charge), units.unwrap());
            let until = now + charge.limit().window().as_micros() as u64 + Self::rounding(counter);
            let charged = self.charged.entry(counter).or_default();
            for prefetch in charged
                .iter_mut()
                .filter(|charged| charged.prefetch == Some(settlement.id))
            {
                (prefetch.units, prefetch.until) = (units, prefetch.until.min(until));
            }
        }
    }
}

/// A store of one process. Its local clock never steps, and it may lose replies.
#[derive(Clone)]
struct ProcessStore {
    redis: RedisStore,
    state: LocalState,
    world: Arc<Mutex<World>>,
    loses: Arc<AtomicBool>,
}

impl ProcessStore {
    fn lose<T>(&self, reply: Result<T, StoreError>) -> Result<T, StoreError> {
        if self.loses.load(Ordering::Relaxed) {
            Err(StoreError::new(
                "asking Redis",
                StoreErrorKind::Other,
                "the reply is lost",
            ))
        } else {
            reply
        }
    }

    fn world(&self) -> std::sync::MutexGuard<'_, World> {
        self.world.lock().unwrap()
    }
}

impl Store for ProcessStore {
    fn decide(&self, check: Check) -> StoreFuture<Decision> {
        let store = self.clone();
        Box::pin(async move {
            let asking = Asking::of(&store.world, &check);
            let reply = store.redis.decide(check.clone()).await;
            asking.replied(&reply);
            store.lose(reply)
        })
    }

    fn settle(&self, settlement: Settlement) -> StoreFuture<Settled> {
        let store = self.clone();
        Box::pin(async move {
            let reply = store.redis.settle(settlement.clone()).await;
            if let Ok(settled) = &reply {
                let mut world = store.world();
                let at = micros(settled.decision.at()) + world.behind;
                world.settle(&settlement, at);
            }
            settlement
                .check
                .charges()
                .for_each(|charge| store.state.forget_refusals(charge.limit(), charge.key()));
            store.lose(reply)
        })
    }

    fn reset(&self, limit: Limit, key: Key) -> StoreFuture<()> {
        self.redis.reset(limit, key)
    }

    fn local_state(&self) -> Option<&LocalState> {
        Some(&self.state)
    }
}

/// A check that Redis is asked about. If it is dropped, Redis may have counted it until then.
struct Asking {
    world: Arc<Mutex<World>>,
    check: Check,
    asked: Option<u64>,
}

impl Asking {
    fn of(world: &Arc<Mutex<World>>, check: &Check) -> Self {
        let asked = Some(world.lock().unwrap().charge(check));
        Self {
            world: Arc::clone(world),
            check: check.clone(),
            asked,
        }
    }

    fn replied(mut self, reply: &Result<Decision, StoreError>) {
        if let (Ok(decision), Some(asked)) = (reply, self.asked.take()) {
            let mut world = self.world.lock().unwrap();
            let at = micros(decision.at()) + world.behind;
            world.has_charged(&self.check, asked, decision.is_allowed().then_some(at));
        }
    }
}

impl Drop for Asking {
    fn drop(&mut self) {
        if let Some(asked) = self.asked {
            let mut world = self.world.lock().unwrap();
            let now = world.now();
            world.has_charged(&self.check, asked, Some(now));
        }
    }
}

struct Process {
    runtime: Runtime,
    limiter: Limiter,
    loses: Arc<AtomicBool>,
    units: u64,
    life: Duration,
}

impl Process {
    fn start(
        server: &RedisServer,
        local: &ManualClock,
        world: &Arc<Mutex<World>>,
        units: u64,
        has_cache: bool,
        round_trip: Duration,
    ) -> Self {
        let clock = world.lock().unwrap().clock.clone();
        let (redis, loses) = (
            server.store().clock(&clock).build().unwrap(),
            Arc::default(),
        );
        let state = LocalState::by(local).with_prefetch();
        // One that is far away has prefetches of a short life, which the distance makes longer.
        let life = if round_trip.is_zero() {
            LIFE
        } else {
            LIFE / 20
        };
        (0..20).for_each(|_| state.answered_in(round_trip));
        let store = ProcessStore {
            redis,
            state,
            world: Arc::clone(world),
            loses: Arc::clone(&loses),
        };
        let limiter = Limiter::new(store).deadline(TEST_TIMEOUT);
        let limiter = if has_cache {
            limiter
        } else {
            limiter.refusal_cache(Duration::ZERO)
        };
        Self {
            runtime: one_thread(),
            limiter,
            loses,
            units,
            life,
        }
    }

    fn check(&self, check: &Check) -> Result<Decision, Error> {
        self.runtime.block_on(self.limiter.check_all(check.clone()))
    }
}

/// Runs a random history, and returns how many checks were admitted, how many of them were decided
/// in a process, and how many were refused.
fn run(seed: u64, steps: usize, clock_steps: bool) -> Result<(u64, u64, u64), String> {
    let mut random = proptest::test_runner::TestRng::from_seed(
        proptest::test_runner::RngAlgorithm::ChaCha,
        &std::array::from_fn::<u8, 32, _>(|place| seed.to_le_bytes()[place % 8]),
    );
    let mut below = |most: u64| random.next_u64() % most;
    let (server, local) = (RedisServer::start(), ManualClock::new());
    let clock = ManualClock::new();
    let world = Arc::new(Mutex::new(World {
        clock: clock.clone(),
        behind: 0,
        admitted: HashMap::new(),
        charged: HashMap::new(),
        asked: 0,
        earlier_units: Vec::new(),
    }));
    let units = |below: &mut dyn FnMut(u64) -> u64| [20, 100, 400, 1_000][below(4) as usize];
    // Each process may be elsewhere.
    let start = |units, below: &mut dyn FnMut(u64) -> u64| {
        let round_trip = Duration::from_millis([0, 5, 80, 300][below(4) as usize]);
        Process::start(
            &server,
            &local,
            &world,
            units,
            clock_steps && below(2) == 0,
            round_trip,
        )
    };
    // In some histories each process has its own idea of the limit. Then all of them together keep
    // the largest one.
    let (is_mixed, first_units) = (below(4) == 0, units(&mut below));
    let mut processes: Vec<Process> = Vec::new();
    for _ in 0..2 + below(7) {
        let units = if is_mixed {
            units(&mut below)
        } else {
            first_units
        };
        processes.push(start(units, &mut below));
    }
    let (mut admitted, mut in_process, mut refused) = (0, 0, 0);
    for number in 0..steps {
        let place = below(processes.len() as u64) as usize;
        match below(1_000) {
            0..950 => {
                let process = &processes[place];
                let (limits, key) = (
                    limits(process.units, process.life),
                    KEYS[below(8) as usize / 7],
                );
                let charge =
                    |limit: usize, cost| Charge::new(limits[limit].clone(), key, cost).unwrap();
                let cost = 1 + below(4) / 3;
                let mut check = Check::new(charge(if below(8) > 0 { 0 } else { 1 }, cost));
                match below(20) {
                    0 => check = Check::new(charge(0, cost)).and(charge(1, 1)).unwrap(),
                    1 => check = check.and(charge(2, 1)).unwrap(),
                    _ => {}
                }
                // The same check again and again, so that blocks are worth it.
                for _ in 0..[1, 1, 1, 1, 20, 20, 200][below(7) as usize] {
                    // Units may be given back while the check is decided.
                    let (asked, before) = {
                        let mut world = world.lock().unwrap();
                        (world.asked, world.charged_units(&check))
                    };
                    let outcome = process.check(&check);
                    let mut world = world.lock().unwrap();
                    match outcome {
                        Ok(decision) if decision.is_allowed() => {
                            let most = if is_mixed {
                                1_000
                            } else {
                                world.most_units(process.units)
                            };
                            world
                                .admit(&check, most)
                                .map_err(|error| format!("step {number}: {error}"))?;
                            admitted += 1;
                            in_process += u64::from(world.asked == asked);
                        }
                        Ok(decision) => {
                            refused += 1;
                            let is_justified =
                                check.charges().zip(&before).any(|(charge, before)| {
                                    let used = before + world.charged_since(asked, charge);
                                    used + charge.cost() > charge.limit().units()
                                });
                            // A refusal that is known stands while the store fails.
                            let fails = process.loses.load(Ordering::Relaxed);
                            if !clock_steps && !is_justified && !fails {
                                return Err(format!(
                                    "step {number}: {decision:?}, and only {before:?} units are charged"
                                ));
                            }
                            break;
                        }
                        Err(_) => break,
                    }
                }
            }
            950..975 => {
                let time = Duration::from_micros(
                    [
                        below(20_000),
                        below(1_100_000),
                        8_800_000 + below(2_400_000),
                        below(15_000_000),
                    ][below(4) as usize],
                );
                local.advance(time);
                clock.advance(time);
            }
            975..983 => {
                // Time for the tasks of a process.
                processes[place]
                    .runtime
                    .block_on(async { sleep(Duration::from_micros(300)).await });
            }
            983..988 => {
                let killed = processes.swap_remove(place);
                processes.push(start(killed.units, &mut below));
            }
            988..992 => {
                let loses = &processes[place].loses;
                loses.store(!loses.load(Ordering::Relaxed), Ordering::Relaxed);
            }
            992..996 if is_mixed => processes[place].units = units(&mut below),
            992..996 => {
                let (mut world, units) = (world.lock().unwrap(), units(&mut below));
                let now = world.now();
                world.earlier_units.push((now, processes[place].units));
                processes
                    .iter_mut()
                    .for_each(|process| process.units = units);
            }
            _ if clock_steps => {
                let time = below(3_000_000);
                clock.step_back(Duration::from_micros(time));
                world.lock().unwrap().behind += time;
            }
            _ => {}
        }
    }
    Ok((admitted, in_process, refused))
}

fn run_all(clock_steps: bool) {
    let steps = env::var("PREFETCH_STEPS").map_or(15_000, |steps| {
        steps.parse().expect("PREFETCH_STEPS is a number")
    });
    let seed = env::var("SEED").map_or_else(
        |_| random_seed(),
        |seed| seed.parse().expect("SEED is a number"),
    );
    println!("SEED={seed}");
    let mut sums = [0; 3];
    for history in 0..steps / 3_000 {
        match run(seed.wrapping_add(history as u64), 3_000, clock_steps) {
            Ok((admitted, in_process, refused)) => {
                for (sum, count) in sums.iter_mut().zip([admitted, in_process, refused]) {
                    *sum += count;
                }
            }
            Err(failure) => panic!("SEED={} {failure}", seed.wrapping_add(history as u64)),
        }
    }
    let [admitted, in_process, refused] = sums;
    println!(
        "{admitted} checks admitted, {in_process} of them in a process, and {refused} refused"
    );
    assert!(
        in_process * 10 > admitted && refused * 50 > admitted,
        "{sums:?}"
    );
}

#[test]
fn no_history_of_prefetches_admits_more_than_an_exact_log() {
    run_all(true);
}

#[test]
fn a_history_of_prefetches_refuses_only_what_is_held_or_spent() {
    run_all(false);
}
