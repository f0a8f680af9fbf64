//! A batch: checks and settlements that travel in one script call.
//!
//! `copies.rs` joins equal checks, and `lone.rs` has a shorter form for a check that is alone.

use std::{
    iter,
    time::{SystemTime, UNIX_EPOCH},
};

use redis::{Cmd, ErrorKind, RedisResult, ServerErrorKind, Value, cmd};

use super::{
    copies,
    dispatcher::ASKING,
    job::{Answer, Job, Work},
    lone, reply,
};
use crate::{
    algorithm::Kind,
    check::{Charge, Check},
    clock::{Clock, ManualClock},
    error::StoreError,
    limit::Limit,
    local::LocalState,
    store::redis::{
        connect::Connection,
        keys::Keys,
        script::{DECIDE, SHA1},
    },
};

/// The clock that a store on Redis decides by.
#[derive(Clone)]
pub(crate) enum TimeSource {
    /// The server's clock, which the script reads.
    Server,
    /// The system clock of each process.
    System,
    Manual(ManualClock),
}

impl TimeSource {
    /// The time for the script, in microseconds since the Unix epoch. Empty if the script reads the server's clock.
    pub(super) fn now(&self) -> String {
        match self {
            Self::Server => String::new(),
            // Not a monotonic clock, which would drift away from the clocks of other processes.
            Self::System => SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros().to_string(),
            Self::Manual(clock) => Clock::Manual(clock.clone()).now().to_string(),
        }
    }

    /// A local state whose clock runs as fast.
    pub(crate) fn local_state(&self) -> LocalState {
        LocalState::on(match self {
            Self::Server | Self::System => Clock::monotonic(),
            Self::Manual(clock) => Clock::Manual(clock.clone()),
        })
        .with_prefetch()
    }
}

pub(super) struct Batch {
    jobs: Vec<Box<Job>>,
    now: String,
}

impl Batch {
    pub(super) fn new(jobs: Vec<Box<Job>>, time: &TimeSource) -> Self {
        let mut jobs = if jobs.len() > 1 { copies::join(jobs) } else { jobs };
        jobs.iter_mut().for_each(|job| job.set_id());
        Self { jobs, now: time.now() }
    }

    /// Keeps the jobs that may be sent again, and fails the others.
    pub(super) fn keep_repeatable(&mut self, error: &StoreError) {
        let (kept, others) = self.jobs.drain(..).partition(|job| job.is_repeatable());
        self.jobs = kept;
        fail(others, error);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }

    /// Runs the script. `again` says that an earlier try may have counted this batch.
    ///
    /// NOSCRIPT is followed by one EVAL, which runs the script and loads it: one round trip, to the right server, and without
    /// the permission that SCRIPT LOAD needs. It is not repeated: a loop does not help a server that loses scripts that fast.
    pub(super) async fn send(&self, connection: &mut Connection, keys: &Keys, again: bool) -> RedisResult<Value> {
        // Capacity for about all, so that the command is not copied as it grows: a key and an id for each job, and a few
        // arguments for each shape.
        let arguments = 16 + 3 * self.jobs.len();
        let mut evalsha = Cmd::with_capacity(2 + arguments, 64 + 32 * arguments);
        self.write(evalsha.arg("EVALSHA").arg(&*SHA1), keys, again);
        match connection.send(&evalsha, again).await {
            Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript) => {
                let mut eval = cmd("EVAL");
                self.write(eval.arg(DECIDE), keys, again);
                connection.send(&eval, again).await
            }
            result => result,
        }
    }

    /// Appends the number of keys, the keys, and the arguments: `head.lua` describes them.
    fn write(&self, command: &mut Cmd, keys: &Keys, again: bool) {
        let charges = || self.jobs.iter().flat_map(|job| job.check().charges());
        command.arg(charges().count());
        for charge in charges() {
            command.arg(keys.of(charge.limit(), charge.key()));
        }
        if let [job] = &*self.jobs
            && self.now.is_empty()
            && !again
            && lone::write(job, command)
        {
            return;
        }
        command.arg(&self.now);
        for run in self.jobs.chunk_by(|job, next| have_one_shape(job, next)) {
            write_shape(&run[0], command, again);
            command.arg(run.len());
            for job in run {
                command.arg(&job.id.0.to_be_bytes());
                if let Work::Settle(settlement) = &job.work {
                    command.arg(settlement.at_micros());
                }
            }
        }
    }

    /// Gives every caller its answer from the script's reply, or the error.
    pub(super) fn finish(self, reply: Result<Value, StoreError>) {
        match reply.and_then(|reply| self.answers(reply)) {
            Ok(answers) => {
                let mut answers = answers.into_iter();
                self.jobs.into_iter().for_each(|job| job.finish(&mut answers));
            }
            Err(error) => fail(self.jobs, &error),
        }
    }

    /// The answer to a check that is alone.
    pub(super) fn only_answer(&self, reply: Value) -> Answer {
        self.answers(reply)?.pop().unwrap_or_else(|| Err(malformed()))
    }

    fn answers(&self, reply: Value) -> Result<Vec<Answer>, StoreError> {
        let mut answers = Vec::with_capacity(self.jobs.len());
        reply::read(reply, &self.jobs, &mut answers).ok_or_else(malformed)?;
        Ok(answers)
    }
}

