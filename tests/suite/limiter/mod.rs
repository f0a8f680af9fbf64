//! `Limiter`: waiting, pausing, the breaker, the deny cache, fail-local, and metrics.

mod acquiring;
mod blocks;
mod breaker;
mod deny_cache;
mod fail_local;
#[cfg(feature = "metrics")]
mod metrics;
mod pausing;
