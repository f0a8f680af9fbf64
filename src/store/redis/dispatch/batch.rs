//! A batch: checks and settlements that travel in one script call.
//!
//! Equal checks travel as one check with copies, which costs Redis about as much as one. The order of arrival still decides:
//! a check joins an earlier one only if no job between them touches their keys. Nothing outside can tell the order of
//! checks on different keys, so those that the script decides quickly come first.

use std::{
    collections::HashMap,
    hash::BuildHasherDefault,
    iter,
    time::{SystemTime, UNIX_EPOCH},
};

use redis::{Cmd, ErrorKind, RedisResult, ServerErrorKind, Value, cmd};

use super::{
    dispatcher::ASKING,
    job::{Answer, Job, Work},
    reply,
};
use crate::{
    algorithm::Kind,
    check::{Charge, Check},
    clock::{Clock, ManualClock},
    error::StoreError,
    key::{Digester, Prehashed},
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
        let mut jobs = if jobs.len() > 1 { arrange(jobs) } else { jobs };
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
        if let Some(charge) = self.lone_charge(again) {
            let figures = [charge.limit().units(), charge.limit().window_micros()];
            command.arg(figures.map(|figure| (figure as f64).to_le_bytes()).as_flattened());
            command.arg(&self.jobs[0].id.0.to_be_bytes());
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

    /// The only charge, if the script has a short form for it.
    fn lone_charge(&self, again: bool) -> Option<&Charge> {
        let [job] = &*self.jobs else { return None };
        let has_form = self.now.is_empty() && !again && Rank::of(job) == Rank::Quick;
        job.check().only_charge().filter(|_| has_form)
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
        reply::read(reply, &self.jobs, &mut answers).map_err(|_| malformed())?;
        Ok(answers)
    }
}

fn malformed() -> StoreError {
    StoreError::new(ASKING, "the reply is not the script's")
}

/// The place of a job in its batch.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    /// The script has a quick way for it, which begins with the batch and ends with the last of these.
    Quick,
    Other,
    /// No request waits for it.
    OfPrefetch,
}

impl Rank {
    fn of(job: &Job) -> Self {
        if job.is_of_prefetch() {
            return Self::OfPrefetch;
        }
        let has_quick_way = |charge: &Charge| charge.cost() == 1 && is_plain(charge);
        let is_quick = matches!(&job.work, Work::Decide(check)
            if job.count() == 1 && check.id().is_none() && check.only_charge().is_some_and(has_quick_way));
        if is_quick { Self::Quick } else { Self::Other }
    }
}

/// Makes a check a copy of an earlier equal one, if no job between them touches their keys, and brings the jobs in the order of their
/// ranks. Jobs that touch one key stay in order, but prefetches come last.
fn arrange(jobs: Vec<Box<Job>>) -> Vec<Box<Job>> {
    let digester = Digester::default();
    // The last job that touches a key, and the rank of the checks so far that touch it. If two keys have one hash, equal checks only
    // travel apart.
    let mut last_touch: HashMap<u64, (usize, Rank), BuildHasherDefault<Prehashed>> =
        HashMap::with_capacity_and_hasher(jobs.len(), BuildHasherDefault::default());
    let mut touched = Vec::new();
    let mut arranged: Vec<(Rank, Box<Job>)> = Vec::with_capacity(jobs.len());
    for job in jobs {
        touched.clear();
        touched.extend(job.check().charges().map(|charge| digester.of_key(charge.limit().name(), charge.key())));
        let mut touches = touched.iter().map(|hash| last_touch.get(hash).copied());
        let last = touches.next().flatten();
        let earlier = last.filter(|(last, _)| touches.all(|touch| touch.is_some_and(|(place, _)| place == *last)));
        let joined = match earlier.and_then(|(place, _)| Some((place, arranged.get_mut(place)?))) {
            Some((place, (rank, earlier))) => earlier.join(job).map(|()| {
                *rank = Rank::of(earlier).max(*rank);
                (place, *rank)
            }),
            None => Err(job),
        };
        let touch = joined.unwrap_or_else(|job| {
            let own = Rank::of(&job);
            let before = touched.iter().filter_map(|hash| last_touch.get(hash)).map(|(_, rank)| *rank).max();
            let before = before.unwrap_or(Rank::Quick);
            arranged.push((own.max(before), job));
            // Later checks of its key do not come behind a prefetch.
            (arranged.len() - 1, if own == Rank::OfPrefetch { before } else { own.max(before) })
        });
        last_touch.extend(touched.iter().map(|hash| (*hash, touch)));
    }
    arranged.sort_by_key(|(rank, _)| *rank);
    arranged.into_iter().map(|(_, job)| job).collect()
}

