//! Decisions, the results of checks.
//!
//! 1. A decision has one [`LimitStatus`] for each charge, in the order of the charges.
//! 2. [`retry_after`](Decision::retry_after), the retry time, is exact. If nothing else arrives,
//!    the same check is admitted after the retry time, and refused a microsecond earlier. The retry
//!    time is only a lower bound if the process refuses without asking the store (see [refusal
//!    cache](crate::Limiter::refusal_cache)), or, on Redis, if more than 100 entries have to leave
//!    a log in which some entries cost more than 1.
//! 3. [Reserved](Charge::reserve) units may be given back at any time. So if only reserved units
//!    are in the way, the retry time is short: the time
//!    [`retry_reserved_after`](crate::Limiter::retry_reserved_after), one second by default, or
//!    less if a lease ends sooner. See
//!    [`is_refused_by_reservations`](LimitStatus::is_refused_by_reservations).
//! 4. [`reset_after`](LimitStatus::reset_after), the reset time, is the time until the oldest unit
//!    leaves the window. From then on, the limit has more units left. The reset time is never too
//!    short. With `RedisStore` the reset time may be too long by up to a millisecond. Under a limit
//!    with [prefetch](crate::limit::prefetch), the reset time may be too long by up to the life of
//!    a prefetch. If the server's clock has stepped back, the reset time may be too long by up to
//!    the length of the step.
//! 5. The figures of a decision are those of its [`binding`](Decision::binding) limit. For an
//!    admission, the binding limit is the limit with the fewest units left. A concurrent limit is
//!    binding in an admission only if there is no limit with a window. For a refusal, the binding
//!    limit is the limit with the longest retry time. Limits in the [shadow](Charge::in_shadow) are
//!    binding only if all limits of the check are in the shadow.
//! 6. Clients see the figures of the [`visible`](Decision::visible) limit. Among the limits that
//!    are not [hidden](Charge::hidden), the visible limit is the binding one. For a refusal, only
//!    limits that refused can be visible. If all limits that refused are hidden, there is no
//!    visible limit.
//! 7. Behind several layers, one decision in the extensions of the request stands for all layers.
//!    This decision has the statuses of all layers, the innermost first, and holds the places of
//!    all layers. The id and the time of this decision are those of the innermost layer.
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
    /// The number of the layer that has put this decision into the extensions of a request. 0 if no
    /// layer has done so.
    layer: u32,
    /// How long that request had waited for decisions by then, in microseconds.
    waited: u32,
}

#[derive(Clone, Debug)]
struct Fields {
    at: SystemTime,
    id: AdmissionId,
    first: LimitStatus,
    rest: Vec<LimitStatus>,
    /// The fields that only few decisions need; `None` for all other decisions.
    origin: Option<Box<Origin>>,
}

/// The fields that only few decisions need.
#[derive(Clone, Debug, Default)]
struct Origin {
    /// The failure of the store, if this process has decided in the place of the store.
    instead_of: Option<Arc<Error>>,
    /// True if the decision is a remembered refusal, repeated because the store has failed.
    is_repeated: bool,
    places: Option<Arc<dyn Places>>,
    /// The decision of the layers further out.
    outer: Option<Decision>,
}

/// The places of an admission under [concurrent](crate::Limit::concurrent) limits. Dropping this
/// value frees the places.
pub(crate) trait Places: fmt::Debug + Send + Sync {
    fn are_lost(&self) -> bool;
}

impl Decision {
    /// A decision of a store. `at` is the time of the decision, and `id` is the id of the
    /// admission. `status` returns the status of a charge, and is called once for each charge, in
    /// order.
    ///
    /// A status with a retry time refuses the check, except if its charge is in the
    /// [shadow](Charge::in_shadow). If no status refuses the check, the check is
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

    /// Marks the decision as one of this process, in the place of a store that has failed.
    pub(crate) fn instead_of(mut self, error: Error) -> Self {
        self.origin_mut().instead_of = Some(Arc::new(error));
        self
    }

