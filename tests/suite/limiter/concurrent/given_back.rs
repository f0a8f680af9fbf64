//! Places whose caller has left, or whose runtime is not polled any more, are given back. No life
//! ends within a test, unless it is renewed.

use std::{
    future::{Future, IntoFuture},
    pin::pin,
    task::{Context, Poll, Waker},
};

use futures_util::future::join_all;
use tokio::{
    runtime::Runtime,
    task::yield_now,
    time::{timeout, timeout_at},
};
use tower_sliding_window::{
    Key, Store,
    error::StoreError,
    settlement::{Settled, Settlement},
    store::StoreFuture,
};

use super::*;
use crate::support::proxy::Proxy;

/// Its life is longer than a test.
fn long() -> Limit {
    Limit::concurrent("long", 1_000).freed_after(seconds(3_600))
}

/// A store without a local state whose decisions and settlements take a time.
struct Slow(MemoryStore, Duration);

impl Store for Slow {
    fn decide(&self, check: Check) -> StoreFuture<Decision> {
        let (decision, time) = (self.0.decide(check), self.1);
        Box::pin(async move {
            sleep(time).await;
            decision.await
        })
    }

    fn settle(&self, settlement: Settlement) -> StoreFuture<Settled> {
        self.0.settle(settlement)
    }

    fn reset(&self, limit: Limit, key: Key) -> StoreFuture<()> {
        self.0.reset(limit, key)
    }
}

/// Decides at once, and settles after another poll.
struct Yielding(MemoryStore);

impl Store for Yielding {
    fn decide(&self, check: Check) -> StoreFuture<Decision> {
        self.0.decide(check)
    }

    fn decide_now(&self, check: &Check) -> Option<Result<Decision, StoreError>> {
        self.0.decide_now(check)
    }

    fn settle(&self, settlement: Settlement) -> StoreFuture<Settled> {
        let settled = self.0.settle(settlement);
        Box::pin(async move {
            yield_now().await;
            settled.await
        })
    }

    fn reset(&self, limit: Limit, key: Key) -> StoreFuture<()> {
        self.0.reset(limit, key)
    }
}

/// Alone, and with so many that they queue.
async fn leave(limiter: &Limiter, observer: &Limiter) {
    for callers in [1, 1, 200] {
        let asked = (0..callers).map(|_| timeout(ms(20), limiter.check(&long(), "ada", 1)));
        assert!(
            join_all(asked).await.iter().all(Result::is_err),
            "the reply comes later"
        );
        sleep(ms(600)).await;
        until_held(observer, &long(), 0).await;
    }
}

/// The replies take far longer than the callers wait, since a busy machine may pause between.
#[tokio::test]
async fn a_place_whose_caller_has_hung_up_is_freed() {
    let server = RedisServer::start();
    let (proxy, observer) = (Proxy::start(&server).await, limiter(&server).await);
    let far = Limiter::new(RedisStore::connect(proxy.url()).await.unwrap()).deadline(TEST_TIMEOUT);
    proxy.delay_replies(ms(500));
    leave(&far, &observer).await;
    let memory = MemoryStore::new();
    leave(
        &Limiter::new(Slow(memory.clone(), ms(500))).deadline(TEST_TIMEOUT),
        &Limiter::new(memory),
    )
    .await;
}

#[tokio::test]
async fn a_pause_of_redis_costs_no_places() {
    let server = RedisServer::start();
    let (limiter, observer) = (
        Limiter::new(RedisStore::connect(&server.url()).await.unwrap()),
        limiter(&server).await,
    );
    for _ in 0..20 {
        drop(enter(&limiter, &long()).await);
    }
    server.pause();
    let asked = join_all((0..200).map(|_| limiter.check(&long(), "ada", 1))).await;
    server.resume();
    assert!(
        asked.iter().all(Result::is_err),
        "the pause is longer than the deadline"
    );
    until_held(&observer, &long(), 0).await;
}

