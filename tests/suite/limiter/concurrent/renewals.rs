//! Places on Redis are renewed as long as they are held, and free some time after their process has
//! died.

use super::*;

/// As short as a life may be.
const SHORT: Limit = Limit::concurrent("short", 2).freed_after(Duration::from_secs(1));

async fn limiter(server: &RedisServer) -> Limiter {
    Limiter::new(RedisStore::connect(&server.url()).await.unwrap()).deadline(TEST_TIMEOUT)
}

#[tokio::test]
async fn a_place_is_held_for_longer_than_its_life() {
    let server = RedisServer::start();
    let (limiter, other) = (limiter(&server).await, limiter(&server).await);
    let held = [enter(&limiter, &SHORT).await, enter(&limiter, &SHORT).await];
    let begun = Instant::now();
    while begun.elapsed() < seconds(4) {
        assert!(!enter(&other, &SHORT).await.is_allowed());
        sleep(ms(50)).await;
    }
    assert!(!held.iter().any(Decision::has_lost_place));
    drop(held);
    until_held(&other, &SHORT, 0).await;
    assert!(server.keys().is_empty(), "nothing stays");
}

/// A place that nobody renews: its runtime has ended with the process, as far as Redis can tell.
#[test]
fn a_place_is_free_a_life_after_its_runtime_has_ended() {
    let server = RedisServer::start();
    let dead = one_thread();
    let held = dead.block_on(async {
        let limiter = limiter(&server).await;
        [enter(&limiter, &SHORT).await, enter(&limiter, &SHORT).await]
    });
    let died = std::time::Instant::now();
    dead.shutdown_background();
    one_thread().block_on(async {
        let other = limiter(&server).await;
        while !enter(&other, &SHORT).await.is_allowed() {
            assert!(died.elapsed() < TEST_TIMEOUT);
            sleep(ms(10)).await;
        }
    });
    println!("free after {:?}", died.elapsed());
    assert!(died.elapsed() > ms(900));
    drop(held);
}

#[tokio::test]
async fn a_server_that_has_lost_its_data_learns_the_places_again() {
    let server = RedisServer::start();
    let (limiter, other) = (limiter(&server).await, limiter(&server).await);
    let held = [enter(&limiter, &SHORT).await, enter(&limiter, &SHORT).await];
    server.run::<()>("FLUSHALL");
    until_held(&other, &SHORT, 2).await;
    assert!(held.iter().all(Decision::has_lost_place));
    drop(held);
    until_held(&other, &SHORT, 0).await;
}

/// Asks on a runtime of its own, so that nothing of the caller's runtime runs meanwhile.
fn enter_meanwhile(server: &RedisServer, limit: &Limit, times: usize) -> Vec<Decision> {
    let enter_all = async {
        let (limiter, mut decisions) = (limiter(server).await, Vec::new());
        for _ in 0..times {
            decisions.push(enter(&limiter, limit).await);
        }
        decisions
    };
    std::thread::scope(|scope| {
        scope
            .spawn(|| one_thread().block_on(enter_all))
            .join()
            .unwrap()
    })
}

/// The place counts beyond the limit then, so that no other comes on top.
#[tokio::test]
async fn a_process_that_stood_still_takes_its_place_again() {
    let server = RedisServer::start();
    let (limiter, other) = (limiter(&server).await, limiter(&server).await);
    let held = [enter(&limiter, &SHORT).await, enter(&limiter, &SHORT).await];
    std::thread::sleep(ms(1_200));
    let others = enter_meanwhile(&server, &SHORT, 2);
    assert!(others.iter().all(Decision::is_allowed));
    until_held(&other, &SHORT, 4).await;
    assert!(held.iter().all(Decision::has_lost_place));
    drop(others);
    until_held(&other, &SHORT, 2).await;
    assert!(!enter(&other, &SHORT).await.is_allowed());
}

#[tokio::test]
async fn a_place_that_nobody_has_got_while_its_process_stood_still_is_not_lost() {
    let server = RedisServer::start();
    let (limiter, begun) = (limiter(&server).await, Instant::now());
    let held = [enter(&limiter, &SHORT).await, enter(&limiter, &SHORT).await];
    std::thread::sleep(ms(1_200));
    assert!(
        held.iter().all(Decision::has_lost_place),
        "another may get it"
    );
    while held.iter().any(Decision::has_lost_place) {
        assert!(begun.elapsed() < TEST_TIMEOUT);
        sleep(ms(10)).await;
    }
    assert_eq!(limiter.peek(&SHORT, "ada").await.unwrap().binding().used, 2);
    assert!(!enter(&limiter, &SHORT).await.is_allowed());
}

