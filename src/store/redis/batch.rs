//! A batch of checks and settlements on the wire: the keys and arguments of the script, and its reply.
//!
//! Checks that are equal but for their caller travel as one submission with several copies, which costs Redis about as
//! much as one. They are still decided in the order of arrival: a check joins an earlier one only if nothing between
//! the two touches a key of theirs, and the order of what touches different keys cannot be told from outside.

use std::{collections::HashMap, error, fmt, hash::BuildHasherDefault, iter, time::Duration, vec};

use redis::{Cmd, Value};

use super::{
    keys::write_redis_key,
    queue::{Job, Outcome},
    script::Room,
};
use crate::{
    admission::AdmissionId,
    algorithm::Kind,
    check::Charge,
    decision::{Decision, LimitStatus},
    digest::Digester,
    error::StoreError,
    prehashed::Prehashed,
    store::clock::system_time,
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

    /// Appends the number of keys, the keys, and the arguments. `now` is empty for the server's clock; `again` says
    /// that this very batch may have been counted by an earlier try.
    pub(super) fn write(&self, command: &mut Cmd, prefix: &str, now: &str, again: bool) {
        let charges = || self.submissions.iter().flat_map(|submission| submission.first.check().charges());
        command.arg(charges().count());
        let mut key = String::new();
        for charge in charges() {
            key.clear();
            write_redis_key(&mut key, prefix, charge.limit(), charge.key());
            command.arg(&key);
        }
        command.arg(now);
        for run in self.submissions.chunk_by(Submission::has_the_shape_of) {
            run[0].write_shape(command, again);
            command.arg(run.len());
            for submission in run {
                command.arg(&submission.id.to_bytes());
                if let Job::Settle(asked) = &submission.first {
                    command.arg(asked.settlement.at_micros());
                }
            }
        }
    }

    /// How much that is, about.
    pub(super) fn room(&self) -> Room {
        // A key and an id each, or a few more where shapes differ.
        let arguments = 16 + 3 * self.submissions.len();
        Room { arguments, bytes: 32 * arguments }
    }

    /// Fails what a second try might count twice, and keeps the rest.
    pub(super) fn without_unrepeatable(mut self, error: &StoreError) -> Self {
        let (repeatable, others) =
            self.submissions.into_iter().partition(|submission| submission.first.is_repeatable());
        self.submissions = repeatable;
        Self { submissions: others }.finish(Err(error.clone()));
        self
    }

    pub(super) fn is_empty(&self) -> bool {
        self.submissions.is_empty()
    }

    /// Answers every job out of the script's reply, or all of them with an error.
    pub(super) fn finish(self, reply: Result<Value, StoreError>) {
        let outcomes =
            reply.and_then(|reply| self.read(reply).map_err(|error| StoreError::new("deciding a check", error)));
        match outcomes {
            Ok(outcomes) => iter::zip(self.into_jobs(), outcomes).for_each(|(job, outcome)| job.finish(outcome)),
            Err(error) => self.into_jobs().for_each(|job| job.finish(Err(error.clone()))),
        }
    }

    fn into_jobs(self) -> impl Iterator<Item = Job> {
        self.submissions.into_iter().flat_map(|submission| iter::once(submission.first).chain(submission.copies))
    }

    /// The outcome of every job, in the order of [`into_jobs`](Self::into_jobs).
    fn read(&self, reply: Value) -> Result<Vec<Outcome<(Decision, bool)>>, MalformedReply> {
        let Value::Array(fields) = reply else { return Err(MalformedReply) };
        let mut fields = Fields(fields.into_iter());
        let now = fields.number()?;
        let (mut outcomes, mut statuses) = (Vec::with_capacity(self.submissions.len()), Vec::new());
        for submission in &self.submissions {
            submission.read(&mut fields, now, &mut statuses, &mut outcomes)?;
        }
        if fields.0.next().is_some() { Err(MalformedReply) } else { Ok(outcomes) }
    }
}

impl Submission {
    fn size(&self) -> u64 {
        1 + self.copies.len() as u64
    }

    /// Appends all that a run of equal shapes has in common.
    fn write_shape(&self, command: &mut Cmd, again: bool) {
        let check = self.first.check();
        let is_plain = check.charges().all(is_plain);
        let kind = match &self.first {
            Job::Settle(_) if again => "settle again",
            Job::Settle(_) => "settle",
            Job::Decide(_) => match (is_plain, again || check.id().is_some()) {
                (true, false) => "plain",
                (true, true) => "again",
                (false, false) => "any",
                (false, true) => "given",
            },
        };
        command.arg(self.size()).arg(kind).arg(check.charges().count());
        let mut costs = match &self.first {
            Job::Settle(asked) => asked.settlement.accounts().map(|account| account.cost()).collect(),
            Job::Decide(_) => Vec::new(),
        }
        .into_iter();
        for charge in check.charges() {
            let limit = charge.limit();
            command.arg(limit.units()).arg(charge.cost()).arg(limit.window_micros());
            if !(is_plain && matches!(self.first, Job::Decide(_))) {
                match limit.algorithm().kind() {
                    Kind::Log => command.arg("log"),
                    Kind::Fixed => command.arg("fixed"),
                    Kind::Counter => command.arg("counter"),
                    Kind::Compact { entries } => command.arg(entries),
                };
                command.arg(charge.lease_micros().unwrap_or(0));
                match costs.next().flatten() {
                    Some(cost) => command.arg(cost),
                    None if charge.is_shadow() => command.arg("shadow"),
                    None => command.arg(""),
                };
            }
        }
    }

