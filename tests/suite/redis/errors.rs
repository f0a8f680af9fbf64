//! Errors of a server, and of wrong settings, reach the caller with their cause.

use std::time::Duration;

use futures_util::future::join_all;
use tokio::net::TcpListener;
use tower_sliding_window::{
    Algorithm, Charge, Check, Error, Limit, Limiter, RedisStore,
    check::AdmissionId,
    error::{StoreError, StoreErrorKind},
    store::ManualClock,
    store::RedisSource,
};

use super::{limiter, used};
#[cfg(feature = "cluster")]
use crate::support::redis_cluster::RedisCluster;
use crate::support::{TEST_TIMEOUT, redis_server::RedisServer, until, with_causes};

fn kind(error: &Error) -> StoreErrorKind {
    let Error::Unavailable(error) = error else {
        panic!("{error}")
    };
    error.kind
}

#[tokio::test]
async fn an_out_of_memory_error_is_reported() {
    let server = RedisServer::start();
    let limiter = limiter(&server.url());
    used(&limiter).await.unwrap();
    server.run::<()>("CONFIG SET maxmemory 1");
    let error = used(&limiter).await.unwrap_err();
    assert!(
        with_causes(&error).contains("OOM"),
        "{}",
        with_causes(&error)
    );
    assert_eq!(kind(&error), StoreErrorKind::OutOfMemory);
    server.run::<()>("CONFIG SET maxmemory 0");
    assert_eq!(
        used(&limiter).await.unwrap(),
        2,
        "the failed check was not counted"
    );
}

#[tokio::test]
async fn a_missing_permission_is_reported() {
    let server = RedisServer::start();
    server.run::<()>("ACL SETUSER guest on >guest ~* +@all -zadd");
    server.run::<()>("ACL SETUSER nobody on >nobody ~* +@connection");
    for user in ["guest", "nobody"] {
        let url = server
            .url()
            .replace("redis://", &format!("redis://{user}:{user}@"));
        assert!(
            RedisStore::connect(&url).await.is_err() || user == "guest",
            "connecting tries the script out"
        );
        let error = used(&limiter(&url)).await.unwrap_err();
        assert_eq!(kind(&error), StoreErrorKind::Denied);
        assert!(
            with_causes(&error).contains("permission") || with_causes(&error).contains("can't run"),
            "{}",
            with_causes(&error)
        );
        assert!(
            !with_causes(&error).contains(&format!(":{user}@")),
            "the password stays out of it"
        );
    }
    assert_eq!(server.keys(), [""; 0]);
}

/// A process that fails open would limit nothing there, so `connect` must fail at its start.
#[tokio::test]
async fn connect_fails_where_nothing_can_be_written() {
    let server = RedisServer::start();
    server.run::<()>("ACL SETUSER elsewhere on >elsewhere ~foo:* +@all");
    let url = server
        .url()
        .replace("redis://", "redis://elsewhere:elsewhere@");
    let error = RedisStore::connect(&url).await.unwrap_err();
    assert!(
        with_causes(&error).contains("permission"),
        "{}",
        with_causes(&error)
    );
    assert_eq!(error.kind, StoreErrorKind::Denied);

    server.run::<()>("REPLICAOF 127.0.0.1 1");
    let error = RedisStore::connect(&server.url()).await.unwrap_err();
    assert!(
        with_causes(&error).contains("read only replica"),
        "{}",
        with_causes(&error)
    );
    assert_eq!(error.kind, StoreErrorKind::ReadOnly);
}

#[tokio::test]
async fn a_missing_password_is_reported() {
    let server = RedisServer::start();
    server.run::<()>("CONFIG SET requirepass s3cret");
    let error = used(&limiter(&server.url())).await.unwrap_err();
    assert!(
        with_causes(&error).contains("NOAUTH"),
        "{}",
        with_causes(&error)
    );
    assert_eq!(kind(&error), StoreErrorKind::Denied);
    let wrong = RedisStore::connect(&server.url().replace("redis://", "redis://:wrong@"))
        .await
        .unwrap_err();
    assert_eq!(
        wrong.kind,
        StoreErrorKind::Denied,
        "{}",
        with_causes(&wrong)
    );
    let right = server.url().replace("redis://", "redis://:s3cret@");
    assert_eq!(used(&limiter(&right)).await.unwrap(), 1);
}

