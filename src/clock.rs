//! The clocks that stores decide by, and times and windows as numbers and text.

use std::{
    fmt::Write,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime},
};

use tokio::time::Instant;

/// A clock that moves only when a test moves it.
///
/// A test on a `MemoryStore` that [pauses tokio's time](crate::MemoryStore#in-tests) needs none. This clock also works on
/// several threads, and with a `RedisStore`.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use tower_sliding_window::{Limit, Limiter, MemoryStore, store::ManualClock};
///
/// let clock = ManualClock::new();
/// let limiter = Limiter::new(MemoryStore::new().clock(&clock));
/// let limit = Limit::per_hour("report", 1);
/// assert!(limiter.check(&limit, "ada", 1).await?.is_allowed());
///
/// let refused = limiter.check(&limit, "ada", 1).await?;
/// clock.advance(refused.retry_after().expect("the hour's only unit is spent"));
/// assert!(limiter.check(&limit, "ada", 1).await?.is_allowed());
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct ManualClock(Arc<AtomicU64>);

impl ManualClock {
    /// A clock that shows the present time.
    #[must_use]
    pub fn new() -> Self {
        Self(Arc::new(AtomicU64::new(micros_since_epoch(SystemTime::now()))))
    }

    /// Moves the clock forward, rounded down to microseconds.
    pub fn advance(&self, by: Duration) {
        self.set(|now| now.saturating_add(micros(by)));
    }

    /// Moves the clock back, as an operator may do with a server's clock; to 1970 at most.
    pub fn step_back(&self, by: Duration) {
        self.set(|now| now.saturating_sub(micros(by)));
    }

    /// The time it shows.
    #[must_use]
    pub fn now(&self) -> SystemTime {
        system_time(self.micros())
    }

    fn set(&self, time: impl Fn(u64) -> u64) {
        let _ = self.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |now| Some(time(now)));
    }

    pub(crate) fn micros(&self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }
}

impl Default for ManualClock {
    fn default() -> Self {
        Self::new()
    }
}

/// The clock of a store in this process.
#[derive(Clone, Debug)]
pub(crate) enum Clock {
    /// The system's time at the start, and monotonic from there on, since the system clock may step. It is tokio's clock,
    /// which needs no runtime, so that tests can pause it.
    Monotonic {
        started: Instant,
        epoch: u64,
    },
    /// The system's time, which may step. It does not drift away from the clocks of other processes.
    #[cfg(feature = "redis")]
    System,
    Manual(ManualClock),
}

impl Clock {
    pub(crate) fn monotonic() -> Self {
        Self::Monotonic { started: Instant::now(), epoch: micros_since_epoch(SystemTime::now()) }
    }

    /// Microseconds since the Unix epoch.
    pub(crate) fn now(&self) -> u64 {
        match self {
            Self::Monotonic { started, epoch } => epoch.saturating_add(micros(started.elapsed())),
            #[cfg(feature = "redis")]
            Self::System => micros_since_epoch(SystemTime::now()),
            Self::Manual(clock) => clock.micros(),
        }
    }
}

pub(crate) fn system_time(micros: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH + Duration::from_micros(micros)
}

pub(crate) fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

pub(crate) fn micros_since_epoch(time: SystemTime) -> u64 {
    micros(time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default())
}

/// The microseconds of each unit of a window, and its names. A window is written with the first name.
pub(crate) const WINDOW_UNITS: [(u64, &[&str]); 6] = [
    (86_400_000_000, &["d", "day", "days"]),
    (3_600_000_000, &["h", "hour", "hours"]),
    (60_000_000, &["min", "m", "minute", "minutes"]),
    (1_000_000, &["s", "sec", "second", "seconds"]),
    (1_000, &["ms"]),
    (1, &["us"]),
];

/// Appends a window in the largest unit that divides it.
pub(crate) fn write_window(text: &mut String, window_micros: u64) {
    let divides = |(micros, _): &&(u64, _)| window_micros.is_multiple_of(*micros);
    let (micros, names) = WINDOW_UNITS.iter().find(divides).unwrap_or(&(1, &["us"]));
    let count = window_micros / micros;
    if count > 1 {
        // Writing to a String cannot fail.
        let _ = write!(text, "{count}");
    }
    text.push_str(names[0]);
}