fn malformed() -> StoreError {
    StoreError::new(ASKING, "the reply is not the script's")
}

fn fail(jobs: Vec<Box<Job>>, error: &StoreError) {
    let mut errors = iter::repeat_with(|| Err(error.clone()));
    jobs.into_iter().for_each(|job| job.finish(&mut errors));
}

/// Appends the arguments that all jobs of one shape share.
fn write_shape(job: &Job, command: &mut Cmd, again: bool) {
    let check = job.check();
    if let Some(limit) = single(job).filter(|_| !again) {
        command.arg("single").arg(limit.units()).arg(limit.window_micros());
        return;
    }
    let kind = match &job.work {
        Work::Settle(_) if again => "settle again",
        Work::Settle(_) => "settle",
        Work::Decide(_) if again || may_be_counted(check) => "again",
        Work::Decide(_) if check.charges().all(is_plain) => "plain",
        Work::Decide(_) => "any",
    };
    command.arg(kind).arg(job.count()).arg(check.charges().count());
    let mut costs = match &job.work {
        Work::Settle(settlement) => settlement.accounts().map(|(_, cost)| cost).collect(),
        Work::Decide(_) => Vec::new(),
    }
    .into_iter();
    for charge in check.charges() {
        let limit = charge.limit();
        command.arg(limit.units()).arg(charge.cost()).arg(limit.window_micros());
        if kind == "plain" {
            continue;
        }
        match limit.algorithm().kind() {
            Kind::Log => command.arg("log"),
            Kind::Fixed => command.arg("fixed"),
            Kind::Counter => command.arg("counter"),
            Kind::Compact { entries } => command.arg(entries),
        };
        command.arg(charge.lease_micros().unwrap_or(0));
        match costs.next().flatten() {
            Some(cost) => command.arg(cost),
            None => command.arg(mode(charge)),
        };
    }
}

/// Whether the check may have been counted under its id. The id of a prefetch is fresh.
fn may_be_counted(check: &Check) -> bool {
    check.id().is_some() && !check.charges().any(Charge::is_prefetch)
}

/// Whether two checks differ only in their keys and ids.
fn have_one_shape(job: &Job, other: &Job) -> bool {
    let (Work::Decide(check), Work::Decide(other_check)) = (&job.work, &other.work) else {
        return false;
    };
    let figures = |charge: &Charge| {
        let limit = charge.limit();
        let numbers = (limit.units(), charge.cost(), limit.window_micros());
        (numbers, limit.algorithm(), charge.lease_micros(), mode(charge))
    };
    job.count() == other.count()
        && check.id().is_some() == other_check.id().is_some()
        && check.charges().map(figures).eq(other_check.charges().map(figures))
}

/// The limit of a check of one copy and one unit, if its charge is plain and its id is new.
pub(super) fn single(job: &Job) -> Option<&Limit> {
    let Work::Decide(check) = &job.work else { return None };
    let charge = check.only_charge().filter(|_| check.id().is_none() && job.count() == 1)?;
    (charge.cost() == 1 && is_plain(charge)).then(|| charge.limit())
}

/// Whether a charge is of the most frequent kind: exact, at a cost, not reserved, counted or refused.
fn is_plain(charge: &Charge) -> bool {
    charge.cost() > 0 && charge.is_exact() && charge.lease_micros().is_none() && mode(charge).is_empty()
}

/// The script's word for a charge that never refuses or takes nothing.
fn mode(charge: &Charge) -> &'static str {
    match (charge.is_shadow(), charge.takes_nothing()) {
        _ if charge.is_spent() => "spent",
        (true, true) => "left shadow",
        (true, false) => "shadow",
        (false, true) => "left",
        (false, false) => "",
    }
}
