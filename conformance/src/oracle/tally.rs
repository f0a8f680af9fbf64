//! The units that one limit counts for one key: their times, their sums, and their settlements.

use std::time::{Duration, SystemTime};

use tower_sliding_window::{
    Algorithm, Charge,
    check::{AdmissionId, Takes},
    settlement::Settlement,
};

use super::{micros, micros_of, time};

/// How long a check waits at least that only reserved units refuse, unless their leases end before.
const RETRY_RESERVED_AFTER: Duration = Duration::from_secs(1);

/// The admissions of one limit and key.
#[derive(Clone, Debug)]
pub(super) struct Counted {
    counts: Counts,
    entries: Vec<Entry>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Counts {
    Log,
    /// A compact log of so many sub-windows.
    Parts(u64),
    Counter,
    Fixed,
}

/// Units of one limit and key.
#[derive(Clone, Copy, Debug)]
struct Entry {
    /// The units count until a window after this time.
    at: u64,
    units: u64,
    kind: Kind,
    /// When they were admitted.
    admitted: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// An admission that cannot be found again.
    Sum,
    Named(AdmissionId),
    /// The same, until it is settled.
    Reserved(AdmissionId),
    /// So that it is not settled a second time.
    Settled(AdmissionId),
}

/// An admission that a repeated check has had before.
#[derive(Clone, Copy, Debug)]
pub(super) struct Admitted {
    pub(super) at: SystemTime,
    /// True if a store still knows its time: a sub-window, and another lease, tell it only roughly.
    is_exact: bool,
}

impl Admitted {
    pub(super) fn is_at(self, time: SystemTime) -> bool {
        !self.is_exact || self.at == time
    }
}

/// How long a charge does not fit, in microseconds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Refusal {
    /// If all reserved units are given back now; 0 if it fits then.
    least: u64,
    /// If nothing is given back before its lease ends.
    most: u64,
    has_reserved: bool,
}

impl Refusal {
    pub(super) fn is_by_reservations(self) -> bool {
        self.has_reserved && self.least == 0
    }

    pub(super) fn retry_after(self) -> Duration {
        RETRY_RESERVED_AFTER
            .max(Duration::from_micros(self.least))
            .min(Duration::from_micros(self.most))
    }

    /// The same, by entries that leave until then.
    pub(super) fn before(self, time: u64) -> Self {
        Self {
            least: self.least.min(time),
            most: self.most.min(time),
            ..self
        }
    }
}

impl Counts {
    /// True if the units count by the estimate of a counter.
    fn estimates(self, kind: Kind) -> bool {
        self == Self::Counter && kind == Kind::Sum
    }
}

impl Counted {
    pub(super) fn by(algorithm: Algorithm) -> Self {
        let entries_of = || {
            (Algorithm::MIN_ENTRIES..=Algorithm::MAX_ENTRIES)
                .find(|n| algorithm == Algorithm::compact_log(*n))
        };
        let counts = match algorithm {
            log if log == Algorithm::SLIDING_LOG => Counts::Log,
            counter if counter == Algorithm::SLIDING_WINDOW_COUNTER => Counts::Counter,
            fixed if fixed == Algorithm::FIXED_WINDOW => Counts::Fixed,
            _ => Counts::Parts(
                u64::from(entries_of().expect("a limit by an algorithm of windows")) - 2,
            ),
        };
        Self {
            counts,
            entries: Vec::new(),
        }
    }
}

/// The units that one limit counts for one key.
pub(super) struct Tally<'a> {
    counts: Counts,
    entries: &'a mut Vec<Entry>,
    charge: &'a Charge,
    now: u64,
    window: u64,
}

impl<'a> Tally<'a> {
    pub(super) fn new(counted: &'a mut Counted, charge: &'a Charge, now: u64) -> Self {
        let window = micros_of(charge.limit().window());
        let Counted { counts, entries } = counted;
        // The units of a window of a counter count until the next window ends.
        let counts_until = |entry: &Entry| match counts.estimates(entry.kind) {
            true => entry.at - entry.at % window + 2 * window,
            false => entry.at + window,
        };
        entries.retain(|entry| counts_until(entry) > now);
        Self {
            counts: *counts,
            entries,
            charge,
            now,
            window,
        }
    }