/// The replies are lost with their connection, and the server takes the places nevertheless.
#[tokio::test]
async fn a_pause_that_is_longer_than_a_reply_may_take_costs_no_places() {
    let server = RedisServer::start();
    let store = server
        .store()
        .reply_timeout(ms(100))
        .connect()
        .await
        .unwrap();
    let (limiter, observer) = (Limiter::new(store), limiter(&server).await);
    drop(enter(&limiter, &long()).await);
    server.pause();
    let asked = join_all((0..200).map(|_| limiter.check(&long(), "ada", 1))).await;
    sleep(ms(300)).await;
    server.resume();
    assert!(
        asked.iter().all(Result::is_err),
        "the pause is longer than the deadline"
    );
    sleep(ms(50)).await;
    until_held(&observer, &long(), 0).await;
}

#[tokio::test]
async fn a_caller_that_hangs_up_in_line_leaves_no_place() {
    let server = RedisServer::start();
    let (proxy, observer) = (Proxy::start(&server).await, limiter(&server).await);
    let far = Limiter::new(RedisStore::connect(proxy.url()).await.unwrap()).deadline(TEST_TIMEOUT);
    let one = Limit::concurrent("one", 1).freed_after(seconds(3_600));
    let held = enter(&far, &one).await;
    proxy.delay_replies(ms(100));
    let end = Instant::now() + ms(350);
    let waiting = (0..3).map(|_| timeout_at(end, far.acquire(&one, "ada", 1, TEST_TIMEOUT)));
    let (waited, ()) = tokio::join!(join_all(waiting), async {
        sleep(ms(250)).await;
        // The first in line asks, and leaves before the reply.
        drop(held);
    });
    assert!(waited.iter().all(Result::is_err));
    sleep(ms(200)).await;
    until_held(&observer, &one, 0).await;
}

#[test]
fn a_place_is_freed_by_a_thread_that_polls_its_runtime_no_more() {
    let server = RedisServer::start();
    for has_ended in [false, true] {
        for runtime in [one_thread(), crate::support::two_threads()] {
            let mut held: Vec<_> = runtime.block_on(async {
                let limiter = limiter(&server).await;
                join_all((0..20).map(|_| limiter.check(&long(), "ada", 1))).await
            });
            let runtime: Option<Runtime> = Some(runtime).filter(|_| !has_ended);
            held.drain(..10).for_each(drop);
            one_thread().block_on(async {
                held.clear();
                until_held(&limiter(&server).await, &long(), 0).await;
            });
            drop(runtime);
        }
    }
}

#[test]
fn a_store_that_decides_at_once_may_settle_later() {
    let memory = MemoryStore::new();
    let (limiter, observer) = (Limiter::new(Yielding(memory.clone())), Limiter::new(memory));
    let held = one_thread().block_on(enter(&limiter, &long()));
    drop(held);
    one_thread().block_on(async {
        until_held(&observer, &long(), 0).await;
        drop(enter(&limiter, &long()).await);
        until_held(&observer, &long(), 0).await;
    });
}

/// A reply takes more than a quarter of the life.
#[tokio::test]
async fn a_place_is_not_lost_only_because_redis_is_far_away() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server).await;
    proxy.delay_replies(ms(300));
    let limiter = Limiter::new(RedisStore::connect(proxy.url()).await.unwrap());
    let short = Limit::concurrent("short", 2).freed_after(seconds(1));
    let held = [enter(&limiter, &short).await, enter(&limiter, &short).await];
    for look in 0..60 {
        assert!(!held.iter().any(Decision::has_lost_place), "look {look}");
        sleep(ms(100)).await;
    }
}

/// Changing a setting copies a limiter. The copy ends with the place that it has taken first.
#[tokio::test]
async fn a_place_is_renewed_although_the_limiter_of_another_has_ended() {
    let server = RedisServer::start();
    let limiter = limiter(&server).await;
    let short = Limit::concurrent("short", 2).freed_after(seconds(1));
    let first = enter(&limiter.clone().refusal_cache(Duration::ZERO), &short).await;
    let second = enter(&limiter, &short).await;
    drop(first);
    sleep(seconds(3)).await;
    assert!(!second.has_lost_place());
    assert_eq!(limiter.peek(&short, "ada").await.unwrap().binding().used, 1);
}

