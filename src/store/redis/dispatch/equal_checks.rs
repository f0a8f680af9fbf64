//! Equal checks.
//!
//! 1. Equal checks of a batch travel as copies of one check. Together they cost Redis about as much
//!    as one check. The order of arrival still decides: a check joins an earlier one only if no job
//!    between them touches their keys.
//! 2. Equal checks that wait together are a crowd: see rule 9 of the [queue](super::queue).

use std::{sync::Arc, time::SystemTime};

use super::job::Job;
use crate::{
    check::{AdmissionId, Check},
    decision::{Decision, LimitStatus},
    key::{ByDigest, Digester},
};

/// Makes each check a copy of an earlier equal check, where the order of arrival allows it. Puts
/// prefetches last, since no request waits for them. So no check comes behind a prefetch of its
/// key, and equal checks join even if a prefetch came between them.
pub(super) fn join(jobs: Vec<Box<Job>>) -> Vec<Box<Job>> {
    let digester = Digester::default();
    // For the hash of each key, the index of the last job that touches the key. If two keys have
    // the same hash, equal checks may travel apart, which does no harm.
    let mut last_touch = ByDigest::<usize>::with_capacity_and_hasher(jobs.len(), Default::default());
    let mut touched = Vec::new();
    let mut prefetches = Vec::new();
    let mut joined = Vec::<Box<Job>>::with_capacity(jobs.len());
    for job in jobs {
        if job.is_of_prefetch() {
            prefetches.push(job);
            continue;
        }
        let is_equal = |place: &usize| joined[*place].is_interchangeable_with(&job);
        // Copies mostly come in a row. So if the last job has copies, the new job is compared with
        // it before the keys of the new job are hashed.
        let has_copies = |place: &usize| joined[*place].count() > 1;
        let mut place = joined.len().checked_sub(1).filter(has_copies).filter(is_equal);
        if place.is_none() {
            touched.clear();
            touched.extend(job.check().charges().map(|charge| charge.digest(&digester)));
            let mut touches = touched.iter().map(|hash| last_touch.get(hash).copied());
            place = touches.next().flatten().filter(|last| touches.all(|other| other == Some(*last)));
            place = place.filter(is_equal);
        }
        if let Some(place) = place {
            joined[place].join(job);
        } else {
            last_touch.extend(touched.iter().map(|hash| (*hash, joined.len())));
            joined.push(job);
        }
    }
    joined.extend(prefetches);
    joined
}

/// A crowd of equal checks. Each check has a clone of the crowd until the check is answered, so the
/// number of clones tells the number of checks.
#[derive(Clone, Default)]
pub(super) struct Crowd(Arc<()>);

impl Crowd {
    /// Finds or makes the crowd that a check joins. `crowds` has the crowds by the digests of their
    /// checks. Returns `None` if the limits of the check admit any number of equal checks. Crowds
    /// without checks are removed once there are more than `most` crowds.
    pub(super) fn join(crowds: &mut ByDigest<Self>, check: &Check, digester: &Digester, most: usize) -> Option<Self> {
        most_admitted(check)?;
        if crowds.len() > most {
            crowds.retain(|_, Self(members)| Arc::strong_count(members) > 1);
        }
        let digest = check.charges().fold(0_u64, |digest, charge| {
            let cost = 2 * charge.cost() + 1;
            digest.rotate_left(1).wrapping_add(charge.digest(digester).wrapping_mul(cost))
        });
        Some(crowds.entry(digest).or_default().clone())
    }

    /// The number of the other checks in the crowd. The clone in the table of crowds and the clone
    /// of this check are left out.
    fn ahead(&self) -> u64 {
        Arc::strong_count(&self.0) as u64 - 2
    }

    /// Returns true if the limits of this check can never admit more equal checks than are ahead of
    /// it. Cancelled checks, whose number `cancelled` returns, do not count.
    pub(super) fn refuses(&self, check: &Check, cancelled: impl FnOnce() -> u64) -> bool {
        most_admitted(check).is_some_and(|most| self.ahead() >= most && self.ahead() - cancelled() >= most)
    }

    /// The refusal of this check.
    pub(super) fn refusal(&self, check: &Check) -> Decision {
        Decision::new(check, SystemTime::now(), AdmissionId::fresh(), |charge| {
            let most = charge.limit().units().checked_div(charge.units());
            LimitStatus::estimate(charge, charge.can_refuse() && most.is_some_and(|most| self.ahead() >= most))
        })
    }

    pub(super) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// The most equal checks that the limits of this check can ever admit together. `None` if no limit
/// bounds the number. Equal checks under one id are one admission, so no limit bounds their number.
fn most_admitted(check: &Check) -> Option<u64> {
    let charges = check.charges().filter(|charge| check.id().is_none() && charge.can_refuse());
    charges.filter_map(|charge| charge.limit().units().checked_div(charge.units())).min()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{check::Charge, key::Key, limit::Limit};

    const CALLS: Limit = Limit::per_hour("calls", 100);

    fn check(key: &str, cost: u64) -> Check {
        Check::new(Charge::new(CALLS, key, cost).unwrap())
    }

    fn prefetch(key: &str, units: u64) -> Check {
        Check::new(Charge::prefetch(CALLS, Key::from(key), units, 100_000)).with_id(AdmissionId::fresh())
    }

    /// Joins these checks. Returns the cost of each job, and the number of checks that travel as
    /// this job.
    fn joined(checks: impl IntoIterator<Item = Check>) -> Vec<(u64, u64)> {
        let job = |check| {
            let mut job = Job::decide(check, std::time::Duration::MAX);
            drop(job.wait());
            job
        };
        let jobs = join(checks.into_iter().map(job).collect());
        jobs.iter().map(|job| (job.check().charges().map(Charge::cost).sum(), job.count())).collect()
    }

    #[test]
    fn checks_keep_their_order_and_prefetches_come_last() {
        let checks = [prefetch("ada", 20), check("bob", 2), check("eve", 1), prefetch("joe", 30), check("ada", 1)];
        assert_eq!(joined(checks), [(2, 1), (1, 1), (1, 1), (20, 1), (30, 1)]);
    }

    #[test]
    fn equal_checks_join_if_no_other_is_between_them() {
        let checks =
            [check("ada", 1), check("bob", 3), check("ada", 1), check("ada", 2), check("ada", 1), check("bob", 3)];
        assert_eq!(joined(checks), [(1, 2), (3, 2), (2, 1), (1, 1)]);
    }

    #[test]
    fn checks_of_one_key_stay_in_order_before_prefetches() {
        let both = check("ada", 4).and(Charge::new(CALLS, "bob", 4).unwrap()).unwrap();
        assert_eq!(joined([both, check("bob", 1), check("eve", 1), check("bob", 1)]), [(8, 1), (1, 2), (1, 1)]);
        assert_eq!(joined([check("ada", 2), prefetch("ada", 20), check("ada", 1)]), [(2, 1), (1, 1), (20, 1)]);
        assert_eq!(joined([check("ada", 2), prefetch("ada", 20), prefetch("ada", 30), check("ada", 1)])[1], (1, 1));
    }
}
