//! The memory that this process has of a store: the breaker, the refusal cache, the round trip, and
//! the prefetches of units that the process holds. The process also remembers which places it has
//! to free, and which calls it has to complete, before it ends.
//!
//! This module lies between the plain values, such as limits and checks, and the stores. It uses
//! values and the clock, and never a store. The trait [`Store`](crate::Store) hands out the
//! [`LocalState`]. A store tells the local state when refusals are outdated. The limiter asks the
//! local state before it asks the store, and tells the store's replies to the local state. The
//! limiter also provides the calls to the store that the local state needs, such as probes.

mod breaker;
mod crowded;
mod owed;
mod prefetch;
mod refusals;
mod round_trip;

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

pub(crate) use self::round_trip::LONGEST_DEADLINE;
use self::{breaker::BreakerState, refusals::Generations};
pub(crate) use self::{
    breaker::SharedBreaker,
    crowded::Crowded,
    owed::{Detachable, Holder, Owed, SharedPlaces, Underway},
    prefetch::{KeptHolding, Prefetches, Step},
    refusals::{Lookup, Refusals},
    round_trip::{RoundTrip, SHORTEST_DEADLINE},
};
use crate::{
    clock::{Clock, ManualClock},
    key::Key,
    limit::Limit,
};

/// After this time, one check asks the store whether a remembered refusal still holds.
const DEFAULT_MAX_AGE: Duration = Duration::from_secs(1);

/// The most failures in a row that a breaker waits for. The number is bounded, since the breaker
/// remembers each of these failures.
const MAX_FAILURES: u32 = 10_000;

/// Settings of a breaker, which stops asking a store that has failed repeatedly.
///
/// 1. A breaker opens after five failures in a row by default. A failure is a check, settlement or
///    reset that the store answers with an error, or not within the deadline. Any answer starts the
///    count anew.
/// 2. While the breaker is open, callers get an error at once:
///    [`Error::BreakerOpen`](crate::Error::BreakerOpen), which has the last failure in it. The
///    route's [failure mode](crate::limiter::FailureMode) or the caller then decides about the
///    request. The [refusal cache](crate::Limiter::refusal_cache) still refuses.
/// 3. All clones of a store with a [local state](crate::Store::local_state), such as `RedisStore`,
///    share one breaker with the default settings. A limiter or layer that sets a breaker has a
///    breaker of its own, which its clones share. On stores without a local state, each limiter or
///    layer has a breaker of its own.
/// 4. An error counts for all checks. A timeout counts only for checks with the same deadline or a
///    shorter one. So a limiter with a short deadline never cuts off a limiter with a longer
///    deadline. An answer counts for all deadlines that are at least as long as the answer took. A
///    timeout does not count if the request had already used more than half of the deadline when
///    the call to the store began. A timeout also does not count if a `RedisStore` has meanwhile
///    answered a call that was sent later. Then the check has only waited in the queue of this
///    process. Nor does it count if more equal checks wait for Redis than their limit can admit:
///    a client that floods the store must not open the breaker, and pass by fail-open.
/// 5. While the breaker is open, a probe goes to the store every 200 ms by default. A probe is a
///    copy of a check that the open breaker has stopped, with a cost of 0. No caller waits for a
///    probe. The deadline of a probe is the longest deadline of the callers whose checks were
///    stopped. If one of these callers has the [default deadline](crate::Limiter::deadline) of a
///    store that tells its round trip, such as `RedisStore`, the deadline doubles from probe to
///    probe, up to a second, since the store may be farther away now. A task on a caller's runtime
///    sends the probes. The task ends when the breaker closes, or when the last limiter is dropped.
///    As soon as a probe is overdue, the check of a caller becomes the probe. A probe is overdue
///    when no probe has ended within twice the sum of the interval and the deadline of a probe.
///    There are three possible reasons: the runtime of the task blocks, no limiter lives until its
///    probe ends, or no caller with a runtime has come since the breaker opened. If the runtime of
///    the task has ended, a probe is overdue after twice the interval, and a task on the runtime of
///    this caller takes over.
/// 6. An answered probe closes the breaker. After that, a single failure opens it again. Once
///    another check is answered, the breaker again needs the full number of failures.
/// 7. A cost above the limit, a limit that cannot be chosen, and an error
///    [of one check alone](crate::error::StoreError::of_one_check) are not failures of the store.
/// 8. Each [part](crate::Store::part_of) of a store, such as a node of a cluster, has failures,
///    answers and probes of its own. So a node that is lost or hangs fails no check of other nodes.
///    A check of several nodes counts only for the group of these nodes. A `RedisStore` learns which
///    node has which slot when it connects, and when a slot has moved.
///
/// A closed breaker costs a check one atomic load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct Breaker {
    failures: u32,
    probe_every: Duration,
}

impl Breaker {
    /// A breaker that never opens: the store is asked every time.
    pub const OFF: Self = Self::new(0, Duration::ZERO);

    /// A breaker that opens after this number of `failures` in a row, at most 10,000. While the
    /// breaker is open, it sends probes at the interval `probe_every`, at least a millisecond. So
    /// the breaker may stay open for one interval after the store is back. With zero failures, the
    /// breaker never opens.
    pub const fn new(failures: u32, probe_every: Duration) -> Self {
        Self {
            failures: if failures < MAX_FAILURES {
                failures
            } else {
                MAX_FAILURES
            },
            probe_every,
        }
    }
}

/// Five failures in a row, and a probe every 200 ms.
impl Default for Breaker {
    fn default() -> Self {
        Self::new(5, Duration::from_millis(200))
    }
}

