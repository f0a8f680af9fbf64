//! Crowds: equal checks that wait together. See [admission](super::admission).

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::SystemTime,
};

use crate::{
    check::{AdmissionId, Charge, Check},
    decision::{Decision, LimitStatus},
    key::{ByDigest, Digester, make_room},
};

/// Units that stay in the window for at least this many microseconds outlast any check's wait.
const LONGEST_WAIT: u64 = 1_000_000;

/// The number of checks in each crowd, by check digest.
pub(super) type Crowds = ByDigest<Arc<AtomicU64>>;

/// A check's membership in its crowd. It ends when the check is answered, or when the caller leaves
/// before the check is sent. A check that has been sent counts as ahead of others even after its
/// deadline: its request may have passed by fail-open, and Redis may still count the check.
pub(super) struct Crowd {
    members: Arc<AtomicU64>,
    has_left: AtomicBool,
    is_sent: AtomicBool,
}

impl Crowd {
    /// Joins a check's crowd, or starts one. Returns `None` if the check's limits admit any number
    /// of equal checks.
    pub(super) fn join(crowds: &mut Crowds, check: &Check, digester: &Digester) -> Option<Self> {
        most_admitted(check)?;
        make_room(crowds, |members| Arc::strong_count(members) > 1);
        let members = Arc::clone(crowds.entry(check.digest(digester)).or_default());
        members.fetch_add(1, Ordering::Relaxed);
        Some(Self {
            members,
            has_left: AtomicBool::new(false),
            is_sent: AtomicBool::new(false),
        })
    }

    /// The number of other checks in the crowd.
    fn ahead(&self) -> u64 {
        self.members.load(Ordering::Relaxed).saturating_sub(1)
    }

    /// True if at least as many equal checks are ahead of this one as its limits can admit.
    pub(super) fn refuses(&self, check: &Check) -> bool {
        most_admitted(check).is_some_and(|most| self.ahead() >= most)
    }

    /// Returns this check's refusal, or `None` if its limits may admit it. The number of checks
    /// ahead is read only once, since it changes when callers leave.
    pub(super) fn refusal(&self, check: &Check) -> Option<Decision> {
        let ahead = self.ahead();
        most_admitted(check).filter(|most| ahead >= *most)?;
        let id = AdmissionId::fresh();
        Some(Decision::new(check, SystemTime::now(), id, |charge| {
            let is_full = most_of(charge).is_some_and(|most| ahead >= most);
            LimitStatus::estimate(charge, charge.can_refuse() && is_full)
        }))
    }

    /// Marks the check as sent.
    pub(super) fn send(&self) {
        self.is_sent.store(true, Ordering::Relaxed);
    }

    /// Removes the check from its crowd when its caller leaves. If the check was sent, it stays in
    /// the crowd.
    pub(super) fn leave_unsent(&self) {
        if !self.is_sent.load(Ordering::Relaxed) {
            self.leave();
        }
    }

    /// Stops counting the check as ahead of others.
    pub(super) fn leave(&self) {
        if !self.has_left.swap(true, Ordering::Relaxed) {
            self.members.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Drop for Crowd {
    fn drop(&mut self) {
        self.leave();
    }
}

/// Returns the most equal checks that this check's limits can admit while the checks wait. Returns
/// `None` if no limit bounds the number. A charge with a short window or lease does not bound it,
/// since its units may leave meanwhile. There is also no bound if the check has an id from its
/// caller, since only the store knows whether it has counted this id before. The same holds if the
/// caller waits in line, since it may be behind its own earlier try.
pub(super) fn most_admitted(check: &Check) -> Option<u64> {
    if !check.is_unmarked() {
        return None;
    }
    let bounding = check.charges().filter(|charge| {
        let window = charge.limit().window_micros();
        charge.can_refuse() && charge.lease_micros().unwrap_or(window) >= LONGEST_WAIT
    });
    bounding.filter_map(most_of).min()
}

fn most_of(charge: &Charge) -> Option<u64> {
    charge.limit().units().checked_div(charge.units())
}
