//! A batch: checks and settlements in one script call.
//!
//! Equal checks become copies, which travel as one check. Together, they cost Redis about as much
//! as a single check. The order of arrival still matters: a check joins an earlier one only if no
//! job between them touches their keys.
//!
//! Jobs that differ only in their keys and ids are a run, whose figures are sent once: `head.lua`
//! describes the arguments. Places are freed without the script, in separate batches: with the
//! script, Redis would need 60 % more instructions per place.

use std::{
    iter, mem,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};

use redis::{Cmd, Pipeline, RedisError, RedisResult, Value, cmd};

use super::{
    dispatcher::{Common, is_unknown, of_double},
    job::{Answer, Job, Kind, have_one_shape, write_run},
    lost::Lost,
};
use crate::{
    check::{AdmissionId, Charge, Check},
    clock::{micros_since_epoch, system_time},
    decision::{Decision, LimitStatus},
    error::{StoreError, StoreErrorKind},
    key::{ByDigest, Digester},
    store::redis::{
        connect::{ASKING, Connection, kind_of_reply, needs_new_connection, was_not_run},
        keys::Keys,
        script::{DECIDE, SHA1},
    },
};

pub(super) struct Batch {
    common: Arc<Common>,
    pub(super) jobs: Vec<Box<Job>>,
    /// The slot for all keys in this batch. `None` if the dispatcher does not batch by slot.
    pub(super) slot: Option<u16>,
    /// True if the script may have run although no reply says so: while the batch waits for its
    /// reply, and after a reply was lost.
    pub(super) is_in_doubt: bool,
    /// When the batch was last sent, and the refusal cache's generation at that time.
    asked: Option<(Instant, u64)>,
}

impl Batch {
    pub(super) fn new(jobs: Vec<Box<Job>>, slot: Option<u16>, common: &Arc<Common>) -> Self {
        let mut jobs = if jobs.len() > 1 { join(jobs) } else { jobs };
        for job in &mut jobs {
            job.set_id();
        }
        Self {
            common: Arc::clone(common),
            jobs,
            slot,
            is_in_doubt: false,
            asked: None,
        }
    }

    /// Returns the batch for a [lone](super::lone) check that has been sent and has this reply.
    /// `asked` says when it was sent.
    pub(super) fn sent(
        job: Box<Job>,
        slot: Option<u16>,
        common: &Arc<Common>,
        asked: (Instant, u64),
        reply: &RedisResult<Value>,
    ) -> Self {
        Self {
            common: Arc::clone(common),
            jobs: vec![job],
            slot,
            is_in_doubt: reply.as_ref().is_err_and(is_lost),
            asked: Some(asked),
        }
    }

    /// Keeps the jobs that will be sent again, and fails the others. Returns true if any are left.
    pub(super) fn keep(&mut self, is_kept: impl Fn(&Job) -> bool, error: &StoreError) -> bool {
        let (kept, others) = self.jobs.drain(..).partition(|job| is_kept(job));
        self.jobs = kept;
        self.fail(others, error);
        !self.jobs.is_empty()
    }

