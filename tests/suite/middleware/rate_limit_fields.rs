//! `RateLimit-Policy` and `RateLimit`, read by a parser of Structured Fields.

use std::{convert::Infallible, future::ready, time::Duration};

use axum::{
    body::Body,
    response::{IntoResponse, Response},
};
use http::{HeaderMap, Request};
use sfv::{BareItem, ListEntry, Parser};
use tower::{ServiceExt, service_fn, util::BoxCloneService};
use tower_sliding_window::{
    Decision, HeaderSets, KeyedLimit, Limit, MemoryStore, RateLimitLayer, Rejection, Store,
    decision::LimitStatus, store::ManualClock,
};

use crate::support::{
    ALGORITHMS, Fixture, Numbers, memory, ms, redis,
    requests::{anyone, figures, request},
    seconds,
    services::{App, around, handler},
};

/// An item of one of the fields: its name and its parameters.
#[derive(Clone, Debug, Default, PartialEq)]
struct Item {
    name: String,
    q: Option<u64>,
    w: Option<u64>,
    qu: Option<String>,
    r: Option<u64>,
    t: Option<u64>,
    pk: Option<Vec<u8>>,
}

/// The items of a field; none if it is not there.
fn items(headers: &HeaderMap, field: &str) -> Vec<Item> {
    let lines: Vec<_> = headers
        .get_all(field)
        .iter()
        .map(|line| line.to_str().unwrap())
        .collect();
    assert!(lines.len() < 2, "{lines:?}");
    let Some(line) = lines.first() else {
        return Vec::new();
    };
    let list: sfv::List = Parser::new(line).parse().unwrap();
    list.into_iter()
        .map(|entry| {
            let ListEntry::Item(entry) = entry else {
                panic!("{entry:?}")
            };
            let BareItem::String(name) = &entry.bare_item else {
                panic!("{entry:?}")
            };
            let mut item = Item {
                name: name.as_str().to_owned(),
                ..Item::default()
            };
            for (key, value) in entry.params {
                let integer = |value: &BareItem| {
                    u64::try_from(i64::from(value.as_integer().unwrap())).unwrap()
                };
                match key.as_str() {
                    "q" => item.q = Some(integer(&value)),
                    "w" => item.w = Some(integer(&value)),
                    "r" => item.r = Some(integer(&value)),
                    "t" => item.t = Some(integer(&value)),
                    "qu" => item.qu = Some(value.as_string().unwrap().as_str().to_owned()),
                    "pk" => item.pk = Some(value.as_byte_sequence().unwrap().to_vec()),
                    other => panic!("{other}"),
                }
            }
            item
        })
        .collect()
}

/// Both fields as they were sent.
fn fields(headers: &HeaderMap) -> [Option<&str>; 2] {
    ["ratelimit-policy", "ratelimit"]
        .map(|name| headers.get(name).map(|value| value.to_str().unwrap()))
}

fn on<S: Store + Clone>(store: &S, limits: impl IntoIterator<Item = KeyedLimit>) -> RateLimitLayer {
    RateLimitLayer::new(store.clone())
        .limits(limits)
        .unwrap()
        .headers(HeaderSets::RATE_LIMIT)
}

async fn ask(app: &App) -> Response {
    app.clone().oneshot(request()).await.unwrap()
}

/// A store whose clock shows a whole second.
fn store() -> (MemoryStore, ManualClock) {
    let clock = ManualClock::new();
    (MemoryStore::new().clock(&clock), clock)
}

