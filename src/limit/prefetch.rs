//! Prefetches: units that a process takes at once, and spends without asking the store.
//!
//! While a busy key is far from its limit, the process takes many of the key's units in one call.
//! These units are a prefetch. The process decides by itself as long as they last, and gives back
//! the units that it does not spend. [`guide::hot_keys`](crate::guide::hot_keys) says when
//! prefetches pay off.
//!
//! 1. **Never too much.** A prefetch counts in Redis from the moment it is taken until one window
//!    after its life ends. So no window ever admits more than the limit, with any number of
//!    processes, even if one is killed or a reply is lost.
//! 2. **Units are missing for a short time only.** While a process holds an unspent unit, other
//!    processes cannot use it. This lasts for the prefetch life, and for the call that gives the
//!    unit back. To travel in one batch with other keys' prefetches, this call waits for at most a
//!    64th of the life, and never longer than 4 ms. The life is 100 ms by default, and longer if
//!    the store is far away (rule 10). A unit that is spent from a prefetch counts for its window,
//!    and at most one life longer. If the process is killed, its prefetched units count for the
//!    life and for one window after it.
//! 3. **Exact near the limit.** A process takes a key's first prefetch after sixteen requests
//!    within a life, and further ones as long as there are eight requests within a life. If the
//!    store is far away, fewer requests are enough (rule 10). A prefetch has as many units as the
//!    process spends in a life at its present rate, but at most an eighth of the units left. If
//!    these are too few for the requests, each request asks the store, and its units count for
//!    exactly one window.
//! 4. A check is decided in the process only if all its charges have enough prefetched units.
//!    Otherwise the whole check goes to the store. So does every check with an
//!    [id](crate::Check::with_id), and every check with a charge that
//!    [reserves](crate::Charge::reserve) units, asks whether [any unit is
//!    left](crate::Charge::any_left), counts [spent](crate::Charge::spent) units, or costs nothing.
//!    For a check with several charges, a process takes prefetches only if all the charges come
//!    often. The store counts units that the process holds as used. So the store may refuse a check
//!    that would fit if these units were given back. The process then gives them back at once, by
//!    one more call.
//! 5. A decision in the process has the store's figures from the time at which the prefetch was
//!    taken, plus the units that this process has spent since. The store's figures are at most as
//!    old as the prefetch life. Units that other processes hold count as used, and as
//!    [reserved](crate::decision::LimitStatus::reserved), since they may be given back. If a
//!    request was in flight to the store while a prefetch was taken, it may count twice in the
//!    figures until the store's next reply.
//! 6. An admission in the process has an id that the store does not know, so it cannot be
//!    [settled](crate::settlement). A reservation can be settled, since it always asks the store.
//! 7. A [reset](crate::Limiter::reset) or [block](crate::Limiter::block) through a limiter
//!    immediately gives back the prefetches that its process holds for this limit and key. Other
//!    processes may go on spending their prefetches until the prefetch life ends. After a reset,
//!    these units are spent in addition to the limit.
//! 8. While the store fails, a process first spends the units that it holds, until their life ends.
//! 9. Prefetches work with an exact or a [compact](crate::Algorithm::compact_log) log on a
//!    `RedisStore`, and not with other algorithms. On a `MemoryStore` they have no effect, since it
//!    decides as quickly as a prefetch would. They work on your own store if its local state was
//!    made [with prefetch](crate::store::LocalState::with_prefetch).
//! 10. **The farther away the store is, the longer a prefetch lives.** The life is at least four
//!     times the time within which most replies arrive: the round trip plus four deviations, as the
//!     store [measures](crate::store::LocalState::answered_in) them. It is at most a second, and at
//!     most the window. The process asks for the next prefetch early enough, so that it arrives
//!     before the present one ends or is spent. If a round trip takes more than 4 ms, fewer than
//!     sixteen requests within a life are enough for the first prefetch: 64 ms divided by the round
//!     trip, and at least two. If the window is shorter than two round trips, a prefetch would be
//!     over when it arrives, so the process does not take any.
//! 11. **A prefetch costs no more than it saves.** A process takes a prefetch by one call, and
//!     gives unspent units back by another. Each of these calls takes Redis about three times as
//!     long as a plain check. Checks first have to earn the price of both calls, which a token
//!     bucket counts. A check that the process decides by itself earns a third of a call, and a
//!     check that asks the store earns a 24th of a call. Checks within one round trip and one
//!     millisecond would have travelled in one batch, so together they earn as much as a single
//!     check. So in any traffic, a process makes at most a tenth more calls, and takes at most a
//!     fifth more of Redis's time, than without prefetch. A key with at least six checks in a life
//!     pays for its prefetches. The bucket begins with the price of 64 prefetches, and never holds
//!     more. Until a prefetch is earned, the key's checks ask the store.
//! 12. Processes may use the same limit with different prefetch lives, or without prefetch. Each
//!     part of a [split](crate::split) limit has its own prefetches.
//!
//! ```
//! use tower_sliding_window::{Limit, limit::prefetch};
//!
//! const API: Limit = Limit::per_minute("api", 600_000).prefetch(prefetch::DEFAULT_LIFE);
//! assert_eq!("api=600000/min prefetch".parse(), Ok(API));
//! ```

