//! Clients and programs that would spend less than they should, or make others pay.

use std::{
    io::{Read, Write},
    net::TcpStream,
    time::{Duration, Instant},
};

use envoy_types::pb::envoy::{
    extensions::common::ratelimit::v3::{
        RateLimitDescriptor, rate_limit_descriptor::RateLimitOverride,
    },
    service::ratelimit::v3::rate_limit_response::Code,
};
use reqwest::{Method, header::HeaderValue};
use serde_json::{Value, json};
use tokio::time::sleep;

use crate::{
    envoy::{ask, connect, descriptor},
    support::{Redis, Service, checked},
};

fn proxied(rules: &str) -> Service {
    Service::start(&format!(
        "proxy = {{ addresses = [\"127.0.0.1\"] }}\n{rules}"
    ))
}

async fn used(service: &Service, limit: &str, key: impl Into<Value>) -> Value {
    service
        .post("/peek", json!({ "limit": limit, "key": key.into() }))
        .await
        .json()["used"]
        .clone()
}

/// The readings differ in a part of the path that is no part of the key.
#[tokio::test]
async fn a_slash_at_the_end_is_charged_once() {
    let service = proxied(
        r#"
        [[rule]]
        name = "tenants"
        path = "/tenants/{tenant}/{*rest}"
        key = ["path:tenant"]
        limits = ["tenants=2/min"]
        also = [{ key = ["client"], limits = ["address=9/min"] }]
    "#,
    );
    assert_eq!(
        service
            .ask("GET", "/tenants/acme/folder/", &[])
            .await
            .status,
        200
    );
    assert_eq!(
        [
            used(&service, "tenants", "acme").await,
            used(&service, "address", "127.0.0.1").await
        ],
        [1, 1]
    );
}

const SITE: &str = r#"
    [[rule]]
    name = "login"
    path = "/login"
    key = []
    limits = ["login=2/min", "site=9/min"]
    [[rule]]
    name = "pages"
    path = "/{*path}"
    key = []
    limits = ["pages=8/min", "site=9/min"]
"#;

/// One name of a limit is one limit.
#[tokio::test]
async fn a_limit_of_two_rules_is_charged_once_for_a_request() {
    let service = proxied(SITE);
    assert_eq!(service.ask("GET", "/login/", &[]).await.status, 200);
    assert_eq!(used(&service, "site", json!([])).await, 1);
}

/// All readings are decided at once, so a refusal costs nothing.
#[tokio::test]
async fn a_refusal_of_the_second_reading_costs_nothing() {
    let service = proxied(SITE);
    for status in [200, 200, 429, 429, 429] {
        assert_eq!(service.ask("GET", "/login/", &[]).await.status, status);
    }
    assert_eq!(
        used(&service, "pages", json!([])).await,
        2,
        "the requests that passed"
    );
}

/// `/files` is a path of `/files/{*path}`, also beside a rule for all paths.
#[tokio::test]
async fn an_empty_rest_is_counted_by_the_most_specific_rule() {
    let rules =
        "[[rule]]\nname = \"files\"\npath = \"/files/{*path}\"\nlimits = [\"files=1/min\"]\n";
    let all = "[[rule]]\nname = \"pages\"\npath = \"/{*path}\"\nlimits = [\"pages=600/min\"]\n";
    for rules in [rules, &format!("{rules}{all}")] {
        let service = proxied(rules);
        let mut statuses = Vec::new();
        for path in ["/files/", "/files", "/files//"] {
            statuses.push(service.ask("GET", path, &[]).await.status);
        }
        assert_eq!(statuses, [200, 429, 429], "{rules}");
    }
}

/// A loose rule for `HEAD` on all paths hides no strict one for `GET`.
#[tokio::test]
async fn head_is_counted_by_the_most_specific_rule() {
    let service = proxied(
        r#"
        [[rule]]
        name = "report"
        path = "/report"
        methods = ["GET"]
        limits = ["report=1/min"]
        [[rule]]
        name = "probes"
        path = "/{*path}"
        methods = ["HEAD"]
        limits = ["probes=1000/min"]
    "#,
    );
    assert_eq!(service.ask("GET", "/report", &[]).await.status, 200);
    assert_eq!(service.ask("HEAD", "/report", &[]).await.status, 429);
}

