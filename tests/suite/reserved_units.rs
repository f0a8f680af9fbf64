//! Refusals that only reserved units make: when to come back, and who finds out when they are given back.

use std::{
    convert::Infallible,
    time::{Duration, UNIX_EPOCH},
};

use axum::body::Body;
use http::{Request, Response, StatusCode};
use tokio::{
    task::{JoinSet, yield_now},
    time::{Instant, advance, sleep},
};
use tower::{Layer, ServiceExt, service_fn};
use tower_sliding_window::{
    AdmissionId, Algorithm, Charge, Check, Decision, DenyCache, Limit, LimitStatus, Limiter, ManualClock, MemoryStore,
    RateLimitLayer, RedisStore, Settlement, Store,
};

use crate::support::{
    Fixture, PATIENCE, for_every_store,
    redis_server::RedisServer,
    requests::{anyone, figures},
};

const MICROSECOND: Duration = Duration::from_micros(1);
const SECOND: Duration = Duration::from_secs(1);
const TOKENS: Limit = Limit::per_minute("tokens", 100);

const ALGORITHMS: [Algorithm; 4] = [Algorithm::log(), Algorithm::compact(16), Algorithm::counter(), Algorithm::fixed()];

const fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn charge(limit: &Limit, cost: u64) -> Charge {
    Charge::new(limit.clone(), "ada", cost).unwrap()
}

fn both(first: Charge, second: Charge) -> Check {
    Check::new(first).and(second).unwrap()
}

impl<S: Store> Fixture<S> {
    async fn ask(&self, check: Check) -> Decision {
        self.limiter.check_all(check).await.unwrap()
    }

    async fn admit(&self, charge: Charge) {
        let decision = self.ask(Check::new(charge)).await;
        assert!(decision.is_allowed(), "{decision:?}");
    }

    /// How long a cost is refused to a key, and nothing if it would not be. It spends nothing.
    async fn refused_for(&self, limiter: &Limiter<S>, limit: &Limit, key: &'static str, cost: u64) -> Option<Decision> {
        if limiter.peek(limit, key).await.unwrap().remaining() >= cost {
            return None;
        }
        let decision = limiter.check(limit, key, cost).await.unwrap();
        assert!(!decision.is_allowed());
        Some(decision)
    }
}

/// Numbers that look random, the same at every run.
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}

