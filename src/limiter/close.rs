//! Closing a limit for a time.

use std::time::Duration;

use super::Limiter;
use crate::{
    algorithm::Kind,
    check::{Charge, Check},
    decision::Decision,
    error::Error,
    key::Key,
    limit::Limit,
    settlement::Settlement,
    store::Store,
};

/// How often to reserve what is left. After each race that is lost, twice of what others have spent in it is left to them.
const ATTEMPTS: u32 = 8;

impl<S: Store> Limiter<S> {
    /// Takes all of `limit` for `key` for so long, at most its window, so that everybody is refused until then: for an
    /// upstream that says "too many requests", though we have counted fewer.
    ///
    /// 1. All who share the store are refused, by whichever process, and with the right retry time: callers of
    ///    [`acquire`](Self::acquire) wait for as long as the upstream has said.
    /// 2. Afterwards what was spent before counts as it did. Closing takes nothing for longer, and nothing is forgotten.
    /// 3. A limit that is used up is left as it is: it refuses until its oldest unit leaves the window, even if that is
    ///    sooner. A caller that is told again to stay away closes it again.
    /// 4. A [compact](crate::Algorithm::compact) log may stay closed for up to a sub-window longer. A
    ///    [fixed](crate::Algorithm::fixed) window opens when the clock's window ends, and a
    ///    [counter](crate::Algorithm::counter) by little and little, as its estimate of what was spent before falls.
    /// 5. What others spend while it is being closed is theirs. A [reset](Self::reset) opens it.
    /// 6. It takes several questions, ten at most, where others spend meanwhile: mostly three. The
    ///    [`deadline`](Self::deadline) is that of each. Dropped in between, it may have closed the limit or not.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tower_sliding_window::Error> {
    /// use std::time::Duration;
    /// use tower_sliding_window::{Limit, Limiter, MemoryStore};
    ///
    /// const CALLS: Limit = Limit::per_hour("calls", 5_000);
    ///
    /// let limiter = Limiter::new(MemoryStore::new());
    /// // The upstream has answered 429 with `Retry-After: 30`.
    /// limiter.close(&CALLS, "token-7", Duration::from_secs(30)).await?;
    /// let refused = limiter.check(&CALLS, "token-7", 1).await?;
    /// assert!(refused.retry_after().is_some_and(|wait| wait <= Duration::from_secs(30)));
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`] past the deadline, [`Error::Unavailable`] if the store fails, [`Error::BreakerOpen`] if it has
    /// failed repeatedly. It may be tried again.
    pub async fn close(&self, limit: &Limit, key: impl Into<Key>, time: Duration) -> Result<(), Error> {
        // What this process counts in the store's place closes nothing for others.
        let limiter = self.clone().with_share(None);
        let key = key.into();
        let mut left = if time.is_zero() { 0 } else { limiter.peek(limit, key.clone()).await?.remaining() };
        let mut spared = 0;
        for _ in 0..ATTEMPTS {
            if left == 0 {
                break;
            }
            let charge = Charge::new(limit.clone(), key.clone(), left.saturating_sub(spared).max(1))?.reserve(time);
            let decision = limiter.check_all(Check::new(charge.clone())).await?;
            spared = if !decision.is_allowed() {
                2 * left.saturating_sub(decision.remaining())
            } else if matches!(limit.algorithm().kind(), Kind::Log | Kind::Compact { .. }) {
                return self.take_all(charge, &decision).await;
            } else {
                0
            };
            left = decision.remaining();
        }
        Ok(())
    }

    /// Lets a reservation count for all of its limit until its lease ends, so that no unit that leaves before makes room.
    async fn take_all(&self, reserved: Charge, decision: &Decision) -> Result<(), Error> {
        let (limit, lease) = (reserved.limit().clone(), reserved.lease().unwrap_or_default());
        // Settled units count for a window from their admission. Reserved for a whole window at an earlier time, they
        // would have been recorded as these are, and leave when the lease ends.
        let Some(at) = decision.at().checked_sub(limit.window().saturating_sub(lease)) else { return Ok(()) };
        let check = Check::new(reserved.reserve(limit.window()));
        self.settle(Settlement::by_id(check, decision.id(), at, |_| Some(limit.units()))).await?;
        Ok(())
    }
}
