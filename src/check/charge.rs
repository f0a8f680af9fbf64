//! A charge, one part of a [`check`](crate::check).

use std::{num::NonZeroU32, time::Duration};

use crate::{
    algorithm::Kind,
    clock::micros,
    error::NeverFits,
    key::{Digester, Key},
    limit::Limit,
};

/// One limit, one key, one cost. See [`check`](crate::check).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[must_use]
pub struct Charge {
    limit: Limit,
    key: Key,
    cost: u64,
    /// The lease in microseconds; 0 without a lease. Only a prefetch's lease is longer than the
    /// window.
    lease: u64,
    takes: Takes,
    is_shadow: bool,
    /// True if the limit is [hidden](Self::hidden) from clients.
    pub(crate) is_hidden: bool,
    /// True if the charge is a [ban](Self::ban), or asks for one.
    pub(crate) is_ban: bool,
}

/// When a charge takes its [cost](Charge::cost).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Takes {
    /// The charge takes its cost if all charges in the check fit.
    IfAdmitted,
    /// The charge takes nothing. It only asks whether [any units are left](Charge::any_left).
    Nothing,
    /// The charge always takes its cost, and never refuses the check. It counts units that have
    /// been [spent](Charge::spent).
    Always,
}

impl Charge {
    /// A charge of `cost` units under `limit` for `key`. In an axum handler that returns a
    /// [`Rejection`](crate::Rejection), `?` turns an error from a charge or a check into a
    /// rejection:
    ///
    /// ```
    /// use axum::extract::State;
    /// use tower_sliding_window::{Charge, Check, Limit, Limiter, MemoryStore, Rejection};
    ///
    /// const USERS: Limit = Limit::per_hour("user", 100);
    /// const TEAMS: Limit = Limit::per_hour("team", 1_000);
    ///
    /// async fn import(State(limiter): State<Limiter>, rows: String) -> Result<&'static str, Rejection> {
    ///     let cost = rows.lines().count() as u64;
    ///     // The user and the team are charged together, or neither is.
    ///     let (user, team) = (Charge::new(USERS, "ada", cost)?, Charge::new(TEAMS, "acme", cost)?);
    ///     // An error only if both charge one limit for one key.
    ///     let check = Check::new(user).and(team).expect("two limits");
    ///     let decision = limiter.check_all(check).await?;
    ///     if decision.is_allowed() { Ok("imported") } else { Err(Rejection::Limited(decision)) }
    /// }
    /// # #[tokio::main(flavor = "current_thread")] async fn main() {
    /// # let limiter = Limiter::new(MemoryStore::new());
    /// # let import = async |rows: usize| import(State(limiter.clone()), "row\n".repeat(rows)).await;
    /// # assert!(import(60).await.is_ok());
    /// # assert!(matches!(import(60).await, Err(Rejection::Limited(_))));
    /// # assert!(matches!(import(101).await, Err(Rejection::NeverFits(_))));
    /// # assert_eq!(limiter.peek(&TEAMS, "acme").await.unwrap().binding().used, 60);
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// [`NeverFits`] if the cost is above the limit.
    pub fn new(limit: Limit, key: impl Into<Key>, cost: u64) -> Result<Self, NeverFits> {
        let charge = Self::fitting(limit, key.into(), cost);
        if charge.cost > charge.limit.units() {
            return Err(NeverFits {
                limit: charge.limit,
                cost,
                is_hidden: false,
            });
        }
        Ok(charge)
    }

    /// Makes a charge without comparing its cost with the limit. Under a concurrent limit, a cost
    /// above 1 becomes 1.
    pub(crate) fn fitting(limit: Limit, key: Key, cost: u64) -> Self {
        let mut charge = Self {
            limit,
            key,
            cost,
            lease: 0,
            takes: Takes::IfAdmitted,
            is_shadow: false,
            is_hidden: false,
            is_ban: false,
        };
        // The cost is lowered after the charge is built. If it were computed before, the compiler
        // would copy the whole check once more.
        if cost > 1 && charge.limit.is_concurrent() {
            charge.cost = 1;
        }
        charge
    }

    /// A charge that takes nothing, and refuses the check if no unit is left. It is for work whose
    /// cost is counted [afterwards](Self::spent).
    ///
    /// # Errors
    ///
    /// [`NeverFits`] if the limit has no units at all.
    pub fn any_left(limit: Limit, key: impl Into<Key>) -> Result<Self, NeverFits> {
        Ok(Self {
            takes: Takes::Nothing,
            ..Self::new(limit, key, 1)?
        })
    }

    /// Makes the charge that begins a ban for `time`. A ban's limit is never divided into shares.
    /// Clients see this limit only after the ban has begun.
    pub(crate) fn ban(limit: Limit, key: Key, time: Duration) -> Self {
        Self {
            is_ban: true,
            ..Self::spent(limit, key, 1).reserve(time)
        }
    }