/// A byte beyond ASCII hides no number of its line.
#[tokio::test]
async fn a_cost_beside_other_bytes_is_read() {
    let service = proxied(
        "[[rule]]\nname = \"a\"\npath = \"/a\"\nkey = []\nlimits = [\"a=100/min\"]\ncost_from = { header = \"x-cost\" }\n",
    );
    for (cost, status, total) in [
        (&b"60"[..], 200, 60),
        (b"30, \xc3\xa9", 200, 90),
        (b"9\xa0", 400, 90),
    ] {
        let request = service
            .request(Method::GET, "/auth")
            .header("x-cost", HeaderValue::from_bytes(cost).unwrap());
        let request = request
            .header("x-forwarded-method", "GET")
            .header("x-forwarded-uri", "/a");
        assert_eq!(service.send(request).await.status, status);
        assert_eq!(
            used(&service, "a", json!([])).await,
            total,
            "{}",
            String::from_utf8_lossy(cost)
        );
    }
}

/// Under `ignore_case`, a path and a program spell one key in any case.
#[tokio::test]
async fn a_program_asks_for_the_units_of_a_path_value_in_any_case() {
    let rule = "[[rule]]\nname = \"t\"\npath = \"/t/{tenant}\"\nkey = [\"path:tenant\"]\nlimits = [\"t=9/min\"]\n";
    for more in ["", ", ignore_case = true"] {
        let service = Service::start(&format!(
            "proxy = {{ addresses = [\"127.0.0.1\"]{more} }}\n{rule}"
        ));
        for (path, key) in [("/t/Acme", "Acme"), ("/t/x%2Fy", "x/y")] {
            assert_eq!(service.ask("GET", path, &[]).await.status, 200);
            assert_eq!(used(&service, "t", key).await, 1, "{more} {key}");
        }
    }
}

const ENVOY: &str = r#"
    [[rule]]
    name = "client"
    domain = "web"
    descriptor = ["remote_address"]
    limits = ["client=9/min"]
    shadow = ["strict=2/min"]
    [[rule]]
    name = "tenant"
    domain = "web"
    descriptor = ["tenant"]
    limits = ["tenant=4/min"]
    [[rule]]
    name = "trial"
    domain = "web"
    descriptor = ["trial"]
    shadow = ["trial=1/min"]
"#;

/// A shadow that is exceeded shifts no figures of the descriptors behind it.
#[tokio::test]
async fn each_descriptor_has_its_own_figures_beside_a_shadow_that_is_exceeded() {
    let service = Service::start(ENVOY);
    let client = connect(&service).await;
    let both = [
        descriptor(&[("remote_address", "203.0.113.7")]),
        descriptor(&[("tenant", "acme")]),
    ];
    for codes in [[Code::Ok, Code::Ok], [Code::Ok, Code::OverLimit]] {
        let response = ask(&client, &both, 3).await.unwrap();
        let told: Vec<_> = response
            .statuses
            .iter()
            .map(|status| status.code())
            .collect();
        assert_eq!(told, codes, "{:?}", response.statuses);
    }
}

/// Hits above a shadow count as all of its units.
#[tokio::test]
async fn hits_above_a_shadow_are_counted() {
    let service = Service::start(ENVOY);
    let client = connect(&service).await;
    ask(
        &client,
        &[descriptor(&[("remote_address", "203.0.113.7")])],
        3,
    )
    .await
    .unwrap();
    assert_eq!(used(&service, "strict", "203.0.113.7").await, 2);
}

/// A descriptor's own size makes no limit of a shadow that refuses.
#[tokio::test]
async fn a_limit_in_the_shadow_refuses_nothing_under_another_size() {
    let service = Service::start(ENVOY);
    let client = connect(&service).await;
    let own = RateLimitDescriptor {
        limit: Some(RateLimitOverride {
            requests_per_unit: 2,
            unit: 2,
        }),
        ..descriptor(&[("trial", "ada")])
    };
    for turn in 1..=3 {
        let response = ask(&client, std::slice::from_ref(&own), 1).await.unwrap();
        assert_eq!(response.overall_code(), Code::Ok, "{turn}");
    }
}

const JOBS: &str = "[[rule]]\nname = \"jobs\"\nlimits = [\"jobs=300000 concurrent\"]\n";

fn mails(units: u64) -> String {
    format!("[[rule]]\nname = \"mails\"\nlimits = [\"mails={units}/h\"]\n")
}