#[tokio::test]
async fn a_shutdown_frees_all_places_on_the_clones_of_a_store() {
    let server = RedisServer::start();
    let (store, observer) = (
        RedisStore::connect(&server.url()).await.unwrap(),
        limiter(&server).await,
    );
    let [one, other, last] = [(); 3].map(|()| Limiter::new(store.clone()).deadline(TEST_TIMEOUT));
    let mut held = vec![
        enter(&one, &long()).await,
        enter(&one, &long()).await,
        enter(&other, &long()).await,
    ];
    last.shutdown(TEST_TIMEOUT).await.unwrap();
    assert_eq!(
        observer.peek(&long(), "ada").await.unwrap().binding().used,
        0
    );
    assert!(held.iter().all(Decision::has_lost_place));
    let later = enter(&one, &long()).await;
    held.clear();
    sleep(ms(100)).await;
    assert!(!later.has_lost_place());
    assert_eq!(
        observer.peek(&long(), "ada").await.unwrap().binding().used,
        1,
        "later requests hold their places"
    );
    drop(later);
    one.shutdown(TEST_TIMEOUT).await.unwrap();
    assert!(server.keys().is_empty());
}

/// True if its caller waits or has left.
#[tokio::test]
async fn a_shutdown_completes_settlements_and_releases_that_are_on_their_way() {
    let server = RedisServer::start();
    let (proxy, observer) = (Proxy::start(&server).await, limiter(&server).await);
    let limiter =
        Limiter::new(RedisStore::connect(proxy.url()).await.unwrap()).deadline(TEST_TIMEOUT);
    let calls = Limit::per_hour("calls", 100);
    let (held, check) = (
        enter(&limiter, &long()).await,
        Check::new(charge(&calls, 9)),
    );
    let admitted = limiter.check_all(check.clone()).await.unwrap();
    proxy.delay_replies(ms(200));
    drop(held);
    {
        let settling = pin!(limiter.settle(Settlement::new(check, &admitted, |_| Some(2))));
        assert!(matches!(
            settling.poll(&mut Context::from_waker(Waker::noop())),
            Poll::Pending
        ));
    }
    let begun = Instant::now();
    limiter.shutdown(TEST_TIMEOUT).await.unwrap();
    assert!(begun.elapsed() > ms(150), "it waits for the replies");
    assert_eq!(
        observer.peek(&calls, "ada").await.unwrap().binding().used,
        2
    );
    assert_eq!(
        observer.peek(&long(), "ada").await.unwrap().binding().used,
        0
    );
}

#[tokio::test]
async fn a_shutdown_ends_in_time_and_says_what_is_left() {
    let server = RedisServer::start();
    let limiter = limiter(&server).await;
    let _held = enter(&limiter, &long()).await;
    server.pause();
    let ended = limiter.shutdown(ms(100)).await;
    server.resume();
    assert!(
        matches!(ended, Err(tower_sliding_window::Error::TimedOut { .. })),
        "{ended:?}"
    );
    limiter.shutdown(TEST_TIMEOUT).await.unwrap();
    assert!(server.keys().is_empty());
}

async fn limiter(server: &RedisServer) -> Limiter {
    Limiter::new(RedisStore::connect(&server.url()).await.unwrap()).deadline(TEST_TIMEOUT)
}

mod processes {
    //! Processes that end in order leave nothing in Redis. This program runs itself as them.

    use std::{
        env,
        process::{Command, Stdio},
    };

