//! The jobs that wait in a queue. While many wait, they leave by round-robin fair queueing over
//! keys. So a key that floods the queue delays only its own checks. A cancelled check does not take
//! a turn.

use std::{
    collections::{VecDeque, hash_map::Entry},
    iter::from_fn,
};

use super::job::Job;
use crate::key::{ByDigest, Digester};

/// The most checks in a batch. In a larger batch, each check costs Redis more, since the batch no
/// longer fits into the processor's nearest cache.
pub(super) const MAX_BATCH: usize = 64;

/// The most checks in a batch that begins with [`MAX_BATCH`] copies. Redis decides copies as one
/// check.
const MAX_COPIES: usize = 128;

/// While at most this many jobs wait, they leave first in, first out, and their keys need not be
/// hashed.
pub(super) const FEW: usize = 4 * MAX_BATCH;

#[derive(Default)]
pub(super) struct Turns {
    /// The jobs that leave first, in arrival order.
    few: VecDeque<Box<Job>>,
    /// The jobs that leave after `few`. Each first limit and key has its own queue, under its
    /// digest.
    many: ByDigest<VecDeque<Box<Job>>>,
    /// The digests in `many`, in round-robin order: the first digest's next job leaves next.
    turns: VecDeque<u64>,
    len: usize,
}

impl Turns {
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// The digest of a job's first limit and key, which takes turns. `None` while few jobs wait.
    pub(super) fn turn_of(&self, job: &Job, digester: &Digester) -> Option<u64> {
        let is_long = !self.many.is_empty() || self.few.len() >= FEW;
        is_long.then(|| job.check().first().digest(digester))
    }

    /// The most jobs that leave before a job with this turn, if it joins now.
    pub(super) fn ahead_of(&self, turn: Option<u64>) -> usize {
        let own = turn.and_then(|digest| self.many.get(&digest));
        let rounds = own.map_or(0, VecDeque::len) + 1;
        self.len.min(self.few.len() + self.turns.len() * rounds)
    }

    pub(super) fn push(&mut self, job: Box<Job>, turn: Option<u64>) {
        self.len += 1;
        let Some(digest) = turn else {
            return self.few.push_back(job);
        };
        let jobs = self.many.entry(digest).or_default();
        if jobs.is_empty() {
            self.turns.push_back(digest);
        }
        jobs.push_back(job);
    }

    fn pop(&mut self) -> Option<Box<Job>> {
        let job = self.few.pop_front().or_else(|| self.pop_in_turn())?;
        self.len -= 1;
        Some(job)
    }

    fn pop_in_turn(&mut self) -> Option<Box<Job>> {
        let Entry::Occupied(mut jobs) = self.many.entry(*self.turns.front()?) else {
            return None;
        };
        let job = jobs.get_mut().pop_front()?;
        if jobs.get().is_empty() {
            jobs.remove();
            self.turns.pop_front();
        } else if !job.is_cancelled() {
            self.turns.rotate_left(1);
        }
        Some(job)
    }

    pub(super) fn remove_cancelled(&mut self) {
        self.few.retain(|job| !job.is_cancelled());
        self.many.retain(|_, jobs| {
            jobs.retain(|job| !job.is_cancelled());
            !jobs.is_empty()
        });
        self.turns.retain(|digest| self.many.contains_key(digest));
        self.len = self.few.len() + self.many.values().map(VecDeque::len).sum::<usize>();
    }

