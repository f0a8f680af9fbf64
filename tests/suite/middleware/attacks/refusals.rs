//! Figures and refusals that a client relies on, whatever the service sends and however units are
//! used.

use tower_sliding_window::{Limiter, middleware::GrpcResponse};

use super::*;

/// A client ignores a field with one malformed line, so the layer leaves such lines out. Many
/// services send the dictionary of draft -07 under this very name.
async fn own_figures_survive(lines: &'static [&'static [u8]]) {
    let layer = RateLimitLayer::new(MemoryStore::new()).limit(Limit::per_hour("own", 5).by(anyone));
    let app = around(&layer.headers(HeaderSets::RATE_LIMIT), sending(lines));
    let items =
        items(ask(&app).await.headers(), "ratelimit").expect("clients ignore the whole field");
    assert_eq!(of(&items, "own").unwrap()["r"], 4);
}

#[tokio::test]
async fn the_dictionary_of_draft_07_in_an_inner_response_leaves_the_layers_figures_readable() {
    own_figures_survive(&[b"limit=100, remaining=50, reset=30"]).await;
}

#[tokio::test]
async fn a_malformed_line_of_an_inner_response_leaves_the_layers_figures_readable() {
    own_figures_survive(&[b"\"a\";r=1,"]).await;
}

#[tokio::test]
async fn a_line_that_is_no_text_leaves_the_layers_figures_readable() {
    own_figures_survive(&[b"\"\xfc\";r=1"]).await;
}

#[tokio::test]
async fn an_open_quote_in_an_inner_response_leaves_the_layers_figures_readable() {
    own_figures_survive(&[b"\"a"]).await;
}

/// More units are used than the limit has, so nothing is left when the oldest unit leaves.
#[tokio::test]
async fn after_a_limit_was_lowered_a_client_that_waits_for_t_is_not_refused_again() {
    let (store, clock) = clocked();
    let units = Arc::new(AtomicU64::new(3));
    let plan = Arc::clone(&units);
    let chosen = KeyedLimit::chosen(anyone, move |_| {
        Limit::per_hour("plan", plan.load(Ordering::Relaxed))
    });
    let app = around(
        &RateLimitLayer::new(store)
            .limit(chosen)
            .headers(HeaderSets::RATE_LIMIT),
        handler(),
    );
    for _ in 0..3 {
        assert_eq!(ask(&app).await.status(), 200);
        clock.advance(minutes(10));
    }
    units.store(1, Ordering::Relaxed);
    let refused = ask(&app).await;
    assert_eq!(refused.status(), 429);
    clock.advance(obedient_wait(refused.headers()));
    let again = ask(&app).await;
    assert_eq!(
        again.status(),
        200,
        "{:?} {:?}",
        refused.headers(),
        again.headers()
    );
}

/// A block also uses more units than the limit has.
#[tokio::test]
async fn while_a_limit_is_blocked_a_client_that_waits_for_t_is_not_refused_again() {
    let (store, clock) = clocked();
    let calls = Limit::per_hour("calls", 3);
    let limiter = Limiter::new(store);
    let layer = RateLimitLayer::new(limiter.clone()).limit(calls.clone().by(anyone));
    let app = around(&layer.headers(HeaderSets::RATE_LIMIT), handler());
    assert_eq!(ask(&app).await.status(), 200);
    clock.advance(minutes(30));
    limiter
        .block(
            &calls,
            anyone(&request().into_parts().0).unwrap(),
            minutes(55),
        )
        .await
        .unwrap();
    let refused = ask(&app).await;
    assert_eq!(refused.status(), 429);
    clock.advance(obedient_wait(refused.headers()));
    let again = ask(&app).await;
    assert_eq!(
        again.status(),
        200,
        "{:?} {:?}",
        refused.headers(),
        again.headers()
    );
}

#[tokio::test]
async fn a_shadow_limit_next_to_a_hidden_one_is_not_shown() {
    let layer = RateLimitLayer::new(MemoryStore::new())
        .limit(Limit::per_hour("total", 100).by(anyone).hidden())
        .limit(Limit::per_hour("tried", 1).by(anyone).in_shadow());
    let app = around(&layer.headers(HeaderSets::RATE_LIMIT), handler());
    let response = ask(&app).await;
    assert_eq!(
        items(response.headers(), "ratelimit").unwrap(),
        [],
        "{:?}",
        response.headers()
    );
}

