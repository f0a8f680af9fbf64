//! Decisions, the results of checks.
//!
//! 1. A decision has one [`LimitStatus`] per charge, in charge order.
//! 2. [`retry_after`](Decision::retry_after), the retry time, is exact. If nothing else arrives,
//!    the same check is admitted after this time, and would be refused a microsecond earlier. The
//!    retry time is only a lower bound in two cases: if the process refuses without asking the
//!    store (see [refusal cache](crate::Limiter::refusal_cache)), and, on Redis, if more than 100
//!    entries have to leave a log in which some entries cost more than 1.
//! 3. [Reserved](Charge::reserve) units may be given back at any time. So if only reserved units
//!    are in the way, the retry time is short:
//!    [`retry_reserved_after`](crate::Limiter::retry_reserved_after), one second by default, or
//!    less if a lease ends sooner. See
//!    [`is_refused_by_reservations`](LimitStatus::is_refused_by_reservations).
//! 4. [`reset_after`](LimitStatus::reset_after), the reset time, is the time until the oldest unit
//!    leaves the window. From then on, the limit has more units left. It is never too short. With
//!    `RedisStore` it may be too long: by up to a millisecond, by up to the prefetch life under a
//!    limit with [prefetch](crate::limit::prefetch), and by up to the size of the step if the
//!    server's clock has stepped back.
//! 5. A decision's figures are those of its [`binding`](Decision::binding) limit. For an admission,
//!    that is the limit with the fewest units left. A concurrent limit is binding in an admission
//!    only if no limit has a window. For a refusal, it is the limit with the longest retry time.
//!    Limits in the [shadow](Charge::in_shadow) are binding only if all of the check's limits are
//!    in the shadow.
//! 6. Clients see the figures of the [`visible`](Decision::visible) limit: the binding one among
//!    those that are not [hidden](Charge::hidden). For a refusal, only limits that refused can be
//!    visible. If all limits that refused are hidden, none is visible.
//! 7. Behind several layers, one decision in the request's extensions stands for all of them. It
//!    has the statuses of all layers, the innermost first, and holds all their places. Its id and
//!    time are the innermost layer's.
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
    clock::micros,
    error::Error,
};

/// The result of a check. See the [module docs](self). Cheap to clone.
#[derive(Clone, Debug)]
#[must_use = "a refusal is a decision, too: see `is_allowed`"]
pub struct Decision {
    fields: Arc<Fields>,
    // Both numbers are short, so that a decision moves in two registers.
    /// The number of the layer that has put this decision into a request's extensions; 0 if no
    /// layer has done so.
    layer: u32,
    /// How long the request had waited for decisions at that time, in microseconds.
    waited: u32,
}

#[derive(Clone, Debug)]
struct Fields {
    at: SystemTime,
    id: AdmissionId,
    first: LimitStatus,
    rest: Vec<LimitStatus>,
    /// Fields that few decisions need; `None` for all others.
    origin: Option<Box<Origin>>,
}

/// Fields that few decisions need.
#[derive(Clone, Debug, Default)]
struct Origin {
    /// The store's failure, if this process has decided in its place.
    instead_of: Option<Arc<Error>>,
    /// True for a cached refusal that is repeated because the store has failed.
    is_repeated: bool,
    places: Option<Arc<dyn Places>>,
    /// The decision from the layers further out.
    outer: Option<Decision>,
}

/// An admission's places under [concurrent](crate::Limit::concurrent) limits. Dropping this value
/// frees them.
pub(crate) trait Places: fmt::Debug + Send + Sync {
    fn are_lost(&self) -> bool;
}

impl Decision {
    /// A store's decision. `at` is the decision's time, and `id` is the admission's id. `status`
    /// returns a charge's status, and is called once per charge, in order.
    ///
    /// A status with a retry time refuses the check, unless its charge is in the
    /// [shadow](Charge::in_shadow). If no status refuses the check, it is
    /// [allowed](Self::is_allowed).
    pub fn new(
        check: &Check,
        at: SystemTime,
        id: AdmissionId,
        status: impl FnMut(&Charge) -> LimitStatus,
    ) -> Self {
        Self::of_statuses(at, id, check.map_charges(status))
    }

    #[inline]
    pub(crate) fn of_statuses(
        at: SystemTime,
        id: AdmissionId,
        (first, rest): (LimitStatus, Vec<LimitStatus>),
    ) -> Self {
        Self {
            fields: Arc::new(Fields {
                at,
                id,
                first,
                rest,
                origin: None,
            }),
            layer: 0,
            waited: 0,
        }
    }

    /// Marks the decision as made by this process, in place of a store that has failed.
    pub(crate) fn instead_of(mut self, error: Error) -> Self {
        self.origin_mut().instead_of = Some(Arc::new(error));
        self
    }

    /// Marks the decision as a cached refusal that is repeated because the store has failed.
    pub(crate) fn repeated(mut self) -> Self {
        self.origin_mut().is_repeated = true;
        self
    }

