//! Checks and their charges.
//!
//! 1. A [`Charge`] has one limit, one key and one cost. A cost of 0 spends nothing.
//! 2. A [`Check`] is a list of charges, which are admitted or refused together in one atomic step.
//!    A refusal costs nothing.
//! 3. A cost above the limit can never be admitted, so [`Charge::new`] returns
//!    [`NeverFits`](crate::error::NeverFits).
//! 4. A charge may [reserve](Charge::reserve) units until it is settled. A charge in the
//!    [shadow](Charge::in_shadow) counts, but never refuses.
//! 5. If the cost is known only afterwards, one charge can ask whether [any units are
//!    left](Charge::any_left), and another can count the [spent](Charge::spent) units later.
//! 6. The [id](Check::with_id) of a check is an idempotency key: a check that is sent again with
//!    the same id counts once. While any of the check's limits still has the first admission in its
//!    window, a repeated check is admitted, and none of its limits is charged again. Without an id,
//!    every check is a new admission.
//!
//! # Ids
//!
//! 1. Every admission has an id, so two requests in the same microsecond count as two.
//! 2. To repeat a check safely, [give](Check::with_id) it your own id. While the first admission is
//!    in the window, a check with the same id is not counted again. After a
//!    [settlement](crate::settlement) the id is free for a new admission. If you do not give an id,
//!    the check's [decision](crate::Decision::id) has a fresh one, with which you can settle the
//!    admission. Do not repeat the check with this fresh id: the repeated check may count a second
//!    time.
//! 3. Fresh ids are unique without coordination: each thread begins at a random 64-bit number, and
//!    counts up. If a thousand threads have a million live ids each, the probability that two are
//!    equal is below 1e-5.
//!
//! ```
//! use tower_sliding_window::check::AdmissionId;
//!
//! assert_ne!(AdmissionId::fresh(), AdmissionId::fresh());
//! // A job queue that may deliver a job twice has an id for it.
//! assert_eq!(AdmissionId(77), AdmissionId(77));
//! ```
//!
//! # Example
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

mod charge;

use std::{
    cell::Cell,
    hash::{BuildHasher, RandomState},
    iter,
    num::NonZeroU32,
};

pub use self::charge::{Charge, Takes};
use crate::{config_error::ConfigError, key::Digester, limit::Limit};

/// Charges that are decided together. See the [module docs](self).
#[derive(Clone, Debug)]
#[must_use = "a check decides nothing until a store or a limiter gets it"]
pub struct Check {
    first: Charge,
    rest: Vec<Charge>,
    mark: Mark,
}

/// The mark that distinguishes a check from equal checks.
#[derive(Clone, Copy, Debug)]
enum Mark {
    None,
    /// The caller waits in an `acquire` line. Its last try may still be in flight, so the check
    /// does not count as waiting behind equal checks.
    InLine,
    /// The id that the caller has chosen.
    Id(AdmissionId),
}

impl Check {
    /// A check with one charge. [`and`](Self::and) adds others.
    pub fn new(charge: Charge) -> Self {
        Self {
            first: charge,
            rest: Vec::new(),
            mark: Mark::None,
        }
    }

    /// Adds a charge.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] if the check already charges the same key under a limit with the same name,
    /// window and algorithm: add up the costs instead. If the keys, the windows or the algorithms
    /// differ, two charges may have limits with one name.
    pub fn and(mut self, charge: Charge) -> Result<Self, ConfigError> {
        if self.charges().any(|other| other.is_one_with(&charge)) {
            return Err(charged_twice(charge.limit()));
        }
        self.rest.push(charge);
        Ok(self)
    }

    /// Adds a charge to the check, or makes a check from it if there is none yet. The calling code
    /// must make sure that no other charge has the same limit and key.
    #[inline]
    pub(crate) fn push(check: &mut Option<Self>, charge: Charge) {
        match check {
            Some(check) => check.rest.push(charge),
            none => *none = Some(Self::new(charge)),
        }
    }

    /// Makes a check from `charges`; `None` if there are no charges. The calling code must make
    /// sure that no two charges have the same limit and key.
    pub(crate) fn of_distinct(mut charges: impl Iterator<Item = Charge>) -> Option<Self> {
        Some(Self {
            first: charges.next()?,
            rest: charges.collect(),
            mark: Mark::None,
        })
    }

    /// Gives the check an id that the caller has chosen. If the caller repeats the check with the
    /// same id, it counts once.
    pub fn with_id(mut self, id: AdmissionId) -> Self {
        self.mark = Mark::Id(id);
        self
    }

    /// Marks the caller as waiting in an `acquire` line. A check with an id keeps it, since the id
    /// already distinguishes the check.
    pub(crate) fn wait_in_line(&mut self) {
        if self.id().is_none() {
            self.mark = Mark::InLine;
        }
    }

    /// True if the check may count as waiting behind equal checks.
    #[cfg(feature = "redis")]
    pub(crate) fn is_unmarked(&self) -> bool {
        matches!(self.mark, Mark::None)
    }

    /// Distinguishes the check in the same way as `other`, such as by its caller's id.
    #[cfg(feature = "redis")]
    pub(crate) fn marked_as(self, other: &Self) -> Self {
        Self {
            mark: other.mark,
            ..self
        }
    }

    /// The charges, in the order in which they were added. There is at least one.
    pub fn charges(&self) -> impl Iterator<Item = &Charge> {
        iter::once(&self.first).chain(&self.rest)
    }