/// The retry time is the exact one with all reservations staying; or earlier, where without any of them it would be: but no
/// earlier than that, nor than it takes to find out. Histories of settled and reserved units, and beside them the same ones
/// without the reserved units.
async fn a_refusal_tells_what_is_sure_and_otherwise_to_ask_again(test: Fixture<impl Store>) {
    let test = test.asking_every_time();
    let (mut numbers, mut told_of_reservations, mut sure) = (Numbers(7), 0, 0);
    for algorithm in ALGORITHMS {
        let limit = TOKENS.with_algorithm(algorithm);
        for _ in 0..30 {
            test.clock.advance(2 * limit.window() + Duration::from_micros(numbers.below(60_000_000)));
            for _ in 0..=numbers.below(7) {
                test.clock.advance(Duration::from_micros(numbers.below(15_000_000)));
                let cost = 1 + numbers.below(40);
                let lease = (numbers.below(2) == 0).then(|| Duration::from_micros(1 + numbers.below(70_000_000)));
                let made = lease.into_iter().fold(charge(&limit, cost), Charge::reserve);
                if test.ask(Check::new(made)).await.is_allowed() && lease.is_none() {
                    assert!(test.limiter.check(&limit, "without", cost).await.unwrap().is_allowed());
                }
            }
            let reserved_units = async || {
                let [with, without] = ["ada", "without"].map(|key| test.limiter.peek(&limit, key));
                with.await.unwrap().used() - without.await.unwrap().used()
            };
            let patient = test.limiter.clone().retry_reserved_after(Duration::MAX);
            let mut longest = None;
            for cost in [1, 20, 45, 70, 100] {
                let Some(staying) = test.refused_for(&patient, &limit, "ada", cost).await else { continue };
                let staying = staying.retry_after().unwrap();
                let without = test.refused_for(&test.limiter, &limit, "without", cost).await;
                let given_back = without.and_then(|refused| refused.retry_after()).unwrap_or_default();
                for setting in [Duration::ZERO, ms(1), SECOND, seconds(10), Duration::MAX] {
                    let limiter = test.limiter.clone().retry_reserved_after(setting);
                    let refused = limiter.check(&limit, "ada", cost).await.unwrap();
                    let expected = staying.min(given_back.max(setting));
                    assert_eq!(refused.retry_after(), Some(expected), "{algorithm:?}: {cost} {setting:?} {refused:?}");
                    let by_reservations = given_back.is_zero();
                    assert_eq!(refused.is_refused_by_reservations(), by_reservations, "{algorithm:?}: {refused:?}");
                    assert_eq!(refused.binding().reserved(), reserved_units().await, "{algorithm:?}");
                    let counted = if by_reservations { &mut told_of_reservations } else { &mut sure };
                    *counted += 1;
                }
                longest = Some((staying, cost));
            }
            if let Some((staying, cost)) = longest {
                test.clock.advance(staying - MICROSECOND);
                assert!(!test.limiter.check(&limit, "ada", cost).await.unwrap().is_allowed(), "{algorithm:?}");
                test.clock.advance(MICROSECOND);
                assert!(test.limiter.check(&limit, "ada", cost).await.unwrap().is_allowed(), "{algorithm:?}");
            }
        }
    }
    assert!(told_of_reservations > 200 && sure > 200, "{told_of_reservations} {sure}");
}

/// What a refusal says from the reservation to the end of its lease, when nobody settles it.
async fn a_reservation_that_nobody_settles_is_asked_for_until_its_lease_ends(test: Fixture<impl Store>) {
    let test = test.asking_every_time();
    for (setting, lease) in [(SECOND, seconds(10)), (seconds(3), seconds(10)), (seconds(20), seconds(10))] {
        let limiter = test.limiter.clone().retry_reserved_after(setting);
        test.admit(charge(&TOKENS, 100).reserve(lease)).await;
        let mut asked = 0;
        let begun = test.clock.now();
        while let Some(wait) = limiter.check(&TOKENS, "ada", 1).await.unwrap().retry_after() {
            let left = lease - test.clock.now().duration_since(begun).unwrap();
            assert_eq!(wait, setting.min(left));
            test.clock.advance(wait);
            asked += 1;
        }
        assert_eq!(test.clock.now().duration_since(begun).unwrap(), lease, "it ends exactly then");
        assert_eq!(asked, lease.as_secs().div_ceil(setting.as_secs()));
        test.limiter.reset(&TOKENS, "ada").await.unwrap();
    }
}

