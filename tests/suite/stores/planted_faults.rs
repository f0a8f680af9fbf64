//! Stores with one planted fault: the conformance suite names the rule that each of them breaks.

use std::{future::ready, time::Duration};

use tokio::task::yield_now;
use tower_sliding_window::{
    AdmissionId, Algorithm, Charge, Check, Decision, Key, Limit, LimitStatus, ManualClock, MemoryStore, Settled,
    Settlement, Store,
    store::StoreFuture,
    testing::{BrokenRule, Conformance},
};

use crate::support::{MICROSECOND, check_of};

#[derive(Clone, Copy)]
enum Fault {
    None,
    AdmitsOneUnitTooMany,
    CountsRefusals,
    CountsEachSettlement,
    ResetsTooEarly,
    RetriesTooEarly,
    ForgetsIds,
    DecidesEachLimitAlone,
    NeverEndsLeases,
    RefusesAtTheEndOfALease,
    WritesInASecondStep,
    CountsUnpolledFutures,
    DropsLimitsAfterTheFourth,
    RefusesAtAnotherTime,
    CountsOnEachCloneAlone,
}

/// The in-process store with a fault.
struct Planted {
    store: MemoryStore,
    clock: ManualClock,
    fault: Fault,
}

impl Clone for Planted {
    fn clone(&self) -> Self {
        match self.fault {
            Fault::CountsOnEachCloneAlone => planted(self.clock.clone(), self.fault),
            fault => Self { store: self.store.clone(), clock: self.clock.clone(), fault },
        }
    }
}

fn planted(clock: ManualClock, fault: Fault) -> Planted {
    Planted { store: MemoryStore::builder().clock(&clock).build(), clock, fault }
}

/// The same charges, as units that were spent before.
fn as_spent(check: &Check) -> Check {
    check_of(check.charges().map(|charge| Charge::spent(charge.limit().clone(), charge.key(), charge.cost())))
}

/// The same charges and id, with other leases.
fn with_leases(check: &Check, lease: impl Fn(Duration) -> Duration) -> Check {
    let charge = |charge: &Charge| charge.lease().map(&lease).into_iter().fold(charge.clone(), Charge::reserve);
    check.id().into_iter().fold(check_of(check.charges().map(charge)), Check::with_id)
}

/// The same decision with other times of each limit.
fn with_times(
    check: &Check,
    decision: &Decision,
    times: impl Fn(&LimitStatus) -> (Duration, Option<Duration>),
) -> Decision {
    let mut statuses = decision.statuses();
    Decision::new(check, decision.at(), decision.id(), |charge| {
        let status = statuses.next().unwrap();
        let (reset, retry) = times(status);
        let least = if status.is_refused_by_reservations() { Duration::ZERO } else { retry.unwrap_or_default() };
        LimitStatus::new(charge, status.used(), reset, retry).with_reserved(status.reserved(), least)
    })
}

impl Planted {
    fn ask(&self, check: &Check) -> Decision {
        self.store.decide_now(check).unwrap().unwrap()
    }

