//! A check or a settlement on its way, and the callers that wait for it.

use std::{
    mem,
    sync::Weak,
    time::{Duration, Instant},
};

use redis::Cmd;
use tokio::sync::oneshot::{Receiver, Sender, channel};

use super::crowds::Crowd;
use crate::{
    algorithm::Kind,
    check::{AdmissionId, Charge, Check},
    decision::{Decision, Settlement},
    error::StoreError,
    local::{LocalState, Outdated, Underway},
    store::redis::keys::Keys,
};

/// A prefetch waits for other prefetches to travel with: for a 64th of its life, and for at most
/// [`LONGEST_WAIT`]. If a 64th of its life is less than [`SHORTEST_WAIT`], the precision of a
/// timer, the prefetch does not wait.
const PART_OF_LIFE: u32 = 64;
const LONGEST_WAIT: Duration = Duration::from_millis(4);
const SHORTEST_WAIT: Duration = Duration::from_millis(1);

/// The decision on a check, or the statuses after a settlement and whether the settlement was
/// applied.
pub(crate) type Answer = Result<(Decision, bool), StoreError>;

enum Work {
    Decide(Check),
    /// Boxed, so that the many jobs that are checks stay small.
    Settle(Box<Settling>),
}

/// A settlement, which goes on if its caller leaves.
struct Settling {
    settlement: Settlement,
    _outdated: Outdated,
    _underway: Underway,
}

pub(crate) struct Job {
    work: Work,
    /// The id of the admission. A check gets its id when it joins a batch, and its copies get the
    /// ids that follow.
    pub(super) id: AdmissionId,
    /// The caller that waits while a task sends the job. `None` while the caller sends its check
    /// itself.
    caller: Option<Sender<Answer>>,
    /// The callers of equal checks, which travel as copies of this one.
    copies: Vec<Sender<Answer>>,
    /// How long the caller waits for the answer.
    pub(super) deadline: Duration,
    /// The end of the deadline of a check that takes a place. After this time the caller has left,
    /// and only a task still waits for the answer, to free the place. `None` for other jobs.
    pub(super) end: Option<Instant>,
    /// The crowd of equal checks to which this check belongs until it is answered: see
    /// [`queue`](super::queue).
    pub(super) crowd: Option<Crowd>,
    /// The caller of a check of several slots, if this job asks one slot for its part of that
    /// check. This pointer only tells whether the caller still waits. It is boxed, so that a job is
    /// small enough to be copied fast.
    pub(super) whole: Option<Box<Weak<dyn Send + Sync>>>,
}

impl Job {
    pub(crate) fn decide(check: Check, deadline: Duration) -> Box<Self> {
        Self::new(AdmissionId(0), Work::Decide(check), deadline)
    }

    pub(crate) fn settle(settlement: Settlement, local_state: &LocalState) -> Box<Self> {
        // A settlement mostly outdates the refusals that this process remembers for the limits and
        // keys of the settlement. There are two exceptions. The settlement of a prefetch outdates
        // none, since a refusal that counts the units of the prefetch as reserved is remembered for
        // at most a life. The renewal of a place outdates none, since it gives no units back.
        let keeps = |charge: &Charge, cost: Option<u64>| {
            charge.life().is_some() || cost.is_none_or(|cost| charge.takes_place() && cost > 0)
        };
        let others = settlement
            .accounts()
            .filter(|(charge, cost)| !keeps(charge, *cost));
        let outdated = local_state.outdate(
            others.map(|(charge, _)| (charge.limit(), charge.key())),
            None,
        );
        let id = settlement.id;
        let settling = Settling {
            settlement,
            _outdated: outdated,
            _underway: local_state.owed.begin(),
        };
        Self::new(id, Work::Settle(Box::new(settling)), Duration::MAX)
    }

    fn new(id: AdmissionId, work: Work, deadline: Duration) -> Box<Self> {
        Box::new(Self {
            work,
            id,
            caller: None,
            copies: Vec::new(),
            deadline,
            end: None,
            crowd: None,
            whole: None,
        })
    }

    /// Lets the caller of the job wait while a task sends the job.
    pub(super) fn wait(&mut self) -> Receiver<Answer> {
        let (caller, answer) = channel();
        // The clock is read only for a check that takes a place.
        if self.is_check() && self.check().takes_place() {
            self.end = Instant::now().checked_add(self.deadline);
        }
        self.caller = Some(caller);
        answer
    }

    /// The check to decide, or the check of the admission to settle.
    pub(super) fn check(&self) -> &Check {
        match &self.work {
            Work::Decide(check) => check,
            Work::Settle(settling) => &settling.settlement.check,
        }
    }

    pub(super) fn is_check(&self) -> bool {
        matches!(self.work, Work::Decide(_))
    }

    /// Gives the check and its copies their ids: the caller's own, or fresh ones.
    pub(super) fn set_id(&mut self) {
        if let Work::Decide(check) = &self.work {
            self.id = check
                .id()
                .unwrap_or_else(|| AdmissionId::fresh_run(self.count()));
        }
    }