/// The state that the clones of a store share in this process. All limiters and layers on these
/// clones share it, too: see [`Store::local_state`](crate::Store::local_state).
///
/// 1. The local state holds three things. The [`Breaker`] knows whether the store answers. The
///    [refusal cache](crate::Limiter::refusal_cache) knows what the store has refused, also while
///    the store does not answer. With [prefetch](crate::limit::prefetch), the local state also
///    holds units that limiters spend without asking the store.
/// 2. All clones of a store return the same local state. A store that wraps another store, and
///    passes limits and keys on unchanged, returns the local state of the inner store.
/// 3. A remembered refusal holds until units are given back. So the store [forgets the
///    refusals](Self::forget_refusals) of a limit and key whenever the store itself resets the key,
///    or settles an admission of the key.
/// 4. A store that may be far away tells how long each [answer](Self::answered_in) took. The
///    default deadline and the prefetches follow these times.
#[derive(Clone)]
pub struct LocalState {
    breaker: Arc<BreakerState>,
    /// The refusals of all limiters on the store.
    pub(crate) refusals: Refusals,
    /// The prefetches of all limiters on the store.
    pub(crate) prefetches: Option<Arc<Prefetches>>,
    /// The places to free and the calls to complete before the process ends, of all limiters on the
    /// store.
    pub(crate) owed: Arc<Owed>,
    pub(crate) round_trip: Arc<RoundTrip>,
    pub(crate) crowded: Arc<Crowded>,
}

/// A call to the store that is on its way, and outdates the refusals and prefetches of some limits
/// and keys: see [`LocalState::outdate`].
#[must_use]
pub(crate) struct Outdated {
    generations: Arc<Generations>,
    /// The digests of the limits and keys.
    digests: Vec<u64>,
    prefetches: Option<Arc<Prefetches>>,
}

impl LocalState {
    /// A local state on a clock that a test moves, such as the clock of a conformance test.
    pub fn by(clock: &ManualClock) -> Self {
        Self::on(Clock::Manual(clock.clone()), SHORTEST_DEADLINE)
    }

    pub(crate) fn on(clock: Clock, first_deadline: Duration) -> Self {
        Self {
            breaker: Arc::new(BreakerState::new(Breaker::default())),
            refusals: Refusals::new(DEFAULT_MAX_AGE, Arc::new(Generations::new(clock))),
            prefetches: None,
            owed: Arc::default(),
            round_trip: Arc::new(RoundTrip::new(first_deadline)),
            crowded: Arc::default(),
        }
    }

    /// The same local state, with [prefetch](crate::limit::prefetch). Default: no prefetches, so
    /// every check asks the store.
    ///
    /// To the store, a prefetch is a charge whose lease is longer than the window: one window plus
    /// the life of the prefetch. The units are reserved, and count until the lease ends, even if
    /// the clock has stepped back. The cost of the prefetch's settlement is the number of spent
    /// units. The spent units count until a window after the settlement, or until the lease ends if
    /// that is earlier. The time in the settlement may be later than the time of the admission.
    #[must_use]
    pub fn with_prefetch(self) -> Self {
        let prefetches = Some(Arc::new(Prefetches::new(
            Arc::clone(&self.refusals.generations),
            Arc::clone(&self.round_trip),
        )));
        Self { prefetches, ..self }
    }

    /// Forgets the refusals of a limit and key. A store calls this method twice: before it sends a
    /// call that gives units back, and when that call is done. So the cache repeats no refusal that
    /// it has learnt between the two calls.
    pub fn forget_refusals(&self, limit: &Limit, key: &Key) {
        self.refusals
            .generations
            .advance(limit.digest(&self.refusals.generations.digester, key));
    }

    /// Forgets the refusals of these limits and keys. If the caller passes the prefetches of the
    /// store, also gives back the prefetches of these limits and keys. Both happen now, and again
    /// when the returned guard is dropped. The guard is dropped when the call to the store is over,
    /// or when its caller stops waiting. So no refusal and no prefetch from the meantime stays.
    pub(crate) fn outdate<'a>(
        &self,
        keys: impl IntoIterator<Item = (&'a Limit, &'a Key)>,
        prefetches: Option<Arc<Prefetches>>,
    ) -> Outdated {
        let digests = keys
            .into_iter()
            .map(|(limit, key)| limit.digest(&self.refusals.generations.digester, key))
            .collect();
        let outdated = Outdated {
            generations: Arc::clone(&self.refusals.generations),
            digests,
            prefetches,
        };
        outdated.forget();
        outdated
    }

    /// Records the time from a call to its answer. A store that may be far away calls this method
    /// for each answer, as `RedisStore` does. Then the [default deadline](crate::Limiter::deadline)
    /// and the prefetches suit the distance of the store.
    pub fn answered_in(&self, time: Duration) {
        self.round_trip.answered_in(time);
    }

    /// The breaker of all limiters on the store.
    pub(crate) fn breaker(&self) -> SharedBreaker {
        SharedBreaker::of(&self.breaker)
    }
}

/// Locks a mutex, even if a thread has panicked under its lock. This is safe for each mutex of this
/// crate: either no code under its lock can panic, or its content is whole at any moment.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Outdated {
    fn forget(&self) {
        for digest in &self.digests {
            self.generations.advance(*digest);
            if let Some(prefetches) = &self.prefetches {
                prefetches.drop_prefetches_of(*digest);
            }
        }
    }
}

impl Drop for Outdated {
    fn drop(&mut self) {
        self.forget();
    }
}

impl fmt::Debug for LocalState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalState")
            .field("round_trip", &self.round_trip.smoothed())
            .finish_non_exhaustive()
    }
}

/// A local state on tokio's monotonic clock, which a test may pause.
impl Default for LocalState {
    fn default() -> Self {
        Self::on(Clock::monotonic(), SHORTEST_DEADLINE)
    }
}
