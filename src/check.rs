//! A check: charges that are decided together, all or nothing.
//!
//! 1. A [`Charge`] is one limit, one key, one cost. A cost of 0 asks without spending.
//! 2. A cost above the limit can never be admitted: [`Charge::new`] refuses it with [`NeverFits`], which is not a
//!    refusal to wait out.
//! 3. A [`Check`] is admitted whole or refused whole, in one atomic step, and a refusal costs nothing.
//! 4. A charge may [reserve](Charge::reserve) its units until it is settled, and may be in the
//!    [shadow](Charge::in_shadow): then it counts, but never refuses.
//! 5. Where the cost is known only afterwards, a charge may ask whether [anything is left](Charge::any_left), and take
//!    nothing. Another then counts what was [spent](Charge::spent), and never refuses.
//! 6. A check sent again with the same id counts once. A check is one admission: as long as any of its limits knows the id,
//!    it is admitted whole, and none of them is charged again. Without an id, every time it is sent is a new admission.
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

use std::{error, fmt, iter, mem, time::Duration};

use crate::{admission::AdmissionId, algorithm::Algorithm, key::Key, limit::Limit};

/// One limit, one key, one cost. See the [module docs](self).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Charge {
    limit: Limit,
    key: Key,
    cost: u64,
    /// Microseconds, at most the window; 0 for none.
    lease: u64,
    takes: Takes,
    is_shadow: bool,
    is_hidden: bool,
}

/// Whether a charge takes its cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Takes {
    /// If all charges of the check fit.
    WhatFits,
    /// In no case: it only refuses.
    Nothing,
    /// In any case: it never refuses.
    WhatWasSpent,
}

impl Charge {
    /// A charge of `cost` units on `limit` in the name of `key`.
    ///
    /// # Errors
    ///
    /// [`NeverFits`] when the cost is above the limit.
    #[inline]
    pub fn new(limit: Limit, key: impl Into<Key>, cost: u64) -> Result<Self, NeverFits> {
        if cost > limit.units() {
            return Err(NeverFits { limit, cost, is_hidden: false });
        }
        Ok(Self::fitting(limit, key.into(), cost))
    }

    /// A charge whose cost is known to fit.
    #[inline]
    pub(crate) fn fitting(limit: Limit, key: Key, cost: u64) -> Self {
        Self { limit, key, cost, lease: 0, takes: Takes::WhatFits, is_shadow: false, is_hidden: false }
    }

    /// A charge that takes nothing, and refuses the check where nothing is left: for work whose cost is
    /// [counted](Self::spent) only afterwards.
    #[must_use]
    pub fn any_left(limit: Limit, key: impl Into<Key>) -> Self {
        Self { takes: Takes::Nothing, ..Self::fitting(limit, key.into(), 1) }
    }

    /// A charge of units that have been spent already: it counts in full, even above the limit, and never refuses. What
    /// comes next is refused until enough has left the window.
    ///
    /// A cost above both the limit and 2^32 counts as the larger of them, as that of a
    /// [`Settlement`](crate::Settlement) does.
    #[must_use]
    pub fn spent(limit: Limit, key: impl Into<Key>, cost: u64) -> Self {
        let cost = cost.min(limit.most_spent());
        Self { takes: Takes::WhatWasSpent, ..Self::fitting(limit, key.into(), cost) }
    }

    /// Units that have been [spent](Self::spent) in the name of the key of this charge.
    pub(crate) fn as_spent(&self, limit: Limit, cost: u64) -> Self {
        Self { cost: cost.min(limit.most_spent()), limit, takes: Takes::WhatWasSpent, ..self.clone() }
    }

    /// Lets units that were [spent](Self::spent) count for so long only, at most for the window.
    pub(crate) fn counting_for(self, time: Duration) -> Self {
        self.reserve(time)
    }

    /// A charge of nothing.
    pub(crate) fn of_nothing(limit: Limit, key: Key) -> Self {
        Self::fitting(limit, key, 0)
    }

