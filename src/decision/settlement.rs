//! Settlements, which set an admission's actual cost afterwards.
//!
//! 1. A [reserved](crate::Charge::reserve) charge counts at its cost from the decision on. After a
//!    settlement it counts at its actual cost instead, as of the admission's time. If the actual
//!    cost is 0, the charge no longer counts.
//! 2. The actual cost may be above the reserved cost, and even above the limit. Later checks are
//!    then refused until enough units have left the window.
//! 3. A settlement is idempotent: it counts once, however often it is sent. Rule 5 names the
//!    exceptions. [`Settled::was_applied`] tells whether a settlement has counted.
//! 4. A settlement after the lease still counts the actual cost, until one window after the
//!    admission. So a lease can be much shorter than the window: it only limits how long the
//!    reserved units count without a settlement. Once one window has passed since the admission, a
//!    settlement does not change anything.
//! 5. Settle each admission only once. A store forgets a settlement at a cost of 0. Under an
//!    [algorithm](crate::algorithm) other than the log, it forgets every settlement that came
//!    before the lease ended. If a settlement was forgotten, and another one for the same admission
//!    comes after the lease, both count. Under such an algorithm, settlements after the lease are
//!    not remembered either while the key has 10,000 entries with ids, so if two of them come, both
//!    count. If a reply was lost, the store sends the settlement again within seconds. The
//!    settlement then counts twice only if the lease ends between the two calls.
//! 6. Reserve at least one unit: a charge of 0 units leaves no admission to settle.
//! 7. A [full](crate::MemoryStore#when-it-is-full) `MemoryStore` may count units in such a way that
//!    a settlement does not find them. They count for the whole window. If the settlement comes
//!    before the lease ends, it only adds the units above the reserved ones. If it comes after the
//!    lease, it adds the whole actual cost.
//! 8. An admission without a reservation can be settled too, if its limit counts by a
//!    [log](crate::Algorithm::SLIDING_LOG), or if its caller gave the check an id.
//!
//! [`Limiter::reserve`](crate::Limiter::reserve) reserves and settles units under one limit. A
//! [`Settlement`] settles several limits:
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use std::time::Duration;
//! use tower_sliding_window::{Charge, Check, Limit, Limiter, MemoryStore, settlement::Settlement};
//!
//! let (requests, tokens) = (Limit::per_minute("requests", 60), Limit::per_hour("tokens", 10_000));
//! let check = Check::new(Charge::new(requests, "ada", 1)?)
//!     .and(Charge::new(tokens.clone(), "ada", 2_000)?.reserve(Duration::from_secs(120)))?;
//!
//! let limiter = Limiter::new(MemoryStore::new());
//! let decision = limiter.check_all(check.clone()).await?;
//! assert!(decision.is_allowed());
//!
//! // The response took 1,234 tokens; the request stays one request.
//! let settlement = Settlement::new(check, &decision, |charge| (charge.limit() == &tokens).then_some(1_234));
//! assert!(limiter.settle(settlement).await?.was_applied);
//! assert_eq!(limiter.peek(&tokens, "ada").await?.binding().used, 1_234);
//! # Ok(()) }
//! ```

use std::{
    iter,
    time::{Duration, SystemTime},
};

use crate::{
    check::{AdmissionId, Charge, Check},
    clock::{micros_since_epoch, system_time},
    decision::Decision,
};

/// An admitted check's actual cost. See the [module docs](self).
#[derive(Clone, Debug)]
#[must_use = "a settlement settles nothing until a store or a limiter gets it"]
pub struct Settlement {
    /// The check as it was admitted.
    pub check: Check,
    /// The admission's id.
    pub id: AdmissionId,
    /// When the check was admitted, by the store's clock.
    pub at: SystemTime,
    /// The actual cost per charge. `None` leaves a charge as it is.
    costs: Vec<Option<u64>>,
    /// True if this process decided in the store's place.
    pub(crate) is_local: bool,
}

/// The result of a settlement.
#[derive(Clone, Debug)]
pub struct Settled {
    /// One status per limit in [`Settlement::check`], after the settlement. None of them refuses
    /// the check.
    pub decision: Decision,
    /// True if the settlement was counted under at least one limit, even if the store has sent it
    /// again because a reply was lost. `false` if the store did not find the admission, and did not
    /// give back any units. It does not find the admission in these cases:
    ///
    /// * The admission was settled before, or its window has ended.
    /// * The cost is 0, and the units were already given back when the lease ended.
    /// * The check, the id or the time differs from the admission's: see [`Settlement::by_id`].
    ///
    /// Nor does it find the admission in the following cases. But if the admission had a lease that
    /// has ended, a settlement at a cost above 0 still counts, in addition to the admission, and
    /// the value is `true`:
    ///
    /// * A [full](crate::MemoryStore#when-it-is-full) `MemoryStore` has counted the admission in
    ///   shared counts. Units above the reserved ones are still added.
    /// * The limit has an [algorithm](crate::algorithm) other than the log, and the admission has
    ///   no reservation and no id from its caller, or was counted while the key had 10,000 entries
    ///   with ids.
    /// * The limit was [reset](crate::Limiter::reset), or the store has lost the admission because
    ///   Redis was restarted, evicted the key, or failed over.
    pub was_applied: bool,
}

