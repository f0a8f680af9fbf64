//! The window of one limit for one key: pure arithmetic, with the time passed in.
//!
//! Times and windows are microseconds. `log.rs` remembers admissions, one by one or summed up by sub-window; `counter.rs`
//! remembers two numbers. `store/redis/script/*.lua` is the same arithmetic in Lua. `testing/oracle.rs` and the model
//! of the tests hold both to the same rules.

mod chunk;
mod counter;
mod entries;
mod entry;
mod log;
mod older_chunks;
mod queue;
mod singles;

pub(crate) use self::entry::RetryWait;
use self::{counter::Counter, log::Log};
use crate::{
    admission::AdmissionId,
    algorithm::{Kind, MOST_NAMED},
    check::Charge,
    limit::Limit,
};

/// The units that one limit remembers for one key.
#[derive(Debug)]
pub(crate) enum Window {
    Log(Log),
    Counter(Box<Counter>),
}

/// The time and the id of a check.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CheckContext {
    pub(crate) now: u64,
    pub(crate) id: AdmissionId,
    /// Whether the caller has given the id, so that the check may have been counted before.
    pub(crate) has_caller_id: bool,
}

/// A charge of an admitted check, and its actual cost.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChargeSettlement<'a> {
    pub(crate) charge: &'a Charge,
    pub(crate) cost: Option<u64>,
    pub(crate) id: AdmissionId,
    /// When the check was admitted.
    pub(crate) at: u64,
}

impl Window {
    pub(crate) fn new(limit: &Limit) -> Self {
        match limit.algorithm().kind() {
            Kind::Counter => Self::Counter(Box::default()),
            Kind::Log | Kind::Compact { .. } | Kind::Fixed => Self::Log(Log::default()),
        }
    }

    /// Drops entries that have left the window, and returns how many.
    #[inline]
    pub(crate) fn trim(&mut self, now: u64, window: u64) -> usize {
        match self {
            Self::Log(log) => log.trim(now, window),
            Self::Counter(counter) => counter.trim(now, window),
        }
    }

