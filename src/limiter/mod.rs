//! The limiter: rate limiting without HTTP, for calls to an upstream, jobs, and services of other
//! kinds.
//!
//! 1. [`check`](Limiter::check) spends units, [`acquire`](Limiter::acquire) waits for units and
//!    spends them, [`peek`](Limiter::peek) shows how a limit stands, [`reserve`](Limiter::reserve)
//!    spends units that are [settled](Limiter::settle) later, [`block`](Limiter::block) takes all
//!    units for a time, and [`reset`](Limiter::reset) forgets a key.
//! 2. Every call to the store ends within the [`deadline`](Limiter::deadline), which covers
//!    queueing, connecting and the reply. By default, the deadline follows the round trip of the
//!    store. The deadline starts with the first poll, and needs a timer only if the store makes the
//!    caller wait. A method makes at most one call. Only [`acquire`](Limiter::acquire) and
//!    [`shutdown`](Limiter::shutdown) may make several.
//! 3. An admission and a refusal are both a [`Decision`](crate::Decision). If a check cannot be
//!    decided, the result is a typed [`Error`].
//! 4. If the [refusal cache](Limiter::refusal_cache) remembers a refusal of a check, the check is
//!    refused without asking the store.
//! 5. While a store fails repeatedly, checks get an error at once, and only probes go to the store:
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

/// A store with a deadline, a refusal cache, a breaker, and a share for the time in which the store
/// fails. A limiter is cheap to clone, and its clones share all of these. See the [module
/// docs](self).
#[derive(Clone, Debug)]
#[must_use]
pub struct Limiter {
    core: Arc<Core>,
    /// The response to a store that cannot decide. In a mode without a share, the caller gets an
    /// error.
    pub(crate) failure_mode: FailureMode,
}

/// The settings and the state that the clones of a limiter share. If a setting of one clone is
/// changed, that clone gets a copy of its own.
#[derive(Clone)]
struct Core {
    store: Arc<dyn Store>,
    /// `None` if the deadline follows the round trip of the store.
    deadline: Option<Duration>,
    retry_reserved_after: Duration,
    /// The name of the layer that has this limiter, for metrics. Empty if there is no layer, or if
    /// the layer has no name.
    layer: Cow<'static, str>,
    /// `None` if the limiter remembers no refusals.
    refusals: Option<Refusals>,
    breaker: SharedBreaker,
    /// The round trip of the store. Zero if the store does not tell its round trip.
    round_trip: Arc<RoundTrip>,
    /// The limits and keys whose timeouts the breaker does not count.
    crowded: Option<Arc<Crowded>>,
    /// `None` if the store has no prefetches.
    prefetches: Option<Arc<Prefetches>>,
    lines: Arc<Lines>,
    /// The places that decisions of the limiter hold.
    renewals: Arc<Renewals>,
    /// The places to free and the calls to complete before the process ends. If the store has a
    /// local state, all limiters on clones of the store share them.
    owed: Arc<Owed>,
    /// Decides in this process while the store cannot: see [`Share`].
    local: MemoryStore,
}

/// Does the same as [`Limiter::new`].
impl<S: Store> From<S> for Limiter {
    fn from(store: S) -> Self {
        Self::new(store)
    }
}

impl Limiter {
    /// A limiter on `store`. The limiter uses the refusal cache and the breaker of the store's
    /// [local state](Store::local_state), if the store has one.
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

    /// Sets how long any call to the store may take. Default: the deadline follows the round trip
    /// of the store.
    ///
    /// * A [`RedisStore`](crate::RedisStore) measures the smoothed round trip and its mean
    ///   deviation, as TCP does ([RFC 6298](https://www.rfc-editor.org/rfc/rfc6298#section-2)). The
    ///   default deadline is five times the round trip plus four times the deviation, at least 50
    ///   ms and at most 1 s. Until the first reply, the default deadline is 1 s, so that the first
    ///   check has time to connect. On stores that do not tell their [round
    ///   trip](crate::store::LocalState::answered_in), the default deadline is 50 ms.
    /// * A late reply, such as the first one after a hang, raises the default deadline at once. The
    ///   prompt replies after it bring the default deadline down again within some seconds, or with
    ///   some thirty replies if few come.
    /// * A deadline that you set is kept, even if the store is too far away for it. Then every
    ///   check fails. The error and the log tell the deadline and the round trip at each failure.
    ///   If the round trip is already known to be longer than the deadline when you set the
    ///   deadline, the log warns at once.
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