    fn decide_at_once(&self, check: &Check) -> Decision {
        match self.fault {
            Fault::None
            | Fault::CountsEachSettlement
            | Fault::WritesInASecondStep
            | Fault::CountsUnpolledFutures
            | Fault::CountsOnEachCloneAlone => self.ask(check),
            Fault::DropsLimitsAfterTheFourth => {
                let four = check_of(check.charges().take(4).cloned());
                let decision = self.ask(&check.id().into_iter().fold(four, Check::with_id));
                let mut statuses = decision.statuses();
                Decision::new(check, decision.at(), decision.id(), |charge| {
                    let unseen = || LimitStatus::new(charge, charge.cost(), Duration::ZERO, None);
                    statuses.next().cloned().unwrap_or_else(unseen)
                })
            }
            Fault::RefusesAtAnotherTime => {
                let decision = self.ask(check);
                if decision.is_allowed() {
                    return decision;
                }
                let mut statuses = decision.statuses();
                Decision::new(check, decision.at() - MICROSECOND, decision.id(), |_| statuses.next().unwrap().clone())
            }
            Fault::AdmitsOneUnitTooMany => {
                let decision = self.ask(check);
                let just_full = |status: &LimitStatus| status.used() == status.limit().units();
                let is_one_unit = check.charges().all(|charge| charge.cost() == 1);
                if decision.is_allowed() || !is_one_unit || !decision.statuses().all(just_full) {
                    return decision;
                }
                self.ask(&as_spent(check))
            }
            Fault::CountsRefusals => {
                let decision = self.ask(check);
                if !decision.is_allowed() {
                    let _ = self.ask(&as_spent(check));
                }
                decision
            }
            Fault::ResetsTooEarly => {
                let decision = self.ask(check);
                with_times(check, &decision, |status| {
                    (status.reset_after().saturating_sub(MICROSECOND), status.retry_after())
                })
            }
            Fault::RetriesTooEarly => {
                let decision = self.ask(check);
                with_times(check, &decision, |status| {
                    (status.reset_after(), status.retry_after().map(|wait| wait.saturating_sub(MICROSECOND)))
                })
            }
            Fault::ForgetsIds => self.ask(&check_of(check.charges().cloned())),
            Fault::DecidesEachLimitAlone => {
                let id = check.id().unwrap_or_else(AdmissionId::fresh);
                let alone = |charge: &Charge| self.ask(&Check::new(charge.clone()).with_id(id));
                let decisions: Vec<Decision> = check.charges().map(alone).collect();
                let mut statuses = decisions.iter().map(Decision::binding);
                Decision::new(check, decisions[0].at(), id, |_| statuses.next().unwrap().clone())
            }
            Fault::NeverEndsLeases => self.ask(&with_leases(check, |_| Duration::MAX)),
            Fault::RefusesAtTheEndOfALease => {
                let decision = self.ask(&with_leases(check, |lease| lease + MICROSECOND));
                with_times(check, &decision, |status| {
                    let retry = status.retry_after();
                    (status.reset_after(), retry.map(|wait| if wait == MICROSECOND { Duration::ZERO } else { wait }))
                })
            }
        }
    }

    /// Reads what is left, and counts in a second step what has fitted in the first.
    async fn decide_in_two_steps(&self, check: &Check) -> Decision {
        let nothing = |charge: &Charge| Charge::new(charge.limit().clone(), charge.key().clone(), 0).unwrap();
        let read = self.ask(&check_of(check.charges().map(nothing)));
        let fits = check.charges().zip(read.statuses()).all(|(charge, status)| charge.cost() <= status.remaining());
        let is_plain = |charge: &Charge| !(charge.is_shadow() || charge.takes_nothing() || charge.lease().is_some());
        yield_now().await;
        let counts = fits && check.id().is_none() && check.charges().all(is_plain);
        if counts { self.ask(&as_spent(check)) } else { self.ask(check) }
    }
}

impl Store for Planted {
    fn decide(&self, check: Check) -> StoreFuture<Decision> {
        let planted = self.clone();
        match self.fault {
            Fault::CountsUnpolledFutures | Fault::CountsOnEachCloneAlone => {
                Box::pin(ready(Ok(self.decide_at_once(&check))))
            }
            Fault::WritesInASecondStep => Box::pin(async move { Ok(planted.decide_in_two_steps(&check).await) }),
            _ => Box::pin(async move { Ok(planted.decide_at_once(&check)) }),
        }
    }

    fn settle(&self, settlement: Settlement) -> StoreFuture<Settled> {
        let planted = self.clone();
        Box::pin(async move {
            let settled = planted.store.settle(settlement.clone()).await?;
            if settled.was_applied() || !matches!(planted.fault, Fault::CountsEachSettlement) {
                return Ok(settled);
            }
            let again = |charge: &Charge| Charge::spent(charge.limit().clone(), charge.key(), 1);
            let counted = planted.ask(&check_of(settlement.check().charges().map(again)));
            let mut statuses = counted.statuses();
            Ok(Settled::new(&settlement, counted.at(), true, |_| statuses.next().unwrap().clone()))
        })
    }

    fn reset(&self, limit: Limit, key: Key) -> StoreFuture<()> {
        self.store.reset(limit, key)
    }
}

/// The rules that a store with this fault breaks.
async fn broken_by(fault: Fault) -> Vec<&'static str> {
    let exact = Conformance::new().algorithms([Algorithm::log()]);
    let make = async |clock| planted(clock, fault);
    exact.run(make).await.broken().map(BrokenRule::name).collect()
}

