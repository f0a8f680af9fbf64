//! Checks that are repeated under one id have one place. It is free once no try and no decision of
//! the process is left.

use tower_sliding_window::{check::AdmissionId, limiter::Breaker};

use super::*;
use crate::support::proxy::Proxy;

const ONE: Limit = Limit::concurrent("one", 1).freed_after(Duration::from_secs(3_600));
const CALLS: Limit = Limit::per_hour("calls", 1_000);

fn check(with_window: bool) -> Check {
    let place = Check::new(charge(&ONE, 1)).with_id(AdmissionId(7));
    if with_window {
        place.and(charge(&CALLS, 1)).unwrap()
    } else {
        place
    }
}

/// One that gives up soon, and one that waits for the reply.
async fn limiters(proxy: &Proxy, are_clones: bool) -> [Limiter; 2] {
    let store = RedisStore::builder(proxy.url())
        .connect_timeout(TEST_TIMEOUT)
        .reply_timeout(TEST_TIMEOUT)
        .connect()
        .await
        .unwrap();
    let limiter = Limiter::new(store.clone()).breaker(Breaker::OFF);
    let other = if are_clones {
        limiter.clone()
    } else {
        Limiter::new(store)
    };
    [limiter.deadline(ms(100)), other.deadline(TEST_TIMEOUT)]
}

async fn observer(server: &RedisServer) -> Limiter {
    Limiter::new(RedisStore::connect(&server.url()).await.unwrap()).deadline(TEST_TIMEOUT)
}

/// The try that timed out was admitted, and the reply to it comes at about the same time as that to
/// the next try, or later.
async fn a_late_reply_comes() {
    for (are_clones, waits, with_window) in [
        (true, false, false),
        (true, true, true),
        (false, false, true),
        (false, true, false),
    ] {
        let server = RedisServer::start();
        let proxy = Proxy::start(&server).await;
        let [hasty, patient] = limiters(&proxy, are_clones).await;
        let observer = observer(&server).await;
        drop(patient.check(&CALLS, "bob", 1).await.unwrap());
        proxy.delay_replies(ms(400));
        assert!(hasty.check_all(check(with_window)).await.is_err());
        let place = if waits {
            patient.acquire_all(check(with_window), TEST_TIMEOUT).await
        } else {
            patient.check_all(check(with_window)).await
        };
        let place = place.unwrap();
        proxy.delay_replies(Duration::ZERO);
        assert!(place.is_allowed() && place.holds_place());
        for _ in 0..20 {
            let used = observer.peek(&ONE, "ada").await.unwrap().binding().used;
            let named = (are_clones, waits, with_window);
            assert_eq!(used, 1, "{named:?}: the caller holds its place");
            assert!(!enter(&observer, &ONE).await.is_allowed(), "{named:?}");
            sleep(ms(40)).await;
        }
        assert!(!place.has_lost_place());
        drop(place);
        until_held(&observer, &ONE, 0).await;
    }
}

#[tokio::test]
async fn a_late_reply_frees_no_place_that_a_later_try_holds() {
    a_late_reply_comes().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_late_reply_frees_no_place_that_a_later_try_holds_on_two_threads() {
    a_late_reply_comes().await;
}

/// All tries time out, and nobody tries again.
#[tokio::test]
async fn a_place_of_an_id_is_free_once_all_tries_have_ended() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server).await;
    let [hasty, patient] = limiters(&proxy, true).await;
    let observer = observer(&server).await;
    drop(patient.check(&CALLS, "bob", 1).await.unwrap());
    proxy.delay_replies(ms(400));
    for _ in 0..3 {
        assert!(hasty.check_all(check(true)).await.is_err());
    }
    proxy.delay_replies(Duration::ZERO);
    until_held(&observer, &ONE, 1).await;
    until_held(&observer, &ONE, 0).await;
}

/// The place was taken by a try that timed out, and the window beside it refuses the next try.
#[tokio::test]
async fn a_place_that_a_refused_try_leaves_is_freed() {
    let server = RedisServer::start();
    let proxy = Proxy::start(&server).await;
    let [hasty, patient] = limiters(&proxy, true).await;
    let observer = observer(&server).await;
    let patient = patient.refusal_cache(Duration::ZERO);
    let few = Limit::per_hour("few", 1);
    drop(patient.check(&few, "ada", 1).await.unwrap());
    let refused = check(false).and(charge(&few, 1)).unwrap();
    proxy.delay_replies(ms(400));
    assert!(hasty.check_all(check(false)).await.is_err());
    // Redis knows the id of the place alone: the window refuses.
    let place = patient.check_all(refused).await.unwrap();
    proxy.delay_replies(Duration::ZERO);
    println!("admitted again: {}", place.is_allowed());
    drop(place);
    until_held(&observer, &ONE, 0).await;
}

async fn the_first_of_two_is_dropped(one: &Limiter, other: &Limiter) {
    let first = one.check_all(check(false)).await.unwrap();
    let again = other.check_all(check(false)).await.unwrap();
    assert!(first.holds_place() && again.holds_place());
    drop(first);
    sleep(ms(100)).await;
    until_held(one, &ONE, 1).await;
    assert!(!again.has_lost_place());
    drop(again);
    until_held(one, &ONE, 0).await;
}

/// By clones of a limiter, on each store, and by two limiters on the clones of a `RedisStore`.
#[tokio::test]
async fn a_place_of_an_id_is_freed_with_the_last_of_its_decisions() {
    let server = RedisServer::start();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    let [one, other] = [(); 2].map(|()| Limiter::new(store.clone()).deadline(TEST_TIMEOUT));
    the_first_of_two_is_dropped(&one, &one.clone().deadline(seconds(5))).await;
    the_first_of_two_is_dropped(&one, &other).await;
    let memory = Limiter::new(MemoryStore::new());
    the_first_of_two_is_dropped(&memory, &memory.clone().deadline(seconds(5))).await;
}

/// A job that ends and runs again at once under its id, many times.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_job_that_runs_again_under_its_id_has_a_place() {
    let server = RedisServer::start();
    let store = RedisStore::connect(&server.url()).await.unwrap();
    let limiter = Limiter::new(store.clone()).deadline(TEST_TIMEOUT);
    let observer = observer(&server).await;
    for round in 0..100 {
        drop(limiter.check_all(check(false)).await.unwrap());
        let again = limiter.check_all(check(false)).await.unwrap();
        assert!(again.is_allowed());
        sleep(ms(5)).await;
        let used = observer.peek(&ONE, "ada").await.unwrap().binding().used;
        assert_eq!(used, 1, "round {round}");
    }
}
