//! A check: charges that are decided together, all or nothing.
//!
//! 1. A [`Charge`] is one limit, one key, one cost. A cost of 0 asks without spending.
//! 2. A cost above the limit can never be admitted: [`Charge::new`] refuses it with [`NeverFits`], which is not a
//!    refusal to wait out.
//! 3. A [`Check`] is admitted whole or refused whole, in one atomic step, and a refusal costs nothing.
//! 4. A check sent again with the same id counts once; without an id, every time it is sent is a new admission.
//!
//! ```
//! use tower_sliding_window::{Charge, Check, Limit};
//!
//! let burst = Limit::per_second("burst", 10);
//! let daily = Limit::per_day("daily", 9_500);
//! let check = Check::new(Charge::new(burst, "tenant-7", 1)?).and(Charge::new(daily.clone(), "tenant-7", 100)?)?;
//! assert_eq!(check.charges().count(), 2);
//!
//! let error = Charge::new(daily, "tenant-7", 10_000).unwrap_err();
//! assert_eq!(error.to_string(), r#"a cost of 10000 never fits into the limit "daily" of 9500"#);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::{error, fmt, iter};

use crate::{admission::AdmissionId, key::Key, limit::Limit};

/// One limit, one key, one cost. See the [module docs](self).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Charge {
    limit: Limit,
    key: Key,
    cost: u64,
}

impl Charge {
    /// A charge of `cost` units on `limit` in the name of `key`.
    ///
    /// # Errors
    ///
    /// [`NeverFits`] when the cost is above the limit.
    pub fn new(limit: Limit, key: impl Into<Key>, cost: u64) -> Result<Self, NeverFits> {
        if cost > limit.units() {
            return Err(NeverFits { limit, cost });
        }
        Ok(Self { limit, key: key.into(), cost })
    }

    /// The limit.
    #[must_use]
    pub fn limit(&self) -> &Limit {
        &self.limit
    }

    /// The key.
    #[must_use]
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// The units this charge takes if it is admitted.
    #[must_use]
    pub fn cost(&self) -> u64 {
        self.cost
    }
}

/// Charges that are decided together. See the [module docs](self).
#[derive(Clone, Debug)]
#[must_use = "a check decides nothing until a store or a limiter gets it"]
pub struct Check {
    first: Charge,
    rest: Vec<Charge>,
    id: Option<AdmissionId>,
}

impl Check {
    /// A check of one charge. [`and`](Self::and) adds more.
    pub fn new(charge: Charge) -> Self {
        Self { first: charge, rest: Vec::new(), id: None }
    }

    /// Adds a charge that must be admitted together with the others.
    ///
    /// # Errors
    ///
    /// [`DuplicateCharge`] when the check already charges a limit of this name for this key: add up the costs instead.
    pub fn and(mut self, charge: Charge) -> Result<Self, DuplicateCharge> {
        if self.charges().any(|other| other.limit.name() == charge.limit.name() && other.key == charge.key) {
            return Err(DuplicateCharge { limit: charge.limit });
        }
        self.rest.push(charge);
        Ok(self)
    }

    /// A check of charges that are known to be on different limits.
    pub(crate) fn of_distinct(first: Charge, rest: Vec<Charge>) -> Self {
        Self { first, rest, id: None }
    }

    /// Gives the check an identity of the caller's: repeated with it, the same check counts once.
    pub fn with_id(mut self, id: AdmissionId) -> Self {
        self.id = Some(id);
        self
    }

    /// The charges, in the order in which they were added; there is always one.
    pub fn charges(&self) -> impl Iterator<Item = &Charge> {
        iter::once(&self.first).chain(&self.rest)
    }

    /// The charge of a check that has no other.
    pub(crate) fn only_charge(&self) -> Option<&Charge> {
        self.rest.is_empty().then_some(&self.first)
    }

    /// One value a charge, in order: the shape that keeps "there is always one" in the type.
    pub(crate) fn map_charges<'a, T>(&'a self, mut value: impl FnMut(&'a Charge) -> T) -> (T, Vec<T>) {
        (value(&self.first), self.rest.iter().map(value).collect())
    }

    /// Whether it makes no difference which of the two is decided first: they charge the same, and neither has an
    /// identity of its caller's.
    #[cfg(feature = "redis")]
    pub(crate) fn is_interchangeable_with(&self, other: &Self) -> bool {
        self.id.or(other.id).is_none() && self.first == other.first && self.rest == other.rest
    }

    /// The identity of the caller's, if there is one.
    #[must_use]
    pub fn id(&self) -> Option<AdmissionId> {
        self.id
    }
}

/// The cost is above the limit: waiting does not help, so there is no retry time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NeverFits {
    limit: Limit,
    cost: u64,
}

impl NeverFits {
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

impl fmt::Display for DuplicateCharge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "one check charges the limit {:?} twice for the same key", self.limit.name())
    }
}

impl error::Error for DuplicateCharge {}