impl Settlement {
    /// Settles an admitted check. Pass exactly the check that was admitted. `cost` returns each
    /// charge's actual cost: 0 gives all its units back, and `None` leaves the charge as it is.
    /// Costs are capped at 2^32 units or at the limit's units, whichever is more.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use tower_sliding_window::{Charge, Check, Limit, Limiter, MemoryStore, settlement::Settlement};
    ///
    /// const JOBS: Limit = Limit::per_hour("jobs", 100);
    ///
    /// let limiter = Limiter::new(MemoryStore::new());
    /// let check = Check::new(Charge::new(JOBS, "ada", 5)?);
    /// let decision = limiter.check_all(check.clone()).await?;
    /// // The job has failed, and must not count.
    /// let settled = limiter.settle(Settlement::new(check, &decision, |_| Some(0))).await?;
    /// assert!(settled.was_applied && settled.decision.binding().used == 0);
    /// # Ok(()) }
    /// ```
    ///
    /// Under an [algorithm](crate::algorithm) other than the log, an admission can be settled only
    /// if it has a reservation, or an id from its caller.
    pub fn new(
        mut check: Check,
        admitted: &Decision,
        cost: impl FnMut(&Charge) -> Option<u64>,
    ) -> Self {
        // Only this layer's admission is settled. So it does not matter who decided for the layers
        // further out: the store, or this process in its place.
        let is_local = admitted.own_cause().is_some();
        // If this process decided in the store's place, it counted under shares of the limits. The
        // settlement uses the same shares.
        if is_local {
            let mut statuses = admitted.statuses();
            check = check.map(|charge| match statuses.next() {
                Some(status) => charge.on(status.limit.clone()),
                None => charge.clone(),
            });
        }
        Self {
            is_local,
            ..Self::by_id(check, admitted.id(), admitted.at(), cost)
        }
    }

    /// Settles an admitted check at these costs, one per charge.
    pub(crate) fn of_costs(check: Check, admitted: &Decision, costs: Vec<Option<u64>>) -> Self {
        let mut costs = costs.into_iter();
        Self::new(check, admitted, |_| costs.next().flatten())
    }

    /// Settles a check that was admitted elsewhere, such as in another process. Pass the same
    /// charges, and the decision's [id](Decision::id) and [time](Decision::at).
    ///
    /// If `at` is before the admission, nothing is settled, since the store takes the admission for
    /// a later one with the same id. If `at` is after the admission, the store may not find it. A
    /// late `at` matters for reservations, and for checks that Redis has decided together with
    /// equal checks.
    pub fn by_id(
        check: Check,
        id: AdmissionId,
        at: SystemTime,
        mut cost: impl FnMut(&Charge) -> Option<u64>,
    ) -> Self {
        let costs = check
            .charges()
            .map(|charge| cost(charge).map(|cost| cost.min(charge.limit().most_spent())))
            .collect();
        Self {
            check,
            id,
            at,
            costs,
            is_local: false,
        }
    }

    /// Gives back all units of an admission whose time is not known. Its id is unique, so any time
    /// after the admission will do.
    pub(crate) fn refund_by_id(check: Check, id: AdmissionId) -> Self {
        Self::by_id(check, id, system_time(1 << 52), |_| Some(0))
    }

    /// Makes the reserved units count only from a time `delay` after the admission. The store does
    /// not let units count from a future time. The leases end at the same time as they would
    /// without the delay.
    pub(crate) fn counting_later_by(self, delay: Duration) -> Self {
        // The delay is rounded as leases are, so that the leases end at the same microsecond.
        let delay = delay - Duration::from_nanos((delay.subsec_nanos() % 1_000).into());
        let Some(at) = self.at.checked_add(delay) else {
            return self;
        };
        let check = self.check.map(|charge| match charge.lease() {
            Some(lease) => charge.clone().reserve(lease.saturating_sub(delay)),
            None => charge.clone(),
        });
        Self { at, check, ..self }
    }

    /// The charges of the admitted check, with their actual costs. `None` leaves a charge as it is.
    pub fn accounts(&self) -> impl Iterator<Item = (&Charge, Option<u64>)> {
        iter::zip(self.check.charges(), self.costs.iter().copied())
    }

    /// True if the units may still count at this time.
    #[cfg(feature = "redis")]
    pub(crate) fn may_count_at(&self, now: SystemTime) -> bool {
        self.check.charges().any(|charge| {
            let counts_for = charge.lease().unwrap_or_else(|| charge.limit().window());
            self.at + counts_for > now
        })
    }

    pub(crate) fn at_micros(&self) -> u64 {
        micros_since_epoch(self.at)
    }
}
