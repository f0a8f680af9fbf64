//! No password of Redis appears in an error or in debug output, however broken the settings are.

use std::error::Error;

use proptest::{
    collection::vec,
    prelude::{Strategy, any, prop_oneof},
    proptest,
    sample::select,
    strategy::Just,
    test_runner::Config,
};
use redis::IntoConnectionInfo;
use tokio::runtime::Runtime;
use tower_sliding_window::{
    RedisStore,
    store::{self, RedisSource, RedisStoreBuilder},
};

use crate::support::{one_thread, redis_server::RedisServer};

/// An error and its causes, in both their display and debug form.
fn shown(error: &(dyn Error + 'static)) -> String {
    let mut text = format!("{error} {error:?}");
    let mut cause = error.source();
    while let Some(error) = cause {
        text += &format!(" {error} {error:?}");
        cause = error.source();
    }
    text
}

/// All output of building a store, and of connecting where nothing listens. For an existing client,
/// the address is shown as it is, because its URL is not known.
fn shown_by(runtime: &Runtime, builder: &RedisStoreBuilder) -> String {
    let built = match builder.clone().build() {
        Ok(store) => format!("{store:?}"),
        Err(error) => shown(&error),
    };
    let connected = runtime.block_on(builder.clone().connect());
    format!(
        "{builder:?} {built} {}",
        connected.map_or_else(|error| shown(&error), |_| String::new())
    )
}

/// Letters that no message of the store or of the client has next to each other.
fn piece() -> impl Strategy<Value = String> {
    vec(select(&['Q', 'X', 'Z', 'J'][..]), 2..6).prop_map(String::from_iter)
}

/// A password, and the pieces that must not be shown.
fn password(between: &'static [char]) -> impl Strategy<Value = (String, Vec<String>)> {
    vec((piece(), select(between)), 1..5).prop_map(|parts| {
        let pieces = parts.iter().map(|(piece, _)| piece.clone()).collect();
        let mut text: String = parts
            .iter()
            .flat_map(|(piece, c)| [piece.clone(), c.to_string()])
            .collect();
        text.pop();
        (text, pieces)
    })
}

const ANY: &[char] = &[
    '/', '?', '#', '@', ':', '[', ']', '%', '\\', ' ', '\t', '\n', '&', '=', '1', '.', '-', 'ü',
    '\0',
];

/// Without a host, the text after an `@` would be the host.
const NO_AT: &[char] = &[
    '/', '?', '#', ':', '[', ']', '%', '\\', ' ', '&', '=', '1', '.', '-',
];

fn scheme() -> impl Strategy<Value = &'static str> {
    let known = &["redis", "rediss", "valkey", "redis+unix", "unix"][..];
    prop_oneof![4 => select(known), 1 => select(&["http", "REDIS", " redis", "", "redis\t"][..])]
}

fn url() -> impl Strategy<Value = (String, Vec<String>)> {
    let place = select(
        &[
            "127.0.0.1:1",
            "[::1]:1",
            "127.0.0.1",
            "[::1",
            "127.0.0.1:port",
            ":1",
            "",
        ][..],
    );
    let with_place = (
        password(ANY),
        select(&["shop:", ":", "", "a:b:"][..]),
        place,
    )
        .prop_map(|((password, pieces), user, place)| {
            (format!("{user}{password}@{place}"), pieces)
        });
    let without = (password(NO_AT), select(&["127.0.0.1:", ":"][..]))
        .prop_map(|((text, pieces), user)| (user.to_owned() + &text, pieces));
    let tail = select(
        &[
            "",
            "/",
            "/0",
            "/db",
            "?protocol=resp3",
            "#insecure",
            "/0?a=b",
            "/x@y",
        ][..],
    );
    let slashes = select(&["://", "://", "://", ":", ":/", ""][..]);
    (
        scheme(),
        slashes,
        prop_oneof![3 => with_place, 1 => without],
        tail,
    )
        .prop_map(|(scheme, slashes, (authority, pieces), tail)| {
            // Without slashes, the URL of a socket has a path instead of an authority.
            let slashes = if scheme.ends_with("unix") {
                "://"
            } else {
                slashes
            };
            (format!("{scheme}{slashes}{authority}{tail}"), pieces)
        })
}

