//! Checks and their charges.
//!
//! 1. A [`Charge`] is one limit, one key, one cost. A cost of 0 spends nothing.
//! 2. A [`Check`] is a list of charges, which are admitted or refused together in one atomic step. A refusal costs nothing.
//! 3. A cost above the limit can never be admitted: [`Charge::new`] returns [`NeverFits`].
//! 4. A charge may [reserve](Charge::reserve) units until it is settled. In the [shadow](Charge::in_shadow) it counts, but
//!    never refuses.
//! 5. If the cost is known only afterwards, one charge can check whether [any units are left](Charge::any_left), and a second
//!    one can count the [spent](Charge::spent) units later.
//! 6. A check that is sent again with the same [id](Check::with_id) counts once. As long as any of its limits knows the id, it
//!    is admitted, and no limit is charged again. Without an id, every check is a new admission.
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

use std::{iter, mem, time::Duration};

use crate::{
    admission::AdmissionId,
    algorithm::Algorithm,
    error::{ConfigError, ConfigErrorKind, NeverFits},
    key::Key,
    limit::{Limit, prefetch::Prefetch},
};

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

/// When a charge takes its cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Takes {
    /// If all charges of the check fit.
    IfAdmitted,
    /// Never: it only refuses.
    Nothing,
    /// Always: it never refuses.
    Always,
}

impl Charge {
    /// A charge of `cost` units of `limit` for `key`.
    ///
    /// # Errors
    ///
    /// [`NeverFits`] if the cost is above the limit.
    pub fn new(limit: Limit, key: impl Into<Key>, cost: u64) -> Result<Self, NeverFits> {
        if cost > limit.units() {
            return Err(NeverFits { limit, cost, is_hidden: false });
        }
        Ok(Self::fitting(limit, key.into(), cost))
    }

    /// A charge whose cost is known to fit.
    pub(crate) fn fitting(limit: Limit, key: Key, cost: u64) -> Self {
        Self { limit, key, cost, lease: 0, takes: Takes::IfAdmitted, is_shadow: false, is_hidden: false }
    }

    /// A charge that takes nothing, and refuses the check if no unit is left: for work whose cost is counted
    /// [afterwards](Self::spent).
    #[must_use]
    pub fn any_left(limit: Limit, key: impl Into<Key>) -> Self {
        Self { takes: Takes::Nothing, ..Self::fitting(limit, key.into(), 1) }
    }

    /// A charge of units that have been spent already: it counts in full, even above the limit, and never refuses. Later
    /// checks are refused until enough units have left the window.
    ///
    /// A cost above both the limit and 2^32 counts as the larger of them.
    #[must_use]
    pub fn spent(limit: Limit, key: impl Into<Key>, cost: u64) -> Self {
        let cost = cost.min(limit.most_spent());
        Self { takes: Takes::Always, ..Self::fitting(limit, key.into(), cost) }
    }

    /// The same charge for units that have been [spent](Self::spent).
    pub(crate) fn as_spent(&self, limit: Limit, cost: u64) -> Self {
        Self { cost: cost.min(limit.most_spent()), limit, takes: Takes::Always, ..self.clone() }
    }

    /// Lets [spent](Self::spent) units count for this time only, at most for the window.
    pub(crate) fn counting_for(self, time: Duration) -> Self {
        self.reserve(time)
    }

    /// A prefetch: units that the process spends until the end of the prefetch's life, so they count until a window after that.
    pub(crate) fn prefetch(limit: Limit, key: Key, units: u64, life: u64) -> Self {
        let lease = limit.window_micros().saturating_add(life);
        Self { lease, ..Self::fitting(limit, key, units) }
    }

    #[cfg(feature = "redis")]
    pub(crate) fn is_prefetch(&self) -> bool {
        self.life().is_some()
    }

    /// The life of a prefetch.
    #[cfg(feature = "redis")]
    pub(crate) fn life(&self) -> Option<Duration> {
        let life = self.lease.saturating_sub(self.limit.window_micros());
        (life > 0).then(|| Duration::from_micros(life))
    }

