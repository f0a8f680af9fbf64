//! One limit's sliding window for one key: pure arithmetic, with the time passed in.
//!
//! Times and windows are microseconds. `log.rs` has the log, which remembers admissions either one
//! by one, or summed up per window or sub-window. This file has the rules by which a limit's units
//! are counted in a log, and `counter.rs` estimates a counter's units. `store/redis/script/*.lua`
//! is the same arithmetic in Lua. The oracle in the package `tower-sliding-window-conformance`
//! checks that Rust and Lua follow the same rules.

mod counter;
mod entry;
mod log;

use self::entry::{Entry, Kind, Sum, UnitsOf};
pub(crate) use self::log::Log;
use crate::{
    algorithm::MOST_NAMED,
    check::{AdmissionId, Charge},
    decision::{LimitStatus, Settlement},
    limit::Limit,
};

/// A check's time and id.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CheckContext {
    pub(crate) now: u64,
    pub(crate) id: AdmissionId,
    /// True if the caller has given the id, so that the check may have been counted before.
    pub(crate) has_caller_id: bool,
}

/// A limit and key's state for one charge: units, and times in microseconds. The default is an
/// empty log's state.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Figures {
    used: u64,
    reserved: u64,
    reset_after: u64,
    /// The retry time, computed twice: as if all reserved units were given back now, and as if none
    /// were given back. `None` if the charge does not refuse the check.
    retry: Option<(u64, u64)>,
}

impl Log {
    /// Makes a log for a key for which only unit sums are known. Each pair in `sums` has the latest
    /// time at which the units may have been counted, and the number of units.
    pub(crate) fn of_sums(limit: &Limit, sums: impl Iterator<Item = (u64, u64)>, now: u64) -> Self {
        let mut new = Self::default();
        for (until, units) in sums.filter(|(_, units)| *units > 0) {
            new.add_up(until, limit, units);
        }
        new.trim(now, limit.window_micros());
        new
    }

    /// True if enough units are left for the charge. A spent charge and a charge at a cost of 0
    /// always fit.
    #[inline]
    pub(crate) fn fits(&self, charge: &Charge, now: u64) -> bool {
        if charge.cost() == 0 || charge.is_spent() {
            return true;
        }
        let used = self.used(charge.limit(), now);
        used.saturating_add(charge.cost()) <= charge.limit().units()
    }

    /// True if [`admit`](Self::admit) would add an entry.
    #[inline]
    pub(crate) fn grows(&self, charge: &Charge, context: CheckContext) -> bool {
        let limit = charge.limit();
        charge.units() > 0
            && (self.is_named(charge, context)
                || self.sum_at(limit.recorded_at(context.now)).is_none())
    }

    /// Records an admission. If there is no room for a new entry, the admission is
    /// [merged](Self::merge) with others.
    #[inline]
    pub(crate) fn admit(&mut self, charge: &Charge, context: CheckContext, has_room: bool) {
        let CheckContext { now, id, .. } = context;
        if charge.units() == 0 {
        } else if !has_room {
            self.merge(now, charge.limit(), charge.units());
        } else if self.is_named(charge, context) {
            let at = charge.named_at(now);
            self.insert(Entry::new(at, id, kind_of(charge), charge.units()));
        } else {
            self.add_up(now, charge.limit(), charge.units());
        }
    }

    /// The state for a charge that does not refuse the check.
    #[inline]
    pub(crate) fn figures(&self, charge: &Charge, now: u64) -> Figures {
        let limit = charge.limit();
        let used = self.used(limit, now);
        let reset_after = match used.checked_sub(1) {
            Some(most) if limit.is_counter() => self.wait_for(most, limit, now, Sum::all),
            _ => self.reset_after(now, limit.window_micros()),
        };
        Figures {
            used,
            reserved: self.sum().reserved,
            reset_after,
            retry: None,
        }
    }

    /// The state for a charge that does not fit. The retry time is never longer than two windows.
    ///
    /// An entry with a future time was counted before the clock stepped back. It is moved to the
    /// present, so that the key counts correctly again after one window. In a log [of
    /// sums](Self::of_sums), entries may be ahead of the clock although it has not stepped back, so
    /// they are not moved.
    #[inline]
    pub(crate) fn refuse(&mut self, charge: &Charge, now: u64, is_of_sums: bool) -> Figures {
        let limit = charge.limit();
        if !is_of_sums && limit.is_counter() {
            let units = self.take_sums_after(now);
            self.pull_back(now);
            if units > 0 {
                self.add_up(now, limit, units);
            }
        } else if !is_of_sums {
            self.pull_back(limit.recorded_at(now));
        }
        let fitting = limit.units().saturating_sub(charge.cost());
        let most = self.wait_for(fitting, limit, now, Sum::all);
        let mut least = most;
        if self.sum().reserved > 0 {
            least = self.wait_for(fitting, limit, now, Sum::not_reserved);
        }
        Figures {
            retry: Some((least, most)),
            ..self.figures(charge, now)
        }
    }

