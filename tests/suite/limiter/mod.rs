//! `Limiter`: waiting, blocking, the breaker, the refusal cache, fail-local, and metrics.

mod acquiring;
mod blocking;
mod breaker;
mod concurrent;
mod fail_local;
#[cfg(feature = "metrics")]
mod metrics;
mod prefetch;
mod refusal_cache;
