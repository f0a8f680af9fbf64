//! `KeyedLimit::ban`: a key that has used up a limit is refused for a time of its own.

use std::{convert::Infallible, future::ready, time::Duration};

use axum::body::Body;
use http::{Request, Response, StatusCode, request::Parts};
use tower::{Layer, ServiceExt, service_fn};
use tower_sliding_window::{
    Algorithm, Charge, Check, Decision, Header, Key, KeyedLimit, Limit, Limiter, MemoryStore,
    RateLimitLayer, Rejection, Store,
    error::{StoreError, StoreErrorKind},
    limiter::{Breaker, Share},
    middleware::{Exchange, ShadowRefusals},
    settlement::{Settled, Settlement},
    store::{ManualClock, StoreFuture},
    testing::Fault,
};

use crate::support::{
    Fixture, MICROSECOND, TEST_TIMEOUT, for_every_store,
    log::Log,
    redis_by,
    redis_server::RedisServer,
    requests::{figures, hello, json},
    seconds,
    stores::failing,
};

const LOGIN: Limit = Limit::per_minute("login", 3);
const BAN: Limit = Limit::per("login.ban", 1, Limit::MAX_WINDOW);
const TIME: Duration = seconds(900);

fn by_user() -> Header {
    Header::new("x-user")
}

fn key(user: &str) -> Key {
    by_user().key(user)
}

fn login() -> KeyedLimit {
    LOGIN.by(by_user()).ban(BAN, TIME)
}

/// A request that the service answers with this status.
fn request(user: &str, answer: u16) -> Request<Body> {
    Request::get("/")
        .header("x-user", user)
        .header("x-answer", answer)
        .body(Body::empty())
        .unwrap()
}

async fn send(layer: &RateLimitLayer, user: &str, answer: u16) -> Response<Body> {
    let service = service_fn(|request: Request<Body>| async move {
        let status = request.headers()["x-answer"]
            .to_str()
            .unwrap()
            .parse::<StatusCode>()
            .unwrap();
        Ok::<_, Infallible>(
            Response::builder()
                .status(status)
                .body(Body::empty())
                .unwrap(),
        )
    });
    layer
        .clone()
        .layer(service)
        .oneshot(request(user, answer))
        .await
        .unwrap()
}

/// For how long the client is banned, if it is.
async fn banned_for(layer: &RateLimitLayer, user: &str) -> Option<Duration> {
    let response = send(layer, user, 200).await;
    match response.extensions().get() {
        Some(Rejection::Banned(decision)) => {
            assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
            decision.retry_after()
        }
        _ => None,
    }
}

async fn use_up(layer: &RateLimitLayer, user: &str) {
    for remaining in ["2", "1", "0"] {
        let response = send(layer, user, 200).await;
        assert_eq!(
            (
                response.status().as_u16(),
                figures(response.headers())[..2].to_vec()
            ),
            (200, vec![Some("3"), Some(remaining)])
        );
    }
}

