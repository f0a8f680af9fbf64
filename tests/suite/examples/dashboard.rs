//! The dashboard and the alerts of the example `metrics`. `tests/dashboard.sh` runs them in a real
//! Prometheus.

use std::collections::BTreeSet;

use serde_json::Value;

const DASHBOARD: &str = include_str!("../../../examples/metrics/dashboard.json");
const ALERTS: &str = include_str!("../../../examples/metrics/alerts.yml");

/// The names of our metrics in a text. A histogram has its name without the suffix of Prometheus.
fn metrics_in(text: &str) -> BTreeSet<&str> {
    let words = text.split(|letter: char| !(letter.is_ascii_alphanumeric() || letter == '_'));
    words
        .filter(|word| word.starts_with("rate_limit_"))
        .map(|word| word.trim_end_matches("_bucket"))
        .collect()
}

#[test]
fn the_dashboard_and_the_alerts_name_the_metrics_of_the_table() {
    let source = include_str!("../../../src/metrics.rs");
    let kinds = ["counter", "gauge", "histogram"];
    let rows = source
        .lines()
        .filter_map(|line| line.strip_prefix("//! | `")?.split_once("` | "));
    let table: BTreeSet<&str> = rows
        .filter(|(_, row)| {
            kinds
                .iter()
                .any(|kind| row.starts_with(&format!("{kind} |")))
        })
        .map(|(name, _)| name)
        .collect();
    assert_eq!(
        metrics_in(DASHBOARD),
        table,
        "the dashboard shows every metric"
    );
    assert!(
        metrics_in(ALERTS).is_subset(&table),
        "{:?}",
        metrics_in(ALERTS)
    );
}

#[test]
fn each_panel_says_what_to_do() {
    let dashboard: Value = serde_json::from_str(DASHBOARD).unwrap();
    let panels: Vec<&Value> = dashboard["panels"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|panel| panel["type"] != "row")
        .collect();
    assert!(panels.len() > 10);
    for panel in panels {
        assert!(
            panel["description"]
                .as_str()
                .is_some_and(|text| text.ends_with('.')),
            "{panel}"
        );
        assert!(
            panel["fieldConfig"]["defaults"]["unit"].is_string(),
            "{panel}"
        );
    }
}

#[cfg(feature = "metrics")]
#[tokio::test]
async fn the_metrics_show_each_failure_mode() {
    // No server listens on port 1.
    let server =
        crate::support::example::Server::start("metrics", &[("REDIS_URL", "redis://127.0.0.1:1/")]);
    assert_eq!(
        server
            .send("GET", "/api/items", &[("x-tenant", "ada")])
            .await
            .status,
        200
    );
    assert_eq!(
        server
            .send("GET", "/search", &[("x-tenant", "ada")])
            .await
            .status,
        200
    );
    assert_eq!(server.post("/login", &[], "").await.status, 503);
    let metrics = server.get("/metrics").await.body;
    for (layer, mode) in [("api", "open"), ("search", "local"), ("login", "closed")] {
        let line = format!(r#"rate_limit_degraded_total{{layer="{layer}",mode="{mode}"}} 1"#);
        assert!(
            metrics.lines().any(|other| other == line),
            "{line} is not in {metrics}"
        );
    }
}