    /// Runs the script. `again` means that an earlier try may have counted this batch.
    ///
    /// If the server answers NOSCRIPT, one EVAL runs the script and loads it. Unlike SCRIPT LOAD,
    /// this takes only one round trip, certainly reaches the right server, and does not need a
    /// separate permission. The EVAL runs the batch, so no second EVALSHA follows.
    ///
    /// If the connection was idle, and the batch has a check that must not run twice, the
    /// connection first has to prove that it works. A second try does not need this proof: its
    /// checks may run twice, or the server has just replied that they have not run.
    pub(super) async fn send(
        &mut self,
        connection: &Connection,
        again: bool,
    ) -> RedisResult<Value> {
        let slot = self.slot.unwrap_or_default();
        if !again && let Some(unrepeatable) = self.jobs.iter().find(|job| !job.is_repeatable()) {
            let now = Instant::now();
            if connection.is_idle(slot, now) {
                // Boxed, since few batches need this future, and it would enlarge the future of
                // every batch.
                Box::pin(prove(unrepeatable, connection, &self.common.keys, now)).await?;
            }
        }
        if self.jobs.first().is_some_and(|job| job.is_release()) {
            let removals = self.removals();
            let sent = Instant::now();
            let send = async || connection.send_all(&removals, again, sent).await;
            let reply = self.timed(sent, send).await;
            // An earlier try may have freed the places, so all of them count as freed.
            if again {
                return reply.map(|_| Value::Array(vec![Value::Int(1); removals.len()]));
            }
            return reply;
        }
        // The capacity suffices for about all arguments, so that the command is not copied as it
        // grows: each job has a key and an id, and each run has a few arguments.
        let arguments = 16 + 3 * self.jobs.len();
        let mut evalsha = Cmd::with_capacity(2 + arguments, 64 + 32 * arguments);
        self.write(evalsha.arg("EVALSHA").arg(&*SHA1), again);
        let sent = Instant::now();
        let send = async || connection.send(&evalsha, again, sent).await;
        let reply = self.timed(sent, send).await;
        if reply.is_ok() && !again {
            connection.note_reply(slot, sent);
        }
        if is_unknown(&reply) {
            return self.eval(connection, again).await;
        }
        reply
    }

    /// Loads and runs the script, after the server has replied NOSCRIPT.
    pub(super) async fn eval(
        &mut self,
        connection: &Connection,
        again: bool,
    ) -> RedisResult<Value> {
        let mut eval = cmd("EVAL");
        self.write(eval.arg(&*DECIDE), again);
        let sent = Instant::now();
        self.timed(sent, async || connection.send(&eval, again, sent).await)
            .await
    }

    /// Sends the batch now, at `sent`, waits for the reply, and measures the round trip.
    async fn timed(
        &mut self,
        sent: Instant,
        send: impl AsyncFnOnce() -> RedisResult<Value>,
    ) -> RedisResult<Value> {
        let was_in_doubt = mem::replace(&mut self.is_in_doubt, true);
        self.asked = Some((sent, self.common.local_state.refusals.generation()));
        let reply = send().await;
        self.is_in_doubt = reply
            .as_ref()
            .is_err_and(|error| was_in_doubt || is_lost(error));
        self.common.heard(self.slot, sent, Duration::MAX, &reply);
        reply
    }

    /// The commands that free the places in a batch of releases.
    fn removals(&self) -> Pipeline {
        let keys = &self.common.keys;
        let mut removals = Pipeline::with_capacity(self.jobs.len());
        for job in &self.jobs {
            for charge in job.check().charges() {
                let key = keys.of(charge.limit(), charge.key());
                let id = job.id.0.to_be_bytes();
                removals.cmd("ZREM").arg(key).arg(&id);
            }
        }
        removals
    }

    /// Appends the number of keys, the keys, and the arguments described in `head.lua`.
    fn write(&self, command: &mut Cmd, again: bool) {
        let keys = &self.common.keys;
        let counts = self.jobs.iter().map(|job| job.check().charges().count());
        command.arg(counts.sum::<usize>());
        for charge in self.jobs.iter().flat_map(|job| job.check().charges()) {
            command.arg(keys.of(charge.limit(), charge.key()));
        }
        let clock = self.common.clock.as_ref();
        let runs = self.jobs.chunk_by(|job, next| have_one_shape(job, next));
        if clock.is_none()
            && let Some(run) = runs.clone().next()
            && run.len() == self.jobs.len()
            && Kind::of(&run[0], again) == Kind::Plain
        {
            write_run(run, command, again, true, || self.time());
            return;
        }
        command.arg(clock.map_or_else(String::new, |clock| clock.micros().to_string()));
        for run in runs {
            write_run(run, command, again, false, || self.time());
        }
    }

    /// The time as far as this process knows it.
    fn time(&self) -> u64 {
        match &self.common.clock {
            Some(clock) => clock.micros(),
            None => micros_since_epoch(SystemTime::now()),
        }
    }

