//! A check or settlement on its way, and the callers that wait for it.

use std::{
    mem,
    sync::Arc,
    time::{Duration, Instant},
};

use redis::Cmd;
use tokio::sync::oneshot::{Receiver, Sender, channel};

use super::crowds::Crowd;
use crate::{
    algorithm::Kind as Algorithm,
    check::{AdmissionId, Charge, Check},
    decision::{Decision, Settlement},
    error::StoreError,
    local::{LocalState, Outdated, Underway},
    store::redis::keys::Keys,
};

/// A prefetch waits so that others can travel with it: for a 64th of its life, and at most
/// [`LONGEST_WAIT`]. It does not wait if that time is shorter than [`SHORTEST_WAIT`], a timer's
/// precision.
const PART_OF_LIFE: u32 = 64;
const LONGEST_WAIT: Duration = Duration::from_millis(4);
const SHORTEST_WAIT: Duration = Duration::from_millis(1);

/// The decision on a check, or a settlement's statuses and whether it was applied.
pub(crate) type Answer = Result<(Decision, bool), StoreError>;

enum Work {
    Decide(Arc<Check>),
    /// Boxed to keep jobs small, since most are checks.
    Settle(Box<Settling>),
}

type HearsRefund = dyn FnOnce(&Settlement, &Answer) + Send + Sync;

/// A settlement, which is made even if its caller leaves.
struct Settling {
    settlement: Settlement,
    /// Receives the answer to a [refund](Job::refund).
    hears_refund: Option<Box<HearsRefund>>,
    _outdated: Outdated,
    _underway: Underway,
}

/// A check that travels as a copy of an equal one.
struct Copied {
    caller: Sender<Answer>,
    crowd: Option<Arc<Crowd>>,
    is_behind: bool,
}

pub(crate) struct Job {
    work: Work,
    /// The admission's id. A check gets its id when it joins a batch, and its copies get the ids
    /// that follow. All parts of a cross-slot check have one id, from the start.
    pub(super) id: AdmissionId,
    /// The channel to the caller that waits while a task sends the job. `None` while the caller
    /// itself sends its check.
    caller: Option<Sender<Answer>>,
    /// Equal checks that travel as copies of this one.
    copies: Vec<Copied>,
    /// How long the caller waits.
    pub(super) deadline: Duration,
    /// The end of the deadline, for a check that takes a place. After that, the caller has left,
    /// and only a task waits for the answer so that it can free the place. `None` for other jobs.
    pub(super) end: Option<Instant>,
    /// The crowd of equal checks to which this check belongs until it is answered: see
    /// [`admission`](super::admission).
    pub(super) crowd: Option<Arc<Crowd>>,
    /// True if this is one slot's part of a [cross-slot check](super::cross_slot).
    pub(super) is_part: bool,
    /// True if as many equal checks are ahead of this one as the limits can admit. The caller may
    /// get a refusal before the reply arrives.
    pub(super) is_behind: bool,
}

impl Job {
    pub(crate) fn decide(check: impl Into<Arc<Check>>, deadline: Duration) -> Box<Self> {
        Self::decide_as(AdmissionId(0), check.into(), deadline)
    }

    /// The job for a check that was already sent under this id.
    pub(super) fn decide_as(id: AdmissionId, check: Arc<Check>, deadline: Duration) -> Box<Self> {
        Self::new(id, Work::Decide(check), deadline)
    }

    /// One slot's part of this job's check. All parts' admissions have one id.
    pub(super) fn part(&self, check: Check) -> Box<Self> {
        let mut part = Self::decide_as(self.id, Arc::new(check), self.deadline);
        part.is_part = true;
        part
    }

