//! Errors: why there is no decision. A refusal is a decision, not an error.
//!
//! 1. [`Error::NeverFits`] is a mistake of the caller: waiting does not help.
//! 2. [`Error::TimedOut`], [`Error::Unavailable`] and [`Error::BreakerOpen`] are failures of the store. The caller or the
//!    route's [failure mode](crate::FailureMode) chooses whether the work goes on without a decision.
//! 3. [`Error::LimitNotChosen`] concerns one limit that is [chosen](crate::KeyedLimit::chosen) for each request. Its
//!    [fallback](crate::KeyedLimit::fallback) is charged in its place, or the failure mode decides.
//! 4. A [`StoreError`] has its cause as [`source`](std::error::Error::source). Neither contains a key or a password.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() {
//! use tower_sliding_window::{Error, Limit, Limiter, MemoryStore};
//!
//! let limiter = Limiter::new(MemoryStore::new());
//! match limiter.check(&Limit::per_minute("export", 10), "ada", 11).await {
//!     Ok(decision) => println!("{} left", decision.remaining()),
//!     Err(Error::NeverFits(never)) => assert_eq!((never.cost(), never.limit().units()), (11, 10)),
//!     Err(store) => println!("no decision: {store}"),
//! }
//! # }
//! ```

use std::{error, fmt, sync::Arc, time::Duration};

use crate::limit::errors::{DuplicateCharge, NeverFits};

/// Why there is no decision. See the [module docs](self).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Error {
    /// The cost is above the limit.
    NeverFits(NeverFits),
    /// The store did not answer within the deadline. The check may have been counted or not.
    TimedOut {
        /// The deadline that passed.
        deadline: Duration,
    },
    /// The store answered with an error, or could not be reached.
    Unavailable(StoreError),
    /// The store was not asked, since it has failed repeatedly. This is its last failure. See [`Breaker`](crate::Breaker).
    BreakerOpen(Arc<Self>),
    /// No limit could be chosen for the request.
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
    /// Whether it is a failure of the store that a breaker counts.
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
    /// The function that chooses the limit failed.
    Failed(Arc<dyn error::Error + Send + Sync>),
    /// It took longer than the deadline.
    TimedOut {
        /// The deadline that passed.
        deadline: Duration,
    },
    /// In the [shadow](crate::KeyedLimit::in_shadow), the function has chosen a limit that the request is already charged to
    /// for the same key. Only a limit that is [left out](crate::ShadowRefusals::left_out) reports it.
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

/// A failure of a store, with its cause. Cheap to clone.
#[derive(Clone, Debug)]
pub struct StoreError {
    doing: &'static str,
    cause: Arc<dyn error::Error + Send + Sync>,
    is_of_one_check: bool,
}

impl StoreError {
    /// The same failure, which has kept something else from being done.
    #[cfg(feature = "redis")]
    pub(crate) fn when(mut self, doing: &'static str) -> Self {
        self.doing = doing;
        self
    }

    /// A failure while `doing` something, such as "deciding a check".
    pub fn new(doing: &'static str, cause: impl Into<Box<dyn error::Error + Send + Sync>>) -> Self {
        Self { doing, cause: cause.into().into(), is_of_one_check: false }
    }

    /// Marks a failure that does not affect other checks, such as a lack of capacity for one limit. A
    /// [`Breaker`](crate::Breaker) does not count it.
    #[must_use]
    pub fn of_one_check(mut self) -> Self {
        self.is_of_one_check = true;
        self
    }

    #[cfg(feature = "test-util")]
    pub(crate) fn is_of_one_check(&self) -> bool {
        self.is_of_one_check
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
