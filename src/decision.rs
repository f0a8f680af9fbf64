//! A decision: the outcome of a check.
//!
//! 1. A decision has one [`LimitStatus`] a charge, in the order of the charges.
//! 2. [`retry_after`](Decision::retry_after) is true and tight: the smallest `d` such that the same check is admitted
//!    `d` later if nothing else arrives. At `d − 1 µs` it is still refused. A refusal that the process makes
//!    without asking the store may tell less, a true "not before": see [`DenyCache`](crate::DenyCache).
//! 3. [Reserved](Charge::reserve) units may be given back at any time. So a check that would be admitted without them is told
//!    to come back after a short while, [`retry_reserved_after`](crate::Limiter::retry_reserved_after), one second by
//!    default, or earlier if a lease ends before. [`is_refused_by_reservations`](Decision::is_refused_by_reservations) says
//!    so. A check that the other units alone refuse is sent away for as long as they do.
//! 4. [`reset_after`](LimitStatus::reset_after) is the time until the oldest counted unit leaves the window, that is,
//!    until there is more to spend than now. It is never early where a name has one window. `RedisStore` may tell it up to a millisecond late, and where the
//!    server's clock has stepped back, up to that step.
//! 5. The figures of a decision as a whole are those of its [`binding`](Decision::binding) limit: of an admitted check
//!    the one with the least left, of a refused one the one that takes longest to admit it. Limits in the
//!    [shadow](Charge::in_shadow) speak only where there is no other.
//! 6. What a client is told are the figures of the [`visible`](Decision::visible) limit: the binding one of those that are
//!    not [hidden](Charge::hidden). Of a refused check it is one that has refused, or there is none.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use tower_sliding_window::{Limit, Limiter, MemoryStore};
//!
//! let limiter = Limiter::new(MemoryStore::new());
//! let upload = Limit::per_minute("upload", 2);
//! let first = limiter.check(&upload, "ada", 2).await?;
//! assert!(first.is_allowed() && first.remaining() == 0);
//!
//! let second = limiter.check(&upload, "ada", 1).await?;
//! assert!(second.retry_after().is_some_and(|wait| wait <= upload.window()));
//! # Ok(()) }
//! ```

use std::{
    fmt, iter,
    sync::Arc,
    time::{Duration, SystemTime},
};

use crate::{
    admission::AdmissionId,
    check::{Charge, Check},
    error::Error,
    limit::Limit,
};

/// The outcome of a check. See the [module docs](self). Cheap to clone.
#[derive(Clone)]
#[must_use = "a refusal is a decision, too: see `is_allowed`"]
pub struct Decision(Arc<Inner>);

/// What a decision is made of: more than one would like to move from hand to hand.
#[derive(Clone, Debug)]
struct Inner {
    at: SystemTime,
    id: AdmissionId,
    first: LimitStatus,
    rest: Vec<LimitStatus>,
    /// Why the store has not decided it, if that is so.
    instead_of: Option<Arc<Error>>,
}

/// How one limit stands after a decision, for the key that was charged.
#[derive(Clone, Debug)]
pub struct LimitStatus {
    limit: Limit,
    used: u64,
    reserved: u64,
    reset_after: Duration,
    retry: Option<Retry>,
    is_shadow: bool,
    is_hidden: bool,
    is_spent: bool,
}

/// When to come back after a refusal.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Retry {
    /// If all that is reserved is given back now: zero if that would do. With nothing reserved it is the same as the other.
    pub(crate) least: Duration,
    /// If nothing is given back before its lease ends.
    pub(crate) most: Duration,
    /// How long it takes to find out.
    reserved_after: Duration,
}

/// How long it takes to find out whether reserved units are given back, unless the limiter says otherwise.
pub(crate) const RETRY_RESERVED_AFTER: Duration = Duration::from_secs(1);

impl Decision {
    /// A store's answer: when it decided, under which id, and how each charge came out.
    #[inline]
    pub fn new(check: &Check, at: SystemTime, id: AdmissionId, status: impl FnMut(&Charge) -> LimitStatus) -> Self {
        Self::of_statuses(at, id, check.map_charges(status))
    }

    /// Of one status a charge, in order.
    #[inline]
    pub(crate) fn of_statuses(at: SystemTime, id: AdmissionId, (first, rest): (LimitStatus, Vec<LimitStatus>)) -> Self {
        Self(Arc::new(Inner { at, id, first, rest, instead_of: None }))
    }

    /// A decision of this process, since the store has failed to decide.
    pub(crate) fn instead_of(mut self, error: Error) -> Self {
        Arc::make_mut(&mut self.0).instead_of = Some(Arc::new(error));
        self
    }

    /// The same figures as a refusal for so long, by every charge of the check that can refuse.
    pub(crate) fn refused_for(mut self, check: &Check, wait: Duration) -> Self {
        let Inner { first, rest, .. } = Arc::make_mut(&mut self.0);
        let statuses = iter::once(first).chain(rest);
        for (_, status) in check.charges().zip(statuses).filter(|(charge, _)| charge.can_refuse()) {
            status.retry = Some(Retry::new(wait, wait));
        }
        self
    }

