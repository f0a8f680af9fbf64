//! Metrics: what is counted and measured, for a recorder behind the facade [`metrics`](https://docs.rs/metrics).
//!
//! | name | kind | unit | labels | what it says |
//! |---|---|---|---|---|
//! | `rate_limit_decisions_total` | counter | decisions | `limit`: the limit's name; `outcome`: `allowed`, `refused`, `shadow_refused` | how often a limit was part of an admission, but for counting [afterwards](crate::KeyedLimit::count_afterwards), has refused, or in the [shadow](crate::KeyedLimit::in_shadow) would have refused |
//! | `rate_limit_failures_total` | counter | failures | `cause`: `timed_out`, `unavailable`, `breaker_open`, `no_limit` | how often there was no answer of the store, or a limit could not be chosen: see [`Error`](crate::Error) |
//! | `rate_limit_degraded_total` | counter | requests | `mode`: `open`, `closed`, `local`, `fallback` | how often a layer's [failure mode](crate::FailureMode) has decided, or let a limit be left out; how often only [fallbacks](crate::KeyedLimit::fallback) were needed; how often a handler has answered 503 by a [`Rejection`](crate::Rejection) |
//! | `rate_limit_deny_cache_hits_total` | counter | refusals | | how many came out of a [`DenyCache`](crate::DenyCache), without asking the store |
//! | `rate_limit_breakers_open` | gauge | breakers | | how many [breakers](crate::Breaker) are open: 0 or 1 where there is one `RedisStore`, whatever is on it, and no limiter or layer has one of its own |
//! | `rate_limit_batch_checks` | histogram | checks and settlements | | how many travelled to Redis in one batch |
//! | `rate_limit_queue_checks` | histogram | checks and settlements | | how many were left waiting when a batch left |
//! | `rate_limit_queue_full_total` | counter | checks and settlements | | how many failed because too many were waiting |
//! | `rate_limit_script_seconds` | histogram | seconds | | how long a batch took to get a connection, go to Redis and come back, however it ended |
//!
//! 1. They need the feature `metrics`, which is not a default one. Without it, nothing of them is compiled.
//! 2. A check of several limits is a decision for each of them, but those that had room when another refused count
//!    nothing. Decisions out of the deny cache, in this process while the store fails, and at no cost count as well: who is
//!    refused since others [wait](crate::Limiter::acquire) is a refusal, and before it an admission at no cost, by which
//!    it has been asked how the limits stand.
//! 3. A failure counts for each check, settlement or reset, whatever is done about it; a probe is none. `no_limit` counts for
//!    each request, however many limits could not be chosen for it.
//! 4. No label has a key in it. There are as many series as limits: where limits are
//!    [chosen](crate::KeyedLimit::chosen), as many as they have names.
//! 5. The recorder has to be there before the first request: the gauge counts from there.

#[cfg(not(feature = "metrics"))]
mod nothing;
#[cfg(feature = "metrics")]
mod recorded;

#[cfg(not(feature = "metrics"))]
pub(crate) use self::nothing::*;
#[cfg(feature = "metrics")]
pub(crate) use self::recorded::*;