fn fail(jobs: Vec<Box<Job>>, error: &StoreError) {
    let mut errors = iter::repeat_with(|| Err(error.clone()));
    jobs.into_iter().for_each(|job| job.finish(&mut errors));
}

/// Appends the arguments that all jobs of one shape share.
fn write_shape(job: &Job, command: &mut Cmd, again: bool) {
    let check = job.check();
    let is_plain = check.charges().all(is_plain);
    let kind = match job.work {
        Work::Settle(_) if again => "settle again",
        Work::Settle(_) => "settle",
        Work::Decide(_) => match (is_plain, again || may_be_counted(check)) {
            (true, false) => "plain",
            (true, true) => "again",
            (false, false) => "any",
            (false, true) => "given",
        },
    };
    command.arg(job.count()).arg(kind).arg(check.charges().count());
    let mut costs = match &job.work {
        Work::Settle(settlement) => settlement.accounts().map(|(_, cost)| cost).collect(),
        Work::Decide(_) => Vec::new(),
    }
    .into_iter();
    for charge in check.charges() {
        let limit = charge.limit();
        command.arg(limit.units()).arg(charge.cost()).arg(limit.window_micros());
        if !(is_plain && job.is_check()) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{admission::AdmissionId, key::Key, limit::Limit};

    const CALLS: Limit = Limit::per_hour("calls", 100);

    fn check(key: &str, cost: u64) -> Check {
        Check::new(Charge::new(CALLS, key, cost).unwrap())
    }

    fn prefetch(key: &str, units: u64) -> Check {
        Check::new(Charge::prefetch(CALLS, Key::from(key), units, 100_000)).with_id(AdmissionId::fresh())
    }

    /// The costs and copies of these checks, as they travel.
    fn arranged(checks: impl IntoIterator<Item = Check>) -> Vec<(u64, u64)> {
        let job = |check| {
            let mut job = Job::decide(check);
            drop(job.wait());
            job
        };
        let jobs = arrange(checks.into_iter().map(job).collect());
        jobs.iter().map(|job| (job.check().charges().map(Charge::cost).sum(), job.count())).collect()
    }

    #[test]
    fn single_units_come_first_and_prefetches_last() {
        let checks = [prefetch("ada", 20), check("bob", 2), check("eve", 1), prefetch("joe", 30), check("ada", 1)];
        assert_eq!(arranged(checks), [(1, 1), (1, 1), (2, 1), (20, 1), (30, 1)]);
    }

    #[test]
    fn equal_checks_join_if_no_other_is_between_them() {
        let checks =
            [check("ada", 1), check("bob", 3), check("ada", 1), check("ada", 2), check("ada", 1), check("bob", 3)];
        assert_eq!(arranged(checks), [(1, 2), (3, 2), (2, 1), (1, 1)]);
    }

    #[test]
    fn checks_of_one_key_stay_in_order_behind_a_longer_one() {
        let both = check("ada", 4).and(Charge::new(CALLS, "bob", 4).unwrap()).unwrap();
        assert_eq!(arranged([both, check("bob", 1), check("eve", 1)]), [(1, 1), (8, 1), (1, 1)]);
        assert_eq!(arranged([check("ada", 2), prefetch("ada", 20), check("ada", 1)]), [(2, 1), (1, 1), (20, 1)]);
        assert_eq!(arranged([check("ada", 2), prefetch("ada", 20), prefetch("ada", 30), check("ada", 1)])[1], (1, 1));
    }
}
