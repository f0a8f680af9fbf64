//! A primary that sentinels name, and its failover.

use std::{
    net::TcpListener,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use redis::{RedisResult, Value};
use tempfile::TempDir;
use tower_sliding_window::{
    Charge, Check, Error, Limit, Limiter, RedisStore,
    error::StoreErrorKind,
    store::{self, RedisSource, RedisStoreBuilder},
};

use super::errors::{also_listed, listed};
use crate::support::{
    Lateness, TEST_TIMEOUT,
    load::Load,
    ms,
    outage::{DEADLINE, millis, row},
    redis_server::{RedisServer, free_port, program, wait_until_up},
    until, with_causes,
};

const SPENT: Limit = Limit::per_hour("spent", 50);
const LOAD: Limit = Limit::per_hour("load", 1_000_000);

/// A sentinel that watches the primary `main`, and calls it down after 500 ms.
pub(super) struct Sentinel {
    process: Child,
    port: u16,
    _dir: TempDir,
}

impl Sentinel {
    pub(super) fn start(primary: &RedisServer) -> Self {
        // Another process may take the port before the sentinel starts.
        let started = (0..10).find_map(|_| Self::try_start(primary));
        started.expect("no sentinel starts: `bash tests/run.sh` installs redis-server")
    }

    fn try_start(primary: &RedisServer) -> Option<Self> {
        let (dir, port) = (tempfile::tempdir().unwrap(), free_port());
        let config = dir.path().join("sentinel.conf");
        let lines = format!(
            "port {port}\nbind 127.0.0.1\ndir {dir}\nlogfile {dir}/log\nsentinel monitor main 127.0.0.1 {primary} 2\n\
             sentinel down-after-milliseconds main 500\nsentinel failover-timeout main 5000\n",
            dir = dir.path().display(),
            primary = primary.port(),
        );
        std::fs::write(&config, lines).unwrap();
        let mut process = Command::new(program())
            .arg(&config)
            .arg("--sentinel")
            .stdout(Stdio::null())
            .spawn()
            .ok()?;
        wait_until_up(&mut process, port).then_some(Self {
            process,
            port,
            _dir: dir,
        })
    }

    pub(super) fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/", self.port)
    }

    fn ask(&self, words: &[&str]) -> RedisResult<Value> {
        redis::cmd("SENTINEL")
            .arg(words)
            .query(&mut redis::Client::open(self.url())?.get_connection()?)
    }

    /// True if it would agree to a failover, and knows a replica to promote.
    fn is_ready(&self) -> bool {
        let knows_a_replica = matches!(self.ask(&["REPLICAS", "main"]), Ok(Value::Array(replicas)) if replicas.len() == 1);
        let peers =
            matches!(self.ask(&["SENTINELS", "main"]), Ok(Value::Array(peers)) if peers.len() == 2);
        knows_a_replica && peers && self.ask(&["CKQUORUM", "main"]).is_ok()
    }
}

