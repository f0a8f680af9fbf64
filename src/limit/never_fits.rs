//! The mistake of a cost that no limit can admit.

use std::{error, fmt};

use super::Limit;

/// A cost above the limit. Waiting does not help, so there is no retry time.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NeverFits {
    /// The limit that is too small.
    pub limit: Limit,
    /// The cost that is too large.
    pub cost: u64,
    /// Whether the limit is [hidden](crate::Charge::hidden) from clients.
    pub is_hidden: bool,
}

impl fmt::Display for NeverFits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a cost of {} never fits into the limit {:?} of {}", self.cost, self.limit.name(), self.limit.units())
    }
}

impl error::Error for NeverFits {}