/// The text before a single `@` is a user, so nothing would be sent to sign in.
#[tokio::test]
async fn a_user_without_a_password_is_named() {
    const HINT: &str = "A password alone is redis://:password@host";
    let server = RedisServer::start();
    server.run::<()>("CONFIG SET requirepass s3cret");
    for protocol in ["", "?protocol=resp3"] {
        let error = async |login: &str| {
            let url = server.url().replace("redis://", login) + protocol;
            let error = RedisStore::connect(&url).await.unwrap_err();
            (error.kind, with_causes(&error))
        };
        let (kind, alone) = error("redis://s3cret@").await;
        assert!(alone.contains(HINT) && !alone.contains("s3cret"), "{alone}");
        assert_eq!(kind, StoreErrorKind::Config);
        // Redis answers an unknown user and a wrong password by the same words.
        for login in ["redis://:wrong@", "redis://nobody:s3cret@"] {
            let (kind, text) = error(login).await;
            assert!(
                text.contains("the user or the password is wrong") && !text.contains(HINT),
                "{text}"
            );
            assert_eq!(kind, StoreErrorKind::Denied);
        }
    }
}

/// The server has fewer databases, so the URL is wrong.
#[tokio::test]
async fn a_database_out_of_range_is_a_mistake_in_the_configuration() {
    let server = RedisServer::start();
    for number in ["99", "-1"] {
        let error = RedisStore::connect(&(server.url() + number))
            .await
            .unwrap_err();
        assert!(
            with_causes(&error).contains("DB index"),
            "{}",
            with_causes(&error)
        );
        assert_eq!(
            error.kind,
            StoreErrorKind::Config,
            "{}",
            with_causes(&error)
        );
    }
}

/// The commands that the guide lists for this server.
pub(super) fn listed(server: &RedisServer) -> Vec<&'static str> {
    let page = include_str!(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/src/guide/running_redis.md"
    ));
    let (_, listed) = page.split_once("~shop:* -@all").unwrap();
    let (listed, _) = listed.split_once("```").unwrap();
    let mut commands: Vec<&str> = listed.split_whitespace().collect();
    assert!(commands.len() >= 12, "{commands:?}");
    if server.is_before_7() {
        commands.retain(|&command| command != "+pexpiretime");
    }
    commands
}

/// Those that it adds for a kind of server.
pub(super) fn also_listed(kind: &str) -> Vec<&'static str> {
    let page = include_str!(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/src/guide/running_redis.md"
    ));
    let line = page
        .lines()
        .find_map(|line| line.strip_prefix(&format!("* **{kind}:** ")))
        .unwrap();
    line.split('`').nth(1).unwrap().split(' ').collect()
}

/// `connect` as a user who may run these commands, on keys of the store.
async fn connect_with(
    servers: &[RedisServer],
    commands: &[&str],
    connect: impl AsyncFn() -> Outcome,
) -> Outcome {
    for server in servers {
        server.run::<()>(&format!(
            "ACL SETUSER limiter reset on >limiter ~tsw1:* -@all {}",
            commands.join(" ")
        ));
    }
    connect().await
}

type Outcome = Result<RedisStore, StoreError>;

/// Each way of a store needs them at some time, so a process learns at its start which one is
/// missing.
async fn each_is_named(
    servers: &[RedisServer],
    commands: &[&str],
    named: &[&str],
    connect: impl AsyncFn() -> Outcome,
) {
    connect_with(servers, commands, &connect).await.unwrap();
    for missing in named {
        let rest: Vec<&str> = commands
            .iter()
            .filter(|command| *command != missing)
            .copied()
            .collect();
        let error = connect_with(servers, &rest, &connect).await.unwrap_err();
        let text = with_causes(&error).to_lowercase();
        assert_eq!(error.kind, StoreErrorKind::Denied, "{missing}: {text}");
        let name = missing[1..].split('|').next().unwrap();
        assert!(
            text.contains(&format!("'{name}")) || text.contains(&format!("({name})")),
            "{missing}: {text}"
        );
        assert!(text.contains("`guide::running_redis`"), "{missing}: {text}");
    }
    assert!(
        servers.iter().all(|server| server.keys().is_empty()),
        "nothing stays"
    );
    connect_with(servers, commands, &connect).await.unwrap();
}