async fn a_refusal_bans_its_key_for_exactly_the_time<S: Store>(fixture: Fixture<S>) {
    let layer = RateLimitLayer::new(fixture.limiter).limit(login());
    use_up(&layer, "ada").await;
    // Already the first refusal tells the time of the ban.
    let refused = send(&layer, "ada", 200).await;
    assert_eq!(refused.status(), 429);
    assert_eq!(
        figures(refused.headers()),
        [Some("1"), Some("0"), Some("900"), Some("900")]
    );
    let body = json(refused).await;
    assert!(
        body.contains("The limit 'login.ban' bans this client. Retry in 900 seconds."),
        "{body}"
    );
    assert!(
        body.contains(r#""violated-policies":["login","login.ban"]"#),
        "{body}"
    );

    // Requests in between do not prolong it.
    let mut left = TIME;
    for pause in [0, 1, 58, 2, 339, 499] {
        fixture.clock.advance(seconds(pause));
        left -= seconds(pause);
        assert_eq!(banned_for(&layer, "ada").await, Some(left));
    }
    assert_eq!(send(&layer, "bob", 200).await.status(), 200);
    fixture.clock.advance(seconds(1) - MICROSECOND);
    assert_eq!(banned_for(&layer, "ada").await, Some(MICROSECOND));
    fixture.clock.advance(MICROSECOND);
    use_up(&layer, "ada").await;
    assert_eq!(banned_for(&layer, "ada").await, Some(TIME));
}

async fn a_limit_that_counts_afterwards_bans_when_nothing_is_left<S: Store>(fixture: Fixture<S>) {
    let failures = |limit: KeyedLimit, settles: bool| {
        let cost = |exchange: &Exchange<'_>| u64::from(exchange.response.status == 401);
        if settles {
            limit.settle(cost)
        } else {
            limit.count_afterwards(cost)
        }
    };
    for (settles, user) in [(true, "ada"), (false, "bob")] {
        let layer = RateLimitLayer::new(fixture.limiter.clone()).limit(failures(login(), settles));
        for answer in [200, 401, 401, 200, 200, 404, 200] {
            assert_eq!(send(&layer, user, answer).await.status(), answer);
        }
        // The third failure bans by itself, so a client gains nothing by a pause.
        assert_eq!(send(&layer, user, 401).await.status(), 401);
        fixture.clock.advance(seconds(120));
        assert_eq!(
            banned_for(&layer, user).await,
            Some(seconds(780)),
            "{settles}"
        );
        fixture.clock.advance(seconds(780));
        assert_eq!(send(&layer, user, 200).await.status(), 200);
    }
}

async fn a_ban_by_hand_lasts_up_to_a_year_and_is_lifted<S: Store>(fixture: Fixture<S>) {
    let (limiter, day, year) = (
        &fixture.limiter,
        seconds(24 * 60 * 60),
        seconds(365 * 24 * 60 * 60),
    );
    let layer = RateLimitLayer::new(limiter.clone()).limit(login());
    for (time, banned) in [
        (day, day),
        (year, year),
        (100 * year, year),
        (Duration::MAX, year),
    ] {
        limiter.block(&BAN, key("ada"), time).await.unwrap();
        assert_eq!(banned_for(&layer, "ada").await, Some(banned));
        limiter.reset(&BAN, key("ada")).await.unwrap();
        assert_eq!(send(&layer, "ada", 200).await.status(), 200);
        limiter.reset(&LOGIN, key("ada")).await.unwrap();
    }
    // Longer than a limit's own ban, which does not shorten it.
    limiter.block(&BAN, key("ada"), day).await.unwrap();
    fixture.clock.advance(seconds(1));
    for _ in 0..5 {
        assert_eq!(banned_for(&layer, "ada").await, Some(day - seconds(1)));
    }
    assert_eq!(
        limiter.peek(&BAN, key("ada")).await.unwrap().binding().used,
        1
    );
    limiter.reset(&BAN, key("ada")).await.unwrap();

    // A limit that is still used up bans anew, unless it is reset as well.
    use_up(&layer, "ada").await;
    assert_eq!(banned_for(&layer, "ada").await, Some(TIME));
    limiter.reset(&BAN, key("ada")).await.unwrap();
    fixture.clock.advance(seconds(7));
    assert_eq!(banned_for(&layer, "ada").await, Some(TIME));
    limiter.reset(&LOGIN, key("ada")).await.unwrap();
    limiter.reset(&BAN, key("ada")).await.unwrap();
    use_up(&layer, "ada").await;
    assert_eq!(
        banned_for(
            &RateLimitLayer::new(limiter.clone()).limit(LOGIN.by(by_user()).ban(BAN, BAN.window())),
            "ada"
        )
        .await,
        Some(year)
    );
}

async fn bans_have_the_options_of_their_limits<S: Store>(fixture: Fixture<S>) {
    let layer = |limit: KeyedLimit| {
        let roomy = Limit::per_hour("roomy", 100).by(by_user());
        RateLimitLayer::new(fixture.limiter.clone())
            .limit(limit)
            .limit(roomy)
    };
    let use_up = async |layer: &RateLimitLayer, user: &str| {
        for _ in 0..3 {
            assert_eq!(send(layer, user, 200).await.status(), 200);
        }
    };
    // A status that the responder gives.
    let forbidden = layer(login());
    use_up(&forbidden, "ada").await;
    let forbidden = forbidden.respond_with(|rejection: &Rejection, mut head: Response<()>| {
        *head.status_mut() = StatusCode::FORBIDDEN;
        rejection.problem(head).map(Body::from)
    });
    for _ in 0..2 {
        let service = forbidden.clone().layer(service_fn(hello));
        let response = service.oneshot(request("ada", 200)).await.unwrap();
        assert_eq!(
            (response.status().as_u16(), figures(response.headers())[3]),
            (403, Some("900"))
        );
        let body = json(response).await;
        assert!(
            body.starts_with(r#"{"title":"Forbidden","status":403,"#),
            "{body}"
        );
    }
    // Hidden.
    let hidden = layer(login().hidden());
    use_up(&hidden, "bob").await;
    for _ in 0..2 {
        let response = send(&hidden, "bob", 200).await;
        assert_eq!(figures(response.headers()), [None, None, None, Some("900")]);
        assert!(!json(response).await.contains("login"));
    }
    assert!(banned_for(&hidden, "bob").await.is_some());
    // In the shadow: it shows whom it would have banned.
    let shadow = layer(login().in_shadow());
    use_up(&shadow, "cyd").await;
    assert_eq!(send(&shadow, "cyd", 200).await.status(), 200);
    fixture.clock.advance(seconds(61));
    let response = send(&shadow, "cyd", 200).await;
    let refusals: &ShadowRefusals = response.extensions().get().unwrap();
    assert_eq!(
        (
            response.status().as_u16(),
            refusals.names().collect::<Vec<_>>()
        ),
        (200, vec!["login.ban"])
    );
    // Once it is no longer in the shadow, the ban holds.
    assert!(banned_for(&layer(login()), "cyd").await.is_some());
    // By the whole key, whatever part has refused.
    let split = layer(LOGIN.split(3).by(by_user()).ban(BAN, TIME));
    while send(&split, "dan", 200).await.status() == 200 {}
    for _ in 0..6 {
        assert_eq!(banned_for(&split, "dan").await, Some(TIME));
    }
    // Chosen. The figures of an admission are those of the limit.
    let chosen = layer(KeyedLimit::chosen(by_user(), |_: &Parts| LOGIN).ban(BAN, TIME));
    self::use_up(&chosen, "eve").await;
    for _ in 0..3 {
        assert_eq!(banned_for(&chosen, "eve").await, Some(TIME));
    }
}

/// A check is decided all or nothing.
async fn a_limit_beside_a_ban_counts_only_what_is_admitted<S: Store>(fixture: Fixture<S>) {
    const ATTEMPTS: Limit = Limit::per_hour("attempts", 100);
    let failures = login().count_afterwards(|exchange| u64::from(exchange.response.status == 401));
    for (user, limit) in [("ada", login()), ("bob", failures)] {
        let layer = RateLimitLayer::new(fixture.limiter.clone())
            .limit(limit)
            .limit(ATTEMPTS.by(by_user()));
        let mut admitted = 0;
        for _ in 0..10 {
            admitted += u64::from(send(&layer, user, 401).await.status() == 401);
        }
        assert!(admitted == 3 && banned_for(&layer, user).await.is_some());
        let attempts = fixture.limiter.peek(&ATTEMPTS, key(user)).await.unwrap();
        assert_eq!(attempts.binding().used, admitted, "{user}");
    }
}

for_every_store! {
    a_limit_beside_a_ban_counts_only_what_is_admitted
    a_refusal_bans_its_key_for_exactly_the_time
    a_limit_that_counts_afterwards_bans_when_nothing_is_left
    a_ban_by_hand_lasts_up_to_a_year_and_is_lifted
    bans_have_the_options_of_their_limits
    of_two_bans_that_begin_at_once_the_longer_holds
    a_shared_ban_is_in_the_shadow_only_for_limits_in_the_shadow
    a_shared_ban_is_hidden_if_it_is_hidden_by_either
    a_banned_key_is_refused_where_it_has_no_limit
}

/// Two processes. The second remembers a refusal from before the ban, and refuses without asking
/// Redis.
#[tokio::test]
async fn all_processes_ban_once_and_a_remembered_refusal_bans_too() {
    let (clock, server) = (ManualClock::new(), RedisServer::start());
    let limiters = [(); 2].map(|()| Limiter::new(redis_by(&clock, &server)).deadline(TEST_TIMEOUT));
    let layers = limiters
        .clone()
        .map(|limiter| RateLimitLayer::new(limiter).limit(login()));
    for user in ["ada", "bob"] {
        use_up(&layers[0], user).await;
        let check = Check::new(Charge::new(LOGIN, key(user), 1).unwrap())
            .and(Charge::any_left(BAN, key(user)).unwrap())
            .unwrap();
        assert!(!limiters[1].check_all(check).await.unwrap().is_allowed());
    }
    clock.advance(Duration::from_millis(100));
    assert_eq!(banned_for(&layers[0], "ada").await, Some(TIME));
    clock.advance(Duration::from_millis(400));
    // Redis is asked to ban, and not whether the limit refuses. It has banned the one already.
    for (user, left) in [("ada", TIME - Duration::from_millis(400)), ("bob", TIME)] {
        let calls = server.script_calls();
        assert_eq!(
            (
                banned_for(&layers[1], user).await,
                server.script_calls() - calls
            ),
            (Some(left), 1)
        );
        // Nor again, since the process remembers the ban.
        assert_eq!(
            (
                banned_for(&layers[1], user).await,
                server.script_calls() - calls
            ),
            (Some(left), 1)
        );
    }
    clock.advance(seconds(10));
    for (user, left) in [
        ("ada", TIME - Duration::from_millis(10_400)),
        ("bob", TIME - seconds(10)),
    ] {
        for layer in &layers {
            assert_eq!(banned_for(layer, user).await, Some(left));
        }
    }
}

/// Its key in Redis lives as long as the longest ban.
#[tokio::test]
async fn a_ban_leaves_redis_when_it_has_ended() {
    let server = RedisServer::start();
    let limiter = Limiter::new(server.store().build().unwrap()).deadline(TEST_TIMEOUT);
    let bans = Limit::per("login.ban", 1, seconds(5));
    let layer = RateLimitLayer::new(limiter).limit(LOGIN.by(by_user()).ban(bans, seconds(3)));
    use_up(&layer, "ada").await;
    assert!(banned_for(&layer, "ada").await.is_some());
    let key = server
        .keys()
        .into_iter()
        .find(|key| key.contains("login.ban"))
        .unwrap();
    let left: u64 = redis::cmd("PTTL")
        .arg(key)
        .query(&mut server.connect())
        .unwrap();
    assert!(left <= 65_000, "{left}");
}

/// Units on their way back are no sign of abuse.
#[tokio::test]
async fn reserved_units_and_places_do_not_ban() {
    let store = MemoryStore::new();
    let limiter = Limiter::new(store.clone());
    let layer = RateLimitLayer::new(store.clone()).limit(login().settle(|_| 1));
    let reserved = limiter
        .reserve(&LOGIN, key("ada"), 3, seconds(30))
        .await
        .unwrap()
        .unwrap();
    let refused = send(&layer, "ada", 200).await;
    assert!(
        matches!(refused.extensions().get(), Some(Rejection::Limited(_))),
        "{refused:?}"
    );
    reserved.settle(0).await.unwrap();
    assert_eq!(send(&layer, "ada", 200).await.status(), 200);

    let streams = Limit::concurrent("streams", 1).by(by_user()).ban(BAN, TIME);
    let error = RateLimitLayer::new(store).limits([streams]).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("`heed_upstream` on a limit of a window"),
        "{error}"
    );
}

/// Another limit that refuses bans nobody.
#[tokio::test]
async fn a_limit_bans_by_its_own_refusals() {
    let other = Limit::per_minute("other", 1).by(by_user());
    let layer = RateLimitLayer::new(MemoryStore::new())
        .limit(login())
        .limit(other);
    for expected in [200, 429, 429, 429, 429] {
        let response = send(&layer, "ada", 200).await;
        assert_eq!(response.status(), expected);
        assert!(!matches!(
            response.extensions().get(),
            Some(Rejection::Banned(_))
        ));
    }
}

/// Two limits of one key may have one ban.
#[tokio::test]
async fn limits_share_a_ban() {
    let failures = Limit::per_hour("failures", 2).by(by_user());
    let failures = failures.count_afterwards(|exchange| u64::from(exchange.response.status == 401));
    let failures = failures.ban(BAN, TIME);
    let layer = RateLimitLayer::new(MemoryStore::new())
        .limit(login())
        .limit(failures);
    for (user, answers) in [("ada", &[200, 200, 200, 0][..]), ("bob", &[401, 401])] {
        for answer in answers {
            let _ = send(&layer, user, (*answer).max(200)).await;
        }
        assert!(banned_for(&layer, user).await.is_some(), "{user}");
    }
}

/// While the store is gone, a process bans by itself, however small its share of a limit is.
#[tokio::test]
async fn a_process_bans_in_the_place_of_the_store() {
    let limit = || Limit::per_minute("login", 24).by(by_user()).ban(BAN, TIME);
    let layer = RateLimitLayer::new(failing()).limit(limit());
    let local = layer.clone().fail_local(Share::one_of(8));
    use_up(&local, "ada").await;
    for _ in 0..2 {
        let left = banned_for(&local, "ada").await.unwrap();
        assert!(left <= TIME && left > TIME - TEST_TIMEOUT, "{left:?}");
    }
    for (layer, status) in [(layer.clone(), 200), (layer.fail_closed(), 503)] {
        for _ in 0..30 {
            assert_eq!(send(&layer, "ada", 200).await.status(), status);
        }
    }
}

/// A store that takes no ban.
struct WithoutBans(MemoryStore);

impl Store for WithoutBans {
    fn decide(&self, check: Check) -> StoreFuture<Decision> {
        if check.id().is_some() {
            let error = StoreError::new("deciding", StoreErrorKind::Unreachable, "gone");
            return Box::pin(ready(Err(error)));
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

#[tokio::test]
async fn a_ban_that_cannot_begin_is_logged_and_the_limit_refuses() {
    let log = Log::start();
    let layer = RateLimitLayer::new(WithoutBans(MemoryStore::new()))
        .named("api")
        .limit(login());
    use_up(&layer, "ada").await;
    let refused = send(&layer, "ada", 200).await;
    assert!(
        matches!(refused.extensions().get(), Some(Rejection::Limited(_))),
        "{refused:?}"
    );
    assert_eq!(figures(refused.headers())[..2], [Some("3"), Some("0")]);
    assert!(
        log.text().contains("a ban could not begin"),
        "{}",
        log.text()
    );
}

#[cfg(feature = "grpc")]
#[tokio::test]
async fn a_ban_has_a_status_of_grpc() {
    let limiter = Limiter::new(MemoryStore::new());
    limiter.block(&BAN, "ada", TIME).await.unwrap();
    let refusal = limiter.check(&BAN, "ada", 1).await.unwrap();
    let status = tonic::Status::from(Rejection::Banned(refusal));
    assert_eq!(status.code(), tonic::Code::ResourceExhausted);
    assert_ne!(
        status.metadata().get("grpc-retry-pushback-ms").unwrap(),
        "-1"
    );
}

#[test]
fn a_ban_has_a_name_of_its_own_and_its_own_kind_of_limit() {
    let layer = || RateLimitLayer::new(MemoryStore::new());
    let named = |name: &str| Limit::new(name.to_owned(), 1, Limit::MAX_WINDOW).unwrap();
    let by = |name: &'static str| Limit::per_minute(name, 5).by(by_user());
    for limits in [
        vec![by("login").ban(named("login"), TIME)],
        vec![by("login").ban(named("burst"), TIME), by("burst")],
        vec![by("burst"), by("login").ban(named("burst"), TIME)],
    ] {
        let error = layer().limits(limits).unwrap_err();
        assert!(
            error
                .to_string()
                .starts_with("two limits of one layer are named"),
            "{error}"
        );
    }
    assert!(
        layer()
            .limits([by("a").ban(BAN, TIME), by("b").ban(BAN, TIME)])
            .is_ok()
    );
    for other in [
        Limit::per_hour("login.ban", 2),
        Limit::per_hour("login.ban", 1).with_algorithm(Algorithm::FIXED_WINDOW),
        Limit::concurrent("login.ban", 1),
    ] {
        let made = std::panic::catch_unwind(|| by("login").ban(other, TIME));
        assert!(made.is_err());
    }
    // It would be shortened without a word.
    let made =
        std::panic::catch_unwind(|| by("login").ban(Limit::per_minute("login.ban", 1), TIME));
    let error = made.unwrap_err().downcast::<String>().unwrap();
    assert!(
        error.contains("no ban is longer than the window of its limit, 60s"),
        "{error}"
    );
}

/// Each of the limits may be the first to have used up its units, or both at once.
async fn of_two_bans_that_begin_at_once_the_longer_holds<S: Store>(fixture: Fixture<S>) {
    let times = [seconds(60), TIME];
    for (user, order) in [("ada", [0, 1]), ("bob", [1, 0])] {
        let limits = order.map(|place: usize| {
            let limit = Limit::new(format!("limit-{place}"), 3, seconds(60)).unwrap();
            limit.by(by_user()).ban(BAN, times[place])
        });
        let layer = RateLimitLayer::new(fixture.limiter.clone())
            .limits(limits)
            .unwrap();
        use_up(&layer, user).await;
        assert_eq!(banned_for(&layer, user).await, Some(TIME), "{user}");
        assert_eq!(banned_for(&layer, user).await, Some(TIME), "{user}");
        fixture.clock.advance(seconds(61));
        assert_eq!(
            banned_for(&layer, user).await,
            Some(TIME - seconds(61)),
            "{user}"
        );
    }
}

/// A limit on trial changes nothing for the others, whose ban it shares.
async fn a_shared_ban_is_in_the_shadow_only_for_limits_in_the_shadow<S: Store>(
    fixture: Fixture<S>,
) {
    let trial = || {
        Limit::per_minute("trial", 1)
            .by(by_user())
            .ban(BAN, TIME)
            .in_shadow()
    };
    for (user, limits) in [("ada", [login(), trial()]), ("bob", [trial(), login()])] {
        let layer = RateLimitLayer::new(fixture.limiter.clone())
            .limits(limits)
            .unwrap();
        use_up(&layer, user).await;
        assert_eq!(banned_for(&layer, user).await, Some(TIME), "{user}");
        fixture.clock.advance(seconds(61));
        assert_eq!(
            banned_for(&layer, user).await,
            Some(TIME - seconds(61)),
            "{user}"
        );
    }
}

async fn a_shared_ban_is_hidden_if_it_is_hidden_by_either<S: Store>(fixture: Fixture<S>) {
    let load = || {
        Limit::per_minute("load", 100)
            .by(by_user())
            .ban(BAN, TIME)
            .hidden()
    };
    for (user, limits) in [("ada", [login(), load()]), ("bob", [load(), login()])] {
        let layer = RateLimitLayer::new(fixture.limiter.clone())
            .limits(limits)
            .unwrap();
        use_up(&layer, user).await;
        for wait in [0, 61] {
            fixture.clock.advance(seconds(wait));
            let banned = send(&layer, user, 200).await;
            assert!(!json(banned).await.contains("login.ban"), "{user}");
        }
    }
}

/// All requests of the key are refused, also those for which no limit is chosen.
async fn a_banned_key_is_refused_where_it_has_no_limit<S: Store>(fixture: Fixture<S>) {
    let plan = |parts: &Parts| (parts.headers["x-answer"] == "200").then_some(LOGIN);
    let limit = KeyedLimit::chosen(by_user(), plan).ban(BAN, TIME);
    let layer = RateLimitLayer::new(fixture.limiter.clone()).limit(limit);
    assert_eq!(send(&layer, "ada", 204).await.status(), 204);
    use_up(&layer, "ada").await;
    assert_eq!(banned_for(&layer, "ada").await, Some(TIME));
    fixture.clock.advance(seconds(5));
    for _ in 0..2 {
        let response = send(&layer, "ada", 204).await;
        assert!(
            matches!(response.extensions().get(), Some(Rejection::Banned(_))),
            "{response:?}"
        );
    }
}

/// Others wait before it, or what is in the way may be given back. So nobody is banned.
#[tokio::test(start_paused = true)]
async fn a_place_in_line_is_no_ban() {
    for (limit, used, wants) in [(login(), 1, 3), (login().settle(|_| 1), 3, 1)] {
        let limiter = Limiter::new(MemoryStore::new());
        let layer = |wait| {
            let cost = |parts: &Parts| parts.headers["x-cost"].to_str().unwrap().parse().unwrap();
            RateLimitLayer::new(limiter.clone())
                .limit(limit.clone().cost(cost))
                .wait_up_to(wait)
        };
        let send = async |wait, cost: u64| {
            let mut request = request("ada", 200);
            request.headers_mut().insert("x-cost", cost.into());
            let slow = service_fn(|_: Request<Body>| async {
                tokio::time::sleep(seconds(30)).await;
                Ok::<_, Infallible>(Response::new(Body::empty()))
            });
            layer(wait).layer(slow).oneshot(request).await.unwrap()
        };
        let behind = async {
            tokio::time::sleep(seconds(1)).await;
            let refused = send(Duration::ZERO, 1).await;
            assert!(
                matches!(refused.extensions().get(), Some(Rejection::Limited(_))),
                "{refused:?}"
            );
        };
        let first = async {
            tokio::time::sleep(Duration::from_millis(500)).await;
            assert_eq!(send(seconds(100), wants).await.status(), 200);
        };
        let before = async { assert_eq!(send(Duration::ZERO, used).await.status(), 200) };
        tokio::join!(before, first, behind);
        assert_eq!(
            limiter.peek(&BAN, key("ada")).await.unwrap().binding().used,
            0
        );
    }
}

/// The response that leaves nothing of the share bans, and not only the next refusal.
#[tokio::test(start_paused = true)]
async fn a_process_bans_with_a_response_in_the_place_of_the_store() {
    let cost = |exchange: &Exchange<'_>| u64::from(exchange.response.status == 401);
    for limit in [login().settle(cost), login().count_afterwards(cost)] {
        let layer = RateLimitLayer::new(failing())
            .limit(limit)
            .fail_local(Share::one_of(1));
        for _ in 0..3 {
            assert_eq!(send(&layer, "ada", 401).await.status(), 401);
        }
        tokio::time::advance(seconds(61)).await;
        assert_eq!(banned_for(&layer, "ada").await, Some(TIME - seconds(61)));
    }
}

#[tokio::test(start_paused = true)]
async fn a_reset_lifts_a_ban_that_this_process_has_begun_by_itself() {
    let store = failing();
    let limiter = Limiter::new(store.clone())
        .breaker(Breaker::OFF)
        .fail_local(Share::one_of(1));
    let layer = RateLimitLayer::new(limiter.clone()).limit(login());
    use_up(&layer, "ada").await;
    assert_eq!(banned_for(&layer, "ada").await, Some(TIME));
    store.set(Fault::None);
    limiter.reset(&LOGIN, key("ada")).await.unwrap();
    limiter.reset(&BAN, key("ada")).await.unwrap();
    store.set(Fault::Fails);
    use_up(&layer, "ada").await;
}

/// Its shared counts would ban all new clients, for one and a half times the longest ban.
#[tokio::test]
async fn a_full_memory_takes_no_ban() {
    let (clock, log) = (ManualClock::new(), Log::start());
    let store = MemoryStore::new().clock(&clock).capacity(1_000);
    let layer = RateLimitLayer::new(store).limit(
        Limit::per_second("calls", 3)
            .by(by_user())
            .ban(BAN, seconds(10)),
    );
    for client in 0..4_000 {
        for _ in 0..4 {
            let _ = send(&layer, &format!("client-{client}"), 200).await;
        }
    }
    // The limit itself refuses.
    let refused = send(&layer, "client-3999", 200).await;
    assert!(
        matches!(refused.extensions().get(), Some(Rejection::Limited(_))),
        "{refused:?}"
    );
    assert!(log.text().contains("the store is full"), "{}", log.text());
    for client in 0..100 {
        assert_eq!(banned_for(&layer, &format!("other-{client}")).await, None);
    }
    clock.advance(seconds(11));
    // With room again, it bans.
    use_up(&layer, "client-3999").await;
    assert_eq!(banned_for(&layer, "client-3999").await, Some(seconds(10)));
}

/// Only by hand.
#[tokio::test]
async fn a_limit_with_a_ban_of_no_time_begins_none() {
    let limiter = Limiter::new(MemoryStore::new());
    let layer =
        RateLimitLayer::new(limiter.clone()).limit(LOGIN.by(by_user()).ban(BAN, Duration::ZERO));
    use_up(&layer, "ada").await;
    for _ in 0..2 {
        let refused = send(&layer, "ada", 200).await;
        assert!(
            matches!(refused.extensions().get(), Some(Rejection::Limited(_))),
            "{refused:?}"
        );
    }
    limiter.block(&BAN, key("bob"), TIME).await.unwrap();
    assert!(banned_for(&layer, "bob").await.is_some());
    // A ban of another window is another one.
    let layer = RateLimitLayer::new(limiter).limit(
        LOGIN
            .by(by_user())
            .ban(Limit::per_day("login.ban", 1), TIME),
    );
    assert_eq!(banned_for(&layer, "bob").await, None);
}
