//! A primary that sentinels name, and its failover.

use std::{
    net::TcpListener,
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use redis::{RedisResult, Value};
use tempfile::TempDir;
use tokio::time::{Instant, sleep};
use tower_sliding_window::{DenyCache, Error, Limit, Limiter, RedisStore, store::RedisStoreBuilder};

use crate::support::{PATIENCE, redis_server::RedisServer, until};

const SPENT: Limit = Limit::per_hour("spent", 50);
const LOAD: Limit = Limit::per_hour("load", 1_000_000);

/// One that watches the primary `main`, for 500 ms.
struct Sentinel {
    process: Child,
    port: u16,
    _dir: TempDir,
}

impl Sentinel {
    fn start(primary: &RedisServer) -> Self {
        let (dir, port) = (tempfile::tempdir().unwrap(), unused_port());
        let config = dir.path().join("sentinel.conf");
        let lines = format!(
            "port {port}\nbind 127.0.0.1\ndir {dir}\nlogfile {dir}/log\nsentinel monitor main 127.0.0.1 {primary} 2\n\
             sentinel down-after-milliseconds main 500\nsentinel failover-timeout main 5000\n",
            dir = dir.path().display(),
            primary = port_of(primary),
        );
        std::fs::write(&config, lines).unwrap();
        let process = Command::new("redis-server")
            .arg(&config)
            .arg("--sentinel")
            .stdout(Stdio::null())
            .spawn()
            .expect("redis-server is not installed: run `bash tests/run.sh`, which installs it");
        Self { process, port, _dir: dir }
    }

    fn url(&self) -> String {
        format!("redis://127.0.0.1:{}/", self.port)
    }

    fn ask(&self, words: &[&str]) -> RedisResult<Value> {
        redis::cmd("SENTINEL").arg(words).query(&mut redis::Client::open(self.url())?.get_connection()?)
    }

    /// Whether it would agree to a failover, and knows a replica to promote.
    fn is_ready(&self) -> bool {
        let knows_a_replica =
            matches!(self.ask(&["REPLICAS", "main"]), Ok(Value::Array(replicas)) if replicas.len() == 1);
        let peers = matches!(self.ask(&["SENTINELS", "main"]), Ok(Value::Array(peers)) if peers.len() == 2);
        knows_a_replica && peers && self.ask(&["CKQUORUM", "main"]).is_ok()
    }
}

impl Drop for Sentinel {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn unused_port() -> u16 {
    TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port()
}

fn port_of(server: &RedisServer) -> u16 {
    server.url().trim_end_matches('/').rsplit(':').next().unwrap().parse().unwrap()
}

fn replica_of(primary: &RedisServer) -> RedisServer {
    RedisServer::start_with(&["--replicaof", "127.0.0.1", &port_of(primary).to_string()])
}

/// Asks every time.
fn limiter(builder: RedisStoreBuilder) -> Limiter<RedisStore> {
    Limiter::new(builder.build().unwrap()).deny_cache(DenyCache::off()).deadline(Duration::from_secs(1))
}

/// The primary is killed under load. Decisions are back as soon as another is promoted, and what had been replicated
/// stays spent.
#[tokio::test]
async fn a_failover_is_followed() {
    let mut primary = RedisServer::start();
    let replica = replica_of(&primary);
    let sentinels: Vec<_> = (0..3).map(|_| Sentinel::start(&primary)).collect();
    until("the sentinels do not find each other", || sentinels.iter().all(Sentinel::is_ready)).await;

    let limiter = limiter(RedisStore::sentinel(sentinels.iter().map(Sentinel::url), "main"));
    for _ in 0..SPENT.units() {
        assert!(limiter.check(&SPENT, "ada", 1).await.unwrap().is_allowed());
    }
    let key = primary.keys().remove(0);
    until("the replica does not follow", || replica.run::<u64>(&format!("ZCOUNT {key} -inf +inf")) == SPENT.units())
        .await;

    let (is_over, decided, over_admitted) =
        (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let load: Vec<_> = (0..8)
        .map(|_| {
            let limiter = limiter.clone();
            let (is_over, decided, over_admitted) =
                (Arc::clone(&is_over), Arc::clone(&decided), Arc::clone(&over_admitted));
            tokio::spawn(async move {
                while !is_over.load(Ordering::SeqCst) {
                    match tokio::join!(limiter.check(&LOAD, "bob", 1), limiter.check(&SPENT, "ada", 1)) {
                        (Ok(_), Ok(spent)) => {
                            decided.fetch_add(1, Ordering::SeqCst);
                            over_admitted.fetch_add(u64::from(spent.is_allowed()), Ordering::SeqCst);
                        }
                        _ => sleep(Duration::from_millis(10)).await,
                    }
                }
            })
        })
        .collect();
    until("nothing is decided before the failover", || decided.load(Ordering::SeqCst) > 100).await;
    primary.kill();
    until("nobody is promoted", || replica.is_primary()).await;
    let promoted = Instant::now();
    let before = decided.load(Ordering::SeqCst);
    until("decisions do not come back", || decided.load(Ordering::SeqCst) > before + 100).await;
    assert!(promoted.elapsed() < Duration::from_secs(5), "they come back after {:?}", promoted.elapsed());
    is_over.store(true, Ordering::SeqCst);
    for task in load {
        task.await.unwrap();
    }
    assert_eq!(over_admitted.load(Ordering::SeqCst), 0);
    assert_eq!(limiter.peek(&SPENT, "ada").await.unwrap().used(), SPENT.units());
}

/// One is down, one knows no such primary, one is behind and names the replica: the fourth is enough.
#[tokio::test]
async fn one_sentinel_that_knows_is_enough() {
    let primary = RedisServer::start();
    let replica = replica_of(&primary);
    let (knows, is_behind) = (Sentinel::start(&primary), Sentinel::start(&replica));
    until("the sentinels do not come up", || {
        [&knows, &is_behind].iter().all(|sentinel| sentinel.ask(&["GET-MASTER-ADDR-BY-NAME", "main"]).is_ok())
    })
    .await;
    let down = format!("redis://127.0.0.1:{}/", unused_port());
    let urls = [down.clone(), is_behind.url(), knows.url()];
    let limiter = limiter(RedisStore::sentinel(urls, "main").username("default").database(3));
    for _ in 0..3 {
        limiter.check(&SPENT, "ada", 1).await.unwrap();
    }
    assert!(primary.run::<String>("INFO keyspace").contains("db3:keys=1"), "the database is the builder's");

    for (urls, cause) in [(vec![down], "refused"), (vec![knows.url()], "no sentinel knows")] {
        let other = Limiter::new(RedisStore::sentinel(urls, "other").build().unwrap()).deadline(PATIENCE);
        let Err(Error::Unavailable(error)) = other.check(&SPENT, "ada", 1).await else { panic!("that cannot be") };
        let error = format!("{error:?}");
        assert!(error.contains("other") && error.contains(cause), "{error}");
    }
    assert!(RedisStore::sentinel([""; 0], "main").build().is_err());
}
