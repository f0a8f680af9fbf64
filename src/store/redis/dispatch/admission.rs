//! Decides whether a job may join the queue.
//!
//! | job | joins the queue | otherwise |
//! |---|---|---|
//! | a check that takes a prefetch | while at most a 64th of the capacity waits, since callers' checks go first | an error |
//! | a check behind as many equal ones as its limits can admit | if few jobs wait, to get exact figures. If the reply is late, the check is refused as expected, just before its deadline. If Redis fails, it is refused at once, since otherwise a flood would pass by fail-open | refused |
//! | – if it is one slot's part of a cross-slot check | never, so the other slots are not asked, and no units have to be given back | refused |
//! | any other check | if it is expected to have its answer within its deadline, and the queue has room | an error |
//! | a settlement | while less than twice the capacity waits, since a lost settlement cannot be asked for again | an error |
//!
//! So a client never fills the queue with checks that its own limit refuses, and checks whose
//! callers have left do not take room. The wait is estimated from the times at which earlier
//! batches left.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    crowds::{Crowd, Crowds, most_admitted},
    job::{Answer, Job},
    turns::{FEW, MAX_BATCH, Turns},
};
use crate::{
    check::Check,
    decision::Decision,
    error::{StoreError, StoreErrorKind},
    key::Digester,
    store::redis::connect::ASKING,
};

/// The most checks that may wait. This bounds the memory while Redis hangs. While Redis works,
/// deadlines usually keep the queue shorter: a check that Redis could not decide in time does not
/// queue, and Redis decides fewer checks than this within a deadline.
pub(super) const CAPACITY: usize = 65_536;

/// Before the queue refuses a job, it removes cancelled jobs, but only if more than a 32nd of the
/// waiting jobs may be cancelled. So each scan removes many jobs.
const PART_OF_CANCELLED: usize = 32;

/// The shortest time between two scans for passed deadlines. Only checks that take places cause
/// such scans.
const BETWEEN_WALKS: Duration = Duration::from_millis(10);

/// A check that is expected to be refused waits for its figures until 1/8 of its deadline is left.
const EARLY: u32 = 8;

/// A multiple of the smoothed time per check caps each sample. For this cap, the smoothed time
/// counts as at least this long. Few servers are faster.
const SHORT_TIME: Duration = Duration::from_micros(10);

/// Prefetches are taken only while at most a 64th of the queue's capacity waits. That is only a few
/// batches, since prefetches delay the checks behind them. Prefetches are given back no matter how
/// many jobs wait, since their units count until then.
const PART_OF_PREFETCHES: usize = 64;

pub(super) struct Admission {
    capacity: usize,
    digester: Digester,
    /// The crowds, by check digest.
    pub(super) crowds: Crowds,
    /// How many callers have stopped waiting since the last removal. Some of their jobs may have
    /// left the queue meanwhile.
    pub(super) cancelled: usize,
    /// When the queue is next scanned for checks that take places and whose deadlines have passed:
    /// first at the deadline of the first such check. `cancelled` does not count them.
    first_end: Option<Instant>,
    /// The smoothed time per check: from one batch to the next, divided by the checks in the first.
    /// It is zero until two batches have been measured, and again after the queue was empty, so
    /// that a check is not refused because of an earlier wait.
    pub(super) time_per_check: Duration,
    /// When the last batch left, and the number of its checks. `None` if no job waited behind it.
    last_batch: Option<(Instant, u32)>,
}

/// How a job joins the queue.
pub(super) struct Admitted {
    /// The digest by which the job takes turns.
    pub(super) turn: Option<u64>,
    /// The refusal expected for a check behind equal ones, and how long its caller waits for exact
    /// figures before it gets this refusal.
    pub(super) expected: Option<(Box<Decision>, Duration)>,
}

impl Admission {
    pub(super) fn new(capacity: usize) -> Self {
        Self {
            capacity,
            digester: Digester::default(),
            crowds: Crowds::default(),
            cancelled: 0,
            first_end: None,
            time_per_check: Duration::ZERO,
            last_batch: None,
        }
    }

