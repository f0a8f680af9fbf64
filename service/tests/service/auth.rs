//! What proxies ask.

use reqwest::Method;
use serde_json::json;

use crate::support::{Service, stores};

const RULES: &str = r#"
secret = { env = "RATE_LIMIT_SECRET" }
[proxy]
addresses = ["127.0.0.1"]
[[rule]]
name = "login"
path = "/login"
methods = ["POST"]
limits = ["login=2/min"]
[[rule]]
name = "search"
path = "/search"
limits = ["search=10/min"]
shadow = ["strict=1/min"]
cost_from = { query = "pages" }
[[rule]]
name = "tenants"
path = "/tenants/{tenant}/{*rest}"
key = ["path:tenant", "header:x-user"]
limits = ["tenants=1/min"]
[[rule]]
name = "keys"
path = "/keys"
methods = ["GET"]
key = ["api-key:x-api-key"]
limits = ["keys=1/min"]
[[rule]]
name = "files"
path = "/files/{*path}"
limits = ["files=2/min"]
[[rule]]
name = "café"
path = "/café"
limits = ["cafe=1/min"]
"#;

#[tokio::test]
async fn a_question_is_decided_as_the_request_that_it_is_about() {
    for (store, _server) in stores() {
        let service = Service::start(&format!("store = {store:?}\n{RULES}"));
        let ada = [("x-forwarded-for", "203.0.113.7")];
        let first = service.ask("POST", "/login?from=home", &ada).await;
        assert_eq!(
            (
                first.status,
                first.header("x-ratelimit-limit"),
                first.header("x-ratelimit-remaining")
            ),
            (200, "2", "1")
        );
        assert_eq!(service.ask("POST", "/login", &ada).await.status, 200);
        let refused = service.ask("POST", "/login", &ada).await;
        assert_eq!(
            (refused.status, refused.header("x-ratelimit-remaining")),
            (429, "0")
        );
        assert!(
            !refused.header("retry-after").is_empty()
                && refused.json()["violated-policies"] == json!(["login"])
        );
        // The rest of a path may be empty.
        for (path, status) in [
            ("/files", 200),
            ("/files/", 200),
            ("/files/a", 429),
            ("/files/a/b", 429),
            ("/file", 200),
        ] {
            assert_eq!(
                service.ask("GET", path, &ada).await.status,
                status,
                "{path}"
            );
        }
        for (path, status) in [
            ("/tenants/acme", 200),
            ("/tenants/acme/x", 429),
            ("/tenants/other", 200),
        ] {
            assert_eq!(
                service.ask("GET", path, &[("x-user", "ada")]).await.status,
                status,
                "{path}"
            );
        }
        // Other methods, other paths and other clients.
        for (method, uri, client) in [
            ("GET", "/login", "203.0.113.7"),
            ("POST", "/", "203.0.113.7"),
            ("POST", "/login", "203.0.113.8"),
        ] {
            assert_eq!(
                service
                    .ask(method, uri, &[("x-forwarded-for", client)])
                    .await
                    .status,
                200,
                "{method} {uri}"
            );
        }
        // A program asks for the same units.
        assert!(
            !service
                .post("/check", json!({ "limit": "login", "key": "203.0.113.7" }))
                .await
                .is_allowed()
        );
    }
}

#[tokio::test]
async fn no_spelling_and_no_header_of_a_client_chooses_another_route() {
    let service = Service::start(RULES);
    let spellings = [
        "/login",
        "//login",
        "/./login",
        "/x/../login",
        "/%6cogin",
        "/login/",
        "/login?a=/",
        "/%2e%2e/login",
        "/login;x=1",
    ];
    for (turn, uri) in spellings.into_iter().enumerate() {
        let forged = [
            ("x-original-uri", "/"),
            ("x-original-method", "GET"),
            ("x-rewrite-url", "/"),
            ("x-http-method-override", "GET"),
        ];
        let status = service.ask("POST", uri, &forged).await.status;
        assert_eq!(status, if turn < 2 { 200 } else { 429 }, "{uri}");
    }
    let without = service.get("/auth").await;
    assert_eq!(without.status, 400);
    for uri in ["login", "http://host/login", "*", "/login#top", ""] {
        assert_eq!(service.ask("POST", uri, &[]).await.status, 400, "{uri}");
    }
    let twice = service
        .ask("POST", "/login", &[("x-forwarded-uri", "/")])
        .await;
    assert_eq!(twice.status, 400);
    let sensitive = service.ask("POST", "/LOGIN", &[]).await;
    assert_eq!(
        (sensitive.status, sensitive.header("x-ratelimit-limit")),
        (200, "")
    );
    let service = Service::start(&RULES.replace("[proxy]", "[proxy]\nignore_case = true"));
    assert_eq!(
        service
            .ask("POST", "/LOGIN", &[])
            .await
            .header("x-ratelimit-remaining"),
        "1"
    );
    assert_eq!(
        service
            .ask("GET", "/caf%C3%A9", &[])
            .await
            .header("x-ratelimit-remaining"),
        "0"
    );
}