    /// Sets the actual cost for one charge of an admission, and returns whether the admission was
    /// known. `has_room` says whether there is room for a new entry, which only a settlement after
    /// the lease may need.
    pub(crate) fn settle(
        &mut self,
        now: u64,
        of: &Settlement,
        charge: &Charge,
        cost: u64,
        has_room: bool,
    ) -> bool {
        let (id, at) = (of.id, of.at_micros());
        if cost > 0 && charge.takes_place() {
            return self.time_of(id, charge.cost()).is_some();
        }
        let Some(recorded_at) = self.take(id, charge.cost(), kind_of(charge), charge.named_at(at))
        else {
            return self.settle_late(now, of, charge, cost, has_room);
        };
        // Once units under a lease are settled, they count from their admission. But they never
        // count from a future time, even if the clock has stepped back since the admission.
        let at = if charge.lease_micros().is_some() {
            at.min(now)
        } else {
            recorded_at
        };
        if cost == 0 {
        } else if charge.is_exact() {
            self.insert(Entry::new(at, id, Kind::Settled, cost));
        } else {
            self.add_up(at, charge.limit(), cost);
        }
        true
    }

    /// Counts a settlement that comes after the lease, and returns whether it was counted. A
    /// settlement counts only once, and does not count if its units would have left the window by
    /// now.
    fn settle_late(
        &mut self,
        now: u64,
        of: &Settlement,
        charge: &Charge,
        cost: u64,
        has_room: bool,
    ) -> bool {
        let (id, at, limit) = (of.id, of.at_micros(), charge.limit());
        let time = if limit.is_counter() {
            at
        } else {
            limit.recorded_at(at)
        };
        let is_over = charge
            .lease_micros()
            .is_some_and(|lease| at.saturating_add(lease) <= now);
        // A fixed window's units leave when it ends, which may be less than a whole window after
        // `at`.
        let would_count = at.min(time).saturating_add(limit.window_micros()) > now;
        if cost == 0 || !is_over || !would_count || self.has_settled(id, time) {
            return false;
        }
        if !has_room {
            self.merge(now, limit, cost);
        } else if charge.is_exact() || self.len() < MOST_NAMED {
            self.insert(Entry::new(time, id, Kind::Settled, cost));
        } else {
            self.add_up(at, limit, cost);
        }
        true
    }

    /// The units in the window.
    #[inline]
    fn used(&self, limit: &Limit, now: u64) -> u64 {
        let mut used = self.sum().units;
        if limit.is_counter() {
            used = used.saturating_sub(counter::faded(self, now, limit.window_micros()));
        }
        used
    }

    /// The time until at most `most` units are in the window. `units_of` chooses which units with
    /// an id count.
    fn wait_for(&self, most: u64, limit: &Limit, now: u64, units_of: UnitsOf) -> u64 {
        let window = limit.window_micros();
        if limit.is_counter() {
            return counter::wait_for(self, most, now, window, units_of);
        }
        self.time_until(most, now, window, units_of)
    }

    /// Adds units to the sum at their recorded time.
    fn add_up(&mut self, at: u64, limit: &Limit, units: u64) {
        self.add_to_sum(limit.recorded_at(at), units);
    }

    /// Adds units to the sum for the clock's current half window. So a log that does not get other
    /// entries in between has at most three such sums. Under a counter, adds the units to the sum
    /// for the clock's current window, which a counter has anyway.
    fn merge(&mut self, now: u64, limit: &Limit, units: u64) {
        if limit.is_counter() {
            self.add_up(now, limit, units);
        } else {
            let half = limit.window_micros().div_ceil(2);
            self.add_to_sub_window(limit.recorded_at(now), half, units);
        }
    }

    /// True if an admission gets its own entry.
    #[inline]
    fn is_named(&self, charge: &Charge, context: CheckContext) -> bool {
        let is_found_again = context.has_caller_id || charge.lease_micros().is_some();
        charge.is_exact() || is_found_again && self.len() < MOST_NAMED
    }
}

impl Figures {
    #[inline]
    pub(crate) fn status(self, charge: &Charge) -> LimitStatus {
        LimitStatus::of_micros(
            charge,
            self.used,
            self.reserved,
            self.reset_after,
            self.retry,
        )
    }
}

/// The entry kind for an admission of the charge.
fn kind_of(charge: &Charge) -> Kind {
    let is_reserved = charge.lease_micros().is_some() && !charge.is_spent();
    if is_reserved || charge.takes_place() {
        Kind::Reserved
    } else {
        Kind::Named
    }
}