    /// Gives back units that the store has certainly counted. Units without an id are taken from
    /// the sum for their time. `hear` is called with the answer, or is dropped if there is none.
    pub(super) fn refund(
        settlement: Settlement,
        local_state: &LocalState,
        hear: impl FnOnce(&Settlement, &Answer) + Send + Sync + 'static,
    ) -> Box<Self> {
        let mut job = Self::settle(settlement, local_state);
        if let Work::Settle(settling) = &mut job.work {
            settling.hears_refund = Some(Box::new(hear));
        }
        job
    }

    pub(crate) fn settle(settlement: Settlement, local_state: &LocalState) -> Box<Self> {
        // A settlement invalidates the cached refusals for its limits and keys, with two
        // exceptions. Settling a prefetch does not, since a refusal that counts its units as
        // reserved is cached for at most the prefetch's life. Renewing a place does not, since it
        // does not give anything back.
        let outdating = settlement.accounts().filter(|(charge, cost)| {
            charge.life().is_none() && cost.is_some_and(|cost| cost == 0 || !charge.takes_place())
        });
        let keys = outdating.map(|(charge, _)| (charge.limit(), charge.key()));
        let outdated = local_state.outdate(keys, None);
        let id = settlement.id;
        let settling = Settling {
            settlement,
            hears_refund: None,
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
            is_part: false,
            is_behind: false,
        })
    }

    /// Makes the job's caller wait while a task sends it.
    pub(super) fn wait(&mut self) -> Receiver<Answer> {
        let (caller, answer) = channel();
        // Only a check that takes a place reads the clock.
        if self.is_check() && self.check().takes_place() {
            self.end = Instant::now().checked_add(self.deadline);
        }
        self.caller = Some(caller);
        answer
    }

    /// Returns the check to decide, or the settled admission's check.
    pub(super) fn check(&self) -> &Check {
        match &self.work {
            Work::Decide(check) => check,
            Work::Settle(settling) => &settling.settlement.check,
        }
    }

    pub(super) fn is_check(&self) -> bool {
        matches!(self.work, Work::Decide(_))
    }

    /// The check to decide. `None` for a settlement.
    pub(super) fn shared_check(&self) -> Option<Arc<Check>> {
        match &self.work {
            Work::Decide(check) => Some(Arc::clone(check)),
            Work::Settle(_) => None,
        }
    }

    /// Gives the check and its copies their ids: the caller's own, or fresh ones. A part already
    /// has its id.
    pub(super) fn set_id(&mut self) {
        if let Work::Decide(check) = &self.work
            && !self.is_part
        {
            self.id = check
                .id()
                .unwrap_or_else(|| AdmissionId::fresh_run(self.count()));
        }
    }

    /// Returns the settlements that give back the units that a check and its copies have taken
    /// under the chosen charges. Returns none if the caller gave the id, since the caller may try
    /// the check again under this id.
    pub(super) fn refunds(&self, is_chosen: impl Fn(&Charge) -> bool) -> Vec<Settlement> {
        let copies = if self.is_check() { self.count() } else { 0 };
        let ids = (0..copies).map(|copy| AdmissionId(self.id.0.wrapping_add(copy)));
        ids.filter_map(|id| refund_by_id(self.check(), id, &is_chosen))
            .collect()
    }

    /// The number of checks: this one and its copies.
    pub(super) fn count(&self) -> u64 {
        1 + self.copies.len() as u64
    }

    /// True if the job only frees places.
    pub(super) fn is_release(&self) -> bool {
        self.settles_places(|cost| cost == Some(0))
    }

    /// True if the job only renews a place.
    pub(super) fn is_renewal(&self) -> bool {
        self.check().only_charge().is_some() && self.settles_places(|cost| cost > Some(0))
    }

    /// True if the job only settles places, and `is_cost` holds for each cost.
    fn settles_places(&self, is_cost: impl Fn(Option<u64>) -> bool) -> bool {
        let Some(settlement) = self.settlement() else {
            return false;
        };
        let mut accounts = settlement.accounts();
        accounts.all(|(charge, cost)| charge.takes_place() && is_cost(cost))
    }

    fn is_refund(&self) -> bool {
        matches!(&self.work, Work::Settle(settling) if settling.hears_refund.is_some())
    }

    pub(crate) fn settlement(&self) -> Option<&Settlement> {
        match &self.work {
            Work::Settle(settling) => Some(&settling.settlement),
            Work::Decide(_) => None,
        }
    }

    /// True if the job takes a prefetch, or gives one back.
    pub(super) fn is_of_prefetch(&self) -> bool {
        self.check().charges().any(|charge| charge.life().is_some())
    }

    /// How long the job may wait for other prefetches. `None` if it leaves at once.
    pub(super) fn may_wait(&self) -> Option<Duration> {
        let life = self.check().charges().find_map(Charge::life)?;
        Some((life / PART_OF_LIFE).min(LONGEST_WAIT)).filter(|wait| *wait >= SHORTEST_WAIT)
    }

    /// True if both jobs are checks whose order makes no difference.
    pub(super) fn is_interchangeable_with(&self, other: &Self) -> bool {
        let is_check = self.is_check() && other.is_check();
        let has_own_id = self.has_own_id() || other.has_own_id();
        is_check && !has_own_id && self.check().is_interchangeable_with(other.check())
    }

    /// True if the check's id was chosen before it joins a batch.
    pub(super) fn has_own_id(&self) -> bool {
        self.is_part || self.check().id().is_some()
    }

    /// Makes an interchangeable job a copy of this one.
    pub(super) fn join(&mut self, other: Self) {
        if other.end.is_some() {
            self.end = self.end.max(other.end);
        }
        if let Some(caller) = other.caller {
            self.copies.push(Copied {
                caller,
                crowd: other.crowd,
                is_behind: other.is_behind,
            });
        }
    }

    /// True if the job is idempotent: it counts once even if sent twice, because the store
    /// remembers its id.
    pub(super) fn is_repeatable(&self) -> bool {
        let is_always_kept = !self.is_check() && !self.is_refund();
        let mut charges = self.check().charges();
        is_always_kept
            || self.check().id().is_some()
            || charges.all(|charge| charge.units() == 0 || charge.is_found_by_id())
    }

    /// Stops counting the check and its copies as ahead of others.
    pub(super) fn leave_crowd(&self) {
        let copies = self.copies.iter().filter_map(|copy| copy.crowd.as_ref());
        for crowd in self.crowd.iter().chain(copies) {
            crowd.leave();
        }
    }

    /// Gives the next answers to the callers, in order. If a caller has left, calls `keep` with its
    /// decision, the check, and whether the admission is unused.
    pub(super) fn finish(
        self,
        answers: &mut impl Iterator<Item = Answer>,
        mut keep: impl FnMut(&Check, bool, Decision, bool),
    ) {
        // This comes before the callers have their answers, since they may ask again at once.
        self.leave_crowd();
        let (mut check, mut refund) = (None, None);
        match self.work {
            Work::Decide(decided) => check = Some(decided),
            Work::Settle(settling) => {
                let Settling {
                    settlement,
                    hears_refund,
                    ..
                } = *settling;
                refund = hears_refund.map(|hear| (hear, settlement));
            }
        }
        let first = self.caller.map(|caller| (caller, self.is_behind));
        let copies = self.copies.into_iter();
        let copies = copies.map(|copy| (copy.caller, copy.is_behind));
        for ((caller, is_behind), answer) in first.into_iter().chain(copies).zip(answers) {
            if let Some((hear, settlement)) = refund.take() {
                hear(&settlement, &answer);
            }
            if let (Err(Ok((decision, is_counted))), Some(check)) = (caller.send(answer), &check) {
                keep(check, self.is_part || is_behind, decision, is_counted);
            }
        }
    }

    /// Splits a job that has not run, so that each caller has its own job.
    pub(super) fn apart(mut self: Box<Self>) -> Vec<(Box<Self>, Sender<Answer>)> {
        // The jobs join the queue again, and get crowds there.
        self.leave_crowd();
        let mut apart = Vec::with_capacity(1 + self.copies.len());
        for copy in mem::take(&mut self.copies) {
            let job = Self::decide(self.check().clone(), self.deadline);
            apart.push((job, copy.caller));
        }
        if let Some(caller) = self.caller.take() {
            apart.push((self, caller));
        }
        apart
    }

    /// True if all the check's callers have stopped waiting. A settlement is never cancelled.
    pub(super) fn is_cancelled(&self) -> bool {
        let has_left = self.caller.as_ref().is_some_and(Sender::is_closed)
            && self.copies.iter().all(|copy| copy.caller.is_closed());
        self.is_check() && (has_left || self.end.is_some_and(|end| end <= Instant::now()))
    }
}

