//! Exact, distributed rate limiting for [tower](https://docs.rs/tower) and [axum](https://docs.rs/axum) on Redis.
//!
//! A [`RateLimitLayer`] takes keys from each request, lets one atomic step decide, and forwards the request or answers
//! 429. The window slides: in no span of the window's length, wherever it begins, is more admitted than the limit, by
//! however many processes share it.
//!
//! ```no_run
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # #[cfg(all(feature = "axum", feature = "redis"))] {
//! # use axum::{Router, routing::{get, post}};
//! use std::{net::SocketAddr, time::Duration};
//! use tower_sliding_window::{ApiKey, ClientIp, Limit, PeerIp, RateLimitLayer, RedisStore, Secret};
//!
//! let secret = Secret::new(std::env::var("API_KEY_SECRET")?)?;
//! let store = RedisStore::connect("redis://127.0.0.1:6379").await?;
//!
//! let login = RateLimitLayer::new(store.clone())
//!     .limit(Limit::per_minute("login", 5).by(PeerIp::new()))
//!     .fail_closed();
//!
//! // Three limits, decided together: all or nothing.
//! let api = RateLimitLayer::new(store)
//!     .limit(Limit::per_second("burst", 10).by(ApiKey::header("x-api-key", &secret)))
//!     .limit(Limit::per_hour("hourly", 1_000).by(ApiKey::header("x-api-key", &secret)))
//!     .limit(Limit::per_minute("address", 600).by(ClientIp::behind(["10.0.0.0/8"])?))
//!     .cost(|request| if request.uri.path().starts_with("/search") { 100 } else { 1 })
//!     .deadline(Duration::from_millis(50))
//!     .fail_open();
//!
//! # let (sign_in, search) = (|| async {}, || async {});
//! let app = Router::new()
//!     .route("/login", post(sign_in).layer(login))
//!     .nest("/api", Router::new().route("/search", get(search)).route_layer(api));
//! # let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
//! // The layer has to be told who is at the other end.
//! axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?;
//! # } Ok(()) }
//! ```
//!
//! # Where to read on
//!
//! | module | what it says |
//! |---|---|
//! | [`limit`], [`key`], [`check`], [`decision`], [`error`] | what is counted, in whose name, and what comes out |
//! | [`secret`] | what hashes API keys, and identities in Redis |
//! | [`algorithm`] | an exact log, or less memory: how a limit counts, and how exact that is |
//! | [`split`] | a limit in parts, for a key that is too hot for one node of a cluster |
//! | [`settlement`], [`admission`] | costs that are known afterwards, refunds, and ids that count once |
//! | [`limiter`] | deciding without HTTP: for clients, jobs, and services of other kinds |
//! | [`middleware`] | how a request goes through the layer, and where to put it in a stack |
//! | [`middleware::extract`] | keys: addresses, headers, API keys, closures |
//! | [`middleware::rejection`] | the answers, and how to replace them |
//! | [`store`] | what a store has to do |
//! | [`what_happens_when`] | what a client sees when something fails, and for how long |
//! | [`what_an_attacker_can_do`] | what hostile clients and upstreams can do, what bounds it, and what you choose |
//! | [`metrics`](mod@metrics) | what is counted and measured |
//!
//! # Stores
//!
//! [`MemoryStore`] counts within one process, without a runtime or a task. `RedisStore` shares its limits between all
//! processes on one server, behind sentinels, or on a cluster: each decision is one script on Redis 6.2 or newer, by the
//! server's clock. Checks that arrive
//! while a script is on its way share the next one, equal checks share one entry, and what is known to be refused is refused
//! in the process, without asking Redis, for as long as that is true: see [`DenyCache`]. All limiters and layers on clones of
//! one store share what is known of it: what it has refused, and whether it answers. Each tokio runtime of the process has
//! connections of its own, so one that stands still or ends holds up no other.
//!
//! # What is guaranteed, and what is not
//!
//! * With Redis up, no window of the limit's length holds more than the limit, however many clients race. Limits that
//!   count by a counter or a fixed [`algorithm`] promise less, and a [`settlement`] counts what was spent, even above the
//!   limit.
//! * A refusal costs nothing, and its retry time is exact if nothing else arrives meanwhile. Where the process
//!   [remembers](DenyCache) that less is left than a check costs, it is a true "not before". Where only units are in the way
//!   that are [reserved](KeyedLimit::settle), it is a second by default, since they may be given back at any time.
//! * A request waits for decisions for at most the longest [deadline](RateLimitLayer::deadline) of all layers that it passes,
//!   and 5 ms for each layer that found nothing left of it.
//! * If the server's clock steps back, nothing is over-admitted, and a key is right again one window after the first
//!   refusal that the step causes. If it steps forward, windows end early by the step: at most one extra limit a key.
//! * Replication to a Redis replica is asynchronous: what a failed primary had not passed on is forgotten, so at a
//!   failover up to that many units can be admitted again.
//! * An eviction policy such as `allkeys-lru` or `volatile-lru` lets Redis forget live windows. Use `noeviction`.
//! * While Redis is slow or gone the route's [`FailureMode`] holds: fail-open limits nothing, fail-closed admits
//!   nothing, fail-local admits a [`Share`] of each limit in each process.
//! * A limit's name is the name of what it counts, wherever it is used: limits of one name on one store share their units
//!   for the same key. Give one name one window, and each application on a shared Redis a prefix.
//! * A reset or a settlement is seen at once through all clones of a store, and within a second by other processes, which
//!   may remember a refusal for so long.
//! * Identities stand in Redis as hashes, never as what they are. Unless the store has a secret, a reader of Redis finds those
//!   that can be guessed, such as IPv4 addresses and user names, by trying them: see `RedisStoreBuilder::secret`.
//! * A check that was given up at its deadline may have been counted: at most one request's cost, never more admitted
//!   than the limit.
//!
//! # Features
//!
//! | feature | default | what it adds |
//! |---|---|---|
//! | `axum` | yes | [`PeerIp`] and [`ClientIp`] read axum's `ConnectInfo`, and a [`Rejection`] is a response |
//! | `redis` | yes | `RedisStore`, on one server or behind sentinels |
//! | `cluster` | no | `RedisStore` on a Redis Cluster |
//! | `tls` | no | `rediss://` URLs, by rustls: the system's root certificates, or those of the builder |
//! | `tracing` | yes | log lines for set-up errors, an unavailable store, and the like: of each layer or limiter at most one a second of each kind |
//! | `metrics` | no | counters, gauges and histograms for the recorder of the program: see [`metrics`](mod@metrics) |
//!
//! What takes literals, such as [`Limit::per_minute`], [`Header::new`] or [`RateLimitLayer::limit`], panics on a mistake
//! where the layer is built, or does not compile in a `const`. For values from a configuration there are
//! [`Limit::new`] and [`RateLimitLayer::limits`], which return an error, and an `http::HeaderName` in the place of its
//! text. Nothing panics later.

