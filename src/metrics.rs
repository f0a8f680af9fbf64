//! Metrics, for a recorder behind the [`metrics`](https://docs.rs/metrics) facade.
//!
//! | name | kind | unit | labels | counts or measures |
//! |---|---|---|---|---|
//! | `rate_limit_decisions_total` | counter | decisions | `layer`; `limit`: the limit's name; `outcome`: `allowed`, `refused`, `shadow_refused` | how often a limit was part of an admission, refused a check, or would have refused one in [shadow mode](crate::KeyedLimit::in_shadow); units counted [afterwards](crate::KeyedLimit::count_afterwards), and charges at no cost, such as those from [`peek`](crate::Limiter::peek), are left out |
//! | `rate_limit_rejections_total` | counter | requests | `layer`; `kind`: `limited`, `never_fits`, `no_key`, `not_set_up`, `denied`, `banned`, `unavailable` | how often a layer responded without calling the service, or a handler returned a [`Rejection`](crate::Rejection). The kinds are, in order: a 429 over a limit, a 429 because the cost is above a limit, a 4xx because of the key, a 500 because the server is not set up to find a key or to hold a place, a 403, a response to a [banned](crate::KeyedLimit::ban) key, and a 503 |
//! | `rate_limit_uncounted_total` | counter | requests | `layer` | how often a layer let an [exempt](crate::RateLimitLayer::exempt) request pass without looking at its limits |
//! | `rate_limit_failures_total` | counter | failures | `layer`; `cause`: `timed_out`, `unavailable`, `breaker_open`, `not_given_back` | how often a check, a settlement or a reset failed: see [`Error`](crate::Error). `not_given_back`: how often a check on [several slots](crate::store::RedisSource::cluster) was refused, but units that one of them had counted were not found again |
//! | `rate_limit_degraded_total` | counter | requests | `layer`; `mode`: `open`, `closed`, `local` | how often a layer's [failure mode](crate::limiter::FailureMode) decided, or a handler returned a [`Rejection`](crate::Rejection) with the status 503 |
//! | `rate_limit_refusal_cache_hits_total` | counter | refusals | | refusals by the [refusal cache](crate::Limiter::refusal_cache), without asking the store |
//! | `rate_limit_prefetch_hits_total` | counter | checks | | admissions out of [prefetch](crate::limit::prefetch), without asking the store |
//! | `rate_limit_breakers_open` | gauge | breakers | | open [breakers](crate::limiter::Breaker): 0 or 1 for one `RedisStore`, and on a cluster one for each failing node or group of nodes, unless a limiter or layer has its own breaker |
//! | `rate_limit_batch_checks` | histogram | checks and settlements | | the size of each batch that is sent to Redis |
//! | `rate_limit_queue_checks` | histogram | checks and settlements | | how many still wait when a batch is sent |
//! | `rate_limit_queue_full_total` | counter | checks and settlements | | how many failed at once, because they would have been answered after the deadline, or because 65,536 others were already waiting |
//! | `rate_limit_script_seconds` | histogram | seconds | | time from sending a batch to its reply or error, without the time that its checks wait in the queue or for a connection |
//!
//! 1. Metrics need the feature `metrics`, which is off by default. Without it, no metrics code is
//!    compiled.
//! 2. `layer` is the layer's [name](crate::RateLimitLayer::named). It is empty for an unnamed
//!    layer, for a handler, and for a [`Limiter`](crate::Limiter) without a layer. Prometheus
//!    treats an empty label like a missing one.
//! 3. A check under several limits counts once per limit. If it is refused, only the limits that
//!    refused it count. Decisions by the refusal cache, and under a local
//!    [share](crate::limiter::Share), count too.
//! 4. Each failed check, settlement or reset counts as one failure, whatever the failure mode does.
//!    Probes do not count.
//! 5. A rejection counts once, for the layer that made it. A responder that calls the rejection's
//!    `into_response` counts it again, under the empty layer name. A request that is charged and
//!    not rejected is not in any request counter; `rate_limit_decisions_total` counts it, once per
//!    limit. A request whose [chosen](crate::KeyedLimit::chosen) limits are all `None`, or that
//!    costs nothing, is not counted at all.
//! 6. Labels never contain a key or other text from a client. The number of series depends only on
//!    layer and limit names. Each limit name has its own series in each layer, including
//!    [chosen](crate::KeyedLimit::chosen) limits.
//! 7. Install the recorder before the first request. The gauge for open breakers is only raised and
//!    lowered, never set, so a recorder installed later misses breakers that are already open. A
//!    recorder gets all units and descriptions just before the first value that it records.
//!
//! # Dashboard and alerts
//!
//! The example `metrics` exports all metrics: `cargo run --example metrics --features metrics`. The
//! folder `examples/metrics` also has a Grafana dashboard, `dashboard.json`, and Prometheus rules,
//! `alerts.yml`. The rules alert on Redis, and on the following:
//!
//! | alert on | reason |
//! |---|---|
//! | `rate_limit_breakers_open` above 0 | a store has failed repeatedly and is not asked, so failure modes decide |
//! | an increase of `rate_limit_degraded_total` | the store did not decide. Depending on `mode`, limits were not enforced, requests got a 503, or a share decided |
//! | an increase of `rate_limit_rejections_total{kind="never_fits"}` | a limit is smaller than the cost of a request, so waiting does not help the client |
//! | an increase of `rate_limit_rejections_total{kind="not_set_up"}` | the server does not know its peers, or its bodies cannot [hold places](crate::guide::at_most_n_at_once#bodies), so requests get a 500 |
//! | an increase of `rate_limit_queue_full_total` | Redis decides fewer checks than arrive |
//!
//! A counter appears with its first event, so `rate` and `increase` in Prometheus miss that event.
//! An alert on such a counter must also look for a new counter:
//!
//! ```text
//! increase(rate_limit_degraded_total[5m]) > 0
//!   or (rate_limit_degraded_total unless rate_limit_degraded_total offset 5m)
//! ```
//!
//! To find the fraction of requests that a limit refuses, divide its `refused` decisions by all its
//! decisions. To see timeouts coming, compare `rate_limit_script_seconds` with the
//! [deadline](crate::RateLimitLayer::deadline), which includes the wait in the queue. Clients can
//! cause `kind="no_key"` rejections at will, so do not alert on them.
//!
//! # Buckets
//!
//! Histogram buckets have to fit the values. A batch has at most 64 checks, or 128 equal ones. At
//! most 65,536 checks wait in the queue. Time histograms need a boundary at the deadline. The
//! default deadline is 50 ms next to Redis. If Redis is farther away, it is a little more than five
//! round trips, but at most 1 s. In that case, also add boundaries at one, two, three and five
//! round trips.
//!
//! ```
//! # #[cfg(feature = "metrics")]
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use metrics_exporter_prometheus::{Matcher, PrometheusBuilder};
//! use tower_sliding_window::{Limit, Limiter, MemoryStore};
//!
//! const SECONDS: [f64; 10] = [0.000_2, 0.000_5, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 1.0];
//! const BATCH: [f64; 8] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0];
//! const QUEUE: [f64; 7] = [0.0, 16.0, 64.0, 256.0, 1_024.0, 8_192.0, 65_536.0];
//!
//! let prometheus = PrometheusBuilder::new()
//!     .set_buckets_for_metric(Matcher::Full("rate_limit_script_seconds".to_owned()), &SECONDS)?
//!     .set_buckets_for_metric(Matcher::Full("rate_limit_batch_checks".to_owned()), &BATCH)?
//!     .set_buckets_for_metric(Matcher::Full("rate_limit_queue_checks".to_owned()), &QUEUE)?
//!     .install_recorder()?;
//!
//! let limiter = Limiter::new(MemoryStore::new());
//! assert!(limiter.check(&Limit::per_minute("calls", 60), "ada", 1).await?.is_allowed());
//! let page = prometheus.render();
//! assert!(page.contains("# HELP rate_limit_decisions_total Decisions by limit and outcome"));
//! assert!(page.contains(r#"rate_limit_decisions_total{layer="",limit="calls",outcome="allowed"} 1"#));
//! # Ok(()) }
//! # #[cfg(not(feature = "metrics"))] fn main() {}
//! ```
#![allow(
    clippy::ptr_arg,
    reason = "a label is a clone of the name, which copies a literal for nothing"
)]
#![cfg_attr(
    not(feature = "metrics"),
    allow(unused_variables, reason = "without the feature nothing is recorded")
)]

