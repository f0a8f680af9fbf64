//! A store written from the docs of `store` alone, as a user would write one. It counts by exact logs.

use std::{
    future::Future,
    pin::Pin,
    sync::{Arc, Mutex},
    time::{Duration, SystemTime},
};

use tower_sliding_window::{
    AdmissionId, Algorithm, Charge, Check, Decision, Key, Limit, LimitStatus, ManualClock, Settled, Settlement, Store,
    StoreError, testing::Conformance,
};

type Reply<T> = Pin<Box<dyn Future<Output = Result<T, StoreError>> + Send>>;

/// All admissions in one list.
#[derive(Clone)]
struct ListStore {
    clock: ManualClock,
    admissions: Arc<Mutex<Vec<Admission>>>,
}

/// One charge of an admitted check.
#[derive(Clone)]
struct Admission {
    limit: String,
    key: Key,
    id: AdmissionId,
    at: SystemTime,
    /// For how long its units count, and until when.
    lasts: Duration,
    ends: SystemTime,
    units: u64,
    state: State,
}

#[derive(Clone, Copy, PartialEq)]
enum State {
    Plain,
    Reserved,
    Settled,
}

impl Admission {
    fn is_of(&self, charge: &Charge) -> bool {
        self.limit == charge.limit().name() && &self.key == charge.key()
    }
}

/// How long the units of a charge count.
fn lifetime(charge: &Charge) -> Duration {
    charge.lease().unwrap_or(charge.limit().window())
}

fn state_of(charge: &Charge) -> State {
    if charge.lease().is_some() && !charge.is_spent() { State::Reserved } else { State::Plain }
}

fn units(admissions: &[&Admission]) -> u64 {
    admissions.iter().fold(0, |sum, one| sum.saturating_add(one.units))
}

/// How long until `cost` units fit.
fn wait(mut admissions: Vec<&Admission>, charge: &Charge, now: SystemTime) -> Duration {
    admissions.sort_by_key(|admission| admission.ends);
    let fits = |left: &[&Admission]| units(left).saturating_add(charge.cost()) <= charge.limit().units();
    let first = (0..=admissions.len()).find(|gone| fits(&admissions[*gone..])).unwrap();
    first.checked_sub(1).map_or(Duration::ZERO, |last| admissions[last].ends.duration_since(now).unwrap())
}

fn status(all: &[Admission], charge: &Charge, now: SystemTime, may_refuse: bool) -> LimitStatus {
    let ours: Vec<&Admission> = all.iter().filter(|admission| admission.is_of(charge)).collect();
    let settled: Vec<&Admission> = ours.iter().copied().filter(|one| one.state != State::Reserved).collect();
    let reset = ours.iter().map(|one| one.ends.duration_since(now).unwrap()).min().unwrap_or_default();
    let (used, reserved) = (units(&ours), units(&ours) - units(&settled));
    let refuses = may_refuse && charge.cost() > 0 && !charge.is_spent();
    let wait = |admissions| if refuses { wait(admissions, charge, now) } else { Duration::ZERO };
    let retry = Some(wait(ours)).filter(|wait| !wait.is_zero());
    LimitStatus::new(charge, used, reset, retry).with_reserved(reserved, wait(settled))
}

impl ListStore {
    /// Drops what has expired. If the clock has stepped back, units count anew from now.
    fn tidy(all: &mut Vec<Admission>, now: SystemTime) {
        all.retain(|one| one.ends > now);
        all.iter_mut().for_each(|one| one.ends = one.ends.min(now + one.lasts));
    }

