//! Rules of a decision as single tests, on both stores. The conformance suite finds most of their
//! breaches by random histories; these say what each rule means, and reach what histories do not:
//! hundreds of entries that have left, a clock near 1970.

mod algorithms;
mod checks;
mod clock_steps;
mod ids;
mod leases;
mod refusals;
mod settlements;
mod spent_units;
mod trial;
mod windows;

use self::trial::Trial;

macro_rules! on_both_stores {
    ($($file:ident { $($rule:ident)* })*) => {
        mod on_memory {
            $($(#[tokio::test] async fn $rule() { super::$file::$rule(super::Trial::of(crate::support::memory())).await; })*)*
        }
        mod on_redis {
            $($(#[tokio::test] async fn $rule() { super::$file::$rule(super::Trial::of(crate::support::redis())).await; })*)*
        }
    };
}

on_both_stores! {
    algorithms {
        only_a_fixed_window_admits_twice_the_limit_across_a_boundary
        a_counter_weights_the_previous_window
        a_counter_errs_by_at_most_one_limit
        limits_of_different_algorithms_are_decided_together
    }
    checks {
        several_limits_are_all_or_nothing
        several_keys_and_costs_are_all_or_nothing
        peeking_spends_nothing
        a_reset_forgets_one_key_of_one_limit
        keys_and_limits_are_separate
        a_decision_reports_its_tightest_limit
        a_shadow_limit_never_refuses
        many_limits_are_all_or_nothing
        keys_differ_in_every_byte
        decisions_say_when_they_were_made
    }
    clock_steps {
        the_reset_time_is_exact_after_a_step_back
        counting_is_unchanged_within_a_window_of_1970
    }
    ids {
        a_repeated_id_counts_once
        a_repeated_check_is_neither_charged_nor_refused_while_any_limit_knows_it
        a_repeated_check_may_hold_charges_of_every_kind
        a_settlement_finds_a_repeated_check_after_clock_steps
        a_settlement_finds_its_admission_among_many
        an_expired_id_counts_as_a_new_admission
        an_expired_admission_is_not_settled
        an_id_given_for_another_key_is_another_admission
    }
    leases {
        a_lease_ends_by_itself
        a_lease_lasts_at_most_one_window
        a_refusal_is_exact_unless_only_reservations_cause_it
        an_unsettled_reservation_refuses_until_its_lease_ends
        a_refusal_by_settled_units_outranks_one_by_reservations
    }
    refusals {
        refusals_cost_nothing
        retry_after_is_exact_to_the_microsecond
        retry_after_waits_for_enough_units
    }
    settlements {
        a_settlement_counts_once_at_its_cost
        spent_units_with_a_lease_are_settled
        units_settled_above_the_limit_refuse_until_they_leave
        charges_are_settled_one_by_one
        an_admission_can_be_refunded_by_its_id
        a_foreign_settlement_frees_nothing
        a_late_settlement_leaves_a_repeated_admission_alone
        admissions_with_one_id_are_settled_late_one_by_one
        absurd_costs_refuse_their_key_and_do_not_overflow
        an_admission_without_its_own_entry_counts_for_its_window
        a_lowered_limit_settles_exactly
    }
    spent_units {
        spent_units_count_beyond_the_limit_and_refuse_until_they_leave
        absurd_costs_are_counted_without_overflow
        endless_spending_never_admits_again
        spent_units_of_the_largest_limit_leave
    }
    windows {
        a_unit_leaves_exactly_one_window_later
        no_span_of_one_window_admits_more_than_the_limit
        several_admissions_fit_into_one_microsecond
        a_changed_limit_applies_to_the_recorded_history
        no_window_admits_more_because_another_limit_has_its_name
        limits_of_one_name_and_other_windows_are_apart
        extreme_numbers_are_exact
        a_key_recovers_one_window_after_the_clock_steps_back
        long_logs_are_exact
    }
}