/// The limit of the place has gone. The units of the other charge are settled all the same.
#[tokio::test]
async fn a_settlement_is_not_said_to_be_done_when_it_is_not() {
    let service = Service::start(&format!("{JOBS}{}", mails(100)));
    let both = json!([{ "limit": "jobs", "key": "a", "lease": 60 }, { "limit": "mails", "key": "a", "cost": 40, "lease": 60 }]);
    let admission = service.post("/check", both).await.json()["admission"].clone();
    service.rewrite(&mails(100));
    service.logs("read again", 1).await;
    let settled = service
        .post(
            "/settle",
            json!({ "admission": admission, "actual": [1, 7] }),
        )
        .await;
    assert_eq!(
        (
            settled.json()["settled"] == true,
            used(&service, "mails", "a").await
        ),
        (true, json!(7))
    );
}

/// Units that were reserved under a larger limit are settled under a smaller one.
#[tokio::test]
async fn an_admission_is_settled_after_its_limit_has_become_smaller() {
    let service = Service::start(&mails(100));
    let admission = service
        .post(
            "/check",
            json!({ "limit": "mails", "key": "a", "cost": 40, "lease": 60 }),
        )
        .await;
    service.rewrite(&mails(30));
    service.logs("read again", 1).await;
    let settling = json!({ "admission": admission.json()["admission"], "actual": 3 });
    let settled = service.post("/settle", settling).await;
    assert_eq!(
        (settled.status, used(&service, "mails", "a").await),
        (200, json!(3)),
        "{}",
        settled.text
    );
}

/// Places are freed also without the store.
#[tokio::test]
async fn places_that_are_free_are_said_to_be_settled() {
    let redis = Redis::start();
    let rules = JOBS.replace("\"jobs", "\"more");
    let service = Service::start(&format!("store = {:?}\n{JOBS}{rules}", redis.url));
    let both = json!([{ "limit": "jobs", "key": "a", "lease": 60 }, { "limit": "more", "key": "a", "lease": 60 }]);
    let admission = service.post("/check", both).await.json()["admission"].clone();
    redis.pause();
    let settling = json!({ "admission": admission, "actual": 1 });
    let statuses = [
        service.post("/settle", &settling).await.status,
        service.post("/settle", &settling).await.status,
    ];
    // A settlement with an error is sent again, until it is done.
    assert_eq!(statuses[0], 200, "{statuses:?}");
}

/// A caller that gets no place is not charged for the other limits of its list.
#[tokio::test(flavor = "multi_thread")]
async fn an_answer_that_the_process_is_full_costs_nothing() {
    let service = Service::start(&format!("{JOBS}{}", mails(100)));
    let body = r#"{"limit": "jobs", "key": "ada", "lease": 3600}"#;
    let head = "host: a\r\ncontent-type: application/json\r\ncontent-length: 46\r\n";
    assert_eq!(body.len(), 46);
    let fill = |address: String| {
        let mut stream = TcpStream::connect(address).unwrap();
        let mut writer = stream.try_clone().unwrap();
        let one = format!("POST /check HTTP/1.1\r\n{head}\r\n{body}");
        let last = format!("POST /none HTTP/1.1\r\n{head}connection: close\r\n\r\n{body}");
        let text = one.repeat(5_000) + &last;
        std::thread::spawn(move || writer.write_all(text.as_bytes()).unwrap());
        std::thread::spawn(move || stream.read_to_end(&mut Vec::new()).unwrap())
    };
    let fillers: Vec<_> = (0..4)
        .map(|_| fill(service.http.replace("http://", "")))
        .collect();
    let answers: usize = fillers
        .into_iter()
        .map(|filler| filler.join().unwrap())
        .sum();
    let both = json!([{ "limit": "jobs", "key": "a", "lease": 60 }, { "limit": "mails", "key": "a", "cost": 40 }]);
    let full = service.post("/check", both).await;
    assert_eq!(
        (full.status, used(&service, "mails", "a").await),
        (503, json!(0)),
        "{answers} {}",
        full.text
    );
}

const LOGIN: &str = "[[rule]]\nname = \"login\"\npath = \"/login\"\nmethods = [\"POST\"]\nkey = []\nlimits = [\"login=1/min\"]\n";

/// Caddy, Traefik and haproxy pass any method on; Django, Flask and Symfony make capitals of it.
#[tokio::test]
async fn a_method_in_small_letters_is_that_in_capitals() {
    let service = proxied(LOGIN);
    for (method, status) in [("POST", 200), ("POST", 429), ("post", 429), ("Post", 429)] {
        assert_eq!(
            service.ask(method, "/login", &[]).await.status,
            status,
            "{method}"
        );
    }
}

