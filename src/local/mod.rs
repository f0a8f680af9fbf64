//! The state that this process keeps about a store: the circuit breaker, the refusal cache, the RTT
//! estimate, and the prefetched units that it holds. This module also tracks work that must finish
//! before shutdown: places to free and calls to complete.
//!
//! This module lies between plain values, such as limits and checks, and the stores. It uses values
//! and the clock, but never a store. The trait [`Store`](crate::Store) hands out the
//! [`LocalState`]. A store tells the local state when refusals are outdated. The limiter asks the
//! local state before it asks the store. It also passes the store's replies on to the local state,
//! and provides the store calls that the local state needs, such as probes.

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

/// After this time, one check asks the store whether a cached refusal still holds.
const DEFAULT_MAX_AGE: Duration = Duration::from_secs(1);

/// The most failures in a row that a breaker waits for. This number is bounded, since the breaker
/// remembers each failure.
const MAX_FAILURES: u32 = 10_000;

/// Settings for a circuit breaker, which stops asking a store that keeps failing.
///
/// 1. By default, a breaker opens after five failures in a row. A failure is a check, settlement or
///    reset that the store answers with an error, or does not answer within the deadline. Any
///    answer starts the count anew.
/// 2. While the breaker is open, callers get [`Error::BreakerOpen`](crate::Error::BreakerOpen) at
///    once, with the last failure in it. The route's [failure mode](crate::limiter::FailureMode) or
///    the caller then decides about the request. The [refusal cache](crate::Limiter::refusal_cache)
///    still refuses checks.
/// 3. All clones of a store with a [local state](crate::Store::local_state), such as `RedisStore`,
///    share one breaker with the default settings. A limiter or layer that sets a breaker has its
///    own breaker, which its clones share. On stores without a local state, each limiter or layer
///    has its own breaker.
/// 4. An error counts for all checks. A timeout counts only for checks with the same deadline or a
///    shorter one. So a limiter with a short deadline never cuts off one with a longer deadline. An
///    answer counts for all deadlines that are at least as long as the answer took. A timeout does
///    not count if the request had already used more than half its deadline when the store call
///    began. Nor does it count if a `RedisStore` has meanwhile answered a call that was sent later.
///    In that case, the check has only waited in this process's queue. Failures do not count if
///    more equal checks wait for Redis than their limit can admit: a client that floods the store
///    must not be able to open the breaker, and so pass through a fail-open route.
/// 5. While the breaker is open, a probe goes to the store every 200 ms by default. It is a copy of
///    a stopped check, at a cost of 0. No caller waits for it. Its deadline is the longest deadline
///    among the callers whose checks were stopped. If one of these callers has the [default
///    deadline](crate::Limiter::deadline) on a store that reports its round trip, such as
///    `RedisStore`, the probe deadline doubles from probe to probe, up to a second, since the store
///    may be farther away now. A task on a caller's runtime sends the probes. It ends when the
///    breaker closes, or when the last limiter is dropped. As soon as a probe is overdue, a
///    caller's check becomes the probe. A probe is overdue when none has ended within twice the sum
///    of the interval and the probe deadline. There are three possible reasons: the task's runtime
///    is blocked, every limiter is dropped before its probe ends, or no caller with a runtime has
///    come since the breaker opened. If the task's runtime has ended, a probe is overdue after
///    twice the interval, and a task on the caller's runtime takes over.
/// 6. An answered probe closes the breaker. After that, a single failure opens it again. Once
///    another check is answered, the breaker again needs the full number of failures.
/// 7. A cost above the limit, a limit that cannot be chosen, and an error [of one check
///    alone](crate::error::StoreError::of_one_check) are not store failures.
/// 8. Each [part](crate::Store::part_of) of a store, such as a cluster node, has its own failures,
///    answers and probes. So a node that is lost or hangs does not fail checks on other nodes. A
///    check that spans several nodes counts only for that group of nodes. A `RedisStore` learns
///    which node has which slot when it connects, and when a slot has moved.
///
/// A closed breaker costs a check one atomic load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct Breaker {
    failures: u32,
    probe_every: Duration,
}

impl Breaker {
    /// A breaker that never opens: every check asks the store.
    pub const OFF: Self = Self::new(0, Duration::ZERO);