/// Returns the settlement that gives back a check's chosen charges, which may have been counted
/// under this id. Returns `None` if there are none, or if the caller gave the id, since the caller
/// may try the check again under this id.
pub(super) fn refund_by_id(
    check: &Check,
    id: AdmissionId,
    is_chosen: impl Fn(&Charge) -> bool,
) -> Option<Settlement> {
    let chosen = check
        .charges()
        .filter(|charge| check.id().is_none() && is_chosen(charge));
    let chosen = Check::of_distinct(chosen.cloned())?;
    Some(Settlement::refund_by_id(chosen, id))
}

/// The slot of a check, if all its keys share one.
pub(super) fn only_slot(check: &Check, keys: &Keys) -> Option<u16> {
    let first = check.first().key();
    let slot = keys.hash_slot(first);
    let mut charged = check.charges().map(Charge::key);
    let is_only = charged.all(|key| key == first || keys.hash_slot(key) == slot);
    is_only.then_some(slot)
}

/// The script's word for the kind of a job: see `head.lua`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Plain,
    Any,
    Settle,
    Renew,
}

impl Kind {
    pub(super) fn of(job: &Job, again: bool) -> Self {
        let check = job.check();
        match &job.work {
            Work::Settle(_) if job.is_renewal() => Self::Renew,
            Work::Settle(_) => Self::Settle,
            Work::Decide(_) if again || check.id().is_some() => Self::Any,
            Work::Decide(_) if check.charges().all(Charge::is_plain) => Self::Plain,
            Work::Decide(_) if sum(check).is_some() => Self::Plain,
            Work::Decide(_) => Self::Any,
        }
    }

