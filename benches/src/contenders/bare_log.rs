//! The least that an exact log costs in process: a map of queues of times and ids, in shards, and
//! the two headers of tower_governor. It has no settlements, no bound on its memory, no decision
//! for the service, and one limit.

use std::{
    collections::{HashMap, VecDeque},
    convert::Infallible,
    future::Ready,
    hash::{BuildHasher, RandomState},
    sync::{Arc, Mutex},
    task::{Context, Poll},
    time::Instant,
};

use axum::body::Body;
use http::{HeaderName, HeaderValue, Request, Response};
use tower::Service;

use super::{Contender, Inner, Layered, Quota};

/// Its name in tables and plots.
pub(crate) const BARE_LOG: &str = "a bare log";

const LIMIT: HeaderName = HeaderName::from_static("x-ratelimit-limit");
const REMAINING: HeaderName = HeaderName::from_static("x-ratelimit-remaining");

const SHARDS: usize = 64;

/// As long as the keys here may be.
type Key = [u8; 16];

/// Microseconds, and an id of eight bytes.
type Log = VecDeque<(u64, u64)>;

#[derive(Clone)]
struct BareLog(Arc<Shared>);

struct Shared {
    shards: [Shard; SHARDS],
    hasher: RandomState,
    began: Instant,
    quota: Quota,
}

#[derive(Default)]
#[repr(align(128))]
struct Shard(Mutex<HashMap<Key, Log>>);

pub(crate) fn bare_log(quota: Quota) -> impl Contender {
    let shards = std::array::from_fn(|_| Shard::default());
    Layered(BareLog(Arc::new(Shared {
        shards,
        hasher: RandomState::new(),
        began: Instant::now(),
        quota,
    })))
}

impl Service<Request<()>> for BareLog {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Ready<Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<()>) -> Self::Future {
        let Shared {
            shards,
            hasher,
            began,
            quota,
        } = &*self.0;
        let value = request.headers()["x-key"].as_bytes();
        let mut key = Key::default();
        key[..value.len()].copy_from_slice(value);
        let hash = hasher.hash_one(key);
        let (now, window) = (
            began.elapsed().as_micros() as u64,
            quota.window.as_micros() as u64,
        );
        let left = {
            let mut logs = shards[(hash >> 32) as usize % SHARDS]
                .0
                .lock()
                .expect("no thread panics");
            let log = logs.entry(key).or_default();
            while log.front().is_some_and(|(at, _)| at + window <= now) {
                log.pop_front();
            }
            let left = (quota.units as usize)
                .checked_sub(log.len() + 1)
                .expect("the limit is never reached");
            log.push_back((now, hash));
            left
        };
        let mut response = Inner.call(request).into_inner();
        if let Ok(response) = &mut response {
            response.headers_mut().insert(LIMIT, quota.units.into());
            response
                .headers_mut()
                .insert(REMAINING, HeaderValue::from(left));
        }
        std::future::ready(response)
    }
}