    /// Marks the decision as a remembered refusal that is repeated because the store has failed.
    pub(crate) fn repeated(mut self) -> Self {
        self.origin_mut().is_repeated = true;
        self
    }

    /// True if the decision is the store's, or the refusal cache has repeated a refusal of the
    /// store without asking it. `false` if the store has failed to decide the check: then this
    /// process has decided, or has repeated a remembered refusal.
    pub(crate) fn is_the_stores(&self) -> bool {
        match &self.fields.origin {
            Some(origin) => origin.instead_of.is_none() && !origin.is_repeated,
            None => true,
        }
    }

    /// True if the decision is a refusal that is expected, and the store has told none of its
    /// figures.
    pub(crate) fn is_estimate(&self) -> bool {
        self.statuses().all(|status| status.is_estimate)
    }

    /// Lets the decision hold places.
    pub(crate) fn holding(mut self, places: Arc<dyn Places>) -> Self {
        self.origin_mut().places = Some(places);
        self
    }

    /// Returns the decision of one layer without its places, so that it may be kept for longer
    /// than they are held.
    pub(crate) fn without_places(mut self) -> Self {
        if self.holds_place() {
            self.origin_mut().places = None;
        }
        self
    }

    /// Returns the same figures, as a refusal for the time `wait`. Each charge that does not fit
    /// refuses. If all charges fit, each charge that can refuse does so, except bans.
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

    /// Sets the retry time of limits for which only reserved units are in the way.
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

    /// Leaves out units of this process in the status with this index. `held` units, which the
    /// process holds unspent, no longer count as used. `reserved` units no longer count as
    /// reserved.
    pub(crate) fn without_held(mut self, index: usize, held: u64, reserved: u64) -> Self {
        if reserved > 0
            && let Some(status) = self.statuses_mut().nth(index)
        {
            status.leave_out(held, reserved);
        }
        self
    }

    /// Replaces the statuses with these indexes by the statuses of `other`. A new status is hidden
    /// if the old status was hidden.
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

    /// The error that the decision answers, without those of layers further out.
    fn own_cause(&self) -> Option<&Error> {
        self.fields.origin.as_ref()?.instead_of.as_deref()
    }

    /// The statuses of the limits that refuse the check.
    pub(crate) fn refusing(&self) -> impl Iterator<Item = &LimitStatus> {
        self.statuses().filter(|status| status.refuses().is_some())
    }

    fn origin_mut(&mut self) -> &mut Origin {
        Arc::make_mut(&mut self.fields)
            .origin
            .get_or_insert_default()
    }

    /// Marks the decision as one that a layer puts into the extensions of a request. `layer` is the
    /// number of this layer. The request has `waited` for decisions so far.
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

    /// True if the layer that made this decision has also made one of the decisions further out.
    /// Then the request has gone through this layer twice, and is counted twice.
    pub(crate) fn counts_twice(&self) -> bool {
        self.layers().skip(1).any(|outer| outer.layer == self.layer)
    }

    /// Adds the decision of the layers further out. See rule 7 of the [module docs](self).
    pub(crate) fn within(mut self, outer: Self) -> Self {
        Arc::make_mut(&mut self.fields)
            .rest
            .extend(outer.statuses().cloned());
        self.origin_mut().outer = Some(outer);
        self
    }

    /// This decision, and the decisions of the layers further out.
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

    /// How long to wait until the same check is admitted, if nothing else arrives; `None` if the
    /// check was admitted. If only reservations are in the way, the result is the time until the
    /// next try: see rule 3 of the [module docs](self).
    pub fn retry_after(&self) -> Option<Duration> {
        self.statuses().filter_map(LimitStatus::refuses).max()
    }

