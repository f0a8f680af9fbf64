//! Units that a caller was woken for and does not use, and units that come back after their caller
//! has left.

use std::{
    future::poll_fn,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::Poll,
    time::Duration,
};

use tokio::{
    task::{JoinSet, yield_now},
    time::timeout,
};
use tower_sliding_window::{
    Charge, Check, Decision, Key, Limit, Limiter, MemoryStore, Store,
    error::{StoreError, StoreErrorKind},
    settlement::{Settled, Settlement},
    store::StoreFuture,
};

use super::lines;
use crate::support::{TEST_TIMEOUT, check_of, let_tasks_run, redis_server::RedisServer};

/// A store in which the checks of the key `broken` fail after a while, as those of a key of Redis
/// do that has got foreign content.
#[derive(Clone, Debug)]
struct WithBrokenKey(MemoryStore, Arc<AtomicBool>);

impl Store for WithBrokenKey {
    fn decide(&self, check: Check) -> StoreFuture<Decision> {
        if self.1.load(Ordering::SeqCst)
            && check
                .charges()
                .any(|charge| charge.key() == &"broken".into())
        {
            let error = StoreError::new(
                "deciding a check",
                StoreErrorKind::WrongType,
                "foreign content",
            );
            return Box::pin(async move { Err(error.of_one_check()) });
        }
        self.0.decide(check)
    }

    fn settle(&self, settlement: Settlement) -> StoreFuture<Settled> {
        self.0.settle(settlement)
    }

    fn reset(&self, limit: Limit, key: Key) -> StoreFuture<()> {
        self.0.reset(limit, key)
    }
}

/// The first caller is woken, and its check fails.
#[tokio::test(start_paused = true)]
async fn a_unit_of_a_caller_whose_own_check_fails_is_for_the_next() {
    let is_broken = Arc::new(AtomicBool::new(false));
    let limiter = Limiter::new(WithBrokenKey(MemoryStore::new(), Arc::clone(&is_broken)));
    let (shared, own) = (Limit::per_hour("shared", 1), Limit::per_hour("own", 9));
    let reservation = limiter
        .reserve(&shared, "all", 1, Duration::MAX)
        .await
        .unwrap()
        .unwrap();
    let limiter = limiter.retry_reserved_after(Duration::from_secs(3_000));
    let mut waiting = Vec::new();
    for name in ["broken", "whole"] {
        let charge = |limit: &Limit, key| Charge::new(limit.clone(), key, 1).unwrap();
        let (limiter, check) = (
            limiter.clone(),
            check_of([charge(&shared, "all"), charge(&own, name)]),
        );
        waiting.push(tokio::spawn(async move {
            limiter.acquire_all(check, Duration::MAX).await
        }));
        let_tasks_run().await;
    }
    is_broken.store(true, Ordering::SeqCst);
    reservation.settle(0).await.unwrap();
    let_tasks_run().await;
    let (broken, whole) = (waiting.remove(0), waiting.remove(0));
    assert!(broken.is_finished() && broken.await.unwrap().is_err());
    assert!(whole.is_finished() && whole.await.unwrap().unwrap().is_allowed());
}

/// The settlement is still on its way when its caller leaves, behind checks of others. A caller
/// that asked at once would be decided before it, and wait on.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn units_that_come_back_after_their_caller_has_left_are_for_those_that_wait() {
    const CALLERS: usize = 100;
    let (server, limit) = (RedisServer::start(), Limit::per_hour("calls", 1));
    for connections in [1, 8] {
        let store = server.store().connections(connections).build().unwrap();
        let limiter = Limiter::new(store)
            .deadline(TEST_TIMEOUT)
            .retry_reserved_after(Duration::from_secs(3_000));
        let (mut waiting, mut reservations) = (JoinSet::new(), Vec::new());
        for caller in 0..CALLERS {
            let (limiter, limit, key) = (
                limiter.clone(),
                limit.clone(),
                format!("{connections}-{caller}"),
            );
            reservations.push(
                limiter
                    .reserve(&limit, &key, 1, Duration::MAX)
                    .await
                    .unwrap()
                    .unwrap(),
            );
            waiting.spawn(async move { limiter.acquire(&limit, key, 1, Duration::MAX).await });
        }
        while lines(&limiter) < CALLERS {
            yield_now().await;
        }
        let mut others = JoinSet::new();
        for other in 0..16 {
            let limiter = limiter.clone();
            others.spawn(async move {
                loop {
                    let check = limiter.check(&Limit::per_hour("others", 1_000_000), other, 1);
                    assert!(check.await.unwrap().is_allowed());
                }
            });
        }
        for reservation in reservations {
            let mut settling = pin!(reservation.settle(0));
            poll_fn(|cx| Poll::Ready(settling.as_mut().poll(cx).is_pending())).await;
        }
        let admitted = timeout(TEST_TIMEOUT, async {
            while let Some(outcome) = waiting.join_next().await {
                assert!(outcome.unwrap().unwrap().is_allowed());
            }
        });
        assert!(
            admitted.await.is_ok(),
            "{} of {CALLERS} callers still wait",
            waiting.len()
        );
    }
}
