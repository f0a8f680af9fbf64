//! A batch: checks and settlements that travel together. `request.rs` has the keys and arguments of the script, `reply.rs`
//! what it answers.
//!
//! Checks that are equal but for their caller travel as one submission with several copies, which costs Redis about as
//! much as one. They are still decided in the order of arrival: a check joins an earlier one only if nothing between
//! the two touches a key of theirs, and the order of what touches different keys cannot be told from outside.

mod reply;
mod request;

use std::{collections::HashMap, hash::BuildHasherDefault, iter};

use redis::Value;

use super::job::Job;
use crate::{
    admission::AdmissionId,
    digest::{Digester, Prehashed},
    error::StoreError,
};

/// Jobs that are on their way together.
#[derive(Default)]
pub(super) struct Batch {
    submissions: Vec<Submission>,
}

/// A job and its copies, which are counted under `id` and those that follow it.
struct Submission {
    first: Job,
    copies: Vec<Job>,
    id: AdmissionId,
}

impl Batch {
    pub(super) fn new(jobs: Vec<Job>) -> Self {
        let digester = Digester::default();
        // The submission that was the last to touch a key. Two keys of one hash only keep equal checks apart.
        let mut last_touch: HashMap<u64, usize, BuildHasherDefault<Prehashed>> =
            HashMap::with_capacity_and_hasher(jobs.len(), BuildHasherDefault::default());
        let mut touched = Vec::new();
        let mut submissions: Vec<Submission> = Vec::with_capacity(jobs.len());
        for job in jobs {
            touched.clear();
            touched.extend(job.check().charges().map(|charge| digester.of_key(charge.limit(), charge.key())));
            let last = touched.first().and_then(|hash| last_touch.get(hash)).copied();
            let earlier = last.filter(|last| touched.iter().all(|hash| last_touch.get(hash) == Some(last)));
            match earlier.and_then(|earlier| submissions.get_mut(earlier)) {
                Some(earlier) if earlier.first.is_interchangeable_with(&job) => earlier.copies.push(job),
                _ => {
                    last_touch.extend(touched.iter().map(|hash| (*hash, submissions.len())));
                    submissions.push(Submission { id: AdmissionId::from(0), first: job, copies: Vec::new() });
                }
            }
        }
        for submission in &mut submissions {
            submission.id = submission.first.id().unwrap_or_else(|| AdmissionId::fresh_run(submission.size()));
        }
        Self { submissions }
    }

    /// Keeps what is to be tried again, and fails the rest.
    pub(super) fn only(self, is_kept: impl Fn(&Job) -> bool, error: &StoreError) -> Self {
        let (submissions, others) = self.submissions.into_iter().partition(|submission| is_kept(&submission.first));
        Self { submissions: others }.finish(Err(error.clone()));
        Self { submissions }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.submissions.is_empty()
    }

    /// Answers every job out of the script's reply, or all of them with an error.
    pub(super) fn finish(self, reply: Result<Value, StoreError>) {
        let outcomes = reply.and_then(|reply| self.read(reply).map_err(|error| StoreError::new("asking Redis", error)));
        match outcomes {
            Ok(outcomes) => iter::zip(self.into_jobs(), outcomes).for_each(|(job, outcome)| job.finish(outcome)),
            Err(error) => self.into_jobs().for_each(|job| job.finish(Err(error.clone()))),
        }
    }

    fn into_jobs(self) -> impl Iterator<Item = Job> {
        self.submissions.into_iter().flat_map(|submission| iter::once(submission.first).chain(submission.copies))
    }
}

impl Submission {
    fn size(&self) -> u64 {
        1 + self.copies.len() as u64
    }
}