use std::borrow::Cow;

#[cfg(feature = "metrics")]
use ::metrics::{
    Recorder, Unit, counter, describe_counter, describe_gauge, describe_histogram, gauge,
    with_recorder,
};

use crate::decision::Decision;

/// Runs the body if the feature `metrics` is on. Otherwise it is not compiled.
macro_rules! record {
    ($($body:tt)*) => {
        #[cfg(feature = "metrics")]
        {
            describe();
            $($body)*
        }
    };
}

/// Describes all metrics to the current recorder, unless it was the last recorder to get the
/// descriptions. A process may install a recorder at any time, and a test may have one per thread.
#[cfg(feature = "metrics")]
fn describe() {
    use std::{
        ptr,
        sync::atomic::{AtomicUsize, Ordering},
    };

    /// The address of the recorder that got the last descriptions.
    static DESCRIBED: AtomicUsize = AtomicUsize::new(0);

    let address =
        with_recorder(|recorder: &dyn Recorder| ptr::from_ref(recorder).cast::<()>().addr());
    if DESCRIBED.load(Ordering::Relaxed) == address {
        return;
    }
    fn count(name: &'static str, text: &'static str) {
        describe_counter!(name, Unit::Count, text);
    }
    count(
        "rate_limit_decisions_total",
        "Decisions by limit and outcome",
    );
    count(
        "rate_limit_rejections_total",
        "Requests with a response in the service's place, by kind",
    );
    count(
        "rate_limit_uncounted_total",
        "Requests that a layer let through without looking at its limits",
    );
    count(
        "rate_limit_failures_total",
        "Checks, settlements and resets that failed, by cause",
    );
    count(
        "rate_limit_degraded_total",
        "Requests decided by a failure mode, by mode",
    );
    count(
        "rate_limit_refusal_cache_hits_total",
        "Refusals without asking the store",
    );
    count(
        "rate_limit_prefetch_hits_total",
        "Admissions out of prefetches, without asking the store",
    );
    count(
        "rate_limit_queue_full_total",
        "Checks and settlements that failed at once because the queue was too long",
    );
    describe_gauge!(
        "rate_limit_breakers_open",
        Unit::Count,
        "Open circuit breakers"
    );
    describe_histogram!(
        "rate_limit_batch_checks",
        Unit::Count,
        "Checks and settlements in a batch",
    );
    describe_histogram!(
        "rate_limit_queue_checks",
        Unit::Count,
        "Checks and settlements that still wait when a batch is sent",
    );
    describe_histogram!(
        "rate_limit_script_seconds",
        Unit::Seconds,
        "Time from sending a script to its reply",
    );
    // Stored after the descriptions, so that no other thread records a value before them.
    DESCRIBED.store(address, Ordering::Relaxed);
}

