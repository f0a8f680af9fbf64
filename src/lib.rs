//! Exact, distributed rate limiting for [tower](https://docs.rs/tower) and
//! [axum](https://docs.rs/axum), on Redis or in one process.
//!
//! A [`RateLimitLayer`] extracts the keys of each request, decides all its limits in one atomic
//! step, and forwards the request or answers 429. The window slides: no span of the window's length
//! ever admits more than the limit, however many processes share it. See the
//! [guarantees](#guarantees).
//!
//! ```no_run
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # #[cfg(all(feature = "axum", feature = "redis"))] {
//! use std::net::SocketAddr;
//! use axum::{Router, routing::get};
//! use tower_sliding_window::{Limit, PeerIp, RateLimitLayer, RedisStore};
//!
//! let store = RedisStore::connect("redis://127.0.0.1:6379").await?;
//! let limits = RateLimitLayer::new(store)
//!     .limit(Limit::per_second("burst", 10).by(PeerIp::new()))
//!     .limit(Limit::per_hour("hourly", 1_000).by(PeerIp::new()));
//!
//! let app = Router::new().route("/", get(|| async { "hello" })).layer(limits);
//! let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
//! // `PeerIp` needs the address of each connection.
//! axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
//! # } Ok(()) }
//! ```
//!
//! # The guide
//!
//! | start | read |
//! |---|---|
//! | choose numbers, algorithm and failure mode for each kind of route | [`guide::choosing_limits`] |
//! | limit by API key, user, tenant or address | [`guide::choosing_keys`] |
//! | limit by address behind nginx, haproxy, Apache, Caddy, Traefik, Envoy or a cloud's balancer | [`guide::behind_a_proxy`] |
//! | copy a short program: JWT, login, WebSockets, SSE, GraphQL, LLM gateway, quota, reload, usage and reset, workers | [`guide::recipes`] |
//! | move from tower_governor, axum_gcra, actix-limitation, express-rate-limit or nginx | [`guide::moving_here`] |
//! | go live: eleven lines to check | [`guide::before_production`] |
//!
//! | limits | read |
//! |---|---|
//! | combine limits, or limit each route on its own | [`guide::several_limits`] |
//! | give each plan or tenant its own limit, or read limits from a configuration | [`guide::limits_by_plan`] |
//! | limit how many requests, streams, sockets or jobs of a client are open at once | [`guide::at_most_n_at_once`] |
//! | limit by hours, days, weeks or months of the calendar, in a time zone | [`mod@calendar`] |
//! | count only failed logins, or the tokens that a response used; ban a client for a time | [`guide::costs_known_afterwards`] |
//! | admit most requests of a busy tenant without asking Redis | [`guide::hot_keys`] |
//! | limit to millions of units, or spread a hot key over a cluster | [`guide::large_limits`] |
//!
//! | requests and responses | read |
//! |---|---|
//! | exempt or block some clients, or ranges of addresses | [`guide::choosing_keys`](guide::choosing_keys#exempt-or-block-some-clients) |
//! | put the layer into the right place of a stack | [`middleware`] |
//! | guard an application in another language, behind nginx, Caddy, Traefik, Envoy or haproxy | [`guide::another_language`] |
//! | change the response to a refused request | [`middleware::rejection`] |
//! | choose the headers, or send the IETF draft's `RateLimit` | [`RateLimitLayer::headers`], [`HeaderSets`] |
//! | limit gRPC calls, on a server of tonic or around a channel | [`guide::grpc`] |
//! | limit calls to an upstream, or wait instead of being refused | [`guide::around_a_client`] |
//! | limit a job or a handler, without a layer | [`limiter`] |
//!
//! | Redis and operation | read |
//! |---|---|
//! | set up Redis: permissions, memory, size, sentinel, cluster, managed services | [`guide::running_redis`] |
//! | use the pool, client, tokens or TLS that your application has | [`guide::existing_connections`] |
//! | decide what a route does while Redis is slow or gone | [`guide::when_redis_fails`] |
//! | share limits over a distance: a Redis in another region | [`guide::redis_is_far_away`] |
//! | look up a fault: its effect, and how long it lasts | [`guide::what_happens_when`] |
//! | know what a hostile client can do | [`guide::what_an_attacker_can_do`] |
//! | measure and alert | [`metrics`](mod@metrics) |
//! | test my limits without Redis, or try one on real traffic before it refuses | [`guide::testing_your_limits`] |
//! | write a store, and test that it keeps the rules | [`store`](store#a-store-of-your-own), [`guide::testing_your_limits`](guide::testing_your_limits#a-store-of-your-own) |
//!
//! # Modules
//!
//! | module | content |
//! |---|---|
//! | [`middleware`] | the layer: how a request passes through it |
//! | [`middleware::extract`] | keys from requests: addresses, headers, API keys, closures |
//! | [`middleware::rejection`] | responses to refused requests, and how to replace them |
//! | [`limiter`] | deciding without HTTP |
//! | [`limit`], [`key`], [`check`], [`decision`], [`error`] | the terms: units in a window, who spends them, charges that are decided together, the outcome, and why there is none |
//! | [`algorithm`], [`split`] | how a limit counts, and limits in parts |
//! | [`settlement`] | costs known afterwards, refunds |
//! | [`store`] | [`MemoryStore`], `RedisStore`, one [chosen by a URL](store::from_url), stores of your own, the [refusal cache](Limiter::refusal_cache), [`Breaker`](limiter::Breaker) |
//! | [`secret`] | keyed hashes of API keys, and of identities in Redis |
//! | [`metrics`](mod@metrics) | the metrics table |
//! | `testing` | with the feature `test-util`: a store that fails on command |
//! | [`guide`] | one page per task |
//!
//! # Stores
//!
//! [`MemoryStore`] counts within one process, without a runtime or a task. `RedisStore` shares
//! limits between processes: on one server, behind sentinels, or on a cluster. Each decision runs
//! as one script on Redis 6.2 or newer, and uses the server's clock. Checks that arrive while a
//! script is in flight are batched into the next one. Clones of a store share its connections,
//! [breaker](limiter::Breaker) and [refusal cache](Limiter::refusal_cache). [`store::from_url`]
//! chooses a store at run time.
//!
//! # Guarantees
//!
//! * With Redis up, a window never admits more than the limit. Limits with an [`algorithm`] other
//!   than the exact log promise less. So do limits that [count
//!   afterwards](KeyedLimit::count_afterwards).
//! * A refusal does not charge any limit. On a cluster, a check with several keys is decided by all
//!   its slots at the same time. If one slot refuses, the units that the other slots have counted
//!   are given back.
//! * A refusal's retry time ends at the first moment at which the same check would pass. If only
//!   reserved units stand in the way, the retry time is short. If this moment is not known, the
//!   retry time is a lower bound: see [`decision`].
//! * A request waits for decisions at most the longest [deadline](RateLimitLayer::deadline) among
//!   its layers, plus 5 ms for each layer that finds its deadline used up. The default deadline
//!   follows the store's round trip: 50 ms next to the store, and at most 1 s. A layer that [waits
//!   for capacity](RateLimitLayer::wait_up_to) adds its wait.
//! * API keys leave the process only as keyed hashes.
//!
//! Failover, eviction, clock steps and outages weaken these guarantees:
//! [`guide::what_happens_when`] says by how much.
//!
//! # Features
//!
//! | feature | default | adds |
//! |---|---|---|
//! | `axum` | yes | [`PeerIp`] and [`ClientIp`] read axum's `ConnectInfo`, and a [`Rejection`] is a response |
//! | `redis` | yes | `RedisStore`, on one server or behind sentinels |
//! | `cluster` | no | `RedisStore` on a Redis Cluster |
//! | `calendar` | no | limits by the calendar in a time zone: hours, days, weeks and months |
//! | `serde` | no | the text of a [`Limit`] in configurations: `Serialize` and `Deserialize` |
//! | `tls` | no | `rediss://` URLs, by rustls, with the crypto provider that the program installs: see [`guide::existing_connections`] |
//! | `credentials` | no | passwords and tokens that change: see [`guide::existing_connections`] |
//! | `tracing` | yes | log lines for setup errors, an unavailable store and others: at most one line of each kind per second, for each layer or limiter |
//! | `grpc` | no | `GrpcResponse`, [`PeerIp`] and [`ClientIp`] with tonic's peer address, and a [`Rejection`] is a `tonic::Status`: see [`guide::grpc`] |
//! | `test-util` | no | the module `testing`, for `[dev-dependencies]`: see [`guide::testing_your_limits`] |
//! | `metrics` | no | counters, gauges and histograms for the program's recorder: see [`metrics`](mod@metrics) |
//!
//! # Panics
//!
//! Functions that take literals, such as [`Limit::per_minute`], [`Header::new`] or
//! [`RateLimitLayer::limit`], panic on a mistake when the layer is built. In a `const`, the mistake
//! does not compile. For values from a configuration, use [`Limit::new`], [`Limit::parse`],
//! [`RateLimitLayer::limits`] and `http::HeaderName`, which return errors. A layer without limits
//! panics when it is applied to a service. After that, nothing panics in a tokio runtime with time
//! enabled.

#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod algorithm;
#[cfg(feature = "calendar")]
pub mod calendar;
pub mod check;
mod clock;
mod config_error;
pub mod decision;
pub mod error;
pub mod guide;
pub mod key;
pub mod limit;
pub mod limiter;
mod local;
mod logging;
pub mod metrics;
pub mod middleware;
pub mod secret;
pub mod split;
pub mod store;
#[cfg(feature = "test-util")]
pub mod testing;
mod window;

#[doc(inline)]
pub use self::decision::settlement;
#[cfg(feature = "redis")]
#[doc(inline)]
pub use self::store::RedisStore;
#[doc(inline)]
pub use self::{
    algorithm::Algorithm,
    check::{Charge, Check},
    decision::Decision,
    error::{ConfigError, Error},
    key::Key,
    limit::Limit,
    limiter::Limiter,
    middleware::{
        HeaderSets, KeyedLimit, RateLimitLayer, Rejection, extract,
        extract::{ApiKey, ClientIp, Everyone, Header, KeyExtractor, PeerIp},
    },
    secret::Secret,
    store::{MemoryStore, Store},
};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