    /// The limit's prefetches, if they can pay for the charge.
    pub(crate) fn prefetched(&self) -> Option<Prefetch> {
        let is_plain = self.cost > 0 && self.lease == 0 && self.takes == Takes::IfAdmitted;
        self.limit.prefetched().filter(|_| is_plain)
    }

    pub(crate) fn of_nothing(limit: Limit, key: Key) -> Self {
        Self::fitting(limit, key, 0)
    }

    /// Reserves the units: they count until they are [settled](crate::settlement), or until the lease ends, when they are
    /// given back. A lease is at least a microsecond, and at most the window.
    #[must_use]
    pub fn reserve(mut self, lease: Duration) -> Self {
        let lease = u64::try_from(lease.as_micros()).unwrap_or(u64::MAX);
        self.lease = lease.clamp(1, self.limit.window_micros());
        self
    }

    /// Puts the charge into the shadow: it never refuses the check. It is counted if it fits and the other charges are
    /// admitted. If it does not fit, its [`LimitStatus`](crate::LimitStatus) says so.
    #[must_use]
    pub fn in_shadow(mut self) -> Self {
        self.is_shadow = true;
        self
    }

    /// Hides the limit from clients: it counts and refuses, but appears neither in headers nor in the default body of a
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

    /// The same charge under a smaller limit, if it fits. A charge in the shadow keeps its limit.
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

    /// The units that have to be left. The charge takes them, unless it [takes nothing](Self::takes_nothing).
    #[must_use]
    pub fn cost(&self) -> u64 {
        self.cost
    }

    /// Whether it only checks that [any units are left](Self::any_left).
    #[must_use]
    pub fn takes_nothing(&self) -> bool {
        self.takes == Takes::Nothing
    }

    /// Whether it counts units that have been [spent](Self::spent).
    #[must_use]
    pub fn is_spent(&self) -> bool {
        self.takes == Takes::Always
    }

    pub(crate) fn is_reserved(&self) -> bool {
        self.lease > 0 && !self.is_spent()
    }

    /// Whether every admission is an entry of its own.
    pub(crate) fn is_exact(&self) -> bool {
        self.limit.algorithm() == Algorithm::sliding_log()
    }

    /// The units that it takes if it is admitted.
    pub(crate) fn units(&self) -> u64 {
        if self.takes_nothing() { 0 } else { self.cost }
    }

    /// The lease: how long its units count without a settlement. `None` for the whole window.
    #[must_use]
    pub fn lease(&self) -> Option<Duration> {
        self.lease_micros().map(Duration::from_micros)
    }

    /// Whether it is in the [shadow](Self::in_shadow).
    #[must_use]
    pub fn is_shadow(&self) -> bool {
        self.is_shadow
    }

    /// Whether it is [hidden](Self::hidden) from clients.
    #[must_use]
    pub fn is_hidden(&self) -> bool {
        self.is_hidden
    }

    /// Whether it can refuse the check at all.
    pub(crate) fn can_refuse(&self) -> bool {
        self.cost > 0 && !self.is_shadow && !self.is_spent()
    }

    pub(crate) fn lease_micros(&self) -> Option<u64> {
        (self.lease > 0).then_some(self.lease)
    }

    /// The time of an entry with an id for an admission of `now`. A reservation leaves the window when its lease ends.
    pub(crate) fn named_at(&self, now: u64) -> u64 {
        let reserved = now.saturating_add(self.lease).saturating_sub(self.limit.window_micros());
        match (self.lease, self.limit.algorithm() == Algorithm::sliding_window_counter()) {
            (0, true) => now,
            (0, false) => self.limit.recorded_at(now),
            (_, true) => reserved,
            (_, false) => reserved.min(self.limit.recorded_at(now)),
        }
    }

    /// The time of the admission that has an entry of this time, as exactly as the entry shows it.
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
    /// A check of one charge. [`and`](Self::and) adds others.
    pub fn new(charge: Charge) -> Self {
        Self { first: charge, rest: Vec::new(), id: None }
    }