    /// Answers every caller, from the script's reply or with the error.
    pub(super) fn finish(mut self, reply: Result<Value, StoreError>) {
        // A caller may ask again as soon as it has its answer. Redis has decided all these checks,
        // so none of them counts as ahead of the new check.
        for job in &self.jobs {
            job.leave_crowd();
        }
        match reply.and_then(|reply| self.answers(reply)) {
            Ok(answers) => {
                let mut answers = answers.into_iter();
                for job in mem::take(&mut self.jobs) {
                    job.finish(&mut answers, |check, is_unused, decision, is_counted| {
                        self.keep_unclaimed(check, is_unused && is_counted, &decision);
                    });
                }
            }
            Err(error) => {
                let jobs = mem::take(&mut self.jobs);
                self.fail(jobs, &error);
            }
        }
    }

    /// Makes use of a decision whose caller has left: a refusal is cached so that the next caller
    /// gets it at once, and unused units are given back.
    fn keep_unclaimed(&self, check: &Check, is_unused: bool, decision: &Decision) {
        let is_refused = !decision.is_allowed();
        if is_refused && let Some((sent, generation)) = self.asked {
            let refusals = &self.common.local_state.refusals;
            refusals.learn_late(check, decision, sent.elapsed(), generation);
        }
        // A caller that gave the id may try again, and that try uses the units.
        if is_unused && check.id().is_none() {
            self.common.give_back(check, decision);
        }
    }

    fn fail(&self, jobs: Vec<Box<Job>>, error: &StoreError) {
        self.give_back(&jobs, is_given_back);
        let mut errors = iter::repeat_with(|| Err(error.clone()));
        for job in jobs {
            job.finish(&mut errors, |_, _, _, _| {});
        }
    }

    /// Gives back the units that these jobs may have taken under the chosen charges, although no
    /// reply says so.
    pub(super) fn give_back(&self, jobs: &[Box<Job>], is_chosen: impl Fn(&Job, &Charge) -> bool) {
        if self.is_in_doubt {
            let refunds = jobs
                .iter()
                .flat_map(|job| job.refunds(|charge| is_chosen(job, charge)));
            drop(Lost::new(&self.common, refunds.collect()));
        }
    }

    /// The answer to a lone check.
    pub(super) fn only_answer(&self, reply: Value) -> Answer {
        self.answers(reply)?
            .pop()
            .unwrap_or_else(|| Err(malformed()))
    }

    fn answers(&self, reply: Value) -> Result<Vec<Answer>, StoreError> {
        read(reply, &self.jobs, || self.time()).ok_or_else(malformed)
    }
}

/// If the runtime ends before the jobs have their answers, gives their places back.
impl Drop for Batch {
    fn drop(&mut self) {
        self.give_back(&self.jobs, is_given_back);
    }
}

/// True if the charge has to be given back when the reply is lost. This holds for a place. It also
/// holds for a charge that the store finds by its id, if the job is one slot's part of a check,
/// since other slots may refuse the check.
fn is_given_back(job: &Job, charge: &Charge) -> bool {
    charge.takes_place() || job.is_part && charge.is_found_by_id()
}

/// Coalesces equal checks: makes each a copy of an earlier one, where the order of arrival allows
/// it. Puts prefetches last, since no request waits for them. So a check never comes behind its
/// key's prefetch, and two equal checks join even if a prefetch came between them.
fn join(jobs: Vec<Box<Job>>) -> Vec<Box<Job>> {
    let digester = Digester::default();
    // The index of the last job that touches each key, by key hash. If two keys collide, equal
    // checks may travel apart, which does no harm.
    let mut last_touch =
        ByDigest::<usize>::with_capacity_and_hasher(jobs.len(), Default::default());
    let mut touched = Vec::new();
    let mut prefetches = Vec::new();
    let mut joined = Vec::<Box<Job>>::with_capacity(jobs.len());
    for job in jobs {
        if job.is_of_prefetch() {
            prefetches.push(job);
            continue;
        }
        // Copies usually come in a row. So if the last job has copies, the new job is compared with
        // it before the new job's keys are hashed.
        if let Some(last) = joined.last_mut()
            && last.count() > 1
            && last.is_interchangeable_with(&job)
        {
            last.join(*job);
            continue;
        }
        touched.clear();
        touched.extend(job.check().charges().map(|charge| charge.digest(&digester)));
        let mut touches = touched.iter().map(|hash| last_touch.get(hash).copied());
        let last = touches.next().flatten();
        let last = last.filter(|last| touches.all(|other| other == Some(*last)));
        match last {
            Some(last) if joined[last].is_interchangeable_with(&job) => joined[last].join(*job),
            _ => {
                last_touch.extend(touched.iter().map(|hash| (*hash, joined.len())));
                joined.push(job);
            }
        }
    }
    joined.extend(prefetches);
    joined
}