    /// Sets the retry time of a check that is refused only because units are
    /// [reserved](crate::Charge::reserve). Reserved units may be given back at any time, so nobody
    /// knows when the check would pass. Default: one second. The retry time is shorter if a lease
    /// ends earlier: see the rules of a [`decision`](crate::decision). If the check would not fit
    /// even without the reserved units, its retry time may be longer.
    ///
    /// [`acquire`](Self::acquire) asks again after this time. The [refusal
    /// cache](Self::refusal_cache) remembers such a refusal for at most this time.
    pub fn retry_reserved_after(self, wait: Duration) -> Self {
        self.set(|core| core.retry_reserved_after = wait)
    }

    /// Gives this limiter, and all clones that are made of it later, a refusal cache of their own,
    /// which refuses checks without asking the store. `max_age` is the time after which a check
    /// asks the store whether a refusal still holds. With a `max_age` of zero, every check asks the
    /// store. Default: the refusal cache of the store, with a `max_age` of one second.
    ///
    /// 1. When a check is refused, the cache remembers for each limit and key of the check how many
    ///    units are left, and until when no unit leaves the window. Until then, the cache refuses
    ///    each cost above the units that are left, since other callers can only spend in the
    ///    meantime. So a client that varies its costs is refused as cheaply as a client that
    ///    repeats one cost. After `max_age`, one check asks the store. The other checks are refused
    ///    until the reply. If no reply comes within 100 ms, another check asks. If the store admits
    ///    the check that asks, the refusal is forgotten. If the store fails in any way, the check
    ///    that asks gets the remembered refusal, and the [failure mode](FailureMode) does not
    ///    apply.
    /// 2. The cache refuses a check of several limits if it remembers that one of these limits
    ///    refuses. The remembered refusal may come from another check or another layer. The cache
    ///    never admits. If the cache refuses a check, and does not know the figures of one of its
    ///    limits, the [status](crate::Decision::statuses) of this limit shows zeros, and the limit
    ///    is hidden from clients.
    /// 3. The times of a remembered refusal count down. The retry time is exact if no units are
    ///    left, the cost is the refused cost, and no units are [counted
    ///    afterwards](crate::Charge::spent) in the meantime. Otherwise the retry time is a lower
    ///    bound. For a cost of at least the refused cost, this bound is the remembered retry time.
    ///    For a lower cost, this bound is the time until the oldest unit leaves. If some of the
    ///    used units are reserved, the refusal is remembered for at most
    ///    [`retry_reserved_after`](Self::retry_reserved_after).
    /// 4. After a [reset](Self::reset), [block](Self::block) or [settlement](crate::settlement)
    ///    through any clone of the store, checks of the same limit and key ask the store. If the
    ///    store then fails, the cache still refuses the checks that it refused before, unless some
    ///    of the used units were reserved. A check also asks the store if the units, window or
    ///    algorithm of its limit have changed, or if the check has an id from its caller. If
    ///    another process, or another store in this process, resets or settles, the cache finds out
    ///    only after `max_age`, when the store answers a check. In the same way, the cache finds
    ///    out about a failover to a server that has lost entries.
    /// 5. The cache remembers at most 10,000 limits and keys, by 64-bit digests under a secret of
    ///    the process. The cache never keeps the keys themselves. No client can make two digests
    ///    collide. By chance, two digests collide once in fifty years, with 10,000 of them
    ///    remembered and a million checks a second.
    /// 6. Stores with a [local state](crate::Store::local_state), such as `RedisStore`, have one
    ///    refusal cache for all of their clones. A limiter or layer that sets `max_age` shares it,
    ///    and has only an age of its own. `MemoryStore` has none, since it decides as quickly as a
    ///    cache.
    /// 7. A `RedisStore` remembers a refusal also if the caller has left by the time of the reply.
    ///    While as many equal checks wait as a limit of at most 256 units can admit, the next ones
    ///    without an id are refused just before their deadline if the reply is late.
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

