//! Errors: why there is no decision. A refusal is a decision, not an error.
//!
//! 1. [`Error::NeverFits`] is a mistake of the caller: waiting does not help.
//! 2. [`Error::TimedOut`], [`Error::Unavailable`] and [`Error::BreakerOpen`] are failures of the
//!    store. The caller or the route's [failure mode](crate::limiter::FailureMode) decides whether
//!    the work goes on without a decision.
//! 3. A [`StoreError`] has a [kind](StoreError::kind), and its cause as
//!    [`source`](std::error::Error::source). Neither contains a key or a password.
//! 4. A [`ConfigError`] says which setting is wrong. It comes from functions that make a limit, a
//!    check, a store and so on, not from decisions.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() {
//! use tower_sliding_window::{Error, Limit, Limiter, MemoryStore};
//!
//! let limiter = Limiter::new(MemoryStore::new());
//! match limiter.check(&Limit::per_minute("export", 10), "ada", 11).await {
//!     Ok(decision) => println!("{} left", decision.remaining()),
//!     Err(Error::NeverFits(never)) => assert_eq!((never.cost, never.limit.units()), (11, 10)),
//!     Err(store) => println!("no decision: {store}"),
//! }
//! # }
//! ```

use std::{error, fmt, sync::Arc, time::Duration};

pub use crate::config_error::ConfigError;
use crate::limit::Limit;

/// Why there is no decision. See the [module docs](self).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Error {
    /// The cost is above the limit.
    NeverFits(NeverFits),
    /// The store did not answer within the deadline. The check may or may not have been counted.
    TimedOut {
        /// The deadline that passed.
        deadline: Duration,
        /// The store's smoothed round trip, if known. The [default
        /// deadline](crate::Limiter::deadline) uses the same value.
        round_trip: Option<Duration>,
    },
    /// The store answered with an error, or could not be reached.
    Unavailable(StoreError),
    /// The store was not asked, since it has failed repeatedly. Contains the last failure. See
    /// [`Breaker`](crate::limiter::Breaker).
    BreakerOpen(Arc<Self>),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NeverFits(error) => error.fmt(f),
            Self::TimedOut {
                deadline,
                round_trip,
            } => {
                write!(f, "the rate-limit store did not answer within {deadline:?}")?;
                let Some(trip) = round_trip.filter(|trip| *deadline < trip.saturating_mul(2))
                else {
                    return Ok(());
                };
                write!(
                    f,
                    ": it is {trip:?} away. Set a longer `deadline`, or none: then it follows the distance"
                )
            }
            Self::Unavailable(_) => f.write_str("the rate-limit store is unavailable"),
            Self::BreakerOpen(_) => {
                f.write_str("the rate-limit store is not asked, since it has failed repeatedly")
            }
        }
    }
}

impl error::Error for Error {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        match self {
            Self::NeverFits(_) | Self::TimedOut { .. } => None,
            Self::Unavailable(error) => Some(error),
            Self::BreakerOpen(error) => Some(&**error),
        }
    }
}

impl Error {
    /// The metrics label `cause`. `None` for a caller's mistake, which does not count as a failure.
    pub(crate) fn label(&self) -> Option<&'static str> {
        match self {
            Self::TimedOut { .. } => Some("timed_out"),
            Self::Unavailable(_) => Some("unavailable"),
            Self::BreakerOpen(_) => Some("breaker_open"),
            Self::NeverFits(_) => None,
        }
    }

    /// Sets the store's round trip in a [`TimedOut`](Self::TimedOut).
    pub(crate) fn at_distance(mut self, distance: Option<Duration>) -> Self {
        if let Self::TimedOut { round_trip, .. } = &mut self {
            *round_trip = distance;
        }
        self
    }

    /// True if the failure may be transient, so a caller that still has time to wait asks again.
    pub(crate) fn may_pass(&self) -> bool {
        match self {
            Self::TimedOut { .. } => true,
            Self::Unavailable(error) => match error.kind {
                StoreErrorKind::TimedOut => true,
                StoreErrorKind::Config | StoreErrorKind::Denied | StoreErrorKind::WrongType => {
                    false
                }
                _ => !error.is_of_one_check,
            },
            Self::BreakerOpen(error) => error.may_pass(),
            Self::NeverFits(_) => false,
        }
    }

    /// True if a breaker counts the error as a store failure.
    pub(crate) fn is_the_stores(&self) -> bool {
        match self {
            Self::TimedOut { .. } => true,
            Self::Unavailable(error) => !error.is_of_one_check,
            Self::NeverFits(_) | Self::BreakerOpen(_) => false,
        }
    }
}

