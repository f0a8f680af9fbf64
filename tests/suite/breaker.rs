//! A store that has failed repeatedly is not asked.

use std::{
    future::Future,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, Waker},
    thread,
    time::{Duration, Instant},
};

use axum::body::Body;
use http::{Response, StatusCode};
use tokio::{
    runtime,
    task::{JoinSet, yield_now},
    time::{advance, sleep},
};
use tower::{Layer, ServiceExt, service_fn};
use tower_sliding_window::{
    Breaker, Degraded, Error, FailureMode, Limit, Limiter, MemoryStore, RateLimitLayer, RedisStore, Rejection, Share,
};

use crate::support::{
    PATIENCE,
    log::Log,
    outage::{CLIENTS, DEADLINE, millis, row},
    redis_server::RedisServer,
    requests::{anyone, hello, request},
    stores::Failing,
    switched::{State, Switched},
};

const CALLS: Limit = Limit::per_hour("calls", 1_000_000);
const INTERVAL: Duration = Duration::from_millis(200);
/// The time of a machine that is busy.
const SLACK: Duration = Duration::from_secs(5);

/// The answer that comes without any waiting: no timer, no other task.
fn at_once<F: Future>(future: F) -> F::Output {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => output,
        Poll::Pending => panic!("it makes its caller wait"),
    }
}

/// A limiter on a store that has just failed often enough.
async fn open(state: State) -> (Limiter<Switched>, Switched) {
    let store = Switched::new(state);
    let limiter = Limiter::new(store.clone());
    for _ in 0..5 {
        let error = limiter.check(&CALLS, "ada", 1).await.unwrap_err();
        assert!(matches!(error, Error::Unavailable(_) | Error::TimedOut { .. }));
    }
    assert_eq!(store.asked(), 5);
    (limiter, store)
}

fn is_open(limiter: &Limiter<Switched>) -> bool {
    matches!(at_once(limiter.check(&CALLS, "ada", 1)), Err(Error::BreakerOpen(_)))
}

/// Lets a probe that has been sent come to its end.
async fn settle_down() {
    for _ in 0..10 {
        yield_now().await;
    }
}

