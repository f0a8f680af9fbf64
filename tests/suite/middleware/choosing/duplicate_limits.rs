//! Limits that turn out to be one for one key, which only the request tells.

use std::{net::SocketAddr, time::Duration};

use axum::body::Body;
use http::{Request, Response, request::Parts};
use tower::{Layer, ServiceExt, service_fn};
use tower_sliding_window::{
    ClientIp, Key, KeyedLimit, Limit, Limiter, MemoryStore, PeerIp, RateLimitLayer, Rejection,
    extract::KeyError,
    middleware::{Degraded, ShadowRefusals},
    store::ManualClock,
};

use super::{BURST, FREE, PRO, always, chosen};
use crate::support::{
    log::Log,
    requests::{anyone, figures, hello, request},
};

fn refusals(response: &Response<Body>) -> Vec<String> {
    let refusals: Option<&ShadowRefusals> = response.extensions().get();
    let left_out = refusals.into_iter().flat_map(|refusals| &refusals.left_out);
    left_out.map(|(limit, rejection)| format!("{:?} {rejection:?}", limit.as_ref().map(Limit::name))).collect()
}

/// A client without a proxy has the same key by both extractors, so only the request shows that the
/// limits are duplicates.
#[tokio::test]
async fn duplicate_limits_are_decided_by_the_stricter() {
    let (few, many) = (Limit::per_minute("calls", 2), Limit::per_minute("calls", 10));
    let longer = Limit::per_hour("calls", 2);
    let direct = || {
        let mut request = request();
        request.extensions_mut().insert(SocketAddr::from(([192, 0, 2, 1], 50_000)));
        request
    };
    for (fixed, choice, stricter) in [
        (&few, &many, &few),
        (&many, &few, &few),
        (&few, &longer, &longer),
        (&longer, &few, &longer),
        (&few, &few, &few),
    ] {
        let fixed_window = fixed.window();
        for (is_chosen_first, are_both_chosen) in [(false, false), (true, false), (false, true)] {
            let store = MemoryStore::new();
            let chosen = KeyedLimit::chosen(ClientIp::behind(["10.0.0.0/8"]).unwrap(), always(choice.clone()));
            let fixed = if are_both_chosen {
                KeyedLimit::chosen(PeerIp::new(), always(fixed.clone()))
            } else {
                fixed.clone().by(PeerIp::new())
            };
            let limits = if is_chosen_first { [chosen, fixed] } else { [fixed, chosen] };
            let app = RateLimitLayer::new(store.clone()).limits(limits).unwrap().layer(service_fn(hello));
            let mut statuses = Vec::new();
            for _ in 0..50 {
                let response = app.clone().oneshot(direct()).await.unwrap();
                assert!(response.extensions().get::<Degraded>().is_none(), "{response:?}");
                statuses.push(response.status().as_u16());
            }
            assert_eq!((&statuses[..2], statuses[2..].iter().all(|status| *status == 429)), (&[200; 2][..], true));
            let key = PeerIp::new().key([192, 0, 2, 1].into());
            let decision = Limiter::new(store.clone()).check(stricter, key, 1).await.unwrap();
            let longest_wait = decision.retry_after().unwrap();
            assert!(longest_wait > stricter.window() - Duration::from_secs(50), "{longest_wait:?}");
            // Of two windows both are charged.
            assert_eq!(store.keys(), 1 + usize::from(choice.window() != fixed_window));
        }
    }
}

#[tokio::test]
async fn duplicate_limits_count_the_larger_cost() {
    for costs in [[1, 2], [2, 1]] {
        let limits = [PRO.by(anyone).cost(move |_| costs[0]), chosen(PRO).cost(move |_| costs[1])];
        let app = RateLimitLayer::new(MemoryStore::new()).limits(limits).unwrap().layer(service_fn(hello));
        let response = app.clone().oneshot(request()).await.unwrap();
        assert_eq!(figures(response.headers())[..2], [Some("3"), Some("1")]);
        assert_eq!(app.oneshot(request()).await.unwrap().status(), 429);
    }
    // A cost above the stricter limit never fits.
    let layer = RateLimitLayer::new(MemoryStore::new()).limit(FREE.by(anyone)).limit(chosen(PRO).cost(|_| 2));
    let response = layer.layer(service_fn(hello)).oneshot(request()).await.unwrap();
    assert!(matches!(response.extensions().get(), Some(Rejection::NeverFits(_))), "{response:?}");
}

/// At the larger of both settled costs. A limit that does not settle stays at its charge.
#[tokio::test]
async fn duplicate_limits_are_settled_together() {
    let plain = |limit: KeyedLimit| limit;
    let settled: fn(KeyedLimit) -> KeyedLimit = |limit| limit.cost(|_| 9).settle(|_| 4);
    let free: fn(KeyedLimit) -> KeyedLimit = |limit| limit.settle(|_| 0);
    let fixed = Limit::per_hour("calls", 20);
    for (one, other, used) in
        [(plain as fn(_) -> _, settled, 4), (plain, free, 1), (settled, free, 4), (free, free, 0), (plain, plain, 1)]
    {
        for (first, second) in [(one, other), (other, one)] {
            let store = MemoryStore::new();
            let limits = [first(fixed.clone().by(anyone)), second(chosen(fixed.clone()))];
            let app = RateLimitLayer::new(store.clone()).limits(limits).unwrap().layer(service_fn(hello));
            assert_eq!(app.oneshot(request()).await.unwrap().status(), 200);
            let key = anyone(&request().into_parts().0).unwrap();
            assert_eq!(Limiter::new(store).peek(&fixed, key).await.unwrap().used(), used);
        }
    }
}