    fn decide_now(&self, check: &Check) -> Decision {
        let (now, mut all) = (self.clock.now(), self.admissions.lock().unwrap());
        let charges: Vec<Charge> = check.charges().cloned().collect();
        Self::tidy(&mut all, now);
        let knows = |admission: &&Admission| {
            Some(admission.id) == check.id()
                && admission.state != State::Settled
                && charges.iter().any(|charge| admission.is_of(charge))
        };
        if let Some(first) = all.iter().find(knows) {
            return Decision::new(check, first.at, first.id, |charge| status(&all, charge, now, false));
        }
        let id = check.id().unwrap_or_else(AdmissionId::fresh);
        let decision = Decision::new(check, now, id, |charge| status(&all, charge, now, true));
        if !decision.is_allowed() {
            return decision;
        }
        for (charge, before) in charges.iter().zip(decision.statuses()) {
            if charge.cost() > 0 && !charge.takes_nothing() && before.retry_after().is_none() {
                let (limit, key, state) = (charge.limit().name().to_owned(), charge.key().clone(), state_of(charge));
                let (units, lasts) = (charge.cost(), lifetime(charge));
                all.push(Admission { limit, key, id, at: now, lasts, ends: now + lasts, units, state });
            }
        }
        let mut before = decision.statuses();
        Decision::new(check, now, id, |charge| {
            let refused = before.next().filter(|status| status.retry_after().is_some());
            refused.cloned().unwrap_or_else(|| status(&all, charge, now, false))
        })
    }

    fn settle_now(&self, settlement: &Settlement) -> Settled {
        let (now, mut all) = (self.clock.now(), self.admissions.lock().unwrap());
        Self::tidy(&mut all, now);
        let (id, at, mut was_applied) = (settlement.id(), settlement.at(), false);
        for account in settlement.accounts() {
            let (charge, Some(cost)) = (account.charge(), account.cost()) else { continue };
            let is_this = |one: &Admission| one.is_of(charge) && one.id == id;
            let (is_reserved, window) = (state_of(charge) == State::Reserved, charge.limit().window());
            let is_open = |one: &Admission| {
                let time_fits = if is_reserved { one.at == at } else { one.at <= at };
                is_this(one) && time_fits && one.state == state_of(charge) && one.units == charge.cost()
            };
            let is_settled = all.iter().any(|one| is_this(one) && one.at == at && one.state == State::Settled);
            if let Some(place) = all.iter().position(is_open) {
                let ends = (all[place].at + window).min(now + window);
                let open = all[place].clone();
                all[place] = Admission { units: cost, lasts: window, ends, state: State::Settled, ..open };
                was_applied = true;
            } else if is_reserved && !is_settled && at + lifetime(charge) <= now && now < at + window && cost > 0 {
                let (limit, key, state) = (charge.limit().name().to_owned(), charge.key().clone(), State::Settled);
                all.push(Admission { limit, key, id, at, lasts: window, ends: at + window, units: cost, state });
                was_applied = true;
            }
        }
        all.retain(|admission| admission.units > 0);
        Settled::new(settlement, now, was_applied, |account| status(&all, account.charge(), now, false))
    }
}

impl Store for ListStore {
    type Decide = Reply<Decision>;
    type Settle = Reply<Settled>;
    type Reset = Reply<()>;

    fn decide(&self, check: Check) -> Self::Decide {
        let store = self.clone();
        Box::pin(async move { Ok(store.decide_now(&check)) })
    }

    fn settle(&self, settlement: Settlement) -> Self::Settle {
        let store = self.clone();
        Box::pin(async move { Ok(store.settle_now(&settlement)) })
    }

    fn reset(&self, limit: Limit, key: Key) -> Self::Reset {
        let store = self.clone();
        let is_other = move |one: &Admission| one.limit != limit.name() || one.key != key;
        Box::pin(async move { Ok(store.admissions.lock().unwrap().retain(is_other)) })
    }
}

#[tokio::test]
async fn a_store_written_from_the_docs_alone_keeps_every_rule() {
    let report = Conformance::new()
        .algorithms([Algorithm::log()])
        .run(async |clock| ListStore { clock, admissions: Arc::default() })
        .await;
    assert_eq!(report.broken().count(), 0, "{report}");
    assert_eq!(report.kept().count(), Conformance::rules().count());
}
