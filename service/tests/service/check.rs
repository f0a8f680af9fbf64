//! What programs ask.

use std::time::Duration;

use reqwest::Method;
use serde_json::json;
use tokio::{task::JoinSet, time::sleep};

use crate::support::{Redis, Service, stores};

const RULES: &str = r#"
[[rule]]
name = "login"
limits = ["login=5/min"]
[[rule]]
name = "mails"
limits = ["mails=100/h"]
[[rule]]
name = "jobs"
limits = ["jobs=2 concurrent"]
[[rule]]
name = "pairs"
key = ["header:x-tenant", "client"]
limits = ["pairs=3/min"]
shadow = ["strict=1/min"]
"#;

fn on(store: &str) -> Service {
    Service::start(&format!("store = {store:?}\n{RULES}"))
}

#[tokio::test]
async fn a_limit_is_spent_to_its_last_unit() {
    for (store, _server) in stores() {
        let service = on(&store);
        let login = json!({ "limit": "login", "key": "ada" });
        for used in 1..=5 {
            let answer = service.post("/check", &login).await;
            assert!(answer.is_allowed());
            let body = answer.json();
            assert_eq!(
                (&body["used"], &body["remaining"], &body["of"]),
                (&json!(used), &json!(5 - used), &json!(5))
            );
            assert_eq!(
                (&body["currentCount"], &body["retry"]),
                (&json!(used), &json!(null))
            );
            assert_eq!(
                answer.header("x-ratelimit-remaining"),
                (5 - used).to_string()
            );
        }
        let refused = service.post("/check", &login).await;
        let body = refused.json();
        assert!(!refused.is_allowed());
        let retry = body["retry"].as_f64().unwrap();
        assert!(retry > 30.0 && retry <= 60.0, "{body}");
        assert_eq!(refused.header("retry-after"), retry.ceil().to_string());
        assert_eq!(
            (&body["used"], body["ttl"].as_f64().unwrap()),
            (&json!(5), body["reset"].as_f64().unwrap().ceil())
        );

        let peeked = service.post("/peek", &login).await.json();
        assert_eq!(
            (&peeked["used"], &peeked["allowed"]),
            (&json!(5), &json!(true))
        );
        // Names of other scripts are keys like all others.
        assert!(
            service
                .post("/check", json!({ "limit": "login", "key": "Ада 愛達" }))
                .await
                .is_allowed()
        );
        assert_eq!(service.post("/reset", &login).await.status, 204);
        assert_eq!(service.post("/check", &login).await.json()["used"], 1);
        assert_eq!(
            service
                .post("/peek", json!({ "limit": "login", "key": "Ада 愛達" }))
                .await
                .json()["used"],
            1
        );
    }
}

#[tokio::test]
async fn several_limits_are_all_or_nothing() {
    for (store, _server) in stores() {
        let service = on(&store);
        let both = |cost| json!([{ "limit": "login", "key": "ada", "cost": cost }, { "limit": "mails", "key": "ada", "cost": 10 }]);
        assert!(service.post("/check", both(4)).await.is_allowed());
        let refused = service.post("/check", both(2)).await;
        assert!(!refused.is_allowed());
        let body = refused.json();
        assert_eq!(
            (
                &body["limit"],
                &body["limits"][1]["used"],
                &body["limits"][1]["retry"]
            ),
            (&json!("login"), &json!(10), &json!(null))
        );
        assert_eq!(
            service
                .post("/peek", json!({ "limit": "mails", "key": "ada" }))
                .await
                .json()["used"],
            10
        );
        let twice = service
            .post(
                "/check",
                json!([{ "limit": "login", "key": "a" }, { "limit": "login", "key": "a" }]),
            )
            .await;
        assert!(
            twice.status == 422 && twice.text.contains("twice"),
            "{}",
            twice.text
        );
    }
}

#[tokio::test]
async fn an_admission_with_a_lease_is_settled_once() {
    for (store, _server) in stores() {
        let service = on(&store);
        let reserved = service
            .post(
                "/check",
                json!({ "limit": "mails", "key": "ada", "cost": 40, "lease": 60 }),
            )
            .await;
        assert_eq!(reserved.json()["used"], 40);
        let settling = json!({ "admission": reserved.json()["admission"], "actual": 3 });
        let settled = service.post("/settle", &settling).await.json();
        assert_eq!(settled, json!({ "settled": true, "used": 3 }));
        assert_eq!(
            service.post("/settle", &settling).await.json()["settled"],
            false
        );
        // Without a settlement, the units are back when the lease ends.
        service
            .post(
                "/check",
                json!({ "limit": "mails", "key": "bob", "cost": 40, "lease": 0.2 }),
            )
            .await;
        sleep(Duration::from_millis(400)).await;
        assert_eq!(
            service
                .post("/peek", json!({ "limit": "mails", "key": "bob" }))
                .await
                .json()["used"],
            0
        );
    }
}

