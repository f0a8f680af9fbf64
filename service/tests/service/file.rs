//! What the file of the rules says, and its mistakes.

use std::{fmt::Write, sync::Arc};

use serde_json::json;
use tokio::task::JoinHandle;

use crate::support::{Service, checked, stores};

const GOOD: &str = "[[rule]]\nname = \"a\"\npath = \"/a\"\nlimits = [\"a=5/min\"]\n";

#[test]
fn a_check_says_what_would_run() {
    let example = checked(include_str!("../../example.toml"));
    let said = String::from_utf8(example.stdout).unwrap();
    assert!(
        example.status.success(),
        "{}",
        String::from_utf8_lossy(&example.stderr)
    );
    for words in [
        "127.0.0.1:8090",
        "store memory",
        "rule \"login\": login=5/min by client",
        "search-strict=30/min in the shadow",
        "5 rules",
    ] {
        assert!(said.contains(words), "{said}");
    }
    let secret = checked(
        "store = \"redis://user:s3cr3t@host\"\n[[rule]]\nname = \"r\"\nlimits = [\"r=5/min\"]\n",
    );
    assert!(!String::from_utf8(secret.stdout).unwrap().contains("s3cr3t"));
}

#[test]
fn each_mistake_is_told_with_its_place() {
    let proxy = |text: &str| {
        if text.contains("[proxy]") {
            ""
        } else {
            "[proxy]\naddresses = []\n"
        }
    };
    let second = |text: &str| format!("{GOOD}[[rule]]\nname = \"b\"\n{text}\n{}", proxy(text));
    let alone = |text: &str| format!("{text}\n[[rule]]\nname = \"r\"\nlimits = [\"r=5/min\"]\n");
    for (rules, words) in [
        (
            "lisen = \"x\"".to_owned(),
            &["line 1, column 1", "lisen"][..],
        ),
        ("[[rule]]\nname = 5".to_owned(), &["line 2, column 8"]),
        (
            second("limits = [\"b=5/fortnight\"]"),
            &["line 7", "fortnight"],
        ),
        (
            second("limits = [\"b=5/min\"]\nlimit = 3"),
            &["line 8", "limit"],
        ),
        (
            second("limits = []"),
            &["line 5, column 1", "rule \"b\"", "no limits"],
        ),
        (
            second("limits = [\"b=5/min\"]").replace("\"b\"", "\"a\""),
            &["line 5", "rule \"a\"", "another rule of this name"],
        ),
        (
            second("path = \"/a\"\nlimits = [\"b=5/min\"]"),
            &["line 5", "rule \"b\"", "hidden", "rule \"a\""],
        ),
        (
            second(
                "path = \"/A/\"\nlimits = [\"b=5/min\"]\n[proxy]\naddresses = []\nignore_case = true",
            ),
            &["hidden", "rule \"a\""],
        ),
        (
            second("path = \"/a\"\nmethods = [\"GET\"]\nlimits = [\"b=5/min\"]"),
            &["hidden", "rule \"a\""],
        ),
        (
            second("path = \"/{b\"\nlimits = [\"b=5/min\"]"),
            &["rule \"b\"", "/{b"],
        ),
        (
            second("path = \"b\"\nlimits = [\"b=5/min\"]"),
            &["must begin with /"],
        ),
        (
            second("path = \"/b\"\nlimits = [\"a=6/min\"]"),
            &["rule \"b\"", "a=6/min", "a=5/min", "rule \"a\""],
        ),
        (
            second("path = \"/b\"\nlimits = [\"a=5/h\"]"),
            &["rule \"b\"", "rule \"a\""],
        ),
        (
            second("path = \"/b\"\nkey = [\"header:x-a\"]\nlimits = [\"a=5/min\"]"),
            &["another key", "rule \"a\""],
        ),
        (second("limits = [\"b=1/s\", \"b=5/min\"]"), &["twice"]),
        (
            second("path = \"/b\"\ncost = 0\nlimits = [\"b=5/min\"]"),
            &["line 8", "nonzero"],
        ),
        (
            second("path = \"/b\"\ncost = -3\nlimits = [\"b=5/min\"]"),
            &["line 8", "-3"],
        ),
        (second("cost = 2\nlimits = [\"b=5/min\"]"), &["need a path"]),
        (
            second("path = \"/b\"\nmethods = [\"post\"]\nlimits = [\"b=5/min\"]"),
            &["post", "no method"],
        ),
        (
            second("path = \"/b\"\nlimits = [\"b=5 concurrent\"]"),
            &["concurrent", "POST /check"],
        ),
        (
            second("path = \"/b\"\nkey = [\"text\"]\nlimits = [\"b=5/min\"]"),
            &["no key \"text\""],
        ),
        (
            second("path = \"/b\"\nkey = [\"clinet\"]\nlimits = [\"b=5/min\"]"),
            &["clinet"],
        ),
        (
            second("path = \"/b\"\nkey = [\"header:a b\"]\nlimits = [\"b=5/min\"]"),
            &["names no header"],
        ),
        (
            second("path = \"/b\"\nkey = [\"header:authorization\"]\nlimits = [\"b=5/min\"]"),
            &["header:authorization", "one value in several ways"],
        ),
        (
            second("path = \"/b\"\nkey = [\"header:X-Forwarded-For\"]\nlimits = [\"b=5/min\"]"),
            &["header:X-Forwarded-For", "an address is \"client\""],
        ),
        (
            second("path = \"/b\"\nkey = [\"api-key:x-api-key\"]\nlimits = [\"b=5/min\"]"),
            &["secret"],
        ),
        (
            second("domain = \"web\"\nlimits = [\"b=5/min\"]"),
            &["descriptor"],
        ),
        (
            second("path = \"/b\"\nkey = [\"path:c\"]\nlimits = [\"b=5/min\"]"),
            &["rule \"b\"", "path:c"],
        ),
        (
            alone("token = { env = \"NO_SUCH_TOKEN\" }"),
            &["NO_SUCH_TOKEN", "openssl rand"],
        ),
        (
            second("limits = [\"b=5/min\"]\nalso = [{ key = [\"text\"], limits = [\"c=1/min\"] }]"),
            &["also needs a path"],
        ),
        (
            second("path = \"/b\"\nlimits = [\"b=5/min\"]\nalso = [{ key = [] }]"),
            &["no limits"],
        ),
        (
            second(
                "path = \"/b\"\nlimits = [\"b=5/min\"]\nalso = [{ key = [\"path:c\"], limits = [\"c=1/min\"] }]",
            ),
            &["path:c"],
        ),
        (
            second(
                "path = \"/b\"\nlimits = [\"b=5/min\"]\nalso = [{ key = [], limits = [\"b=5/min\"] }]",
            ),
            &["the limit \"b\" twice"],
        ),
        ("on_failure = \"shut\"".to_owned(), &["line 1", "shut"]),
        (alone("store = \"mysql://host\""), &["store"]),
        (
            alone("listen = \"0.0.0.0:8090\""),
            &["open to other machines", "token"],
        ),
        (
            alone("grpc_listen = \"[::]:8091\""),
            &["open to other machines"],
        ),
        (alone("listen = \"localhost\""), &["localhost"]),
        (
            alone("[proxy]\naddresses = [\"10.0.0.0/33\"]"),
            &["addresses", "10.0.0.0/33"],
        ),
        (
            alone("[proxy]\naddresses = []\nrefusal_status = 200"),
            &["refusal_status"],
        ),
        (
            alone("[proxy]\naddresses = []\nask = \"original\""),
            &["refusal_status = 403"],
        ),
        (String::new(), &["no [[rule]]"]),
        (GOOD.to_owned(), &["rule \"a\"", "needs [proxy]"]),
        (
            second("path = \"/page/<x>\"\nlimits = [\"b=5/min\"]"),
            &["/page/<x>", "/page/{number}"],
        ),
        (
            second("path = \"/page/:x\"\nlimits = [\"b=5/min\"]"),
            &["/page/:x", "/page/{number}"],
        ),
    ] {
        let output = checked(&rules);
        let told = String::from_utf8(output.stderr).unwrap();
        assert!(
            !output.status.success() && words.iter().all(|word| told.contains(word)),
            "{rules}\n=> {told}\nneeds {words:?}"
        );
    }
    let both = format!(
        "{GOOD}methods = [\"GET\"]\n{}",
        GOOD.replace("\"a\"", "\"b\"")
            .replace("a=5", "b=5")
            .replace("limits", "methods = [\"POST\"]\nlimits")
    );
    assert!(
        checked(&(both + proxy(""))).status.success(),
        "one path, two methods"
    );
    assert!(
        checked(&alone(
            "listen = \"0.0.0.0:8090\"\ntoken = { env = \"SERVICE_TOKEN\" }"
        ))
        .status
        .success()
    );
}