    /// True if the store decided, directly or through the refusal cache. `false` if the store has
    /// failed to decide the check, and this process has decided, or has repeated a cached refusal.
    pub(crate) fn is_the_stores(&self) -> bool {
        match &self.fields.origin {
            Some(origin) => origin.instead_of.is_none() && !origin.is_repeated,
            None => true,
        }
    }

    /// True if the decision is an expected refusal, with no figures from the store.
    pub(crate) fn is_estimate(&self) -> bool {
        self.statuses().all(|status| status.is_estimate)
    }

    /// Attaches places to the decision, which holds them from now on.
    pub(crate) fn holding(mut self, places: Arc<dyn Places>) -> Self {
        self.origin_mut().places = Some(places);
        self
    }

    /// Returns one layer's decision without its places, so that it can be kept for longer than they
    /// are held.
    pub(crate) fn without_places(mut self) -> Self {
        if self.holds_place() {
            self.origin_mut().places = None;
        }
        self
    }

    /// Turns the decision into a refusal for the time `wait`, with the same figures. Each charge
    /// that does not fit refuses the check. If all charges fit, every charge that can refuse the
    /// check does so, except bans.
    pub(crate) fn refused_for(mut self, check: &Check, wait: Duration) -> Self {
        let all_fit = iter::zip(check.charges(), self.statuses())
            .all(|(charge, status)| !charge.can_refuse() || charge.cost() <= status.remaining());
        for (charge, status) in check.charges().zip(self.statuses_mut()) {
            let fits = charge.cost() <= status.remaining();
            if charge.can_refuse() && (all_fit && !charge.is_ban || !fits) {
                status.refused_for(wait);
            }
        }
        self
    }

    /// Sets the retry time for limits where only reserved units are in the way.
    #[inline]
    pub(crate) fn with_retry_reserved_after(mut self, wait: Duration) -> Self {
        // Most decisions need no change.
        if self.statuses().any(LimitStatus::waits_for_reserved) {
            for status in self.statuses_mut() {
                status.set_retry_reserved_after(wait);
            }
        }
        self
    }

    /// Subtracts this process's units from the status at this index: its unspent `held` units no
    /// longer count as used, and its `reserved` units no longer count as reserved.
    pub(crate) fn without_held(mut self, index: usize, held: u64, reserved: u64) -> Self {
        if reserved > 0
            && let Some(status) = self.statuses_mut().nth(index)
        {
            status.leave_out(held, reserved);
        }
        self
    }

    /// Replaces the statuses at these indexes with those in `other`. A new status is hidden if the
    /// old one was.
    pub(crate) fn with_statuses_of(mut self, other: &Self, indexes: &[usize]) -> Self {
        for (index, new) in iter::zip(indexes, other.statuses()) {
            if let Some(status) = self.statuses_mut().nth(*index) {
                let is_hidden = status.is_hidden;
                status.clone_from(new);
                status.is_hidden = is_hidden;
            }
        }
        self
    }

    /// The store's failure, if this process has decided in its place. Ignores the layers further
    /// out.
    fn own_cause(&self) -> Option<&Error> {
        self.fields.origin.as_ref()?.instead_of.as_deref()
    }

    /// The statuses that refuse the check.
    pub(crate) fn refusing(&self) -> impl Iterator<Item = &LimitStatus> {
        self.statuses().filter(|status| status.refuses().is_some())
    }

    fn origin_mut(&mut self) -> &mut Origin {
        Arc::make_mut(&mut self.fields)
            .origin
            .get_or_insert_default()
    }

    /// Marks the decision as put into a request's extensions by the layer with this number. The
    /// request has `waited` for decisions so far.
    pub(crate) fn left_by(self, layer: u32, waited: Duration) -> Self {
        Self {
            layer,
            waited: u32::try_from(micros(waited)).unwrap_or(u32::MAX),
            ..self
        }
    }

    /// How long the request has waited for decisions, if a layer has put this decision into its
    /// extensions.
    pub(crate) fn waited(&self) -> Duration {
        Duration::from_micros(self.waited.into())
    }

    /// True if the same layer also made one of the decisions further out. In that case, the request
    /// has gone through this layer twice, and is counted twice.
    pub(crate) fn counts_twice(&self) -> bool {
        self.layers().skip(1).any(|outer| outer.layer == self.layer)
    }

    /// Adds the decision from the layers further out. See rule 7 in the [module docs](self).
    pub(crate) fn within(mut self, outer: Self) -> Self {
        Arc::make_mut(&mut self.fields)
            .rest
            .extend(outer.statuses().cloned());
        self.origin_mut().outer = Some(outer);
        self
    }

    /// This decision, then those of the layers further out.
    fn layers(&self) -> impl Iterator<Item = &Self> {
        iter::successors(Some(self), |decision| {
            decision.fields.origin.as_ref()?.outer.as_ref()
        })
    }

    fn places(&self) -> impl Iterator<Item = &Arc<dyn Places>> {
        self.layers()
            .filter_map(|decision| decision.fields.origin.as_ref()?.places.as_ref())
    }

    fn statuses_mut(&mut self) -> impl Iterator<Item = &mut LimitStatus> {
        let Fields { first, rest, .. } = Arc::make_mut(&mut self.fields);
        iter::once(first).chain(rest)
    }

