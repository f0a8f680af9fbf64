//! The clocks that stores use for decisions, and conversions between times and numbers.

use std::{
    fmt,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{self, Duration, SystemTime},
};

use tokio::time::Instant;

/// A clock that moves only when a test moves it.
///
/// With a `MemoryStore`, a test can [pause tokio's time](crate::MemoryStore#in-tests) instead. A
/// `ManualClock` also works with several threads, and with a `RedisStore`.
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
#[derive(Clone)]
pub struct ManualClock(Arc<Shown>);

/// A manual clock's time in microseconds, and a test's hook.
struct Shown {
    micros: AtomicU64,
    after_reading: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

impl ManualClock {
    /// A clock that shows the current time.
    pub fn new() -> Self {
        Self(Arc::new(Shown {
            micros: AtomicU64::new(micros_since_epoch(SystemTime::now())),
            after_reading: OnceLock::new(),
        }))
    }

    /// Calls `hook` after each reading, on the thread that reads the clock. So a test can stop that
    /// thread between its reading and its decision. If a clock gets several hooks, only the first
    /// one is called.
    pub fn after_reading(&self, hook: impl Fn() + Send + Sync + 'static) {
        let _ = self.0.after_reading.set(Box::new(hook));
    }

    /// Moves the clock forward by `by`, rounded down to microseconds.
    pub fn advance(&self, by: Duration) {
        self.set(|now| now.saturating_add(micros(by)));
    }

    /// Moves the clock back by `by`, but not before 1970, as if an operator had set back a server's
    /// clock.
    pub fn step_back(&self, by: Duration) {
        self.set(|now| now.saturating_sub(micros(by)));
    }

    /// The time that the clock shows.
    pub fn now(&self) -> SystemTime {
        system_time(self.micros())
    }

    fn set(&self, time: impl Fn(u64) -> u64) {
        let _ = self
            .0
            .micros
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |now| Some(time(now)));
    }

    pub(crate) fn micros(&self) -> u64 {
        let micros = self.0.micros.load(Ordering::SeqCst);
        if let Some(hook) = self.0.after_reading.get() {
            hook();
        }
        micros
    }
}

impl fmt::Debug for ManualClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ManualClock").field(&self.now()).finish()
    }
}

impl Default for ManualClock {
    fn default() -> Self {
        Self::new()
    }
}

/// The clock for a store in this process.
#[derive(Clone)]
pub(crate) enum Clock {
    /// Time since this moment by tokio's clock, which tests can pause, and which does not need a
    /// runtime. Steps of the system clock do not affect it.
    Monotonic(Instant),
    /// The system time at the start, plus the time since then by tokio's clock. It follows every
    /// step of the system clock above one second, for example after the machine was suspended.
    Following(Arc<Following>),
    Manual(ManualClock),
}

/// One second. [`Following`] compares itself with the system clock at most once a second, and a
/// larger difference is a step.
const STEP: u64 = 1_000_000;

/// The longest accepted time between the readings of the two clocks. If more time passes, the
/// thread has stalled, and the readings are dropped.
const PRECISION: Duration = Duration::from_millis(100);

pub(crate) struct Following {
    started: Instant,
    /// The same moment as `started`, by a clock that tests cannot pause.
    really_started: time::Instant,
    /// The system time at `started`, adjusted by all steps that this clock has followed since then.
    epoch: AtomicU64,
    /// When the clocks were last compared, in microseconds since the start.
    compared_at: AtomicU64,
}

impl Following {
    #[inline]
    fn now(&self) -> u64 {
        let elapsed = micros(self.started.elapsed());
        if elapsed.saturating_sub(self.compared_at.load(Ordering::Relaxed)) >= STEP {
            self.compare(elapsed);
        }
        self.epoch.load(Ordering::Relaxed).saturating_add(elapsed)
    }

    #[cold]
    fn compare(&self, elapsed: u64) {
        self.compared_at.store(elapsed, Ordering::Relaxed);
        let known = self.epoch.load(Ordering::Relaxed);
        let before = self.really_started.elapsed();
        let system = SystemTime::now();
        if self.really_started.elapsed().saturating_sub(before) <= PRECISION {
            self.follow(known, micros(before), micros_since_epoch(system));
        }
    }

    /// Follows the system clock if it has stepped. `system` is the system time, `elapsed` is the
    /// time since the start, and `known` is the epoch before both were read. If another thread has
    /// followed a step in the meantime, these readings are stale and are dropped.
    fn follow(&self, known: u64, elapsed: u64, system: u64) {
        let epoch = system.saturating_sub(elapsed);
        if epoch.abs_diff(known) > STEP {
            let _ = self
                .epoch
                .compare_exchange(known, epoch, Ordering::Relaxed, Ordering::Relaxed);
        }
    }
}

impl Clock {
    pub(crate) fn monotonic() -> Self {
        Self::Monotonic(Instant::now())
    }

    pub(crate) fn following() -> Self {
        Self::Following(Arc::new(Following {
            started: Instant::now(),
            really_started: time::Instant::now(),
            epoch: AtomicU64::new(micros_since_epoch(SystemTime::now())),
            compared_at: AtomicU64::new(0),
        }))
    }

    /// Microseconds since the Unix epoch, or since a monotonic clock's start.
    pub(crate) fn now(&self) -> u64 {
        match self {
            Self::Monotonic(start) => micros(start.elapsed()),
            Self::Following(clock) => clock.now(),
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
    micros(
        time.duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_follows_steps_of_the_system_clock_and_nothing_less() {
        let Clock::Following(clock) = Clock::following() else {
            panic!("another clock")
        };
        let start = 1_784_111_777_000_000;
        let hour = 3_600_000_000;
        clock.epoch.store(start, Ordering::Relaxed);
        let shown = |elapsed, system| {
            clock.follow(clock.epoch.load(Ordering::Relaxed), elapsed, system);
            clock.epoch.load(Ordering::Relaxed) + elapsed
        };
        assert_eq!(shown(5, start + 5), start + 5);
        assert_eq!(
            shown(hour, start + hour + STEP),
            start + hour,
            "less than a step"
        );
        assert_eq!(
            shown(hour, start + 2 * hour),
            start + 2 * hour,
            "the machine was suspended for an hour"
        );
        assert_eq!(shown(2 * hour, start + 3 * hour + STEP), start + 3 * hour);
        assert_eq!(
            shown(3 * hour, start - 24 * hour),
            start - 24 * hour,
            "it was a day ahead"
        );
        assert_eq!(shown(3 * hour, 0), 3 * hour, "before 1970");
        clock.follow(start, 3 * hour, start + hour);
        assert_eq!(
            clock.epoch.load(Ordering::Relaxed),
            0,
            "a late thread undoes no step that another thread has followed"
        );
    }

    /// Pausing tokio's time also stops this clock, and does not count as a system clock step.
    #[tokio::test(start_paused = true)]
    async fn a_paused_clock_shows_the_time_of_the_test() {
        let clock = Clock::following();
        let start = clock.now();
        tokio::time::advance(Duration::from_secs(3_600)).await;
        assert_eq!(clock.now(), start + 3_600_000_000);
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(clock.now(), start + 3_600_000_000);
    }
}