#[tokio::test]
async fn a_place_is_held_until_it_is_settled_or_its_lease_ends() {
    for (store, _server) in stores() {
        let service = on(&store);
        let take = |lease| json!({ "limit": "jobs", "key": "ada", "lease": lease });
        let first = service.post("/check", take(60)).await;
        assert!(service.post("/check", take(1)).await.is_allowed());
        assert!(!service.post("/check", take(1)).await.is_allowed());
        // A guessed id frees nothing.
        let mut guessed = first.json()["admission"].clone();
        guessed["charges"] = json!([{ "limit": "mails", "key": "eve", "cost": 1 }]);
        let settled = service
            .post("/settle", json!({ "admission": guessed, "actual": 0 }))
            .await;
        assert_eq!(settled.json()["settled"], json!(false), "{}", settled.text);
        assert!(!service.post("/check", take(1)).await.is_allowed());
        let settled = service
            .post(
                "/settle",
                json!({ "admission": first.json()["admission"], "actual": 0 }),
            )
            .await;
        assert_eq!(
            (settled.status, &settled.json()["settled"]),
            (200, &json!(true)),
            "{}",
            settled.text
        );
        let begun = std::time::Instant::now();
        while service
            .post("/peek", json!({ "limit": "jobs", "key": "ada" }))
            .await
            .json()["used"]
            != 0
        {
            assert!(begun.elapsed() < crate::support::PATIENCE);
            sleep(Duration::from_millis(50)).await;
        }
    }
}

/// A mistake loses nothing.
#[tokio::test]
async fn a_settlement_with_a_mistake_frees_no_place() {
    let service = on("memory:");
    let jobs = json!({ "limit": "jobs", "key": "ada", "lease": 60 });
    let admission = service.post("/check", &jobs).await.json()["admission"].clone();
    let used = async || {
        service
            .post("/peek", json!({ "limit": "jobs", "key": "ada" }))
            .await
            .json()["used"]
            .clone()
    };
    for actual in [json!([1, 2]), json!([]), json!(-1), json!("1")] {
        let settled = service
            .post(
                "/settle",
                json!({ "admission": admission, "actual": actual }),
            )
            .await;
        assert_eq!(
            (settled.status, used().await),
            (422, json!(1)),
            "{}",
            settled.text
        );
    }
    let settled = service
        .post("/settle", json!({ "admission": admission, "actual": [1] }))
        .await;
    assert_eq!(
        (settled.status, used().await),
        (200, json!(0)),
        "{}",
        settled.text
    );
}

#[tokio::test]
async fn a_settlement_changes_only_charges_with_a_lease() {
    for (store, _server) in stores() {
        let service = on(&store);
        let both = json!([
            { "limit": "login", "key": "ada", "cost": 3 },
            { "limit": "mails", "key": "ada", "cost": 40, "lease": 60 },
        ]);
        let admission = service.post("/check", both).await.json()["admission"].clone();
        let settled = service
            .post("/settle", json!({ "admission": admission, "actual": 0 }))
            .await
            .json();
        assert_eq!(settled["settled"], true);
        let used = async |limit| {
            service
                .post("/peek", json!({ "limit": limit, "key": "ada" }))
                .await
                .json()["used"]
                .clone()
        };
        assert_eq!([used("login").await, used("mails").await], [3, 0]);
    }
}