#[tokio::test]
async fn no_rule_is_broken_without_a_fault() {
    assert_eq!(broken_by(Fault::None).await, [""; 0]);
}

#[tokio::test]
async fn a_store_that_admits_one_unit_too_many_is_found() {
    let broken = broken_by(Fault::AdmitsOneUnitTooMany).await;
    assert!(broken.contains(&"no_span_of_one_window_admits_more_than_the_limit"), "{broken:?}");
}

#[tokio::test]
async fn a_store_whose_refusals_write_is_found() {
    let broken = broken_by(Fault::CountsRefusals).await;
    assert!(broken.contains(&"refusals_cost_nothing"), "{broken:?}");
}

#[tokio::test]
async fn a_store_that_counts_a_settlement_twice_is_found() {
    let broken = broken_by(Fault::CountsEachSettlement).await;
    assert!(broken.contains(&"a_settlement_counts_once_at_its_cost"), "{broken:?}");
}

#[tokio::test]
async fn a_store_with_a_reset_time_a_microsecond_too_early_is_found() {
    let broken = broken_by(Fault::ResetsTooEarly).await;
    assert!(broken.contains(&"the_reset_time_is_exact_after_a_step_back"), "{broken:?}");
    assert!(!broken.contains(&"retry_after_is_exact_to_the_microsecond"), "{broken:?}");
}

#[tokio::test]
async fn a_store_with_a_retry_time_a_microsecond_too_early_is_found() {
    let broken = broken_by(Fault::RetriesTooEarly).await;
    assert!(broken.contains(&"retry_after_is_exact_to_the_microsecond"), "{broken:?}");
    assert!(!broken.contains(&"the_reset_time_is_exact_after_a_step_back"), "{broken:?}");
}

#[tokio::test]
async fn a_store_that_counts_an_id_twice_is_found() {
    let broken = broken_by(Fault::ForgetsIds).await;
    assert!(broken.contains(&"a_repeated_id_counts_once"), "{broken:?}");
}

#[tokio::test]
async fn a_store_that_decides_each_limit_alone_is_found() {
    let broken = broken_by(Fault::DecidesEachLimitAlone).await;
    assert!(broken.contains(&"several_limits_are_all_or_nothing"), "{broken:?}");
}

#[tokio::test]
async fn a_store_whose_leases_never_end_is_found() {
    let broken = broken_by(Fault::NeverEndsLeases).await;
    assert!(broken.contains(&"a_lease_ends_by_itself"), "{broken:?}");
}

/// The retry time is zero at the end of the lease, so a caller that waits for it would ask for ever.
#[tokio::test]
async fn a_store_that_refuses_at_the_end_of_a_lease_is_found() {
    let broken = broken_by(Fault::RefusesAtTheEndOfALease).await;
    assert!(broken.contains(&"an_unsettled_reservation_refuses_until_its_lease_ends"), "{broken:?}");
}

#[tokio::test]
async fn a_store_that_writes_in_a_second_step_is_found() {
    let broken = broken_by(Fault::WritesInASecondStep).await;
    assert!(broken.contains(&"concurrent_checks_admit_no_more_than_the_limit"), "{broken:?}");
    assert!(!broken.contains(&"no_span_of_one_window_admits_more_than_the_limit"), "{broken:?}");
}

#[tokio::test]
async fn a_store_that_counts_futures_before_they_are_polled_is_found() {
    assert_eq!(broken_by(Fault::CountsUnpolledFutures).await, ["a_check_is_counted_when_its_future_is_polled"]);
}

#[tokio::test]
async fn a_store_that_drops_limits_after_the_fourth_is_found() {
    assert_eq!(broken_by(Fault::DropsLimitsAfterTheFourth).await, ["many_limits_are_all_or_nothing"]);
}

#[tokio::test]
async fn a_store_whose_refusals_have_another_time_is_found() {
    assert_eq!(broken_by(Fault::RefusesAtAnotherTime).await, ["decisions_say_when_they_were_made"]);
}

#[tokio::test]
async fn a_store_whose_clones_count_alone_is_found() {
    let broken = broken_by(Fault::CountsOnEachCloneAlone).await;
    assert!(broken.contains(&"clones_of_a_store_count_together"), "{broken:?}");
}