    /// Takes the next batch from the queue, and drops cancelled jobs on the way.
    pub(super) fn next_batch(&mut self) -> Vec<Box<Job>> {
        let mut waiting = from_fn(|| self.pop()).filter(|job| !job.is_cancelled());
        let mut jobs: Vec<_> = waiting.by_ref().take(MAX_BATCH).collect();
        if jobs.len() == MAX_BATCH && jobs.iter().all(|job| job.is_interchangeable_with(&jobs[0])) {
            jobs.extend(waiting.take(MAX_COPIES - MAX_BATCH));
        }
        for crowd in jobs.iter().filter_map(|job| job.crowd.as_ref()) {
            crowd.send();
        }
        jobs
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::time::Duration;

    use tokio::sync::oneshot::Receiver;

    use super::*;
    use crate::{
        check::{Charge, Check},
        key::Key,
        limit::Limit,
        store::redis::dispatch::job::Answer,
    };

    /// A limit with more units than any of these tests takes.
    pub(crate) const CALLS: Limit = Limit::per_hour("calls", 1_000_000);

    /// Jobs that wait, and their callers.
    #[derive(Default)]
    pub(crate) struct Waiting {
        pub(crate) turns: Turns,
        pub(crate) digester: Digester,
        callers: Vec<Receiver<Answer>>,
    }

    impl Waiting {
        pub(crate) fn push(&mut self, key: impl Into<Key>, cost: u64) {
            let check = Check::new(Charge::new(CALLS, key, cost).unwrap());
            let mut job = Job::decide(check, Duration::MAX);
            self.callers.push(job.wait());
            let turn = self.turns.turn_of(&job, &self.digester);
            self.turns.push(job, turn);
        }

        /// Pushes a check whose caller leaves at once.
        pub(crate) fn push_cancelled(&mut self, key: &str) {
            self.push(key, 1);
            drop(self.callers.pop());
        }

        /// The costs of the jobs that are not cancelled, in the order in which they leave.
        pub(crate) fn costs(&mut self) -> Vec<u64> {
            let jobs = from_fn(|| self.turns.pop()).filter(|job| !job.is_cancelled());
            jobs.map(|job| job.check().first().cost()).collect()
        }
    }

    /// A check comes behind many checks of the same key whose callers have left. 400 other keys
    /// have a check each in the queue, and for each check that leaves, another key's check comes.
    #[test]
    fn cancelled_checks_delay_no_other_of_their_key() {
        for (cancelled, are_removed) in [
            (0, false),
            (200, false),
            (4_000, false),
            (200, true),
            (4_000, true),
        ] {
            let mut waiting = Waiting::default();
            let mut others = (0..400_u64).cycle();
            for other in others.by_ref().take(400) {
                waiting.push(other, 1);
            }
            for _ in 0..cancelled {
                waiting.push_cancelled("ada");
            }
            if are_removed {
                waiting.turns.remove_cancelled();
                assert_eq!(waiting.turns.len(), 400);
            }
            waiting.push("ada", 2);
            let has_left = |_: &i32| {
                let jobs = waiting.turns.next_batch();
                for other in others.by_ref().take(jobs.len()) {
                    waiting.push(other, 1);
                }
                jobs.iter().any(|job| job.check().first().cost() == 2)
            };
            let batch = (1..1_000).find(has_left);
            assert!(
                batch.is_some_and(|batch| batch <= 8),
                "{batch:?}, {cancelled} cancelled, removed: {are_removed}"
            );
        }
    }

    /// The jobs that arrived first leave in the order of their arrival. The turns begin behind
    /// them.
    #[test]
    fn each_key_has_one_turn_and_its_checks_keep_their_order() {
        let mut waiting = Waiting::default();
        for _ in 0..FEW {
            waiting.push("first", 9);
        }
        waiting.push_cancelled("bob");
        waiting.push("ada", 1);
        waiting.turns.remove_cancelled();
        for (key, cost) in [("ada", 2), ("bob", 3), ("ada", 4), ("eve", 5), ("bob", 6)] {
            waiting.push(key, cost);
        }
        assert_eq!(waiting.turns.len(), FEW + 6);
        assert_eq!(waiting.costs()[FEW..], [1, 3, 5, 2, 6, 4]);
        assert_eq!((waiting.turns.len(), waiting.turns.many.len()), (0, 0));
    }
}
