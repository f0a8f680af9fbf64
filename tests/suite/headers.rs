//! What a client is told of limits, and what it is not.

use std::{
    convert::Infallible,
    future::ready,
    time::{Duration, UNIX_EPOCH},
};

use axum::{
    body::Body,
    response::{IntoResponse, Response},
};
use http::{HeaderMap, Request, header::RETRY_AFTER};
use tower::{Layer, ServiceExt, service_fn, util::BoxCloneService};
use tower_sliding_window::{
    Charge, Check, Decision, DenyCache, HeaderSets, KeyedLimit, Limit, Limiter, ManualClock, MemoryStore, NeverFits,
    RateLimitLayer, RedisStore, Rejection, ResetFormat, ShadowRefusals, Share, Store,
};

use crate::support::{
    PATIENCE,
    redis_server::RedisServer,
    requests::{anyone, figures, hello, json, request},
    stores::Failing,
};

type App = BoxCloneService<Request<Body>, Response<Body>, Infallible>;

/// On the load of the whole service.
const TOTAL: Limit = Limit::per_hour("total", 1);
const MINE: Limit = Limit::per_minute("mine", 5);
const FORMATS: [ResetFormat; 2] = [ResetFormat::DeltaSeconds, ResetFormat::EpochSeconds];
/// The body of a refusal by a hidden limit with an hour to wait.
const NAMELESS: &str = r#"{"error":"rate limit exceeded","retry_after":3600}"#;

fn handler() -> App {
    BoxCloneService::new(service_fn(hello))
}

fn layer(limit: KeyedLimit) -> RateLimitLayer<MemoryStore> {
    RateLimitLayer::new(MemoryStore::new()).limit(limit)
}

fn around<S: Store<Decide: Send, Settle: Send>>(layer: &RateLimitLayer<S>, app: App) -> App {
    BoxCloneService::new(layer.layer(app))
}

async fn ask(app: &App) -> Response {
    app.clone().oneshot(request()).await.unwrap()
}

/// A limit that is chosen for every request.
fn chosen(limit: Limit) -> KeyedLimit {
    KeyedLimit::chosen(anyone, move |_| ready(Ok::<_, Infallible>(limit.clone())))
}

/// One request is admitted and the next one refused, and neither tells of the limit.
async fn tells_nothing(app: &App) {
    let admitted = ask(app).await;
    assert_eq!((admitted.status().as_u16(), figures(admitted.headers())), (200, [None; 4]));
    let refused = ask(app).await;
    let Some(Rejection::Limited(decision)) = refused.extensions().get() else { panic!("{refused:?}") };
    assert!(decision.binding().is_hidden() && decision.visible().is_none());
    assert_eq!((refused.status().as_u16(), figures(refused.headers())), (429, [None, None, None, Some("3600")]));
    assert_eq!(json(refused).await, NAMELESS);
}

#[tokio::test]
async fn a_hidden_limit_tells_nobody_of_the_load() {
    for status in [200, 401, 404] {
        let app = layer(TOTAL.by(anyone).hidden()).layer(service_fn(move |_: Request<Body>| {
            ready(Ok::<_, Infallible>(Response::builder().status(status).body(Body::empty()).unwrap()))
        }));
        let response = app.oneshot(request()).await.unwrap();
        assert_eq!((response.status().as_u16(), figures(response.headers())), (status, [None; 4]));
    }
    tells_nothing(&around(&layer(TOTAL.by(anyone).hidden()), handler())).await;
}

