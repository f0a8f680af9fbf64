//! A store written from the docs of `store` alone, as a user would write one. It counts by exact
//! logs.

use std::{
    sync::{Arc, Mutex},
    time::{Duration, SystemTime},
};

use tower_sliding_window::{
    Algorithm, Charge, Check, Decision, Key, Limit, Store,
    check::{AdmissionId, Takes},
    decision::LimitStatus,
    error::{StoreError, StoreErrorKind},
    settlement::{Settled, Settlement},
    store::{ManualClock, StoreFuture},
};
use tower_sliding_window_conformance::Conformance;

/// All admissions in one list.
#[derive(Clone)]
struct ListStore {
    clock: ManualClock,
    admissions: Arc<Mutex<Vec<Admission>>>,
}

/// One charge of an admitted check.
#[derive(Clone)]
struct Admission {
    charge: Charge,
    id: AdmissionId,
    at: SystemTime,
    /// From then on its units do not count.
    ends: SystemTime,
    units: u64,
    is_settled: bool,
}

impl Admission {
    fn is_of(&self, charge: &Charge) -> bool {
        is_one_limit(self.charge.limit(), charge.limit()) && self.charge.key() == charge.key()
    }

    fn is_reserved(&self) -> bool {
        self.charge.lease().is_some() && self.charge.takes() != Takes::Always && !self.is_settled
    }

    /// Drops what has expired. If the clock has stepped back, no unit counts for longer than a
    /// window from now, and settled ones count from now on.
    fn tidy(all: &mut Vec<Self>, now: SystemTime) {
        all.retain(|one| one.ends > now);
        for one in all {
            one.ends = one.ends.min(now + one.charge.limit().window());
            one.at = if one.is_settled {
                one.at.min(now)
            } else {
                one.at
            };
        }
    }
}

/// True if both count together. All limits of this store are exact logs.
fn is_one_limit(one: &Limit, other: &Limit) -> bool {
    (one.name(), one.window()) == (other.name(), other.window())
}

fn units(admissions: &[&Admission]) -> u128 {
    admissions.iter().map(|one| u128::from(one.units)).sum()
}

fn status(all: &[Admission], charge: &Charge, now: SystemTime, may_refuse: bool) -> LimitStatus {
    let mut ours: Vec<&Admission> = all.iter().filter(|one| one.is_of(charge)).collect();
    ours.sort_by_key(|one| one.ends);
    let kept: Vec<&Admission> = ours
        .iter()
        .copied()
        .filter(|one| !one.is_reserved())
        .collect();
    let left = |one: &&Admission| one.ends.duration_since(now).unwrap();
    // Until enough units have left.
    let wait = |admissions: &[&Admission]| {
        let (mut after, mut wait) = (
            units(admissions) + u128::from(charge.cost()),
            Duration::ZERO,
        );
        for one in admissions
            .iter()
            .filter(|_| may_refuse && charge.cost() > 0 && charge.takes() != Takes::Always)
        {
            if after <= u128::from(charge.limit().units()) {
                break;
            }
            (after, wait) = (after - u128::from(one.units), left(one));
        }
        wait
    };
    let number = |units| u64::try_from(units).unwrap_or(u64::MAX);
    let retry = Some(wait(&ours)).filter(|wait| !wait.is_zero());
    let waits = retry.map(|retry| (wait(&kept), retry));
    let reset = ours.first().map(left).unwrap_or_default();
    LimitStatus::new(
        charge,
        number(units(&ours)),
        number(units(&ours) - units(&kept)),
        reset,
        waits,
    )
}

