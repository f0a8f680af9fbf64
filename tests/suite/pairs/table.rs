//! The table of all options. It is the one place that names them: a new option gets a value here,
//! or a line in [`NO_OPTIONS`].

use std::time::Duration;

use axum::body::Body;
use http::{Response, request::Parts};
use tower_sliding_window::{
    Algorithm, ClientIp, HeaderSets, Key, KeyExtractor, KeyedLimit, Limit, Limiter, RateLimitLayer,
    Rejection, Secret,
    extract::{AddressList, KeyError},
    limit::prefetch::DEFAULT_LIFE,
    limiter::{Breaker, Share},
    split::Split,
    store::RedisStoreBuilder,
};

use crate::support::{ms, seconds};

/// A row of the covering array has one value of each dimension.
pub(super) struct Dimension {
    pub(super) name: &'static str,
    pub(super) values: &'static [Value],
}

#[derive(Clone, Copy)]
pub(super) struct Value {
    pub(super) name: &'static str,
    /// The builder methods that it stands for.
    pub(super) options: &'static [&'static str],
    pub(super) apply: Apply,
    /// True if it hides what the other options of its row do, such as a limit that refuses nothing.
    /// Then the row counts for its own pairs alone.
    pub(super) hides: bool,
}

/// What a value does to the app of its row.
#[derive(Clone, Copy)]
pub(super) enum Apply {
    /// The app itself is made by the name of the value.
    Nothing,
    Limit(fn(Limit) -> Limit),
    Keyed(fn(KeyedLimit) -> KeyedLimit),
    Layer(fn(RateLimitLayer) -> RateLimitLayer),
    Limiter(fn(Limiter) -> Limiter),
    Store(fn(RedisStoreBuilder) -> RedisStoreBuilder),
}
use Apply::{Keyed, Layer, Nothing, Store};