    /// Replaces the charge at this index.
    pub(crate) fn replace(&mut self, index: usize, charge: Charge) {
        *index
            .checked_sub(1)
            .and_then(|index| self.rest.get_mut(index))
            .unwrap_or(&mut self.first) = charge;
    }

    /// True if all charges may be spent from prefetches.
    pub(crate) fn is_prefetched(&self) -> bool {
        self.id().is_none() && self.charges().all(Charge::is_prefetched)
    }

    /// True if any limit has prefetch.
    pub(crate) fn has_prefetch(&self) -> bool {
        let mut lives = self.charges().map(|charge| charge.limit().prefetch_life());
        lives.any(|life| life.is_some())
    }

    pub(crate) fn can_be_refused(&self) -> bool {
        self.charges().any(Charge::can_refuse)
    }

    /// True if an admission takes a place under a concurrent limit.
    #[inline]
    pub(crate) fn takes_place(&self) -> bool {
        // Most checks have one charge.
        self.first.takes_place()
            || !self.rest.is_empty() && self.rest.iter().any(Charge::takes_place)
    }

    /// Returns the same check under one of `processes` equal shares of each limit. `None` if a
    /// charge does not fit into its share.
    pub(crate) fn shared_by(&self, processes: NonZeroU32) -> Option<Self> {
        let (first, rest) = self.map_charges(|charge| charge.shared_by(processes));
        Some(Self {
            first: first?,
            rest: rest.into_iter().collect::<Option<_>>()?,
            mark: self.mark,
        })
    }

    /// Returns a check with the same limits and keys at no cost.
    pub(crate) fn without_costs(&self) -> Self {
        self.map(Charge::without_cost)
    }

    /// Returns the same check with `change` applied to each charge.
    pub(crate) fn map(&self, change: impl FnMut(&Charge) -> Charge) -> Self {
        let (first, rest) = self.map_charges(change);
        Self {
            first,
            rest,
            mark: self.mark,
        }
    }

    /// The charge that was added first.
    #[cfg(feature = "redis")]
    pub(crate) fn first(&self) -> &Charge {
        &self.first
    }

    /// A digest that is the same for checks with the same charges at the same costs.
    pub(crate) fn digest(&self, digester: &Digester) -> u64 {
        let mut digest = 0_u64;
        for charge in self.charges() {
            let cost = 2 * charge.cost() + 1;
            let charge = charge.digest(digester).wrapping_mul(cost);
            digest = digest.rotate_left(1).wrapping_add(charge);
        }
        digest
    }

    /// The only charge; `None` if there are several.
    pub(crate) fn only_charge(&self) -> Option<&Charge> {
        self.rest.is_empty().then_some(&self.first)
    }

    /// Returns one value per charge, in order. The first charge's value is returned separately,
    /// since every check has at least one charge.
    #[inline]
    pub(crate) fn map_charges<'a, T>(
        &'a self,
        mut value: impl FnMut(&'a Charge) -> T,
    ) -> (T, Vec<T>) {
        let first = value(&self.first);
        // Most checks have one charge.
        let rest = if self.rest.is_empty() {
            Vec::new()
        } else {
            self.rest.iter().map(value).collect()
        };
        (first, rest)
    }

    /// True if the store may give either check's admission to the other check's caller, provided
    /// that neither caller has given an id. The checks then have equal charges, and all of these
    /// are [interchangeable](Charge::is_interchangeable).
    #[cfg(feature = "redis")]
    pub(crate) fn is_interchangeable_with(&self, other: &Self) -> bool {
        self.first == other.first
            && self.rest == other.rest
            && self.charges().all(Charge::is_interchangeable)
    }

    /// The id that the caller has given the check.
    pub fn id(&self) -> Option<AdmissionId> {
        match self.mark {
            Mark::Id(id) => Some(id),
            Mark::None | Mark::InLine => None,
        }
    }
}

/// The error for a check that charges a limit twice.
pub(crate) fn charged_twice(limit: &Limit) -> ConfigError {
    let name = limit.name();
    ConfigError::new(format!(
        "one check charges the limit {name:?} twice for the same key: add up the costs, or give one limit another name"
    ))
}

/// An admission's id: 64 bits, as a number that the caller can store. See the [module
/// docs](self#ids).
///
/// Never take an id from a client: a client that repeats an id is admitted for free.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[must_use]
pub struct AdmissionId(pub u64);

impl AdmissionId {
    /// Returns an id that no other admission has.
    pub fn fresh() -> Self {
        Self::fresh_run(1)
    }

    /// Returns the first of `length` <= 256 consecutive ids that no other admission has. The ids
    /// differ only in the last byte. If there are several ids, the first one's last byte is 0, so
    /// each id's last byte is its position.
    pub(crate) fn fresh_run(length: u64) -> Self {
        thread_local! {
            static NEXT: Cell<u64> = Cell::new(random());
        }
        let next = NEXT.get();
        let first = if length > 1 {
            next.wrapping_add(255) & !255
        } else {
            next
        };
        NEXT.set(first.wrapping_add(length));
        Self(first)
    }
}

/// Returns 64 random bits. In the standard library, only [`RandomState`] gives access to the
/// operating system's randomness.
pub(crate) fn random() -> u64 {
    RandomState::new().hash_one(0)
}