    /// The time of an entry for an admission of `at`: the end of its sub-window, or the start of
    /// its fixed window.
    fn recorded(&self, at: u64) -> u64 {
        match self.counts {
            Counts::Log | Counts::Counter => at,
            Counts::Parts(parts) => {
                let part = self.window.div_ceil(parts);
                (at / part + 1) * part - 1
            }
            Counts::Fixed => at / self.window * self.window,
        }
    }

    /// The same for the charge. With a lease it is recorded a window before the lease ends, so that
    /// it leaves then.
    fn charged_at(&self, at: u64) -> u64 {
        let leased = self
            .lease()
            .map_or(u64::MAX, |lease| (at + lease).saturating_sub(self.window));
        leased.min(self.recorded(at))
    }

    fn lease(&self) -> Option<u64> {
        self.charge.lease().map(micros_of)
    }

    /// True if the units are reserved until they are settled.
    fn reserves(&self) -> bool {
        self.charge.lease().is_some() && self.charge.takes() != Takes::Always
    }

    pub(super) fn used(&self) -> u64 {
        self.used_at(self.now, self.now, |_| true)
    }

    pub(super) fn reserved(&self) -> u64 {
        self.used_at(self.now, self.now, is_reserved)
    }

    /// The units used at a time, if entries of times after `present` count as of then.
    fn used_at(&self, at: u64, present: u64, counts: impl Fn(Kind) -> bool) -> u64 {
        // No entry is later than this, unless the clock has stepped back.
        let latest = self.recorded(present);
        let start = at / self.window * self.window;
        let mut used = 0;
        let mut current = 0;
        let mut previous = 0;
        for entry in self.entries.iter().filter(|entry| counts(entry.kind)) {
            let time = entry.at.min(latest);
            match self.counts.estimates(entry.kind) {
                false if time + self.window > at => used += entry.units,
                true if time >= start => current += entry.units,
                true if time + self.window >= start => previous += entry.units,
                _ => {}
            }
        }
        // As much of the previous window as the sliding window still covers.
        let covered = (start + self.window - at) as f64;
        used + current + (previous as f64 * covered / self.window as f64).ceil() as u64
    }

    /// The time until at most `most` units are used. Use never rises by itself.
    fn until(&self, most: u64, used_at: impl Fn(u64) -> u64) -> u64 {
        if used_at(self.now) <= most {
            return 0;
        }
        let last = self
            .entries
            .iter()
            .map(|entry| entry.at)
            .max()
            .unwrap_or_default();
        let mut too_short = 0;
        let mut enough = 3 * self.window + last.saturating_sub(self.now);
        while enough - too_short > 1 {
            let middle = too_short.midpoint(enough);
            let is_enough = used_at(self.now + middle) <= most;
            *(if is_enough {
                &mut enough
            } else {
                &mut too_short
            }) = middle;
        }
        enough
    }

    /// How long the charge does not fit, if it does not now.
    pub(super) fn refusal(&self) -> Option<Refusal> {
        let cost = self.charge.cost();
        let most = self.charge.limit().units().saturating_sub(cost);
        if cost == 0 || self.charge.takes() == Takes::Always || self.used() <= most {
            return None;
        }
        let wait =
            |counts: fn(Kind) -> bool| self.until(most, |at| self.used_at(at, self.now, counts));
        let least = wait(|kind| !is_reserved(kind));
        Some(Refusal {
            least,
            most: wait(|_| true),
            has_reserved: self.reserved() > 0,
        })
    }

    /// When the last of so many entries leaves.
    pub(super) fn leaving_of(&self, most_entries: usize) -> u64 {
        let entries = self
            .entries
            .iter()
            .filter(|entry| !self.counts.estimates(entry.kind));
        let mut leaves: Vec<u64> = entries
            .map(|entry| entry.at + self.window - self.now)
            .collect();
        leaves.sort_unstable();
        leaves
            .get(most_entries.saturating_sub(1))
            .copied()
            .unwrap_or(u64::MAX)
    }