#[tokio::test]
async fn each_visible_limit_has_an_item_on_admissions_and_refusals() {
    let (store, clock) = store();
    let layer = on(
        &store,
        [
            Limit::per("burst", 2, ms(1_500)).by(anyone),
            Limit::per_hour("hidden", 50).by(anyone).hidden(),
            Limit::per_hour("hourly", 100).by(anyone),
            Limit::per_minute("tried", 1).by(anyone).in_shadow(),
            Limit::per("quick", 9, ms(999)).by(anyone),
        ],
    );
    let app = around(&layer, handler());
    let policy = r#""burst";q=2;w=2, "hourly";q=100;w=3600, "quick";q=9"#;
    for (wait, status, quotas) in [
        (
            0,
            200,
            r#""burst";r=1;t=2, "hourly";r=99;t=3600, "quick";r=8;t=1"#,
        ),
        (
            400,
            200,
            r#""burst";r=0;t=2, "hourly";r=98;t=3600, "quick";r=7;t=1"#,
        ),
        (
            400,
            429,
            r#""burst";r=0;t=1, "hourly";r=98;t=3600, "quick";r=7;t=1"#,
        ),
    ] {
        clock.advance(ms(wait));
        let response = ask(&app).await;
        assert_eq!(response.status(), status);
        assert_eq!(fields(response.headers()), [Some(policy), Some(quotas)]);
        assert_eq!(figures(response.headers())[..3], [None; 3]);
        items(response.headers(), "ratelimit");
    }
}