impl ListStore {
    fn decide_now(&self, check: &Check) -> Decision {
        let mut all = self.admissions.lock().unwrap();
        let now = self.clock.now();
        Admission::tidy(&mut all, now);
        let is_charged = |one: &Admission| check.charges().any(|charge| one.is_of(charge));
        let knows =
            |one: &&Admission| Some(one.id) == check.id() && !one.is_settled && is_charged(one);
        if let Some(first) = all.iter().find(knows) {
            return Decision::new(check, first.at, first.id, |charge| {
                status(&all, charge, now, false)
            });
        }
        let id = check.id().unwrap_or_else(AdmissionId::fresh);
        let before = Decision::new(check, now, id, |charge| status(&all, charge, now, true));
        if !before.is_allowed() {
            return before;
        }
        let fits = |status: &LimitStatus| status.retry_after().is_none();
        for (charge, _) in check
            .charges()
            .zip(before.statuses())
            .filter(|(_, status)| fits(status))
        {
            let units = if charge.takes() == Takes::Nothing {
                0
            } else {
                charge.cost()
            };
            let ends = now + charge.lease().unwrap_or_else(|| charge.limit().window());
            all.push(Admission {
                charge: charge.clone(),
                id,
                at: now,
                ends,
                units,
                is_settled: false,
            });
        }
        all.retain(|one| one.units > 0);
        let mut before = before.statuses();
        Decision::new(check, now, id, |charge| {
            let refused = before.next().filter(|status| !fits(status)).cloned();
            refused.unwrap_or_else(|| status(&all, charge, now, false))
        })
    }

    fn settle_now(&self, settlement: &Settlement) -> Settled {
        let mut all = self.admissions.lock().unwrap();
        let now = self.clock.now();
        Admission::tidy(&mut all, now);
        let (id, at, mut was_applied) = (settlement.id, settlement.at, false);
        for (charge, units) in settlement.accounts() {
            let Some(units) = units else { continue };
            let window = charge.limit().window();
            let is_open = |one: &&mut Admission| {
                let is_its_time = one.at == at || one.at < at && !one.is_reserved();
                one.charge == *charge && one.id == id && is_its_time && !one.is_settled
            };
            let was_settled = all
                .iter()
                .any(|one| one.is_of(charge) && one.id == id && one.at == at && one.is_settled);
            let is_late = charge
                .lease()
                .is_some_and(|lease| at + lease <= now && now < at + window);
            if let Some(open) = all.iter_mut().find(is_open) {
                let ends = if charge.lease().is_some() {
                    (open.at + window).min(now + window)
                } else {
                    open.ends
                };
                *open = Admission {
                    units,
                    ends,
                    is_settled: true,
                    ..open.clone()
                };
                was_applied = true;
            } else if is_late && !was_settled && units > 0 {
                all.push(Admission {
                    charge: charge.clone(),
                    id,
                    at,
                    ends: at + window,
                    units,
                    is_settled: true,
                });
                was_applied = true;
            }
        }
        all.retain(|one| one.units > 0);
        let decision = Decision::new(&settlement.check, now, id, |charge| {
            status(&all, charge, now, false)
        });
        Settled {
            decision,
            was_applied,
        }
    }
}

impl Store for ListStore {
    fn decide(&self, check: Check) -> StoreFuture<Decision> {
        let store = self.clone();
        Box::pin(async move {
            if check
                .charges()
                .all(|charge| charge.limit().algorithm() == Algorithm::SLIDING_LOG)
            {
                return Ok(store.decide_now(&check));
            }
            Err(StoreError::new(
                "deciding a check",
                StoreErrorKind::Other,
                "this store counts by exact logs only",
            )
            .of_one_check())
        })
    }

    fn settle(&self, settlement: Settlement) -> StoreFuture<Settled> {
        let store = self.clone();
        Box::pin(async move { Ok(store.settle_now(&settlement)) })
    }

    fn reset(&self, limit: Limit, key: Key) -> StoreFuture<()> {
        let store = self.clone();
        let is_other = move |one: &Admission| {
            !is_one_limit(one.charge.limit(), &limit) || one.charge.key() != &key
        };
        Box::pin(async move {
            store.admissions.lock().unwrap().retain(is_other);
            Ok(())
        })
    }
}

#[tokio::test]
async fn a_store_written_from_the_docs_alone_keeps_every_rule() {
    let suite = Conformance::new().algorithms([Algorithm::SLIDING_LOG]);
    suite
        .run(async |clock| ListStore {
            clock,
            admissions: Arc::default(),
        })
        .await;
}