/// The server still finds it in the decision.
#[tokio::test]
async fn the_figures_are_those_of_the_limits_that_clients_may_see() {
    let total = Limit::per_hour("total", 2);
    let service = service_fn(|request: Request<Body>| {
        let decision: &Decision = request.extensions().get().unwrap();
        let seen = format!("{} {}", decision.limit().name(), decision.used());
        ready(Ok::<_, Infallible>(Response::new(Body::from(seen))))
    });
    for limits in [[total.clone().by(anyone).hidden(), MINE.by(anyone)], [MINE.by(anyone), total.by(anyone).hidden()]] {
        let app = RateLimitLayer::new(MemoryStore::new()).limits(limits).unwrap().layer(service);
        for (remaining, body) in [("4", "total 1"), ("3", "total 2")] {
            let response = app.clone().oneshot(request()).await.unwrap();
            assert_eq!(figures(response.headers()), [Some("5"), Some(remaining), Some("60"), None]);
            assert_eq!(json(response).await, body);
        }
        // With three left, that would be no reason.
        let refused = app.clone().oneshot(request()).await.unwrap();
        assert_eq!((refused.status().as_u16(), figures(refused.headers())), (429, [None, None, None, Some("3600")]));
        assert_eq!(json(refused).await, NAMELESS);
    }
}