    /// Returns the charge that asks whether this ban has begun, and takes nothing.
    pub(crate) fn asks(&self) -> Self {
        Self {
            takes: Takes::Nothing,
            lease: 0,
            ..self.clone()
        }
    }

    /// Merges two charges that ask whether the same ban has begun, for two limits. The result is
    /// hidden if either charge is hidden, and in the shadow only if both are in the shadow. Any
    /// other charge stays as it is.
    pub(crate) fn asked_with(mut self, other: &Self) -> Self {
        if self.is_ban {
            self.is_shadow &= other.is_shadow;
            self.is_hidden |= other.is_hidden;
        }
        self
    }

    /// A charge for units that have been spent already. It counts in full, even above the limit,
    /// and never refuses the check. Later checks are refused until enough units have left the
    /// window.
    ///
    /// Costs are capped at 2^32 units or at the limit's units, whichever is more. Places under a
    /// [concurrent](Limit::concurrent) limit cannot be spent. Under such a limit, the charge takes
    /// a place like any other charge, if a place is free.
    pub fn spent(limit: Limit, key: impl Into<Key>, cost: u64) -> Self {
        let cost = cost.min(limit.most_spent());
        let mut charge = Self::fitting(limit, key.into(), cost);
        if !charge.limit.is_concurrent() {
            charge.takes = Takes::Always;
        }
        charge
    }

    /// Returns a charge of `cost` [spent](Self::spent) units for the same key, under another
    /// `limit`.
    pub(crate) fn as_spent(&self, limit: Limit, cost: u64) -> Self {
        Self {
            cost: cost.min(limit.most_spent()),
            takes: Takes::Always,
            ..self.on(limit)
        }
    }

    /// The same charge under another limit.
    pub(crate) fn on(&self, limit: Limit) -> Self {
        Self {
            limit,
            ..self.clone()
        }
    }

    /// Returns a charge with the same limit and key at no cost.
    pub(crate) fn without_cost(&self) -> Self {
        Self {
            cost: 0,
            lease: 0,
            takes: Takes::IfAdmitted,
            ..self.clone()
        }
    }

    /// Makes a prefetch's charge. The process may spend the last unit just before the prefetch life
    /// ends, and a spent unit counts for one window. So all units count until one window after the
    /// life has ended.
    pub(crate) fn prefetch(limit: Limit, key: Key, units: u64, life: u64) -> Self {
        let lease = limit.window_micros().saturating_add(life);
        Self {
            lease,
            ..Self::fitting(limit, key, units)
        }
    }

    /// A prefetch's life; `None` for other charges.
    #[cfg(feature = "redis")]
    pub(crate) fn life(&self) -> Option<Duration> {
        let life = self.lease.saturating_sub(self.limit.window_micros());
        (life > 0).then(|| Duration::from_micros(life))
    }

    /// True if the charge may be spent from prefetches.
    pub(crate) fn is_prefetched(&self) -> bool {
        let is_plain = self.cost > 0 && self.lease == 0 && self.takes == Takes::IfAdmitted;
        is_plain && self.limit.prefetch_life().is_some()
    }

    /// Reserves the units until they are [settled](crate::settlement). If the lease ends first,
    /// they are given back. A lease is at least a microsecond, and at most the window. A place
    /// under a [concurrent](Limit::concurrent) limit has no lease, since the decision holds it.
    pub fn reserve(mut self, lease: Duration) -> Self {
        if !self.limit.is_concurrent() {
            self.lease = micros(lease).clamp(1, self.limit.window_micros());
        }
        self
    }

    /// Puts the charge into the shadow, where it never refuses the check. The charge is counted if
    /// it fits and no other charge refuses the check. If it does not fit, its
    /// [`LimitStatus`](crate::decision::LimitStatus) says so.
    pub fn in_shadow(mut self) -> Self {
        self.is_shadow = true;
        self
    }

    /// Hides the limit from clients. The limit counts units and refuses checks, but does not appear
    /// in headers or in the default rejection body. See
    /// [`Decision::visible`](crate::Decision::visible).
    pub fn hidden(mut self) -> Self {
        self.is_hidden = true;
        self
    }

    /// The limit.
    pub fn limit(&self) -> &Limit {
        &self.limit
    }

    /// The key.
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// True if both charges have the same limit identity and the same key, and so share their
    /// units.
    pub(crate) fn is_one_with(&self, other: &Self) -> bool {
        self.limit.is_one_with(&other.limit) && self.key == other.key
    }

    /// True for the most frequent kind of charge, which is counted exactly, and is either counted
    /// or refused.
    #[cfg(feature = "redis")]
    pub(crate) fn is_plain(&self) -> bool {
        self.is_exact() && self.is_counted_or_refused()
    }