/// Applications split a path before they decode it, or after. Each reading is counted.
#[tokio::test]
async fn no_spelling_of_a_path_value_is_free_or_hides_the_key() {
    let rules = r#"
        proxy = { addresses = ["127.0.0.1"] }
        [[rule]]
        name = "items"
        path = "/items/{id}"
        methods = ["GET"]
        key = []
        limits = ["items=3/min"]
        [[rule]]
        name = "probe"
        path = "/probe"
        methods = ["HEAD"]
        limits = ["probe=1/min"]
        [[rule]]
        name = "files"
        path = "/files/{*path}"
        key = []
        limits = ["files=3/min"]
        [[rule]]
        name = "tenants"
        path = "/tenants/{tenant}/x"
        key = ["path:tenant"]
        limits = ["tenants=1/min"]
        [[rule]]
        name = "costs"
        path = "/costs"
        key = ["header:x-user"]
        limits = ["costs=100/min"]
        cost_from = { query = "pages" }
    "#;
    let service = Service::start(rules);
    let ask = async |method: &str, path: &str, user: &str| {
        service.ask(method, path, &[("x-user", user)]).await.status
    };
    for path in ["/items/1", "/items/a%2Fb", "/items/%2E"] {
        assert_eq!(ask("GET", path, "a").await, 200, "{path}");
    }
    for path in [
        "/items/1",
        "/items/..",
        "/items/a%2fb",
        "/items/..%2fx",
        "/items/%252e",
    ] {
        assert_eq!(ask("GET", path, "a").await, 429, "{path}");
    }
    assert_eq!(ask("HEAD", "/items/1", "a").await, 429, "HEAD is GET");
    assert_eq!(
        [
            ask("HEAD", "/probe", "a").await,
            ask("HEAD", "/probe", "a").await
        ],
        [200, 429]
    );
    for path in ["/files/a", "/files//", "/files/%2F"] {
        assert_eq!(ask("GET", path, "a").await, 200, "{path}");
    }
    for path in ["/files/.", "/files/..%2fx", "/files/%2e", "/files"] {
        assert_eq!(ask("GET", path, "a").await, 429, "{path}");
    }
    assert_eq!(
        [
            ask("GET", "/tenants/acme/x", "a").await,
            ask("GET", "/tenants/acme/x", "a").await
        ],
        [200, 429]
    );
    assert_eq!(ask("GET", "/tenants/%61cme/x", "a").await, 429);
    assert_eq!(
        ask("GET", "/tenants/%2561cme/x", "a").await,
        200,
        "another tenant"
    );
    for (user, query) in [
        "p%61ges=60",
        "pages=%36%30",
        "pages=1&pages=60",
        "pages=%2060",
        "pages=59.5",
        "pages=6e1",
    ]
    .into_iter()
    .enumerate()
    {
        let (user, path) = (user.to_string(), format!("/costs?{query}"));
        assert_eq!(
            [
                ask("GET", &path, &user).await,
                ask("GET", &path, &user).await
            ],
            [200, 429],
            "{query}"
        );
    }
    assert_eq!(
        ask("GET", "/costs?pages=18446744073709551616", "b").await,
        429
    );
}

#[tokio::test]
async fn only_a_proxy_may_ask() {
    let service = Service::start(&RULES.replace("127.0.0.1", "192.0.2.1"));
    assert_eq!(service.ask("POST", "/login", &[]).await.status, 403);
    let service = Service::start("[[rule]]\nname = \"a\"\nlimits = [\"a=1/min\"]");
    assert_eq!(service.ask("POST", "/login", &[]).await.status, 404);
}