async fn of_several_limits_one_that_is_sure_speaks_for_all(test: Fixture<impl Store>) {
    let test = test.asking_every_time();
    let said = |status: &LimitStatus| (status.retry_after(), status.is_refused_by_reservations(), status.reserved());
    for algorithm in ALGORITHMS {
        let since = test.clock.now().duration_since(UNIX_EPOCH).unwrap().as_micros() % 3_600_000_000;
        test.clock.advance(seconds(3_600) - Duration::from_micros(u64::try_from(since).unwrap()));
        let tokens = Limit::per_hour("tokens", 100).with_algorithm(algorithm);
        let calls = Limit::per_minute("calls", 2).with_algorithm(Algorithm::fixed());
        test.admit(charge(&tokens, 100).reserve(Duration::MAX)).await;
        test.admit(charge(&calls, 2)).await;

        let check = both(charge(&tokens, 1), charge(&calls, 1));
        let refused = test.ask(check.clone()).await;
        assert_eq!(
            refused.statuses().map(said).collect::<Vec<_>>(),
            [(Some(SECOND), true, 100), (Some(seconds(60)), false, 0)]
        );
        assert_eq!((refused.retry_after(), refused.limit()), (Some(seconds(60)), &calls), "{algorithm:?}");
        assert!(!refused.is_refused_by_reservations(), "settled units refuse it as well");

        // Sooner than it takes to find out, and then not any more.
        test.clock.advance(seconds(60) - ms(1));
        let refused = test.ask(check.clone()).await;
        assert_eq!((refused.retry_after(), refused.is_refused_by_reservations()), (Some(SECOND), false));
        test.clock.advance(ms(1));
        let refused = test.ask(check.clone()).await;
        assert_eq!((refused.retry_after(), refused.is_refused_by_reservations()), (Some(SECOND), true));
        assert_eq!(refused.statuses().map(said).collect::<Vec<_>>(), [(Some(SECOND), true, 100), (None, false, 0)]);

        // A limit in the shadow refuses nothing, so it makes nothing sure.
        let shadow = charge(&Limit::per_minute("shadow", 1), 1);
        test.admit(shadow.clone()).await;
        let refused = test.ask(both(charge(&tokens, 1), shadow.clone().in_shadow())).await;
        assert_eq!((refused.retry_after(), refused.is_refused_by_reservations()), (Some(SECOND), true));
        let would = refused.shadow_refusals().map(said).collect::<Vec<_>>();
        assert_eq!(would, [(Some(seconds(60)), false, 0)]);

        // Both of them by reservations, of which one ends before.
        test.admit(charge(&calls, 2).reserve(ms(400))).await;
        let refused = test.ask(check.clone()).await;
        assert_eq!(
            refused.statuses().map(said).collect::<Vec<_>>(),
            [(Some(SECOND), true, 100), (Some(ms(400)), true, 2)]
        );
        assert!(refused.is_refused_by_reservations());

        // What is admitted tells of reservations, too, and is refused by nothing.
        test.clock.advance(ms(400));
        let asked = test.ask(both(charge(&tokens, 0), charge(&calls, 1))).await;
        assert_eq!(asked.statuses().map(said).collect::<Vec<_>>(), [(None, false, 100), (None, false, 0)]);
        assert!(asked.is_allowed() && !asked.is_refused_by_reservations());

        // Settled, they are sure.
        test.limiter.reset(&tokens, "ada").await.unwrap();
        let check = Check::new(charge(&tokens, 60).reserve(Duration::MAX));
        let admitted = test.ask(check.clone()).await;
        let settled = test.limiter.settle(Settlement::new(check, &admitted, |_| Some(100))).await.unwrap();
        let status = settled.decision().binding();
        assert_eq!((status.used(), status.reserved()), (100, 0));
        let refused = test.limiter.check(&tokens, "ada", 1).await.unwrap();
        assert!(!refused.is_refused_by_reservations() && refused.retry_after() > Some(seconds(1_000)), "{refused:?}");
        for limit in [&tokens, &calls] {
            test.limiter.reset(limit, "ada").await.unwrap();
        }
        test.clock.advance(seconds(60));
    }
}

for_every_store! {
    a_refusal_tells_what_is_sure_and_otherwise_to_ask_again
    a_reservation_that_nobody_settles_is_asked_for_until_its_lease_ends
    of_several_limits_one_that_is_sure_speaks_for_all
}

/// By the server's own clock, a check that is nothing special meets a log in which units are reserved.
#[tokio::test]
async fn a_plain_check_overlooks_no_reservation() {
    let server = RedisServer::start();
    let store = RedisStore::builder(&server.url()).build().unwrap();
    let limiter = Limiter::new(store).deadline(PATIENCE).deny_cache(DenyCache::off());
    for (settled, reserved) in [(0, 10), (1, 9), (4, 6), (9, 1)] {
        let limit = Limit::per_hour("calls", 10);
        assert!(limiter.check(&limit, "ada", settled).await.unwrap().is_allowed());
        let reservation = limiter.reserve(&limit, "ada", reserved, seconds(600)).await.unwrap().unwrap();
        for _ in 0..3 {
            let refused = limiter.check(&limit, "ada", 1).await.unwrap();
            let told = (refused.is_allowed(), refused.used(), refused.binding().reserved(), refused.retry_after());
            assert_eq!(told, (false, 10, reserved, Some(SECOND)), "{settled} {reserved}");
        }
        assert_eq!(reservation.settle(0).await.unwrap().decision().used(), settled);
        assert_eq!(limiter.check(&limit, "ada", 1).await.unwrap().used(), settled + 1);
        limiter.reset(&limit, "ada").await.unwrap();
    }
}

