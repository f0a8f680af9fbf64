//! A window: the arithmetic of one limit for one key, with the time passed in.
//!
//! Times and windows are microseconds. `log.rs` remembers admissions, each by itself or many of one sub-window together;
//! `counter.rs` remembers two numbers. `store/redis/*.lua` is the same arithmetic in Lua; the conformance suite and the
//! plain model of the tests hold both to the same rules.

mod chunk;
mod counter;
mod entries;
mod entry;
mod log;

use self::{
    counter::Counter,
    entry::{Sum, Which},
    log::Log,
};
use crate::{
    admission::AdmissionId,
    algorithm::{Kind, MOST_NAMED},
    check::Charge,
    limit::Limit,
    settlement::{Account, Settlement},
};

/// What one limit remembers for one key.
#[derive(Debug)]
pub(crate) enum Window {
    Log(Log),
    Counter(Box<Counter>),
}

/// When a check is decided, and under which identity.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attempt {
    pub(crate) now: u64,
    pub(crate) id: AdmissionId,
    /// Whether the identity is the caller's, so that it may have been counted already.
    pub(crate) is_given: bool,
}

/// How long to wait for room, in microseconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wait {
    /// If all that is reserved is given back now: 0 if that would do.
    pub(crate) least: u64,
    /// If nothing is given back before its lease ends.
    pub(crate) most: u64,
}

impl Wait {
    /// Of the time until there is room, as it is with and without the units that are `held`.
    fn of(held: u64, until_room: impl Fn(Which) -> u64) -> Self {
        let most = until_room(Sum::all);
        let least = if held > 0 { until_room(Sum::not_held) } else { most };
        Self { least, most }
    }
}

impl Window {
    /// An empty window of a limit.
    pub(crate) fn new(limit: &Limit) -> Self {
        match limit.algorithm().kind() {
            Kind::Counter => Self::Counter(Box::default()),
            Kind::Log | Kind::Compact { .. } | Kind::Fixed => Self::Log(Log::default()),
        }
    }

    /// Drops what has left the window and says how many entries that were.
    pub(crate) fn trim(&mut self, now: u64, window: u64) -> usize {
        match self {
            Self::Log(log) => log.trim(now, window),
            Self::Counter(counter) => counter.trim(now, window),
        }
    }