#[tokio::test]
async fn a_limit_that_clients_may_see_speaks_for_its_own_refusals() {
    let few = Limit::per_minute("few", 1);
    for (hidden, wait) in [(Limit::per_hour("total", 5), "60"), (TOTAL, "3600")] {
        let layer = layer(hidden.by(anyone).hidden()).limit(few.clone().by(anyone));
        let app = around(&layer, handler());
        ask(&app).await;
        let refused = ask(&app).await;
        assert_eq!(figures(refused.headers()), [Some("1"), Some("0"), Some("60"), Some(wait)]);
        let expected = format!(r#"{{"error":"rate limit exceeded","limit":"few","retry_after":{wait}}}"#);
        assert_eq!(json(refused).await, expected);
    }
}

#[tokio::test]
async fn a_cost_above_a_hidden_limit_tells_no_number() {
    let dear = |limit: KeyedLimit| limit.cost(|_| 2).hidden();
    let is_one = [chosen(MINE).cost(|_| 2), chosen(Limit::per_minute("mine", 1)).hidden()];
    for layer in [
        layer(dear(TOTAL.by(anyone))),
        layer(dear(chosen(TOTAL))),
        RateLimitLayer::new(MemoryStore::new()).limits(is_one).unwrap(),
    ] {
        let response = ask(&around(&layer, handler())).await;
        assert_eq!((response.status().as_u16(), figures(response.headers())), (429, [None; 4]));
        assert!(matches!(response.extensions().get(), Some(Rejection::NeverFits(error)) if error.is_hidden()));
        assert_eq!(json(response).await, r#"{"error":"request costs more than the limit"}"#);
    }
    let error = Charge::new(TOTAL, "all", 2).map_err(NeverFits::hidden).unwrap_err();
    assert_eq!(
        json(Rejection::NeverFits(error).into_response()).await,
        r#"{"error":"request costs more than the limit"}"#
    );
}

/// However it is counted and charged.
#[tokio::test]
async fn what_is_hidden_stays_hidden() {
    // Two that are one for a request.
    let merged = |hidden: KeyedLimit, seen: KeyedLimit| layer(hidden.hidden()).limit(seen);
    let loose = Limit::per_hour("total", 9);
    for layer in [
        layer(TOTAL.by(anyone).split(1).hidden()),
        layer(chosen(TOTAL).hidden()),
        layer(chosen(TOTAL).split(4).hidden()),
        merged(TOTAL.by(anyone), chosen(loose.clone())),
        merged(chosen(loose.clone()), chosen(TOTAL)),
        layer(TOTAL.by(anyone).hidden().settle(|outcome| outcome.cost())),
        layer(TOTAL.by(anyone).hidden()).wait_up_to(Duration::from_millis(1)),
        // Nothing is chosen for the second.
        layer(TOTAL.by(anyone).hidden()).limit(chosen(MINE).hidden()),
    ] {
        tells_nothing(&around(&layer, handler())).await;
    }
    // Of one that is known to refuse before another is chosen, nobody knows yet that the two are one.
    let app = around(&merged(chosen(loose), TOTAL.by(anyone)), handler());
    assert_eq!(figures(ask(&app).await.headers()), [None; 4]);
    assert_eq!(figures(ask(&app).await.headers())[..2], [Some("1"), Some("0")]);

    let share = Limit::per_hour("total", 4).by(anyone).hidden();
    tells_nothing(&around(&RateLimitLayer::new(Failing).limit(share).fail_local(Share::one_of(4)), handler())).await;
}

/// What is remembered of it serves another layer as well, whose clients may see the limit.
#[tokio::test]
async fn a_hidden_limit_on_redis_is_hidden_out_of_the_deny_cache_as_well() {
    let server = RedisServer::start();
    for deny_cache in [DenyCache::off(), DenyCache::new()] {
        let store = RedisStore::builder(&server.url()).clock(&ManualClock::new()).build().unwrap();
        let layer = RateLimitLayer::new(store.clone()).deadline(PATIENCE).deny_cache(deny_cache);
        let hidden = layer.clone().limit(TOTAL.by(anyone).hidden());
        tells_nothing(&around(&hidden, handler())).await;
        server.pause();
        let asked = around(&hidden.clone().deadline(Duration::from_millis(50)).fail_closed(), handler());
        let refused = ask(&asked).await;
        server.resume();
        let (status, body) = if deny_cache == DenyCache::off() {
            (503, r#"{"error":"rate limiting is unavailable"}"#)
        } else {
            (429, NAMELESS)
        };
        assert_eq!((refused.status().as_u16(), &figures(refused.headers())[..3]), (status, &[None; 3][..]));
        assert_eq!(json(refused).await, body);

        let refused = ask(&around(&layer.limit(TOTAL.by(anyone)), handler())).await;
        assert_eq!(figures(refused.headers())[..2], [Some("1"), Some("0")]);
        assert_eq!(figures(ask(&around(&hidden, handler())).await.headers())[..3], [None; 3]);
        server.run::<()>("FLUSHALL");
    }
}

#[tokio::test]
async fn a_hidden_limit_in_the_shadow_is_in_no_header() {
    let shadow = |name, cost| Limit::per_minute(name, 1).by(anyone).cost(move |_| cost).in_shadow();
    let hidden = || layer(MINE.by(anyone)).limit(shadow("tried", 1).hidden()).limit(shadow("dear", 2).hidden());
    for (layer, expected) in [(hidden(), None), (hidden().limit(shadow("seen", 1)), Some("seen"))] {
        let layer = layer.shadow_header("x-ratelimit-shadow");
        let app = around(&layer, handler());
        ask(&app).await;
        let response = ask(&app).await;
        let header = response.headers().get("x-ratelimit-shadow").map(|names| names.to_str().unwrap());
        assert_eq!(header, expected);
        let refusals: &ShadowRefusals = response.extensions().get().unwrap();
        let names: Vec<_> = refusals.names().collect();
        assert!(names.contains(&"tried") && names.contains(&"dear"), "{names:?}");
    }
}

#[tokio::test]
async fn a_handler_that_asks_itself_hides_as_a_layer_does() {
    let check = |limit: Limit| Check::new(Charge::new(limit, "all", 1).unwrap().hidden());
    let limiter = Limiter::new(MemoryStore::new());
    let both = || check(TOTAL).and(Charge::new(MINE, "ada", 1).unwrap()).unwrap();
    let mut headers = HeaderMap::new();
    limiter.check_all(check(Limit::per_hour("other", 1))).await.unwrap().write_headers(FORMATS[0], &mut headers);
    assert!(headers.is_empty());
    limiter.check_all(both()).await.unwrap().write_headers(FORMATS[0], &mut headers);
    assert_eq!(figures(&headers), [Some("5"), Some("4"), Some("60"), None]);

    let refused = limiter.check_all(both()).await.unwrap();
    headers.clear();
    refused.write_headers(FORMATS[0], &mut headers);
    assert!(headers.is_empty());
    assert_eq!((refused.limit(), refused.remaining()), (&TOTAL, 0), "the server sees it");
    let response = Rejection::Limited(refused).into_response();
    assert_eq!(figures(response.headers()), [None, None, None, Some("3600")]);
    assert_eq!(json(response).await, NAMELESS);
}

#[tokio::test]
async fn a_layer_without_header_sets_sends_none_but_says_when_to_come_back() {
    let silent = layer(TOTAL.by(anyone)).headers(HeaderSets::none());
    let app = around(&silent, handler());
    assert_eq!(figures(ask(&app).await.headers()), [None; 4]);
    let refused = ask(&app).await;
    assert_eq!(figures(refused.headers()), [None, None, None, Some("3600")]);
    assert_eq!(json(refused).await, r#"{"error":"rate limit exceeded","limit":"total","retry_after":3600}"#);

    let down = RateLimitLayer::new(Failing).limit(TOTAL.by(anyone)).headers(HeaderSets::none()).fail_closed();
    let response = ask(&around(&down, handler())).await;
    assert!(response.status() == 503 && response.headers().contains_key(RETRY_AFTER));

    // Unless the responder takes it out.
    let bare = silent.on_rejection(|_, mut head| {
        head.headers_mut().remove(RETRY_AFTER);
        head.map(|()| Body::empty())
    });
    assert_eq!(figures(bare.layer(handler()).oneshot(request()).await.unwrap().headers()), [None; 4]);

    assert_eq!(HeaderSets::default(), HeaderSets::x_rate_limit());
    let default = layer(MINE.by(anyone)).headers(HeaderSets::none()).headers(HeaderSets::x_rate_limit());
    assert_eq!(figures(ask(&around(&default, handler())).await.headers())[1], Some("4"));
}

/// The other one is tighter, and refuses the second request.
#[tokio::test]
async fn of_stacked_layers_only_those_that_clients_may_see_are_shown() {
    let hidden = || layer(TOTAL.by(anyone).hidden());
    let silent = || layer(TOTAL.by(anyone)).headers(HeaderSets::none());
    let seen = || layer(MINE.by(anyone));
    for app in [
        around(&hidden(), around(&seen(), handler())),
        around(&seen(), around(&hidden(), handler())),
        around(&silent(), around(&seen(), handler())),
        around(&seen(), around(&silent(), handler())),
    ] {
        assert_eq!(figures(ask(&app).await.headers()), [Some("5"), Some("4"), Some("60"), None]);
        let refused = ask(&app).await;
        assert_eq!((refused.status().as_u16(), figures(refused.headers())), (429, [None, None, None, Some("3600")]));
    }
}

/// Time stands still at a moment that is no whole second.
struct Stacked {
    clock: ManualClock,
    store: MemoryStore,
}

impl Stacked {
    fn new() -> Self {
        let clock = ManualClock::new();
        clock.advance(Duration::from_micros(1));
        let store = MemoryStore::builder().clock(&clock).build();
        Self { clock, store }
    }

    fn layer(&self, limit: Limit, format: ResetFormat) -> RateLimitLayer<MemoryStore> {
        RateLimitLayer::new(self.store.clone()).limit(limit.by(anyone)).reset_format(format)
    }

    /// The reset of an untouched window, as this format has it.
    fn reset(&self, limit: &Limit, format: ResetFormat) -> String {
        let now =
            if format == FORMATS[1] { self.clock.now().duration_since(UNIX_EPOCH).unwrap() } else { Duration::ZERO };
        (now + limit.window()).as_micros().div_ceil(1_000_000).to_string()
    }
}

/// Whichever layer speaks, and whichever refuses.
#[tokio::test]
async fn stacked_layers_write_the_reset_in_the_format_of_the_outermost() {
    let mut wrong = Vec::new();
    let pairs = FORMATS.map(|outer| FORMATS.map(|inner| vec![outer, inner])).concat();
    let triples = pairs.iter().flat_map(|pair| FORMATS.map(|inner| [&pair[..], &[inner]].concat()));
    for formats in triples.chain(pairs.clone()) {
        for tight in 0..formats.len() {
            let test = Stacked::new();
            let units = |place| if place == tight { 1 } else { 5 };
            let limits = [("a", 60), ("b", 3_600), ("c", 86_400)]
                .into_iter()
                .enumerate()
                .map(|(place, (name, window))| Limit::new(name, units(place), Duration::from_secs(window)).unwrap());
            let limits: Vec<_> = limits.take(formats.len()).collect();
            let app = formats
                .iter()
                .zip(&limits)
                .rev()
                .fold(handler(), |app, (format, limit)| around(&test.layer(limit.clone(), *format), app));
            let expected = test.reset(&limits[tight], formats[0]);
            for status in [200, 429] {
                let response = ask(&app).await;
                let [limit, remaining, reset, _] = figures(response.headers());
                assert_eq!((response.status().as_u16(), limit, remaining), (status, Some("1"), Some("0")));
                if reset != Some(&*expected) {
                    wrong.push(format!("{formats:?}: {reset:?} on {status} by number {tight}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Its format holds whether it has figures of its own for a request or not.
#[tokio::test]
async fn a_layer_without_figures_still_says_how_the_reset_is_written() {
    for [outer, inner] in [[0, 1], [1, 0]].map(|places| places.map(|place: usize| FORMATS[place])) {
        let test = Stacked::new();
        let layer = |limit| RateLimitLayer::new(test.store.clone()).limit(limit).reset_format(outer);
        let app = around(&test.layer(Limit::per_minute("inner", 9), inner), handler());
        let undecided = RateLimitLayer::new(Failing).limit(TOTAL.by(anyone)).reset_format(outer);
        let unlimited = KeyedLimit::chosen(anyone, |_| ready(Ok::<Option<Limit>, Infallible>(None)));
        for app in [
            around(&layer(TOTAL.by(anyone).hidden()), app.clone()),
            around(&layer(TOTAL.by(anyone)).skip(|_| true), app.clone()),
            around(&layer(unlimited), app.clone()),
            around(&undecided, app.clone()),
        ] {
            assert_eq!(figures(ask(&app).await.headers())[2], Some(&*test.reset(&MINE, outer)));
        }
        // One that sends none has no say.
        for app in [
            around(&layer(MINE.by(anyone)).headers(HeaderSets::none()), app.clone()),
            around(&layer(Limit::per_minute("calls", 9).by(anyone)).heed_upstream(), app.clone()),
        ] {
            assert_eq!(figures(ask(&app).await.headers())[2], Some(&*test.reset(&MINE, inner)));
        }
    }
}

#[tokio::test]
async fn a_handlers_rejection_has_the_reset_of_the_layer_around_it() {
    for format in FORMATS {
        let test = Stacked::new();
        let limiter = Limiter::new(test.store.clone());
        let handler = BoxCloneService::new(service_fn(move |_: Request<Body>| {
            let limiter = limiter.clone();
            async move {
                let decision = limiter.check(&TOTAL, "all", 1).await.unwrap();
                if decision.is_allowed() {
                    let mut response = Response::new(Body::empty());
                    decision.write_headers(format, response.headers_mut());
                    return Ok(response);
                }
                Ok::<_, Infallible>(Rejection::Limited(decision).into_response())
            }
        }));
        let app = around(&test.layer(MINE, format), handler);
        for status in [200, 429] {
            let response = ask(&app).await;
            let [limit, remaining, reset, _] = figures(response.headers());
            assert_eq!((response.status().as_u16(), limit, remaining), (status, Some("1"), Some("0")));
            assert_eq!(reset, Some(&*test.reset(&TOTAL, format)));
        }
    }
}

/// It may mean something else.
#[tokio::test]
async fn a_reset_that_a_responder_has_written_stays() {
    for own in [Some("soon"), Some("7"), None] {
        for [outer, inner] in [[0, 1], [1, 0]].map(|places| places.map(|place: usize| FORMATS[place])) {
            let test = Stacked::new();
            let inner = test.layer(TOTAL, inner).on_rejection(move |_, mut head| {
                head.headers_mut().remove("x-ratelimit-reset");
                own.map(|own| head.headers_mut().insert("x-ratelimit-reset", own.parse().unwrap()));
                head.map(|()| Body::empty())
            });
            let app = around(&test.layer(MINE, outer), BoxCloneService::new(inner.layer(handler())));
            ask(&app).await;
            assert_eq!(figures(ask(&app).await.headers())[2], own);
        }
    }
}
