//! What the conformance suite says of each planted fault.

use tower_sliding_window::Algorithm;
use tower_sliding_window_conformance::Conformance;

use super::{Fault, planted};
use crate::support::stores::broken_rules;

/// What the suite says of the fault, without the steps that lead there: the rules that it breaks,
/// and how a history differs.
async fn report_on(fault: Fault, seed: u64) -> String {
    let exact = Conformance::new()
        .algorithms([Algorithm::SLIDING_LOG])
        .seeds(seed..seed + 30);
    let report = broken_rules(&exact, async |clock| planted(clock, fault)).await;
    println!("{report}");
    report
        .lines()
        .filter(|line| !line.starts_with("    "))
        .collect::<Vec<_>>()
        .join("\n")
}

#[tokio::test]
async fn no_rule_is_broken_without_a_fault() {
    for seed in [27, 1_000] {
        assert_eq!(report_on(Fault::None, seed).await, "");
    }
}

/// Each report says all of the texts, and none of those after `never`.
macro_rules! faults {
    ($($test:ident: $fault:ident, [$($says:expr),+] $(never [$($not:expr),+])?;)*) => {
        $(
            #[tokio::test]
            async fn $test() {
                for seed in [27, 1_000] {
                    let report = report_on(Fault::$fault, seed).await;
                    $(assert!(report.contains($says), "{report}");)+
                    $($(assert!(!report.contains($not), "{report}");)+)?
                }
            }
        )*
    };
}

/// A report of one rule that no history shows.
const HISTORY: &str = "a history of the seed";
const PAIRS: &str = "rules:\n- every pair of charges is decided and settled alike";