/// An id that an application gives may be any eight bytes, and so is a member of a log that stands for something else.
#[tokio::test]
async fn no_id_is_taken_for_a_sum() {
    let server = RedisServer::start();
    let store = RedisStore::builder(&server.url()).build().unwrap();
    let limiter = Limiter::new(store).deadline(PATIENCE).deny_cache(DenyCache::off());
    for id in [*b"reserved", *b"used    ", *b"held    ", *b"used\0\0\0\0"] {
        let id = AdmissionId::from_bytes(id);
        assert!(limiter.check_all(Check::new(charge(&TOKENS, 1)).with_id(id)).await.unwrap().is_allowed());
        let reservation = limiter.reserve(&TOKENS, "ada", 40, seconds(600)).await.unwrap().unwrap();
        assert_eq!(reservation.decision().used(), 41);
        let again = limiter.check_all(Check::new(charge(&TOKENS, 1)).with_id(id)).await.unwrap();
        assert_eq!((again.used(), again.binding().reserved()), (41, 40));
        assert_eq!(reservation.settle(2).await.unwrap().decision().used(), 3);
        limiter.reset(&TOKENS, "ada").await.unwrap();
    }
}

/// All tasks do what they can do without time passing.
async fn settle_down() {
    for _ in 0..100 {
        yield_now().await;
    }
}

/// Settled by another process, or through a limiter of another line.
#[tokio::test(start_paused = true)]
async fn who_waits_for_what_others_give_back_asks_again_after_that_setting() {
    for (setting, patience, given_back_after, admitted_after) in [
        (SECOND, PATIENCE, ms(300), Ok(SECOND)),
        (ms(200), PATIENCE, ms(300), Ok(ms(400))),
        (SECOND, PATIENCE, ms(2_500), Ok(seconds(3))),
        (seconds(10), seconds(2), ms(300), Ok(seconds(2))),
        (SECOND, ms(500), ms(300), Ok(ms(500))),
        (seconds(3_600), ms(500), ms(300), Ok(ms(500))),
        (Duration::MAX, ms(500), ms(300), Ok(ms(500))),
        (Duration::ZERO, PATIENCE, ms(300), Ok(ms(300))),
        (SECOND, ms(300), ms(500), Err(ms(300))),
        (SECOND, ms(1_500), seconds(2), Err(ms(1_500))),
        (SECOND, Duration::ZERO, ms(500), Err(Duration::ZERO)),
    ] {
        let clock = ManualClock::new();
        let store = MemoryStore::builder().clock(&clock).build();
        let (limiter, elsewhere) = (Limiter::new(store.clone()).retry_reserved_after(setting), Limiter::new(store));
        let reservation = elsewhere.reserve(&TOKENS, "ada", 100, Duration::MAX).await.unwrap().unwrap();
        let begun = Instant::now();
        let waiting = tokio::spawn(async move {
            let decision = limiter.acquire(&TOKENS, "ada", 1, patience).await.unwrap();
            (decision, begun.elapsed())
        });
        sleep(given_back_after).await;
        reservation.release().await.unwrap();
        let (decision, elapsed) = waiting.await.unwrap();
        let case = format!("{setting:?} {patience:?} {given_back_after:?}");
        assert_eq!(decision.is_allowed(), admitted_after.is_ok(), "{case}");
        assert_eq!(decision.is_refused_by_reservations(), admitted_after.is_err(), "{case}");
        let (Ok(expected) | Err(expected)) = admitted_after;
        // Between two questions there is a pause of a millisecond at least.
        assert!((expected..=expected + ms(2)).contains(&elapsed), "{case}: {elapsed:?}");
    }
}