    fn word(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Any => "any",
            Self::Settle => "settle",
            Self::Renew => "renew",
        }
    }
}

/// Appends a run's arguments. If the script call has no other run, the kind is left out. `now` is
/// the time as far as this process knows it.
#[cfg_attr(
    not(feature = "calendar"),
    expect(unused_variables, reason = "only periods of the calendar depend on it")
)]
pub(super) fn write_run(
    run: &[Box<Job>],
    command: &mut Cmd,
    again: bool,
    is_all: bool,
    now: impl Fn() -> u64,
) {
    let Some(job) = run.first() else { return };
    let (check, kind) = (job.check(), Kind::of(job, again));
    let has_modes = matches!(kind, Kind::Any | Kind::Settle);
    if !is_all {
        command.arg(kind.word());
    }
    let mut figures = Vec::with_capacity(8 + 48 * check.charges().count());
    figures.extend((job.count() as f64).to_le_bytes());
    for charge in check.charges() {
        figures.extend_from_slice(figures_of(charge).map(f64::to_le_bytes).as_flattened());
        if has_modes {
            let lease = charge.lease_micros().unwrap_or(0) as f64;
            figures.extend(lease.to_le_bytes());
        }
    }
    let mut ids = Vec::with_capacity(16 * run.len());
    for job in run {
        ids.extend(job.id.0.to_be_bytes());
        if let Some(settlement) = job.settlement()
            && kind == Kind::Settle
        {
            ids.extend((settlement.at_micros() as f64).to_le_bytes());
        }
    }
    command.arg(&figures).arg(&ids);
    if !has_modes {
        return;
    }
    // If the caller gave the id, the check may have been counted before. A prefetch also has an id,
    // but always a fresh one.
    let is_known = job.is_check() && check.id().is_some() && !job.is_of_prefetch();
    command.arg(if again || is_known { "again" } else { "" });
    let accounts = job.settlement().into_iter().flat_map(Settlement::accounts);
    let mut costs = accounts.map(|(_, cost)| cost);
    for charge in check.charges() {
        match charge.limit().algorithm().kind {
            #[cfg(feature = "calendar")]
            Algorithm::Calendar(calendar) => {
                let ends: Vec<String> = calendar.ends(now()).map(|end| end.to_string()).collect();
                command.arg(ends.join(" "))
            }
            _ => command.arg(""),
        };
        match costs.next().flatten() {
            Some(1..) if charge.takes_place() => command.arg(mode(charge)),
            Some(cost) => {
                let spent = if charge.is_spent() { "spent " } else { "" };
                let refund = if job.is_refund() { "refund " } else { "" };
                command.arg(format!("{spent}{refund}{cost}"))
            }
            None => command.arg(mode(charge)),
        };
    }
}