    /// Adds a charge.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] if the check already charges a limit of this name for this key: add up the costs instead.
    pub fn and(mut self, charge: Charge) -> Result<Self, ConfigError> {
        if self.charges().any(|other| other.limit.name() == charge.limit.name() && other.key == charge.key) {
            return Err(charged_twice(&charge.limit));
        }
        self.add_distinct(charge);
        Ok(self)
    }

    /// Adds a charge whose limit is known to be another than those of the others.
    pub(crate) fn add_distinct(&mut self, charge: Charge) {
        self.rest.push(charge);
    }

    /// Gives the check an id of the caller's: repeated with the same id, it counts once.
    pub fn with_id(mut self, id: AdmissionId) -> Self {
        self.id = Some(id);
        self
    }

    /// The same check with leases that begin later by `delay`, and end at the same time.
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

    /// Replaces a charge, and returns it.
    pub(crate) fn replace(&mut self, place: usize, charge: Charge) -> Charge {
        let old = place.checked_sub(1).and_then(|place| self.rest.get_mut(place)).unwrap_or(&mut self.first);
        mem::replace(old, charge)
    }

    /// Whether prefetches can pay for all of it.
    pub(crate) fn is_prefetched(&self) -> bool {
        self.id.is_none() && self.charges().all(|charge| charge.prefetched().is_some())
    }

    pub(crate) fn can_be_refused(&self) -> bool {
        self.charges().any(Charge::can_refuse)
    }

    /// The same limits and keys at no cost.
    pub(crate) fn without_costs(&self) -> Self {
        let (first, rest) =
            self.map_charges(|charge| Charge { cost: 0, lease: 0, takes: Takes::IfAdmitted, ..charge.clone() });
        Self { first, rest, id: self.id }
    }

    /// The same check under smaller limits, if all of its charges fit.
    pub(crate) fn under(&self, smaller: impl Fn(&Limit) -> Option<Limit>) -> Option<Self> {
        let first = self.first.under(&smaller)?;
        let rest = self.rest.iter().map(|charge| charge.under(&smaller)).collect::<Option<_>>()?;
        Some(Self { first, rest, id: self.id })
    }

    /// The same check under other limits, in order.
    pub(crate) fn on_limits<'a>(&'a self, mut limits: impl Iterator<Item = &'a Limit>) -> Self {
        let (first, rest) = self.map_charges(|charge| {
            let limit = limits.next().unwrap_or(&charge.limit).clone();
            Charge { limit, ..charge.clone() }
        });
        Self { first, rest, id: self.id }
    }

    /// The charge, if there is only one.
    pub(crate) fn only_charge(&self) -> Option<&Charge> {
        self.rest.is_empty().then_some(&self.first)
    }

    /// One value a charge, in order. The type guarantees that there is at least one.
    pub(crate) fn map_charges<'a, T>(&'a self, mut value: impl FnMut(&'a Charge) -> T) -> (T, Vec<T>) {
        (value(&self.first), self.rest.iter().map(value).collect())
    }

    /// Whether the order of the two makes no difference: they charge the same, and their admissions need not be told apart.
    #[cfg(feature = "redis")]
    pub(crate) fn is_interchangeable_with(&self, other: &Self) -> bool {
        self.id.or(other.id).is_none()
            && self.first == other.first
            && self.rest == other.rest
            && self.charges().all(|charge| {
                // A counter gives the first of two checks other figures than the second.
                charge.lease == 0
                    && charge.takes == Takes::IfAdmitted
                    && !charge.is_shadow
                    && charge.limit.algorithm() != Algorithm::sliding_window_counter()
            })
    }

    /// The id that the caller has given it.
    #[must_use]
    pub fn id(&self) -> Option<AdmissionId> {
        self.id
    }
}

/// The error of a check that charges a limit twice.
pub(crate) fn charged_twice(limit: &Limit) -> ConfigError {
    let text = format!("one check charges the limit {:?} twice for the same key", limit.name());
    ConfigError::new(ConfigErrorKind::SameLimit, text)
}