#[tokio::test]
async fn keys_costs_and_shadows_are_those_of_the_rule() {
    let service = Service::start(RULES);
    let pages = async |query| {
        service
            .ask("GET", &format!("/search{query}"), &[])
            .await
            .header("x-ratelimit-remaining")
            .to_owned()
    };
    assert_eq!(pages("?pages=3").await, "7");
    for odd in ["?pages=0", "?pages=-5", "?pages=many", "?page=2", ""] {
        pages(odd).await;
    }
    assert_eq!(pages("?a=b&pages=1").await, "1");
    assert_eq!(
        service.ask("GET", "/search?pages=11", &[]).await.status,
        429
    );

    let tenant = async |uri: &str, user| service.ask("GET", uri, &[("x-user", user)]).await.status;
    assert_eq!(tenant("/tenants/acme/items", "ada").await, 200);
    assert_eq!(tenant("/tenants/%61cme/other", "ada").await, 429);
    assert_eq!(tenant("/tenants/acme/items", "bob").await, 200);
    assert_eq!(tenant("/tenants/small/items", "ada").await, 200);
    assert_eq!(
        service.ask("GET", "/tenants/acme/items", &[]).await.status,
        400
    );
    assert!(
        !service
            .post(
                "/check",
                json!({ "limit": "tenants", "key": ["acme", "ada"] })
            )
            .await
            .is_allowed()
    );

    assert_eq!(service.ask("GET", "/keys", &[]).await.status, 401);
    assert_eq!(
        service
            .ask("GET", "/keys", &[("x-api-key", "k1")])
            .await
            .status,
        200
    );
    assert_eq!(
        service
            .ask("HEAD", "/keys", &[("x-api-key", "k1")])
            .await
            .status,
        429
    );
    assert_eq!(
        service
            .ask("GET", "/keys", &[("x-api-key", "k2")])
            .await
            .status,
        200
    );
}

/// Limits by several keys are one decision, all or nothing.
#[tokio::test]
async fn one_path_has_limits_by_several_keys() {
    let rules = r#"
        secret = { env = "RATE_LIMIT_SECRET" }
        proxy = { addresses = ["127.0.0.1"] }
        [[rule]]
        name = "api"
        path = "/api/{tenant}"
        key = ["api-key:x-api-key"]
        limits = ["key=3/min"]
        also = [
            { key = ["client"], limits = ["address=4/min"] },
            { key = ["path:tenant"], limits = ["tenant=9/min"], shadow = ["all=1/min"] },
        ]
    "#;
    for (store, _server) in stores() {
        let service = Service::start(&format!("store = {store:?}\n{rules}"));
        let ask = async |client, key| {
            let headers = [("x-forwarded-for", client), ("x-api-key", key)];
            service.ask("GET", "/api/acme", &headers).await.status
        };
        for status in [200, 200, 200, 429, 429] {
            assert_eq!(ask("203.0.113.7", "k1").await, status);
        }
        // The refusals have taken nothing from the address.
        for status in [200, 429] {
            assert_eq!(ask("203.0.113.7", "k2").await, status);
        }
        assert_eq!(ask("203.0.113.8", "k2").await, 200);
        let used = async |limit, key| {
            service
                .post("/peek", json!({ "limit": limit, "key": key }))
                .await
                .json()["used"]
                .clone()
        };
        assert_eq!([used("key", "k1").await, used("key", "k2").await], [3, 2]);
        assert_eq!(
            [
                used("address", "203.0.113.7").await,
                used("tenant", "acme").await
            ],
            [4, 5]
        );
        assert_eq!(
            service
                .ask("GET", "/api/acme", &[("x-forwarded-for", "203.0.113.9")])
                .await
                .status,
            401
        );
    }
}

#[tokio::test]
async fn nginx_gets_a_status_that_it_passes_on() {
    let rules = RULES.replace(
        "[proxy]",
        "[proxy]\nask = \"original\"\nrefusal_status = 403",
    );
    let service = Service::start(&rules);
    let ask = async |uri| {
        let request = service
            .request(Method::GET, "/auth")
            .header("x-original-method", "POST")
            .header("x-forwarded-uri", "/");
        service.send(request.header("x-original-uri", uri)).await
    };
    assert_eq!(
        [ask("/login").await.status, ask("/login").await.status],
        [200, 200]
    );
    let refused = ask("/login").await;
    assert_eq!(
        (
            refused.status,
            refused.header("x-auth-status"),
            refused.header("x-ratelimit-limit")
        ),
        (403, "429", "2")
    );
    assert!(!refused.header("retry-after").is_empty());
    assert_eq!(ask("login").await.header("x-auth-status"), "400");
}

#[tokio::test]
async fn envoy_sends_the_request_behind_a_prefix() {
    let service = Service::start(&RULES.replace("[proxy]", "[proxy]\nask = \"as-sent\""));
    let ask = async |path: &str| {
        service
            .send(
                service
                    .request(Method::POST, path)
                    .header("x-forwarded-uri", "/"),
            )
            .await
    };
    assert_eq!(
        ask("/auth/login").await.header("x-ratelimit-remaining"),
        "1"
    );
    assert_eq!(
        ask("/auth//login").await.header("x-ratelimit-remaining"),
        "0"
    );
    assert_eq!(ask("/auth/login?x").await.status, 429);
    assert_eq!(
        [ask("/auth/").await.status, ask("/auth/check").await.status],
        [200, 200]
    );
}
