//! Test support: a store that fails on command. Needs the feature `test-util`, which you enable in
//! `[dev-dependencies]`.
//!
//! | I want to test | with |
//! |---|---|
//! | a route while its store fails, hangs, is slow, or loses replies | [`FaultyStore`] |
//! | that my own store follows the rules for stores | the package `tower-sliding-window-conformance` |
//!
//! # Time
//!
//! 1. A [`MemoryStore`](crate::MemoryStore)'s windows follow tokio's time. So do deadlines, the
//!    breaker, the refusal cache, `acquire`, and a [`FaultyStore`]'s delay. A test that pauses
//!    tokio's time (`#[tokio::test(start_paused = true)]`) moves all of them at once with
//!    `tokio::time::advance`.
//! 2. A [`ManualClock`](crate::store::ManualClock) moves the windows and refusal caches of its
//!    stores. It also works with several threads, and on Redis. It does not move deadlines, the
//!    breaker, `acquire`, or a [`FaultyStore`]'s delay: these follow tokio's time, real or paused.
//! 3. Do not pause time around a store that does I/O, such as `RedisStore`: while the test waits
//!    for a reply, tokio jumps to the next timer. Use a `ManualClock` there.
//!
//! [`guide::testing_your_limits`](crate::guide::testing_your_limits) has an example with paused
//! time, and one with a `ManualClock`.

use std::{
    future::pending,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::time::sleep;

use crate::{
    check::Check,
    decision::{Decision, Settled, Settlement},
    error::{StoreError, StoreErrorKind},
    key::Key,
    limit::Limit,
    local::lock,
    store::{LocalState, Store, StoreFuture},
};

/// A wrapper around a store that fails, hangs, is slow or loses replies on command. Clones share
/// the fault, so a test can keep one clone and give another to a layer.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use tower_sliding_window::{Error, Limit, Limiter, MemoryStore, testing::{Fault, FaultyStore}};
///
/// let store = FaultyStore::new(MemoryStore::new());
/// let limiter = Limiter::new(store.clone());
/// let limit = Limit::per_minute("reports", 10);
/// assert!(limiter.check(&limit, "ada", 1).await?.is_allowed());
///
/// store.set(Fault::Fails);
/// assert!(matches!(limiter.check(&limit, "ada", 1).await, Err(Error::Unavailable(_))));
///
/// store.set(Fault::None);
/// assert_eq!(limiter.check(&limit, "ada", 1).await?.binding().used, 2);
/// assert_eq!(store.calls(), 3);
/// # Ok(()) }
/// ```
///
/// # Behind a refusal cache and a breaker
///
/// 1. Five failures in a row open the [breaker](crate::limiter::Breaker), as in production. The
///    store is then not called, so [`calls`](Self::calls) no longer grows with each request. After
///    the fault has ended, callers reach the store again only after a probe, at most 200 ms later.
///    The first probe starts when a request finds the breaker open. To test a single fault, you may
///    prefer [no breaker](crate::limiter::Breaker::OFF).
/// 2. A `FaultyStore` passes on the [local state](Store::local_state) of the inner store, so
///    refusal cache and breaker behave as they do there. In front of `RedisStore`, a cached refusal
///    is repeated even while the store fails. In front of `MemoryStore`, which has no local state,
///    each limiter has its own breaker, and refusals are not cached.
/// 3. [`with_local_state`](Self::with_local_state) gives a `MemoryStore` a breaker and a refusal
///    cache for all its limiters, like those of `RedisStore`, but no prefetch.
/// 4. Like `RedisStore`, a `FaultyStore` never decides [without a future](Store::decide_now).
#[derive(Clone, Debug)]
#[must_use]
pub struct FaultyStore {
    store: Arc<dyn Store>,
    local_state: Option<LocalState>,
    fault: Arc<Mutex<Fault>>,
    calls: Arc<AtomicUsize>,
    /// Each hanging call holds a weak reference to this.
    hanging: Arc<()>,
}

/// How a [`FaultyStore`] treats calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// The inner store replies.
    #[default]
    None,
    /// The call fails at once. The inner store is not asked.
    Fails,
    /// The call never ends. The inner store is not asked.
    Hangs,
    /// The inner store is asked after this time, by tokio's clock. If the caller gives up earlier,
    /// nothing is counted.
    Slow(Duration),
    /// The inner store decides and counts, but the caller gets an error.
    LosesReplies,
}

