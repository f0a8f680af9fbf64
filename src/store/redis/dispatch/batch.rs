//! A batch: checks and settlements that travel in one script call.
//!
//! Equal checks travel as one check with copies, which costs Redis about as much as one. The order of arrival still decides:
//! a check joins an earlier one only if no job between them touches their keys. Nothing outside can tell the order of
//! checks on different keys.

use std::{
    collections::HashMap,
    hash::BuildHasherDefault,
    iter,
    time::{SystemTime, UNIX_EPOCH},
};

use redis::{Cmd, ErrorKind, RedisResult, ServerErrorKind, Value, cmd};

use super::{
    queue::Job,
    reply::{self, MalformedReply},
};
use crate::{
    algorithm::Kind,
    check::Charge,
    error::StoreError,
    key::{Digester, Prehashed},
    store::{
        clock::{Clock, ManualClock},
        local_state::LocalState,
        redis::{
            connect::Connection,
            keys::Keys,
            script::{DECIDE, SHA1},
        },
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
    }
}

pub(super) struct Batch {
    jobs: Vec<Box<Job>>,
    now: String,
}

impl Batch {
    pub(super) fn new(jobs: Vec<Box<Job>>, time: &TimeSource) -> Self {
        let mut jobs = if jobs.len() > 1 { join_equal(jobs) } else { jobs };
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
        command.arg(&self.now);
        for run in self.jobs.chunk_by(|job, next| have_one_shape(job, next)) {
            write_shape(&run[0], command, again);
            command.arg(run.len());
            for job in run {
                command.arg(&job.id().to_bytes());
                if let Job::Settle { settlement, .. } = &**job {
                    command.arg(settlement.at_micros());
                }
            }
        }
    }

    /// Gives every caller its result from the script's reply, or the error.
    pub(super) fn finish(self, reply: Result<Value, StoreError>) {
        let mut results = Vec::with_capacity(self.jobs.len());
        let malformed = |MalformedReply| StoreError::new("asking Redis", "the reply is not the script's");
        let read = |reply| reply::read(reply, &self.jobs, &mut results).map_err(malformed);
        match reply.and_then(read) {
            Ok(()) => {
                let mut results = results.into_iter();
                self.jobs.into_iter().for_each(|job| job.finish(&mut results));
            }
            Err(error) => fail(self.jobs, &error),
        }
    }
}

/// Makes a check a copy of an earlier equal one, if no job between them touches their keys.
fn join_equal(jobs: Vec<Box<Job>>) -> Vec<Box<Job>> {
    let digester = Digester::default();
    // The last job that touches a key. If two keys have one hash, equal checks only travel apart.
    let mut last_touch: HashMap<u64, usize, BuildHasherDefault<Prehashed>> =
        HashMap::with_capacity_and_hasher(jobs.len(), BuildHasherDefault::default());
    let mut touched = Vec::new();
    let mut joined: Vec<Box<Job>> = Vec::with_capacity(jobs.len());
    for job in jobs {
        touched.clear();
        touched.extend(job.check().charges().map(|charge| digester.of_key(charge.limit().name(), charge.key())));
        let last = touched.first().and_then(|hash| last_touch.get(hash)).copied();
        let earlier = last.filter(|last| touched.iter().all(|hash| last_touch.get(hash) == Some(last)));
        let job = match earlier.and_then(|earlier| joined.get_mut(earlier)) {
            Some(earlier) => earlier.join(job),
            None => Err(job),
        };
        if let Err(job) = job {
            last_touch.extend(touched.iter().map(|hash| (*hash, joined.len())));
            joined.push(job);
        }
    }
    joined
}

fn fail(jobs: Vec<Box<Job>>, error: &StoreError) {
    let mut errors = iter::repeat_with(|| Err(error.clone()));
    jobs.into_iter().for_each(|job| job.finish(&mut errors));
}

/// Appends the arguments that all jobs of one shape share.
fn write_shape(job: &Job, command: &mut Cmd, again: bool) {
    let check = job.check();
    let is_plain = check.charges().all(is_plain);
    let kind = match job {
        Job::Settle { .. } if again => "settle again",
        Job::Settle { .. } => "settle",
        Job::Decide { .. } => match (is_plain, again || check.id().is_some()) {
            (true, false) => "plain",
            (true, true) => "again",
            (false, false) => "any",
            (false, true) => "given",
        },
    };
    command.arg(job.count()).arg(kind).arg(check.charges().count());
    let mut costs = match job {
        Job::Settle { settlement, .. } => settlement.accounts().map(|account| account.cost()).collect(),
        Job::Decide { .. } => Vec::new(),
    }
    .into_iter();
    for charge in check.charges() {
        let limit = charge.limit();
        command.arg(limit.units()).arg(charge.cost()).arg(limit.window_micros());
        if !(is_plain && matches!(job, Job::Decide { .. })) {
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
}

/// Whether two checks differ only in their keys and ids.
fn have_one_shape(job: &Job, other: &Job) -> bool {
    let (Job::Decide { check, .. }, Job::Decide { check: other_check, .. }) = (job, other) else {
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

/// Whether a charge is of the most frequent kind: exact, not reserved, counted or refused.
fn is_plain(charge: &Charge) -> bool {
    charge.is_exact() && charge.lease_micros().is_none() && mode(charge).is_empty()
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