    /// The number of entries.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Log(log) => log.len(),
            Self::Counter(counter) => counter.len(),
        }
    }

    /// Gives back memory that a burst left behind.
    pub(crate) fn shrink(&mut self) {
        match self {
            Self::Log(log) => log.shrink(),
            Self::Counter(counter) => counter.shrink(),
        }
    }

    /// The units in the window.
    pub(crate) fn used(&self, now: u64, window: u64) -> u64 {
        match self {
            Self::Log(log) => log.used(),
            Self::Counter(counter) => counter.used(now, window),
        }
    }

    /// Those of them that are reserved.
    pub(crate) fn reserved(&self) -> u64 {
        self.log().held()
    }

    /// The time until fewer units are in the window; 0 if there are none.
    pub(crate) fn reset_after(&self, now: u64, limit: &Limit) -> u64 {
        let window = limit.window_micros();
        match self {
            Self::Log(log) => log.reset_after(now, window),
            Self::Counter(counter) => counter.reset_after(now, window),
        }
    }

    /// When this very admission was counted, if it is counted already. Where many share one time, it may not be told more
    /// exactly than that.
    pub(crate) fn counted_at(&self, charge: &Charge, id: AdmissionId) -> Option<u64> {
        self.log().time_of(id, charge.cost()).map(|at| charge.admitted_at(at))
    }

    /// What has an id.
    fn log(&self) -> &Log {
        match self {
            Self::Log(log) => log,
            Self::Counter(counter) => counter.held(),
        }
    }

    /// How many entries [`admit`](Self::admit) would add.
    pub(crate) fn growth(&self, charge: &Charge, attempt: Attempt) -> usize {
        if charge.is_exact() {
            return 1;
        }
        let is_kept = self.is_kept(charge, attempt);
        match self {
            Self::Log(log) => (is_kept || !log.has_sum_at(charge.limit().recorded_at(attempt.now))).into(),
            Self::Counter(counter) => (is_kept || counter.is_zero()).into(),
        }
    }

    /// Records an admission.
    pub(crate) fn admit(&mut self, charge: &Charge, attempt: Attempt) {
        let Attempt { now, id, .. } = attempt;
        let (limit, units) = (charge.limit(), charge.cost());
        let is_kept = charge.is_exact() || self.is_kept(charge, attempt);
        let log = match self {
            Self::Log(log) => log,
            Self::Counter(counter) if is_kept => counter.held_mut(),
            Self::Counter(counter) => return counter.add(now, limit.window_micros(), units),
        };
        match is_kept {
            true if charge.is_reserved() => log.hold(charge.kept_at(now), units, id),
            true => log.keep(charge.kept_at(now), units, id),
            false => log.add(limit.recorded_at(now), units),
        }
    }

    /// The time until at most so many units are in the window: 0 if that is so, and never more than two windows.
    ///
    /// To be asked where a check is refused: if the clock has stepped back, entries from the future then count as having
    /// happened now, so that the key is right again after one window.
    pub(crate) fn wait_for(&mut self, most: u64, now: u64, limit: &Limit) -> Wait {
        let window = limit.window_micros();
        match self {
            Self::Log(log) => log.wait_for(most, now, limit.recorded_at(now), window),
            Self::Counter(counter) => counter.wait_for(most, now, window),
        }
    }

    /// Sets what an admission has cost, and says whether it was known. For entries that are new room is `taken` before.
    pub(crate) fn settle<E>(
        &mut self,
        now: u64,
        settlement: &Settlement,
        account: Account<'_>,
        taken: impl FnOnce(usize) -> Result<(), E>,
    ) -> Result<bool, E> {
        let (charge, id) = (account.charge(), settlement.id());
        let (limit, is_held) = (charge.limit(), charge.is_reserved());
        let log = match self {
            Self::Log(log) => log,
            Self::Counter(counter) => counter.held_mut(),
        };
        let Some(cost) = account.cost() else { return Ok(false) };
        let kept_at = charge.kept_at(settlement.at_micros());
        let Some(recorded_at) = log.take(id, charge.cost(), is_held, kept_at) else {
            return self.settle_late(now, settlement, (charge, cost), taken);
        };
        // Not in the future, should the clock have stepped back since.
        let at = if is_held { settlement.at_micros().min(now) } else { recorded_at };
        match self {
            _ if cost == 0 => {}
            Self::Log(log) if limit.algorithm().kind() == Kind::Log => log.settle(at, cost, id),
            Self::Log(log) => log.add(limit.recorded_at(at), cost),
            Self::Counter(counter) => counter.add_at(at, now, limit.window_micros(), cost),
        }
        Ok(true)
    }

    /// Counts what was used under a lease that is over, unless that was done before or would have left by now.
    fn settle_late<E>(
        &mut self,
        now: u64,
        settlement: &Settlement,
        (charge, cost): (&Charge, u64),
        taken: impl FnOnce(usize) -> Result<(), E>,
    ) -> Result<bool, E> {
        let (limit, id, at) = (charge.limit(), settlement.id(), settlement.at_micros());
        let window = limit.window_micros();
        let time = if let Self::Log(_) = self { limit.recorded_at(at) } else { at };
        let is_over = charge.lease_micros().is_some_and(|lease| at.saturating_add(lease) <= now);
        // A fixed window may have ended before.
        let would_count = at.min(time).saturating_add(window) > now;
        if cost == 0 || !is_over || !would_count || self.log().has_settled(id, time) {
            return Ok(false);
        }
        let is_full = self.is_full_of_ids(limit);
        taken(match self {
            Self::Log(log) if is_full => (!log.has_sum_at(time)).into(),
            Self::Counter(counter) if is_full => counter.is_zero().into(),
            Self::Log(_) | Self::Counter(_) => 1,
        })?;
        match self {
            Self::Log(log) if is_full => log.add(time, cost),
            Self::Counter(counter) if is_full => counter.add_at(at, now, window, cost),
            Self::Log(log) => log.settle(time, cost, id),
            Self::Counter(counter) => counter.held_mut().settle(time, cost, id),
        }
        Ok(true)
    }

    /// Whether an admission is an entry of its own, under its id, where not every one is.
    fn is_kept(&self, charge: &Charge, attempt: Attempt) -> bool {
        (attempt.is_given || charge.lease_micros().is_some()) && !self.is_full_of_ids(charge.limit())
    }

    /// Whether no more entries can have an id of their own.
    fn is_full_of_ids(&self, limit: &Limit) -> bool {
        limit.algorithm().kind() != Kind::Log && self.len() >= MOST_NAMED
    }
}
