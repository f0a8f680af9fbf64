//! What a limiter can answer instead of a decision.
//!
//! 1. A refusal is a decision, not an error.
//! 2. [`Error::NeverFits`] is the caller's: no waiting helps. [`Error::TimedOut`] and [`Error::Unavailable`] are the
//!    store's, and so is [`Error::BreakerOpen`], which repeats the last of them without asking: whether the work goes on
//!    without a decision is the caller's choice, or the route's failure mode.
//! 3. [`Error::LimitNotChosen`] is that of a limit which is [chosen](crate::KeyedLimit::chosen) for each request. It concerns this
//!    limit alone: its [fallback](crate::KeyedLimit::fallback) is charged in its place, or the route's failure mode says
//!    whether the request goes on without it.
//! 4. A [`StoreError`] keeps its cause as [`source`](std::error::Error::source); neither holds a key or a password.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() {
//! use tower_sliding_window::{Error, Limit, Limiter, MemoryStore};
//!
//! let limiter = Limiter::new(MemoryStore::new());
//! match limiter.check(&Limit::per_minute("export", 10), "ada", 11).await {
//!     Ok(decision) => println!("{} left", decision.remaining()),
//!     Err(Error::NeverFits(never)) => assert_eq!((never.cost(), never.limit().units()), (11, 10)),
//!     Err(store) => println!("go on without a decision, or do not: {store}"),
//! }
//! # }
//! ```

use std::{error, fmt, sync::Arc, time::Duration};

use crate::check::{DuplicateCharge, NeverFits};

/// Why there is no decision. See the [module docs](self).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Error {
    /// The cost is above the limit.
    NeverFits(NeverFits),
    /// The store did not answer within the deadline. The check may or may not have been counted. Of stacked layers, one that
    /// has nothing left of its deadline, since the request has waited for others, has not asked.
    TimedOut {
        /// The deadline that passed.
        deadline: Duration,
    },
    /// The store answered with an error, or could not be reached.
    Unavailable(StoreError),
    /// The store was not asked, since it has failed repeatedly; this was its last failure. See
    /// [`Breaker`](crate::Breaker).
    BreakerOpen(Arc<Self>),
    /// A limit could not be chosen for the request.
    LimitNotChosen(ChoiceError),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NeverFits(error) => error.fmt(f),
            Self::TimedOut { deadline } => write!(f, "the rate-limit store did not answer within {deadline:?}"),
            Self::Unavailable(_) => f.write_str("the rate-limit store is unavailable"),
            Self::BreakerOpen(_) => f.write_str("the rate-limit store is not asked, since it has failed repeatedly"),
            Self::LimitNotChosen(_) => f.write_str("no rate limit could be chosen"),
        }
    }
}

impl error::Error for Error {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        match self {
            Self::NeverFits(_) | Self::TimedOut { .. } => None,
            Self::Unavailable(error) => Some(error),
            Self::BreakerOpen(error) => Some(&**error),
            Self::LimitNotChosen(error) => Some(error),
        }
    }
}

impl Error {
    /// Whether the store was asked, and others had better not ask it.
    pub(crate) fn is_the_stores(&self) -> bool {
        match self {
            Self::TimedOut { .. } => true,
            Self::Unavailable(error) => !error.is_of_one_check,
            Self::NeverFits(_) | Self::BreakerOpen(_) | Self::LimitNotChosen(_) => false,
        }
    }
}

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

impl From<ChoiceError> for Error {
    fn from(error: ChoiceError) -> Self {
        Self::LimitNotChosen(error)
    }
}

/// Why a limit could not be [chosen](crate::KeyedLimit::chosen) for a request. Cheap to clone.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum ChoiceError {
    /// What chooses the limit has failed.
    Failed(Arc<dyn error::Error + Send + Sync>),
    /// It took longer than the deadline.
    TimedOut {
        /// The deadline that passed.
        deadline: Duration,
    },
    /// It has chosen, in the [shadow](crate::KeyedLimit::in_shadow), a limit that the request is charged by already, for
    /// the same key: only a limit that is [left out](crate::ShadowRefusals::left_out) says so.
    Duplicate(DuplicateCharge),
}

impl fmt::Display for ChoiceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed(_) => f.write_str("choosing a limit failed"),
            Self::TimedOut { deadline } => write!(f, "choosing a limit took longer than {deadline:?}"),
            Self::Duplicate(_) => f.write_str("a limit was chosen twice"),
        }
    }
}

impl error::Error for ChoiceError {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        match self {
            Self::Failed(cause) => Some(&**cause),
            Self::TimedOut { .. } => None,
            Self::Duplicate(error) => Some(error),
        }
    }
}

/// A store's failure: what it was doing, and the cause. Cheap to clone.
#[derive(Clone, Debug)]
pub struct StoreError {
    doing: &'static str,
    cause: Arc<dyn error::Error + Send + Sync>,
    is_of_one_check: bool,
}

impl StoreError {
    /// The same failure, of something else that it has kept from being done.
    #[cfg(feature = "redis")]
    pub(crate) fn when(mut self, doing: &'static str) -> Self {
        self.doing = doing;
        self
    }

    /// A failure while `doing` something, such as "deciding a check".
    pub fn new(doing: &'static str, cause: impl Into<Box<dyn error::Error + Send + Sync>>) -> Self {
        Self { doing, cause: cause.into().into(), is_of_one_check: false }
    }

    /// Says that others may well be decided, so that a [`Breaker`](crate::Breaker) does not count it: as when a store has
    /// no room for more under one limit.
    #[must_use]
    pub fn of_one_check(mut self) -> Self {
        self.is_of_one_check = true;
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
