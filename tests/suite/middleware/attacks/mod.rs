//! Attacks on the responses of a layer: by the service inside of it, by clients, and by unusual
//! limits.

mod clients;
mod modes;
mod refusals;

use std::{
    collections::BTreeMap,
    convert::Infallible,
    future::{poll_fn, ready},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::Poll,
    time::Duration,
};

use axum::{body::Body, response::Response};
use http::{HeaderMap, HeaderValue, Request};
use metrics_util::debugging::{DebugValue, DebuggingRecorder, Snapshotter};
use sfv::{BareItem, ListEntry, Parser};
use tower::{Layer, ServiceExt, service_fn, util::BoxCloneService};
use tower_sliding_window::{
    HeaderSets, KeyedLimit, Limit, MemoryStore, RateLimitLayer, store::ManualClock,
};

use crate::support::{
    requests::{anyone, json, request},
    services::{App, around, handler},
};

type Items = Vec<(String, BTreeMap<String, i64>)>;

/// The items of a field, or the error of a parser of Structured Fields, which makes a client ignore
/// the whole field.
fn items(headers: &HeaderMap, field: &str) -> Result<Items, String> {
    let lines: Vec<_> = headers
        .get_all(field)
        .iter()
        .map(|line| String::from_utf8_lossy(line.as_bytes()))
        .collect();
    let text = lines.join(", ");
    let list: sfv::List = Parser::new(&text)
        .parse()
        .map_err(|error| format!("{error} in {text}"))?;
    list.into_iter()
        .map(|entry| {
            let ListEntry::Item(item) = entry else {
                return Err(format!("an inner list in {text}"));
            };
            let BareItem::String(name) = &item.bare_item else {
                return Err(format!("no name in {text}"));
            };
            let numbers = item.params.iter().filter_map(|(key, value)| {
                Some((key.as_str().to_owned(), i64::from(value.as_integer()?)))
            });
            Ok((name.as_str().to_owned(), numbers.collect()))
        })
        .collect()
}

fn of(items: &Items, name: &str) -> Option<BTreeMap<String, i64>> {
    items
        .iter()
        .find(|(other, _)| other == name)
        .map(|(_, numbers)| numbers.clone())
}

/// How long a client that obeys only `RateLimit` waits before its next request.
fn obedient_wait(headers: &HeaderMap) -> Duration {
    let items = items(headers, "ratelimit").unwrap();
    let waits = items.iter().filter(|(_, numbers)| numbers["r"] == 0);
    let longest = waits
        .map(|(_, numbers)| numbers.get("t").copied().unwrap_or(0))
        .max()
        .unwrap_or(0);
    Duration::from_secs(longest.try_into().unwrap())
}

async fn ask(app: &App) -> Response {
    app.clone().oneshot(request()).await.unwrap()
}

fn clocked() -> (MemoryStore, ManualClock) {
    let clock = ManualClock::new();
    (MemoryStore::new().clock(&clock), clock)
}

fn minutes(minutes: u64) -> Duration {
    Duration::from_secs(60 * minutes)
}

/// A service whose response has these `RateLimit` lines.
fn sending(lines: &'static [&'static [u8]]) -> App {
    BoxCloneService::new(service_fn(move |_: Request<Body>| {
        let mut response = Response::new(Body::empty());
        for line in lines {
            response
                .headers_mut()
                .append("ratelimit", HeaderValue::from_bytes(line).unwrap());
        }
        ready(Ok::<_, Infallible>(response))
    }))
}

/// The metrics recorded in this thread.
struct Recorded {
    snapshotter: Snapshotter,
    _recorder: metrics::LocalRecorderGuard<'static>,
}

impl Recorded {
    fn start() -> Self {
        let recorder: &'static DebuggingRecorder = Box::leak(Box::default());
        Self {
            snapshotter: recorder.snapshotter(),
            _recorder: metrics::set_default_local_recorder(recorder),
        }
    }

    /// The counters by name and values of their labels.
    fn counters(&self) -> BTreeMap<String, u64> {
        let series = self
            .snapshotter
            .snapshot()
            .into_vec()
            .into_iter()
            .filter_map(|(key, _, _, value)| {
                let DebugValue::Counter(count) = value else {
                    return None;
                };
                let labels = key
                    .key()
                    .labels()
                    .map(|label| format!(" {}", label.value()));
                Some((
                    format!("{}{}", key.key().name(), labels.collect::<String>()),
                    count,
                ))
            });
        series.collect()
    }
}
