//! Settlement: saying afterwards what an admitted check has really cost.
//!
//! 1. A charge that [reserves](crate::Charge::reserve) counts at its cost from the decision on. Settled, it counts at its
//!    true cost instead, as of when it was admitted; at a cost of 0 it is as if it had never been.
//! 2. A true cost may be above the reserved one, and even above the limit: what was spent was spent. It is counted, and
//!    whoever comes next is refused until enough has left the window.
//! 3. A settlement counts once, however often it is sent. A second one changes nothing and says so:
//!    [`Settled::was_applied`].
//! 4. A settlement that comes after the lease still counts what was used, as of the admission, as long as the admission
//!    would be in its window. So a lease can be much shorter than the window: it only says for how long the estimate
//!    counts without a settlement. One that comes after the window changes nothing.
//! 5. A store forgets that an admission was settled: after a settlement at a cost of 0, and under another
//!    [algorithm](crate::algorithm) than the log after any settlement in time. A second settlement after the lease then
//!    counts again. So settle an admission in one place. A settlement that the store itself sends again, since a reply was
//!    lost, comes within seconds: it counts twice only if the lease ends in between.
//! 6. A charge of 0 units leaves no admission to settle: reserve at least one unit.
//! 7. An admission that was not reserved can be settled by its id, too, if its limit counts by a
//!    [log](crate::Algorithm::log), or if the id was the caller's own.
//!
//! [`Limiter::reserve`](crate::Limiter::reserve) does all of this for one limit. For several, and for stores:
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use std::time::Duration;
//! use tower_sliding_window::{Charge, Check, Limit, Limiter, MemoryStore, Settlement};
//!
//! let (requests, tokens) = (Limit::per_minute("requests", 60), Limit::per_hour("tokens", 10_000));
//! let check = Check::new(Charge::new(requests, "ada", 1)?)
//!     .and(Charge::new(tokens.clone(), "ada", 2_000)?.reserve(Duration::from_secs(120)))?;
//!
//! let limiter = Limiter::new(MemoryStore::new());
//! let decision = limiter.check_all(check.clone()).await?;
//! assert!(decision.is_allowed());
//!
//! // The answer took 1,234 tokens; the request stays one request.
//! let settlement = Settlement::new(check, &decision, |charge| (charge.limit() == &tokens).then_some(1_234));
//! assert!(limiter.settle(settlement).await?.was_applied());
//! assert_eq!(limiter.peek(&tokens, "ada").await?.used(), 1_234);
//! # Ok(()) }
//! ```

use std::{
    iter,
    time::{Duration, SystemTime},
};

use crate::{
    admission::AdmissionId,
    check::{Charge, Check},
    decision::{Decision, LimitStatus},
};

/// What an admitted check has really cost. See the [module docs](self).
#[derive(Clone, Debug)]
#[must_use = "a settlement settles nothing until a store or a limiter gets it"]
pub struct Settlement {
    check: Check,
    id: AdmissionId,
    at: SystemTime,
    /// One for each charge of the check.
    costs: Vec<Option<u64>>,
    is_local: bool,
}

/// A charge of an admitted check, and what it has really cost, if that is to be settled.
#[derive(Clone, Copy, Debug)]
pub struct Account<'a> {
    charge: &'a Charge,
    cost: Option<u64>,
}

/// What came of a settlement.
#[derive(Clone, Debug)]
pub struct Settled {
    decision: Decision,
    is_known: bool,
}

impl Settlement {
    /// Settles an admitted check. `cost` says of each charge what it has really cost; `None` leaves it as it is. A cost
    /// above both the limit and 2^32 is settled as the larger of them: the key is closed until it leaves either way.
    pub fn new(check: Check, admitted: &Decision, cost: impl FnMut(&Charge) -> Option<u64>) -> Self {
        let is_local = admitted.local_cause().is_some();
        let check = if is_local { check.on_limits(admitted.statuses().map(LimitStatus::limit)) } else { check };
        Self { is_local, ..Self::by_id(check, admitted.id(), admitted.at(), cost) }
    }

