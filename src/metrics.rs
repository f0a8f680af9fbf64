//! Metrics, for a recorder behind the facade [`metrics`](https://docs.rs/metrics).
//!
//! | name | kind | unit | labels | counts or measures |
//! |---|---|---|---|---|
//! | `rate_limit_decisions_total` | counter | decisions | `limit`: the limit's name; `outcome`: `allowed`, `refused`, `shadow_refused` | how often a limit was part of an admission, refused, or would have refused in the [shadow](crate::KeyedLimit::in_shadow); units counted [afterwards](crate::KeyedLimit::count_afterwards) are left out |
//! | `rate_limit_failures_total` | counter | failures | `cause`: `timed_out`, `unavailable`, `breaker_open`, `no_limit` | how often the store did not answer, or a limit could not be chosen: see [`Error`] |
//! | `rate_limit_degraded_total` | counter | requests | `mode`: `open`, `closed`, `local`, `fallback` | how often a layer's [failure mode](crate::FailureMode) decided or left out a limit; how often [fallbacks](crate::KeyedLimit::fallback) were enough; how often a handler answered 503 by a [`Rejection`](crate::Rejection) |
//! | `rate_limit_deny_cache_hits_total` | counter | refusals | | refusals by a [`DenyCache`](crate::DenyCache), without asking the store |
//! | `rate_limit_breakers_open` | gauge | breakers | | open [breakers](crate::Breaker): 0 or 1 for one `RedisStore`, unless a limiter or layer has a breaker of its own |
//! | `rate_limit_batch_checks` | histogram | checks and settlements | | size of a batch that is sent to Redis |
//! | `rate_limit_queue_checks` | histogram | checks and settlements | | how many still wait when a batch is sent |
//! | `rate_limit_queue_full_total` | counter | checks and settlements | | how many failed because the queue was full |
//! | `rate_limit_script_seconds` | histogram | seconds | | time of a batch from taking a connection to the reply or the error |
//!
//! 1. They need the feature `metrics`, which is off by default. Without it, none of this code is compiled.
//! 2. A check of several limits counts once for each limit. If it is refused, only the limits that refused it count.
//!    Decisions by the deny cache, by a [share](crate::Share) of this process, and at no cost count too. A caller that
//!    is refused in [`acquire`](crate::Limiter::acquire) while others are ahead of it counts twice: as a refusal, and
//!    as an admission at no cost, since the limiter asks the store for the figures.
//! 3. A failure counts for each check, settlement or reset, whatever the failure mode does; a probe does not count.
//!    `no_limit` counts once a request, however many limits could not be chosen.
//! 4. No label contains a key. There is one series for each name of a limit, also for
//!    [chosen](crate::KeyedLimit::chosen) limits.
//! 5. Install the recorder before the first request: the gauge counts from there.
#![cfg_attr(not(feature = "metrics"), allow(unused_variables, reason = "without the feature nothing is recorded"))]

#[cfg(feature = "redis")]
use std::time::Instant;

#[cfg(all(feature = "metrics", feature = "redis"))]
use ::metrics::histogram;
#[cfg(feature = "metrics")]
use ::metrics::{counter, gauge};

use crate::{decision::Decision, error::Error};

/// Records something with the feature `metrics`. Without it, nothing of the call is compiled.
macro_rules! record {
    ($($body:tt)*) => {
        #[cfg(feature = "metrics")]
        {
            $($body)*
        }
    };
}

/// A decision of the store, the deny cache or this process.
#[inline]
pub(crate) fn decided(decision: &Decision) {
    record! {
        let is_allowed = decision.is_allowed();
        for status in decision.statuses() {
            let outcome = match status.retry_after() {
                Some(_) if status.is_shadow() => "shadow_refused",
                Some(_) => "refused",
                // Counted afterwards, for a request that counts as admitted already.
                None if status.is_spent() => continue,
                None if is_allowed => "allowed",
                // Another limit has refused.
                None => continue,
            };
            let limit = status.limit().shared_name();
            counter!("rate_limit_decisions_total", "limit" => limit, "outcome" => outcome).increment(1);
        }
    }
}

/// A check, a settlement or a reset that the store has not answered.
#[inline]
pub(crate) fn failed(error: &Error) {
    record! {
        let cause = match error {
            Error::TimedOut { .. } => "timed_out",
            Error::Unavailable(_) => "unavailable",
            Error::BreakerOpen(_) => "breaker_open",
            Error::LimitNotChosen(_) => "no_limit",
            // The caller's mistake.
            Error::NeverFits(_) => return,
        };
        counter!("rate_limit_failures_total", "cause" => cause).increment(1);
    }
}

/// A request that the failure mode or fallbacks have decided.
#[inline]
pub(crate) fn degraded(mode: &'static str) {
    record! { counter!("rate_limit_degraded_total", "mode" => mode).increment(1); }
}

/// A refusal by the deny cache.
#[inline]
pub(crate) fn deny_cache_hit() {
    record! { counter!("rate_limit_deny_cache_hits_total").increment(1); }
}

#[inline]
pub(crate) fn breaker_opened() {
    record! { gauge!("rate_limit_breakers_open").increment(1); }
}

/// A breaker that closes, or is dropped while it is open.
#[inline]
pub(crate) fn breaker_closed() {
    record! { gauge!("rate_limit_breakers_open").decrement(1); }
}

/// A batch that is sent, and how many checks still wait.
#[cfg(feature = "redis")]
#[inline]
pub(crate) fn batch(length: usize, waiting: impl FnOnce() -> usize) {
    record! {
        histogram!("rate_limit_batch_checks").record(length as f64);
        histogram!("rate_limit_queue_checks").record(waiting() as f64);
    }
}

#[cfg(feature = "redis")]
#[inline]
pub(crate) fn queue_full() {
    record! { counter!("rate_limit_queue_full_total").increment(1); }
}

/// Measures how long a script takes.
#[cfg(feature = "redis")]
pub(crate) struct Stopwatch(Option<Instant>);

#[cfg(feature = "redis")]
impl Stopwatch {
    #[inline]
    pub(crate) fn start() -> Self {
        Self(cfg!(feature = "metrics").then(Instant::now))
    }

    /// The reply has arrived.
    #[inline]
    pub(crate) fn script(self) {
        let Self(started) = self;
        record! {
            if let Some(started) = started {
                histogram!("rate_limit_script_seconds").record(started.elapsed());
            }
        }
    }
}