    /// Decides whether a job may join the waiting jobs. To make room, this may remove cancelled
    /// jobs. An `Err` has the job's answer.
    pub(super) fn admit(
        &mut self,
        job: &mut Job,
        waiting: &mut Turns,
        in_flight: usize,
    ) -> Result<Admitted, Box<Answer>> {
        let turn = waiting.turn_of(job, &self.digester);
        let is_check = job.is_check();
        let is_prefetch = is_check && job.is_of_prefetch();
        if is_prefetch && waiting.len() > self.capacity / PART_OF_PREFETCHES {
            return Err(self.error(waiting, turn, in_flight));
        }
        if is_check {
            let crowd = self.crowd_of(job.check(), turn);
            job.crowd = crowd.map(Arc::new);
        }
        let mut expected = None;
        let mut is_too_long = self.is_too_long(job, turn, waiting, in_flight);
        let is_behind = |crowd: &Arc<Crowd>| crowd.refuses(job.check());
        if is_too_long || job.crowd.as_ref().is_some_and(is_behind) {
            self.make_room(waiting);
            is_too_long = self.is_too_long(job, turn, waiting, in_flight);
        }
        let crowd = job.crowd.as_ref();
        if let Some(refusal) = crowd.and_then(|crowd| crowd.refusal(job.check())) {
            if turn.is_some() || job.is_part || is_too_long {
                return Err(Box::new(Ok((refusal, false))));
            }
            expected = Some((Box::new(refusal), job.deadline - job.deadline / EARLY));
            job.is_behind = true;
        }
        if is_too_long {
            return Err(self.error(waiting, turn, in_flight));
        }
        Ok(Admitted { turn, expected })
    }

    /// The crowd that a check joins. While few jobs wait, only checks under small limits need one.
    fn crowd_of(&mut self, check: &Check, turn: Option<u64>) -> Option<Crowd> {
        if turn.is_none() && most_admitted(check)? > FEW as u64 {
            return None;
        }
        Crowd::join(&mut self.crowds, check, &self.digester)
    }

    /// True if a job would wait beyond its deadline, or if the queue has no room for it.
    fn is_too_long(&self, job: &Job, turn: Option<u64>, waiting: &Turns, in_flight: usize) -> bool {
        let most = self.capacity * if job.is_check() { 1 } else { 2 };
        waiting.len() >= most || self.wait(waiting.ahead_of(turn), in_flight) > job.deadline
    }

    /// Removes cancelled jobs if there may be many.
    fn make_room(&mut self, waiting: &mut Turns) {
        let is_any_over = self.first_end.is_some_and(|end| end <= Instant::now());
        if is_any_over || self.cancelled > waiting.len() / PART_OF_CANCELLED {
            self.cancelled = 0;
            // The next scan for passed deadlines comes later, so that it removes many jobs.
            self.first_end = self.first_end.map(|_| Instant::now() + BETWEEN_WALKS);
            waiting.remove_cancelled();
        }
    }

    /// Schedules a scan for the end of a check that takes a place.
    pub(super) fn expect(&mut self, end: Option<Instant>) {
        self.first_end = self.first_end.or(end);
    }

    /// Estimates the time until a job has its answer, after all jobs that are in flight or ahead of
    /// it. A third is added for slow batches. Otherwise, more checks would be answered too late,
    /// and would only delay others.
    pub(super) fn wait(&self, ahead: usize, in_flight: usize) -> Duration {
        let ahead = ahead + in_flight * MAX_BATCH;
        let checks = (ahead + ahead / 3) as u32;
        self.time_per_check.saturating_mul(checks)
    }

    /// The error for a check that cannot be queued. The store still decides the checks in the
    /// queue, so a breaker must not count this as a failure.
    fn error(&self, waiting: &Turns, turn: Option<u64>, in_flight: usize) -> Box<Answer> {
        let wait = self.wait(waiting.ahead_of(turn), in_flight);
        let takes = if wait.is_zero() {
            "an unknown time".into()
        } else {
            format!("about {wait:?}")
        };
        let waiting = waiting.len();
        let cause = format!("{waiting} checks are waiting for Redis, which takes {takes}");
        let error = StoreError::new(ASKING, StoreErrorKind::TimedOut, cause);
        Box::new(Err(error.of_one_check()))
    }

    /// Samples the time per check, from the last batch to the one that leaves now. `waiting` is the
    /// number of jobs that wait behind the new batch. If the server pauses once, this says little
    /// about later batches, so a sample is capped at four times the smoothed time. The cap is
    /// multiplied by the number of batches in flight, since all of them may leave together.
    pub(super) fn measure(
        &mut self,
        now: Instant,
        checks: usize,
        in_flight: usize,
        waiting: usize,
    ) {
        if let Some((before, checks)) = self.last_batch {
            let smoothed = self.time_per_check.max(SHORT_TIME);
            let most = smoothed.saturating_mul(4 * in_flight as u32);
            let took = (now.saturating_duration_since(before) / checks).min(most);
            self.time_per_check = (self.time_per_check * 7 + took) / 8;
        }
        self.last_batch = (waiting > 0).then_some((now, checks as u32));
    }