    /// Gives back all that an admitted check has taken. The check has to be the one that was admitted, to the unit.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use tower_sliding_window::{Charge, Check, Limit, Limiter, MemoryStore, Settlement};
    ///
    /// const JOBS: Limit = Limit::per_day("jobs", 100);
    ///
    /// let limiter = Limiter::new(MemoryStore::new());
    /// let check = Check::new(Charge::new(JOBS, "ada", 5)?);
    /// let decision = limiter.check_all(check.clone()).await?;
    /// // The job has failed, and is not to count.
    /// let settled = limiter.settle(Settlement::refund(check, &decision)).await?;
    /// assert!(settled.was_applied() && settled.decision().used() == 0);
    /// # Ok(()) }
    /// ```
    ///
    /// Under a limit of another [algorithm](crate::algorithm) than the log, only what was reserved, or given an id of the
    /// caller's, can be given back.
    pub fn refund(check: Check, admitted: &Decision) -> Self {
        Self::new(check, admitted, |_| Some(0))
    }

    /// Settles an admitted check whose [`Decision`] is not at hand, as in another process: by the same charges, and the
    /// [id](Decision::id) and the [time](Decision::at) of the decision. A time before the admission settles nothing: what
    /// was admitted later under the same id is another admission. One after it finds what was neither reserved nor decided
    /// together with equal checks.
    pub fn by_id(check: Check, id: AdmissionId, at: SystemTime, mut cost: impl FnMut(&Charge) -> Option<u64>) -> Self {
        let costs =
            check.charges().map(|charge| cost(charge).map(|cost| cost.min(charge.limit().most_spent()))).collect();
        Self { check, id, at, costs, is_local: false }
    }

    /// The same, with the units counting as of so much later than the admission, but not after now: those that were reserved,
    /// for longer than that. Their leases end when they did.
    pub(crate) fn counting_later_by(self, delay: Duration) -> Self {
        // As exactly as leases are counted, so that they end at the same microsecond.
        let delay = delay - Duration::from_nanos((delay.subsec_nanos() % 1_000).into());
        match self.at.checked_add(delay) {
            Some(at) => Self { at, check: self.check.with_leases_shorter_by(delay), ..self },
            None => self,
        }
    }

    /// The check as it was admitted.
    pub fn check(&self) -> &Check {
        &self.check
    }

    /// The id of the admission.
    #[must_use]
    pub fn id(&self) -> AdmissionId {
        self.id
    }

    /// When it was admitted, by the store's clock.
    #[must_use]
    pub fn at(&self) -> SystemTime {
        self.at
    }

    /// The charges of the check, and what each has really cost.
    pub fn accounts(&self) -> impl Iterator<Item = Account<'_>> {
        iter::zip(self.check.charges(), &self.costs).map(|(charge, cost)| Account { charge, cost: *cost })
    }

    /// Whether the admission was decided in this process, in the store's place.
    pub(crate) fn is_local(&self) -> bool {
        self.is_local
    }

    pub(crate) fn at_micros(&self) -> u64 {
        let since = self.at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
    }
}

impl<'a> Account<'a> {
    /// The charge as it was admitted.
    #[must_use]
    pub fn charge(&self) -> &'a Charge {
        self.charge
    }

    /// What it has really cost; `None` if it stays as it is.
    #[must_use]
    pub fn cost(&self) -> Option<u64> {
        self.cost
    }
}

impl Settled {
    /// A store's answer: how each limit stands now, and whether any of them still knew an admission that was to be
    /// settled.
    pub fn new(
        settlement: &Settlement,
        at: SystemTime,
        is_known: bool,
        mut status: impl FnMut(Account<'_>) -> LimitStatus,
    ) -> Self {
        let mut costs = settlement.costs.iter();
        let decision = Decision::new(&settlement.check, at, settlement.id, |charge| {
            status(Account { charge, cost: costs.next().copied().flatten() })
        });
        Self::of(decision, is_known)
    }

    pub(crate) fn of(decision: Decision, is_known: bool) -> Self {
        Self { decision, is_known }
    }

    /// Whether it was counted, under at least one of the limits. If not, it was settled before, or its window had ended, or
    /// it was given back after its lease, and nothing has changed. Where the reply to a first try was lost, and it was sent again, the
    /// second cannot tell, and says yes.
    #[must_use]
    pub fn was_applied(&self) -> bool {
        self.is_known
    }

    /// How the limits stand after it.
    pub fn decision(&self) -> &Decision {
        &self.decision
    }
}
