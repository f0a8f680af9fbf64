//! Waiting for room: who waits how long, and in which order.
//!
//! Where the order matters, tokio's time and the store's are both in the test's hands.

use std::{
    fmt::Debug,
    future::{Pending, Ready, pending, poll_fn, ready},
    pin::{Pin, pin},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::{Duration, SystemTime},
};

use tokio::{
    task::{JoinHandle, JoinSet, yield_now},
    time::{Instant, advance, sleep, timeout},
};
use tower_sliding_window::{
    AdmissionId, Charge, Check, Decision, Error, Key, Limit, LimitStatus, Limiter, ManualClock, MemoryStore,
    RedisStore, Settled, Settlement, Store, StoreError,
};

use crate::support::{
    PATIENCE,
    redis_server::RedisServer,
    stores::Silent,
    switched::{State, Switched},
};

const CALLS: Limit = Limit::per("calls", 3, ms(100));

const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// A store that counts the questions, and fails when it is told to.
#[derive(Clone, Debug)]
struct Asked {
    store: MemoryStore,
    questions: Arc<AtomicU64>,
    fails: Arc<AtomicBool>,
}

impl Store for Asked {
    type Decide = Answer;
    type Settle = <MemoryStore as Store>::Settle;
    type Reset = Pin<Box<dyn Future<Output = Result<(), StoreError>> + Send>>;

    fn decide(&self, check: Check) -> Self::Decide {
        self.questions.fetch_add(1, Ordering::SeqCst);
        let failure = self.fails.load(Ordering::SeqCst).then(|| StoreError::new("deciding a check", "out of order"));
        Answer { failure, decision: self.store.decide(check) }
    }

    fn settle(&self, settlement: Settlement) -> Self::Settle {
        self.store.settle(settlement)
    }

    fn reset(&self, limit: Limit, key: Key) -> Self::Reset {
        if self.fails.load(Ordering::SeqCst) {
            return Box::pin(ready(Err(StoreError::new("resetting a key", "out of order"))));
        }
        Box::pin(self.store.reset(limit, key))
    }
}

struct Answer {
    failure: Option<StoreError>,
    decision: <MemoryStore as Store>::Decide,
}

impl Future for Answer {
    type Output = Result<Decision, StoreError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.failure.take() {
            Some(failure) => Poll::Ready(Err(failure)),
            None => Pin::new(&mut self.decision).poll(cx),
        }
    }
}

/// A limiter, and what the tests look at.
struct Test {
    limiter: Limiter<Asked>,
    store: Asked,
    clock: ManualClock,
    admitted: Arc<Mutex<Vec<&'static str>>>,
}

type Waiting = JoinHandle<Result<Decision, Error>>;

impl Test {
    fn start() -> Self {
        let clock = ManualClock::new();
        let store = MemoryStore::builder().clock(&clock).build();
        let store = Asked { store, questions: Arc::default(), fails: Arc::default() };
        Self { limiter: Limiter::new(store.clone()), store, clock, admitted: Arc::default() }
    }

    /// A test in which all of `CALLS` is spent.
    async fn spent() -> Self {
        let test = Self::start();
        assert!(test.limiter.check(&CALLS, "ada", 3).await.unwrap().is_allowed());
        test
    }

    /// Somebody who waits, and has come as far as possible when this returns.
    async fn wait(&self, name: &'static str, check: Check, patience: Duration) -> Waiting {
        let (limiter, admitted) = (self.limiter.clone(), Arc::clone(&self.admitted));
        let waiting = tokio::spawn(async move {
            let decision = limiter.acquire_all(check, patience).await?;
            if decision.is_allowed() {
                admitted.lock().unwrap().push(name);
            }
            Ok(decision)
        });
        settle_down().await;
        waiting
    }

    async fn pass(&self, time: Duration) {
        self.clock.advance(time);
        advance(time).await;
        settle_down().await;
    }

    fn admitted(&self) -> Vec<&'static str> {
        self.admitted.lock().unwrap().clone()
    }

    fn questions(&self) -> u64 {
        self.store.questions.swap(0, Ordering::SeqCst)
    }

    fn lines(&self) -> usize {
        lines(&self.limiter)
    }
}

