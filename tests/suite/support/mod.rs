//! Helpers that the tests share.

#[cfg(any(feature = "grpc", feature = "tls"))]
pub(crate) mod certificates;
pub(crate) mod clock_steps;
pub(crate) mod example;
mod figures;
#[cfg(feature = "grpc")]
pub(crate) mod grpc;
pub(crate) mod http_client;
pub(crate) mod http_server;
pub(crate) mod load;
pub(crate) mod log;
pub(crate) mod outage;
pub(crate) mod proxy;
#[cfg(feature = "cluster")]
pub(crate) mod redis_cluster;
pub(crate) mod redis_server;
pub(crate) mod requests;
pub(crate) mod services;
pub(crate) mod stores;

use std::{
    error::Error,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant, UNIX_EPOCH},
};

use tokio::{
    runtime::{self, Runtime},
    task::{JoinSet, yield_now},
    time::{MissedTickBehavior, interval, sleep},
};
use tower_sliding_window::{
    Algorithm, Charge, Check, Decision, Limit, Limiter, MemoryStore, RateLimitLayer, RedisStore,
    Store, decision::LimitStatus, limiter::FailureMode, store::ManualClock,
};

pub(crate) use self::figures::Figures;
use self::redis_server::RedisServer;

/// The layer in one of the modes of a table.
pub(crate) fn in_mode(layer: RateLimitLayer, mode: FailureMode) -> RateLimitLayer {
    match mode {
        FailureMode::Closed => layer.fail_closed(),
        FailureMode::Local(share) => layer.fail_local(share),
        _ => layer.fail_open(),
    }
}

/// Long enough that no test fails because the machine is busy.
pub(crate) const TEST_TIMEOUT: Duration = Duration::from_secs(20);

pub(crate) const MICROSECOND: Duration = Duration::from_micros(1);

/// One algorithm of each kind.
pub(crate) const ALGORITHMS: [Algorithm; 4] = [
    Algorithm::SLIDING_LOG,
    Algorithm::compact_log(16),
    Algorithm::SLIDING_WINDOW_COUNTER,
    Algorithm::FIXED_WINDOW,
];

pub(crate) const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

pub(crate) const fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// A charge to the key `ada`.
pub(crate) fn charge(limit: &Limit, cost: u64) -> Charge {
    Charge::new(limit.clone(), "ada", cost).unwrap()
}

pub(crate) fn check_of(charges: impl IntoIterator<Item = Charge>) -> Check {
    let mut charges = charges.into_iter();
    let first = Check::new(charges.next().unwrap());
    charges.try_fold(first, Check::and).unwrap()
}

/// True if a check was refused, and would have been admitted without the reserved units.
pub(crate) fn is_refused_by_reservations(decision: &Decision) -> bool {
    let mut refusing = decision
        .statuses()
        .filter(|status| !status.is_shadow && status.retry_after().is_some());
    !decision.is_allowed() && refusing.all(LimitStatus::is_refused_by_reservations)
}

/// Advances the clock to the moment at which its next window begins, as fixed windows count them.
pub(crate) fn to_next_window(clock: &ManualClock, window: Duration) {
    let since_1970 = clock.now().duration_since(UNIX_EPOCH).unwrap().as_micros();
    let elapsed = u64::try_from(since_1970 % window.as_micros()).unwrap();
    clock.advance(window - Duration::from_micros(elapsed));
}

/// Advances the clock to a second after its next window has begun, so that no algorithm is near the
/// end of a window.
pub(crate) fn to_the_start_of_a_window(clock: &ManualClock, window: Duration) {
    to_next_window(clock, window);
    clock.advance(seconds(1));
}

/// Numbers that look random and are the same in every run.
pub(crate) struct Numbers(pub(crate) u64);

impl Numbers {
    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}