impl Drop for Sentinel {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Its login is for the primary. The first sentinel is down.
#[tokio::test]
async fn a_url_may_name_sentinels() {
    let primary = RedisServer::start();
    primary.run::<()>("ACL SETUSER shop on >s3:cr/t ~* +@all");
    let sentinel = Sentinel::start(&primary);
    let connect = async |scheme: &str, login: &str, database: &str| {
        let url = format!(
            "{scheme}://{login}127.0.0.1:1,127.0.0.1:{}/main{database}",
            sentinel.port
        );
        store::connect(&url).await.map_err(|error| error.kind)
    };
    let used = async |store| {
        Limiter::new(store)
            .check(&SPENT, "ada", 1)
            .await
            .unwrap()
            .binding()
            .used
    };
    assert_eq!(
        used(connect("redis+sentinel", "", "").await.unwrap()).await,
        1
    );
    assert_eq!(
        used(
            connect("Redis+Sentinel", "shop:s3%3Acr%2Ft@", "/0")
                .await
                .unwrap()
        )
        .await,
        2
    );
    assert_eq!(
        used(
            connect("redis+sentinel", "shop:s3%3Acr%2Ft@", "/3")
                .await
                .unwrap()
        )
        .await,
        1
    );
    assert!(
        primary
            .run::<String>("INFO keyspace")
            .contains("db3:keys=1"),
        "the last number is the database"
    );
    let by_resp3 = connect("redis+sentinel", "", "?protocol=resp3").await;
    assert_eq!(used(by_resp3.unwrap()).await, 3);
    let clients: String = primary.run("CLIENT LIST");
    // Servers before Redis 7.0 do not tell the protocol.
    assert_eq!(
        clients.contains(" resp="),
        clients.contains(" resp=3"),
        "{clients}"
    );
    for (login, database, kind) in [
        ("shop:wrong@", "", StoreErrorKind::Denied),
        ("", "/x", StoreErrorKind::Config),
        ("", "/99", StoreErrorKind::Config),
    ] {
        assert_eq!(
            connect("redis+sentinel", login, database)
                .await
                .unwrap_err(),
            kind,
            "{login} {database}"
        );
    }
}

#[tokio::test]
async fn a_sentinel_and_a_server_that_are_confused_are_named() {
    let primary = RedisServer::start();
    let sentinel = Sentinel::start(&primary);
    let as_server = RedisStore::connect(&sentinel.url()).await.unwrap_err();
    let as_sentinel = RedisStore::builder(RedisSource::sentinels([primary.url()], "redis://main"))
        .connect()
        .await
        .unwrap_err();
    for (error, mistake) in [
        (as_server, "use `RedisSource::sentinels`"),
        (as_sentinel, "the server is no sentinel"),
    ] {
        assert!(
            with_causes(&error).contains(mistake),
            "{}",
            with_causes(&error)
        );
    }
}

/// A user of the primary, and one of the sentinels.
#[tokio::test]
async fn the_documented_permissions_are_enough_behind_sentinels() {
    const ASKS: &str = "+sentinel|get-master-addr-by-name";
    let page = include_str!(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/src/guide/running_redis.md"
    ));
    assert!(page.contains(ASKS));
    let primary = RedisServer::start();
    let sentinel = Sentinel::start(&primary);
    let may = |commands: &[&str]| {
        primary.run::<()>(&format!(
            "ACL SETUSER limiter reset on >limiter ~tsw1:* -@all {}",
            commands.join(" ")
        ));
    };
    let mut asked = redis::Client::open(sentinel.url())
        .unwrap()
        .get_connection()
        .unwrap();
    let mut may_ask = |commands: &str| {
        let words = [
            "SETUSER", "watcher", "reset", "on", ">watcher", "-@all", commands,
        ];
        redis::cmd("ACL").arg(&words).exec(&mut asked).unwrap();
    };
    let connect = async || {
        let sentinels = [sentinel
            .url()
            .replace("redis://", "redis://watcher:watcher@")];
        RedisStore::builder(RedisSource::sentinels(
            sentinels,
            "redis://limiter:limiter@main",
        ))
        .connect()
        .await
    };
    let commands = [listed(&primary), also_listed("Sentinels")].concat();
    may(&commands);
    may_ask(ASKS);
    let limiter = Limiter::new(connect().await.unwrap()).deadline(TEST_TIMEOUT);
    assert_eq!(
        limiter
            .check(&SPENT, "ada", 1)
            .await
            .unwrap()
            .binding()
            .used,
        1
    );
    may_ask("+ping");
    assert_eq!(connect().await.unwrap_err().kind, StoreErrorKind::Denied);
}

fn replica_of(primary: &RedisServer) -> RedisServer {
    RedisServer::start_with(&["--replicaof", "127.0.0.1", &primary.port().to_string()])
}

/// Without a refusal cache.
fn limiter(builder: RedisStoreBuilder) -> Limiter {
    Limiter::new(builder.build().unwrap())
        .refusal_cache(Duration::ZERO)
        .deadline(Duration::from_secs(1))
}