    /// Whether the two differ in nothing but their keys and ids.
    fn has_the_shape_of(&self, other: &Self) -> bool {
        let (Job::Decide(asked), Job::Decide(other_asked)) = (&self.first, &other.first) else {
            return false;
        };
        let figures = |charge: &Charge| {
            let limit = charge.limit();
            let numbers = (limit.units(), charge.cost(), limit.window_micros());
            (numbers, limit.algorithm(), charge.lease_micros(), charge.is_shadow())
        };
        self.size() == other.size()
            && asked.check.id().is_some() == other_asked.check.id().is_some()
            && asked.check.charges().map(figures).eq(other_asked.check.charges().map(figures))
    }

    /// Appends the outcome of each copy. `statuses` is room to work in.
    fn read(
        &self,
        fields: &mut Fields,
        now: u64,
        statuses: &mut Vec<Status>,
        outcomes: &mut Vec<Outcome<(Decision, bool)>>,
    ) -> Result<(), MalformedReply> {
        let (check, doing) = match &self.first {
            Job::Decide(asked) => (&asked.check, "deciding a check"),
            Job::Settle(asked) => (asked.settlement.check(), "settling an admission"),
        };
        let is_settlement = matches!(self.first, Job::Settle(_));
        let told = fields.told(self.size())?;
        let has_retries = told.is_some() && !is_settlement;
        let admitted = told.unwrap_or_else(|| Ok(self.size()));
        statuses.clear();
        for _ in check.charges() {
            statuses.push(fields.status(has_retries)?);
        }
        for copy in 0..self.size() {
            outcomes.push(match &admitted {
                Err(text) => Err(StoreError::new(doing, text.clone())),
                Ok(admitted) => {
                    let mut statuses = statuses.iter();
                    let decision = Decision::new(check, system_time(now), self.id.following(copy), |charge| {
                        statuses.next().copied().unwrap_or_default().of_copy(charge, copy, *admitted)
                    });
                    Ok((decision, *admitted > 0))
                }
            });
        }
        Ok(())
    }
}

/// Whether a charge is what most are: exact, and neither held nor in the shadow.
fn is_plain(charge: &Charge) -> bool {
    charge.limit().algorithm().kind() == Kind::Log && charge.lease_micros().is_none() && !charge.is_shadow()
}

/// How a charge stands after all copies of its check.
#[derive(Clone, Copy, Default)]
struct Status {
    used: u64,
    reset: u64,
    retry: u64,
}

impl Status {
    /// How it stood after this copy: the first `admitted` ones were counted one after the other.
    fn of_copy(self, charge: &Charge, copy: u64, admitted: u64) -> LimitStatus {
        let later = admitted.saturating_sub(copy + 1);
        let is_told = copy >= admitted || charge.is_shadow();
        let retry = (is_told && self.retry > 0).then(|| Duration::from_micros(self.retry));
        let used = self.used.saturating_sub(later.saturating_mul(charge.cost()));
        LimitStatus::new(charge, used, Duration::from_micros(self.reset), retry)
    }
}

/// The reply, field by field.
struct Fields(vec::IntoIter<Value>);

impl Fields {
    fn number(&mut self) -> Result<u64, MalformedReply> {
        match self.0.next() {
            Some(Value::Int(number)) => u64::try_from(number).map_err(|_| MalformedReply),
            _ => Err(MalformedReply),
        }
    }

    /// How many of so many copies are admitted, or the text of an error. Mostly nothing is said: then all of them are.
    fn told(&mut self, copies: u64) -> Result<Option<Result<u64, String>>, MalformedReply> {
        let admitted = match self.0.as_slice().first() {
            Some(Value::Int(negative @ ..0)) => Ok(negative.unsigned_abs() - 1),
            Some(Value::BulkString(text)) => Err(String::from_utf8_lossy(text).into_owned()),
            _ => return Ok(None),
        };
        self.0.next();
        if admitted.as_ref().is_ok_and(|admitted| *admitted > copies) {
            Err(MalformedReply)
        } else {
            Ok(Some(admitted))
        }
    }

    fn status(&mut self, has_retry: bool) -> Result<Status, MalformedReply> {
        let (used, reset) = (self.number()?, self.number()?);
        Ok(Status { used, reset, retry: if has_retry { self.number()? } else { 0 } })
    }
}

/// The script's reply is not what the script sends: something stands between us and Redis.
#[derive(Debug)]
struct MalformedReply;

impl fmt::Display for MalformedReply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the reply is not the script's")
    }
}

impl error::Error for MalformedReply {}