#[tokio::test]
async fn connect_names_a_missing_command() {
    let server = RedisServer::start();
    let url = server.url().replace("redis://", "redis://limiter:limiter@");
    let commands = listed(&server);
    let named: Vec<&str> = commands
        .iter()
        .filter(|command| **command != "+info")
        .copied()
        .collect();
    let servers = [server];
    each_is_named(&servers, &commands, &named, async || {
        RedisStore::connect(&url).await
    })
    .await;
    let without_info =
        connect_with(&servers, &named, async || RedisStore::connect(&url).await).await;
    without_info.unwrap();
}

#[tokio::test]
async fn connect_names_a_missing_command_for_a_database() {
    let server = RedisServer::start();
    let url = format!(
        "{}5",
        server.url().replace("redis://", "redis://limiter:limiter@")
    );
    let added = also_listed("A database other than 0");
    let commands = [listed(&server), added.clone()].concat();
    each_is_named(&[server], &commands, &added, async || {
        RedisStore::connect(&url).await
    })
    .await;
}

/// Another memory limit than that of a key is no matter of permissions.
#[tokio::test]
async fn connect_needs_no_memory() {
    let server = RedisServer::start();
    server.run::<()>("CONFIG SET maxmemory 1");
    RedisStore::connect(&server.url()).await.unwrap();
}

#[cfg(feature = "cluster")]
#[tokio::test]
async fn connect_names_a_missing_command_for_a_cluster() {
    let cluster = RedisCluster::start(3).await;
    let added = also_listed("A cluster");
    let commands = [listed(&cluster.0[0]), added.clone()].concat();
    let builder = || {
        let urls = cluster.0.iter().map(RedisServer::url);
        let urls = urls.map(|url| url.replace("://", "://limiter:limiter@"));
        RedisStore::builder(RedisSource::cluster(urls)).connect_timeout(TEST_TIMEOUT)
    };
    let connect = async || builder().connect().await;
    each_is_named(&cluster.0, &commands, &added, connect).await;

    // While a slot moves, the client is sent to its new node.
    let limiter = cluster.limiter(builder());
    let limit = Limit::per_day("calls", 9);
    assert!(limiter.check(&limit, "ada", 1).await.unwrap().is_allowed());
    let key = cluster.keys().pop().unwrap();
    let from = cluster
        .0
        .iter()
        .position(|node| node.keys().contains(&key))
        .unwrap();
    let (from, to) = (&cluster.0[from], &cluster.0[(from + 1) % 3]);
    let slot: u16 = from.run(&format!("CLUSTER KEYSLOT {key}"));
    to.run::<()>(&format!(
        "CLUSTER SETSLOT {slot} IMPORTING {}",
        from.run::<String>("CLUSTER MYID")
    ));
    from.run::<()>(&format!(
        "CLUSTER SETSLOT {slot} MIGRATING {}",
        to.run::<String>("CLUSTER MYID")
    ));
    from.run::<()>(&format!(
        "MIGRATE {} {key} 0 5000",
        to.address().replace(':', " ")
    ));
    assert_eq!(
        limiter
            .check(&limit, "ada", 1)
            .await
            .unwrap()
            .binding()
            .used,
        2
    );
}