/// A layer that waits for an hour for the tight limit holds the line, and one that waits for a
/// millisecond is refused behind it. Only the tight limit is used up.
async fn refused_in_line(tight: KeyedLimit) -> Response {
    let refused = refused_in_line_by(tight, |hasty| around(&hasty, handler())).await;
    assert_eq!(refused.status(), 429);
    refused
}

async fn refused_in_line_by(
    tight: KeyedLimit,
    guard: impl FnOnce(RateLimitLayer) -> App,
) -> Response {
    let (store, _clock) = clocked();
    let layer = RateLimitLayer::new(store)
        .limit(tight)
        .limit(Limit::per_hour("plenty", 1_000).by(anyone))
        .headers(HeaderSets::BOTH);
    let patient = around(&layer.clone().wait_up_to(minutes(120)), handler());
    let hasty = guard(layer.wait_up_to(Duration::from_millis(1)));
    assert_eq!(ask(&patient).await.status(), 200);
    let mut waiting = std::pin::pin!(ask(&patient));
    poll_fn(|cx| {
        assert!(waiting.as_mut().poll(cx).is_pending());
        Poll::Ready(())
    })
    .await;
    let refused = ask(&hasty).await;
    assert!(
        refused
            .extensions()
            .get::<tower_sliding_window::Rejection>()
            .is_some()
    );
    refused
}

#[tokio::test]
async fn a_refusal_in_line_names_only_the_limits_that_are_used_up() {
    let recorded = Recorded::start();
    let refused = refused_in_line(Limit::per_hour("tight", 1).by(anyone)).await;
    let body = json(refused).await;
    let problem: serde_json::Value = serde_json::from_str(&body).unwrap();
    let counters = recorded.counters();
    assert_eq!(
        problem["violated-policies"],
        serde_json::json!(["tight"]),
        "{body} {counters:?}"
    );
}

#[tokio::test]
async fn a_refusal_in_line_counts_only_for_the_limits_that_are_used_up() {
    let recorded = Recorded::start();
    refused_in_line(Limit::per_hour("tight", 1).by(anyone)).await;
    let counters = recorded.counters();
    assert_eq!(
        counters.get("rate_limit_decisions_total  plenty refused"),
        None,
        "{counters:?}"
    );
}

#[tokio::test]
async fn a_refusal_in_line_for_a_hidden_limit_blames_no_other() {
    let refused = refused_in_line(Limit::per_hour("tight", 1).by(anyone).hidden()).await;
    let body = json(refused).await;
    assert!(!body.contains("plenty"), "{body}");
}

#[tokio::test]
async fn a_quota_failure_in_line_names_only_the_limits_that_are_used_up() {
    use tonic_types::StatusExt;

    let guard = |hasty: RateLimitLayer| {
        BoxCloneService::new(hasty.respond_with(GrpcResponse).layer(handler()))
    };
    let refused = refused_in_line_by(Limit::per_hour("tight", 1).by(anyone), guard).await;
    let status = tonic::Status::from_header_map(refused.headers()).unwrap();
    let violations = status.get_details_quota_failure().unwrap().violations;
    let subjects: Vec<_> = violations
        .into_iter()
        .map(|violation| violation.subject)
        .collect();
    assert_eq!(subjects, ["tight"]);
}

#[tokio::test]
async fn a_decision_of_a_store_that_is_polled_after_its_end_charges_once() {
    use tower_sliding_window::{Charge, Check, MemoryStore, Store};

    let store = MemoryStore::new();
    let calls = Limit::per_hour("calls", 9);
    let mut decision = store.decide(Check::new(Charge::new(calls.clone(), "ada", 1).unwrap()));
    poll_fn(|cx| {
        let mut poll = || std::pin::Pin::new(&mut decision).poll(cx);
        assert!(poll().is_ready());
        // A panic would be right, too.
        let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(poll));
        Poll::Ready(())
    })
    .await;
    assert_eq!(
        Limiter::new(store)
            .peek(&calls, "ada")
            .await
            .unwrap()
            .binding()
            .used,
        1
    );
}