    pub(super) fn reset_after(&self) -> Duration {
        // Entries of later times stay there until a check is refused.
        let after = match self.entries.iter().map(|entry| entry.at).min() {
            Some(oldest) if self.counts != Counts::Counter => oldest + self.window - self.now,
            _ => {
                let used = self.used();
                self.until(used.saturating_sub(1), |at| self.used_at(at, at, |_| true))
            }
        };
        Duration::from_micros(after)
    }

    /// Counts the units of an admitted charge.
    pub(super) fn admit(&mut self, id: AdmissionId, is_of_caller: bool) {
        let is_named = is_of_caller || self.charge.lease().is_some() || self.counts == Counts::Log;
        let kind = match is_named {
            true if self.reserves() => Kind::Reserved(id),
            true => Kind::Named(id),
            false => Kind::Sum,
        };
        self.write(
            self.charged_at(self.now),
            self.charge.cost(),
            kind,
            self.now,
        );
    }

    fn write(&mut self, at: u64, units: u64, kind: Kind, admitted: u64) {
        self.entries.push(Entry {
            at,
            units,
            kind,
            admitted,
        });
    }

    /// After a step back of the clock, no entry counts for longer than a window from now.
    pub(super) fn come_back(&mut self) {
        let latest = self.recorded(self.now);
        for entry in self.entries.iter_mut() {
            entry.at = entry.at.min(latest);
        }
    }

    /// This very admission, if it is known and not settled.
    pub(super) fn admission(&self, id: AdmissionId) -> Option<Admitted> {
        let is_it = |entry: &&Entry| {
            [Kind::Named(id), Kind::Reserved(id)].contains(&entry.kind)
                && entry.units == self.charge.cost()
        };
        let entry = self.entries.iter().find(is_it)?;
        let at = self.lease().map_or(entry.at, |lease| {
            (entry.at + self.window).saturating_sub(lease)
        });
        let is_exact = self.counts == Counts::Log && at == entry.admitted;
        Some(Admitted {
            at: time(entry.admitted),
            is_exact,
        })
    }

    /// Sets the cost of an admission, and returns whether it was known.
    pub(super) fn settle(&mut self, settlement: &Settlement, cost: u64) -> bool {
        let id = settlement.id;
        let at = micros(settlement.at);
        let latest = self.charged_at(at);
        let kind = if self.reserves() {
            Kind::Reserved(id)
        } else {
            Kind::Named(id)
        };
        // After the clock has stepped back it may have an earlier time. A later one is another
        // admission of this id.
        let is_it = |entry: &Entry| {
            entry.kind == kind && entry.units == self.charge.cost() && entry.at <= latest
        };
        let Some(place) = self.entries.iter().position(is_it) else {
            return self.settle_late(id, at, cost);
        };
        let entry = self.entries.remove(place);
        // Units with a lease count from their admission on.
        let at = if self.charge.lease().is_some() {
            at.min(self.now)
        } else {
            entry.at
        };
        match self.counts {
            _ if cost == 0 => {}
            Counts::Log => self.write(at, cost, Kind::Settled(id), entry.admitted),
            _ => self.write(self.recorded(at), cost, Kind::Sum, entry.admitted),
        }
        true
    }

    /// After the lease, the cost counts as if settled at the admission: once, and as long as it
    /// would still count.
    fn settle_late(&mut self, id: AdmissionId, at: u64, cost: u64) -> bool {
        let time = self.recorded(at);
        let is_settled = self
            .entries
            .iter()
            .any(|entry| entry.kind == Kind::Settled(id) && entry.at == time);
        let is_late = self.lease().is_some_and(|lease| at + lease <= self.now);
        let counts = cost > 0 && is_late && !is_settled && self.now < at.min(time) + self.window;
        if counts {
            self.entries.push(Entry {
                at: time,
                units: cost,
                kind: Kind::Settled(id),
                admitted: at,
            });
        }
        counts
    }
}

fn is_reserved(kind: Kind) -> bool {
    matches!(kind, Kind::Reserved(_))
}
