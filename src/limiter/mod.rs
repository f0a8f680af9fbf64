//! The limiter: rate limiting without HTTP, for upstream calls, jobs, and other kinds of services.
//!
//! 1. [`check`](Limiter::check) spends units, [`acquire`](Limiter::acquire) waits for units and
//!    spends them, [`peek`](Limiter::peek) shows where a limit stands,
//!    [`reserve`](Limiter::reserve) spends units that are [settled](Limiter::settle) later,
//!    [`block`](Limiter::block) takes all units for a time, and [`reset`](Limiter::reset) forgets a
//!    key.
//! 2. Every call to the store ends within the [`deadline`](Limiter::deadline), which covers
//!    queueing, connecting and the reply. By default it follows the store's round trip. It starts
//!    with the first poll, and needs a timer only if the store makes the caller wait. A method
//!    makes at most one call, except [`acquire`](Limiter::acquire) and
//!    [`shutdown`](Limiter::shutdown).
//! 3. Admissions and refusals are both a [`Decision`](crate::Decision). If a check cannot be
//!    decided, the result is a typed [`Error`].
//! 4. A check whose refusal is in the [refusal cache](Limiter::refusal_cache) is refused without
//!    asking the store.
//! 5. While a store keeps failing, checks get an error at once, and only probes go to the store:
//!    see [`Breaker`].
//! 6. While the store cannot decide, this process may decide under a share of each limit: see
//!    [`Share`].
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tower_sliding_window::Error> {
//! use tower_sliding_window::{Limit, Limiter, MemoryStore};
//!
//! // 5000 calls an hour for each access token of an upstream service.
//! const CALLS: Limit = Limit::per_hour("calls", 5_000);
//!
//! let limiter = Limiter::new(MemoryStore::new());
//! match limiter.check(&CALLS, "token-7", 1).await? {
//!     decision if decision.is_allowed() => assert_eq!(decision.remaining(), 4_999),
//!     decision => println!("wait {:?}", decision.retry_after()),
//! }
//! assert_eq!(limiter.peek(&CALLS, "token-7").await?.remaining(), 4_999);
//! # Ok(()) }
//! ```

mod acquire;
mod deadline;
mod decide;
mod failure;
mod lines;
mod places;
mod prefetch;
mod settle;

use std::{borrow::Cow, fmt, future::Future, sync::Arc, time::Duration};

pub(crate) use self::{deadline::Deadline, decide::Asking};
pub use self::{
    failure::{FailureMode, Share},
    settle::Reservation,
};
use self::{lines::Lines, places::Renewals};
pub use crate::local::Breaker;
use crate::{
    decision::RETRY_RESERVED_AFTER,
    error::Error,
    local::{
        Crowded, Detachable, Owed, Prefetches, Refusals, RoundTrip, SHORTEST_DEADLINE,
        SharedBreaker,
    },
    logging::warn,
    store::{MemoryStore, Store},
};

/// A store with a deadline, a refusal cache, a breaker, and a share for when the store fails. Cheap
/// to clone; clones share all of these. See the [module docs](self).
#[derive(Clone, Debug)]
#[must_use]
pub struct Limiter {
    core: Arc<Core>,
    /// The behavior when the store cannot decide. If the mode has no share, the caller gets an
    /// error.
    pub(crate) failure_mode: FailureMode,
}

/// The settings and state that a limiter's clones share. A clone whose setting is changed gets its
/// own copy.
#[derive(Clone)]
struct Core {
    store: Arc<dyn Store>,
    /// `None` if the deadline follows the store's round trip.
    deadline: Option<Duration>,
    retry_reserved_after: Duration,
    /// The layer's name in metrics. Empty if there is no layer, or if the layer has no name.
    layer: Cow<'static, str>,
    /// `None` if the limiter does not cache refusals.
    refusals: Option<Refusals>,
    breaker: SharedBreaker,
    /// The store's round trip. Zero if the store does not report it.
    round_trip: Arc<RoundTrip>,
    /// The checks whose failures the breaker does not count.
    crowded: Option<Arc<Crowded>>,
    /// `None` if the store has no prefetches.
    prefetches: Option<Arc<Prefetches>>,
    lines: Arc<Lines>,
    /// The places held by the limiter's decisions.
    renewals: Arc<Renewals>,
    /// Work that must finish before shutdown. If the store has a local state, all limiters on the
    /// store's clones share this list.
    owed: Arc<Owed>,
    /// Decides checks in this process while the store cannot decide: see [`Share`].
    local: MemoryStore,
}

/// Does the same as [`Limiter::new`].
impl<S: Store> From<S> for Limiter {
    fn from(store: S) -> Self {
        Self::new(store)
    }
}

impl Limiter {
    /// A limiter on `store`. It uses the refusal cache and breaker from the store's [local
    /// state](Store::local_state), if there is one.
    pub fn new(store: impl Store) -> Self {
        let local_state = store.local_state();
        let round_trip = local_state.map(|state| Arc::clone(&state.round_trip));
        let crowded = local_state.map(|state| Arc::clone(&state.crowded));
        let core = Core {
            deadline: None,
            retry_reserved_after: RETRY_RESERVED_AFTER,
            layer: Cow::Borrowed(""),
            refusals: local_state.map(|state| state.refusals.clone()),
            breaker: match local_state {
                Some(state) => state.breaker(),
                None => SharedBreaker::new(Breaker::default()),
            },
            crowded,
            round_trip: round_trip.unwrap_or_else(|| Arc::new(RoundTrip::new(SHORTEST_DEADLINE))),
            prefetches: local_state.and_then(|state| state.prefetches.clone()),
            lines: Arc::default(),
            renewals: Arc::default(),
            owed: local_state
                .map(|state| Arc::clone(&state.owed))
                .unwrap_or_default(),
            local: MemoryStore::new(),
            store: Arc::new(store),
        };
        Self {
            core: Arc::new(core),
            failure_mode: FailureMode::default(),
        }
    }

    /// Sets how long a store call may take. Default: the deadline follows the store's round trip.
    ///
    /// * A [`RedisStore`](crate::RedisStore) smooths the round trip and its mean deviation, as in
    ///   TCP's RTT estimate ([RFC 6298](https://www.rfc-editor.org/rfc/rfc6298#section-2)). The
    ///   default deadline is five times the round trip plus four times the deviation, at least 50
    ///   ms and at most 1 s. Until the first reply it is 1 s, so that the first check has time to
    ///   connect. On stores that do not report their [round
    ///   trip](crate::store::LocalState::answered_in), it is 50 ms.
    /// * A late reply, such as the first one after a hang, raises the default deadline at once.
    ///   Prompt replies bring it down again within a few seconds. If replies are rare, about thirty
    ///   of them are needed.
    /// * A deadline that you set is kept, even if the store is too far away for it. Then every
    ///   check fails, and each failure reports the deadline and the round trip, in the error and in
    ///   the log. If the round trip is already known to be longer than the deadline that you set, a
    ///   warning is logged at once.
    ///
    /// [`guide::redis_is_far_away`](crate::guide::redis_is_far_away) says what else changes if the
    /// store is far away.
    pub fn deadline(self, deadline: Duration) -> Self {
        if let Some(round_trip) = self.core.round_trip.known()
            && deadline < round_trip
        {
            warn!(
                ?deadline,
                ?round_trip,
                "the rate-limit store is too far away for the deadline: set a longer one, or none"
            );
        }
        self.set(|core| core.deadline = Some(deadline))
    }

    /// Sets the retry time for a check that is refused only because units are
    /// [reserved](crate::Charge::reserve). They may be given back at any time, so nobody knows when
    /// the check would pass. Default: one second. The retry time is shorter if a lease ends
    /// earlier: see the [`decision`](crate::decision) rules. It may be longer if the check would
    /// not fit even without the reserved units.
    ///
    /// [`acquire`](Self::acquire) asks again after this time. The [refusal
    /// cache](Self::refusal_cache) keeps such a refusal for at most this time.
    pub fn retry_reserved_after(self, wait: Duration) -> Self {
        self.set(|core| core.retry_reserved_after = wait)
    }

    /// Sets the refusal cache's `max_age` for this limiter, and for clones made from it later. The
    /// refusal cache is a negative cache: it refuses checks without asking the store. After
    /// `max_age`, one check asks the store whether a refusal still holds. If `max_age` is zero,
    /// every check asks the store. Default: one second.
    ///
    /// 1. When a check is refused, the cache stores two facts for each limit and key: how many
    ///    units are left, and until when no unit leaves the window. Until that time it refuses
    ///    every check whose cost is above the units left, since other callers can only spend more
    ///    units. So a client that varies its costs is refused as cheaply as one that repeats the
    ///    same cost. After `max_age`, one check asks the store. The other checks are refused until
    ///    the reply arrives. If no reply arrives within 100 ms, another check asks. If the store
    ///    admits the check that asks, the refusal is forgotten. If the store fails in any way, that
    ///    check gets the cached refusal, and the [failure mode](FailureMode) does not apply.
    /// 2. A check with several limits is refused if the cache knows that one of them would refuse
    ///    it. It does not matter which check or layer this knowledge comes from. The cache never
    ///    admits a check. If it does not know a limit's figures, that limit's
    ///    [status](crate::Decision::statuses) shows zeros, and the limit is hidden from clients.
    /// 3. The times in a cached refusal count down. The retry time is exact if no units are left,
    ///    the cost equals the refused cost, and no units are [counted
    ///    afterwards](crate::Charge::spent) in the meantime. Otherwise it is a lower bound. If the
    ///    cost is at least the refused cost, the bound is the cached retry time. If the cost is
    ///    lower, the bound is the time until the oldest unit leaves the window. If some used units
    ///    are reserved, the refusal is kept for at most
    ///    [`retry_reserved_after`](Self::retry_reserved_after).
    /// 4. After a [reset](Self::reset), [block](Self::block) or [settlement](crate::settlement)
    ///    through any clone of the store, checks with the same limit and key ask the store. If the
    ///    store then fails, the cache still refuses the checks that it refused before, unless some
    ///    used units were reserved. A check also asks the store if its limit's units, window or
    ///    algorithm have changed, or if it has an id from its caller. If another process, or
    ///    another store in this process, resets or settles, the cache finds out only after
    ///    `max_age`, when the store answers a check. The same is true after a failover to a server
    ///    that has lost entries.
    /// 5. The cache holds at most 10,000 limits and keys, as 64-bit digests under a per-process
    ///    secret. It never keeps the keys themselves. Clients cannot make two digests collide. With
    ///    10,000 digests in the cache and a million checks per second, two digests collide by
    ///    chance about once in fifty years.
    /// 6. A store with a [local state](crate::Store::local_state), such as `RedisStore`, has one
    ///    refusal cache for all its clones. A limiter or layer that sets `max_age` still shares
    ///    this cache, and only its `max_age` differs. `MemoryStore` has no refusal cache, since it
    ///    decides as quickly as a cache would.
    /// 7. A `RedisStore` also caches a refusal if the caller has left before the reply arrives.
    ///    Suppose that a limit has at most 256 units, and that as many equal checks are waiting as
    ///    it can admit. Further equal checks without an id are then refused just before their
    ///    deadline if the reply is late.
    ///
    /// ```
    /// # #[cfg(feature = "redis")]
    /// # fn settings() -> Result<(), Box<dyn std::error::Error>> {
    /// use std::time::Duration;
    /// use tower_sliding_window::{Limiter, RedisStore};
    ///
    /// let limiter = Limiter::new(RedisStore::builder("redis://127.0.0.1:6379").build()?);
    /// // No key is ever reset, so a refusal holds until its retry time.
    /// let patient = limiter.clone().refusal_cache(Duration::MAX);
    /// let without = limiter.refusal_cache(Duration::ZERO);
    /// # Ok(()) }
    /// ```
    pub fn refusal_cache(self, max_age: Duration) -> Self {
        self.set(|core| {
            let state = core.store.local_state();
            core.refusals = state.map(|state| state.refusals.with_max_age(max_age));
        })
    }

    /// Returns the same limiter, except that each of its checks asks the store, even if a refusal
    /// is cached.
    fn asking_each_time(self) -> Self {
        self.set(|core| {
            if let Some(refusals) = &mut core.refusals {
                refusals.is_asking = true;
            }
        })
    }

    /// Gives this limiter, and clones made from it later, their own breaker. Default: the store's
    /// breaker, with the settings of [`Breaker::default`].
    pub fn breaker(self, breaker: Breaker) -> Self {
        self.set(|core| core.breaker = SharedBreaker::new(breaker))
    }

    /// Lets this process decide under a share of each limit while the store cannot decide. Default:
    /// a store failure is an [`Error`].
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
    pub fn fail_local(self, share: Share) -> Self {
        self.with_failure_mode(FailureMode::Local(share))
    }

    pub(crate) fn with_failure_mode(self, failure_mode: FailureMode) -> Self {
        Self {
            failure_mode,
            ..self
        }
    }

    /// Counts decisions and failures under a layer's name.
    pub(crate) fn in_layer(self, name: Cow<'static, str>) -> Self {
        self.set(|core| core.layer = name)
    }

    fn set(mut self, change: impl FnOnce(&mut Core)) -> Self {
        change(Arc::make_mut(&mut self.core));
        self
    }

    /// Applies the limiter's deadline, minus the time `waited`, to a future that is not a decision.
    pub(crate) fn within<F>(&self, future: F, waited: Duration) -> Deadline<F> {
        Deadline::new(future, self.core.deadline(), waited)
    }

    /// Gives back the units and places that this process holds, and completes calls in flight. This
    /// covers the limiters and layers on all clones of the store.
    ///
    /// Call `shutdown` last, when the process serves no more requests, and before the runtime ends.
    /// A process that ends without it leaves behind all that it has taken. A place counts until its
    /// [life](crate::Limit::freed_after) is over. A prefetched unit counts until one window after
    /// the life of its [prefetch](crate::limit::prefetch). A settlement in flight is lost.
    ///
    /// 1. `shutdown` gives back all prefetched units that are still held.
    /// 2. It frees all places that are held when it begins, even if their requests have not ended,
    ///    such as open streams. It also frees the places that checks in flight at that time take.
    ///    [`has_lost_place`](crate::Decision::has_lost_place) then returns `true` for their
    ///    decisions. The freed places do not wake waiters in this process, since they are for other
    ///    processes.
    /// 3. It waits for store calls that have begun to free places, settle, count spent units, ban
    ///    or reset, even if their caller has left.
    ///
    /// `shutdown` returns within `within`; keep it below your platform's kill timeout. Store calls
    /// that have not ended by then go on as long as the runtime does. Waiters, and requests that
    /// arrive after `shutdown` has begun, are decided as usual: an admitted request keeps its
    /// place, and a request that has to wait asks again at the retry time. Their places are left
    /// behind when the process ends. So before you call `shutdown`, stop accepting requests and
    /// cancel waiting jobs. With streams, [call `shutdown`
    /// twice](crate::guide::at_most_n_at_once#restart-without-refusals). A request that is still in
    /// its handler keeps its [reserved](crate::limiter::Limiter::reserve) units until their lease
    /// ends.
    ///
    /// If your own store has no [local state](crate::Store::local_state), the limiters on it do not
    /// know each other. Then call `shutdown` on each of them.
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`] if a call was still in flight after `within`, such as while the store
    /// does not answer. A check that takes places also counts as in flight if you have polled its
    /// future once, and keep the future without polling it again. [`Error::Unavailable`] without a
    /// tokio runtime.
    ///
    /// # Panics
    ///
    /// If a call is in flight, and the future is polled in a tokio runtime without time.
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
        };
        Deadline::new(end, within, Duration::ZERO).await
    }

    pub(crate) fn detachable<T: Send>(
        &self,
        future: impl Future<Output = T> + Send + 'static,
    ) -> Detachable<T> {
        self.core.owed.detachable(future)
    }
}

/// Shows the store, the settings, and how many lines have waiters.
impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core")
            .field("store", &self.store)
            .field("deadline", &self.deadline)
            .field("layer", &self.layer)
            .field("lines", &self.lines)
            .finish_non_exhaustive()
    }
}