    /// Reserves the units: they count as admitted, until they are [settled](crate::settlement) or the lease ends. Then
    /// they are given back. A lease is at least a microsecond, and ends with the window at the latest.
    #[must_use]
    pub fn reserve(mut self, lease: Duration) -> Self {
        let lease = u64::try_from(lease.as_micros()).unwrap_or(u64::MAX);
        self.lease = lease.clamp(1, self.limit.window_micros());
        self
    }

    /// Puts the charge into the shadow: it is counted where it fits and the others are admitted, and says in its
    /// [`LimitStatus`](crate::LimitStatus) where it does not, but never refuses the check.
    #[must_use]
    pub fn in_shadow(mut self) -> Self {
        self.is_shadow = true;
        self
    }

    /// Hides the limit from clients: it counts and refuses, but speaks neither in headers nor in the default body of a
    /// rejection. See [`Decision::visible`](crate::Decision::visible).
    #[must_use]
    pub fn hidden(mut self) -> Self {
        self.is_hidden = true;
        self
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

    /// The same charge on a smaller limit, if it fits; one in the shadow stays on its own, which refuses nothing.
    fn under(&self, smaller: impl Fn(&Limit) -> Option<Limit>) -> Option<Self> {
        if self.is_shadow {
            return Some(self.clone());
        }
        let limit = smaller(&self.limit).filter(|limit| self.is_spent() || self.cost <= limit.units())?;
        Some(Self { limit, ..self.clone() })
    }

    pub(crate) fn limit_and_key(&self) -> (&Limit, &Key) {
        (&self.limit, &self.key)
    }

    /// The units that have to be left for this charge. It takes them if the check is admitted, unless it
    /// [takes nothing](Self::takes_nothing).
    #[must_use]
    pub fn cost(&self) -> u64 {
        self.cost
    }

    /// Whether it only asks if [anything is left](Self::any_left).
    #[must_use]
    pub fn takes_nothing(&self) -> bool {
        self.takes == Takes::Nothing
    }

    /// Whether it counts units that have been [spent](Self::spent) already.
    #[must_use]
    pub fn is_spent(&self) -> bool {
        self.takes == Takes::WhatWasSpent
    }

    /// Whether its units are reserved: counted until they are settled, or the lease ends.
    pub(crate) fn is_reserved(&self) -> bool {
        self.lease > 0 && !self.is_spent()
    }

    /// Whether every admission is recorded by itself, under its time.
    pub(crate) fn is_exact(&self) -> bool {
        self.limit.algorithm() == Algorithm::log()
    }

    /// The units that it takes where it is admitted.
    pub(crate) fn units(&self) -> u64 {
        if self.takes_nothing() { 0 } else { self.cost }
    }

    /// How long its units count, if that is not for the window: those that are reserved.
    #[must_use]
    pub fn lease(&self) -> Option<Duration> {
        self.lease_micros().map(Duration::from_micros)
    }

    /// Whether it counts without refusing.
    #[must_use]
    pub fn is_shadow(&self) -> bool {
        self.is_shadow
    }

    /// Whether clients do not see the limit.
    #[must_use]
    pub fn is_hidden(&self) -> bool {
        self.is_hidden
    }

    /// Whether there are moments at which it refuses.
    pub(crate) fn can_refuse(&self) -> bool {
        self.cost > 0 && !self.is_shadow && !self.is_spent()
    }

    pub(crate) fn lease_micros(&self) -> Option<u64> {
        (self.lease > 0).then_some(self.lease)
    }

    /// The time to record an admission of `now` under that is found by its id; a reservation so that it leaves the window
    /// when its lease ends.
    pub(crate) fn named_at(&self, now: u64) -> u64 {
        let held = now.saturating_add(self.lease).saturating_sub(self.limit.window_micros());
        match (self.lease, self.limit.algorithm() == Algorithm::counter()) {
            (0, true) => now,
            (0, false) => self.limit.recorded_at(now),
            (_, true) => held,
            (_, false) => held.min(self.limit.recorded_at(now)),
        }
    }

    /// When an admission was that is recorded under this time, as exactly as that tells.
    pub(crate) fn admitted_at(&self, named_at: u64) -> u64 {
        match self.lease {
            0 => named_at,
            lease => named_at.saturating_add(self.limit.window_micros()).saturating_sub(lease),
        }
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
    #[inline]
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
            return Err(DuplicateCharge::new(charge.limit));
        }
        self.add_distinct(charge);
        Ok(self)
    }