/// `new URL(..).pathname` resolves dots before it decodes, and a `\` is a `/`: Node, Deno, Bun.
#[tokio::test]
async fn a_path_is_read_as_a_url_parser_reads_it() {
    let service = proxied(LOGIN);
    assert_eq!(service.ask("POST", "/login", &[]).await.status, 200);
    let mut statuses = Vec::new();
    for path in ["/x%2Fy/../login", "/x%2Fy/%2E%2e/login", "/x/..\\login"] {
        statuses.push(service.ask("POST", path, &[]).await.status);
    }
    assert_eq!(statuses, [429, 429, 429]);
}

/// `%252F` is `%2F` in a value, and no slash.
#[tokio::test]
async fn the_value_of_a_path_is_decoded_once() {
    let service = proxied(
        "[[rule]]\nname = \"t\"\npath = \"/t/{tenant}\"\nkey = [\"path:tenant\"]\nlimits = [\"t=9/min\"]\n",
    );
    assert_eq!(service.ask("GET", "/t/a%252Fb", &[]).await.status, 200);
    assert_eq!(
        [
            used(&service, "t", "a%2Fb").await,
            used(&service, "t", "a/b").await
        ],
        [1, 0]
    );
}

/// Python, JavaScript and PHP read these as numbers.
#[tokio::test]
async fn a_cost_that_applications_read_is_not_one() {
    let rule = LOGIN
        .replace("methods = [\"POST\"]", "cost_from = { query = \"pages\" }")
        .replace("1/min", "100/min");
    let mut costs = Vec::new();
    for query in ["6_0", "%D9%A6%D9%A0", "0x3c", "60.", "60pages"] {
        let service = proxied(&rule);
        service
            .ask("POST", &format!("/login?pages={query}"), &[])
            .await;
        costs.push(used(&service, "login", json!([])).await);
    }
    assert!(!costs.contains(&json!(1)), "{costs:?}");
}

/// A rule that no request can meet would limit nothing.
#[test]
fn a_rule_that_finds_nothing_is_a_mistake() {
    let proxy = "proxy = { addresses = [] }\n[[rule]]\nname = \"a\"\nlimits = [\"a=5/min\"]\n";
    let none = [
        "path = \"/search?pages=1\"",
        "path = \"/a#b\"",
        "domain = \"\"\ndescriptor = [\"tenant\"]",
        "path = \"/t/{t}/../x\"\nkey = [\"path:t\"]",
    ];
    let taken: Vec<_> = none
        .iter()
        .filter(|rule| checked(&format!("{proxy}{rule}\n")).status.success())
        .collect();
    assert!(taken.is_empty(), "{taken:#?}");
}

/// The URL of the store may hold a password.
#[tokio::test]
async fn a_broken_file_puts_no_password_into_the_log() {
    let service = Service::start(&mails(9));
    service.rewrite(&format!(
        "store = \"redis://user:s3cr3t@host:6379\n{}",
        mails(9)
    ));
    service.logs("the rules stay as they are", 1).await;
    assert!(!service.log().contains("s3cr3t"), "{}", service.log());
}

/// A limit under `local` holds also beside one under `open`.
#[tokio::test]
async fn a_share_of_a_process_holds_beside_a_rule_that_is_open() {
    let local = mails(2) + "on_failure = { local = 1 }\n";
    let service = Service::start(&format!(
        "store = \"redis://127.0.0.1:1\"\n{local}{}",
        local_free()
    ));
    let both = json!([{ "limit": "mails", "key": "a" }, { "limit": "open", "key": "a" }]);
    let mut allowed = Vec::new();
    for body in [
        json!({ "limit": "mails", "key": "a" }),
        json!({ "limit": "mails", "key": "a" }),
        both.clone(),
        both,
    ] {
        allowed.push(service.post("/check", body).await.is_allowed());
    }
    assert_eq!(allowed, [true, true, false, false]);
}

fn local_free() -> String {
    mails(9).replace("mails", "open")
}

/// A client that chooses a cost above 300 limits causes few lines.
#[tokio::test]
async fn a_client_does_not_fill_the_log() {
    let rule = |at| {
        LOGIN
            .replace("login", &format!("r{at}"))
            .replace("methods = [\"POST\"]", "cost_from = { query = \"n\" }")
    };
    let service = proxied(&(0..300).map(rule).collect::<String>());
    for at in 0..300 {
        assert_eq!(
            service.ask("GET", &format!("/r{at}?n=9"), &[]).await.status,
            429
        );
    }
    let lines = service.log().lines().count();
    assert!(
        lines < 30,
        "{lines} lines: {}",
        service.log().lines().next().unwrap()
    );
}