/// A cost above the limit. Waiting does not help, so there is no retry time.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NeverFits {
    /// The limit that is too small.
    pub limit: Limit,
    /// The cost that is too large.
    pub cost: u64,
    /// True if the limit is [hidden](crate::Charge::hidden) from clients.
    pub is_hidden: bool,
}

impl fmt::Display for NeverFits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "a cost of {} never fits into the limit {:?} of {}",
            self.cost,
            self.limit.name(),
            self.limit.units()
        )
    }
}

impl error::Error for NeverFits {}

impl From<NeverFits> for Error {
    fn from(error: NeverFits) -> Self {
        Self::NeverFits(error)
    }
}

impl From<StoreError> for Error {
    fn from(error: StoreError) -> Self {
        Self::Unavailable(error)
    }
}

/// A failure of a store, with its cause as [`source`](std::error::Error::source). Cheap to clone.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() {
/// # #[cfg(feature = "redis")] {
/// use tower_sliding_window::{RedisStore, error::StoreErrorKind};
///
/// if let Err(error) = RedisStore::connect("redis://127.0.0.1:1").await {
///     assert_eq!(error.kind, StoreErrorKind::Unreachable);
/// }
/// # } }
/// ```
#[derive(Clone, Debug)]
pub struct StoreError {
    doing: &'static str,
    /// The kind of failure.
    pub kind: StoreErrorKind,
    pub(crate) is_of_one_check: bool,
    cause: Arc<dyn error::Error + Send + Sync>,
}

/// The kind of a store failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StoreErrorKind {
    /// A setting is wrong, and the cause's text names it. The cause is usually a [`ConfigError`].
    /// Some mistakes can be found only by the server: for example, it may not have the chosen
    /// database. The cause is then the server's error.
    Config,
    /// The server refused the user, the password, or a command that this user may not run.
    Denied,
    /// There is no connection to the server, or the connection broke.
    Unreachable,
    /// The server did not answer in time. Or the check was not sent, since so many checks were
    /// waiting that its reply would have come too late.
    TimedOut,
    /// The server does not accept writes: it is a replica, has too few replicas, or could not save
    /// its data.
    ReadOnly,
    /// The server is still loading its data after a start, or one script has been running too long.
    Busy,
    /// The store has no memory left for the admission.
    OutOfMemory,
    /// The key holds another application's value.
    WrongType,
    /// Another failure, described by the cause.
    Other,
}

impl StoreError {
    /// A failure while `doing` something, such as "deciding a check".
    pub fn new(
        doing: &'static str,
        kind: StoreErrorKind,
        cause: impl Into<Box<dyn error::Error + Send + Sync>>,
    ) -> Self {
        Self {
            doing,
            kind,
            is_of_one_check: false,
            cause: cause.into().into(),
        }
    }

    /// Marks a failure that does not affect other checks, such as a full queue.
    /// [`Breaker`](crate::limiter::Breaker)s do not count it.
    #[must_use]
    pub fn of_one_check(mut self) -> Self {
        self.is_of_one_check = true;
        self
    }

    /// Replaces the text for what the store was `doing` when it failed.
    #[cfg(feature = "redis")]
    pub(crate) fn when(mut self, doing: &'static str) -> Self {
        self.doing = doing;
        self
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} failed", self.doing)
    }
}

impl error::Error for StoreError {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        Some(&*self.cause)
    }
}