    /// Adds a charge that is known to be on another limit than the others.
    pub(crate) fn add_distinct(&mut self, charge: Charge) {
        self.rest.push(charge);
    }

    /// Gives the check an identity of the caller's: repeated with it, the same check counts once.
    pub fn with_id(mut self, id: AdmissionId) -> Self {
        self.id = Some(id);
        self
    }

    /// The same check, whose leases begin so much later, and end when they did.
    pub(crate) fn with_leases_shorter_by(&self, delay: Duration) -> Self {
        let (first, rest) = self.map_charges(|charge| match charge.lease() {
            Some(lease) => charge.clone().reserve(lease.saturating_sub(delay)),
            None => charge.clone(),
        });
        Self { first, rest, id: self.id }
    }

    /// The charges, in the order in which they were added; there is always one.
    pub fn charges(&self) -> impl Iterator<Item = &Charge> {
        iter::once(&self.first).chain(&self.rest)
    }

    /// Puts a charge in the place of another, which it returns.
    pub(crate) fn replace(&mut self, place: usize, charge: Charge) -> Charge {
        let old = place.checked_sub(1).and_then(|place| self.rest.get_mut(place)).unwrap_or(&mut self.first);
        mem::replace(old, charge)
    }

    /// Whether any of its charges can refuse it.
    pub(crate) fn can_be_refused(&self) -> bool {
        self.charges().any(Charge::can_refuse)
    }

    /// The same limits and keys, to ask how they stand.
    pub(crate) fn without_costs(&self) -> Self {
        let (first, rest) =
            self.map_charges(|charge| Charge { cost: 0, lease: 0, takes: Takes::WhatFits, ..charge.clone() });
        Self { first, rest, id: self.id }
    }

    /// The same check on smaller limits, if all of its charges fit.
    pub(crate) fn under(&self, smaller: impl Fn(&Limit) -> Option<Limit>) -> Option<Self> {
        let first = self.first.under(&smaller)?;
        let rest = self.rest.iter().map(|charge| charge.under(&smaller)).collect::<Option<_>>()?;
        Some(Self { first, rest, id: self.id })
    }

    /// The same check on other limits, in order.
    pub(crate) fn on_limits<'a>(&'a self, mut limits: impl Iterator<Item = &'a Limit>) -> Self {
        let (first, rest) = self.map_charges(|charge| {
            let limit = limits.next().unwrap_or(&charge.limit).clone();
            Charge { limit, ..charge.clone() }
        });
        Self { first, rest, id: self.id }
    }

    /// The charge of a check that has no other.
    pub(crate) fn only_charge(&self) -> Option<&Charge> {
        self.rest.is_empty().then_some(&self.first)
    }

    /// One value a charge, in order: the shape that keeps "there is always one" in the type.
    pub(crate) fn map_charges<'a, T>(&'a self, mut value: impl FnMut(&'a Charge) -> T) -> (T, Vec<T>) {
        (value(&self.first), self.rest.iter().map(value).collect())
    }

    /// Whether it makes no difference which of the two is decided first: they charge the same, and nothing tells the one
    /// from the other afterwards.
    #[cfg(feature = "redis")]
    pub(crate) fn is_interchangeable_with(&self, other: &Self) -> bool {
        self.id.or(other.id).is_none()
            && self.first == other.first
            && self.rest == other.rest
            && self.charges().all(|charge| {
                // What a counter says depends on who was first.
                charge.lease == 0
                    && charge.takes == Takes::WhatFits
                    && !charge.is_shadow
                    && charge.limit.algorithm() != Algorithm::counter()
            })
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
    is_hidden: bool,
}

impl NeverFits {
    /// Says that the limit is [hidden](Charge::hidden) from clients.
    #[must_use]
    pub fn hidden(mut self) -> Self {
        self.is_hidden = true;
        self
    }

    /// Whether clients do not see the limit.
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
