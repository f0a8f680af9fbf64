//! The state that the clones of a store share in this process.

use std::{fmt, sync::Arc};

use super::{
    breaker::Breaker,
    breaker_state::{BreakerState, SharedBreaker},
    prefetch::Prefetches,
    refusal_cache::RefusalCache,
    refusals::{Generations, Refusals},
};
use crate::{
    clock::{Clock, ManualClock},
    key::Key,
    limit::Limit,
};

/// The state that the clones of a store share in this process, and so all limiters and layers on them: see
/// [`Store::local_state`](crate::Store::local_state).
///
/// 1. It holds the [`Breaker`], which knows whether the store answers, the [`RefusalCache`], which knows what the store has
///    refused, and the [prefetch](crate::limit::prefetch) of units that limiters spend without asking the store.
/// 2. All clones of a store return the same local state. A store that wraps another returns the other's, if it passes limits
///    and keys on unchanged.
/// 3. A remembered refusal holds until units are given back. So the store [forgets the refusals](Self::forget_refusals) of a
///    limit whenever a key is reset or an admission settled through it.
#[derive(Clone)]
pub struct LocalState(Arc<SharedState>);

/// A call to the store is on its way that makes outdated what this process remembers of some limits: see [`LocalState::outdate`].
#[must_use]
pub(crate) struct Outdated {
    state: LocalState,
    limits: Vec<Limit>,
    prefetches_of: Option<Key>,
}

#[derive(Clone)]
struct SharedState {
    generations: Arc<Generations>,
    breaker: Arc<BreakerState>,
    refusals: Arc<Refusals>,
    prefetches: Option<Arc<Prefetches>>,
}

impl LocalState {
    /// A local state on tokio's monotonic clock, which a test may pause.
    #[must_use]
    pub fn new() -> Self {
        Self::on(Clock::monotonic())
    }

    /// A local state by a clock that a test moves, such as the one of a conformance test.
    #[must_use]
    pub fn by(clock: &ManualClock) -> Self {
        Self::on(Clock::Manual(clock.clone()))
    }

    pub(crate) fn on(clock: Clock) -> Self {
        let generations = Arc::new(Generations::new(clock));
        let refusals = Arc::new(Refusals::new(RefusalCache::new(), Arc::clone(&generations)));
        let breaker = Arc::new(BreakerState::new(Breaker::new()));
        Self(Arc::new(SharedState { generations, breaker, refusals, prefetches: None }))
    }

    /// The same local state, with [prefetch](crate::limit::prefetch). Default: no prefetches, so every check asks the store.
    ///
    /// The store gets a prefetch as a charge with a lease that is longer than the window. The units of the prefetch are reserved. They count
    /// until the lease ends, even if the clock has stepped back. The settlement of the prefetch has the spent units as its cost. They
    /// count until a window after the settlement, or until the lease ends if that is earlier. The time of the settlement may be
    /// later than that of the admission.
    #[must_use]
    pub fn with_prefetch(self) -> Self {
        let prefetches = Some(Arc::new(Prefetches::new(self.0.generations.clock())));
        Self(Arc::new(SharedState { prefetches, ..(*self.0).clone() }))
    }

    /// Forgets all refusals of a limit, whatever the key. A store calls it twice: before it sends something that gives units
    /// back, and when that is done, so that no refusal from in between is repeated.
    pub fn forget_refusals(&self, limit: &Limit) {
        self.0.generations.advance(limit);
    }

    /// Forgets the refusals of these limits, and with a key gives back the prefetches of it, now and again when the returned guard is
    /// dropped: when the call is over, or goes on without its caller. So nothing that was learnt in between stays.
    pub(crate) fn outdate(&self, limits: Vec<Limit>, prefetches_of: Option<Key>) -> Outdated {
        let outdated = Outdated { state: self.clone(), limits, prefetches_of };
        outdated.forget();
        outdated
    }

    /// The prefetches of all limiters on the store.
    pub(crate) fn prefetches(&self) -> Option<Arc<Prefetches>> {
        self.0.prefetches.clone()
    }

    /// The breaker of all limiters on the store.
    pub(crate) fn breaker(&self) -> SharedBreaker {
        SharedBreaker::of(&self.0.breaker)
    }

    /// The refusals of all limiters on the store.
    pub(crate) fn refusals(&self) -> Arc<Refusals> {
        Arc::clone(&self.0.refusals)
    }

    /// The refusals of one limiter with settings of its own; `None` if it remembers none.
    pub(crate) fn own_refusals(&self, settings: RefusalCache) -> Option<Arc<Refusals>> {
        (!settings.max_age.is_zero()).then(|| Arc::new(Refusals::new(settings, Arc::clone(&self.0.generations))))
    }
}

impl Outdated {
    fn forget(&self) {
        for limit in &self.limits {
            self.state.forget_refusals(limit);
            if let (Some(prefetches), Some(key)) = (&self.state.0.prefetches, &self.prefetches_of) {
                prefetches.drop_prefetches_of(limit, key);
            }
        }
    }
}

impl Drop for Outdated {
    fn drop(&mut self) {
        self.forget();
    }
}

impl Default for LocalState {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for LocalState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalState")
            .field("breaker", &self.0.breaker)
            .field("refusal_cache", &self.0.refusals)
            .field("prefetch", &self.0.prefetches)
            .finish_non_exhaustive()
    }
}