proptest! {
    #![proptest_config(Config { cases: 200, failure_persistence: None, ..Config::default() })]

    #[test]
    fn a_password_in_a_url_is_never_shown((url, pieces) in url(), behind in any::<bool>()) {
        let runtime = one_thread();
        let sentinels = if behind { vec!["redis://127.0.0.1:1", &url] } else { vec![&*url] };
        let mut builders = vec![RedisStore::builder(&url), RedisStore::builder(RedisSource::sentinels(sentinels, "redis://main"))];
        #[cfg(feature = "cluster")]
        builders.push(RedisStore::builder(RedisSource::cluster([&url])));
        let any = store::from_url(&url).map_or_else(|error| shown(&error), |store| format!("{store:?}"));
        for seen in builders.iter().map(|builder| shown_by(&runtime, builder)).chain([any]) {
            for piece in &pieces {
                assert!(!seen.contains(piece), "{piece} of {url:?} in {seen}");
            }
        }
    }

    #[test]
    fn a_password_of_a_client_is_never_shown((password, pieces) in password(ANY), name in Just("shop")) {
        let runtime = one_thread();
        let info = "redis://127.0.0.1:1".into_connection_info().unwrap();
        let settings = info.redis_settings().clone().set_username(name).set_password(password);
        let client = redis::Client::open(info.set_redis_settings(settings)).unwrap();
        let seen = shown_by(&runtime, &RedisStore::builder(client.clone()));
        assert!(pieces.iter().all(|piece| !seen.contains(piece)), "{seen}");
    }
}

/// Passwords that were shown once: a beginning, a whole one, and one that reads like a host and a
/// port.
#[test]
fn an_error_shows_no_url() {
    for url in [
        "redis://shop:s3cr3t?p4ss@host",
        "default:s3cr3t",
        "s3cr3t@nowhere",
        "redis://shop:1234?p4ss@host",
        "redis://shop:s3cr3t@redis.internal/db",
        "redis://redis.internal/db?password=s3cr3t",
    ] {
        let seen = shown(&RedisStore::builder(url).build().unwrap_err());
        assert!(
            ["s3cr3t", "p4ss", "1234", "shop", "default"]
                .iter()
                .all(|part| !seen.contains(part)),
            "{seen}"
        );
    }
}

/// The server's error repeats the command that it does not know.
#[tokio::test]
async fn a_server_that_repeats_the_login_command_leaks_no_password() {
    let server = RedisServer::start_with(&["--rename-command", "HELLO", ""]);
    let url = server.url().replace("redis://", "redis://shop:s3cr3t@") + "?protocol=resp3";
    let seen = shown(&RedisStore::connect(&url).await.unwrap_err());
    assert!(seen.contains("HELLO") && !seen.contains("s3cr3t"), "{seen}");
    let sentinels = RedisStore::builder(RedisSource::sentinels([url], "redis://main"))
        .connect()
        .await;
    assert!(!shown(&sentinels.unwrap_err()).contains("s3cr3t"));
}

/// A key that lost its line breaks is read as one long PEM label.
#[cfg(feature = "tls")]
#[test]
fn a_broken_client_key_is_never_shown() {
    // Another test may have done so.
    let _ = rustls::crypto::ring::default_provider().install_default();
    for key in [
        "-----BEGIN PRIVATE KEY-----\\nMIIEs3cr3t\\n-----END PRIVATE KEY-----",
        "-----BEGIN PRIVATE KEY s3cr3t",
    ] {
        let builder = RedisStore::builder("rediss://127.0.0.1:1").client_certificate("", key);
        let seen = shown(&builder.clone().build().unwrap_err()) + &format!("{builder:?}");
        let bytes = "s3cr3t"
            .bytes()
            .map(|byte| byte.to_string())
            .collect::<Vec<_>>()
            .join(", ");
        assert!(
            !seen.contains("s3cr3t") && !seen.contains(&bytes) && seen.contains("PEM"),
            "{seen}"
        );
    }
}