    /// True if the check was refused, and would have been admitted without the reserved units.
    pub(crate) fn is_refused_by_reservations(&self) -> bool {
        !self.is_allowed() && self.refusing().all(LimitStatus::is_refused_by_reservations)
    }

    /// The limit whose figures count as those of the decision. See rule 5 of the [module
    /// docs](self).
    pub fn binding(&self) -> &LimitStatus {
        let Fields { first, rest, .. } = &*self.fields;
        rest.iter().fold(first, LimitStatus::binding)
    }

    /// The limit whose figures clients see. Among the limits that are not [hidden](Charge::hidden),
    /// this limit is the [`binding`](Self::binding) one.
    ///
    /// `None` if all limits are hidden, or if only hidden limits have refused the check. In the
    /// second case, any limit that is not hidden would show that units are left, although the check
    /// was refused. A limit in the [shadow](Charge::in_shadow) is visible only if all limits of the
    /// check are in the shadow.
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

    /// The status of each limit, in the order of the charges. In a refusal by the [refusal
    /// cache](crate::Limiter::refusal_cache), the figures of some limits may be unknown. Unknown
    /// figures are zero, and their limit is [hidden](LimitStatus::is_hidden).
    pub fn statuses(&self) -> impl Iterator<Item = &LimitStatus> {
        iter::once(&self.fields.first).chain(&self.fields.rest)
    }

    /// The units left under the [`binding`](Self::binding) limit.
    pub fn remaining(&self) -> u64 {
        self.binding().remaining()
    }

    /// The failure of the store, if this process has decided in the store's place. The figures of
    /// such a decision are those of a [`Share`](crate::limiter::Share) of each limit. `None` for a
    /// decision of the store. Behind several layers, the failure is that of the innermost layer for
    /// which the store has failed.
    pub fn local_cause(&self) -> Option<&Error> {
        self.layers().find_map(Self::own_cause)
    }

    /// True if the decision holds places of [concurrent](crate::Limit::concurrent) limits. The
    /// places are held until the last clone of the decision is dropped.
    ///
    /// 1. A layer drops its clone when the body of the response has ended or was dropped. With
    ///    [`free_with_head`](crate::RateLimitLayer::free_with_head), the layer drops its clone when
    ///    the response begins.
    /// 2. The request has a clone in its extensions. If a handler goes on longer than its response,
    ///    such as in the task of a WebSocket, let the task keep this clone. Then the place is held
    ///    until the task ends. Behind several layers, this clone holds the places of all layers.
    /// 3. With `RedisStore`, a task on the runtime of the check renews the places. The places of a
    ///    process that has died are free at most [10 s](crate::Limit::freed_after) later. If the
    ///    reply to an admission was lost on the way from Redis, the place is freed once Redis
    ///    answers again.
    /// 4. The clone that is dropped last frees the places, on any thread. When a process ends,
    ///    [`shutdown`](crate::Limiter::shutdown) frees all places that are held.
    pub fn holds_place(&self) -> bool {
        self.places().next().is_some()
    }

    /// True if the decision has lost a place: the place was free for a time, or may be free now, so
    /// that another request may have got the place. A place is lost if the process stands still, or
    /// does not reach Redis, for longer than the [life](crate::Limit::freed_after) of a place. A
    /// place is also lost if Redis loses the entry of the place. More places than the limit has may
    /// be held only after a loss. The process takes a lost place again, even above the limit. No
    /// other request gets a place until fewer places are held than the limit has.
    pub fn has_lost_place(&self) -> bool {
        self.places().any(|places| places.are_lost())
    }

    /// When the store decided, by the store's clock. For a check that was repeated with its
    /// [id](crate::Check::with_id), the result is the time of the first admission. For a repeated
    /// check that takes only places, the result is the time of the first admission or a later time.
    pub fn at(&self) -> SystemTime {
        self.fields.at
    }

    /// The id of the admission.
    pub fn id(&self) -> AdmissionId {
        self.fields.id
    }
}