/// A server that may not write, or is not ready, says so by the kind of its error.
#[tokio::test]
async fn a_server_that_cannot_write_has_kinds() {
    let dir = tempfile::tempdir().unwrap();
    let own = dir.path().join("own");
    std::fs::create_dir(&own).unwrap();
    let server =
        RedisServer::start_with(&["--dir", own.to_str().unwrap(), "--rdbcompression", "no"]);
    let limiter = limiter(&server.url());
    used(&limiter).await.unwrap();
    let fails_with = async |word: &str, expected| {
        let error = used(&limiter).await.unwrap_err();
        assert!(
            with_causes(&error).contains(word),
            "{}",
            with_causes(&error)
        );
        assert_eq!(kind(&error), expected, "{}", with_causes(&error));
        let page = include_str!(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/src/guide/what_happens_when.md"
        ));
        assert!(
            page.contains(&format!("`, of the kind `{expected:?}`")),
            "{expected:?}"
        );
    };
    server.run::<()>("CONFIG SET min-replicas-to-write 1");
    fails_with("NOREPLICAS", StoreErrorKind::ReadOnly).await;
    server.run::<()>("CONFIG SET min-replicas-to-write 0");
    used(&limiter).await.unwrap();

    // Some keys, each of which takes half a second to load, and is large enough for the server to
    // reply meanwhile.
    (0..9).for_each(|key| server.run::<()>(&format!("SET key-{key} {}", "x".repeat(2_500_000))));
    server.run::<()>("SAVE");
    std::fs::rename(own.join("dump.rdb"), dir.path().join("dump.rdb")).unwrap();

    // A script of Redis 6.2 may write all the same.
    if !server.is_before_7() {
        std::fs::remove_dir_all(&own).unwrap();
        redis::cmd("CONFIG")
            .arg(&["SET", "save", "3600 1"])
            .query::<()>(&mut server.connect())
            .unwrap();
        // It fails at once, or later.
        let _ = redis::cmd("BGSAVE").query::<()>(&mut server.connect());
        until("it can save", || {
            server
                .run::<String>("INFO")
                .contains("rdb_last_bgsave_status:err")
        })
        .await;
        fails_with("MISCONF", StoreErrorKind::ReadOnly).await;
    }

    drop(server);
    let options = [
        "--key-load-delay",
        "500000",
        "--dir",
        dir.path().to_str().unwrap(),
    ];
    let server = RedisServer::start_with(&options);
    let patient = Limiter::new(server.store().build().unwrap()).deadline(TEST_TIMEOUT);
    let error = used(&patient).await.unwrap_err();
    assert_eq!(
        kind(&error),
        StoreErrorKind::Busy,
        "{}",
        with_causes(&error)
    );
}

/// A server that has all its connections in use tells so, and hangs up.
#[tokio::test]
async fn the_words_of_a_server_with_too_many_clients_are_shown() {
    let server = RedisServer::start_with(&["--maxclients", "1"]);
    let held = loop {
        if let Ok(held) = redis::Client::open(server.url()).unwrap().get_connection() {
            break held;
        }
    };
    let error = RedisStore::connect(&server.url()).await.unwrap_err();
    assert!(
        with_causes(&error).contains("max number of clients"),
        "{}",
        with_causes(&error)
    );
    assert_eq!(error.kind, StoreErrorKind::Unreachable);
    let url = server.url().replace("redis://", "redis://:s3cret@");
    let error = RedisStore::connect(&url).await.unwrap_err();
    assert!(
        with_causes(&error).contains("`maxclients`"),
        "{}",
        with_causes(&error)
    );
    assert_eq!(error.kind, StoreErrorKind::Unreachable);
    drop(held);
}

/// What hangs up at the first command, as a proxy does that does not know it, and what says
/// nothing.
#[tokio::test]
async fn a_server_that_hangs_up_or_is_silent_has_a_hint() {
    for hangs_up in [true, false] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("redis://{}", listener.local_addr().unwrap());
        let server = tokio::spawn(async move {
            let mut open = Vec::new();
            while let Ok((client, _)) = listener.accept().await {
                if !hangs_up {
                    open.push(client);
                }
            }
        });
        let error = RedisStore::builder(&url)
            .connect_timeout(Duration::from_millis(300))
            .connect()
            .await
            .unwrap_err();
        assert!(
            with_causes(&error).contains("it hangs up or is silent"),
            "{}",
            with_causes(&error)
        );
        assert_eq!(error.kind, StoreErrorKind::Unreachable);
        server.abort();
    }
}