#[tokio::test]
async fn a_limit_with_all_units_left_has_no_time() {
    let app = around(
        &on(
            &MemoryStore::new(),
            [Limit::per_hour("units", 10).by(anyone)],
        )
        .cost(|_| 0),
        handler(),
    );
    let unused = Some(r#""units";r=10"#);
    assert_eq!(
        fields(ask(&app).await.headers()),
        [Some(r#""units";q=10;w=3600"#), unused]
    );
}

#[tokio::test]
async fn both_sets_and_no_set_can_be_chosen() {
    let layer = on(
        &MemoryStore::new(),
        [Limit::per_hour("units", 10).by(anyone)],
    );
    let app = around(&layer.clone().headers(HeaderSets::BOTH), handler());
    let response = ask(&app).await;
    assert_eq!(figures(response.headers())[1], Some("9"));
    assert_eq!(items(response.headers(), "ratelimit")[0].r, Some(9));
    for sets in [HeaderSets::NONE, HeaderSets::X_RATE_LIMIT] {
        assert_eq!(
            fields(
                ask(&around(&layer.clone().headers(sets), handler()))
                    .await
                    .headers()
            ),
            [None; 2]
        );
    }
}

#[tokio::test]
async fn limits_in_the_shadow_are_shown_if_there_are_no_others() {
    let app = around(
        &on(
            &MemoryStore::new(),
            [Limit::per_hour("tried", 1).by(anyone).in_shadow()],
        ),
        handler(),
    );
    for _ in 0..2 {
        let response = ask(&app).await;
        assert_eq!(response.status(), 200);
        assert_eq!(items(response.headers(), "ratelimit")[0].r, Some(0));
    }
}

#[tokio::test]
async fn a_refusal_by_hidden_limits_alone_has_no_fields() {
    let hidden = Limit::per_hour("hidden", 1).by(anyone).hidden();
    let app = around(
        &on(
            &MemoryStore::new(),
            [hidden, Limit::per_hour("seen", 9).by(anyone)],
        ),
        handler(),
    );
    assert_eq!(items(ask(&app).await.headers(), "ratelimit").len(), 1);
    let refused = ask(&app).await;
    assert_eq!(
        (refused.status().as_u16(), fields(refused.headers())),
        (429, [None; 2])
    );
}

#[tokio::test]
async fn a_response_without_a_decision_has_no_fields() {
    let never = on(
        &MemoryStore::new(),
        [Limit::per_hour("units", 1).by(anyone)],
    )
    .cost(|_| 2);
    let failing = RateLimitLayer::new(crate::support::stores::failing())
        .limit(Limit::per_hour("units", 1).by(anyone))
        .headers(HeaderSets::BOTH);
    for (app, status) in [
        (around(&never, handler()), 429),
        (around(&failing.clone().fail_closed(), handler()), 503),
        (around(&failing, handler()), 200),
    ] {
        let response = ask(&app).await;
        assert_eq!(
            (response.status().as_u16(), fields(response.headers())),
            (status, [None; 2])
        );
    }
}

#[tokio::test]
async fn units_above_the_largest_integer_are_shown_as_that() {
    let app = around(
        &on(
            &MemoryStore::new(),
            [
                Limit::per("millis", Limit::MAX_UNITS, Limit::MIN_WINDOW).by(anyone),
                Limit::per("year", 1_000_000_000_000_000, Limit::MAX_WINDOW).by(anyone),
            ],
        ),
        handler(),
    );
    let response = ask(&app).await;
    let most = 999_999_999_999_999;
    let expected = [("millis", None), ("year", Some(31_536_000))];
    for (item, (name, w)) in items(response.headers(), "ratelimit-policy")
        .into_iter()
        .zip(expected)
    {
        assert_eq!(
            item,
            Item {
                name: name.to_owned(),
                q: Some(most),
                w,
                ..Item::default()
            }
        );
    }
    let left: Vec<_> = items(response.headers(), "ratelimit")
        .into_iter()
        .map(|item| (item.r, item.t))
        .collect();
    assert_eq!(
        left,
        [(Some(most), Some(1)), (Some(most), Some(31_536_000))]
    );
}

#[tokio::test]
async fn nested_layers_make_one_list_from_the_outside_in() {
    let (outer, inner) = (
        Limit::per_hour("outer", 2).by(anyone),
        Limit::per_minute("inner", 1).by(anyone),
    );
    let store = MemoryStore::new();
    let app = around(
        &on(&store, [outer]),
        around(&on(&store, [inner]), handler()),
    );
    let policy = Some(r#""outer";q=2;w=3600, "inner";q=1;w=60"#);
    let admitted = ask(&app).await;
    assert_eq!(
        fields(admitted.headers()),
        [policy, Some(r#""outer";r=1;t=3600, "inner";r=0;t=60"#)]
    );
    // The outer layer has counted the request that the inner layer refuses.
    let by_inner = ask(&app).await;
    assert_eq!(by_inner.status(), 429);
    assert_eq!(
        fields(by_inner.headers()),
        [policy, Some(r#""outer";r=0;t=3600, "inner";r=0;t=60"#)]
    );
    let by_outer = ask(&app).await;
    assert_eq!(by_outer.status(), 429);
    assert_eq!(
        fields(by_outer.headers()),
        [Some(r#""outer";q=2;w=3600"#), Some(r#""outer";r=0;t=3600"#)]
    );
}

#[tokio::test]
async fn fields_of_the_service_stay_in_the_list() {
    let service = BoxCloneService::new(service_fn(|_: Request<Body>| {
        let lines = [("ratelimit", r#""a";r=1"#), ("ratelimit", r#""b";r=2"#)];
        let mut response = Response::new(Body::empty());
        for (name, line) in lines {
            response.headers_mut().append(name, line.parse().unwrap());
        }
        ready(Ok::<_, Infallible>(response))
    }));
    let app = around(
        &on(&MemoryStore::new(), [Limit::per_hour("own", 5).by(anyone)]),
        service,
    );
    let names: Vec<_> = items(ask(&app).await.headers(), "ratelimit")
        .into_iter()
        .map(|item| item.name)
        .collect();
    assert_eq!(names, ["own", "a", "b"]);
}

/// Clients would ignore the whole field.
#[tokio::test]
async fn lines_of_the_service_that_are_no_lists_are_left_out() {
    let old = "limit=10, remaining=3, reset=7";
    let lines = [
        "\"svc\" oops",
        "\"svc\";r=",
        "\"a\\q\";r=1",
        "\"a\tb\";r=1",
        "\"svc\";R=1",
        "\"svc\"\"x\"",
        "",
        old,
    ];
    let app = |line: &'static str| {
        let lines = move |_: Request<Body>| {
            ready(Ok::<_, Infallible>([("ratelimit", line)].into_response()))
        };
        around(
            &on(&MemoryStore::new(), [Limit::per_hour("own", 5).by(anyone)]),
            BoxCloneService::new(service_fn(lines)),
        )
    };
    for line in lines {
        assert_eq!(
            fields(ask(&app(line)).await.headers())[1],
            Some(r#""own";r=4;t=3600"#),
            "{line}"
        );
    }
    let list = r#""svc,;";r=-1 , "\"\\";x="y";  pk=:YWJj:"#;
    let merged = format!(r#""own";r=4;t=3600, {list}"#);
    assert_eq!(fields(ask(&app(list)).await.headers())[1], Some(&*merged));
}

#[tokio::test]
async fn a_layer_that_heeds_its_upstream_passes_its_fields_on() {
    let upstream = BoxCloneService::new(service_fn(|_: Request<Body>| {
        ready(Ok::<_, Infallible>(
            [("ratelimit", r#""theirs";r=7;t=3"#)].into_response(),
        ))
    }));
    let limit = Limit::per_hour("ours", 5).by(anyone).heed_upstream();
    let app = around(&on(&MemoryStore::new(), [limit]), upstream);
    assert_eq!(
        fields(ask(&app).await.headers()),
        [None, Some(r#""theirs";r=7;t=3"#)]
    );
}

#[tokio::test]
async fn the_figures_are_those_after_a_settlement() {
    let limit = Limit::per_hour("tokens", 100).by(anyone).settle(|_| 30);
    let app = around(&on(&MemoryStore::new(), [limit]), handler());
    assert_eq!(items(ask(&app).await.headers(), "ratelimit")[0].r, Some(70));
}

/// The decision of the layer just outside, in the response's extensions.
#[derive(Clone)]
struct Seen<const LAYER: usize>(Decision);

/// Keeps the decision of the layer around it.
fn seeing<const LAYER: usize>(app: App) -> App {
    BoxCloneService::new(service_fn(move |request: Request<Body>| {
        let (app, decision) = (
            app.clone(),
            request.extensions().get::<Decision>().cloned().unwrap(),
        );
        async move {
            let mut response = app.oneshot(request).await?;
            response.extensions_mut().insert(Seen::<LAYER>(decision));
            Ok::<_, Infallible>(response)
        }
    }))
}

/// Two layers of two limits each, with random figures.
fn random_app<S: Store + std::clone::Clone>(store: &S, numbers: &mut Numbers, history: u64) -> App {
    let mut limit = |name: &str| {
        let window = Duration::from_millis(300 + numbers.below(20_000));
        let name = format!("{name}-{history}");
        let limit = Limit::new(name, 1 + numbers.below(8), window).unwrap();
        limit
            .with_algorithm(ALGORITHMS[numbers.below(ALGORITHMS.len() as u64) as usize])
            .by(anyone)
    };
    let (outer, inner) = ([limit("a"), limit("b")], [limit("c"), limit("d")]);
    let layer = |limits| on(store, limits).deadline(crate::support::TEST_TIMEOUT);
    around(
        &layer(outer),
        seeing::<0>(around(&layer(inner), seeing::<1>(handler()))),
    )
}

fn seconds_of(wait: Duration) -> u64 {
    u64::try_from(wait.as_nanos().div_ceil(1_000_000_000)).unwrap()
}

/// The items that belong to decisions. The two limits of a layer come first, those of the layers
/// further out behind them.
fn expected<'a>(decisions: &'a [&Decision]) -> impl Iterator<Item = (&'a LimitStatus, Item)> {
    let own = decisions
        .iter()
        .flat_map(|decision| decision.statuses().take(2));
    // The refusal cache may not know how a limit beside the refusing one stands.
    own.filter(|status| !status.is_hidden()).map(|status| {
        let more = status.retry_after().map_or_else(
            || status.reset_after(),
            |retry| retry.min(status.reset_after()),
        );
        let t = (!more.is_zero()).then(|| seconds_of(more));
        let name = status.limit.name().to_owned();
        (
            status,
            Item {
                name,
                r: Some(status.remaining()),
                t,
                ..Item::default()
            },
        )
    })
}

/// For random histories, the fields agree with the decisions. A limit that refuses has a time no
/// later than `Retry-After`.
async fn fields_agree_with_decisions<S: Store + Clone>(fixture: Fixture<S>, histories: u64) {
    let mut numbers = Numbers(17);
    let mut refusals = 0;
    for history in 0..histories {
        let app = random_app(&fixture.store, &mut numbers, history);
        for _ in 0..20 {
            fixture.clock.advance(ms(numbers.below(1_500)));
            let response = ask(&app).await;
            let extensions = response.extensions();
            let refusal = match extensions.get() {
                Some(Rejection::Limited(refusal)) => Some(refusal),
                _ => None,
            };
            let outer = extensions.get().map(|Seen(decision): &Seen<0>| decision);
            let inner = extensions.get().map(|Seen(decision): &Seen<1>| decision);
            let decisions: Vec<&Decision> = [outer, inner, refusal].into_iter().flatten().collect();
            let (statuses, expected): (Vec<_>, Vec<_>) = expected(&decisions).unzip();
            assert_eq!(items(response.headers(), "ratelimit"), expected);
            let policies: Vec<_> = statuses
                .iter()
                .map(|status| Item {
                    name: status.limit.name().to_owned(),
                    q: Some(status.limit.units()),
                    w: (status.limit.window() >= seconds(1))
                        .then(|| seconds_of(status.limit.window())),
                    ..Item::default()
                })
                .collect();
            assert_eq!(items(response.headers(), "ratelimit-policy"), policies);
            assert_eq!(refusal.is_some(), response.status() == 429);
            if let Some(refusal) = refusal {
                let retry_after: u64 = response.headers()["retry-after"]
                    .to_str()
                    .unwrap()
                    .parse()
                    .unwrap();
                let refusing = refusal
                    .statuses()
                    .filter(|status| status.retry_after().is_some());
                for name in refusing.map(|status| status.limit.name()) {
                    let item = expected.iter().find(|item| item.name == name).unwrap();
                    assert!(item.t.unwrap() <= retry_after, "{item:?} {retry_after}");
                    refusals += 1;
                }
            }
        }
    }
    assert!(refusals > histories, "{refusals}");
}

/// A client that obeys only `RateLimit` waits for `t` if `r` is 0, and is never refused.
async fn an_obedient_client_is_never_refused<S: Store + Clone>(
    fixture: Fixture<S>,
    histories: u64,
) {
    let mut numbers = Numbers(18);
    let mut waits = 0;
    for history in 0..histories {
        let app = random_app(&fixture.store, &mut numbers, history);
        for sent in 0..20 {
            let response = ask(&app).await;
            assert_eq!(
                response.status(),
                200,
                "{history} {sent}: {:?}",
                response.headers()
            );
            let exhausted = items(response.headers(), "ratelimit")
                .into_iter()
                .filter(|item| item.r == Some(0));
            let wait = exhausted.map(|item| item.t.unwrap()).max().unwrap_or(0);
            waits += u64::from(wait > 0);
            fixture
                .clock
                .advance(seconds(wait) + ms(numbers.below(2) * numbers.below(900)));
        }
    }
    assert!(waits > histories, "{waits}");
}

#[tokio::test]
async fn fields_agree_with_random_decisions() {
    fields_agree_with_decisions(memory(), 1_000).await;
}

#[tokio::test]
async fn fields_agree_with_random_decisions_on_redis() {
    fields_agree_with_decisions(redis(), 50).await;
}

#[tokio::test]
async fn a_client_that_obeys_only_the_fields_is_never_refused() {
    an_obedient_client_is_never_refused(memory(), 1_000).await;
}

#[tokio::test]
async fn a_client_that_obeys_only_the_fields_is_never_refused_on_redis() {
    an_obedient_client_is_never_refused(redis(), 50).await;
}