    /// The same decision, with so short a retry time where only reservations refuse.
    pub(crate) fn with_retry_reserved_after(mut self, wait: Duration) -> Self {
        let is_other = |retry: &Retry| retry.least < retry.most && retry.reserved_after != wait;
        if self.statuses().any(|status| status.retry.as_ref().is_some_and(is_other)) {
            let Inner { first, rest, .. } = Arc::make_mut(&mut self.0);
            let retries = iter::once(first).chain(rest).filter_map(|status| status.retry.as_mut());
            retries.for_each(|retry| retry.reserved_after = wait);
        }
        self
    }

    /// The same decision, with the statuses of another in these places.
    pub(crate) fn with_statuses_of(mut self, other: &Self, places: &[usize]) -> Self {
        let Inner { first, rest, .. } = Arc::make_mut(&mut self.0);
        let mut statuses: Vec<_> = iter::once(first).chain(rest).collect();
        for (place, status) in iter::zip(places, other.statuses()) {
            if let Some(old) = statuses.get_mut(*place) {
                **old = status.clone();
            }
        }
        self
    }

    /// The refusal of a check, of whose limits these are the figures at no cost, if it is one: until something leaves.
    pub(crate) fn into_refusal(mut self, check: &Check) -> Option<Self> {
        let Inner { first, rest, .. } = Arc::make_mut(&mut self.0);
        for (charge, status) in check.charges().zip(iter::once(first).chain(rest)) {
            *status = status.clone().refused_until_reset(charge);
        }
        (!self.is_allowed()).then_some(self)
    }

    /// Whether the check was admitted, and its units counted.
    #[must_use]
    pub fn is_allowed(&self) -> bool {
        self.statuses().all(|status| status.refuses().is_none())
    }

    /// How long to wait until the same check is admitted, if nothing else arrives; `None` if it was admitted. Where only
    /// reservations are in the way, it is how long to wait until it may be: see rule 3 of the [module docs](self).
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        self.statuses().filter_map(LimitStatus::refuses).max()
    }

    /// Whether the check was refused, and would have been admitted if all units that are reserved were given back.
    #[must_use]
    pub fn is_refused_by_reservations(&self) -> bool {
        !self.is_allowed()
            && self.statuses().filter(|status| status.refuses().is_some()).all(LimitStatus::is_refused_by_reservations)
    }

    /// The limit whose figures speak for the whole decision. See rule 5 of the [module docs](self).
    #[must_use]
    pub fn binding(&self) -> &LimitStatus {
        self.0.rest.iter().fold(&self.0.first, LimitStatus::binding)
    }

    /// The limit whose figures clients see: the [`binding`](Self::binding) one of those that are not
    /// [hidden](Charge::hidden).
    ///
    /// `None` if all are hidden, and also if only hidden ones have refused the check: another one would say that there is
    /// something left.
    #[must_use]
    pub fn visible(&self) -> Option<&LimitStatus> {
        let visible = self.statuses().filter(|status| !status.is_hidden).reduce(LimitStatus::binding)?;
        (visible.refuses().is_some() || self.is_allowed()).then_some(visible)
    }

    /// The limits in the shadow that would have refused the check, and for how long.
    pub fn shadow_refusals(&self) -> impl Iterator<Item = &LimitStatus> {
        self.statuses().filter(|status| status.is_shadow && status.retry.is_some())
    }

    /// How each limit stands, in the order of the charges.
    pub fn statuses(&self) -> impl Iterator<Item = &LimitStatus> {
        iter::once(&self.0.first).chain(&self.0.rest)
    }

    /// The [`binding`](Self::binding) limit.
    #[must_use]
    pub fn limit(&self) -> &Limit {
        &self.binding().limit
    }

    /// The units in the window of the [`binding`](Self::binding) limit, those of this check included.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.binding().used
    }

    /// The units left under the [`binding`](Self::binding) limit.
    #[must_use]
    pub fn remaining(&self) -> u64 {
        self.binding().remaining()
    }

    /// The time until there is more left under the [`binding`](Self::binding) limit.
    #[must_use]
    pub fn reset_after(&self) -> Duration {
        self.binding().reset_after
    }

    /// Why the store has not decided, where this process has decided in its place: under a share of each limit, whose
    /// figures these then are. See [`Share`](crate::Share). `None` for a decision of the store.
    #[must_use]
    pub fn local_cause(&self) -> Option<&Error> {
        self.0.instead_of.as_deref()
    }

    /// When the store decided, by the store's clock. Of an admission that was repeated under its
    /// [id](crate::Check::with_id), when it was admitted first.
    #[must_use]
    pub fn at(&self) -> SystemTime {
        self.0.at
    }

    /// The identity of the admission.
    #[must_use]
    pub fn id(&self) -> AdmissionId {
        self.0.id
    }
}

