//! Errors about a limit in a check.

use std::{error, fmt};

use super::Limit;

/// A cost above the limit. Waiting does not help, so there is no retry time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NeverFits {
    limit: Limit,
    cost: u64,
    is_hidden: bool,
}

impl NeverFits {
    pub(crate) fn new(limit: Limit, cost: u64) -> Self {
        Self { limit, cost, is_hidden: false }
    }

    /// Marks the limit as [hidden](crate::Charge::hidden) from clients.
    #[must_use]
    pub fn hidden(mut self) -> Self {
        self.is_hidden = true;
        self
    }

    /// Whether the limit is [hidden](crate::Charge::hidden) from clients.
    #[must_use]
    pub fn is_hidden(&self) -> bool {
        self.is_hidden
    }

    /// The limit that is too small.
    #[must_use]
    pub fn limit(&self) -> &Limit {
        &self.limit
    }

    /// The cost that is too large.
    #[must_use]
    pub fn cost(&self) -> u64 {
        self.cost
    }
}

impl fmt::Display for NeverFits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a cost of {} never fits into the limit {:?} of {}", self.cost, self.limit.name(), self.limit.units())
    }
}

impl error::Error for NeverFits {}

/// One check charges the same limit twice for the same key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DuplicateCharge {
    limit: Limit,
}

impl DuplicateCharge {
    pub(crate) fn new(limit: Limit) -> Self {
        Self { limit }
    }
}

impl fmt::Display for DuplicateCharge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "one check charges the limit {:?} twice for the same key", self.limit.name())
    }
}

impl error::Error for DuplicateCharge {}