/// An error and its causes, separated by colons.
pub(crate) fn with_causes(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

pub(crate) fn one_thread() -> Runtime {
    runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
}

pub(crate) fn two_threads() -> Runtime {
    runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .unwrap()
}

/// Lets all other tasks do what they can do without time passing.
pub(crate) async fn let_tasks_run() {
    for _ in 0..100 {
        yield_now().await;
    }
}

/// Counts the ticks of a timer that come in time, so that a test can tell a wait from the delays of
/// a busy machine.
pub(crate) struct Lateness {
    began: Instant,
    in_time: Arc<AtomicU32>,
    _ticks: JoinSet<()>,
}

impl Lateness {
    const TICK: Duration = Duration::from_millis(10);

    pub(crate) fn start() -> Self {
        let (in_time, mut ticks) = (Arc::new(AtomicU32::new(0)), JoinSet::new());
        let counted = Arc::clone(&in_time);
        ticks.spawn(async move {
            let mut timer = interval(Self::TICK);
            timer.set_missed_tick_behavior(MissedTickBehavior::Skip);
            loop {
                timer.tick().await;
                counted.fetch_add(1, Ordering::Relaxed);
            }
        });
        Self {
            began: Instant::now(),
            in_time,
            _ticks: ticks,
        }
    }

    /// For how long since the start no tick came in time.
    pub(crate) fn so_far(&self) -> Duration {
        self.began
            .elapsed()
            .saturating_sub(Self::TICK * self.in_time.load(Ordering::Relaxed))
    }
}

/// Waits until a condition holds, and fails with `failure` if it does not.
pub(crate) async fn until(failure: &str, mut holds: impl FnMut() -> bool) {
    let asked = Instant::now();
    while !holds() {
        // On a machine that let it run too late, a sentinel does nothing for 30 seconds (its TILT
        // mode).
        assert!(asked.elapsed() < 3 * TEST_TIMEOUT, "{failure}");
        sleep(Duration::from_millis(20)).await;
    }
}

/// A limiter on one of the stores, whose clock the test controls.
pub(crate) struct Fixture<S> {
    pub(crate) store: S,
    pub(crate) limiter: Limiter,
    pub(crate) clock: ManualClock,
    /// Stopped when the test ends.
    _server: Option<RedisServer>,
}

impl<S: Store + Clone> Fixture<S> {
    fn behind_a_pointer(self) -> Fixture<Arc<dyn Store>> {
        Fixture::new(Arc::new(self.store), self.clock, self._server)
    }

    fn new(store: S, clock: ManualClock, server: Option<RedisServer>) -> Self {
        Self {
            limiter: Limiter::new(store.clone()).deadline(TEST_TIMEOUT),
            store,
            clock,
            _server: server,
        }
    }
}

impl<S: Store> Fixture<S> {
    /// Without a refusal cache, so that every check reaches the store.
    pub(crate) fn without_refusal_cache(self) -> Self {
        Self {
            limiter: self.limiter.refusal_cache(Duration::ZERO),
            ..self
        }
    }
}

pub(crate) fn memory() -> Fixture<MemoryStore> {
    let clock = ManualClock::new();
    Fixture::new(MemoryStore::new().clock(&clock), clock, None)
}

pub(crate) fn redis() -> Fixture<RedisStore> {
    let (clock, server) = (ManualClock::new(), RedisServer::start());
    Fixture::new(redis_by(&clock, &server), clock, Some(server))
}

/// As an application has it that chooses its store at run time.
pub(crate) fn any_memory() -> Fixture<Arc<dyn Store>> {
    memory().behind_a_pointer()
}

pub(crate) fn any_redis() -> Fixture<Arc<dyn Store>> {
    redis().behind_a_pointer()
}

/// A store on this server, by the clock of a test.
pub(crate) fn redis_by(clock: &ManualClock, server: &RedisServer) -> RedisStore {
    server.store().clock(clock).build().unwrap()
}

/// Runs each test on every store. The test takes a `Fixture`.
macro_rules! for_every_store {
    ($($test:ident)*) => {
        mod on_memory {
            $(#[tokio::test] async fn $test() { super::$test(crate::support::memory()).await; })*
        }
        mod on_redis {
            $(#[tokio::test] async fn $test() { super::$test(crate::support::redis()).await; })*
        }
        mod on_any_memory {
            $(#[tokio::test] async fn $test() { super::$test(crate::support::any_memory()).await; })*
        }
        mod on_any_redis {
            $(#[tokio::test] async fn $test() { super::$test(crate::support::any_redis()).await; })*
        }
    };
}
pub(crate) use for_every_store;