    /// The settlements that give back what a check and its copies have taken, of the charges that
    /// are chosen. Empty if the caller of the check gave the id: the caller may then try the check
    /// again.
    pub(super) fn refunds(&self, is_chosen: impl Fn(&Charge) -> bool) -> Vec<Settlement> {
        let is_given_back = self.is_check() && self.check().id().is_none();
        let chosen = self
            .check()
            .charges()
            .filter(|charge| is_given_back && is_chosen(charge));
        let Some(chosen) = Check::of_distinct(chosen.cloned()) else {
            return Vec::new();
        };
        let refund = |copy| {
            Settlement::refund_by_id(chosen.clone(), AdmissionId(self.id.0.wrapping_add(copy)))
        };
        (0..self.count()).map(refund).collect()
    }

    /// The number of checks: the job and its copies.
    pub(super) fn count(&self) -> u64 {
        1 + self.copies.len() as u64
    }

    /// Whether the job frees places, and does nothing else.
    pub(super) fn is_release(&self) -> bool {
        let is_freed =
            |(charge, cost): (&Charge, Option<u64>)| charge.takes_place() && cost == Some(0);
        self.settlement()
            .is_some_and(|settlement| settlement.accounts().all(is_freed))
    }

    /// Whether the job renews a place, and does nothing else.
    pub(super) fn is_renewal(&self) -> bool {
        let is_held =
            |(charge, cost): (&Charge, Option<u64>)| charge.takes_place() && cost > Some(0);
        self.check().only_charge().is_some()
            && self
                .settlement()
                .is_some_and(|settlement| settlement.accounts().all(is_held))
    }

    pub(crate) fn settlement(&self) -> Option<&Settlement> {
        if let Work::Settle(settling) = &self.work {
            Some(&settling.settlement)
        } else {
            None
        }
    }

    /// Whether the job takes a prefetch, or gives one back.
    pub(super) fn is_of_prefetch(&self) -> bool {
        self.check().charges().any(|charge| charge.life().is_some())
    }

    /// How long the job may wait for other prefetches to travel with. `None` if it leaves at once.
    pub(super) fn may_wait(&self) -> Option<Duration> {
        let life = self.check().charges().find_map(Charge::life)?;
        Some((life / PART_OF_LIFE).min(LONGEST_WAIT)).filter(|wait| *wait >= SHORTEST_WAIT)
    }

    /// Whether both jobs are checks whose order makes no difference.
    pub(super) fn is_interchangeable_with(&self, other: &Self) -> bool {
        self.is_check() && other.is_check() && self.check().is_interchangeable_with(other.check())
    }

    /// Makes an interchangeable job a copy of this one.
    pub(super) fn join(&mut self, mut other: Box<Self>) {
        if other.end.is_some() {
            self.end = self.end.max(other.end);
        }
        self.copies.extend(other.caller.take());
    }

    /// Whether the job counts once even if it is sent twice, because the store remembers its id.
    pub(super) fn is_repeatable(&self) -> bool {
        let is_kept =
            |charge: &Charge| charge.units() == 0 || charge.lease().is_some() || charge.is_exact();
        !self.is_check() || self.check().id().is_some() || self.check().charges().all(is_kept)
    }

    /// Gives the next answers to the callers, in order.
    pub(super) fn finish(self, answers: &mut impl Iterator<Item = Answer>) {
        drop(self.work);
        for (caller, answer) in self.caller.into_iter().chain(self.copies).zip(answers) {
            drop(caller.send(answer));
        }
    }

    /// Takes a job apart that has not run, so that each of its callers has a job of its own.
    pub(super) fn apart(mut self: Box<Self>) -> Vec<(Box<Self>, Sender<Answer>)> {
        let caller = self.caller.take();
        let copies = mem::take(&mut self.copies);
        // The job joins the queue again, and gets a crowd there.
        self.crowd = None;
        let copy = |caller| (Self::decide(self.check().clone(), self.deadline), caller);
        let mut apart: Vec<_> = copies.into_iter().map(copy).collect();
        apart.extend(caller.map(|caller| (self, caller)));
        apart
    }

    /// Whether all callers of the check have stopped waiting. A settlement is never cancelled.
    pub(super) fn is_cancelled(&self) -> bool {
        let has_left = self.caller.as_ref().is_some_and(Sender::is_closed)
            && self.copies.iter().all(Sender::is_closed);
        let is_over = || self.end.is_some_and(|end| end <= Instant::now());
        let has_left = has_left
            || self
                .whole
                .as_ref()
                .is_some_and(|caller| caller.strong_count() == 0);
        self.is_check() && (has_left || is_over())
    }
}

/// The slot of a check, if all of its keys are in the same slot.
pub(super) fn only_slot(check: &Check, keys: &Keys) -> Option<u16> {
    let first = check.first().key();
    let slot = keys.hash_slot(first);
    let is_there = |charge: &Charge| charge.key() == first || keys.hash_slot(charge.key()) == slot;
    check.charges().all(is_there).then_some(slot)
}