#[tokio::test(start_paused = true)]
async fn while_it_is_open_the_store_is_not_asked_but_probed() {
    for state in [State::Fails, State::Hangs] {
        let (limiter, store) = open(state).await;
        for _ in 0..1_000 {
            match (at_once(limiter.check(&CALLS, "ada", 1)), state) {
                (Err(Error::BreakerOpen(cause)), State::Fails) => assert!(matches!(*cause, Error::Unavailable(_))),
                (Err(Error::BreakerOpen(cause)), _) => assert!(matches!(*cause, Error::TimedOut { .. })),
                (answer, _) => panic!("{answer:?}"),
            }
        }
        settle_down().await;
        assert_eq!(store.asked(), 6, "one probe");

        for probes in 2..10 {
            advance(INTERVAL - Duration::from_millis(1)).await;
            assert!(is_open(&limiter) && store.asked() == 4 + probes);
            advance(Duration::from_millis(1)).await;
            assert!(is_open(&limiter) && is_open(&limiter));
            settle_down().await;
            assert_eq!(store.asked(), 5 + probes);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_probe_that_is_answered_closes_it_and_costs_nothing() {
    let (limiter, store) = open(State::Fails).await;
    store.set(State::Works);
    assert!(is_open(&limiter), "who sends the probe does not wait for it");
    settle_down().await;
    let decision = limiter.check(&CALLS, "ada", 1).await.unwrap();
    assert_eq!(decision.used(), 1);
}

/// Whoever comes first after an outage is decided, however long nobody has come.
#[tokio::test(start_paused = true)]
async fn once_somebody_has_asked_it_is_probed_until_it_closes() {
    for state in [State::Fails, State::Hangs] {
        let (limiter, store) = open(state).await;
        assert!(is_open(&limiter));
        sleep(10 * INTERVAL - Duration::from_millis(1)).await;
        assert_eq!(store.asked(), 5 + 10);
        store.set(State::Works);
        sleep(INTERVAL).await;
        assert_eq!(store.asked(), 5 + 11);
        sleep(10 * INTERVAL).await;
        assert_eq!(store.asked(), 5 + 11, "it is closed, and asked no more");
        assert_eq!(limiter.check(&CALLS, "ada", 1).await.unwrap().used(), 1);
    }
}

/// A probe writes nothing, and may pass where what writes does not.
#[tokio::test(start_paused = true)]
async fn after_a_probe_one_failure_opens_it_again_and_after_an_answer_five() {
    let (limiter, store) = open(State::Fails).await;
    store.set(State::Works);
    assert!(is_open(&limiter));
    settle_down().await;
    store.set(State::Fails);
    assert!(matches!(limiter.check(&CALLS, "ada", 1).await, Err(Error::Unavailable(_))));
    assert!(is_open(&limiter));

    store.set(State::Works);
    sleep(2 * INTERVAL).await;
    assert!(limiter.check(&CALLS, "ada", 1).await.unwrap().is_allowed());
    store.set(State::Fails);
    for _ in 0..5 {
        assert!(matches!(limiter.check(&CALLS, "ada", 1).await, Err(Error::Unavailable(_))));
    }
    assert!(is_open(&limiter));
}

#[tokio::test]
async fn an_answer_in_between_begins_the_count_anew() {
    let store = Switched::new(State::Fails);
    let limiter = Limiter::new(store.clone());
    for round in 0..100 {
        store.set(if round % 5 == 4 { State::Works } else { State::Fails });
        let answer = limiter.check(&CALLS, "ada", 1).await;
        assert!(!matches!(answer, Err(Error::BreakerOpen(_))), "{round}");
    }
    assert_eq!(store.asked(), 100);
}

#[tokio::test(start_paused = true)]
async fn probes_go_one_at_a_time() {
    let store = Switched::new(State::Hangs);
    let limiter = Limiter::new(store.clone()).deadline(Duration::from_secs(10));
    let limiter = limiter.breaker(Breaker::new().failures(1).probe_every(Duration::from_millis(1)));
    limiter.check(&CALLS, "ada", 1).await.unwrap_err();
    for _ in 0..100 {
        assert!(is_open(&limiter));
        advance(Duration::from_millis(10)).await;
    }
    assert_eq!((store.asked(), store.waiting()), (2, 1));
}

#[tokio::test(start_paused = true)]
async fn a_probe_ends_with_the_last_clone() {
    let (limiter, store) = open(State::Hangs).await;
    let clone = limiter.clone();
    assert!(is_open(&limiter));
    settle_down().await;
    drop(limiter);
    settle_down().await;
    assert_eq!(store.waiting(), 1);
    assert!(is_open(&clone), "clones have one breaker");
    drop(clone);
    settle_down().await;
    assert_eq!(store.waiting(), 0, "well before its deadline");
}

/// Clones of a store have one breaker, whatever limiters are made on them, and whenever.
#[tokio::test(start_paused = true)]
async fn limiters_on_clones_of_a_store_have_one_breaker() {
    let store = Switched::with_epoch(State::Fails);
    for _ in 0..5 {
        let each = Limiter::new(store.clone());
        assert!(matches!(each.check(&CALLS, "ada", 1).await, Err(Error::Unavailable(_))));
    }
    let [one, other] = [(); 2].map(|()| Limiter::new(store.clone()));
    assert!(is_open(&one) && is_open(&other));
    settle_down().await;
    assert_eq!(store.asked(), 6, "one probe for both");
    let own = Limiter::new(store.clone()).breaker(Breaker::new());
    assert!(matches!(own.check(&CALLS, "ada", 1).await, Err(Error::Unavailable(_))), "its own is closed");

    store.set(State::Works);
    sleep(2 * INTERVAL).await;
    assert!(!is_open(&one) && !is_open(&other));
}

#[tokio::test(start_paused = true)]
async fn probes_end_with_the_last_limiter_and_begin_again_with_the_next() {
    let store = Switched::with_epoch(State::Hangs);
    let [one, other] = [(); 2].map(|()| Limiter::new(store.clone()));
    for _ in 0..5 {
        one.check(&CALLS, "ada", 1).await.unwrap_err();
    }
    assert!(is_open(&one));
    settle_down().await;
    drop(one);
    settle_down().await;
    assert_eq!(store.waiting(), 1);
    drop(other);
    settle_down().await;
    assert_eq!(store.waiting(), 0, "well before its deadline");
    sleep(10 * INTERVAL).await;
    assert_eq!(store.asked(), 6);

    let next = Limiter::new(store.clone());
    assert!(is_open(&next), "the store has not answered since");
    store.set(State::Works);
    settle_down().await;
    sleep(2 * INTERVAL).await;
    assert!(!is_open(&next));
}

/// A store that takes 20 ms is too slow for a limiter that gives it 1 ms, and fast enough for one that gives it 50 ms.
#[tokio::test(start_paused = true)]
async fn a_limiter_in_a_hurry_closes_the_store_to_nobody_with_more_time() {
    let store = Switched::with_epoch(State::Takes(Duration::from_millis(20)));
    let patient = Limiter::new(store.clone());
    let hasty = Limiter::new(store.clone()).deadline(Duration::from_millis(1));
    let mut refused = 0;
    for round in 0..100 {
        match hasty.check(&CALLS, "ada", 1).await {
            Err(Error::TimedOut { .. }) => {}
            Err(Error::BreakerOpen(_)) => refused += 1,
            answer => panic!("{answer:?}"),
        }
        assert!(patient.check(&CALLS, "bob", 1).await.is_ok(), "{round}");
    }
    assert!(refused >= 90, "it is open for its own kind, and was {refused} times");
}

/// An answer counts for all that have as much time as it took.
#[tokio::test(start_paused = true)]
async fn a_quick_answer_closes_it_for_all() {
    let store = Switched::with_epoch(State::Hangs);
    let hasty = Limiter::new(store.clone()).deadline(Duration::from_millis(10));
    for (takes, closes) in [(20, false), (5, true)] {
        store.set(State::Hangs);
        while !matches!(hasty.check(&CALLS, "ada", 1).await, Err(Error::BreakerOpen(_))) {}
        // A probe is on its way, and will not be answered.
        settle_down().await;
        store.set(State::Takes(Duration::from_millis(takes)));
        let patient = Limiter::new(store.clone());
        assert!(patient.check(&CALLS, "bob", 1).await.is_ok());
        let is_open = matches!(hasty.check(&CALLS, "ada", 1).await, Err(Error::BreakerOpen(_)));
        assert_eq!(is_open, !closes, "after {takes} ms");
    }
}

/// A store that does not answer within 50 ms does not answer within 1 ms either.
#[tokio::test(start_paused = true)]
async fn a_limiter_with_more_time_opens_it_for_those_in_a_hurry() {
    let store = Switched::with_epoch(State::Hangs);
    let patient = Limiter::new(store.clone());
    let [hasty, longer] = [1, 100].map(|millis| Limiter::new(store.clone()).deadline(Duration::from_millis(millis)));
    for _ in 0..5 {
        assert!(matches!(patient.check(&CALLS, "ada", 1).await, Err(Error::TimedOut { .. })));
    }
    assert!(is_open(&patient) && is_open(&hasty));
    for _ in 0..5 {
        assert!(matches!(longer.check(&CALLS, "ada", 1).await, Err(Error::TimedOut { .. })));
    }
    assert!(is_open(&longer));

    // It is probed with the longest of their deadlines, and closed for all.
    store.set(State::Takes(Duration::from_millis(80)));
    sleep(2 * INTERVAL).await;
    assert!(longer.check(&CALLS, "ada", 1).await.is_ok());
    assert!(matches!(patient.check(&CALLS, "ada", 1).await, Err(Error::TimedOut { .. })));
}

/// The runtime of the probes stands still, or has ended. Callers of another are decided soon after the store is back.
#[test]
fn where_the_runtime_of_the_probes_is_gone_or_stands_still_another_takes_over() {
    let runtime = || runtime::Builder::new_current_thread().enable_time().build().unwrap();
    for ends in [true, false] {
        let store = Switched::with_epoch(State::Fails);
        let first = runtime();
        let one = Limiter::new(store.clone());
        first.block_on(async {
            for _ in 0..5 {
                one.check(&CALLS, "ada", 1).await.unwrap_err();
            }
            assert!(is_open(&one));
            settle_down().await;
        });
        // From here on nobody drives it.
        let stands_still = (!ends).then_some(first);
        let other = Limiter::new(store.clone());
        runtime().block_on(async {
            assert!(is_open(&other));
            sleep(INTERVAL).await;
            store.set(State::Works);
            let (back, mut refused) = (Instant::now(), 0);
            while other.check(&CALLS, "ada", 1).await.is_err() {
                refused += 1;
                assert!(back.elapsed() < SLACK, "asked {} times", store.asked());
                sleep(Duration::from_millis(1)).await;
            }
            assert!(refused > 0);
        });
        drop(stands_still);
    }
}

#[tokio::test(start_paused = true)]
async fn settlements_and_resets_do_not_wait_either() {
    let store = Switched::new(State::Works);
    let limiter = Limiter::new(store.clone());
    let reservation = limiter.reserve(&CALLS, "ada", 10, Duration::MAX).await.unwrap().unwrap();
    store.set(State::Hangs);
    for _ in 0..3 {
        assert!(matches!(reservation.settle(1).await, Err(Error::TimedOut { .. })));
    }
    for _ in 0..2 {
        assert!(matches!(limiter.reset(&CALLS, "ada").await, Err(Error::TimedOut { .. })));
    }
    assert!(matches!(at_once(reservation.settle(1)), Err(Error::BreakerOpen(_))));
    assert!(matches!(at_once(limiter.reset(&CALLS, "ada")), Err(Error::BreakerOpen(_))));

    // Who does nothing else gets it closed all the same.
    settle_down().await;
    store.set(State::Works);
    assert!(matches!(at_once(reservation.settle(1)), Err(Error::BreakerOpen(_))));
    sleep(2 * INTERVAL).await;
    assert!(reservation.settle(1).await.unwrap().was_applied());
}

#[tokio::test]
async fn what_is_not_the_stores_failure_does_not_count() {
    let limiter = Limiter::new(Switched::new(State::Works));
    for _ in 0..10 {
        let never = limiter.check(&CALLS, "ada", 1_000_001).await;
        assert!(matches!(never, Err(Error::NeverFits(_))));
    }
    assert!(limiter.check(&CALLS, "ada", 1).await.is_ok());

    // A full store fails whom it would admit, and goes on refusing the others.
    let one = Limit::per_hour("one", 1);
    let limiter = Limiter::new(MemoryStore::builder().capacity(1).build());
    assert!(limiter.check(&one, "ada", 1).await.unwrap().is_allowed());
    for _ in 0..10 {
        assert!(matches!(limiter.check(&one, "bob", 1).await, Err(Error::Unavailable(_))));
    }
    assert!(!limiter.check(&one, "ada", 1).await.unwrap().is_allowed());
}

#[tokio::test]
async fn it_can_be_set_and_switched_off() {
    let store = Switched::new(State::Fails);
    for breaker in [Breaker::off(), Breaker::new().failures(21)] {
        let limiter = Limiter::new(store.clone()).breaker(breaker);
        for _ in 0..21 {
            assert!(matches!(limiter.check(&CALLS, "ada", 1).await, Err(Error::Unavailable(_))));
        }
        assert_eq!(is_open(&limiter), breaker != Breaker::off());
    }
}

#[test]
fn without_a_runtime_the_callers_own_check_is_the_probe() {
    let store = Switched::new(State::Fails);
    let limiter =
        Limiter::new(store.clone()).breaker(Breaker::new().failures(1).probe_every(Duration::from_secs(3600)));
    assert!(matches!(at_once(limiter.check(&CALLS, "ada", 1)), Err(Error::Unavailable(_))));
    store.set(State::Works);
    assert!(at_once(limiter.check(&CALLS, "ada", 1)).unwrap().is_allowed());
    assert!(!is_open(&limiter));
}

/// As in a program that blocks on each check, and whose runtime stands still in between.
#[test]
fn where_nobody_drives_the_probe_the_callers_own_check_is_the_probe() {
    let store = Switched::new(State::Fails);
    let limiter = Limiter::new(store.clone()).deadline(Duration::from_millis(1));
    let limiter = limiter.breaker(Breaker::new().failures(1).probe_every(Duration::from_millis(1)));
    let runtime = runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let check = || runtime.block_on(limiter.check(&CALLS, "ada", 1));
    assert!(matches!(check(), Err(Error::Unavailable(_))));
    store.set(State::Works);
    let begun = Instant::now();
    while check().is_err() {
        assert!(begun.elapsed() < PATIENCE, "asked {} times", store.asked());
        thread::sleep(Duration::from_millis(1));
    }
}

#[tokio::test(start_paused = true)]
async fn its_changes_are_logged_once_a_second() {
    let log = Log::start();
    let store = Switched::new(State::Fails);
    let limiter = Limiter::new(store.clone()).breaker(Breaker::new().failures(1));
    for _ in 0..3 {
        store.set(State::Fails);
        limiter.check(&CALLS, "ada", 1).await.unwrap_err();
        store.set(State::Works);
        advance(INTERVAL).await;
        assert!(is_open(&limiter));
        settle_down().await;
        assert!(!is_open(&limiter));
    }
    let text = log.text();
    let count = |what| text.matches(what).count();
    assert_eq!((count("the breaker opens"), count("the breaker closes")), (1, 1), "{text}");
    assert!(text.contains("out of order"), "with the cause: {text}");
}

#[tokio::test]
async fn a_layer_answers_in_its_mode() {
    for mode in [FailureMode::Open, FailureMode::Closed, FailureMode::Local(Share::one_of(2))] {
        let layer = RateLimitLayer::new(Failing).limit(CALLS.by(anyone)).failure_mode(mode);
        let app = layer.layer(service_fn(hello));
        for number in 0..100 {
            let response = at_once(app.clone().oneshot(request())).unwrap();
            assert_mode(&response, mode);
            let degraded: &Degraded = response.extensions().get().unwrap();
            assert_eq!(matches!(degraded.error(), Error::BreakerOpen(_)), number >= 5);
        }
    }
}

fn assert_mode(response: &Response<Body>, mode: FailureMode) {
    assert_eq!(response.extensions().get::<Degraded>().unwrap().mode(), Some(mode));
    let expected = if mode == FailureMode::Closed { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK };
    assert_eq!(response.status(), expected);
    assert_eq!(response.extensions().get::<Rejection>().is_some(), mode == FailureMode::Closed);
}

/// 200 clients meet a server that stands still: each is answered in the route's mode, at the deadline at first, and then
/// without any waiting, until the server goes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_hangs_delays_nobody_for_longer_than_the_deadline() {
    let server = RedisServer::start();
    let (mut until_open, mut when_open, mut answers) = (Duration::ZERO, Vec::new(), 0);
    for mode in [FailureMode::Closed, FailureMode::Open, FailureMode::Local(Share::one_of(2))] {
        let store = RedisStore::builder(&server.url()).build().unwrap();
        let layer = RateLimitLayer::new(store).limit(CALLS.by(anyone)).failure_mode(mode).deadline(DEADLINE);
        let app = layer.layer(service_fn(hello));
        let is_degraded = |response: &Response<Body>| response.extensions().get::<Degraded>().is_some();
        while is_degraded(&app.clone().oneshot(request()).await.unwrap()) {}

        server.pause();
        let mut clients = JoinSet::new();
        for _ in 0..CLIENTS {
            let app = app.clone();
            clients.spawn(async move {
                let asked = Instant::now();
                let response = app.oneshot(request()).await.unwrap();
                (response, asked.elapsed())
            });
        }
        for (response, waited) in clients.join_all().await {
            assert_mode(&response, mode);
            assert!(waited <= DEADLINE + SLACK, "{waited:?}");
            (until_open, answers) = (until_open.max(waited), answers + 1);
        }
        // By now it is open. While the server stands still, no probe is answered.
        let mut clients = JoinSet::new();
        for _ in 0..CLIENTS {
            let app = app.clone();
            clients.spawn(async move {
                let mut waited = Vec::new();
                for _ in 0..100 {
                    let asked = Instant::now();
                    let response = at_once(app.clone().oneshot(request())).unwrap();
                    waited.push(asked.elapsed());
                    assert_mode(&response, mode);
                    sleep(Duration::from_millis(1)).await;
                }
                waited
            });
        }
        when_open.extend(clients.join_all().await.into_iter().flatten());

        server.resume();
        let resumed = Instant::now();
        while is_degraded(&app.clone().oneshot(request()).await.unwrap()) {
            assert!(resumed.elapsed() < PATIENCE);
            sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(app.clone().oneshot(request()).await.unwrap().status(), 200);
    }
    when_open.sort();
    let at = |share: usize| millis(when_open[(when_open.len() - 1) * share / 1_000]);
    row(
        "Redis hangs (`SIGSTOP`), with a deadline of 50 ms",
        format!(
            "worst answer {} until the breaker opened, then {} ({} for 99.9 %); the mode honoured in all of {} answers",
            millis(until_open),
            at(1_000),
            at(999),
            answers + when_open.len()
        ),
        "worst answer at most deadline + 20 ms until the breaker opens, then below 1 ms; the mode honoured in 100 %",
    );
}

/// Each script takes most of the deadline, and requests come faster than that: they are answered or given up, never
/// collected.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_server_does_not_pile_up_requests() {
    let server = RedisServer::start();
    let store = RedisStore::builder(&server.url()).build().unwrap();
    let limiter = Limiter::new(store).deadline(DEADLINE);
    let _ = limiter.peek(&CALLS, "ada").await;

    let waiting = Arc::new(AtomicUsize::new(0));
    let (mut worst, mut checks, slow_until) = (0, JoinSet::new(), Instant::now() + Duration::from_secs(1));
    while Instant::now() < slow_until {
        server.pause();
        for _ in 0..40 {
            for _ in 0..5 {
                let (limiter, waiting) = (limiter.clone(), Arc::clone(&waiting));
                waiting.fetch_add(1, Ordering::SeqCst);
                checks.spawn(async move {
                    let asked = Instant::now();
                    let _ = limiter.check(&CALLS, "ada", 1).await;
                    waiting.fetch_sub(1, Ordering::SeqCst);
                    asked.elapsed()
                });
            }
            worst = worst.max(waiting.load(Ordering::SeqCst));
            sleep(Duration::from_millis(1)).await;
        }
        server.resume();
        sleep(Duration::from_millis(2)).await;
    }
    let spawned = checks.len();
    let longest = checks.join_all().await.into_iter().max().unwrap();
    assert!(longest <= DEADLINE + SLACK, "{longest:?}");
    assert!(worst < spawned / 2, "{worst} of {spawned} waited at once");

    // What was given up has left nothing behind.
    let used = limiter.clone().deadline(PATIENCE).breaker(Breaker::off()).peek(&CALLS, "ada").await.unwrap().used();
    assert!(used <= spawned as u64, "{used} of {spawned}");
}
