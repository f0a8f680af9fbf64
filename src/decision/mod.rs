//! Decisions, the results of checks.
//!
//! 1. A decision has one [`LimitStatus`] for each charge, in the order of the charges.
//! 2. [`retry_after`](Decision::retry_after) is exact: the same check is admitted after this time
//!    if nothing else arrives, and refused a microsecond earlier. The retry time is a lower bound
//!    in two cases: if the process refuses without asking the store (see [refusal
//!    cache](crate::Limiter::refusal_cache)), and if more than 100 entries have to leave a log that
//!    also has costs above 1.
//! 3. [Reserved](Charge::reserve) units may be given back at any time. So if only reserved units
//!    are in the way, the retry time is short:
//!    [`retry_reserved_after`](crate::Limiter::retry_reserved_after), one second by default, or
//!    less if a lease ends before. See
//!    [`is_refused_by_reservations`](LimitStatus::is_refused_by_reservations).
//! 4. [`reset_after`](LimitStatus::reset_after) is the time until the oldest unit leaves the
//!    window. Then more units are left. The reset time is never too short. With `RedisStore` it may
//!    be too long: by up to a millisecond, under a limit with [prefetch](crate::limit::prefetch) by
//!    up to the life of a prefetch, and after the server's clock has stepped back by up to that
//!    step.
//! 5. The figures of a decision are those of its [`binding`](Decision::binding) limit. For an
//!    admission, that is the limit with the least left. For a refusal, it is the limit with the
//!    longest retry time. Limits in the [shadow](Charge::in_shadow) are binding only if all limits
//!    of the check are in the shadow.
//! 6. Clients see the figures of the [`visible`](Decision::visible) limit: the binding one among
//!    the limits that are not [hidden](Charge::hidden). For a refusal, only limits that refused can
//!    be visible. If all limits that refused are hidden, there is no visible limit.
//! 7. Behind several layers, one decision in the extensions of the request stands for all layers.
//!    It has the statuses of all layers, the innermost first, and holds the places of all. Its id
//!    and its time are those of the innermost layer.
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

#[doc(hidden)]
pub mod settlement;
mod status;

use std::{
    fmt, iter,
    sync::Arc,
    time::{Duration, SystemTime},
};

pub use self::status::LimitStatus;
pub(crate) use self::{
    settlement::{Settled, Settlement},
    status::RETRY_RESERVED_AFTER,
};
use crate::{
    check::{AdmissionId, Charge, Check},
    error::Error,
};

/// The result of a check. See the [module docs](self). Cheap to clone.
#[derive(Clone, Debug)]
#[must_use = "a refusal is a decision, too: see `is_allowed`"]
pub struct Decision {
    fields: Arc<Fields>,
    /// The address of the layer that has left this decision on a request; 0 if none has.
    layer: usize,
}

#[derive(Clone, Debug)]
struct Fields {
    at: SystemTime,
    id: AdmissionId,
    first: LimitStatus,
    rest: Vec<LimitStatus>,
    /// `None` for most decisions, which have no such parts.
    origin: Option<Box<Origin>>,
}

/// The parts that few decisions have.
#[derive(Clone, Debug, Default)]
struct Origin {
    /// The failure of the store, if this process has decided in its place.
    instead_of: Option<Arc<Error>>,
    /// Whether the decision is a remembered refusal, repeated because the store has failed.
    is_repeated: bool,
    places: Option<Arc<dyn Places>>,
    /// The decision of the layers further out.
    outer: Option<Decision>,
}

/// The places of an admission under [concurrent](crate::Limit::concurrent) limits. Dropping this
/// value frees them.
pub(crate) trait Places: fmt::Debug + Send + Sync {
    fn are_lost(&self) -> bool;
}

impl Decision {
    /// A store's decision: its time, the id of the admission, and the status of each charge.
    /// `status` is called once for each charge, in order.
    ///
    /// The check is [allowed](Self::is_allowed) if no status has a retry time, except those of
    /// charges in the [shadow](Charge::in_shadow).
    pub fn new(check: &Check, at: SystemTime, id: AdmissionId, status: impl FnMut(&Charge) -> LimitStatus) -> Self {
        Self::of_statuses(at, id, check.map_charges(status))
    }

    #[inline]
    pub(crate) fn of_statuses(at: SystemTime, id: AdmissionId, (first, rest): (LimitStatus, Vec<LimitStatus>)) -> Self {
        Self { fields: Arc::new(Fields { at, id, first, rest, origin: None }), layer: 0 }
    }

    /// Marks a decision of this process, made in the place of a store that has failed.
    pub(crate) fn instead_of(mut self, error: Error) -> Self {
        self.origin_mut().instead_of = Some(Arc::new(error));
        self
    }