/// Appends the arguments that are the same for all jobs that differ only in their keys and ids.
/// `now` is the time as far as this process knows it.
#[cfg_attr(
    not(feature = "calendar"),
    expect(unused_variables, reason = "only periods of the calendar depend on it")
)]
pub(super) fn write_shape(job: &Job, command: &mut Cmd, again: bool, now: impl Fn() -> u64) {
    let check = job.check();
    if let Some(figures) = single(job).filter(|_| !again) {
        command.arg(if check.takes_place() {
            "place"
        } else {
            "single"
        });
        figures.for_each(|figure| _ = command.arg(figure));
        return;
    }
    if let Some(charge) = check.only_charge().filter(|_| job.is_renewal()) {
        command.arg("renew").arg(charge.limit().window_micros());
        return;
    }
    let kind = match &job.work {
        Work::Settle(_) if again => "settle again",
        Work::Settle(_) => "settle",
        // If the caller gave the id, the check may have been counted before. A prefetch also comes
        // with an id, but always with a fresh one.
        Work::Decide(_) if again || check.id().is_some() && !job.is_of_prefetch() => "again",
        Work::Decide(_) if check.charges().all(is_plain) => "plain",
        Work::Decide(_) => "any",
    };
    command
        .arg(kind)
        .arg(job.count())
        .arg(check.charges().count());
    let mut costs = job
        .settlement()
        .into_iter()
        .flat_map(Settlement::accounts)
        .map(|(_, cost)| cost);
    for charge in check.charges() {
        let limit = charge.limit();
        let cost = costs.next().flatten();
        command
            .arg(limit.units())
            .arg(charge.cost())
            .arg(limit.window_micros());
        if kind == "plain" {
            continue;
        }
        match limit.algorithm().kind {
            #[cfg(feature = "calendar")]
            Kind::Calendar(calendar) => {
                let ends: Vec<String> = calendar.ends(now()).map(|end| end.to_string()).collect();
                command.arg(format!("ends {}", ends.join(" ")))
            }
            Kind::Compact { entries } => command.arg(entries),
            _ => command.arg(&*limit.algorithm().word()),
        };
        command.arg(charge.lease_micros().unwrap_or(0));
        match cost {
            Some(1..) if charge.takes_place() => command.arg(mode(charge)),
            Some(cost) if charge.is_spent() => command.arg(format!("spent {cost}")),
            Some(cost) => command.arg(cost),
            None => command.arg(mode(charge)),
        };
    }
}

/// Whether two checks, or two renewals, differ only in their keys and ids.
pub(super) fn have_one_shape(job: &Job, other: &Job) -> bool {
    let kind = |job: &Job| {
        (
            job.is_check(),
            job.is_renewal(),
            job.check().id().is_some(),
            job.count(),
        )
    };
    let figures = |charge: &Charge| {
        let limit = charge.limit();
        let numbers = (limit.units(), charge.cost(), limit.window_micros());
        (
            numbers,
            limit.algorithm(),
            charge.lease_micros(),
            mode(charge),
        )
    };
    (job.is_check() || job.is_renewal())
        && kind(job) == kind(other)
        && job
            .check()
            .charges()
            .map(figures)
            .eq(other.check().charges().map(figures))
}

/// The figures of a single check: two for its unit, and three more if it takes a place. A single
/// check takes one unit, one place, or both, has a new id, and has no copies. `None` for any other
/// job.
pub(super) fn single(job: &Job) -> Option<impl Iterator<Item = u64> + use<>> {
    let Work::Decide(check) = &job.work else {
        return None;
    };
    let mut figures = [0; 5];
    for (charge, key) in check.charges().zip(1..) {
        let limit = charge.limit();
        let [unit, window, place, life, its_key] = &mut figures;
        let (units, time) = if limit.is_concurrent() {
            (place, life)
        } else {
            (unit, window)
        };
        if charge.cost() != 1 || !is_plain(charge) || *units > 0 {
            return None;
        }
        (*units, *time) = (limit.units(), limit.window_micros());
        if limit.is_concurrent() {
            *its_key = key;
        }
    }
    let count = if check.takes_place() { 5 } else { 2 };
    (check.id().is_none() && job.count() == 1).then(|| figures.into_iter().take(count))
}

/// Whether a charge is of the most frequent kind: it counts exactly, has a cost, reserves nothing,
/// and is either counted or refused.
fn is_plain(charge: &Charge) -> bool {
    charge.cost() > 0
        && charge.is_exact()
        && charge.lease_micros().is_none()
        && mode(charge).is_empty()
}

/// The script's word for a charge that is spent, that never refuses, or that takes nothing. The
/// word is empty for any other charge.
fn mode(charge: &Charge) -> &'static str {
    match (charge.is_shadow(), charge.takes_nothing()) {
        _ if charge.is_spent() => "spent",
        (true, true) => "left shadow",
        (true, false) => "shadow",
        (false, true) => "left",
        (false, false) => "",
    }
}