    /// A breaker that opens after this many `failures` in a row, which are capped at 10,000. With
    /// 0, it never opens. While it is open, it sends a probe every `probe_every`, which is at least
    /// a millisecond. So the breaker may stay open for one interval after the store is back.
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

/// The state that a store's clones share in this process. All limiters and layers on these clones
/// share it, too: see [`Store::local_state`](crate::Store::local_state).
///
/// 1. It holds three things. The [`Breaker`] knows whether the store answers. The [refusal
///    cache](crate::Limiter::refusal_cache) knows what the store has refused, even while the store
///    does not answer. With [prefetch](crate::limit::prefetch), the local state also holds units
///    that limiters spend without asking the store.
/// 2. All clones of a store return the same local state. A store that wraps another one, and passes
///    limits and keys on unchanged, returns the inner store's local state.
/// 3. A cached refusal holds until units are given back. So the store [forgets the
///    refusals](Self::forget_refusals) for a limit and key whenever it resets the key, or settles
///    one of its admissions.
/// 4. A store that may be far away reports how long each [answer](Self::answered_in) took. The
///    default deadline and the prefetches follow these times.
#[derive(Clone)]
pub struct LocalState {
    breaker: Arc<BreakerState>,
    /// All limiters on the store share each field.
    pub(crate) refusals: Refusals,
    pub(crate) prefetches: Option<Arc<Prefetches>>,
    /// Work that must finish before shutdown.
    pub(crate) owed: Arc<Owed>,
    pub(crate) round_trip: Arc<RoundTrip>,
    pub(crate) crowded: Arc<Crowded>,
}

/// A store call in flight that makes refusals and prefetches for some limits and keys outdated: see
/// [`LocalState::outdate`].
#[must_use]
pub(crate) struct Outdated {
    generations: Arc<Generations>,
    /// One digest per limit and key.
    digests: Vec<u64>,
    prefetches: Option<Arc<Prefetches>>,
}

impl LocalState {
    /// A local state on a clock that a test controls, such as a conformance test's clock.
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

    /// Returns the same local state with [prefetch](crate::limit::prefetch). Default: no
    /// prefetches, so every check asks the store.
    ///
    /// To the store, a prefetch is a charge with a lease longer than the window: one window plus
    /// the prefetch life. The units are reserved, and count until the lease ends, even if the clock
    /// has stepped back. The prefetch is settled at the cost of the spent units. The spent units
    /// count until a window after the settlement, or until the lease ends if that is earlier. The
    /// settlement's time may be later than the admission's.
    #[must_use]
    pub fn with_prefetch(self) -> Self {
        let prefetches = Some(Arc::new(Prefetches::new(
            Arc::clone(&self.refusals.generations),
            Arc::clone(&self.round_trip),
        )));
        Self { prefetches, ..self }
    }

    /// Forgets the refusals for a limit and key. A store calls this twice: before it sends a call
    /// that gives units back, and when that call is done. This discards refusals cached between the
    /// two calls.
    pub fn forget_refusals(&self, limit: &Limit, key: &Key) {
        self.refusals
            .generations
            .advance(limit.digest(&self.refusals.generations.digester, key));
    }

    /// Forgets the refusals for these limits and keys. If the caller passes the store's prefetches,
    /// also gives back those for the same limits and keys. Both happen now, and again when the
    /// returned guard is dropped: when the store call is over, or when its caller stops waiting. So
    /// refusals and prefetches from the time in between do not stay.
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

    /// Records the time from a call to its answer. A store that may be far away calls this for each
    /// answer, as `RedisStore` does. The [default deadline](crate::Limiter::deadline) and the
    /// prefetches then suit the store's distance.
    pub fn answered_in(&self, time: Duration) {
        self.round_trip.answered_in(time);
    }

    /// The breaker that all limiters on the store share.
    pub(crate) fn breaker(&self) -> SharedBreaker {
        SharedBreaker::of(&self.breaker)
    }
}

/// Locks a mutex, even if a thread has panicked under its lock. This is safe for every mutex in
/// this crate: either the code under its lock cannot panic, or its content is consistent at any
/// moment.
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