    /// Marks a refusal that is remembered, and stands because the store has failed.
    pub(crate) fn repeated(mut self) -> Self {
        self.origin_mut().is_repeated = true;
        self
    }

    /// Whether the store has decided. Otherwise the store has failed, and the figures are not the
    /// store's.
    pub(crate) fn is_the_stores(&self) -> bool {
        self.fields.origin.as_ref().is_none_or(|origin| origin.instead_of.is_none() && !origin.is_repeated)
    }

    /// Lets the decision hold places.
    pub(crate) fn holding(mut self, places: Arc<dyn Places>) -> Self {
        self.origin_mut().places = Some(places);
        self
    }

    /// The same figures, refused for this time. The charges that do not fit refuse. If all charges
    /// fit, all that can refuse do so, except bans.
    pub(crate) fn refused_for(mut self, check: &Check, wait: Duration) -> Self {
        let fits = |charge: &Charge, status: &LimitStatus| charge.cost() <= status.remaining();
        let refusing = || check.charges().zip(self.statuses()).filter(|(charge, _)| charge.can_refuse());
        let all_fit = refusing().all(|(charge, status)| fits(charge, status));
        for (charge, status) in check.charges().zip(self.statuses_mut()) {
            if charge.can_refuse() && (all_fit && !charge.is_ban || !fits(charge, status)) {
                status.refused_for(wait);
            }
        }
        self
    }

    /// The same decision, with this retry time if only reservations refuse.
    #[inline]
    pub(crate) fn with_retry_reserved_after(mut self, wait: Duration) -> Self {
        // Most decisions need no change.
        if self.statuses().any(LimitStatus::waits_for_reserved) {
            self.statuses_mut().for_each(|status| status.set_retry_reserved_after(wait));
        }
        self
    }

    /// The same decision. The status in this place leaves out the units that this process holds
    /// unspent, and those that are reserved for this process.
    pub(crate) fn without_held(mut self, place: usize, held: u64, reserved: u64) -> Self {
        if reserved > 0 {
            self.statuses_mut().skip(place).take(1).for_each(|status| status.leave_out(held, reserved));
        }
        self
    }

    /// The same decision, with the statuses of `other` in these places.
    pub(crate) fn with_statuses_of(mut self, other: &Self, places: &[usize]) -> Self {
        for (place, status) in iter::zip(places, other.statuses()) {
            self.statuses_mut().skip(*place).take(1).for_each(|old| *old = status.clone().hidden_as(old));
        }
        self
    }

    fn origin_mut(&mut self) -> &mut Origin {
        Arc::make_mut(&mut self.fields).origin.get_or_insert_default()
    }

    /// The decision that a layer of this address leaves on a request.
    pub(crate) fn left_by(self, layer: usize) -> Self {
        Self { layer, ..self }
    }

    /// Whether the layer that has left this decision on a request is also further out. Then the
    /// layer counts the request twice.
    pub(crate) fn counts_twice(&self) -> bool {
        self.layers().skip(1).any(|outer| outer.layer == self.layer)
    }

    /// Adds the decision of the layers further out. See rule 7 of the [module docs](self).
    pub(crate) fn within(mut self, outer: Self) -> Self {
        Arc::make_mut(&mut self.fields).rest.extend(outer.statuses().cloned());
        self.origin_mut().outer = Some(outer);
        self
    }

    /// This decision, and those of the layers further out.
    fn layers(&self) -> impl Iterator<Item = &Self> {
        iter::successors(Some(self), |decision| decision.fields.origin.as_ref()?.outer.as_ref())
    }

    fn places(&self) -> impl Iterator<Item = &Arc<dyn Places>> {
        self.layers().filter_map(|decision| decision.fields.origin.as_ref()?.places.as_ref())
    }

    fn statuses_mut(&mut self) -> impl Iterator<Item = &mut LimitStatus> {
        let Fields { first, rest, .. } = Arc::make_mut(&mut self.fields);
        iter::once(first).chain(rest)
    }

    /// Whether the check was admitted and counted.
    #[must_use]
    pub fn is_allowed(&self) -> bool {
        self.statuses().all(|status| status.refuses().is_none())
    }

    /// How long to wait until the same check is admitted, if nothing else arrives; `None` if the
    /// check was admitted. If only reservations are in the way, the result is the time until the
    /// next try: see rule 3 of the [module docs](self).
    pub fn retry_after(&self) -> Option<Duration> {
        self.statuses().filter_map(LimitStatus::refuses).max()
    }

