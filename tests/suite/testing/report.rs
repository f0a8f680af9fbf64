//! The report of the conformance suite.

use std::future::pending;

use tower_sliding_window::{
    Algorithm, MemoryStore,
    testing::{Conformance, Fault, FaultyStore},
};

#[tokio::test]
async fn every_broken_rule_is_named_and_the_others_go_on() {
    let failing = async |_| FaultyStore::with_fault(Fault::Fails);
    let report = Conformance::new().run(failing).await;
    assert_eq!(report.broken().count(), Conformance::rules().count());
    let text = report.to_string();
    assert!(text.starts_with("the store keeps 0 rules and breaks "), "{text}");
    for (rule, broken) in Conformance::rules().zip(report.broken()) {
        assert_eq!(broken.name(), rule);
        assert!(broken.failure().contains("Unavailable"), "{broken}");
        assert!(text.contains(&format!("\n- {rule}: ")), "{text}");
    }
}

#[tokio::test]
async fn one_rule_can_be_run_alone() {
    let one = Conformance::new().rule("refusals_cost_nothing");
    let report = one.run(async |clock| MemoryStore::builder().clock(&clock).build()).await;
    assert_eq!(report.kept().collect::<Vec<_>>(), ["refusals_cost_nothing"]);
    report.assert_kept();
}

#[tokio::test]
#[should_panic(expected = "no rule has the name")]
async fn an_unknown_rule_is_an_error() {
    let _ = Conformance::new().rule("no_such_rule").run(async |_| MemoryStore::new()).await;
}

#[tokio::test]
#[should_panic(expected = "the store breaks the rule refusals_cost_nothing: ")]
async fn a_broken_rule_fails_the_test_by_its_name() {
    let one = Conformance::new().rule("refusals_cost_nothing");
    one.run(async |_| FaultyStore::with_fault(Fault::Fails)).await.assert_kept();
}

#[tokio::test(start_paused = true)]
async fn a_store_that_hangs_breaks_a_rule_by_its_name() {
    let one = Conformance::new().rule("refusals_cost_nothing");
    for report in [
        one.run(async |_| pending::<MemoryStore>().await).await,
        one.run(async |_| FaultyStore::with_fault(Fault::Hangs)).await,
    ] {
        assert_eq!(report.broken().map(|rule| rule.name()).collect::<Vec<_>>(), ["refusals_cost_nothing"]);
    }
    let report = one.run(async |_| pending::<MemoryStore>().await).await;
    assert_eq!(report.to_string(), "the store breaks the rule refusals_cost_nothing: it took longer than 300s");
}

/// It cannot be known from outside whether such a store fails, or counts by other algorithms.
#[tokio::test]
async fn a_report_of_errors_names_the_choice_of_algorithms() {
    let failing = async |_| FaultyStore::with_fault(Fault::Fails);
    let one = Conformance::new().rule("a_lease_ends_by_itself");
    let text = one.run(failing).await.to_string();
    assert!(text.ends_with("name its own by `Conformance::algorithms`."), "{text}");
    let text = one.algorithms([Algorithm::log()]).run(failing).await.to_string();
    assert!(!text.contains("Conformance::algorithms"), "{text}");
}

/// A hand-made list of the names would let a rule vanish unnoticed.
#[test]
fn every_rule_has_a_name_of_its_own() {
    let mut names: Vec<_> = Conformance::rules().collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), Conformance::rules().count());
    assert!(names.len() >= 50, "{}", names.len());
}