use std::time::Duration;

use super::Limit;

/// The shortest prefetch life, 1 ms.
pub const MIN_LIFE: Duration = Duration::from_millis(1);
/// The prefetch life that suits most limits, 100 ms.
pub const DEFAULT_LIFE: Duration = Duration::from_millis(100);
/// The longest prefetch life, 1 s. Redis keeps a key for at least a second after its last unit, so
/// no prefetch outlives its key.
pub const MAX_LIFE: Duration = Duration::from_secs(1);

impl Limit {
    /// Returns the same limit with prefetch: processes take many units at once, and spend them
    /// without asking the store. See [`limit::prefetch`](crate::limit::prefetch). Default: every
    /// check asks the store.
    ///
    /// `life` is how long a process may hold a prefetch: 1 ms to 1 s, and at most the window.
    /// [`DEFAULT_LIFE`], 100 ms, suits most limits. With a longer life, fewer requests ask the
    /// store, but units that a process does not spend are unavailable to other processes for
    /// longer. If the store is far away, a process holds a prefetch for longer: see rule 10 in the
    /// [module docs](self).
    ///
    /// # Panics
    ///
    /// If the life is outside these bounds, or if the limit counts by an algorithm other than an
    /// exact or a compact log. In a `const`, such a mistake does not compile. For values that are
    /// not known before run time, there is [`Limit::parse`].
    #[track_caller]
    pub const fn prefetch(mut self, life: Duration) -> Self {
        if let Some(rule) = broken_rule(&self, life) {
            panic!("{}", rule);
        }
        self.prefetch_micros = Some(life.as_micros() as u32);
        self
    }

    /// Returns the same limit with prefetch. The error says which rule the life breaks.
    pub(super) fn with_prefetch(self, life: Duration) -> Result<Self, String> {
        match broken_rule(&self, life) {
            Some(rule) => Err(rule.to_owned()),
            None => Ok(self.prefetch(life)),
        }
    }

    /// The limit's prefetch life; `None` without prefetch.
    pub(crate) fn prefetch_life(&self) -> Option<Duration> {
        self.prefetch_micros
            .map(|micros| Duration::from_micros(micros.into()))
    }

    /// Returns the retry time if only reserved units are in the way: at most the prefetch life,
    /// since processes give back prefetched units within that time.
    pub(crate) fn retry_reserved_after(&self, wait: Duration) -> Duration {
        self.prefetch_life().map_or(wait, |life| wait.min(life))
    }
}

const fn broken_rule(limit: &Limit, life: Duration) -> Option<&'static str> {
    if life.as_nanos() < MIN_LIFE.as_nanos() || life.as_nanos() > MAX_LIFE.as_nanos() {
        Some("the life of a prefetch must be 1 ms to 1 s")
    } else if life.as_nanos() > limit.window().as_nanos() {
        Some("the life of a prefetch, 100 ms by default, must be at most the window")
    } else if !limit.algorithm().is_log() {
        Some("prefetches need an exact or a compact log")
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::Algorithm;

    #[test]
    fn an_error_says_what_does_not_fit() {
        let limit = Limit::per_second("api", 100);
        let millis = Duration::from_millis;
        for (limit, life, rule) in [
            (
                limit.clone(),
                Duration::from_micros(999),
                "must be 1 ms to 1 s",
            ),
            (limit.clone(), millis(1_001), "must be 1 ms to 1 s"),
            (limit.clone(), Duration::MAX, "must be 1 ms to 1 s"),
            (limit.clone(), Duration::ZERO, "must be 1 ms to 1 s"),
            (
                Limit::per("api", 100, millis(50)),
                DEFAULT_LIFE,
                "100 ms by default, must be at most the window",
            ),
            (
                limit.clone().with_algorithm(Algorithm::FIXED_WINDOW),
                DEFAULT_LIFE,
                "an exact or a compact log",
            ),
            (
                limit
                    .clone()
                    .with_algorithm(Algorithm::SLIDING_WINDOW_COUNTER),
                DEFAULT_LIFE,
                "an exact or a",
            ),
        ] {
            let error = limit.with_prefetch(life).unwrap_err();
            assert!(error.contains(rule), "{error}");
        }
        let compact = Limit::per("api", 100, millis(1)).with_algorithm(Algorithm::compact_log(16));
        assert!(compact.with_prefetch(millis(1)).is_ok());
    }
}