    /// Forgets earlier batches' times once the queue is empty.
    pub(super) fn forget(&mut self) {
        (self.time_per_check, self.last_batch, self.first_end) = (Duration::ZERO, None, None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        check::Charge,
        key::Key,
        store::redis::dispatch::turns::tests::{CALLS, Waiting},
    };

    /// Makes batches leave a queue.
    struct Batches {
        waiting: Waiting,
        admission: Admission,
        now: Instant,
    }

    impl Batches {
        fn of(checks: u64) -> Self {
            let mut waiting = Waiting::default();
            (0..checks).for_each(|key| waiting.push(key, 1));
            Self {
                waiting,
                admission: Admission::new(CAPACITY),
                now: Instant::now(),
            }
        }

        /// Lets this many of the four batches in flight leave together. Returns the microseconds
        /// per check.
        fn leave(&mut self, batches: usize, after: u64) -> u128 {
            self.now += Duration::from_millis(after);
            for _ in 0..batches {
                let turns = &mut self.waiting.turns;
                let checks = turns.next_batch().len();
                self.admission.measure(self.now, checks, 4, turns.len());
            }
            self.admission.time_per_check.as_micros()
        }
    }

    /// At 1 ms per check, the estimate tells how many checks may leave before a check that comes
    /// now. In fact, never more checks than that are ahead of the check.
    #[test]
    fn no_check_leaves_later_than_its_estimate() {
        let mut seed = 7_u64;
        let mut dice = |sides: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) % sides
        };
        let mut admission = Admission::new(CAPACITY);
        admission.time_per_check = Duration::from_millis(1);
        let mut long = 0;
        for round in 0..100 {
            let mut waiting = Waiting::default();
            let keys = 1 + dice(20);
            for _ in 0..dice(900) {
                match dice(200) {
                    0..20 => waiting.push_cancelled("left"),
                    20 => drop(waiting.turns.next_batch()),
                    _ => waiting.push(dice(keys) * dice(2), 1),
                }
            }
            let key = Key::from(dice(keys));
            let check = Check::new(Charge::new(CALLS, key.clone(), 2).unwrap());
            let job = Job::decide(check, Duration::MAX);
            let turn = waiting.turns.turn_of(&job, &waiting.digester);
            if turn.is_none() {
                continue;
            }
            let wait = admission.wait(waiting.turns.ahead_of(turn), 0);
            let most = wait.as_millis() as usize * 3 / 4;
            waiting.push(key, 2);
            let ahead = waiting.costs().iter().position(|cost| *cost == 2);
            assert!(
                ahead.is_some_and(|ahead| ahead <= most),
                "round {round}: {ahead:?} of {most}"
            );
            long += 1;
        }
        assert!(long > 20, "only {long} queues were long");
    }

    /// While other checks wait, a batch of 64 checks leaves every 10 ms. So the time per check is
    /// 156 µs.
    #[test]
    fn the_time_per_check_is_that_of_batches_with_others_behind_them() {
        let mut batches = Batches::of(1);
        let told = (batches.leave(1, 1), batches.admission.last_batch);
        assert_eq!(told, (0, None), "nobody waited behind it");
        (0..3_000_u64).for_each(|key| batches.waiting.push(key, 1));
        assert_eq!(batches.leave(1, 60_000), 0, "nobody has waited for it");
        let measured: Vec<_> = (0..40).map(|_| batches.leave(1, 10)).collect();
        assert!(
            measured.is_sorted() && measured[0] == 19 && measured[39] > 150 && measured[39] <= 156,
            "{measured:?}"
        );
    }

    /// Four batches are in flight, and leave together every 40 ms. Then the server pauses for a
    /// second, or slows down.
    #[test]
    fn a_pause_changes_the_time_per_check_little() {
        for (batches_before, later, most) in [
            (0, 40, 200),
            (1, 40, 200),
            (40, 40, 500),
            (40, 1_000, 6_000),
        ] {
            let mut batches = Batches::of(20_000);
            for _ in 0..batches_before {
                batches.leave(4, 40);
            }
            batches.leave(4, 1_000);
            let measured: Vec<_> = (0..10).map(|_| batches.leave(4, later)).collect();
            assert!(
                measured.iter().all(|time| *time <= most),
                "{batches_before}, {later}: {measured:?}"
            );
            assert!(
                measured[9] > most / 4,
                "{batches_before}, {later}: {measured:?}"
            );
        }
    }
}
