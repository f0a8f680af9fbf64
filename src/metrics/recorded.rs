//! With the feature `metrics`: what the table says.

#[cfg(feature = "redis")]
use std::time::Instant;

#[cfg(feature = "redis")]
use ::metrics::histogram;
use ::metrics::{counter, gauge};

use crate::{decision::Decision, error::Error};

/// A decision, of whoever.
pub(crate) fn decided(decision: &Decision) {
    let is_allowed = decision.is_allowed();
    for status in decision.statuses() {
        let outcome = match status.retry_after() {
            Some(_) if status.is_shadow() => "shadow_refused",
            Some(_) => "refused",
            // It was let through before.
            None if status.is_spent() => continue,
            None if is_allowed => "allowed",
            // Another has refused.
            None => continue,
        };
        let limit = status.limit().shared_name();
        counter!("rate_limit_decisions_total", "limit" => limit, "outcome" => outcome).increment(1);
    }
}

/// A check, a settlement or a reset that the store has not answered.
pub(crate) fn failed(error: &Error) {
    let cause = match error {
        Error::TimedOut { .. } => "timed_out",
        Error::Unavailable(_) => "unavailable",
        Error::BreakerOpen(_) => "breaker_open",
        Error::LimitNotChosen(_) => "no_limit",
        // The caller's.
        Error::NeverFits(_) => return,
    };
    counter!("rate_limit_failures_total", "cause" => cause).increment(1);
}

/// A request that the failure mode has decided.
pub(crate) fn degraded(mode: &'static str) {
    counter!("rate_limit_degraded_total", "mode" => mode).increment(1);
}

/// A refusal out of the deny cache.
pub(crate) fn recalled() {
    counter!("rate_limit_deny_cache_hits_total").increment(1);
}

pub(crate) fn breaker_opened() {
    gauge!("rate_limit_breakers_open").increment(1);
}

/// Also one that has gone while it was open.
pub(crate) fn breaker_closed() {
    gauge!("rate_limit_breakers_open").decrement(1);
}

/// A batch of so many leaves, and so many are left.
#[cfg(feature = "redis")]
pub(crate) fn batch(length: usize, waiting: impl FnOnce() -> usize) {
    histogram!("rate_limit_batch_checks").record(length as f64);
    histogram!("rate_limit_queue_checks").record(waiting() as f64);
}

#[cfg(feature = "redis")]
pub(crate) fn queue_full() {
    counter!("rate_limit_queue_full_total").increment(1);
}

/// Measures how long a script takes.
#[cfg(feature = "redis")]
pub(crate) struct Stopwatch(Instant);

#[cfg(feature = "redis")]
impl Stopwatch {
    pub(crate) fn start() -> Self {
        Self(Instant::now())
    }

    /// The script has come back.
    pub(crate) fn script(self) {
        histogram!("rate_limit_script_seconds").record(self.0.elapsed());
    }
}
