//! A limiter and its settings.

use std::{borrow::Cow, sync::Arc, time::Duration};

use super::{
    deadline::Deadline,
    failure::{LocalStore, Share},
    lines::Lines,
};
use crate::{
    local::{Breaker, LocalState, Prefetches, RefusalCache, Refusals, SharedBreaker},
    status::RETRY_RESERVED_AFTER,
    store::Store,
};

const DEFAULT_DEADLINE: Duration = Duration::from_millis(50);

/// A store with a deadline, a refusal cache, a breaker, and a share for when the store fails. Cheap to clone; clones share all
/// of it. See the [module docs](super).
#[derive(Clone, Debug)]
pub struct Limiter {
    pub(super) core: Arc<Core>,
    pub(super) share: Option<Share>,
}

/// The shared part of a limiter. Changing a setting copies it.
#[derive(Clone, Debug)]
pub(super) struct Core {
    pub(super) store: Arc<dyn Store>,
    pub(super) deadline: Duration,
    pub(super) retry_reserved_after: Duration,
    /// The name of the layer whose limiter this is, for metrics. Empty without a layer, or without a name.
    pub(super) layer: Cow<'static, str>,
    /// `None` if no refusal is remembered.
    pub(super) refusals: Option<Arc<Refusals>>,
    pub(super) breaker: SharedBreaker,
    /// `None` if the store has no prefetches.
    pub(super) prefetches: Option<Arc<Prefetches>>,
    pub(super) lines: Lines,
    pub(super) local: LocalStore,
}

impl Limiter {
    /// A limiter on `store` with a deadline of 50 ms. It uses the refusal cache and the breaker of the store's
    /// [local state](Store::local_state), if it has one.
    #[must_use]
    pub fn new(store: impl Store) -> Self {
        let (refusals, breaker) = (
            store.local_state().map(LocalState::refusals),
            store.local_state().map_or_else(|| SharedBreaker::new(Breaker::new()), LocalState::breaker),
        );
        let prefetches = store.local_state().and_then(LocalState::prefetches);
        let core = Core {
            store: Arc::new(store),
            deadline: DEFAULT_DEADLINE,
            retry_reserved_after: RETRY_RESERVED_AFTER,
            layer: Cow::Borrowed(""),
            refusals,
            breaker,
            prefetches,
            lines: Lines::default(),
            local: LocalStore::default(),
        };
        Self { core: Arc::new(core), share: None }
    }

    /// Sets how long any call to the store may take. Default: 50 ms.
    #[must_use]
    pub fn deadline(self, deadline: Duration) -> Self {
        self.set(|core| core.deadline = deadline)
    }

    /// Sets the retry time of a check that only [reserved](crate::Charge::reserve) units refuse, since they may be given
    /// back at any time. Default: one second. It is shorter if a lease ends before, and longer if other units refuse for
    /// longer: see the rules of a [`decision`](crate::decision).
    ///
    /// [`acquire`](Self::acquire) asks again after this time, and a [`RefusalCache`] remembers such a refusal for no longer.
    #[must_use]
    pub fn retry_reserved_after(self, wait: Duration) -> Self {
        self.set(|core| core.retry_reserved_after = wait)
    }

    /// Gives this limiter and its clones a refusal cache of their own. Default: that of the store, with the settings of
    /// [`RefusalCache::new`].
    #[must_use]
    pub fn refusal_cache(self, refusal_cache: RefusalCache) -> Self {
        self.set(|core| core.refusals = core.store.local_state().and_then(|state| state.own_refusals(refusal_cache)))
    }

    /// Gives this limiter and its clones a breaker of their own. Default: that of the store, with the settings of
    /// [`Breaker::new`].
    #[must_use]
    pub fn breaker(self, breaker: Breaker) -> Self {
        self.set(|core| core.breaker = SharedBreaker::new(breaker))
    }

    /// Decides in this process, under a share of each limit, while the store cannot. Default: a failure of the store is an
    /// [`Error`](crate::Error).
    ///
    /// ```
    /// # #[cfg(feature = "redis")]
    /// # async fn call() -> Result<(), Box<dyn std::error::Error>> {
    /// use tower_sliding_window::{Limit, Limiter, RedisStore, limiter::Share};
    ///
    /// let store = RedisStore::builder("redis://127.0.0.1:6379").build()?;
    /// let limiter = Limiter::new(store).fail_local(Share::one_of(8));
    /// let decision = limiter.check(&Limit::per_day("upstream", 9_500), "account-7", 1).await?;
    /// if let Some(error) = decision.local_cause() {
    ///     println!("{} of this process's share left: {error}", decision.remaining());
    /// }
    /// # Ok(()) }
    /// ```
    #[must_use]
    pub fn fail_local(self, share: Share) -> Self {
        self.with_share(Some(share))
    }

    /// Sets or removes the share under which this process decides in the store's place.
    pub(crate) fn with_share(self, share: Option<Share>) -> Self {
        Self { share, ..self }
    }

    pub(crate) fn share(&self) -> Option<Share> {
        self.share
    }

    /// Counts decisions and failures under the name of a layer.
    pub(crate) fn in_layer(self, name: Cow<'static, str>) -> Self {
        self.set(|core| core.layer = name)
    }

    fn set(mut self, change: impl FnOnce(&mut Core)) -> Self {
        change(Arc::make_mut(&mut self.core));
        self
    }

    /// Gives a future that is no decision the limiter's deadline.
    pub(crate) fn within<F>(&self, future: F) -> Deadline<F> {
        self.within_after(future, Duration::ZERO)
    }

    /// The same, for a request that has `waited` already.
    pub(crate) fn within_after<F>(&self, future: F, waited: Duration) -> Deadline<F> {
        Deadline::new(future, self.core.deadline, waited)
    }
}