    /// True if the check was admitted and counted.
    #[must_use]
    pub fn is_allowed(&self) -> bool {
        self.statuses().all(|status| status.refuses().is_none())
    }

    /// How long to wait until the same check is admitted, if nothing else arrives; `None` after an
    /// admission. If only reservations are in the way, this is the time after which to try again:
    /// see rule 3 in the [module docs](self).
    pub fn retry_after(&self) -> Option<Duration> {
        self.statuses().filter_map(LimitStatus::refuses).max()
    }

    /// True if the check was refused, and would have been admitted without the reserved units.
    pub(crate) fn is_refused_by_reservations(&self) -> bool {
        !self.is_allowed() && self.refusing().all(LimitStatus::is_refused_by_reservations)
    }

    /// The limit whose figures stand for the decision. See rule 5 in the [module docs](self).
    pub fn binding(&self) -> &LimitStatus {
        let Fields { first, rest, .. } = &*self.fields;
        rest.iter().fold(first, LimitStatus::binding)
    }

    /// The limit whose figures clients see: the [`binding`](Self::binding) one among those that are
    /// not [hidden](Charge::hidden).
    ///
    /// `None` if all limits are hidden, or if only hidden limits have refused the check. In the
    /// second case, any other limit would show units left, although the check was refused. A limit
    /// in the [shadow](Charge::in_shadow) is visible only if all of the check's limits are in the
    /// shadow.
    #[inline]
    pub fn visible(&self) -> Option<&LimitStatus> {
        let visible = self
            .statuses()
            .filter(|status| !status.is_hidden())
            .reduce(LimitStatus::binding)?;
        // `visible` is in the shadow only if all limits that are not hidden are in the shadow.
        if visible.is_shadow && !self.statuses().all(|status| status.is_shadow) {
            return None;
        }
        (visible.refuses().is_some() || self.is_allowed()).then_some(visible)
    }

    /// The limits in the [shadow](Charge::in_shadow) that would have refused the check.
    pub fn shadow_refusals(&self) -> impl Iterator<Item = &LimitStatus> {
        self.statuses()
            .filter(|status| status.is_shadow && status.waits.is_some())
    }

    /// One status per limit, in charge order. In a refusal by the [refusal
    /// cache](crate::Limiter::refusal_cache), some limits' figures may be unknown. Unknown figures
    /// are zero, and their limit is [hidden](LimitStatus::is_hidden).
    pub fn statuses(&self) -> impl Iterator<Item = &LimitStatus> {
        iter::once(&self.fields.first).chain(&self.fields.rest)
    }

    /// The units left under the [`binding`](Self::binding) limit.
    pub fn remaining(&self) -> u64 {
        self.binding().remaining()
    }

    /// The store's failure, if this process has decided in its place; `None` if the store has
    /// decided. Such a decision has the figures for a [`Share`](crate::limiter::Share) of each
    /// limit. Behind several layers, the failure is from the innermost layer that has one.
    pub fn local_cause(&self) -> Option<&Error> {
        self.layers().find_map(Self::own_cause)
    }

    /// True if the decision holds places under [concurrent](crate::Limit::concurrent) limits. It
    /// holds them until its last clone is dropped.
    ///
    /// 1. A layer drops its clone when the response body has ended or was dropped, or, with
    ///    [`free_with_head`](crate::RateLimitLayer::free_with_head), when the response begins.
    /// 2. The request has a clone in its extensions. If a handler's work goes on after its
    ///    response, such as in a WebSocket task, let the task keep this clone. The place is then
    ///    held until the task ends. Behind several layers, this clone holds the places of all
    ///    layers.
    /// 3. With `RedisStore`, a task on the check's runtime renews the places. When a process dies,
    ///    its places are free at most [10 s](crate::Limit::freed_after) later. If the reply to an
    ///    admission was lost on the way from Redis, the place is freed once Redis answers again.
    /// 4. Dropping the last clone frees the places, on any thread. When a process ends,
    ///    [`shutdown`](crate::Limiter::shutdown) frees all places that are held.
    pub fn holds_place(&self) -> bool {
        self.places().next().is_some()
    }

    /// True if the decision has lost a place: the place was free for a time, or may be free now, so
    /// another request may have got it. A place is lost if the process stands still or cannot reach
    /// Redis for longer than the place's [life](crate::Limit::freed_after), or if Redis loses the
    /// place's entry. Only after a loss can more places be held than the limit has. The process
    /// takes a lost place again, even above the limit. Other requests do not get a place until
    /// fewer are held than the limit has.
    pub fn has_lost_place(&self) -> bool {
        self.places().any(|places| places.are_lost())
    }

    /// When the store decided, by the store's clock. If a check was repeated with its
    /// [id](crate::Check::with_id), this is the time of the first admission. If the check takes
    /// only places, it is that time or a later one.
    pub fn at(&self) -> SystemTime {
        self.fields.at
    }

    /// The admission's id.
    pub fn id(&self) -> AdmissionId {
        self.fields.id
    }
}
