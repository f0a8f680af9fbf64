//! A shutdown while callers wait in line: nobody is let in whose place is taken away again.

use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use axum::body::Body;
use http::{Request, Response};
use tokio::task::JoinSet;
use tower::{Layer, ServiceExt, service_fn};
use tower_sliding_window::RateLimitLayer;

use super::*;
use crate::support::requests::{anyone, request};

const JOBS: Limit = Limit::concurrent("jobs", 2).freed_after(Duration::from_secs(3_600));

/// The jobs that run, the most that ran at once, and those that had no place at their end.
#[derive(Default)]
struct Jobs {
    running: AtomicUsize,
    most: AtomicUsize,
    done: AtomicUsize,
    without_place: AtomicUsize,
}

impl Jobs {
    async fn run(&self, place: &Decision) {
        let running = self.running.fetch_add(1, Ordering::SeqCst) + 1;
        self.most.fetch_max(running, Ordering::SeqCst);
        sleep(ms(30)).await;
        if place.has_lost_place() {
            self.without_place.fetch_add(1, Ordering::SeqCst);
        }
        self.running.fetch_sub(1, Ordering::SeqCst);
        self.done.fetch_add(1, Ordering::SeqCst);
    }

    async fn acquire(self: Arc<Self>, limiter: Limiter, id: Option<u64>) {
        let check = Check::new(charge(&JOBS, 1));
        let check = match id {
            Some(id) => check.with_id(tower_sliding_window::check::AdmissionId(id)),
            None => check,
        };
        let place = limiter.acquire_all(check, TEST_TIMEOUT).await.unwrap();
        assert!(place.is_allowed(), "{place:?}");
        self.run(&place).await;
    }

    fn figures(&self) -> [usize; 3] {
        [&self.done, &self.most, &self.without_place].map(|figure| figure.load(Ordering::SeqCst))
    }
}

async fn limiter(server: &RedisServer) -> Limiter {
    Limiter::new(RedisStore::connect(&server.url()).await.unwrap()).deadline(TEST_TIMEOUT)
}

/// In two processes. Two jobs that go on hold the places when the shutdown begins.
async fn jobs_wait() {
    for has_ids in [false, true] {
        let server = RedisServer::start();
        let (ending, other) = (limiter(&server).await, limiter(&server).await);
        let held = [enter(&ending, &JOBS).await, enter(&ending, &JOBS).await];
        let (jobs, mut waiting) = (Arc::<Jobs>::default(), JoinSet::new());
        for number in 0..40 {
            let id = has_ids.then_some(number + 1);
            waiting.spawn(Arc::clone(&jobs).acquire(ending.clone(), id));
        }
        for _ in 0..5 {
            waiting.spawn(Arc::clone(&jobs).acquire(other.clone(), None));
        }
        sleep(ms(200)).await;
        assert_eq!(jobs.figures(), [0, 0, 0]);
        ending.shutdown(TEST_TIMEOUT).await.unwrap();
        assert!(held.iter().all(Decision::has_lost_place));
        while let Some(ended) = waiting.join_next().await {
            ended.unwrap();
        }
        let [done, most, without_place] = jobs.figures();
        assert_eq!((done, without_place), (45, 0));
        assert!(most <= 2, "{most} jobs ran at once");
        drop(held);
        until_held(&other, &JOBS, 0).await;
    }
}

#[tokio::test]
async fn jobs_that_wait_while_the_limiter_ends_have_places_of_their_own() {
    jobs_wait().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jobs_that_wait_on_two_threads_while_the_limiter_ends_have_places_of_their_own() {
    jobs_wait().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_wait_while_the_limiter_ends_have_places_of_their_own() {
    let server = RedisServer::start();
    let ending = limiter(&server).await;
    let jobs = Arc::<Jobs>::default();
    let run = {
        let jobs = Arc::clone(&jobs);
        move |request: Request<Body>| {
            let jobs = Arc::clone(&jobs);
            async move {
                jobs.run(request.extensions().get().unwrap()).await;
                Ok::<_, Infallible>(Response::new(Body::empty()))
            }
        }
    };
    let app = RateLimitLayer::new(ending.clone())
        .limit(JOBS.by(anyone))
        .wait_up_to(TEST_TIMEOUT)
        .layer(service_fn(run));
    let key = anyone(&request().into_parts().0).unwrap();
    let held = [
        ending.check(&JOBS, key.clone(), 1).await.unwrap(),
        ending.check(&JOBS, key.clone(), 1).await.unwrap(),
    ];
    let mut waiting: JoinSet<_> = (0..20).map(|_| app.clone().oneshot(request())).collect();
    sleep(ms(200)).await;
    ending.shutdown(TEST_TIMEOUT).await.unwrap();
    while let Some(response) = waiting.join_next().await {
        assert_eq!(response.unwrap().unwrap().status(), 200);
    }
    let [done, most, without_place] = jobs.figures();
    assert_eq!((done, without_place), (20, 0));
    assert!(most <= 2, "{most} requests ran at once");
    drop(held);
}

/// The first in line has asked when the shutdown begins, and is admitted while it goes on.
#[tokio::test]
async fn a_caller_that_is_admitted_while_the_limiter_ends_asks_again() {
    let server = RedisServer::start();
    let (ending, other) = (limiter(&server).await, limiter(&server).await);
    drop(enter(&ending, &JOBS).await);
    until_held(&other, &JOBS, 0).await;
    server.pause();
    let waiting = tokio::spawn({
        let ending = ending.clone();
        async move { ending.acquire(&JOBS, "ada", 1, TEST_TIMEOUT).await }
    });
    sleep(ms(50)).await;
    let ended = tokio::spawn({
        let ending = ending.clone();
        async move { ending.shutdown(TEST_TIMEOUT).await }
    });
    sleep(ms(50)).await;
    server.resume();
    ended.await.unwrap().unwrap();
    let place = waiting.await.unwrap().unwrap();
    sleep(ms(200)).await;
    assert!(place.is_allowed() && !place.has_lost_place());
    until_held(&other, &JOBS, 1).await;
    drop(place);
    until_held(&other, &JOBS, 0).await;
}