impl FaultyStore {
    /// A store that works until a test sets a fault.
    pub fn new(store: impl Store) -> Self {
        Self {
            store: Arc::new(store),
            local_state: None,
            fault: Arc::default(),
            calls: Arc::default(),
            hanging: Arc::default(),
        }
    }

    /// Gives the store its own [local state](Store::local_state), like that of `RedisStore`. All
    /// limiters and layers on the store's clones then share a breaker and a refusal cache. Default:
    /// the inner store's local state.
    ///
    /// The breaker and the refusal cache follow tokio's time. After a test advances a
    /// [`ManualClock`](crate::store::ManualClock), the refusal cache may still refuse for up to a
    /// second. Advancing tokio's paused time also moves the refusal cache.
    pub fn with_local_state(self) -> Self {
        Self {
            local_state: Some(LocalState::default()),
            ..self
        }
    }

    /// Sets the fault for all calls that begin from now on.
    pub fn set(&self, fault: Fault) {
        *lock(&self.fault) = fault;
    }

    /// The number of checks, settlements and resets so far, including the breaker's probes.
    #[must_use]
    pub fn calls(&self) -> usize {
        self.calls.load(Ordering::SeqCst)
    }

    /// The number of hanging calls whose callers are still waiting.
    #[must_use]
    pub fn hanging(&self) -> usize {
        Arc::weak_count(&self.hanging)
    }

    /// Counts a call, and forwards it unless the fault prevents that. The refusals cached for the
    /// `outdated` keys are discarded before and after the call.
    fn reply<T: Send + 'static>(
        &self,
        doing: &'static str,
        call: impl FnOnce(&dyn Store) -> StoreFuture<T> + Send + 'static,
        outdated: Vec<(Limit, Key)>,
    ) -> StoreFuture<T> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        let store = Arc::clone(&self.store);
        let local_state = self.local_state.clone();
        let fault = *lock(&self.fault);
        let hanging = (fault == Fault::Hangs).then(|| Arc::downgrade(&self.hanging));
        Box::pin(async move {
            let _hanging = hanging;
            let kind = StoreErrorKind::Other;
            match fault {
                Fault::None | Fault::LosesReplies => {}
                Fault::Fails => return Err(StoreError::new(doing, kind, "out of order")),
                Fault::Hangs => pending().await,
                Fault::Slow(time) => sleep(time).await,
            }
            let _outdated = local_state
                .map(|state| state.outdate(outdated.iter().map(|(limit, key)| (limit, key)), None));
            let reply = call(&*store).await?;
            if fault == Fault::LosesReplies {
                return Err(StoreError::new(doing, kind, "the reply was lost"));
            }
            Ok(reply)
        })
    }
}

impl Store for FaultyStore {
    fn decide(&self, check: Check) -> StoreFuture<Decision> {
        self.reply("deciding a check", |store| store.decide(check), Vec::new())
    }

    fn decide_within(&self, check: Arc<Check>, deadline: Duration) -> StoreFuture<Decision> {
        self.reply(
            "deciding a check",
            move |store| store.decide_within(check, deadline),
            Vec::new(),
        )
    }

    fn settle(&self, settlement: Settlement) -> StoreFuture<Settled> {
        let keys = settlement
            .check
            .charges()
            .map(|charge| (charge.limit().clone(), charge.key().clone()))
            .collect();
        self.reply(
            "settling an admission",
            |store| store.settle(settlement),
            keys,
        )
    }

    fn reset(&self, limit: Limit, key: Key) -> StoreFuture<()> {
        let keys = vec![(limit.clone(), key.clone())];
        self.reply("resetting a key", |store| store.reset(limit, key), keys)
    }

    fn part_of(&self, check: &Check) -> Option<Arc<str>> {
        self.store.part_of(check)
    }

    fn local_state(&self) -> Option<&LocalState> {
        self.local_state
            .as_ref()
            .or_else(|| self.store.local_state())
    }
}