const fn value(name: &'static str, options: &'static [&'static str], apply: Apply) -> Value {
    Value {
        name,
        options,
        apply,
        hides: false,
    }
}

const fn hiding(value: Value) -> Value {
    Value {
        hides: true,
        ..value
    }
}

const fn plain(name: &'static str) -> Value {
    value(name, &[], Nothing)
}

/// The units of the limit under test.
pub(super) const UNITS: u64 = 4;
/// The window of a limit that is no calendar's and not concurrent.
pub(super) const WINDOW: Duration = seconds(3);
/// The places of the concurrent limit beside it.
pub(super) const PLACES: u64 = 2;
/// A ban outlasts the window.
pub(super) const BAN: Duration = seconds(30);
/// The deadline of all rows without one of their own.
pub(super) const DEADLINE: Duration = ms(400);
/// The time for which a row's requests wait for capacity.
pub(super) const MAX_WAIT: Duration = ms(300);
pub(super) const SHARE: Share = Share::one_of(2);
/// Of the limit under test.
pub(super) const SHARE_UNITS: usize = 2;
pub(super) const RESPONDED: &str = "made by the responder";

/// The names of these headers choose keys: of the client, and of whom a list names.
pub(super) const CLIENT: &str = "x-client";
pub(super) const LISTED: &str = "x-listed";
pub(super) const LISTED_ADDRESS: &str = "203.0.113.9";

pub(super) fn by_client(parts: &Parts) -> Result<Key, KeyError> {
    key_in(CLIENT, parts)
}

/// Makes another key than [`by_client`] for each client.
pub(super) fn by_tenant(parts: &Parts) -> Result<Key, KeyError> {
    by_client(parts).map(|client| tenant_of(&client))
}

pub(super) fn tenant_of(client: &Key) -> Key {
    Key::new("tenant", client.value())
}

fn by_listed(parts: &Parts) -> Result<Key, KeyError> {
    key_in(LISTED, parts)
}

fn key_in(header: &'static str, parts: &Parts) -> Result<Key, KeyError> {
    let value = parts
        .headers
        .get(header)
        .and_then(|value| value.to_str().ok());
    value
        .map(|value| Key::new(header, value))
        .ok_or_else(|| KeyError::missing(header))
}

fn listed() -> [Key; 1] {
    [Key::new(LISTED, "yes")]
}

fn addresses() -> (ClientIp, AddressList) {
    (
        ClientIp::behind(["127.0.0.1"]).unwrap(),
        AddressList::new([LISTED_ADDRESS]).unwrap(),
    )
}

fn secret() -> Secret {
    Secret::new("a secret of the tests, long enough").unwrap()
}

fn algorithm_of(limit: Limit, other: &Limit) -> Limit {
    limit.with_algorithm(other.algorithm())
}

pub(super) const DIMENSIONS: &[Dimension] = &[
    Dimension {
        name: "kind",
        values: &[
            plain("log"),
            value(
                "compact",
                &["Limit::with_algorithm"],
                Apply::Limit(|limit| limit.with_algorithm(Algorithm::compact_log(16))),
            ),
            value(
                "counter",
                &[],
                Apply::Limit(|limit| limit.with_algorithm(Algorithm::SLIDING_WINDOW_COUNTER)),
            ),
            value(
                "fixed",
                &[],
                Apply::Limit(|limit| limit.with_algorithm(Algorithm::FIXED_WINDOW)),
            ),
            #[cfg(feature = "calendar")]
            value(
                "calendar",
                &[],
                Apply::Limit(|limit| {
                    algorithm_of(limit, &"month=1/month(28) Europe/Berlin".parse().unwrap())
                }),
            ),
            value(
                "concurrent",
                &[],
                Apply::Limit(|limit| {
                    algorithm_of(limit, &Limit::concurrent("places", 1)).freed_after(seconds(10))
                }),
            ),
            value("split", &["Limit::split"], Nothing),
        ],
    },
    Dimension {
        name: "beside",
        values: &[
            plain("no other limit"),
            plain("a place"),
            plain("a window"),
            // On a cluster, it is in another slot.
            plain("a place of another key"),
            plain("a window of another key"),
        ],
    },
    Dimension {
        name: "charge",
        values: &[
            plain("1 unit"),
            value(
                "a cost of 2",
                &["KeyedLimit::cost"],
                Keyed(|limit| limit.cost(|_| 2)),
            ),
            value(
                "a layer's cost of 2",
                &["RateLimitLayer::cost"],
                Layer(|layer| layer.cost(|_| 2)),
            ),
            hiding(value("a cost of 0", &[], Keyed(|limit| limit.cost(|_| 0)))),
            value(
                "settle",
                &["KeyedLimit::settle", "KeyedLimit::lease"],
                Keyed(|limit| {
                    limit
                        .settle(|exchange| u64::from(exchange.response.status != 204))
                        .lease(seconds(1))
                }),
            ),
            value(
                "count_afterwards",
                &["KeyedLimit::count_afterwards"],
                Keyed(|limit| {
                    limit.count_afterwards(|exchange| u64::from(exchange.response.status != 204))
                }),
            ),
            value(
                "heed_upstream",
                &["KeyedLimit::heed_upstream"],
                Keyed(KeyedLimit::heed_upstream),
            ),
        ],
    },
    Dimension {
        name: "show",
        values: &[
            plain("visible"),
            hiding(value(
                "in_shadow",
                &["KeyedLimit::in_shadow"],
                Keyed(KeyedLimit::in_shadow),
            )),
            value("hidden", &["KeyedLimit::hidden"], Keyed(KeyedLimit::hidden)),
        ],
    },
    Dimension {
        name: "chosen",
        values: &[value("by", &["Limit::by"], Nothing), plain("chosen")],
    },
    Dimension {
        name: "ban",
        values: &[
            plain("no ban"),
            value(
                "ban",
                &["KeyedLimit::ban"],
                Keyed(|limit| limit.ban(ban(), BAN)),
            ),
        ],
    },
    Dimension {
        name: "extra",
        values: &[
            plain("nothing"),
            // Some kinds refuse them.
            hiding(value(
                "prefetch",
                &["Limit::prefetch"],
                Apply::Limit(|limit| limit.prefetch(DEFAULT_LIFE)),
            )),
            hiding(value(
                "freed_after",
                &["Limit::freed_after"],
                Apply::Limit(|limit| limit.freed_after(seconds(30))),
            )),
        ],
    },
    Dimension {
        name: "mode",
        values: &[
            plain("default mode"),
            value(
                "fail_open",
                &["RateLimitLayer::fail_open"],
                Layer(RateLimitLayer::fail_open),
            ),
            value(
                "fail_closed",
                &["RateLimitLayer::fail_closed"],
                Layer(RateLimitLayer::fail_closed),
            ),
            value(
                "fail_local",
                &["RateLimitLayer::fail_local"],
                Layer(|layer| layer.fail_local(SHARE)),
            ),
        ],
    },
    Dimension {
        name: "time",
        values: &[
            plain("at once"),
            value(
                "deadline",
                &["RateLimitLayer::deadline"],
                Layer(|layer| layer.deadline(ms(250))),
            ),
            value(
                "wait_up_to",
                &["RateLimitLayer::wait_up_to"],
                Layer(|layer| layer.wait_up_to(MAX_WAIT)),
            ),
        ],
    },
    Dimension {
        name: "list",
        values: &[
            plain("no list"),
            value(
                "exempt a path",
                &["RateLimitLayer::exempt"],
                Layer(|layer| layer.exempt(|parts| by_listed(parts).is_ok())),
            ),
            value(
                "exempt a key",
                &["RateLimitLayer::exempt"],
                Layer(|layer| layer.exempt(by_listed.one_of(listed()))),
            ),
            value(
                "exempt addresses",
                &["RateLimitLayer::exempt"],
                Layer(|layer| layer.exempt(addresses().0.within(&addresses().1))),
            ),
            value(
                "deny a key",
                &["RateLimitLayer::deny"],
                Layer(|layer| layer.deny(by_listed.one_of(listed()))),
            ),
            value(
                "deny a path",
                &["RateLimitLayer::deny"],
                Layer(|layer| layer.deny(|parts| by_listed(parts).is_ok())),
            ),
            value(
                "deny addresses",
                &["RateLimitLayer::deny"],
                Layer(|layer| layer.deny(addresses().0.within(&addresses().1))),
            ),
        ],
    },
    Dimension {
        name: "response",
        values: &[
            plain("default response"),
            value(
                "headers=none",
                &["RateLimitLayer::headers"],
                Layer(|layer| layer.headers(HeaderSets::NONE)),
            ),
            value(
                "headers=both",
                &[],
                Layer(|layer| layer.headers(HeaderSets::BOTH)),
            ),
            value(
                "headers=unix",
                &[],
                Layer(|layer| layer.headers(HeaderSets::BOTH_UNIX)),
            ),
            value("respond_with", &["RateLimitLayer::respond_with"], Nothing),
            value(
                "free_with_head",
                &["RateLimitLayer::free_with_head"],
                Layer(RateLimitLayer::free_with_head),
            ),
            value(
                "named",
                &["RateLimitLayer::named"],
                Layer(|layer| layer.named("pairs")),
            ),
        ],
    },
    Dimension {
        name: "limiter",
        values: &[
            plain("default limiter"),
            value(
                "refusal_cache=0",
                &["Limiter::refusal_cache"],
                Apply::Limiter(|limiter| limiter.refusal_cache(Duration::ZERO)),
            ),
            value(
                "refusal_cache=max",
                &[],
                Apply::Limiter(|limiter| limiter.refusal_cache(Duration::MAX)),
            ),
            value(
                "breaker=off",
                &["Limiter::breaker"],
                Apply::Limiter(|limiter| limiter.breaker(Breaker::OFF)),
            ),
            value(
                "limiter's deadline",
                &["Limiter::deadline"],
                Apply::Limiter(|limiter| limiter.deadline(ms(300))),
            ),
            value(
                "retry_reserved_after",
                &["Limiter::retry_reserved_after"],
                Apply::Limiter(|limiter| limiter.retry_reserved_after(ms(200))),
            ),
            value(
                "limiter's fail_local",
                &["Limiter::fail_local"],
                Apply::Limiter(|limiter| limiter.fail_local(SHARE)),
            ),
        ],
    },
    Dimension {
        name: "store",
        values: &[
            plain("redis"),
            plain("pool"),
            plain("memory"),
            plain("wrapper"),
            hiding(plain("wrapper that decides at once")),
            #[cfg(feature = "cluster")]
            plain("cluster"),
        ],
    },
    Dimension {
        name: "builder",
        values: &[
            plain("default builder"),
            value(
                "prefix",
                &["RedisStoreBuilder::prefix"],
                Store(|store| store.prefix("pairs")),
            ),
            value(
                "secret",
                &["RedisStoreBuilder::secret"],
                Store(|store| store.secret(&secret())),
            ),
            value(
                "connections",
                &["RedisStoreBuilder::connections"],
                Store(|store| store.connections(1)),
            ),
            value(
                "timeouts",
                &[
                    "RedisStoreBuilder::connect_timeout",
                    "RedisStoreBuilder::reply_timeout",
                ],
                Store(|store| store.connect_timeout(ms(500)).reply_timeout(ms(500))),
            ),
        ],
    },
    Dimension {
        name: "stack",
        values: &[
            plain("alone"),
            plain("behind another layer"),
            plain("in front of another layer"),
        ],
    },
    Dimension {
        name: "transport",
        values: &[
            plain("HTTP/1"),
            plain("HTTP/2"),
            #[cfg(feature = "grpc")]
            plain("gRPC"),
            hiding(plain("no transport")),
        ],
    },
];

/// Public builder methods that are no options of a row, each with the reason.
pub(super) const NO_OPTIONS: &[(&str, &str)] = &[
    (
        "Limit::with_units",
        "each row has limits of some number of units",
    ),
    ("RateLimitLayer::limit", "each row has limits"),
    (
        "RateLimitLayer::limits",
        "as `limit`, with an error instead of a panic: `configuration::limits`",
    ),
    ("RedisStoreBuilder::build", "makes the store of each row"),
    (
        "RedisStoreBuilder::connect",
        "as `build`, once the server has answered: `redis::opening`",
    ),
    (
        "RedisStoreBuilder::credentials",
        "needs a server whose users change: `redis::sources`",
    ),
    (
        "RedisStoreBuilder::root_certificate",
        "needs a server with TLS: `redis::tls`",
    ),
    (
        "RedisStoreBuilder::client_certificate",
        "needs a server with TLS: `redis::tls`",
    ),
    (
        "RedisStoreBuilder::clock",
        "a test's clock; rows run by the real one",
    ),
];

/// The limit of a request by the dimensions `kind` and `chosen`. A split limit is never chosen.
pub(super) fn keyed(kind: &str, chosen: &str, limit: &Limit) -> KeyedLimit {
    let chosen_limit = limit.clone();
    match (kind, chosen) {
        ("split", _) => split(limit).by(by_client),
        (_, "chosen") => KeyedLimit::chosen(by_client, move |_| Some(chosen_limit.clone())),
        _ => limit.clone().by(by_client),
    }
}

pub(super) fn ban() -> Limit {
    Limit::per_hour("ban", 1)
}

pub(super) fn split(limit: &Limit) -> Split {
    limit.clone().split(2)
}

/// The responder of `respond_with`.
pub(super) fn respond(_: &Rejection, head: Response<()>) -> Response<Body> {
    head.map(|()| Body::from(RESPONDED))
}