/// Through the limiter or a clone of it, a settlement is seen at once, however long the setting is.
#[tokio::test(start_paused = true)]
async fn who_waits_for_what_the_same_limiter_gives_back_asks_at_once() {
    for setting in [ms(50), SECOND, seconds(3_600)] {
        let limiter = Limiter::new(MemoryStore::new()).retry_reserved_after(setting);
        let reservation = limiter.reserve(&TOKENS, "ada", 100, Duration::MAX).await.unwrap().unwrap();
        let mut waiting = JoinSet::new();
        let begun = Instant::now();
        for _ in 0..3 {
            let limiter = limiter.clone();
            waiting.spawn(async move { limiter.acquire(&TOKENS, "ada", 10, PATIENCE).await.unwrap() });
        }
        sleep(ms(20)).await;
        reservation.settle(30).await.unwrap();
        assert!(waiting.join_all().await.iter().all(Decision::is_allowed));
        assert_eq!(begun.elapsed(), ms(20), "{setting:?}");
    }
}

/// A lease that ends before is waited for exactly, and so is what settled units say.
#[tokio::test(start_paused = true)]
async fn who_waits_asks_when_a_lease_ends_and_when_settled_units_leave() {
    let clock = ManualClock::new();
    let store = MemoryStore::builder().clock(&clock).build();
    let limiter = Limiter::new(store.clone());
    let elsewhere = Limiter::new(store);
    let pass = async |time| {
        clock.advance(time);
        advance(time).await;
        settle_down().await;
    };
    // 60 leave after 60 s, the others are reserved for 5.7 s.
    assert!(elsewhere.check(&TOKENS, "ada", 60).await.unwrap().is_allowed());
    let _kept = elsewhere.reserve(&TOKENS, "ada", 40, ms(5_700)).await.unwrap().unwrap();
    let waiting = |cost, patience| {
        let limiter = limiter.clone();
        tokio::spawn(async move { limiter.acquire(&TOKENS, "ada", cost, patience).await.unwrap() })
    };
    let sure = waiting(50, seconds(30)).await.unwrap();
    let told = (sure.is_allowed(), sure.retry_after(), sure.is_refused_by_reservations());
    assert_eq!(told, (false, Some(seconds(60)), false), "longer than its patience, so it is told at once");

    let first = waiting(10, seconds(30));
    settle_down().await;
    for _ in 0..5 {
        pass(SECOND).await;
        assert!(!first.is_finished());
    }
    pass(ms(699)).await;
    assert!(!first.is_finished());
    pass(ms(1)).await;
    assert!(first.await.unwrap().is_allowed());
}

/// The word of another process comes through the server.
#[tokio::test]
async fn who_waits_on_redis_asks_again_after_that_setting() {
    let server = RedisServer::start();
    let limiter = || Limiter::new(RedisStore::builder(&server.url()).build().unwrap()).deadline(PATIENCE);
    for (setting, patience) in [(ms(300), PATIENCE), (seconds(60), ms(300))] {
        let (here, there) = (limiter().retry_reserved_after(setting), limiter());
        let reservation = there.reserve(&TOKENS, "ada", 100, Duration::MAX).await.unwrap().unwrap();
        let begun = std::time::Instant::now();
        let waiting = tokio::spawn({
            let here = here.clone();
            async move { here.acquire(&TOKENS, "ada", 1, patience).await.unwrap() }
        });
        sleep(ms(50)).await;
        reservation.release().await.unwrap();
        let decision = waiting.await.unwrap();
        let elapsed = begun.elapsed();
        assert!(decision.is_allowed(), "{setting:?} {patience:?}: {decision:?}");
        assert!(elapsed >= ms(299) && elapsed < seconds(10), "{setting:?} {patience:?}: {elapsed:?}");

        // Settled through the same limiter, it is not waited for.
        here.reset(&TOKENS, "ada").await.unwrap();
        let reservation = here.reserve(&TOKENS, "ada", 100, Duration::MAX).await.unwrap().unwrap();
        let begun = std::time::Instant::now();
        let waiting = tokio::spawn({
            let here = here.clone();
            async move { here.acquire(&TOKENS, "ada", 1, PATIENCE).await.unwrap() }
        });
        sleep(ms(50)).await;
        reservation.release().await.unwrap();
        assert!(waiting.await.unwrap().is_allowed());
        assert!(begun.elapsed() < ms(250), "{setting:?}: {:?}", begun.elapsed());
        here.reset(&TOKENS, "ada").await.unwrap();
    }
}