/// The lease of the other duplicate returns nothing.
#[tokio::test]
async fn a_duplicate_that_does_not_settle_stays_charged() {
    let clock = ManualClock::new();
    let store = MemoryStore::new().clock(&clock);
    let limits = [PRO.by(anyone), chosen(PRO).settle(|_| 0).lease(Duration::from_secs(1))];
    let broken = service_fn(|_: Request<Body>| async { Err::<Response<Body>, _>("broken") });
    let app = RateLimitLayer::new(store.clone()).limits(limits).unwrap().layer(broken);
    assert!(app.oneshot(request()).await.is_err());
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    let limiter = Limiter::new(store);
    let key = || anyone(&request().into_parts().0).unwrap();
    for used in [1, 1, 0] {
        assert_eq!(limiter.peek(&PRO, key()).await.unwrap().used(), used);
        clock.advance(PRO.window() / 2);
    }
}

/// Whichever part is charged.
#[tokio::test]
async fn duplicate_split_limits_are_charged_once() {
    let store = MemoryStore::new();
    let (whole, plan) = (Limit::per_hour("calls", 64), Limit::per_hour("calls", 640));
    let layer = RateLimitLayer::new(store.clone())
        .limit(whole.clone().by(anyone).split(8))
        .limit(chosen(plan).split(8))
        .layer(service_fn(hello));
    let mut admitted = 0;
    for _ in 0..200 {
        admitted += u64::from(layer.clone().oneshot(request()).await.unwrap().status() == 200);
    }
    let (limiter, split) = (Limiter::new(store), whole.split(8));
    let mut used = 0;
    for key in split.keys(anyone(&request().into_parts().0).unwrap()) {
        used += limiter.peek(&split.limit, key).await.unwrap().used();
    }
    assert_eq!((admitted, used), (64, 64));
}

#[tokio::test]
async fn limits_of_one_name_with_different_keys_are_not_duplicates() {
    let store = MemoryStore::new();
    let other = |_: &Parts| Ok::<_, KeyError>(Key::new("test", "other"));
    let layer = RateLimitLayer::new(store.clone()).limit(chosen(PRO)).limit(FREE.by(other));
    assert_eq!(layer.layer(service_fn(hello)).oneshot(request()).await.unwrap().status(), 200);
    assert_eq!(store.keys(), 2);

    // Names that are known in advance are still compared where the layer is built.
    let layer = RateLimitLayer::new(store).limit(chosen(PRO)).limit(FREE.by(anyone)).limit(chosen(PRO));
    assert!(layer.limits([PRO.by(anyone)]).is_err());
}

/// A shadow limit that never fits is left out.
#[tokio::test]
async fn duplicate_shadow_limits_are_decided_by_the_stricter() {
    let app = RateLimitLayer::new(MemoryStore::new())
        .limit(BURST.by(anyone))
        .limit(chosen(PRO).in_shadow())
        .limit(chosen(FREE).in_shadow())
        .layer(service_fn(hello));
    for refusals in [0, 1] {
        let response = app.clone().oneshot(request()).await.unwrap();
        let shadow: Option<&ShadowRefusals> = response.extensions().get();
        let names = shadow.map_or(0, |shadow| shadow.names().count());
        assert_eq!((response.status().as_u16(), names), (200, refusals));
    }
    let layer = RateLimitLayer::new(MemoryStore::new());
    let layer = layer.limit(chosen(PRO).in_shadow().cost(|_| 2)).limit(chosen(FREE).in_shadow());
    let response = layer.layer(service_fn(hello)).oneshot(request()).await.unwrap();
    assert!(refusals(&response)[0].contains("NeverFits"), "{:?}", refusals(&response));
}

/// In either order.
#[tokio::test]
async fn a_duplicate_in_the_shadow_gives_way() {
    let log = Log::start();
    for limits in [[chosen(FREE).in_shadow(), chosen(PRO)], [chosen(PRO), chosen(FREE).in_shadow()]] {
        let layer = RateLimitLayer::new(MemoryStore::new()).fail_closed().limits(limits).unwrap();
        let app = layer.layer(service_fn(hello));
        for (status, remaining) in [(200, "2"), (200, "1"), (200, "0"), (429, "0")] {
            let response = app.clone().oneshot(request()).await.unwrap();
            assert_eq!((response.status().as_u16(), figures(response.headers())[1]), (status, Some(remaining)));
            if status == 200 {
                assert!(
                    refusals(&response)[0].contains("charges the limit \\\"calls\\\" twice"),
                    "{:?}",
                    refusals(&response)
                );
            }
        }
    }
    assert!(log.text().contains("a limit in the shadow is left out"), "{}", log.text());
}

/// A later limit has replaced an earlier one.
#[tokio::test]
async fn a_duplicate_that_replaces_another_settles_by_its_own_rule() {
    let app = RateLimitLayer::new(MemoryStore::new())
        .limit(chosen(PRO).in_shadow().settle(|_| 3))
        .limit(chosen(PRO).settle(|_| 0))
        .layer(service_fn(hello));
    for _ in 0..5 {
        let response = app.clone().oneshot(request()).await.unwrap();
        assert_eq!((response.status().as_u16(), figures(response.headers())[1]), (200, Some("3")));
    }
}