#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod admission;
pub mod algorithm;
pub mod check;
pub mod decision;
mod digest;
pub mod error;
pub mod key;
pub mod limit;
pub mod limiter;
mod logging;
pub mod metrics;
pub mod middleware;
pub mod secret;
pub mod settlement;
pub mod split;
pub mod store;
#[doc = include_str!("what_happens_when.md")]
pub mod what_happens_when {}
#[doc = include_str!("what_an_attacker_can_do.md")]
pub mod what_an_attacker_can_do {}
mod window;

#[cfg(feature = "redis")]
#[doc(inline)]
pub use self::store::RedisStore;
#[doc(inline)]
pub use self::{
    admission::AdmissionId,
    algorithm::Algorithm,
    check::{Charge, Check, DuplicateCharge, NeverFits},
    decision::{Decision, LimitStatus},
    error::{ChoiceError, Error, StoreError},
    key::Key,
    limit::{InvalidLimit, Limit},
    limiter::{FailureMode, Limiter, Reservation, Share},
    middleware::{
        Degraded, EXPOSED_HEADERS, Exchange, HeaderSets, InvalidLimits, JsonResponse, KeyedLimit, RateLimit,
        RateLimitLayer, Rejection, RejectionResponse, ResetFormat, ShadowRefusals,
        extract::{ApiKey, ClientIp, Everyone, Header, KeyError, KeyExtractor, PeerIp, UpstreamHost},
    },
    secret::Secret,
    settlement::{Settled, Settlement},
    split::{InvalidSplit, Split},
    store::{Breaker, DenyCache, LocalState, ManualClock, MemoryStore, Store},
};

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