impl fmt::Debug for Decision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { at, id, first: _, rest: _, instead_of } = &*self.0;
        f.debug_struct("Decision")
            .field("at", at)
            .field("id", id)
            .field("statuses", &self.statuses().collect::<Vec<_>>())
            .field("instead_of", instead_of)
            .finish()
    }
}

impl LimitStatus {
    /// How `charge` came out: the units `used` after the decision, the time until the oldest of them leaves (zero if
    /// there are none), and, if this charge refused the check, how long until it would not.
    #[must_use]
    #[inline]
    pub fn new(charge: &Charge, used: u64, reset_after: Duration, retry_after: Option<Duration>) -> Self {
        Self {
            limit: charge.limit().clone(),
            used,
            reserved: 0,
            reset_after,
            retry: retry_after.map(|wait| Retry::new(wait, wait)),
            is_shadow: charge.is_shadow(),
            is_hidden: charge.is_hidden(),
            is_spent: charge.is_spent(),
        }
    }

    /// Says how many of the used units are reserved, and if the charge refused the check, how long it would do so `at_least`:
    /// if all of them were given back now.
    #[must_use]
    pub fn with_reserved(mut self, units: u64, at_least: Duration) -> Self {
        self.reserved = units;
        self.retry = self.retry.map(|retry| Retry::new(at_least.min(retry.most), retry.most));
        self
    }

    /// The same figures, as a refusal until something leaves where the charge does not fit.
    pub(crate) fn refused_until_reset(mut self, charge: &Charge) -> Self {
        let most = self.reset_after;
        let settled = self.used.saturating_sub(self.reserved);
        let would_fit = self.reserved > 0 && settled.saturating_add(charge.cost()) <= self.limit.units();
        let least = if would_fit { Duration::ZERO } else { most };
        let refuses = !self.is_spent && charge.cost() > self.remaining();
        self.retry = refuses.then(|| Retry::new(least, most));
        self
    }

    /// The same figures, and if it refuses, for at least as long as this.
    pub(crate) fn not_before(mut self, known: &Retry) -> Self {
        self.retry = self.retry.map(|retry| Retry::new(retry.least.max(known.least), retry.most.max(known.most)));
        self
    }

    /// The limit.
    #[must_use]
    pub fn limit(&self) -> &Limit {
        &self.limit
    }

    /// The units in the window, those of this check included if it was admitted.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.used
    }

    /// Those of the used units that are [reserved](Charge::reserve), and may be given back.
    #[must_use]
    pub fn reserved(&self) -> u64 {
        self.reserved
    }

    /// The units left: 0 also where the limit was lowered below what is used.
    #[must_use]
    pub fn remaining(&self) -> u64 {
        self.limit.units().saturating_sub(self.used)
    }

    /// The time until fewer units are counted; zero if there are none. Under a [compact](crate::Algorithm::compact) log it
    /// may be a sub-window longer than the window.
    #[must_use]
    pub fn reset_after(&self) -> Duration {
        self.reset_after
    }

    /// How long this limit alone would refuse the check; `None` if it did not refuse it.
    ///
    /// A limit in the [shadow](Charge::in_shadow) says here for how long it would have refused.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        self.retry.map(Retry::wait)
    }

    /// Whether the limit refused the check, and would not have if all units that are reserved were given back.
    #[must_use]
    pub fn is_refused_by_reservations(&self) -> bool {
        self.reserved > 0 && self.retry.is_some_and(|retry| retry.least.is_zero())
    }

    /// Whether it has counted what was [spent](Charge::spent) already.
    #[cfg(feature = "metrics")]
    pub(crate) fn is_spent(&self) -> bool {
        self.is_spent
    }

    /// When to come back, if it refused the check.
    pub(crate) fn retry(&self) -> Option<Retry> {
        self.retry
    }

    /// Whether the limit only counts.
    #[must_use]
    pub fn is_shadow(&self) -> bool {
        self.is_shadow
    }

    /// Whether clients do not see the limit.
    #[must_use]
    pub fn is_hidden(&self) -> bool {
        self.is_hidden
    }

    /// Whichever of the two is binding.
    fn binding<'a>(&'a self, other: &'a Self) -> &'a Self {
        if other.is_shadow != self.is_shadow {
            return if self.is_shadow { other } else { self };
        }
        let longer = other.retry_after().cmp(&self.retry_after());
        let less_left = other.remaining().cmp(&self.remaining()).reverse();
        let later = other.reset_after.cmp(&self.reset_after);
        if longer.then(less_left).then(later).is_gt() { other } else { self }
    }

    /// For how long the limit refuses the check, if it does.
    fn refuses(&self) -> Option<Duration> {
        self.retry_after().filter(|_| !self.is_shadow)
    }
}

impl Retry {
    pub(crate) fn new(least: Duration, most: Duration) -> Self {
        Self { least, most, reserved_after: RETRY_RESERVED_AFTER }
    }

    /// As it is told: no longer than it takes to find out, but for as long as it is sure.
    fn wait(self) -> Duration {
        self.reserved_after.max(self.least).min(self.most)
    }
}