/// How many lines there are.
fn lines(limiter: &impl Debug) -> usize {
    let debug = format!("{limiter:?}");
    let (_, lines) = debug.split_once("Lines(").unwrap();
    lines.split_once(')').unwrap().0.parse().unwrap()
}

/// All tasks do what they can do without time passing.
async fn settle_down() {
    for _ in 0..100 {
        yield_now().await;
    }
}

fn of(cost: u64) -> Check {
    Check::new(Charge::new(CALLS, "ada", cost).unwrap())
}

/// The limit holds in every window, for those who wait in two processes, and nobody waits in vain.
async fn assert_many_wait_and_the_limit_holds<S: Store>(limiters: [Limiter<S>; 2]) {
    let limit = Limit::per("many", 5, ms(150));
    let mut waiting = JoinSet::new();
    for number in 0..23 {
        let (limiter, limit) = (limiters[number % 2].clone().deadline(PATIENCE), limit.clone());
        waiting.spawn(async move { limiter.acquire(&limit, "ada", 1, PATIENCE).await.unwrap() });
    }
    let decisions = waiting.join_all().await;
    assert!(decisions.iter().all(Decision::is_allowed));
    let mut times: Vec<SystemTime> = decisions.iter().map(Decision::at).collect();
    times.sort_unstable();
    for pair in times.windows(6) {
        assert!(pair[5].duration_since(pair[0]).unwrap() >= limit.window());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_wait_and_the_limit_holds_in_process() {
    let store = MemoryStore::new();
    assert_many_wait_and_the_limit_holds([(); 2].map(|()| Limiter::new(store.clone()))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_wait_and_the_limit_holds_on_redis() {
    let server = RedisServer::start();
    let limiter = || Limiter::new(RedisStore::builder(&server.url()).connect_timeout(PATIENCE).build().unwrap());
    assert_many_wait_and_the_limit_holds([limiter(), limiter()]).await;
}

/// Nobody asks Redis but the first in line, and who is told that it would be too long.
#[tokio::test]
async fn a_line_spares_redis() {
    let server = RedisServer::start();
    let limiter = Limiter::new(RedisStore::builder(&server.url()).build().unwrap()).deadline(PATIENCE);
    let limit = Limit::per_minute("calls", 3);
    let check = |id| Check::new(Charge::new(limit.clone(), "ada", 1).unwrap()).with_id(AdmissionId::from(id));
    assert!(limiter.check(&limit, "ada", 3).await.unwrap().is_allowed());
    let mut waiting = JoinSet::new();
    for id in 0..50 {
        let (waiter, check) = (limiter.clone(), check(id));
        waiting.spawn(async move { waiter.acquire_all(check, Duration::MAX).await });
        settle_down().await;
        // Until the first has been refused, whoever comes asks, too.
        while id == 0 && !format!("{limiter:?}").contains("Lines(1)") {
            yield_now().await;
        }
    }
    server.run::<()>("CONFIG RESETSTAT");
    for id in 50..60 {
        let refused = limiter.acquire_all(check(id), Duration::from_secs(1)).await.unwrap();
        let wait = refused.retry_after().unwrap();
        assert!(wait > limit.window() - PATIENCE && wait <= limit.window(), "{wait:?}");
        assert_eq!((refused.used(), refused.id()), (3, AdmissionId::from(id)));
    }
    let stats: String = server.run("INFO commandstats");
    let scripts = stats.lines().find(|line| line.starts_with("cmdstat_evalsha:")).unwrap();
    assert!(scripts.contains("calls=10,"), "{scripts}");
    waiting.shutdown().await;
    assert!(format!("{limiter:?}").contains("Lines(0)"));
}

#[tokio::test(start_paused = true)]
async fn a_wait_is_as_long_as_the_refusal_says() {
    let test = Test::spent().await;
    test.pass(ms(40)).await;
    let waiting = test.wait("ada", of(1), ms(60)).await;
    test.pass(ms(59)).await;
    assert!(!waiting.is_finished());
    test.pass(ms(1)).await;
    assert_eq!(waiting.await.unwrap().unwrap().used(), 1);
    assert_eq!(test.questions(), 3, "the first, the refused, and the admitted");
}

#[tokio::test(start_paused = true)]
async fn a_wait_beyond_the_patience_is_a_refusal_at_once() {
    let test = Test::spent().await;
    let begun = Instant::now();
    for patience in [ms(0), ms(50), ms(100) - Duration::from_micros(1)] {
        let refused = test.limiter.acquire(&CALLS, "ada", 1, patience).await.unwrap();
        assert_eq!((refused.retry_after(), refused.used()), (Some(ms(100)), 3));
    }
    assert_eq!((begun.elapsed(), test.lines()), (Duration::ZERO, 0));
    assert!(matches!(test.limiter.acquire(&CALLS, "ada", 4, PATIENCE).await, Err(Error::NeverFits(_))));
}

/// What is spent over the heads of those in line, by who does not stand in it, can make the wait too long.
#[tokio::test(start_paused = true)]
async fn a_wait_that_has_become_too_long_is_given_up() {
    let test = Test::spent().await;
    let waiting = test.wait("ada", of(1), ms(150)).await;
    test.clock.advance(ms(100));
    assert!(test.limiter.check(&CALLS, "ada", 3).await.unwrap().is_allowed());
    advance(ms(100)).await;
    assert_eq!(waiting.await.unwrap().unwrap().retry_after(), Some(ms(100)));
}

#[tokio::test(start_paused = true)]
async fn who_comes_first_is_admitted_first() {
    let test = Test::spent().await;
    let names = ["a", "b", "c", "d", "e", "f", "g"];
    for name in names {
        test.wait(name, of(1), PATIENCE).await;
    }
    assert_eq!((test.questions(), test.lines()), (2, 1), "only the first in line has asked");
    for admitted in [0, 3, 6, 7] {
        assert_eq!(test.admitted(), names[..admitted]);
        test.pass(ms(100)).await;
    }
    assert_eq!(test.lines(), 0);
}

/// There is room for the cheap ones all the time.
#[tokio::test(start_paused = true)]
async fn cheap_checks_do_not_overtake_a_dear_one() {
    let test = Test::start();
    for _ in 0..2 {
        assert!(test.limiter.check(&CALLS, "ada", 1).await.unwrap().is_allowed());
        test.pass(ms(40)).await;
    }
    test.wait("dear", of(3), PATIENCE).await;
    for _ in 0..5 {
        test.wait("cheap", of(1), PATIENCE).await;
        test.pass(ms(10)).await;
    }
    assert_eq!(test.admitted(), Vec::<&str>::new());
    test.pass(ms(10)).await;
    assert_eq!(test.admitted(), ["dear"]);
    test.pass(ms(100)).await;
    assert_eq!(test.admitted(), ["dear", "cheap", "cheap", "cheap"]);
}

#[tokio::test(start_paused = true)]
async fn who_is_dropped_leaves_the_line_and_the_next_goes_on() {
    let test = Test::start();
    assert!(test.limiter.check(&CALLS, "ada", 1).await.unwrap().is_allowed());
    let first = test.wait("first", of(3), PATIENCE).await;
    let second = test.wait("second", of(3), PATIENCE).await;
    let _third = test.wait("third", of(2), PATIENCE).await;
    second.abort();
    settle_down().await;
    assert_eq!((test.admitted(), test.lines()), (vec![], 1));
    first.abort();
    settle_down().await;
    assert_eq!((test.admitted(), test.lines()), (vec!["third"], 0));
}

/// Its figures are those of now, its wait is that of the first in line, and nothing was asked that could have overtaken.
#[tokio::test(start_paused = true)]
async fn who_runs_out_of_patience_behind_others_is_refused() {
    let test = Test::start();
    assert!(test.limiter.check(&CALLS, "ada", 1).await.unwrap().is_allowed());
    test.pass(ms(40)).await;
    assert!(test.limiter.check(&CALLS, "ada", 1).await.unwrap().is_allowed());
    let _first = test.wait("first", of(3), PATIENCE).await;
    let second = test.wait("second", of(3), ms(100)).await;
    test.pass(ms(60)).await;
    test.questions();
    let (begun, refused) = (Instant::now(), test.limiter.acquire(&CALLS, "ada", 1, ms(39)).await.unwrap());
    assert_eq!((refused.retry_after(), refused.used(), begun.elapsed()), (Some(ms(40)), 1, Duration::ZERO));

    test.pass(ms(40)).await;
    let refused = second.await.unwrap().unwrap();
    assert_eq!(test.admitted(), ["first"]);
    assert_eq!((refused.is_allowed(), refused.used(), refused.remaining()), (false, 3, 0));
    assert!(refused.retry_after().unwrap() > Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn what_is_never_refused_waits_for_nobody() {
    let test = Test::spent().await;
    let _first = test.wait("first", of(1), PATIENCE).await;
    let shadow = Check::new(Charge::new(CALLS, "ada", 1).unwrap().in_shadow());
    let begun = Instant::now();
    for check in [of(0), shadow] {
        assert!(test.limiter.acquire_all(check, PATIENCE).await.unwrap().is_allowed());
    }
    assert_eq!(begun.elapsed(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn a_line_is_of_the_same_limits_and_keys_in_any_order() {
    let test = Test::spent().await;
    let charge = |limit: &Limit, key, cost| Charge::new(limit.clone(), key, cost).unwrap();
    let other = Limit::per("other", 3, ms(100));
    let both = |cost| Check::new(charge(&CALLS, "ada", cost)).and(charge(&other, "ada", cost)).unwrap();
    let turned = Check::new(charge(&other, "ada", 1)).and(charge(&CALLS, "ada", 1)).unwrap();
    let _both = test.wait("both", both(3), PATIENCE).await;
    let _turned = test.wait("turned", turned, PATIENCE).await;
    assert_eq!((test.admitted(), test.lines()), (vec![], 1));

    let _bob = test.wait("bob", Check::new(charge(&CALLS, "bob", 1)), PATIENCE).await;
    let _other = test.wait("other", Check::new(charge(&other, "ada", 1)), PATIENCE).await;
    assert_eq!(test.admitted(), ["bob", "other"]);
    let _alone = test.wait("alone", of(1), PATIENCE).await;
    assert_eq!(test.lines(), 2);
}

#[tokio::test(start_paused = true)]
async fn what_is_given_back_is_seen_by_the_first_in_line_at_once() {
    let test = Test::start();
    let reservation = test.limiter.reserve(&CALLS, "ada", 3, ms(100)).await.unwrap().unwrap();
    let begun = Instant::now();
    for name in ["a", "b", "c"] {
        test.wait(name, of(2), PATIENCE).await;
    }
    reservation.settle(1).await.unwrap();
    settle_down().await;
    assert_eq!(test.admitted(), ["a"]);
    test.limiter.reset(&CALLS, "ada").await.unwrap();
    settle_down().await;
    assert_eq!((test.admitted(), begun.elapsed()), (vec!["a", "b"], Duration::ZERO));
}

/// Of several limits that a line waits for, one is given back by another check than those of the line.
#[tokio::test(start_paused = true)]
async fn what_is_given_back_of_one_limit_is_seen_by_all_lines_that_wait_for_it() {
    let test = Test::start();
    let reservation = test.limiter.reserve(&CALLS, "ada", 3, ms(100)).await.unwrap().unwrap();
    let begun = Instant::now();
    let other = Limit::per("other", 3, ms(100));
    for (name, key) in [("a", "bob"), ("b", "cy")] {
        let both = of(1).and(Charge::new(other.clone(), key, 1).unwrap()).unwrap();
        test.wait(name, both, PATIENCE).await;
    }
    assert_eq!((test.admitted(), test.lines()), (vec![], 2));
    reservation.release().await.unwrap();
    settle_down().await;
    assert_eq!((test.admitted(), test.lines(), begun.elapsed()), (vec!["a", "b"], 0, Duration::ZERO));
}

/// A store whose answers are on their way for 10 ms.
#[derive(Clone)]
struct Far(MemoryStore);

impl Store for Far {
    type Decide = Pin<Box<dyn Future<Output = Result<Decision, StoreError>> + Send>>;
    type Settle = <MemoryStore as Store>::Settle;
    type Reset = <MemoryStore as Store>::Reset;

    fn decide(&self, check: Check) -> Self::Decide {
        let store = self.0.clone();
        Box::pin(async move {
            let decision = store.decide(check).await;
            sleep(ms(10)).await;
            decision
        })
    }

    fn settle(&self, settlement: Settlement) -> Self::Settle {
        self.0.settle(settlement)
    }

    fn reset(&self, limit: Limit, key: Key) -> Self::Reset {
        self.0.reset(limit, key)
    }
}

/// By those, too, whose first question was on its way just then, or who were refused before there was a line; and who comes
/// while the first asks is not told to wait for as long as that one had to.
#[tokio::test(start_paused = true)]
async fn what_is_given_back_is_seen_by_all_who_wait_for_it() {
    for given_back_after in [ms(5), ms(15)] {
        let (limiter, limit) = (Limiter::new(Far(MemoryStore::new())), Limit::per_hour("calls", 4));
        let reservation = limiter.reserve(&limit, "ada", 4, Duration::MAX).await.unwrap().unwrap();
        let mut waiting = JoinSet::new();
        for _ in 0..3 {
            let (limiter, limit) = (limiter.clone(), limit.clone());
            waiting.spawn(async move { limiter.acquire(&limit, "ada", 1, Duration::MAX).await.unwrap() });
        }
        let begun = Instant::now();
        sleep(given_back_after).await;
        reservation.release().await.unwrap();
        sleep(ms(5)).await;
        waiting.spawn(async move { limiter.acquire(&limit, "ada", 1, ms(100)).await.unwrap() });
        assert!(waiting.join_all().await.iter().all(Decision::is_allowed));
        assert!(begun.elapsed() < ms(100), "{:?}", begun.elapsed());
    }
}

/// Whoever asked a store that has just failed would be told so, and wait no more.
#[tokio::test(start_paused = true)]
async fn what_fails_to_be_given_back_ends_nobodys_wait() {
    let test = Test::spent().await;
    test.wait("a", of(1), PATIENCE).await;
    test.store.fails.store(true, Ordering::SeqCst);
    assert!(test.limiter.reset(&CALLS, "ada").await.is_err());
    settle_down().await;
    test.store.fails.store(false, Ordering::SeqCst);
    test.pass(ms(100)).await;
    assert_eq!(test.admitted(), ["a"]);
}

/// A settlement goes on though its caller leaves, and so does the word of it.
#[tokio::test]
async fn what_is_given_back_by_who_has_left_is_seen_too() {
    let server = RedisServer::start();
    let store = RedisStore::builder(&server.url()).build().unwrap();
    let (limiter, limit) = (Limiter::new(store).deadline(PATIENCE), Limit::per_hour("calls", 10));
    let reservation = limiter.reserve(&limit, "ada", 10, Duration::MAX).await.unwrap().unwrap();
    let waiting = tokio::spawn({
        let (limiter, limit) = (limiter.clone(), limit.clone());
        async move { limiter.acquire(&limit, "ada", 1, Duration::MAX).await.unwrap() }
    });
    while lines(&limiter) == 0 {
        yield_now().await;
    }
    {
        let mut settling = pin!(reservation.settle(1));
        assert!(poll_fn(|cx| Poll::Ready(settling.as_mut().poll(cx).is_pending())).await);
    }
    assert!(timeout(PATIENCE, waiting).await.expect("it sleeps on").unwrap().is_allowed());
}

#[tokio::test(start_paused = true)]
async fn a_failing_store_ends_every_wait_with_its_error() {
    let test = Test::spent().await;
    let waiting = [test.wait("a", of(1), PATIENCE).await, test.wait("b", of(1), PATIENCE).await];
    test.store.fails.store(true, Ordering::SeqCst);
    test.pass(ms(100)).await;
    for waiting in waiting {
        assert!(matches!(waiting.await.unwrap(), Err(Error::Unavailable(_))));
    }
    assert_eq!((test.admitted(), test.lines()), (vec![], 0));
}

#[tokio::test(start_paused = true)]
async fn the_deadline_is_that_of_a_question_and_not_of_the_wait() {
    let test = Test::spent().await;
    let limiter = test.limiter.clone().deadline(ms(1));
    let waiting = tokio::spawn(async move { limiter.acquire(&CALLS, "ada", 1, PATIENCE).await });
    settle_down().await;
    test.pass(ms(100)).await;
    assert!(waiting.await.unwrap().unwrap().is_allowed());

    let begun = Instant::now();
    let silent = Limiter::new(Silent).deadline(ms(50)).acquire(&CALLS, "ada", 1, PATIENCE).await;
    assert!(matches!(silent, Err(Error::TimedOut { .. })));
    assert!(begun.elapsed() < ms(60), "{:?}", begun.elapsed());
}

/// How late the first in line may be before the next takes over, as the docs say.
const GRACE: Duration = ms(100);

/// A wait that has been polled once, and is then kept.
type Kept = Pin<Box<dyn Future<Output = Result<Decision, Error>> + Send>>;

/// Waits, and is not polled any more.
async fn keep<S: Store>(limiter: &Limiter<S>, check: Check) -> Kept {
    keep_for(limiter, check, PATIENCE).await
}

async fn keep_for<S: Store>(limiter: &Limiter<S>, check: Check, patience: Duration) -> Kept {
    let limiter = limiter.clone();
    let mut kept: Kept = Box::pin(async move { limiter.acquire_all(check, patience).await });
    assert!(poll_fn(|cx| Poll::Ready(kept.as_mut().poll(cx).is_pending())).await);
    kept
}

async fn in_time(waiting: Waiting) -> Decision {
    timeout(PATIENCE, waiting).await.expect("the line stands still").unwrap().unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_first_in_line_that_nobody_polls_is_passed_by() {
    let test = Test::spent().await;
    let first = keep(&test.limiter, of(3)).await;
    let _second = test.wait("second", of(1), PATIENCE).await;
    let _third = test.wait("third", of(1), PATIENCE).await;
    test.pass(ms(100)).await;
    assert_eq!(test.admitted(), Vec::<&str>::new(), "it is given its time");
    test.pass(GRACE).await;
    assert_eq!(test.admitted(), ["second", "third"]);

    // Polled again, it goes on in its old place.
    let fourth = test.wait("fourth", of(2), PATIENCE).await;
    let first = tokio::spawn(first);
    settle_down().await;
    assert!(!first.is_finished() && !fourth.is_finished());
    test.pass(ms(100)).await;
    assert!(fourth.is_finished(), "it was first by then");
    test.pass(ms(100)).await;
    assert_eq!(first.await.unwrap().unwrap().used(), 3);
    assert_eq!(test.lines(), 0);
}

/// Half of a hundred are not polled, the first of them among them. The others are admitted in the order in which they came.
#[tokio::test(start_paused = true)]
async fn all_that_are_polled_get_through_though_others_are_not() {
    let test = Test::spent().await;
    let names: Vec<&'static str> = (0..50).map(|number| &*format!("{number}").leak()).collect();
    let mut kept = Vec::new();
    for name in &names {
        kept.push(keep(&test.limiter, of(1)).await);
        test.wait(name, of(1), PATIENCE).await;
    }
    test.questions();
    for _ in 0..600 {
        test.pass(ms(10)).await;
    }
    assert_eq!(test.admitted(), names);
    assert!(test.questions() <= 150, "only the first in line asks");

    // Each of the others still gets its turn, in the order in which they are polled.
    let waiting: Vec<_> = kept.into_iter().map(tokio::spawn).collect();
    for _ in 0..200 {
        test.pass(ms(10)).await;
    }
    for waiting in waiting {
        assert!(waiting.await.unwrap().unwrap().is_allowed());
    }
    assert_eq!(test.lines(), 0);
}

/// Something is given back, and only the second in line can use it.
#[tokio::test(start_paused = true)]
async fn what_is_given_back_is_not_kept_from_the_next_by_a_first_that_nobody_polls() {
    let (limiter, limit) = (Limiter::new(MemoryStore::new()), Limit::per_hour("calls", 3));
    let check = || Check::new(Charge::new(limit.clone(), "ada", 1).unwrap());
    assert!(limiter.check(&limit, "ada", 3).await.unwrap().is_allowed());
    let _first = keep_for(&limiter, check(), Duration::MAX).await;
    let second = tokio::spawn({
        let (limiter, check) = (limiter.clone(), check());
        async move { limiter.acquire_all(check, Duration::MAX).await }
    });
    settle_down().await;
    limiter.reset(&limit, "ada").await.unwrap();
    let begun = Instant::now();
    assert!(in_time(second).await.is_allowed());
    assert!(begun.elapsed() <= GRACE, "{:?}", begun.elapsed());
}

/// The first leaves long before its time, and the next two do not know.
#[tokio::test(start_paused = true)]
async fn a_line_of_which_the_next_are_not_polled_goes_on() {
    let (store, limit) = (MemoryStore::new(), Limit::per_hour("calls", 3));
    let limiter = Limiter::new(store.clone());
    let check = || Check::new(Charge::new(limit.clone(), "ada", 1).unwrap());
    let wait = || {
        let (limiter, check) = (limiter.clone(), check());
        tokio::spawn(async move { limiter.acquire_all(check, Duration::MAX).await })
    };
    assert!(limiter.check(&limit, "ada", 3).await.unwrap().is_allowed());
    let first = wait();
    settle_down().await;
    let _second = keep_for(&limiter, check(), Duration::MAX).await;
    let _third = keep_for(&limiter, check(), Duration::MAX).await;
    let last = wait();
    settle_down().await;
    // Not through the limiter, so that it tells nobody.
    Limiter::new(store).reset(&limit, "ada").await.unwrap();
    first.abort();
    let begun = Instant::now();
    assert!(in_time(last).await.is_allowed());
    assert!(begun.elapsed() <= Duration::from_secs(3), "{:?}", begun.elapsed());
}

/// The store has its question, but nobody asks for the answer.
#[tokio::test(start_paused = true)]
async fn a_question_that_nobody_polls_stops_the_line_until_its_deadline_and_a_grace() {
    let store = Switched::new(State::Works);
    let (limiter, limit) = (Limiter::new(store.clone()).deadline(ms(50)), Limit::per_hour("calls", 3));
    let check = || Check::new(Charge::new(limit.clone(), "ada", 1).unwrap());
    assert!(limiter.check(&limit, "ada", 3).await.unwrap().is_allowed());
    let mut first = keep_for(&limiter, check(), Duration::MAX).await;
    let second = tokio::spawn({
        let (limiter, check) = (limiter.clone(), check());
        async move { limiter.acquire_all(check, Duration::MAX).await }
    });
    settle_down().await;
    limiter.reset(&limit, "ada").await.unwrap();
    store.set(State::Hangs);
    assert!(poll_fn(|cx| Poll::Ready(first.as_mut().poll(cx).is_pending())).await);
    assert_eq!(store.waiting(), 1, "it has asked");
    store.set(State::Works);
    let begun = Instant::now();
    assert!(in_time(second).await.is_allowed());
    let waited = begun.elapsed();
    assert!((ms(50)..=ms(50) + GRACE + ms(2)).contains(&waited), "{waited:?}");
}

/// A store that refuses without saying for how long is not asked without a pause.
#[tokio::test(start_paused = true)]
async fn a_store_that_says_to_come_back_at_once_is_given_a_pause() {
    #[derive(Clone)]
    struct Hasty(Arc<AtomicU64>);

    impl Store for Hasty {
        type Decide = Ready<Result<Decision, StoreError>>;
        type Settle = Pending<Result<Settled, StoreError>>;
        type Reset = Pending<Result<(), StoreError>>;

        fn decide(&self, check: Check) -> Self::Decide {
            self.0.fetch_add(1, Ordering::SeqCst);
            let status = |charge: &Charge| LimitStatus::new(charge, 3, Duration::ZERO, Some(Duration::ZERO));
            ready(Ok(Decision::new(&check, SystemTime::now(), AdmissionId::fresh(), status)))
        }

        fn settle(&self, _: Settlement) -> Self::Settle {
            pending()
        }

        fn reset(&self, _: Limit, _: Key) -> Self::Reset {
            pending()
        }
    }

    let questions = Arc::new(AtomicU64::new(0));
    let waiting = Limiter::new(Hasty(Arc::clone(&questions)));
    let refused = timeout(PATIENCE, waiting.acquire(&CALLS, "ada", 1, ms(100))).await.unwrap().unwrap();
    assert!(!refused.is_allowed());
    assert!((2..=102).contains(&questions.load(Ordering::SeqCst)), "{questions:?}");
}
