//! For tests of limits: a store that fails on command. This module needs the feature `test-util`,
//! which you enable in `[dev-dependencies]`.
//!
//! | I want to test | with |
//! |---|---|
//! | a route while its store fails, hangs, is slow, or loses replies | [`FaultyStore`] |
//! | that a store of my own keeps the rules of a store | the package `tower-sliding-window-conformance` |
//!
//! # Time
//!
//! 1. The windows of a [`MemoryStore`](crate::MemoryStore) follow tokio's time. So do deadlines,
//!    the breaker, the refusal cache, `acquire`, and the delay of a [`FaultyStore`]. A test that
//!    pauses tokio's time (`#[tokio::test(start_paused = true)]`) moves all of these at once by
//!    `tokio::time::advance`.
//! 2. A [`ManualClock`](crate::store::ManualClock) moves the windows and the refusal cache of the
//!    stores that have this clock, also on several threads and on Redis. A `ManualClock` does not
//!    move deadlines, the breaker, `acquire`, or the delay of a [`FaultyStore`]. All of these
//!    follow tokio's time, real or paused.
//! 3. Do not pause the time around a store that does input and output, such as `RedisStore`: tokio
//!    then moves the time to the next timer while the test waits for a reply. Use a `ManualClock`
//!    for such a store.
//!
//! [`guide::testing_your_limits`](crate::guide::testing_your_limits) has an example of a test with
//! paused time, and of a test with a `ManualClock`.

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

/// A store that wraps another store, and fails, hangs, is slow or loses replies when a test says
/// so. Clones share the fault, so a test keeps one clone and gives another clone to a layer.
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
/// 1. Five failures in a row open the [breaker](crate::limiter::Breaker), as they do in production.
///    While the breaker is open, the store is not called, so [`calls`](Self::calls) no longer grows
///    with each request. After the fault has ended, callers reach the store again only after a
///    probe, at most 200 ms later. The first probe begins when a request meets the open breaker. A
///    test of a single fault may prefer [no breaker](crate::limiter::Breaker::OFF).
/// 2. A `FaultyStore` passes on the [local state](Store::local_state) of the store inside, so the
///    refusal cache and the breaker behave as on the store inside. In front of `RedisStore`, a
///    remembered refusal is repeated even while the store fails. In front of `MemoryStore`, which
///    has no local state, each limiter has a breaker of its own, and no refusal is remembered.
/// 3. [`with_local_state`](Self::with_local_state) gives a `MemoryStore` a breaker and a refusal
///    cache for all of its limiters, as `RedisStore` has them, but no prefetch.
/// 4. A `FaultyStore` never decides [without a future](Store::decide_now), and neither does
///    `RedisStore`.
#[derive(Clone, Debug)]
#[must_use]
pub struct FaultyStore {
    store: Arc<dyn Store>,
    local_state: Option<LocalState>,
    fault: Arc<Mutex<Fault>>,
    calls: Arc<AtomicUsize>,
    /// Each call that hangs holds a weak reference to this value.
    hanging: Arc<()>,
}

/// The way in which a [`FaultyStore`] treats calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// The store inside replies.
    #[default]
    None,
    /// The call fails at once, and the store inside is not asked.
    Fails,
    /// The call never ends, and the store inside is not asked.
    Hangs,
    /// The store inside is asked after this time, by tokio's clock. A caller that gives up before
    /// this time has counted nothing.
    Slow(Duration),
    /// The store inside decides and counts, and the caller gets an error.
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

    /// Gives the store a [local state](Store::local_state) of its own, as `RedisStore` has one. All
    /// limiters and layers on clones of the store then share a breaker and a refusal cache.
    /// Default: the local state of the store inside.
    ///
    /// The breaker and the refusal cache go by tokio's time. So a test that advances a
    /// [`ManualClock`](crate::store::ManualClock) may still be refused by the refusal cache for up
    /// to a second. A test that advances tokio's paused time moves the refusal cache, too.
    pub fn with_local_state(self) -> Self {
        Self {
            local_state: Some(LocalState::default()),
            ..self
        }
    }

    /// Sets the fault of all calls that begin from now on.
    pub fn set(&self, fault: Fault) {
        *lock(&self.fault) = fault;
    }

    /// The number of checks, settlements and resets so far, with the breaker's probes.
    #[must_use]
    pub fn calls(&self) -> usize {
        self.calls.load(Ordering::SeqCst)
    }

    /// The number of calls that hang, and that no caller has given up yet.
    #[must_use]
    pub fn hanging(&self) -> usize {
        Arc::weak_count(&self.hanging)
    }

    /// Counts a call, and calls the store inside, unless the fault prevents the call. The refusal
    /// cache forgets the refusals of the `outdated` keys before and after the call.
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
