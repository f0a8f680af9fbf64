//! How a limiter ends in order.

use std::{future::Future, time::Duration};

use super::{Limiter, deadline::Deadline};
use crate::{error::Error, local::Detachable};

impl Limiter {
    /// Ends the limiters and layers on all clones of the store in order: gives back what this
    /// process holds, and completes what is on its way.
    ///
    /// Call `shutdown` last, when the process serves no more requests, and before the runtime ends.
    /// A process that ends without it leaves behind all that it has taken: a place counts until its
    /// [life](crate::Limit::freed_after) is over, a prefetched unit until a window after the life
    /// of its [prefetch](crate::limit::prefetch), and a settlement that was on its way is lost.
    ///
    /// 1. It gives back all units that are held with prefetch.
    /// 2. It frees all places, also those of requests that have not ended, such as streams that are
    ///    open, and of checks that are on their way.
    ///    [`has_lost_place`](crate::Decision::has_lost_place) is true for these then.
    /// 3. It waits for releases of places, settlements, counts, bans and resets that have begun,
    ///    also for those whose caller has left.
    ///
    /// The call ends after `within` at the latest: choose less than the time after which your
    /// platform kills the process. Calls that are still on their way go on as long as the runtime
    /// does. Requests that come later, and callers that wait in line, are decided as usual, and
    /// their places are left behind when the process ends. So stop accepting requests first. With
    /// streams, [call it twice](crate::guide::at_most_n_at_once#restart-without-refusals). A
    /// request that is still in its handler keeps the units that it has
    /// [reserved](crate::limiter::Limiter::reserve) until their lease ends.
    ///
    /// Limiters on a store of your own without a [local state](crate::Store::local_state) know
    /// nothing of each other: end each of them.
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`] if something was still on its way after `within`, such as while the
    /// store does not answer. A check that takes places also counts as on its way if its future is
    /// kept without being polled. [`Error::Unavailable`] without a tokio runtime.
    ///
    /// # Panics
    ///
    /// If something is on its way, and the future is polled in a tokio runtime without time.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tower_sliding_window::Error> {
    /// use std::time::Duration;
    /// use tower_sliding_window::{Limiter, MemoryStore};
    ///
    /// let store = MemoryStore::new();
    /// // axum::serve(listener, app).with_graceful_shutdown(signal).await?;
    /// Limiter::new(store).shutdown(Duration::from_secs(5)).await?;
    /// # Ok(()) }
    /// ```
    pub async fn shutdown(&self, within: Duration) -> Result<(), Error> {
        let core = &self.core;
        let end = async {
            core.owed.give_back();
            if let Some(prefetches) = &core.prefetches {
                prefetches.give_back(|kept| core.hold(kept)).await;
            }
            core.owed.settled().await;
            // Checks that were on their way may have taken further places.
            while core.owed.give_back() {
                core.owed.settled().await;
            }
        };
        Deadline::new(end, within, Duration::ZERO).await
    }

    pub(crate) fn detachable<T: Send>(&self, future: impl Future<Output = T> + Send + 'static) -> Detachable<T> {
        self.core.owed.detachable(future)
    }
}