#[tokio::test]
async fn a_file_that_changes_is_read_again_and_a_broken_one_is_not_taken() {
    let rules = |units: u64| format!("[[rule]]\nname = \"a\"\nlimits = [\"a={units}/min\"]\n");
    let service = Service::start(&rules(5));
    let check = async || {
        service
            .post("/check", json!({ "limit": "a", "key": "ada" }))
            .await
            .json()
    };
    assert_eq!(check().await["of"], 5);
    service.rewrite(&rules(9));
    service.logs("read again", 1).await;
    let after = check().await;
    assert_eq!(
        (&after["of"], &after["used"]),
        (&json!(9), &json!(2)),
        "what is spent stays spent"
    );

    service.rewrite("[[rule]]\nname = \"a\"\nlimits = [\"a=5/fortnight\"]\n");
    service.logs("the rules stay as they are", 1).await;
    assert!(
        service.log().contains("line 5, column 11"),
        "{}",
        service.log()
    );
    service.signal("HUP");
    service.logs("the rules stay as they are", 2).await;
    std::fs::remove_file(service.path()).unwrap();
    service.logs("the rules stay as they are", 3).await;
    assert_eq!(check().await["of"], 9);
    service.rewrite(&rules(7));
    service.logs("read again", 2).await;
    service.signal("HUP");
    service.logs("read again", 3).await;
    assert_eq!(check().await["of"], 7);
    assert!(
        service
            .get("/metrics")
            .await
            .text
            .contains(r#"rate_limit_service_reloads_total{outcome="refused"}"#)
    );
    service.rewrite(&format!("store = \"redis://127.0.0.1:1\"\n{}", rules(7)));
    service.logs("from the next start on", 1).await;
    assert_eq!(
        check().await["used"],
        5,
        "all five checks, in the store of the start"
    );
}

/// A file of the same size and time is another one.
#[tokio::test]
async fn a_file_that_is_replaced_is_read_again() {
    let rules = |units: u64| format!("[[rule]]\nname = \"a\"\nlimits = [\"a={units}/min\"]\n");
    let service = Service::start(&rules(5));
    let time = std::fs::metadata(service.path())
        .unwrap()
        .modified()
        .unwrap();
    service.rewrite_at(&rules(9), Some(time));
    service.logs("read again", 1).await;
    assert_eq!(
        service
            .post("/check", json!({ "limit": "a", "key": "ada" }))
            .await
            .json()["of"],
        9
    );
}

/// Each request is decided by the old rules or by the new ones, and what is spent stays spent.
#[tokio::test]
async fn a_reload_under_load_loses_and_gives_nothing() {
    for (store, _server) in stores() {
        let rules = |other: usize| {
            format!(
                "store = {store:?}\n[[rule]]\nname = \"a\"\nlimits = [\"a=700/h\"]\n[[rule]]\nname = \"b{other}\"\nlimits = [\"b=1/h\"]\n"
            )
        };
        let service = Arc::new(Service::start(&rules(0)));
        let ask = async |service: Arc<Service>| {
            let mut decided = 0;
            let mut admitted = 0;
            // A busy machine may decide some too late.
            while decided < 100 {
                let answer = service
                    .post("/check", json!({ "limit": "a", "key": "ada" }))
                    .await;
                let is_allowed = answer.is_allowed();
                if answer.json()["undecided"].is_null() {
                    decided += 1;
                    admitted += u32::from(is_allowed);
                }
            }
            admitted
        };
        let tasks: Vec<_> = (0..10)
            .map(|_| tokio::spawn(ask(Arc::clone(&service))))
            .collect();
        let mut reloads = 0;
        while reloads == 0 || !tasks.iter().all(JoinHandle::is_finished) {
            reloads += 1;
            service.rewrite(&rules(reloads));
            service.signal("HUP");
            service.logs("read again", reloads).await;
        }
        let mut admitted = 0;
        for task in tasks {
            admitted += task.await.unwrap();
        }
        assert!(admitted <= 700, "{admitted}");
        let counted = service
            .post("/peek", json!({ "limit": "a", "key": "ada" }))
            .await
            .json();
        assert_eq!(counted["used"], 700, "after {reloads} reloads");
    }
}

#[tokio::test]
async fn ten_thousand_rules_are_read_and_found() {
    let mut rules = "[proxy]\naddresses = [\"127.0.0.1\"]\n".to_owned();
    for rule in 0..10_000 {
        write!(rules, "[[rule]]\nname = \"r{rule}\"\npath = \"/r{rule}/{{id}}\"\nlimits = [\"l{rule}=1/min\"]\n")
            .unwrap();
    }
    let service = Service::start(&rules);
    for rule in [0, 5_000, 9_999] {
        let uri = format!("/r{rule}/7");
        assert_eq!(
            [
                service.ask("GET", &uri, &[]).await.status,
                service.ask("GET", &uri, &[]).await.status
            ],
            [200, 429]
        );
    }
    service.signal("HUP");
    service.logs("read again", 1).await;
    assert_eq!(service.ask("GET", "/r5000/7", &[]).await.status, 429);
}