/// A user that may run only the commands listed in the guide, and only on keys of the store.
#[tokio::test]
async fn the_documented_permissions_are_enough() {
    let server = RedisServer::start();
    let commands = listed(&server);
    server.run::<()>(&format!(
        "ACL SETUSER limiter on >limiter ~tsw1:* -@all {}",
        commands.join(" ")
    ));
    let url = server.url().replace("redis://", "redis://limiter:limiter@");
    let limiter = Limiter::new(RedisStore::connect(&url).await.unwrap()).deadline(TEST_TIMEOUT);
    for _ in 0..3 {
        assert!(
            limiter
                .check(&Limit::per_day("by-the-server", 5), "ada", 1)
                .await
                .unwrap()
                .is_allowed()
        );
    }
    let clock = ManualClock::new();
    let store = RedisStore::builder(&url).clock(&clock);
    let limiter = Limiter::new(store.build().unwrap()).deadline(TEST_TIMEOUT);
    let limit = Limit::per("calls", 600, Duration::from_secs(1));
    let id = AdmissionId(7);
    for cost in [1, 1, 3, 600, 595, 1] {
        let charge = Charge::new(limit.clone(), "ada", cost).unwrap();
        let _ = limiter.check_all(Check::new(charge.clone())).await.unwrap();
        let _ = limiter
            .check_all(Check::new(charge).with_id(id))
            .await
            .unwrap();
        clock.advance(Duration::from_millis(300));
    }
    clock.step_back(Duration::from_secs(5));
    let _ = limiter.check(&limit, "ada", 600).await.unwrap();
    // A log that is long enough to be freed as a whole.
    for _ in 0..600 {
        assert!(limiter.check(&limit, "bob", 1).await.unwrap().is_allowed());
    }
    assert!(limiter.check(&limit, "eve", 1).await.unwrap().is_allowed());
    clock.advance(Duration::from_secs(10));
    for key in ["ada", "bob", "eve"] {
        assert_eq!(limiter.peek(&limit, key).await.unwrap().binding().used, 0);
    }
    limiter.reset(&limit, "ada").await.unwrap();
    for algorithm in [
        Algorithm::SLIDING_LOG,
        Algorithm::compact_log(16),
        Algorithm::SLIDING_WINDOW_COUNTER,
        Algorithm::FIXED_WINDOW,
    ] {
        let limit = Limit::per_day("others", 20).with_algorithm(algorithm);
        for _ in 0..2 {
            let reservation = limiter
                .reserve(&limit, "ada", 5, Duration::from_secs(1))
                .await
                .unwrap()
                .unwrap();
            assert!(limiter.check(&limit, "ada", 5).await.unwrap().is_allowed());
            assert!(reservation.settle(2).await.unwrap().was_applied);
            clock.step_back(Duration::from_secs(100_000));
            assert!(!limiter.check(&limit, "ada", 20).await.unwrap().is_allowed());
        }
    }
    let calls: String = server.run("INFO commandstats");
    for command in &commands {
        assert!(
            calls.contains(&format!("cmdstat_{}:", &command[1..])),
            "{command} is listed, but not used"
        );
    }
}

