//! Keys are hashed with a secret of the store, so that a reader of Redis cannot find them by trial.

use tower_sliding_window::{Key, Limit, Limiter, Secret};

use crate::support::{TEST_TIMEOUT, redis_server::RedisServer};

const LOGIN: Limit = Limit::per_hour("login", 5);

fn limiter(server: &RedisServer, secret: Option<&str>) -> Limiter {
    let builder = server.store();
    let secret = secret.map(|secret| Secret::new(secret).unwrap());
    let builder = secret
        .iter()
        .fold(builder, |builder, secret| builder.secret(secret));
    Limiter::new(builder.build().unwrap()).deadline(TEST_TIMEOUT)
}

fn address(last: u8) -> Key {
    Key::new("peer", [192, 0, 2, last])
}

/// The digest of a key without a secret, which anyone can compute: base64url of the first 128 bits.
fn unkeyed(key: &Key) -> String {
    let mut hash = blake3::Hasher::new();
    hash.update(&(key.namespace().len() as u64).to_le_bytes());
    hash.update(key.namespace().as_bytes());
    hash.update(key.value());
    let bits: String = hash
        .finalize()
        .as_bytes()
        .iter()
        .take(16)
        .map(|byte| format!("{byte:08b}"))
        .collect::<String>()
        + "0000";
    let alphabet = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let digit =
        |six: usize| alphabet[usize::from_str_radix(&bits[6 * six..6 * six + 6], 2).unwrap()];
    (0..22).map(|six| char::from(digit(six))).collect()
}

/// The addresses of a network whose unkeyed digests appear in the keys.
fn found(server: &RedisServer) -> Vec<u8> {
    let keys = server.keys().join(" ");
    (0..=255)
        .filter(|last| keys.contains(&unkeyed(&address(*last))))
        .collect()
}

/// Without a secret, a reader of Redis finds an address by trying all of them. With a secret, it
/// does not.
#[tokio::test]
async fn a_secret_hides_addresses_from_readers_of_redis() {
    let server = RedisServer::start();
    assert!(
        limiter(&server, None)
            .check(&LOGIN, address(7), 1)
            .await
            .unwrap()
            .is_allowed()
    );
    assert_eq!(
        found(&server),
        [7],
        "without a secret the layout is unchanged"
    );
    server.run::<()>("FLUSHALL");
    assert!(
        limiter(&server, Some("the secret of all instances"))
            .check(&LOGIN, address(7), 1)
            .await
            .unwrap()
            .is_allowed()
    );
    assert_eq!(server.keys().len(), 1);
    assert_eq!(found(&server), [0; 0]);
}

#[tokio::test]
async fn only_stores_with_the_same_secret_share_limits() {
    let server = RedisServer::start();
    let (one, same) = (
        limiter(&server, Some("the secret of all instances")),
        limiter(&server, Some("the secret of all instances")),
    );
    for used in [1, 3] {
        assert_eq!(
            one.check(&LOGIN, address(7), 1)
                .await
                .unwrap()
                .binding()
                .used,
            used
        );
        assert_eq!(
            same.check(&LOGIN, address(7), 1)
                .await
                .unwrap()
                .binding()
                .used,
            used + 1
        );
    }
    let other = limiter(&server, Some("the secret that comes after"));
    for (secret, limiter) in [("another", &other), ("none", &limiter(&server, None))] {
        assert_eq!(
            limiter
                .peek(&LOGIN, address(7))
                .await
                .unwrap()
                .binding()
                .used,
            0,
            "{secret}"
        );
        assert!(
            limiter
                .check(&LOGIN, address(7), 1)
                .await
                .unwrap()
                .is_allowed()
        );
    }
    assert_eq!(server.keys().len(), 3);
    same.reset(&LOGIN, address(7)).await.unwrap();
    assert_eq!(server.keys().len(), 2);
    assert_eq!(
        one.peek(&LOGIN, address(7)).await.unwrap().binding().used,
        0
    );
    assert_eq!(
        other.peek(&LOGIN, address(7)).await.unwrap().binding().used,
        1
    );
}

/// The store may use the same secret as the API keys. A key is then hashed twice with it, each time
/// for another purpose.
#[tokio::test]
async fn one_secret_may_serve_api_keys_and_the_store() {
    let server = RedisServer::start();
    let key = Secret::new("the secret of all instances")
        .unwrap()
        .key("api-key", "k3y");
    let limiter = limiter(&server, Some("the secret of all instances"));
    assert!(limiter.check(&LOGIN, &key, 1).await.unwrap().is_allowed());
    assert!(!server.keys()[0].contains(&unkeyed(&key)));
}

/// The slot of a key in a cluster is that of its keyed digest.
#[cfg(feature = "cluster")]
#[tokio::test]
async fn a_cluster_finds_keys_hashed_with_a_secret() {
    use tower_sliding_window::{Charge, Check};

    let cluster = crate::support::redis_cluster::RedisCluster::start(3).await;
    let secret = Secret::new("the secret of all instances").unwrap();
    let limiter = cluster.limiter(cluster.builder().secret(&secret));
    let charge =
        |name: &'static str, last| Charge::new(Limit::per_hour(name, 5), address(last), 1).unwrap();
    let answers: Vec<_> = (0..=255)
        .map(|last| {
            let check = Check::new(charge("login", last))
                .and(charge("search", last))
                .unwrap();
            let check = check.and(charge("pairs", last.wrapping_add(1))).unwrap();
            tokio::spawn(limiter.check_all(check))
        })
        .collect();
    for answer in answers {
        assert!(answer.await.unwrap().unwrap().is_allowed());
    }
    assert_eq!(cluster.keys().len(), 3 * 256);
    limiter
        .reset(&Limit::per_hour("login", 5), address(7))
        .await
        .unwrap();
    assert_eq!(cluster.keys().len(), 3 * 256 - 1);
}
