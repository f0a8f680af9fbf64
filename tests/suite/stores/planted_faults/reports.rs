//! What the conformance suite says of each planted fault.

use tower_sliding_window::{Algorithm, testing::Conformance};

use super::{Fault, planted};

async fn report_on(fault: Fault, seed: u64) -> String {
    let exact = Conformance::new().algorithms([Algorithm::sliding_log()]).seed(seed);
    exact.run(async |clock| planted(clock, fault)).await.to_string()
}

macro_rules! faults {
    ($($test:ident: $fault:ident, $says:expr;)*) => {
        $(
            #[tokio::test]
            async fn $test() {
                for seed in [27, 1_000] {
                    let report = report_on(Fault::$fault, seed).await;
                    println!("{:?} {report}", stringify!($fault));
                    assert!(report.contains($says), "{report}");
                }
            }
        )*
    };
}

faults! {
    no_rule_is_broken_without_a_fault: None, "the store keeps all rules";
    a_store_that_admits_one_unit_too_many_is_found: AdmitsOneUnitTooMany, "expected (5, 5), got (6, 6)";
    a_store_whose_refusals_write_is_found: CountsRefusals, "used units";
    a_store_that_counts_a_settlement_twice_is_found: CountsEachSettlement, "expected it to be not counted, got counted";
    a_store_with_a_reset_time_a_microsecond_too_early_is_found: ResetsTooEarly, "microseconds until the reset time";
    a_store_with_a_retry_time_a_microsecond_too_early_is_found: RetriesTooEarly, "microseconds until the retry time";
    a_store_that_counts_an_id_twice_is_found: ForgetsIds, "got the id";
    a_store_that_decides_each_limit_alone_is_found: DecidesEachLimitAlone, "used units";
    a_store_whose_leases_never_end_is_found: NeverEndsLeases, "reserved for";
    a_store_that_refuses_at_the_end_of_a_lease_is_found: RefusesAtTheEndOfALease, "reserved for";
    a_store_that_writes_in_a_second_step_is_found: WritesInASecondStep, "checks at the same moment admit exactly the limit";
    a_store_that_counts_futures_before_they_are_polled_is_found: CountsUnpolledFutures, "a future counts nothing before it is polled";
    a_store_that_drops_limits_after_the_fourth_is_found: DropsLimitsAfterTheFourth, "all limits of a check are decided, however many";
    a_store_whose_refusals_have_another_time_is_found: RefusesAtAnotherTime, "expected a decision of the time";
    a_store_whose_clones_count_alone_is_found: CountsOnEachCloneAlone, "used units";
    a_unit_that_leaves_a_microsecond_late_is_found: LosesAUnitAMicrosecondLate, "expected";
    a_retry_time_of_the_oldest_unit_is_found: RetriesWhenTheOldestUnitsLeave, "microseconds until the retry time";
    a_store_that_ignores_costs_is_found: CountsEachCheckAsOneUnit, "used units";
    a_store_that_ignores_leases_is_found: IgnoresLeases, "reserved units";
    a_shadow_limit_that_refuses_is_found: RefusesByShadowLimits, "expected an admission, got a refusal";
    a_store_that_counts_charges_of_nothing_is_found: CountsWhatTakesNothing, "used units";
    a_store_whose_limits_share_units_is_found: CountsForEveryLimitOfTheKey, "used units";
    a_reset_that_forgets_nothing_is_found: ResetsNothing, "used units";
    a_store_that_admits_more_after_a_step_back_is_found: ForgetsAllAfterAStepBack, "step the clock back";
    a_store_that_starts_anew_under_changed_units_is_found: ForgetsAChangedLimit, "used units";
    a_second_settlement_that_frees_units_is_found: FreesTheKeyBySecondSettlements, "used units";
    a_store_that_ignores_late_settlements_is_found: IgnoresLateSettlements, "expected it to be counted, got not counted";
    a_store_that_settles_at_the_reserved_cost_is_found: SettlesAtTheReservedCost, "settlement";
    a_store_that_reads_keys_in_lower_case_is_found: ReadsKeysInLowerCase, "keys differ in every byte";
    a_store_whose_lack_of_an_algorithm_is_a_failure_is_found: FailsForAllOfTheStore, "fails alone";
}
