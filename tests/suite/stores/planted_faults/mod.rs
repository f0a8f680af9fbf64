//! Stores with one planted fault each. The conformance suite says of each what it has done, and
//! what was expected.

mod reports;

use std::{
    future::ready,
    sync::{Arc, Mutex},
    time::{Duration, SystemTime},
};

use futures_util::FutureExt;
use tokio::task::yield_now;
use tower_sliding_window::{
    Algorithm, Charge, Check, Decision, Key, Limit, MemoryStore, Store,
    check::{AdmissionId, Takes},
    decision::LimitStatus,
    error::{StoreError, StoreErrorKind},
    settlement::{Settled, Settlement},
    store::{ManualClock, StoreFuture},
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
    LosesAUnitAMicrosecondLate,
    RetriesWhenTheOldestUnitsLeave,
    CountsEachCheckAsOneUnit,
    IgnoresLeases,
    RefusesByShadowLimits,
    CountsWhatTakesNothing,
    CountsForEveryLimitOfTheKey,
    ResetsNothing,
    ForgetsAllAfterAStepBack,
    ForgetsAChangedLimit,
    KnowsALimitByItsNameAlone,
    FreesTheKeyBySecondSettlements,
    IgnoresLateSettlements,
    SettlesAtTheReservedCost,
    ReadsKeysInLowerCase,
    FailsForAllOfTheStore,
}

/// The in-process store with a fault.
struct Planted {
    store: MemoryStore,
    clock: ManualClock,
    fault: Fault,
    seen: Arc<Mutex<Seen>>,
}

/// What a store with a fault has seen: the charges, and the latest time.
#[derive(Default)]
struct Seen {
    charges: Vec<Charge>,
    latest: Option<SystemTime>,
}

impl Clone for Planted {
    fn clone(&self) -> Self {
        match self.fault {
            Fault::CountsOnEachCloneAlone => planted(self.clock.clone(), self.fault),
            fault => {
                let seen = Arc::clone(&self.seen);
                Self {
                    store: self.store.clone(),
                    clock: self.clock.clone(),
                    fault,
                    seen,
                }
            }
        }
    }
}

fn planted(clock: ManualClock, fault: Fault) -> Planted {
    Planted {
        store: MemoryStore::new().clock(&clock),
        clock,
        fault,
        seen: Arc::default(),
    }
}

/// The same charges, as units that were spent before.
fn as_spent(check: &Check) -> Check {
    with_charges(check, |charge| {
        Charge::spent(charge.limit().clone(), charge.key(), charge.cost())
    })
}

/// The same charges and id, with other leases.
fn with_leases(check: &Check, lease: impl Fn(Duration) -> Duration) -> Check {
    let charge = |charge: &Charge| {
        charge
            .lease()
            .map(&lease)
            .into_iter()
            .fold(charge.clone(), Charge::reserve)
    };
    check
        .id()
        .into_iter()
        .fold(check_of(check.charges().map(charge)), Check::with_id)
}

/// The same check with other charges.
fn with_charges(check: &Check, charge: impl Fn(&Charge) -> Charge) -> Check {
    check
        .id()
        .into_iter()
        .fold(check_of(check.charges().map(charge)), Check::with_id)
}

/// The same charge of another limit, key and cost.
fn rebuilt(charge: &Charge, limit: Limit, key: Key, cost: u64) -> Charge {
    let rebuilt = without_shadow(charge, limit, key, cost);
    if charge.is_shadow() {
        rebuilt.in_shadow()
    } else {
        rebuilt
    }
}

/// The same, and in no shadow.
fn without_shadow(charge: &Charge, limit: Limit, key: Key, cost: u64) -> Charge {
    let rebuilt = match charge.takes() {
        Takes::Always => Charge::spent(limit, key, cost),
        Takes::Nothing => Charge::any_left(limit, key).unwrap(),
        Takes::IfAdmitted => Charge::new(limit, key, cost).unwrap(),
    };
    charge.lease().into_iter().fold(rebuilt, Charge::reserve)
}

/// True if both count together, whatever their units.
fn is_one_limit(one: &Limit, other: &Limit) -> bool {
    let identity = |limit: &Limit| (limit.name().to_owned(), limit.window(), limit.algorithm());
    identity(one) == identity(other)
}