/// True if two checks, or two renewals, differ only in their keys and ids.
pub(super) fn have_one_shape(job: &Job, other: &Job) -> bool {
    (job.is_check() || job.is_renewal())
        && job.is_check() == other.is_check()
        && job.is_renewal() == other.is_renewal()
        && job.check().id().is_some() == other.check().id().is_some()
        && job.count() == other.count()
        && job
            .check()
            .charges()
            .map(shape)
            .eq(other.check().charges().map(shape))
}

/// A charge's arguments in a script call, except its key.
fn shape(charge: &Charge) -> impl PartialEq {
    let limit = charge.limit();
    let numbers = (limit.units(), charge.cost(), limit.window_micros());
    (
        numbers,
        limit.algorithm(),
        charge.lease_micros(),
        mode(charge),
    )
}

/// A charge's figures: the limit's units, the cost, the window, and the sub-windows, as `head.lua`
/// describes them.
fn figures_of(charge: &Charge) -> [f64; 5] {
    let limit = charge.limit();
    let window = limit.window_micros();
    let (sub_window, later) = match limit.algorithm().kind {
        Algorithm::Log | Algorithm::Concurrent => (0, 0),
        Algorithm::Counter => (window, window),
        Algorithm::Compact { entries } => {
            let sub_window = window.div_ceil(u64::from(entries) - 2);
            (sub_window, sub_window - 1)
        }
        _ => (window, 0),
    };
    let [units, cost, mut window, sub_window, later] =
        [limit.units(), charge.cost(), window, sub_window, later].map(|figure| figure as f64);
    if limit.is_concurrent() {
        window = -window;
    }
    [units, cost, window, sub_window, later]
}

/// Returns the figures for a check under a fixed window, counter or compact log, if the check is
/// counted or refused, and the store does not remember its id. Returns `None` for other checks.
pub(super) fn sum(check: &Check) -> Option<[f64; 5]> {
    let charge = check.only_charge()?;
    let is_sum = matches!(
        charge.limit().algorithm().kind,
        Algorithm::Fixed | Algorithm::Counter | Algorithm::Compact { .. }
    );
    (is_sum && check.id().is_none() && charge.is_counted_or_refused()).then(|| figures_of(charge))
}

/// The script's word for a charge that is spent, never refuses a check, or does not take units.
/// Empty for other charges.
fn mode(charge: &Charge) -> &'static str {
    match (charge.is_shadow(), charge.takes_nothing()) {
        _ if charge.is_spent() => "spent",
        (true, true) => "left shadow",
        (true, false) => "shadow",
        (false, true) => "left",
        (false, false) => "",
    }
}