/// Counts the outcome for each limit in a decision. `layer` is the layer's name.
#[inline]
pub(crate) fn decided(decision: &Decision, layer: &Cow<'static, str>) {
    record! {
        let is_allowed = decision.is_allowed();
        for status in decision.statuses() {
            let outcome = match status.retry_after() {
                Some(_) if status.is_shadow => "shadow_refused",
                Some(_) => "refused",
                None if is_allowed && status.has_asked => "allowed",
                // This limit has no outcome if another limit refused the check, or if the caller
                // only looked. For units counted afterwards, the outcome was counted with the
                // admission.
                None => continue,
            };
            let limit = status.limit.identity.name.clone();
            counter!("rate_limit_decisions_total", "layer" => layer.clone(), "limit" => limit, "outcome" => outcome).increment(1);
        }
    }
}

/// Counts a failed check, settlement or reset. `None` is a caller's mistake, and is not counted.
#[inline]
pub(crate) fn failed(cause: Option<&'static str>, layer: &Cow<'static, str>) {
    record! {
        if let Some(cause) = cause {
            counter!("rate_limit_failures_total", "layer" => layer.clone(), "cause" => cause).increment(1);
        }
    }
}

/// Counts a request decided by the failure mode.
#[inline]
pub(crate) fn degraded(mode: &'static str, layer: &Cow<'static, str>) {
    record! { counter!("rate_limit_degraded_total", "layer" => layer.clone(), "mode" => mode).increment(1); }
}

/// Counts a response made without calling the service.
#[inline]
pub(crate) fn rejected(kind: &'static str, layer: &Cow<'static, str>) {
    record! { counter!("rate_limit_rejections_total", "layer" => layer.clone(), "kind" => kind).increment(1); }
}

/// Counts a request that passes a layer without looking at its limits.
#[inline]
pub(crate) fn uncounted(layer: &Cow<'static, str>) {
    record! { counter!("rate_limit_uncounted_total", "layer" => layer.clone()).increment(1); }
}

/// Counts a refusal by the refusal cache.
#[inline]
pub(crate) fn refusal_cache_hit() {
    record! { counter!("rate_limit_refusal_cache_hits_total").increment(1); }
}

#[inline]
pub(crate) fn prefetch_hit() {
    record! { counter!("rate_limit_prefetch_hits_total").increment(1); }
}

/// Changes the number of open breakers: by 1 when one opens, by -1 when an open one closes or is
/// dropped.
#[inline]
pub(crate) fn breakers_open(change: f64) {
    record! { gauge!("rate_limit_breakers_open").increment(change); }
}

/// Records the size of a batch as it is sent, and how many checks still wait.
#[cfg(feature = "redis")]
#[inline]
pub(crate) fn batch(length: usize, waiting: impl FnOnce() -> usize) {
    record! {
        ::metrics::histogram!("rate_limit_batch_checks").record(length as f64);
        ::metrics::histogram!("rate_limit_queue_checks").record(waiting() as f64);
    }
}

#[cfg(feature = "redis")]
#[inline]
pub(crate) fn queue_full() {
    record! { counter!("rate_limit_queue_full_total").increment(1); }
}

/// Records the time from `sent`, when the dispatcher began to send a batch, to its reply or error.
#[cfg(feature = "redis")]
#[inline]
pub(crate) fn script(sent: std::time::Instant) {
    record! { ::metrics::histogram!("rate_limit_script_seconds").record(sent.elapsed()) }
}