/// The same charge at its whole window, and in no shadow.
fn plain(charge: &Charge) -> Charge {
    Charge::new(charge.limit().clone(), charge.key().clone(), charge.cost()).unwrap()
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
        // How long reserved units refuse cannot be read from a status.
        if status.reserved > 0 && retry.is_some() {
            return status.clone();
        }
        let least = if status.is_refused_by_reservations() {
            Duration::ZERO
        } else {
            retry.unwrap_or_default()
        };
        LimitStatus::new(
            charge,
            status.used,
            status.reserved,
            reset,
            retry.map(|retry| (least, retry)),
        )
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
            | Fault::CountsOnEachCloneAlone
            | Fault::ResetsNothing
            | Fault::FreesTheKeyBySecondSettlements
            | Fault::IgnoresLateSettlements
            | Fault::SettlesAtTheReservedCost
            | Fault::FailsForAllOfTheStore => self.ask(check),
            Fault::LosesAUnitAMicrosecondLate => self.ask(&with_charges(check, |charge| {
                let limit = charge.limit();
                let window = (limit.window() + MICROSECOND).min(Limit::MAX_WINDOW);
                let longer = Limit::new(limit.name().to_owned(), limit.units(), window).unwrap();
                rebuilt(charge, longer, charge.key().clone(), charge.cost())
            })),
            Fault::RetriesWhenTheOldestUnitsLeave => {
                let decision = self.ask(check);
                with_times(check, &decision, |status| {
                    (
                        status.reset_after(),
                        status.retry_after().map(|_| status.reset_after()),
                    )
                })
            }
            Fault::CountsEachCheckAsOneUnit => self.ask(&with_charges(check, |charge| {
                rebuilt(
                    charge,
                    charge.limit().clone(),
                    charge.key().clone(),
                    charge.cost().min(1),
                )
            })),
            Fault::IgnoresLeases => self.ask(&with_charges(check, |charge| match charge.lease() {
                Some(_) if charge.is_shadow() => plain(charge).in_shadow(),
                Some(_) => plain(charge),
                None => charge.clone(),
            })),
            Fault::RefusesByShadowLimits => {
                self.ask(&with_charges(check, |charge| match charge.is_shadow() {
                    true => without_shadow(
                        charge,
                        charge.limit().clone(),
                        charge.key().clone(),
                        charge.cost(),
                    ),
                    false => charge.clone(),
                }))
            }
            Fault::CountsWhatTakesNothing => self.ask(&with_charges(check, |charge| {
                match charge.takes() == Takes::Nothing {
                    true => plain(charge),
                    false => charge.clone(),
                }
            })),
            Fault::ReadsKeysInLowerCase => self.ask(&with_charges(check, |charge| {
                let key = Key::new(
                    charge.key().namespace(),
                    charge.key().value().to_ascii_lowercase(),
                );
                rebuilt(charge, charge.limit().clone(), key, charge.cost())
            })),
            Fault::CountsForEveryLimitOfTheKey => {
                let decision = self.ask(check);
                let counts = check
                    .charges()
                    .find(|charge| decision.is_allowed() && charge.takes() != Takes::Nothing);
                let mut seen = self.seen.lock().unwrap();
                seen.charges.extend(check.charges().cloned());
                let other = counts.and_then(|charge| {
                    seen.charges.iter().find(|other| {
                        other.key() == charge.key()
                            && check
                                .charges()
                                .all(|charge| !is_one_limit(other.limit(), charge.limit()))
                    })
                });
                if let (Some(other), Some(charge)) = (other, counts) {
                    let _ = self.ask(&Check::new(Charge::spent(
                        other.limit().clone(),
                        other.key(),
                        charge.cost(),
                    )));
                }
                decision
            }
            Fault::ForgetsAllAfterAStepBack => {
                let mut seen = self.seen.lock().unwrap();
                let now = self.clock.now();
                if seen.latest.replace(now).is_some_and(|latest| now < latest) {
                    seen.charges
                        .drain(..)
                        .for_each(|charge| self.forget(&charge));
                }
                seen.charges.extend(check.charges().cloned());
                self.ask(check)
            }
            Fault::ForgetsAChangedLimit => {
                let mut seen = self.seen.lock().unwrap();
                for charge in check.charges() {
                    let is_it = |other: &&Charge| {
                        is_one_limit(other.limit(), charge.limit()) && other.key() == charge.key()
                    };
                    let last = seen.charges.iter().rev().find(is_it);
                    if last.is_some_and(|last| last.limit().units() != charge.limit().units()) {
                        self.forget(charge);
                    }
                    seen.charges.push(charge.clone());
                }
                self.ask(check)
            }
            Fault::KnowsALimitByItsNameAlone => {
                // As if the limit that came first under the name had the window of all.
                let mut seen = self.seen.lock().unwrap();
                seen.charges.extend(check.charges().cloned());
                let known = |charge: &Charge| {
                    let limit = charge.limit();
                    let first = seen
                        .charges
                        .iter()
                        .find(|other| other.limit().name() == limit.name())
                        .unwrap();
                    let known = Limit::new(
                        limit.name().to_owned(),
                        limit.units(),
                        first.limit().window(),
                    )
                    .unwrap();
                    rebuilt(
                        charge,
                        known.with_algorithm(limit.algorithm()),
                        charge.key().clone(),
                        charge.cost(),
                    )
                };
                let is_same = |one: &Charge, other: &Charge| {
                    (one.limit().name(), one.key()) == (other.limit().name(), other.key())
                };
                let mut apart: Vec<Charge> = Vec::new();
                for charge in check.charges().map(known) {
                    if !apart.iter().any(|other| is_same(other, &charge)) {
                        apart.push(charge);
                    }
                }
                let decision = self.ask(
                    &check
                        .id()
                        .into_iter()
                        .fold(check_of(apart.clone()), Check::with_id),
                );
                Decision::new(check, decision.at(), decision.id(), |charge| {
                    let place = apart.iter().position(|other| is_same(other, charge));
                    let status = decision.statuses().nth(place.unwrap()).unwrap();
                    let least = if status.is_refused_by_reservations() {
                        Duration::ZERO
                    } else {
                        Duration::MAX
                    };
                    let waits = status.retry_after().map(|retry| (least, retry));
                    LimitStatus::new(
                        charge,
                        status.used,
                        status.reserved,
                        status.reset_after(),
                        waits,
                    )
                })
            }
            Fault::DropsLimitsAfterTheFourth => {
                let four = check_of(check.charges().take(4).cloned());
                let decision = self.ask(&check.id().into_iter().fold(four, Check::with_id));
                let mut statuses = decision.statuses();
                Decision::new(check, decision.at(), decision.id(), |charge| {
                    let unseen =
                        || LimitStatus::new(charge, charge.cost(), 0, Duration::ZERO, None);
                    statuses.next().cloned().unwrap_or_else(unseen)
                })
            }
            Fault::RefusesAtAnotherTime => {
                let decision = self.ask(check);
                if decision.is_allowed() {
                    return decision;
                }
                let mut statuses = decision.statuses();
                Decision::new(check, decision.at() - MICROSECOND, decision.id(), |_| {
                    statuses.next().unwrap().clone()
                })
            }
            Fault::AdmitsOneUnitTooMany => {
                let decision = self.ask(check);
                let just_full = |status: &LimitStatus| status.used == status.limit.units();
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
                    (
                        status.reset_after().saturating_sub(MICROSECOND),
                        status.retry_after(),
                    )
                })
            }
            Fault::RetriesTooEarly => {
                let decision = self.ask(check);
                with_times(check, &decision, |status| {
                    (
                        status.reset_after(),
                        status
                            .retry_after()
                            .map(|wait| wait.saturating_sub(MICROSECOND)),
                    )
                })
            }
            Fault::ForgetsIds => self.ask(&check_of(check.charges().cloned())),
            Fault::DecidesEachLimitAlone => {
                let id = check.id().unwrap_or_else(AdmissionId::fresh);
                let alone = |charge: &Charge| self.ask(&Check::new(charge.clone()).with_id(id));
                let decisions: Vec<Decision> = check.charges().map(alone).collect();
                let mut statuses = decisions.iter().map(Decision::binding);
                Decision::new(check, decisions[0].at(), id, |_| {
                    statuses.next().unwrap().clone()
                })
            }
            Fault::NeverEndsLeases => self.ask(&with_leases(check, |_| Duration::MAX)),
            Fault::RefusesAtTheEndOfALease => {
                let decision = self.ask(&with_leases(check, |lease| lease + MICROSECOND));
                with_times(check, &decision, |status| {
                    let retry = status.retry_after();
                    (
                        status.reset_after(),
                        retry.map(|wait| {
                            if wait == MICROSECOND {
                                Duration::ZERO
                            } else {
                                wait
                            }
                        }),
                    )
                })
            }
        }
    }

    fn forget(&self, charge: &Charge) {
        let reset = self
            .store
            .reset(charge.limit().clone(), charge.key().clone());
        reset.now_or_never().unwrap().unwrap();
    }

    /// The same charges at no cost.
    fn look(&self, check: &Check) -> Decision {
        let nothing =
            |charge: &Charge| Charge::new(charge.limit().clone(), charge.key().clone(), 0).unwrap();
        self.ask(&check_of(check.charges().map(nothing)))
    }

    /// Reads what is left, and counts in a second step what has fitted in the first.
    async fn decide_in_two_steps(&self, check: &Check) -> Decision {
        let read = self.look(check);
        let fits = check
            .charges()
            .zip(read.statuses())
            .all(|(charge, status)| charge.cost() <= status.remaining());
        let is_plain = |charge: &Charge| {
            !(charge.is_shadow() || charge.takes() == Takes::Nothing || charge.lease().is_some())
        };
        yield_now().await;
        let counts = fits && check.id().is_none() && check.charges().all(is_plain);
        if counts {
            self.ask(&as_spent(check))
        } else {
            self.ask(check)
        }
    }
}

