//! Closing a limit for a time.

use std::time::Duration;

use super::Limiter;
use crate::{
    check::{Charge, Check},
    error::Error,
    key::Key,
    limit::Limit,
    store::Store,
};

impl<S: Store> Limiter<S> {
    /// Takes all of `limit` for `key` for so long, at most its window, so that everybody is refused until then: for an
    /// upstream that says "too many requests", though we have counted fewer.
    ///
    /// 1. All who share the store are refused, by whichever process, and with the right retry time: callers of
    ///    [`acquire`](Self::acquire) wait for as long as the upstream has said.
    /// 2. Afterwards what was spent before counts as it did. Closing takes nothing for longer, and nothing is forgotten.
    /// 3. A limit that is used up is closed as well. It opens when both the time is over and enough has left the window. Of
    ///    several times, the latest holds.
    /// 4. A [fixed](crate::Algorithm::fixed) window opens when the clock's window ends, and a
    ///    [counter](crate::Algorithm::counter) by little and little, as its estimate of what was spent before falls.
    /// 5. A [reset](Self::reset) opens it.
    /// 6. It is one question, which is never refused. Dropped before the answer, it may have closed the limit or not.
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
    pub async fn pause(&self, limit: &Limit, key: impl Into<Key>, time: Duration) -> Result<(), Error> {
        if time.is_zero() {
            return Ok(());
        }
        let all = Charge::spent(limit.clone(), key, limit.units()).counting_for(time);
        // What this process counts in the store's place closes nothing for others.
        let closed = self.clone().with_share(None).check_all(Check::new(all)).await;
        // Refusals that are remembered would send callers away for too short a time.
        if let Some(local_state) = self.parts.store.local_state() {
            local_state.forget_refusals(limit);
        }
        closed.map(drop)
    }
}