/// Tests the connection before a check that must not be sent twice. Any reply from the key's node
/// proves that the connection works. Without one, this fails.
async fn prove(job: &Job, connection: &Connection, keys: &Keys, now: Instant) -> RedisResult<()> {
    let charge = job.check().first();
    let mut read = cmd("ZCARD");
    read.arg(keys.of(charge.limit(), charge.key()));
    match connection.send(&read, false, now).await {
        Err(error) if error.is_timeout() || needs_new_connection(&error) || was_not_run(&error) => {
            Err(error)
        }
        _ => Ok(()),
    }
}

/// True if the script may have run despite this error.
fn is_lost(error: &RedisError) -> bool {
    error.is_timeout() || needs_new_connection(error)
}

fn malformed() -> StoreError {
    let cause = "the reply is not the script's";
    StoreError::new(ASKING, StoreErrorKind::Other, cause)
}

/// A charge's figures once all copies of its check have been decided: the used units, the
/// microseconds until fewer are used, the reserved units, the retry time, and the retry time if all
/// reserved units were given back now.
type Figures = [u64; 5];

/// The answers for all jobs and their copies: the decision, and whether a settlement was applied.
/// `None` if the reply is not from the script. It is probably from a proxy in front of Redis.
fn read(reply: Value, jobs: &[Box<Job>], time: impl Fn() -> u64) -> Option<Vec<Answer>> {
    let mut answers = Vec::with_capacity(jobs.len());
    let mut fields = match reply {
        Value::Array(fields) => fields,
        // The reply to the short form.
        Value::BulkString(bytes) if bytes.len() % 8 == 0 => bytes
            .as_chunks()
            .0
            .iter()
            .map(|number| Some(Value::Int(of_double(*number)? as i64)))
            .collect::<Option<_>>()?,
        _ => return None,
    }
    .into_iter();
    // A release's reply has no time.
    let is_release = jobs.first().is_some_and(|job| job.is_release());
    let now = if is_release {
        time()
    } else {
        number(&mut fields)?
    };
    // All jobs reuse one list's memory, which saves 1.3 % for a check with its own key.
    let mut figures: Vec<Figures> = Vec::new();
    for job in jobs {
        let check = job.check();
        let count = job.count();
        let is_of_places = job.is_release() || job.is_renewal();
        figures.clear();
        // Most jobs get figures instead of a record: all copies are admitted, and no units are
        // reserved.
        let (admitted, counted_at) = if let Some(Value::Int(_)) = fields.as_slice().first() {
            for _ in check.charges() {
                // A freed or renewed place has one figure, which says whether it was held.
                let used = if is_of_places {
                    0
                } else {
                    number(&mut fields)?
                };
                figures.push([used, number(&mut fields)?, 0, 0, 0]);
            }
            let is_known = !is_of_places || figures.iter().any(|figures| figures[1] > 0);
            (if is_known { count } else { 0 }, None)
        } else {
            match fields.next()? {
                Value::Array(record) => read_record(record, check, &mut figures)?,
                Value::BulkString(text) => {
                    // This job's own error. The batch's other jobs have their own results.
                    for _ in 0..count {
                        answers.push(Err(key_error(check, &text)));
                    }
                    continue;
                }
                _ => return None,
            }
        };
        if admitted > count {
            return None;
        }
        let at = system_time(counted_at.unwrap_or(now));
        for copy in 0..count {
            // If an earlier try has counted the copies, all of them get the present status.
            // Otherwise, a copy's status does not include the units that later copies take.
            let later = if counted_at.is_some() {
                0
            } else {
                admitted.saturating_sub(copy + 1)
            };
            let mut figures = figures.iter();
            let id = AdmissionId(job.id.0.wrapping_add(copy));
            let decision = Decision::new(check, at, id, |charge| {
                let [used, reset, mut reserved, retry, mut least] =
                    figures.next().copied().unwrap_or_default();
                if charge.limit().is_concurrent() {
                    // Any place may be freed in a moment, so all of them count as reserved.
                    (reserved, least) = (used, 0);
                }
                let has_retry = (copy >= admitted || charge.is_shadow()) && retry > 0;
                let waits = has_retry.then_some((least, retry));
                let used = used.saturating_sub(later.saturating_mul(charge.cost()));
                LimitStatus::of_micros(charge, used, reserved, reset, waits)
            });
            answers.push(Ok((decision, admitted > 0 && counted_at.is_none())));
        }
    }
    fields.next().is_none().then_some(answers)
}