    /// The number of entries.
    #[inline]
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::Log(log) => log.len(),
            Self::Counter(counter) => counter.len(),
        }
    }

    /// Gives back the memory of a burst.
    pub(crate) fn shrink(&mut self) {
        match self {
            Self::Log(log) => log.shrink(),
            Self::Counter(counter) => counter.shrink(),
        }
    }

    /// The units in the window.
    #[inline]
    pub(crate) fn used(&self, now: u64, window: u64) -> u64 {
        match self {
            Self::Log(log) => log.used(),
            Self::Counter(counter) => counter.used(now, window),
        }
    }

    /// The reserved units in the window.
    #[inline]
    pub(crate) fn reserved(&self) -> u64 {
        self.log().reserved()
    }

    /// The time until fewer units are in the window; 0 if there are none.
    #[inline]
    pub(crate) fn reset_after(&self, now: u64, limit: &Limit) -> u64 {
        let window = limit.window_micros();
        match self {
            Self::Log(log) => log.reset_after(now, window),
            Self::Counter(counter) => counter.reset_after(now, window),
        }
    }

    /// When this very admission was counted, if it was. In a sub-window, only to that sub-window.
    pub(crate) fn counted_at(&self, charge: &Charge, id: AdmissionId) -> Option<u64> {
        self.log().time_of(id, charge.cost()).map(|at| charge.admitted_at(at))
    }

    /// The log with the entries that have an id.
    #[inline]
    fn log(&self) -> &Log {
        match self {
            Self::Log(log) => log,
            Self::Counter(counter) => counter.named(),
        }
    }

    /// How many entries [`admit`](Self::admit) would add.
    #[inline]
    pub(crate) fn growth(&self, charge: &Charge, context: CheckContext) -> usize {
        if charge.is_exact() {
            return 1;
        }
        let is_named = self.is_named(charge, context);
        match self {
            Self::Log(log) => (is_named || !log.has_sum_at(charge.limit().recorded_at(context.now))).into(),
            Self::Counter(counter) => (is_named || counter.is_zero()).into(),
        }
    }

    /// Records an admission.
    #[inline]
    pub(crate) fn admit(&mut self, charge: &Charge, context: CheckContext) {
        let CheckContext { now, id, .. } = context;
        let (limit, units) = (charge.limit(), charge.cost());
        let is_named = charge.is_exact() || self.is_named(charge, context);
        let log = match self {
            Self::Log(log) => log,
            Self::Counter(counter) if is_named => counter.named_mut(),
            Self::Counter(counter) => return counter.add(now, limit.window_micros(), units),
        };
        match is_named {
            true if charge.is_reserved() => log.add_reserved(charge.named_at(now), units, id),
            true => log.add_named(charge.named_at(now), units, id),
            false => log.add_to_sum(limit.recorded_at(now), units),
        }
    }

    /// The time until at most `most` units are in the window: 0 if it is so now, and never more than two windows.
    ///
    /// Only for a refused check: entries from the future, from before the clock stepped back, count as of now from here on,
    /// so that the key is right again after one window.
    pub(crate) fn wait_for(&mut self, most: u64, now: u64, limit: &Limit) -> RetryWait {
        let window = limit.window_micros();
        match self {
            Self::Log(log) => log.wait_for(most, now, limit.recorded_at(now), window),
            Self::Counter(counter) => counter.wait_for(most, now, window),
        }
    }

    /// Sets the actual cost of an admission, and returns whether it was known. `take_capacity` is called before a new entry
    /// is added.
    pub(crate) fn settle<E>(
        &mut self,
        now: u64,
        settlement: ChargeSettlement<'_>,
        take_capacity: impl FnOnce(usize) -> Result<(), E>,
    ) -> Result<bool, E> {
        let ChargeSettlement { charge, cost, id, at } = settlement;
        let (limit, is_reserved) = (charge.limit(), charge.is_reserved());
        let log = match self {
            Self::Log(log) => log,
            Self::Counter(counter) => counter.named_mut(),
        };
        let Some(cost) = cost else { return Ok(false) };
        let Some(recorded_at) = log.take(id, charge.cost(), is_reserved, charge.named_at(at)) else {
            return self.settle_late(now, settlement, cost, take_capacity);
        };
        // Not in the future, even if the clock has stepped back since.
        let at = if is_reserved { at.min(now) } else { recorded_at };
        match self {
            _ if cost == 0 => {}
            Self::Log(log) if limit.algorithm().kind() == Kind::Log => log.add_settled(at, cost, id),
            Self::Log(log) => log.add_to_sum(limit.recorded_at(at), cost),
            Self::Counter(counter) => counter.add_at(at, now, limit.window_micros(), cost),
        }
        Ok(true)
    }

    /// Counts a settlement after the lease, unless it was counted before or would have left the window by now.
    fn settle_late<E>(
        &mut self,
        now: u64,
        ChargeSettlement { charge, id, at, .. }: ChargeSettlement<'_>,
        cost: u64,
        take_capacity: impl FnOnce(usize) -> Result<(), E>,
    ) -> Result<bool, E> {
        let (limit, window) = (charge.limit(), charge.limit().window_micros());
        let time = if let Self::Log(_) = self { limit.recorded_at(at) } else { at };
        let is_over = charge.lease_micros().is_some_and(|lease| at.saturating_add(lease) <= now);
        // A fixed window ends earlier.
        let would_count = at.min(time).saturating_add(window) > now;
        if cost == 0 || !is_over || !would_count || self.log().has_settled(id, time) {
            return Ok(false);
        }
        let is_full = self.is_full_of_named(limit);
        take_capacity(match self {
            Self::Log(log) if is_full => (!log.has_sum_at(time)).into(),
            Self::Counter(counter) if is_full => counter.is_zero().into(),
            Self::Log(_) | Self::Counter(_) => 1,
        })?;
        match self {
            Self::Log(log) if is_full => log.add_to_sum(time, cost),
            Self::Counter(counter) if is_full => counter.add_at(at, now, window, cost),
            Self::Log(log) => log.add_settled(time, cost, id),
            Self::Counter(counter) => counter.named_mut().add_settled(time, cost, id),
        }
        Ok(true)
    }

    /// Whether an admission gets an entry of its own, under an algorithm that adds up others.
    fn is_named(&self, charge: &Charge, context: CheckContext) -> bool {
        (context.has_caller_id || charge.lease_micros().is_some()) && !self.is_full_of_named(charge.limit())
    }

    /// Whether the key has as many entries with an id as are allowed.
    fn is_full_of_named(&self, limit: &Limit) -> bool {
        limit.algorithm().kind() != Kind::Log && self.len() >= MOST_NAMED
    }
}