impl Store for Planted {
    fn decide(&self, check: Check) -> StoreFuture<Decision> {
        let planted = self.clone();
        match self.fault {
            Fault::CountsUnpolledFutures | Fault::CountsOnEachCloneAlone => {
                Box::pin(ready(Ok(self.decide_at_once(&check))))
            }
            Fault::FailsForAllOfTheStore
                if check
                    .charges()
                    .any(|charge| charge.limit().algorithm() != Algorithm::SLIDING_LOG) =>
            {
                Box::pin(ready(Err(StoreError::new(
                    "deciding a check",
                    StoreErrorKind::Other,
                    "only logs",
                ))))
            }
            Fault::WritesInASecondStep => {
                Box::pin(async move { Ok(planted.decide_in_two_steps(&check).await) })
            }
            _ => Box::pin(async move { Ok(planted.decide_at_once(&check)) }),
        }
    }

    fn settle(&self, settlement: Settlement) -> StoreFuture<Settled> {
        let planted = self.clone();
        Box::pin(async move {
            let now = planted.clock.now();
            let is_late = |charge: &Charge| {
                charge
                    .lease()
                    .is_some_and(|lease| settlement.at + lease <= now)
            };
            if matches!(planted.fault, Fault::IgnoresLateSettlements)
                && settlement.check.charges().any(is_late)
            {
                return Ok(Settled {
                    decision: planted.look(&settlement.check),
                    was_applied: false,
                });
            }
            let settlement = match planted.fault {
                Fault::SettlesAtTheReservedCost => {
                    let mut accounts = settlement.accounts();
                    let cost = |charge: &Charge| accounts.next().unwrap().1.map(|_| charge.cost());
                    Settlement::by_id(settlement.check.clone(), settlement.id, settlement.at, cost)
                }
                _ => settlement,
            };
            let settled = planted.store.settle(settlement.clone()).await?;
            if settled.was_applied {
                return Ok(settled);
            }
            match planted.fault {
                Fault::CountsEachSettlement => {
                    let again =
                        |charge: &Charge| Charge::spent(charge.limit().clone(), charge.key(), 1);
                    let counted = planted.ask(&check_of(settlement.check.charges().map(again)));
                    Ok(Settled {
                        decision: counted,
                        was_applied: true,
                    })
                }
                Fault::FreesTheKeyBySecondSettlements => {
                    settlement
                        .check
                        .charges()
                        .for_each(|charge| planted.forget(charge));
                    Ok(settled)
                }
                _ => Ok(settled),
            }
        })
    }

    fn reset(&self, limit: Limit, key: Key) -> StoreFuture<()> {
        match self.fault {
            Fault::ResetsNothing => Box::pin(ready(Ok(()))),
            _ => self.store.reset(limit, key),
        }
    }
}