/// Reads the figures in a check's record. Returns how many copies are admitted, and when an earlier
/// try counted them, or `None` if no earlier try did.
fn read_record(
    record: Vec<Value>,
    check: &Check,
    figures: &mut Vec<Figures>,
) -> Option<(u64, Option<u64>)> {
    let mut fields = record.into_iter();
    let admitted = number(&mut fields)?;
    let Value::Int(at) = fields.next()? else {
        return None;
    };
    for _ in check.charges() {
        let mut charge = Figures::default();
        for figure in &mut charge {
            *figure = number(&mut fields)?;
        }
        figures.push(charge);
    }
    fields
        .next()
        .is_none()
        .then_some((admitted, u64::try_from(at).ok()))
}

fn number(fields: &mut impl Iterator<Item = Value>) -> Option<u64> {
    let Value::Int(number) = fields.next()? else {
        return None;
    };
    u64::try_from(number).ok()
}

/// The error for a key that another application uses, or that the store cannot write. The script's
/// text begins with the charge's number, from 1.
fn key_error(check: &Check, text: &[u8]) -> StoreError {
    let text = String::from_utf8_lossy(text);
    let (number, text) = text.split_once(' ').unwrap_or(("", &text));
    let index = number.parse().unwrap_or(1_usize).saturating_sub(1);
    let limit = check
        .charges()
        .nth(index)
        .map_or("an unknown limit", |charge| charge.limit().name());
    let cause = format!(
        "the key of the limit {limit:?} cannot be read or written: {}",
        text.trim_end()
    );
    StoreError::new(ASKING, kind_of_reply(text), cause).of_one_check()
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
        Check::new(Charge::prefetch(CALLS, Key::from(key), units, 100_000))
            .with_id(AdmissionId::fresh())
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
        jobs.iter()
            .map(|job| (job.check().charges().map(Charge::cost).sum(), job.count()))
            .collect()
    }

    #[test]
    fn checks_keep_their_order_and_prefetches_come_last() {
        let checks = [
            prefetch("ada", 20),
            check("bob", 2),
            check("eve", 1),
            prefetch("joe", 30),
            check("ada", 1),
        ];
        assert_eq!(joined(checks), [(2, 1), (1, 1), (1, 1), (20, 1), (30, 1)]);
    }

    #[test]
    fn equal_checks_join_if_no_other_is_between_them() {
        let checks = [
            check("ada", 1),
            check("bob", 3),
            check("ada", 1),
            check("ada", 2),
            check("ada", 1),
            check("bob", 3),
        ];
        assert_eq!(joined(checks), [(1, 2), (3, 2), (2, 1), (1, 1)]);
    }

    #[test]
    fn checks_of_one_key_stay_in_order_before_prefetches() {
        let both = check("ada", 4)
            .and(Charge::new(CALLS, "bob", 4).unwrap())
            .unwrap();
        assert_eq!(
            joined([both, check("bob", 1), check("eve", 1), check("bob", 1)]),
            [(8, 1), (1, 2), (1, 1)]
        );
        assert_eq!(
            joined([check("ada", 2), prefetch("ada", 20), check("ada", 1)]),
            [(2, 1), (1, 1), (20, 1)]
        );
        assert_eq!(
            joined([
                check("ada", 2),
                prefetch("ada", 20),
                prefetch("ada", 30),
                check("ada", 1)
            ])[1],
            (1, 1)
        );
    }
}