faults! {
    a_store_that_admits_one_unit_too_many_is_found: AdmitsOneUnitTooMany,
        ["50 checks of a limit of 5: expected (5, 5), got (6, 6)", "expected a refusal, got an admission with"];
    a_store_whose_refusals_write_is_found: CountsRefusals,
        ["50 checks of a limit of 5: expected (5, 5), got (5, 50)", HISTORY] never ["got an admission"];
    a_store_that_counts_a_settlement_twice_is_found: CountsEachSettlement,
        ["settlements at the same moment count once: settlements that count, and used units: expected (1, 3), got (20, 22)",
        "expected it to be not counted, got counted"];
    a_store_with_a_reset_time_a_microsecond_too_early_is_found: ResetsTooEarly,
        ["microseconds until the reset time"] never ["retry time"];
    a_store_with_a_retry_time_a_microsecond_too_early_is_found: RetriesTooEarly,
        ["the retry time of a full limit: expected Some(31536000s), got Some(31535999.999999s)",
        "microseconds until the retry time"] never ["reset time"];
    a_store_that_counts_an_id_twice_is_found: ForgetsIds,
        ["a check repeated at the same moment counts once: admissions of one id: expected 30, got 10", "got the id"];
    a_store_that_decides_each_limit_alone_is_found: DecidesEachLimitAlone,
        ["50 checks of limits of 5 and of 20: expected (20, 20), got (15, 20)", "expected 0 used units"];
    a_store_whose_leases_never_end_is_found: NeverEndsLeases,
        ["rules:\n- every pair", "microseconds until the reset time of", "00000. The steps"];
    a_store_that_refuses_at_the_end_of_a_lease_is_found: RefusesAtTheEndOfALease,
        ["the retry time of a full limit: expected Some(1µs), got Some(0ns)", "microseconds until the reset time"];
    a_store_that_writes_in_a_second_step_is_found: WritesInASecondStep,
        ["checks at the same moment admit exactly the limit: admissions and used units of 50 checks of a limit of 5: \
        expected (5, 5), got (50, 50)"] never [HISTORY];
    a_store_that_counts_futures_before_they_are_polled_is_found: CountsUnpolledFutures,
        ["rules:\n- a future counts nothing before it is polled: used units before a future is polled: \
        expected 0, got 3"] never ["got 3\n"];
    a_store_that_drops_limits_after_the_fourth_is_found: DropsLimitsAfterTheFourth,
        ["rules:\n- a history", " units of \""];
    a_store_whose_refusals_have_another_time_is_found: RefusesAtAnotherTime,
        ["rules:\n- a history", "expected a decision of the time"];
    a_store_whose_clones_count_alone_is_found: CountsOnEachCloneAlone,
        ["50 checks of a limit of 5: expected (5, 5), got (10, 5)", "used units of"];
    a_unit_that_leaves_a_microsecond_late_is_found: LosesAUnitAMicrosecondLate,
        ["the retry time of a full limit: expected Some(1µs), got Some(2µs)", "microseconds until the reset time"];
    a_retry_time_of_the_oldest_unit_is_found: RetriesWhenTheOldestUnitsLeave,
        ["rules:\n- a history", "microseconds until the retry time"];
    a_store_that_ignores_costs_is_found: CountsEachCheckAsOneUnit, ["used units of one id: expected 2, got 1", "used units of"];
    a_store_that_ignores_leases_is_found: IgnoresLeases, ["used units: expected (1, 3), got (0, 20)", "reserved units"];
    a_shadow_limit_that_refuses_is_found: RefusesByShadowLimits,
        [HISTORY, "in the shadow", "expected an admission, got a refusal"];
    a_store_that_counts_charges_of_nothing_is_found: CountsWhatTakesNothing,
        [PAIRS, HISTORY, "whether any unit is left", "used units"];
    a_store_whose_limits_share_units_is_found: CountsForEveryLimitOfTheKey,
        ["whether the limit of 5 holds: expected true, got false", "used units"];
    a_reset_that_forgets_nothing_is_found: ResetsNothing, ["rules:\n- a history"];
    a_store_that_admits_more_after_a_step_back_is_found: ForgetsAllAfterAStepBack,
        ["rules:\n- a history", "expected a refusal, got an admission"];
    a_store_that_starts_anew_under_changed_units_is_found: ForgetsAChangedLimit, ["rules:\n- a history", "used units"];
    a_store_without_the_window_in_the_identity_is_found: KnowsALimitByItsNameAlone,
        [PAIRS, "calls=40/min for 0: expected 60000000 microseconds until the reset time of \"calls\", got 10000000", HISTORY];
    a_second_settlement_that_frees_units_is_found: FreesTheKeyBySecondSettlements,
        ["settlements at the same moment count once: settlements that count, and used units: expected (1, 3), got (1, 0)", HISTORY];
    a_store_that_ignores_late_settlements_is_found: IgnoresLateSettlements,
        [PAIRS, HISTORY, "expected it to be counted, got not counted"];
    a_store_that_settles_at_the_reserved_cost_is_found: SettlesAtTheReservedCost,
        ["settlements that count, and used units: expected (1, 3), got (1, 20)", "differs: a settlement of the check", "used units"];
    a_store_that_reads_keys_in_lower_case_is_found: ReadsKeysInLowerCase,
        ["rules:\n- keys differ in every byte: a check for Key(\"user\"): expected true, got false"] never [HISTORY];
    a_store_whose_lack_of_an_algorithm_is_a_failure_is_found: FailsForAllOfTheStore,
        ["fails alone: whether it is an error of one check: expected true, got false"] never [HISTORY];
}

/// Histories that differ end with the step that shows the fault.
#[tokio::test]
async fn the_steps_of_a_report_show_the_fault() {
    let exact = Conformance::new()
        .algorithms([Algorithm::SLIDING_LOG])
        .seeds(27..57);
    for (fault, step) in [
        (Fault::ForgetsAllAfterAStepBack, "step the clock back"),
        (Fault::ResetsNothing, ": reset "),
        (Fault::NeverEndsLeases, "reserved for"),
    ] {
        let report = broken_rules(&exact, async |clock| planted(clock, fault)).await;
        assert!(
            report
                .split_once("The steps that lead there:")
                .unwrap()
                .1
                .contains(step),
            "{report}"
        );
    }
}