    /// True for a charge that has a cost, reserves nothing, and is either counted or refused.
    #[cfg(feature = "redis")]
    pub(crate) fn is_counted_or_refused(&self) -> bool {
        let has_mode = self.is_shadow || self.is_spent() || self.takes_nothing();
        self.cost > 0 && self.lease == 0 && !has_mode
    }

    /// The digest of the charge's limit and key.
    #[inline]
    pub(crate) fn digest(&self, digester: &Digester) -> u64 {
        self.limit.digest(digester, &self.key)
    }

    /// The 128-bit digest that stands for the charge's limit and key.
    #[inline]
    pub(crate) fn long_digest(&self, digester: &Digester) -> u128 {
        self.limit.long_digest(digester, &self.key)
    }

    /// Returns the same charge under one of `processes` equal shares of its limit. `None` if it
    /// does not fit into the share. A ban keeps its whole limit, and so does a charge in the
    /// shadow.
    pub(crate) fn shared_by(&self, processes: NonZeroU32) -> Option<Self> {
        if self.is_shadow || self.is_ban {
            return Some(self.clone());
        }
        let limit = self
            .limit
            .shared_by(processes)
            .filter(|limit| self.is_spent() || self.cost <= limit.units())?;
        Some(self.on(limit))
    }

    /// The units that the charge needs or has spent. [`takes`](Self::takes) says when it takes
    /// them.
    pub fn cost(&self) -> u64 {
        self.cost
    }

    /// When the charge takes its cost.
    pub fn takes(&self) -> Takes {
        self.takes
    }

    pub(crate) fn takes_nothing(&self) -> bool {
        self.takes == Takes::Nothing
    }

    pub(crate) fn is_spent(&self) -> bool {
        self.takes == Takes::Always
    }

    /// True if every admission under the limit has its own entry.
    pub(crate) fn is_exact(&self) -> bool {
        matches!(self.limit.algorithm().kind, Kind::Log | Kind::Concurrent)
    }

    /// True if an admission has its own entry, recorded under its id. All other units are added to
    /// a sum.
    #[cfg(feature = "redis")]
    pub(crate) fn is_found_by_id(&self) -> bool {
        self.is_exact() || self.lease > 0
    }

    /// True if an admission's entry shows its time to the microsecond.
    pub(crate) fn keeps_time(&self) -> bool {
        matches!(self.limit.algorithm().kind, Kind::Log)
    }

    /// True if an admission takes a place under a concurrent limit.
    #[inline]
    pub(crate) fn takes_place(&self) -> bool {
        self.limit.is_concurrent() && self.units() > 0
    }

    /// The units that the charge takes if the check is admitted.
    pub(crate) fn units(&self) -> u64 {
        if self.takes_nothing() { 0 } else { self.cost }
    }

    /// The lease: how long the units count without a settlement. `None` if they count for the whole
    /// window.
    pub fn lease(&self) -> Option<Duration> {
        self.lease_micros().map(Duration::from_micros)
    }

    /// True if the charge is in the [shadow](Self::in_shadow).
    pub fn is_shadow(&self) -> bool {
        self.is_shadow
    }

    /// True if it does not matter which caller gets which admission when several callers have
    /// charges equal to this one.
    #[cfg(feature = "redis")]
    pub(crate) fn is_interchangeable(&self) -> bool {
        // With a counter, two equal checks get different figures in their decisions. With a
        // concurrent limit, each caller has to free exactly the place that its admission has taken.
        let is_told_apart = matches!(
            self.limit.algorithm().kind,
            Kind::Counter | Kind::Concurrent
        );
        self.lease == 0 && self.takes == Takes::IfAdmitted && !self.is_shadow && !is_told_apart
    }

    /// True if the charge can refuse the check at all.
    pub(crate) fn can_refuse(&self) -> bool {
        self.cost > 0 && !self.is_shadow && !self.is_spent()
    }

    pub(crate) fn lease_micros(&self) -> Option<u64> {
        (self.lease > 0).then_some(self.lease)
    }

    /// Returns the time of the entry that records, under its id, an admission at the time `now`. A
    /// reservation counts only until its lease ends. So its entry is backdated, so that it leaves
    /// the window when the lease ends.
    pub(crate) fn named_at(&self, now: u64) -> u64 {
        let recorded = self.limit.recorded_at(now);
        match self.lease {
            0 if self.limit.is_counter() => now,
            0 => recorded,
            lease => now
                .saturating_add(lease)
                .saturating_sub(self.limit.window_micros())
                .min(recorded),
        }
    }

    /// Returns an admission's time, computed from its entry's time `named_at`. The result is as
    /// exact as the entry's time.
    pub(crate) fn admitted_at(&self, named_at: u64) -> u64 {
        match self.lease {
            0 => named_at,
            lease => named_at
                .saturating_add(self.limit.window_micros())
                .saturating_sub(lease),
        }
    }
}