    /// The same limiter, but each of its checks asks the store, even if the refusal cache remembers
    /// a refusal.
    fn asking_each_time(self) -> Self {
        self.set(|core| {
            if let Some(refusals) = &mut core.refusals {
                refusals.is_asking = true;
            }
        })
    }

    /// Gives this limiter, and all clones that are made of it later, a breaker of their own.
    /// Default: the breaker of the store, with the settings of [`Breaker::default`].
    pub fn breaker(self, breaker: Breaker) -> Self {
        self.set(|core| core.breaker = SharedBreaker::new(breaker))
    }

    /// Lets this process decide under a share of each limit while the store cannot decide. Default:
    /// a failure of the store is an [`Error`].
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

    /// Counts decisions and failures under the name of a layer.
    pub(crate) fn in_layer(self, name: Cow<'static, str>) -> Self {
        self.set(|core| core.layer = name)
    }

    fn set(mut self, change: impl FnOnce(&mut Core)) -> Self {
        change(Arc::make_mut(&mut self.core));
        self
    }

    /// Gives the limiter's deadline, less the time in `waited`, to a future that is not a decision.
    pub(crate) fn within<F>(&self, future: F, waited: Duration) -> Deadline<F> {
        Deadline::new(future, self.core.deadline(), waited)
    }

    /// Gives back the units and places that this process holds, and completes the calls that are on
    /// their way. Does so for the limiters and layers on all clones of the store.
    ///
    /// Call `shutdown` last, when the process serves no more requests, and before the runtime ends.
    /// A process that ends without `shutdown` leaves behind all that it has taken. A place counts
    /// until its [life](crate::Limit::freed_after) is over. A prefetched unit counts until one
    /// window after the life of its [prefetch](crate::limit::prefetch) is over. A settlement that
    /// was on its way is lost.
    ///
    /// 1. `shutdown` gives back all units that are held with prefetch.
    /// 2. It frees all places that are held when it begins, also those of requests that have not
    ///    ended, such as open streams, and those of checks that are on their way then.
    ///    [`has_lost_place`](crate::Decision::has_lost_place) is then true for the decisions that
    ///    held these places. The freed places wake nobody who waits in line here, since they are
    ///    for other processes.
    /// 3. It waits for calls to the store that free places, settle, count spent units, ban or
    ///    reset, if these calls have begun. It also waits for such calls if their caller has left.
    ///
    /// `shutdown` ends after `within` at the latest: choose less than the time after which your
    /// platform kills the process. After `within`, the calls to the store that have not ended go on
    /// as long as the runtime does. Requests that come after `shutdown` has begun, and callers that
    /// wait in line, are decided as usual: whoever is admitted keeps the place, and whoever has to
    /// wait asks again when the retry time is over. The places that they take are left behind when
    /// the process ends. So stop accepting requests, and cancel jobs that wait, first. With
    /// streams, [call `shutdown`
    /// twice](crate::guide::at_most_n_at_once#restart-without-refusals). A request that is still in
    /// its handler keeps the units that it has [reserved](crate::limiter::Limiter::reserve) until
    /// their lease ends.
    ///
    /// If a store of your own has no [local state](crate::Store::local_state), the limiters on it
    /// know nothing of each other. Then call `shutdown` on each of them.
    ///
    /// # Errors
    ///
    /// [`Error::TimedOut`] if a call was still on its way after `within`, such as while the store
    /// does not answer. A check that takes places also counts as on its way if its future was
    /// polled once, and is then kept without being polled. [`Error::Unavailable`] without a tokio
    /// runtime.
    ///
    /// # Panics
    ///
    /// If a call is on its way, and the future is polled in a tokio runtime without time.
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

/// Shows the store, the settings, and how many lines of callers there are.
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