/// Kills the primary under load on an exhausted limit. Decisions return once the replica is
/// promoted, and replicated units stay spent. `not_replicated` units of the limit are not
/// replicated.
async fn fail_over(fault: &str, not_replicated: u64) {
    let mut primary = RedisServer::start();
    let replica = replica_of(&primary);
    let sentinels: Vec<_> = (0..3).map(|_| Sentinel::start(&primary)).collect();
    until("the sentinels do not find each other", || {
        sentinels.iter().all(Sentinel::is_ready)
    })
    .await;

    // The test has its own breaker, because the one of the load may be open at the end.
    let [limiter, loaded] = [(); 2].map(|()| {
        limiter(RedisStore::builder(RedisSource::sentinels(
            sentinels.iter().map(Sentinel::url),
            "redis://main",
        )))
    });
    let spend = async |units| {
        for _ in 0..units {
            assert!(limiter.check(&SPENT, "ada", 1).await.unwrap().is_allowed());
        }
    };
    let replicated = SPENT.units() - not_replicated;
    spend(replicated).await;
    let key = primary.keys().remove(0);
    until("the replica does not follow", || {
        replica.run::<u64>(&format!("ZCOUNT {key} -inf +inf")) == replicated
    })
    .await;
    if not_replicated > 0 {
        // The replica is cut off and cannot log in again.
        replica.run::<()>("CONFIG SET masteruser nobody");
        replica.run::<()>("CONFIG SET masterauth nothing");
        primary.run::<()>("CLIENT KILL TYPE replica");
        spend(not_replicated).await;
        assert!(
            replica
                .run::<String>("INFO replication")
                .contains("master_link_status:down")
        );
    }

    let load = Load::of_checks(&loaded.clone().deadline(DEADLINE), |_| {
        let charge = |limit, key| Charge::new(limit, key, 1).unwrap();
        Check::new(charge(SPENT, "ada"))
            .and(charge(LOAD, "bob"))
            .unwrap()
    });
    load.goes_on().await;
    assert_eq!(load.report().admitted, 0);
    primary.kill();
    until("no replica is promoted", || replica.is_primary()).await;
    let (promoted, lateness) = (Instant::now(), Lateness::start());
    // Refusals that are known stand until then.
    while loaded.peek(&SPENT, "ada").await.is_err() {
        assert!(promoted.elapsed() < TEST_TIMEOUT, "no decision comes back");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let back = promoted.elapsed();
    load.goes_on().await;
    load.goes_on().await;
    let report = load.end().await;
    let late = lateness.so_far();
    assert!(
        back < Duration::from_secs(5) + late,
        "decisions come back after {back:?}, timers were late by {late:?}"
    );
    row(
        fault,
        format!(
            "all decided again {} after the promotion; over-admitted {}",
            millis(back),
            report.admitted
        ),
        &format!(
            "decisions back within 2 s of the new primary; over-admission at most {not_replicated}"
        ),
    );
    // A check that has timed out may have been admitted, and was refused as known.
    assert!(report.admitted <= not_replicated, "{report:?}");
    assert_eq!(
        limiter.peek(&SPENT, "ada").await.unwrap().binding().used,
        SPENT.units()
    );
}

#[tokio::test]
async fn the_store_follows_a_failover() {
    fail_over("Sentinel failover, all replicated", 0).await;
}

#[tokio::test]
async fn unreplicated_units_are_admitted_once_more() {
    fail_over("Sentinel failover, 20 units not replicated", 20).await;
}

/// One sentinel is down, one does not know the primary, and one names the replica. The one that
/// knows is enough.
#[tokio::test]
async fn one_sentinel_that_knows_the_primary_is_enough() {
    let primary = RedisServer::start();
    let replica = replica_of(&primary);
    let (knows, is_behind) = (Sentinel::start(&primary), Sentinel::start(&replica));
    until("the sentinels do not come up", || {
        [&knows, &is_behind]
            .iter()
            .all(|sentinel| sentinel.ask(&["GET-MASTER-ADDR-BY-NAME", "main"]).is_ok())
    })
    .await;
    let down = format!("redis://127.0.0.1:{}/", free_port());
    let urls = [down.clone(), is_behind.url(), knows.url()];
    let limiter = limiter(RedisStore::builder(RedisSource::sentinels(
        urls,
        "redis://main/3",
    )));
    for _ in 0..3 {
        assert!(limiter.check(&SPENT, "ada", 1).await.unwrap().is_allowed());
    }
    assert!(
        primary
            .run::<String>("INFO keyspace")
            .contains("db3:keys=1"),
        "the database is the primary's"
    );

    for (urls, cause) in [
        (vec![down.clone()], "refused"),
        (vec![knows.url()], "no sentinel knows"),
        (vec![down.clone(), knows.url()], "no sentinel knows"),
        (vec![knows.url(), down], "no sentinel knows"),
    ] {
        let other = Limiter::new(
            RedisStore::builder(RedisSource::sentinels(urls, "redis://other"))
                .build()
                .unwrap(),
        )
        .deadline(TEST_TIMEOUT);
        let Err(Error::Unavailable(error)) = other.check(&SPENT, "ada", 1).await else {
            panic!("that cannot be")
        };
        let error = format!("{error:?}");
        assert!(error.contains("other") && error.contains(cause), "{error}");
    }
    assert!(
        RedisStore::builder(RedisSource::sentinels([""; 0], "redis://main"))
            .build()
            .is_err()
    );
}

/// A wrong password of the primary is named, although another sentinel hangs, or hangs up later.
#[tokio::test]
async fn a_wrong_password_is_named_beside_a_sentinel_that_hangs() {
    let primary = RedisServer::start_with(&["--requirepass", "s3cret"]);
    let knows = Sentinel::start(&primary);
    until("the sentinel does not come up", || {
        knows.ask(&["GET-MASTER-ADDR-BY-NAME", "main"]).is_ok()
    })
    .await;
    let (hangs, hangs_up) = (
        TcpListener::bind("127.0.0.1:0").unwrap(),
        TcpListener::bind("127.0.0.1:0").unwrap(),
    );
    let others =
        [&hangs, &hangs_up].map(|other| format!("redis://{}/", other.local_addr().unwrap()));
    thread::spawn(move || {
        for client in hangs_up.incoming() {
            thread::sleep(ms(300));
            drop(client);
        }
    });
    for other in others {
        let store = RedisStore::builder(RedisSource::sentinels(
            [knows.url(), other],
            "redis://:wrong@main",
        ));
        let error = store.connect().await.unwrap_err();
        assert_eq!(
            error.kind,
            StoreErrorKind::Denied,
            "{}",
            with_causes(&error)
        );
    }
}

/// Each sentinel and the primary have logins of their own.
#[tokio::test]
async fn an_error_tells_whether_a_sentinel_or_the_primary_refuses_the_login() {
    let primary = RedisServer::start();
    let sentinel = Sentinel::start(&primary);
    until("the sentinel does not come up", || {
        sentinel.ask(&["GET-MASTER-ADDR-BY-NAME", "main"]).is_ok()
    })
    .await;
    let refused = async |login: &str| {
        let url = sentinel
            .url()
            .replace("redis://", &format!("redis://{login}"));
        let error = RedisStore::builder(RedisSource::sentinels([url], "redis://main"))
            .connect()
            .await
            .unwrap_err();
        assert_eq!(
            error.kind,
            StoreErrorKind::Denied,
            "{}",
            with_causes(&error)
        );
        with_causes(&error)
    };
    primary.run::<()>("CONFIG SET requirepass s3cret");
    for login in ["", "default:any@"] {
        let text = refused(login).await;
        assert!(
            text.contains("the primary refuses") && !text.contains("a sentinel refuses"),
            "{text}"
        );
    }
    let mut connection = redis::Client::open(sentinel.url())
        .unwrap()
        .get_connection()
        .unwrap();
    redis::cmd("ACL")
        .arg(&["SETUSER", "default", "resetpass", ">s3cret"])
        .exec(&mut connection)
        .unwrap();
    for login in ["", ":wrong@", "nobody:s3cret@"] {
        let text = refused(login).await;
        assert!(
            text.contains("a sentinel refuses") && !text.contains("the primary refuses"),
            "{text}"
        );
    }
    assert!(refused(":s3cret@").await.contains("the primary refuses"));
    // The login in a URL of several sentinels is that of the primary.
    let url = format!("redis+sentinel://:s3cret@127.0.0.1:{}/main", sentinel.port);
    let error = with_causes(&store::connect(&url).await.unwrap_err());
    assert!(
        error.contains("a sentinel refuses")
            && error.contains("write them into its own URL for `RedisSource::sentinels`"),
        "{error}"
    );
}