    /// Whether the check was refused, and would have been admitted without the reserved units.
    pub(crate) fn is_refused_by_reservations(&self) -> bool {
        !self.is_allowed()
            && self.statuses().filter(|status| status.refuses().is_some()).all(LimitStatus::is_refused_by_reservations)
    }

    /// The limit whose figures count as those of the decision. See rule 5 of the [module
    /// docs](self).
    pub fn binding(&self) -> &LimitStatus {
        self.fields.rest.iter().fold(&self.fields.first, LimitStatus::binding)
    }

    /// The limit whose figures clients see: the [`binding`](Self::binding) one of the limits that
    /// are not [hidden](Charge::hidden).
    ///
    /// `None` if all limits are hidden, or if only hidden limits have refused the check. Any other
    /// limit would show that units are left. A limit in the [shadow](Charge::in_shadow) is visible
    /// only if all limits of the check are in the shadow.
    #[inline]
    pub fn visible(&self) -> Option<&LimitStatus> {
        let visible = self.statuses().filter(|status| !status.is_hidden()).reduce(LimitStatus::binding)?;
        // This limit is in the shadow only if all limits are that are not hidden.
        if visible.is_shadow() && !self.statuses().all(LimitStatus::is_shadow) {
            return None;
        }
        (visible.refuses().is_some() || self.is_allowed()).then_some(visible)
    }

    /// The limits in the [shadow](Charge::in_shadow) that would have refused the check.
    pub fn shadow_refusals(&self) -> impl Iterator<Item = &LimitStatus> {
        self.statuses().filter(|status| status.is_shadow() && status.waits.is_some())
    }

    /// The status of each limit, in the order of the charges. A refusal by the [refusal
    /// cache](crate::Limiter::refusal_cache) may not know how a limit stands. Then the figures of
    /// this limit are zero, and the limit is [hidden](LimitStatus::is_hidden).
    pub fn statuses(&self) -> impl Iterator<Item = &LimitStatus> {
        iter::once(&self.fields.first).chain(&self.fields.rest)
    }

    /// The units in the window of the [`binding`](Self::binding) limit, including those of this
    /// check.
    pub fn used(&self) -> u64 {
        self.binding().used()
    }

    /// The units left under the [`binding`](Self::binding) limit.
    pub fn remaining(&self) -> u64 {
        self.binding().remaining()
    }

    /// The failure of the store, if this process has decided in its place. Then the figures are
    /// those of a [`Share`](crate::limiter::Share) of each limit. `None` for a decision of the
    /// store. Behind several layers, the failure is that of the innermost layer that has one.
    pub fn local_cause(&self) -> Option<&Error> {
        self.layers().find_map(|decision| decision.fields.origin.as_ref()?.instead_of.as_deref())
    }

    /// Whether the decision holds places of [concurrent](crate::Limit::concurrent) limits. It holds
    /// them until its last clone is dropped.
    ///
    /// 1. A layer drops its clone when the body of the response has ended or was dropped. With
    ///    [`free_with_head`](crate::RateLimitLayer::free_with_head), the layer does so when the
    ///    response begins.
    /// 2. The request has a clone in its extensions. A handler that goes on longer than its
    ///    response, such as the task of a WebSocket, keeps that clone, so the place is held until
    ///    the task ends. Behind several layers, this clone holds the places of all layers.
    /// 3. With `RedisStore`, a task on the runtime of the check renews the places. The places of a
    ///    process that has died are free at most [10 s](crate::Limit::freed_after) later. A place
    ///    whose admission was lost on its way from Redis is freed once Redis answers again.
    /// 4. The clone that is dropped last frees the places, on any thread. When a process ends,
    ///    [`shutdown`](crate::Limiter::shutdown) frees all places.
    pub fn holds_place(&self) -> bool {
        self.places().next().is_some()
    }

    /// Whether a place of this decision was free for a time, or may be free now, so that another
    /// request may have got it. That happens if the process stands still, or does not reach Redis,
    /// for longer than the [life](crate::Limit::freed_after) of a place, or if Redis loses the
    /// place. This is the one case in which more places than the limit may be held. The process
    /// takes the place again, even above the limit. No other request gets a place until fewer are
    /// held than the limit has.
    pub fn has_lost_place(&self) -> bool {
        self.places().any(|places| places.are_lost())
    }

    /// When the store decided, by the store's clock. If a check was repeated with its
    /// [id](crate::Check::with_id), this is the time of the first admission. For a repeated check
    /// that takes only places, this is some time since the first admission.
    pub fn at(&self) -> SystemTime {
        self.fields.at
    }

    /// The id of the admission.
    pub fn id(&self) -> AdmissionId {
        self.fields.id
    }
}
