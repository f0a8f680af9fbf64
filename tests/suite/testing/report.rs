//! The report of the conformance suite.

use std::future::pending;

use tower_sliding_window::{Algorithm, MemoryStore, testing::Fault};
use tower_sliding_window_conformance::Conformance;

use crate::support::stores::{broken_rules, with_fault};

/// A text for each rule that the store breaks, and one for the history that differs.
fn broken(report: &str) -> Vec<String> {
    report.split("\n- ").skip(1).map(str::to_owned).collect()
}

#[tokio::test]
async fn every_broken_rule_is_named_and_the_others_go_on() {
    let failing = async |_| with_fault(Fault::Fails);
    let report = broken_rules(&Conformance::new().seeds(5..35), failing).await;
    assert!(broken(&report).len() > 10, "{report}");
    assert!(
        report.starts_with(
            "the store breaks rules:\n- a future counts nothing before it is polled: "
        ),
        "{report}"
    );
    let of_history = broken(&report).pop().unwrap();
    assert!(
        of_history.starts_with("a history of the seed 5 differs: "),
        "{of_history}"
    );
    assert!(
        of_history.contains(": expected a decision, got StoreError"),
        "{of_history}"
    );
}

#[tokio::test]
#[should_panic(expected = "the store breaks rules:\n- ")]
async fn a_broken_rule_fails_the_test_by_its_name() {
    Conformance::new()
        .run(async |_| with_fault(Fault::Fails))
        .await;
}

#[tokio::test(start_paused = true)]
async fn a_store_that_hangs_breaks_each_rule_by_its_name() {
    let suite = Conformance::new()
        .algorithms([Algorithm::SLIDING_LOG])
        .seeds(5..35);
    let makes_none = broken_rules(&suite, async |_| pending::<MemoryStore>().await).await;
    for report in [
        makes_none,
        broken_rules(&suite, async |_| with_fault(Fault::Hangs)).await,
    ] {
        let hangs = |broken: &String| broken.ends_with(": it took longer than 300s");
        assert!(
            broken(&report).len() > 10 && broken(&report).iter().all(hangs),
            "{report}"
        );
    }
}

/// A store by another clock differs at once, and by the same steps each time.
#[tokio::test]
async fn a_seed_stands_for_a_history() {
    let suite = Conformance::new().seeds([27]);
    let without_the_clock = async |_| MemoryStore::new();
    let [first, second] = [
        broken_rules(&suite, without_the_clock).await,
        broken_rules(&suite, without_the_clock).await,
    ];
    let steps = |report: String| {
        assert!(
            report.contains("a history of the seed 27 differs: "),
            "{report}"
        );
        report
            .split_once(". The steps that lead there:")
            .unwrap()
            .1
            .to_owned()
    };
    assert_eq!(steps(first), steps(second));
}