    use axum::{Router, body::Body, routing::get};
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::{TcpListener, TcpStream},
    };
    use tower_sliding_window::RateLimitLayer;

    use super::*;

    const PROCESSES: usize = 20;

    #[test]
    #[ignore = "a process of processes_that_end_in_order_leave_no_place"]
    fn process() {
        let (kind, runtime) = (
            env::var("KIND").unwrap(),
            match &*env::var("THREADS").unwrap() {
                "1" => one_thread(),
                _ => crate::support::two_threads(),
            },
        );
        runtime.block_on(async {
            // Many processes start at once, on a machine that may be busy.
            let store = RedisStore::builder(env::var("REDIS_URL").unwrap());
            let store = store
                .connect_timeout(TEST_TIMEOUT)
                .reply_timeout(TEST_TIMEOUT)
                .connect()
                .await
                .unwrap();
            let limiter = Limiter::new(store).deadline(TEST_TIMEOUT);
            match &*kind {
                "job" => drop(enter(&limiter, &long()).await),
                _ => serve(&limiter).await,
            }
            limiter.shutdown(TEST_TIMEOUT).await.unwrap();
        });
    }

    /// Shuts down while streams are open.
    async fn serve(limiter: &Limiter) {
        let layer =
            RateLimitLayer::new(limiter.clone()).limit(long().by(crate::support::requests::anyone));
        let stream = || async {
            Body::from_stream(futures_util::stream::pending::<
                Result<String, std::io::Error>,
            >())
        };
        let app = Router::new().route("/", get(stream).layer(layer));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (shut_down, signal) = tokio::sync::oneshot::channel::<()>();
        let served =
            axum::serve(listener, app).with_graceful_shutdown(async { drop(signal.await) });
        let served = tokio::spawn(served.into_future());
        let mut streams = Vec::new();
        for _ in 0..5 {
            let mut stream = TcpStream::connect(address).await.unwrap();
            stream
                .write_all(b"GET / HTTP/1.1\r\nhost: here\r\n\r\n")
                .await
                .unwrap();
            stream.read_u8().await.unwrap();
            streams.push(stream);
        }
        shut_down.send(()).unwrap();
        assert!(
            timeout(ms(50), served).await.is_err(),
            "the streams are open"
        );
    }

    #[tokio::test]
    async fn processes_that_end_in_order_leave_no_place() {
        let server = RedisServer::start();
        let test = concat!(module_path!(), "::process")
            .split_once("::")
            .unwrap()
            .1;
        for (kind, threads) in [("job", "1"), ("job", "2"), ("server", "1"), ("server", "2")] {
            let start = || {
                let mut process = Command::new(env::current_exe().unwrap());
                process
                    .args([test, "--exact", "--ignored"])
                    .stdout(Stdio::null());
                process
                    .envs([
                        ("REDIS_URL", &*server.url()),
                        ("KIND", kind),
                        ("THREADS", threads),
                    ])
                    .spawn()
                    .unwrap()
            };
            let processes: Vec<_> = (0..PROCESSES).map(|_| start()).collect();
            processes
                .into_iter()
                .for_each(|mut process| assert!(process.wait().unwrap().success()));
            assert!(
                server.keys().is_empty(),
                "{kind} on {threads} leave {:?}",
                server.keys()
            );
        }
    }
}

/// A check that is dropped on a thread without a runtime. Its own goes on.
#[test]
fn a_check_that_is_dropped_without_a_runtime_leaves_no_place() {
    let (server, runtime) = (RedisServer::start(), two_threads());
    let store = server.store().build().unwrap();
    let limiter = Limiter::new(store).deadline(TEST_TIMEOUT);
    runtime.block_on(async { drop(limiter.check(&long(), "ada", 1).await.unwrap()) });
    for callers in [1, 100] {
        server.pause();
        let mut asked: Vec<_> = (0..callers)
            .map(|_| Box::pin(limiter.check(&long(), "ada", 1)))
            .collect();
        runtime.block_on(async {
            for asked in &mut asked {
                assert!(
                    asked
                        .as_mut()
                        .poll(&mut Context::from_waker(Waker::noop()))
                        .is_pending()
                );
            }
            sleep(ms(50)).await;
        });
        drop(asked);
        server.resume();
        runtime.block_on(async {
            sleep(ms(200)).await;
            until_held(&limiter, &long(), 0).await;
        });
    }
}
