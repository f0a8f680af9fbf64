//! Copies: equal checks that travel as one check. Together they cost Redis about as much as one
//! check. The order of arrival still decides: a check joins an earlier one only if no job between
//! them touches their keys.

use super::job::Job;
use crate::key::{ByDigest, Digester};

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        check::AdmissionId,
        check::{Charge, Check},
        key::Key,
        limit::Limit,
    };

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