/// A place is not held for the lease of another limit beside it.
#[tokio::test]
async fn a_place_is_free_at_the_end_of_its_own_lease() {
    let service = on("memory:");
    let both = json!([{ "limit": "jobs", "key": "ada", "lease": 0.2 }, { "limit": "mails", "key": "ada", "lease": 60 }]);
    assert!(service.post("/check", both).await.is_allowed());
    let begun = std::time::Instant::now();
    while service
        .post("/peek", json!({ "limit": "jobs", "key": "ada" }))
        .await
        .json()["used"]
        != 0
    {
        assert!(begun.elapsed() < crate::support::PATIENCE);
        sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn mistakes_are_named_and_cost_nothing() {
    let service = on("memory:");
    for (body, words) in [
        (
            r#"{"limit": "login", "key": "ada", "cots": 2}"#,
            "unknown field `cots`",
        ),
        (
            r#"{"limit": "login", "key": "ada", "cost": 0}"#,
            "at least 1",
        ),
        (
            r#"{"limit": "login", "key": "ada", "cost": -1}"#,
            "integer `-1`",
        ),
        (r#"{"limit": "login", "key": "ada", "cost": 1.5}"#, "1.5"),
        (
            r#"{"limit": "login", "key": "ada", "cost": 6}"#,
            "never fits",
        ),
        (
            r#"{"limit": "logout", "key": "ada"}"#,
            r#"there is no limit \"logout\""#,
        ),
        (r#"{"limit": "login"}"#, "the key has 0 parts"),
        (r#"{"limit": "login", "key": 7}"#, "expected a key"),
        (r#"{"limit": "pairs", "key": "acme"}"#, "needs 2"),
        (
            r#"{"limit": "pairs", "key": ["acme", "ada"]}"#,
            "is no address",
        ),
        (
            r#"{"limit": "login", "key": "ada", "lease": -1}"#,
            "a lease must be",
        ),
        (
            r#"{"limit": "login", "key": "ada", "lease": 1e300}"#,
            "a lease must be",
        ),
        (r#"{"limit": "jobs", "key": "ada"}"#, "as lease"),
        ("[]", "1 to 64 charges"),
        ("{", "EOF"),
        ("", "EOF"),
    ] {
        let answer = service.post("/check", body).await;
        assert_eq!(
            (answer.status, answer.text.contains(words)),
            (422, true),
            "{body}: {}",
            answer.text
        );
        assert_eq!(answer.header("content-type"), "application/problem+json");
    }
    for body in [
        r#"{"admission": {"id": "x", "at": 1, "charges": []}, "actual": 1}"#,
        r#"{"admission": {}}"#,
    ] {
        assert_eq!(service.post("/settle", body).await.status, 422);
    }
    let far = r#"{"admission": {"id": "00000000000000010000000000000001", "at": 18446744073709551615, "charges": [{"limit": "login", "key": "ada"}]}, "actual": 1}"#;
    assert_eq!(service.post("/settle", far).await.json()["settled"], false);
    let form = service
        .request(Method::POST, "/check")
        .body(r#"{"limit": "login", "key": "ada"}"#);
    assert_eq!(service.send(form).await.status, 415);
    let (fits, large) = (64 * 1024, 10 * 1024 * 1024);
    let padded = |length: usize| {
        let body = r#"{"limit": "mails", "key": "ada"}"#;
        format!("{body}{}", " ".repeat(length - body.len()))
    };
    assert!(service.post("/check", padded(fits)).await.is_allowed());
    let request = service
        .request(Method::POST, "/check")
        .header("content-type", "application/json");
    // The server may close the connection before it has read all.
    if let Ok(answer) = request.body(padded(large)).send().await {
        assert_eq!(answer.status(), 413);
    }
    assert_eq!(service.post("/check", padded(fits + 1)).await.status, 413);
    assert_eq!(
        service
            .post("/peek", r#"{"limit": "login", "key": "ada"}"#)
            .await
            .json()["used"],
        0
    );
    assert_eq!(service.get("/check").await.status, 405);
}

#[tokio::test]
async fn a_key_of_several_parts_and_a_shadow_have_names_of_their_own() {
    let service = on("memory:");
    let key = json!(["acme", "2001:db8::1"]);
    assert!(
        service
            .post("/check", json!({ "limit": "pairs", "key": key }))
            .await
            .is_allowed()
    );
    // Addresses of one /64 are one client.
    let used = service
        .post(
            "/peek",
            json!({ "limit": "pairs", "key": ["acme", "2001:db8::2"] }),
        )
        .await
        .json();
    assert_eq!(used["used"], 1);
    for _ in 0..3 {
        assert!(
            service
                .post("/check", json!({ "limit": "strict", "key": key }))
                .await
                .is_allowed()
        );
    }
}

#[tokio::test]
async fn two_services_on_one_redis_share_a_limit_exactly() {
    let redis = Redis::start();
    let services = std::sync::Arc::new([on(&redis.url), on(&redis.url)]);
    let mut tasks = JoinSet::new();
    for task in 0..20 {
        let services = std::sync::Arc::clone(&services);
        tasks.spawn(async move {
            let mut admitted = 0;
            for turn in 0..25 {
                let answer = services[(task + turn) % 2]
                    .post("/check", r#"{"limit": "mails", "key": "ada"}"#)
                    .await;
                // No decision, on a busy machine, is no admission.
                admitted += u32::from(answer.is_allowed() && answer.json()["undecided"].is_null());
                assert!(answer.json()["undecided"].is_null(), "{}", answer.text);
            }
            admitted
        });
    }
    assert_eq!(tasks.join_all().await.into_iter().sum::<u32>(), 100);
}
