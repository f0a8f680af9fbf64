//! Many clients at once: each store admits exactly the limit, never one more, never one less.

use std::sync::Arc;

use tokio::task::JoinSet;
use tower_sliding_window::{Charge, Check, Limit, Limiter, MemoryStore, Store};

use crate::support::{TEST_TIMEOUT, redis_server::RedisServer};

/// The window is longer than the test.
const LIMIT: Limit = Limit::per_hour("shared", 100);

fn limiters<S: Store>(stores: Vec<S>) -> Vec<Limiter> {
    stores
        .into_iter()
        .map(|store| Limiter::new(store).deadline(TEST_TIMEOUT))
        .collect()
}

/// As many connections as four processes have.
fn redis_limiters(server: &RedisServer) -> Vec<Limiter> {
    limiters((0..4).map(|_| server.store().build().unwrap()).collect())
}

/// Sends checks from 64 tasks per limiter, and returns how many were admitted.
async fn admitted(limiters: &[Limiter], check: impl Fn(usize) -> Check) -> usize {
    let start = Arc::new(tokio::sync::Barrier::new(limiters.len() * 64));
    let mut tasks = JoinSet::new();
    for number in 0..limiters.len() * 64 {
        let (limiter, start) = (
            limiters[number % limiters.len()].clone(),
            Arc::clone(&start),
        );
        let check = check(number);
        tasks.spawn(async move {
            start.wait().await;
            let mut admitted = 0;
            for _ in 0..4 {
                admitted +=
                    usize::from(limiter.check_all(check.clone()).await.unwrap().is_allowed());
            }
            admitted
        });
    }
    tasks.join_all().await.into_iter().sum()
}

fn one_key(_: usize) -> Check {
    Check::new(Charge::new(LIMIT, "ada", 1).unwrap())
}

/// Two limits in either order, one on a key of all tasks and one on a key of some tasks.
fn crossing(number: usize) -> Check {
    let narrow = |key: &str| Charge::new(Limit::per_hour("narrow", 30), key, 1).unwrap();
    let shared = Charge::new(LIMIT, "all", 1).unwrap();
    let own = narrow(["a", "b", "c", "d", "e"][number % 5]);
    let (first, second) = if number.is_multiple_of(2) {
        (shared, own)
    } else {
        (own, shared)
    };
    Check::new(first).and(second).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn memory_admits_exactly_the_limit() {
    assert_eq!(
        admitted(&limiters(vec![MemoryStore::new()]), one_key).await,
        100
    );
    assert_eq!(
        admitted(&limiters(vec![MemoryStore::new()]), crossing).await,
        100
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn redis_admits_exactly_the_limit() {
    let server = RedisServer::start();
    assert_eq!(admitted(&redis_limiters(&server), one_key).await, 100);
    assert_eq!(admitted(&redis_limiters(&server), crossing).await, 100);
}

/// A check that another limit refuses takes nothing from the shared limit. The five narrow keys of
/// 15 units each are spent exactly, and together stay below the shared limit.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn refused_checks_take_nothing_from_the_other_limits() {
    let server = RedisServer::start();
    let narrow = Limit::per_hour("narrow", 15);
    let check = |number: usize| {
        let own = Charge::new(narrow.clone(), ["a", "b", "c", "d", "e"][number % 5], 1).unwrap();
        Check::new(Charge::new(LIMIT, "all", 1).unwrap())
            .and(own)
            .unwrap()
    };
    assert_eq!(admitted(&redis_limiters(&server), check).await, 75);
    let limiter = &redis_limiters(&server)[0];
    assert_eq!(
        limiter.peek(&LIMIT, "all").await.unwrap().binding().used,
        75
    );
}