/// Answers after a while, with the status in the path.
async fn sign_in(request: Request<Body>) -> Result<Response<Body>, Infallible> {
    let status: StatusCode = request.uri().path()[1..].parse().unwrap();
    sleep(ms(300)).await;
    Ok(Response::builder().status(status).body(Body::empty()).unwrap())
}

/// Five failed logins a minute: correct ones use nothing up, but more of them at once than there are failures left have to
/// come again a second later.
async fn correct_logins_at_once_are_told_to_come_again_in_a_second(store: impl Store) {
    let login = Limit::per_minute("login", 5);
    let limit = login.clone().by(anyone).settle(|o| u64::from(o.status() == 401));
    let app = RateLimitLayer::new(store.clone()).limit(limit).deadline(PATIENCE).layer(service_fn(sign_in));
    let sign_in = |status: u16| {
        let request = Request::get(format!("/{status}")).body(Body::empty()).unwrap();
        tokio::spawn(app.clone().oneshot(request))
    };
    let said = |response: Response<Body>| {
        let figures = figures(response.headers()).map(|figure| figure.map(|text| text.parse::<u64>().unwrap()));
        (response.status().as_u16(), figures)
    };
    let answers: Vec<_> = (0..10).map(|_| sign_in(200)).collect();
    let (mut passed, mut refused) = (0, 0);
    for answer in answers {
        match said(answer.await.unwrap().unwrap()) {
            (200, [Some(5), Some(_), Some(_), None]) => passed += 1,
            (429, [Some(5), Some(0), Some(1), Some(1)]) => refused += 1,
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((passed, refused), (5, 5));

    // The answers have settled them, so nothing is left to wait for.
    sleep(ms(500)).await;
    let (status, [_, remaining, reset, _]) = said(sign_in(200).await.unwrap().unwrap());
    assert_eq!((status, remaining, reset), (200, Some(5), Some(0)));

    let begun = std::time::Instant::now();
    for left in (0..5).rev() {
        let (status, [_, remaining, ..]) = said(sign_in(401).await.unwrap().unwrap());
        assert_eq!((status, remaining), (401, Some(left)));
    }
    // The first of them leaves a minute after it was admitted, some 1.5 s ago.
    let (status, [_, remaining, reset, retry_after]) = said(sign_in(200).await.unwrap().unwrap());
    let least = 60 - begun.elapsed().as_secs() - 1;
    assert_eq!((status, remaining), (429, Some(0)));
    assert!(retry_after >= Some(least) && retry_after <= Some(59), "{retry_after:?}");
    assert_eq!(reset, retry_after);
}

#[tokio::test]
async fn correct_logins_at_once_are_told_to_come_again_in_a_second_in_process() {
    correct_logins_at_once_are_told_to_come_again_in_a_second(MemoryStore::new()).await;
}

#[tokio::test]
async fn correct_logins_at_once_are_told_to_come_again_in_a_second_on_redis() {
    let server = RedisServer::start();
    let store = RedisStore::builder(&server.url()).connect_timeout(PATIENCE).build().unwrap();
    correct_logins_at_once_are_told_to_come_again_in_a_second(store).await;
}