#[tokio::test]
async fn a_server_without_memory_renews_and_frees_places() {
    let server = RedisServer::start();
    let (limiter, other) = (limiter(&server).await, limiter(&server).await);
    let held = enter(&limiter, &SHORT).await;
    server.run::<()>("CONFIG SET maxmemory 1");
    sleep(seconds(3)).await;
    assert_eq!(other.peek(&SHORT, "ada").await.unwrap().binding().used, 1);
    assert!(!held.has_lost_place());
    drop(held);
    until_held(&other, &SHORT, 0).await;
}

/// Places that travel together, as in a failover: the server knows them still.
#[tokio::test]
async fn a_server_that_may_not_write_for_a_while_loses_no_place_and_keeps_none() {
    let server = RedisServer::start();
    let (limiter, other) = (limiter(&server).await, limiter(&server).await);
    let life = Limit::concurrent("life", 2).freed_after(Duration::from_secs(3));
    let long = Limit::concurrent("long", 2).freed_after(Duration::from_secs(3_600));
    let held = [enter(&limiter, &life).await, enter(&limiter, &life).await];
    server.run::<()>("CONFIG SET min-replicas-to-write 1");
    sleep(seconds(2)).await;
    server.run::<()>("CONFIG SET min-replicas-to-write 0");
    sleep(seconds(2)).await;
    assert_eq!(other.peek(&life, "ada").await.unwrap().binding().used, 2);
    assert!(!held.iter().any(Decision::has_lost_place));

    let both = limiter
        .check_all(check_of([charge(&long, 1), charge(&STREAMS, 1)]))
        .await
        .unwrap();
    server.run::<()>("CONFIG SET min-replicas-to-write 1");
    drop((held, both));
    sleep(ms(300)).await;
    server.run::<()>("CONFIG SET min-replicas-to-write 0");
    until_held(&other, &long, 0).await;
    until_held(&other, &STREAMS, 0).await;
}

/// Most requests end before the first renewal.
#[tokio::test]
async fn short_requests_are_not_renewed() {
    let server = RedisServer::start();
    let limiter = limiter(&server).await;
    let before = server.script_calls();
    for _ in 0..20 {
        drop(enter(&limiter, &STREAMS).await);
        until_held(&limiter, &STREAMS, 0).await;
    }
    assert!(server.script_calls() - before < 20 * 12);
}

#[cfg(feature = "cluster")]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn places_of_several_slots_are_renewed_and_freed() {
    use crate::support::redis_cluster::RedisCluster;

    let cluster = RedisCluster::start(3).await;
    let limiter = cluster.limiter(cluster.builder()).deadline(TEST_TIMEOUT);
    let all = Limit::concurrent("all", 3).freed_after(Duration::from_secs(1));
    let check = |key: &str| {
        let own = Check::new(Charge::new(SHORT, key, 1).unwrap());
        own.and(Charge::new(all.clone(), "everybody", 1).unwrap())
            .unwrap()
    };
    let mut held = Vec::new();
    for key in ["ada", "ada", "bob"] {
        held.push(limiter.check_all(check(key)).await.unwrap());
    }
    assert!(held.iter().all(Decision::holds_place));
    sleep(seconds(3)).await;
    assert!(
        !limiter.check_all(check("eve")).await.unwrap().is_allowed(),
        "all places of everybody are held"
    );
    let until_free = async |limit: &Limit, key: &'static str| {
        let is_held = async || limiter.peek(limit, key).await.unwrap().binding().used > 0;
        let freed = async {
            while is_held().await {
                sleep(ms(5)).await;
            }
        };
        tokio::time::timeout(TEST_TIMEOUT, freed).await.unwrap();
    };
    // What a slot has counted is given back.
    until_free(&SHORT, "eve").await;
    drop(held);
    // Each slot is freed by a call of its own.
    until_held(&limiter, &SHORT, 0).await;
    until_free(&all, "everybody").await;
    assert!(
        !limiter
            .check_all(check("eve"))
            .await
            .unwrap()
            .statuses()
            .any(|status| status.used > 1)
    );
}

#[tokio::test]
async fn a_clock_that_steps_back_frees_no_place() {
    let (server, clock) = (
        RedisServer::start(),
        tower_sliding_window::store::ManualClock::new(),
    );
    let limiter =
        Limiter::new(server.store().clock(&clock).build().unwrap()).deadline(TEST_TIMEOUT);
    let held = [enter(&limiter, &SHORT).await, enter(&limiter, &SHORT).await];
    clock.step_back(Duration::from_secs(60 * 60));
    for _ in 0..10 {
        assert!(!enter(&limiter, &SHORT).await.is_allowed());
        sleep(ms(100)).await;
        clock.advance(ms(100));
    }
    assert!(!held.iter().any(Decision::has_lost_place));
    drop(held);
    until_held(&limiter, &SHORT, 0).await;
    assert!(
        enter(&limiter, &SHORT).await.is_allowed(),
        "an hour ahead, nothing is left"
    );
}