/// Ids count up, so a program that has one admission knows the ids of the next.
#[tokio::test]
async fn the_next_id_frees_no_place_of_another() {
    let service = Service::start(JOBS);
    let take = json!({ "limit": "jobs", "key": "a", "lease": 60 });
    let own = service.post("/check", &take).await.json()["admission"].clone();
    for _ in 0..8 {
        assert!(service.post("/check", &take).await.is_allowed());
    }
    let (first, ticket) = own["id"].as_str().unwrap().split_at(16);
    let first = u64::from_str_radix(first, 16).unwrap();
    for step in 1..=8 {
        let mut guessed = own.clone();
        guessed["id"] = format!("{:016x}{ticket}", first.wrapping_add(step)).into();
        let settled = service
            .post("/settle", json!({ "admission": guessed, "actual": 0 }))
            .await;
        assert_eq!(settled.json()["settled"], false, "{step}");
    }
}

/// Docker and others kill after 10 s, and places have to be given back before.
#[tokio::test]
async fn half_a_head_does_not_hold_up_the_end() {
    let service = Service::start(JOBS);
    let mut stream = TcpStream::connect(service.http.replace("http://", "")).unwrap();
    stream
        .write_all(b"POST /check HTTP/1.1\r\nhost: a\r\n")
        .unwrap();
    sleep(Duration::from_millis(300)).await;
    let begun = Instant::now();
    service.signal("TERM");
    assert_eq!(service.end(), 0);
    assert!(
        begun.elapsed() < Duration::from_secs(8),
        "{:?}",
        begun.elapsed()
    );
}

#[tokio::test]
async fn a_request_of_grpc_that_does_not_arrive_is_ended() {
    let service = Service::start(ENVOY);
    let mut stream = TcpStream::connect(service.grpc.replace("http://", "")).unwrap();
    let path = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
    let head =
        "host: a\r\ncontent-type: application/grpc\r\nte: trailers\r\ncontent-length: 100\r\n\r\n";
    write!(stream, "POST {path} HTTP/1.1\r\n{head}").unwrap();
    stream
        .set_read_timeout(Some(Duration::from_secs(12)))
        .unwrap();
    let ended = tokio::task::spawn_blocking(move || stream.read(&mut [0; 100]))
        .await
        .unwrap();
    assert!(ended.is_ok(), "it is still open after 12 s: {ended:?}");
}

/// WSGI and PHP decode the whole path, and resolve nothing: `<path:rest>` is `../x` there.
#[tokio::test]
async fn a_path_is_read_as_decoded_and_not_resolved() {
    let rules = LOGIN
        .replace("methods = [\"POST\"]", "")
        .replace("/login", "/files/{*path}");
    let service = proxied(&rules);
    assert_eq!(service.ask("GET", "/files/../x", &[]).await.status, 200);
    let mut statuses = Vec::new();
    for path in ["/files/../x", "/files%2F../x", "/files%2f..%2F..%2Fx"] {
        statuses.push(service.ask("GET", path, &[]).await.status);
    }
    assert_eq!(statuses, [429, 429, 429]);
}

/// Without the store, a rule under `open` refuses nothing, as it does alone. The rule under `local`
/// beside it still refuses.
#[tokio::test]
async fn a_rule_under_open_refuses_nothing_beside_one_under_local() {
    let rules = "[[rule]]\nname = \"login\"\nlimits = [\"login=3/min\"]\nkey = [\"text\"]\non_failure = \"open\"\n\
                 [[rule]]\nname = \"all\"\nlimits = [\"all=8/min\"]\nkey = [\"text\"]\non_failure = { local = 4 }\n";
    let service = Service::start(&format!("store = \"redis://127.0.0.1:1\"\n{rules}"));
    let both = json!([{ "limit": "login", "key": ["a"] }, { "limit": "all", "key": ["a"] }]);
    for allowed in [true, true, false] {
        let answer = service.post("/check", both.clone()).await;
        assert!(
            answer.status == 200 && answer.text.contains(&format!("\"allowed\":{allowed}")),
            "{}",
            answer.text
        );
    }
}