/// Redis forgets windows to make room, and a client gets up to one more limit each time. Here 6,000
/// clients ask six times each, and there is memory for a third of them.
/// `noeviction` fails the checks instead.
#[tokio::test]
async fn a_server_that_evicts_admits_more_than_limits_and_one_with_noeviction_never_does() {
    const CLIENTS: usize = 6_000;
    let limit = Limit::per_day("calls", 2);
    let clients_with_too_many = async |policy: &str| {
        let server = RedisServer::start_with(&["--maxmemory-policy", policy]);
        let memory: String = server.run("INFO memory");
        let used: u64 = memory
            .split_once("used_memory:")
            .unwrap()
            .1
            .split('\r')
            .next()
            .unwrap()
            .parse()
            .unwrap();
        server.run::<()>(&format!("CONFIG SET maxmemory {}", used + 600_000));
        let limiter = limiter(&server.url()).refusal_cache(Duration::ZERO);
        let mut admitted = vec![0_u64; CLIENTS];
        for _ in 0..2 {
            for (first, some) in admitted.chunks_mut(100).enumerate() {
                let calls = (0..some.len() * 3).map(|call| {
                    let client = format!("{first} {}", call / 3);
                    let (limiter, limit) = (&limiter, &limit);
                    async move {
                        limiter
                            .check(limit, client, 1)
                            .await
                            .is_ok_and(|decision| decision.is_allowed())
                    }
                });
                let allowed = join_all(calls).await;
                some.iter_mut()
                    .zip(allowed.chunks(3))
                    .for_each(|(sum, calls)| {
                        *sum += calls
                            .iter()
                            .map(|&is_allowed| u64::from(is_allowed))
                            .sum::<u64>();
                    });
            }
        }
        admitted.iter().filter(|&&admitted| admitted > 2).count()
    };
    let forgotten = clients_with_too_many("allkeys-lru").await;
    assert!(forgotten > CLIENTS / 2, "{forgotten} clients");
    assert_eq!(clients_with_too_many("noeviction").await, 0);
}

/// Another script keeps the server busy. The BUSY error is not a decision, and the connection stays
/// usable.
#[tokio::test]
async fn a_busy_server_is_reported() {
    let server = RedisServer::start_with(&["--lua-time-limit", "50"]);
    let limiter = limiter(&server.url());
    used(&limiter).await.unwrap();
    let mut other = server.connect();
    let spinning = std::thread::spawn(move || {
        let outcome: redis::RedisResult<()> = redis::cmd("EVAL")
            .arg("while true do end")
            .arg(0)
            .query(&mut other);
        outcome.unwrap_err()
    });
    let error = loop {
        if let Err(error) = used(&limiter).await {
            break error;
        }
    };
    assert!(
        with_causes(&error).contains("BUSY"),
        "{}",
        with_causes(&error)
    );
    server.run::<()>("SCRIPT KILL");
    spinning.join().unwrap();
    used(&limiter).await.unwrap();
}

#[tokio::test]
async fn invalid_settings_are_named_without_the_password() {
    for url in [
        "http://user:s3cret@127.0.0.1",
        "redis://user:s3cret@:port/",
        "s3cret@nowhere",
        "redis://host/db?password=s3cret",
        "",
    ] {
        let error = RedisStore::builder(url).build().unwrap_err();
        assert!(
            error
                .to_string()
                .contains("a URL, not shown since it may hold a password, is not a Redis URL"),
            "{error}"
        );
        assert!(!format!("{error} {error:?} {:?}", RedisStore::builder(url)).contains("s3cret"));
    }
    #[cfg(not(feature = "tls"))]
    {
        let error = RedisStore::builder("rediss://:s3cret@127.0.0.1/")
            .build()
            .unwrap_err();
        assert!(
            error.to_string().contains("`tls`") && !error.to_string().contains("s3cret"),
            "{error}"
        );
    }
    for prefix in ["", "a:b", "a b", "{a}", &"a".repeat(65)] {
        let error = RedisStore::builder("redis://127.0.0.1/")
            .prefix(prefix)
            .build()
            .unwrap_err();
        assert!(
            error.to_string().contains(&format!("{prefix:?}")),
            "{error}"
        );
    }
    assert!(
        RedisStore::builder("redis://127.0.0.1/")
            .connections(0)
            .build()
            .is_err()
    );
    assert!(
        RedisStore::builder("redis://127.0.0.1/")
            .connect_timeout(Duration::ZERO)
            .build()
            .is_err()
    );
    assert!(
        RedisStore::builder("redis://127.0.0.1/")
            .reply_timeout(Duration::ZERO)
            .build()
            .is_err()
    );
    assert!(
        RedisStore::builder(RedisSource::sentinels(
            ["redis://127.0.0.1:26379"],
            "redis://"
        ))
        .build()
        .is_err()
    );
}

/// The store opens and spawns nothing until the first check.
#[test]
fn a_store_is_built_without_a_runtime() {
    RedisStore::builder("redis://127.0.0.1:1/").build().unwrap();
}
