//! The rules of a decision, written as plainly as possible: all admissions in one list, with the
//! time passed in. The in-process store (`window/`) and the script on Redis decide the same.
//! [`Conformance`](super::Conformance) compares a store with this oracle.

use std::{collections::HashMap, iter};

use crate::{
    algorithm::Kind as Counts,
    check::{AdmissionId, Charge, Check},
    clock::{micros, micros_since_epoch},
    decision::{Decision, LimitStatus, Settled, Settlement},
    key::Key,
    limit::{Identity, Limit},
};

/// A store may look at so many entries for a retry time. If more have to leave, it may be earlier,
/// but not before these have left.
const LOOKED_AT: usize = 100;

/// Says in words what differs in a store's replies. It gets the time, and the id that the store has
/// given to the admission.
#[derive(Default)]
pub(super) struct Oracle {
    entries: HashMap<(Identity<'static>, Key), Vec<Entry>>,
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

impl Oracle {
    /// Decides a check. An error says what differs in the store's decision.
    pub(super) fn decide(&mut self, now: u64, check: &Check, got: &Decision) -> Result<(), String> {
        let id = check.id().unwrap_or_else(|| got.id());
        // A check that was admitted before is admitted again, and counts nothing.
        let is_own = |charge: &&Charge| check.id().is_some() && charge.units() > 0;
        let admitted_before = check.charges().filter(is_own).find_map(|charge| self.of(charge, now).admission(id));
        let is_new = admitted_before.is_none();
        let refusals: Vec<Option<(u64, u64)>> =
            check.charges().map(|charge| self.of(charge, now).refusal().filter(|_| is_new)).collect();
        let charged = || check.charges().zip(&refusals);
        let is_admitted = charged().all(|(charge, refusal)| refusal.is_none() || charge.is_shadow());
        for (charge, refusal) in charged() {
            let mut tally = self.of(charge, now);
            if refusal.is_some() {
                // A clock that has stepped back refuses for no longer than a window from the first
                // refusal on.
                tally.move_back(|_| true);
            } else if is_admitted && is_new && charge.units() > 0 {
                tally.admit(id, check.id().is_some());
            }
        }
        if got.id() != id {
            return Err(format!("got the id {:?}", got.id()));
        }
        if got.is_allowed() != is_admitted {
            let verdict = |is_admitted| if is_admitted { "an admission" } else { "a refusal" };
            let (used, limit, got) = (got.used(), got.binding().limit().name(), verdict(got.is_allowed()));
            return Err(format!("expected {}, got {got} with {used} used units of {limit:?}", verdict(is_admitted)));
        }
        self.compare(now, check, admitted_before.unwrap_or(Some(now)), refusals.into_iter(), got)
    }

    /// Settles an admission, each charge by itself. An error says what differs in the store's
    /// reply.
    pub(super) fn settle(&mut self, now: u64, settlement: &Settlement, got: &Settled) -> Result<(), String> {
        let mut was_applied = false;
        for (charge, cost) in settlement.accounts() {
            was_applied |= cost.is_some_and(|cost| self.of(charge, now).settle(settlement, cost));
        }
        if got.was_applied != was_applied {
            let [expected, got] = [was_applied, got.was_applied].map(|is| if is { "counted" } else { "not counted" });
            return Err(format!("expected it to be {expected}, got {got}"));
        }
        self.compare(now, settlement.check(), Some(now), iter::repeat(None), &got.decision)
    }

    /// An error says what differs in a decision. Its time is not known if it is that of a repeated
    /// check which has lost it.
    fn compare(
        &mut self,
        now: u64,
        check: &Check,
        at: Option<u64>,
        refusals: impl Iterator<Item = Option<(u64, u64)>>,
        got: &Decision,
    ) -> Result<(), String> {
        let got_at = micros_since_epoch(got.at());
        if let Some(at) = at.filter(|at| *at != got_at) {
            return Err(format!("expected a decision of the time {at}, got one of {got_at}"));
        }
        let mut statuses = iter::zip(check.charges().zip(refusals), got.statuses());
        statuses.try_for_each(|((charge, refusal), got)| self.of(charge, now).compare(refusal, got))
    }

    /// Forgets the units that `limit` counts for `key`.
    pub(super) fn reset(&mut self, limit: &Limit, key: &Key) {
        self.entries.remove(&(limit.own_identity(), key.clone()));
    }

    fn of<'a>(&'a mut self, charge: &'a Charge, now: u64) -> Tally<'a> {
        let entries = self.entries.entry((charge.limit().own_identity(), charge.key().clone())).or_default();
        let (limit, window) = (charge.limit(), charge.limit().window_micros());
        // The numbers of a counter stay until they are next written.
        let is_counter = limit.algorithm().kind() == Counts::Counter;
        entries.retain(|entry| is_counter && entry.kind == Kind::Sum || entry.at + window > now);
        Tally { entries, charge, now, window }
    }
}

/// The units that one limit counts for one key.
struct Tally<'a> {
    entries: &'a mut Vec<Entry>,
    charge: &'a Charge,
    now: u64,
    window: u64,
}

impl Tally<'_> {
    fn counts(&self) -> Counts {
        self.charge.limit().algorithm().kind()
    }

    /// Whether it is one of the two numbers of a counter.
    fn is_estimated(&self, kind: Kind) -> bool {
        self.counts() == Counts::Counter && kind == Kind::Sum
    }

    /// The time of an entry for an admission of `at`: the end of its sub-window, or the start of
    /// its fixed window.
    fn recorded(&self, at: u64) -> u64 {
        match self.counts() {
            Counts::Log | Counts::Counter | Counts::Concurrent => at,
            Counts::Compact { entries } => {
                let part = self.window.div_ceil(u64::from(entries) - 2);
                (at / part + 1) * part - 1
            }
            Counts::Fixed => at / self.window * self.window,
            #[cfg(feature = "calendar")]
            Counts::Calendar(calendar) => calendar.end_of(at) - self.window,
        }
    }

    /// The same for the charge. With a lease it is recorded a window before the lease ends, so that
    /// it leaves then.
    fn charged_at(&self, at: u64) -> u64 {
        let leased = self.charge.lease_micros().map_or(u64::MAX, |lease| (at + lease).saturating_sub(self.window));
        leased.min(self.recorded(at))
    }

    /// The units used at a time, if entries of times after `present` count as of then.
    fn used(&self, at: u64, present: u64, counts: impl Fn(Kind) -> bool) -> u64 {
        // No entry is later than this, unless the clock has stepped back.
        let (start, latest) = (at / self.window * self.window, self.recorded(present));
        let (mut used, mut current, mut previous) = (0, 0, 0);
        for entry in self.entries.iter().filter(|entry| counts(entry.kind)) {
            let time = entry.at.min(latest);
            match self.is_estimated(entry.kind) {
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
        let last = self.entries.iter().map(|entry| entry.at).max().unwrap_or_default();
        let (mut too_short, mut enough) = (0, 3 * self.window + last.saturating_sub(self.now));
        while enough - too_short > 1 {
            let middle = too_short.midpoint(enough);
            let is_enough = used_at(self.now + middle) <= most;
            *(if is_enough { &mut enough } else { &mut too_short }) = middle;
        }
        enough
    }

    /// How long the charge does not fit, if it does not now: if all reserved units are given back
    /// now, where 0 means that it fits then, and if nothing is given back before its lease ends.
    fn refusal(&self) -> Option<(u64, u64)> {
        let most = self.charge.limit().units().saturating_sub(self.charge.cost());
        if self.charge.cost() == 0 || self.charge.is_spent() || self.used(self.now, self.now, |_| true) <= most {
            return None;
        }
        let wait = |counts: fn(Kind) -> bool| self.until(most, |at| self.used(at, self.now, counts));
        Some((wait(|kind| !is_reserved(kind)), wait(|_| true)))
    }

    /// An error says which figure of a status differs.
    fn compare(&self, refusal: Option<(u64, u64)>, got: &LimitStatus) -> Result<(), String> {
        let name = self.charge.limit().name();
        if got.limit().name() != name {
            return Err(format!("expected the status of {name:?}, got that of {:?}", got.limit().name()));
        }
        let ((least, most), (got_least, got_most)) = (refusal.unwrap_or_default(), got.waits.unwrap_or_default());
        let (exactly, last) = (|figure| figure..=figure, self.last_looked_at());
        let used = |counts: fn(Kind) -> bool| exactly(self.used(self.now, self.now, counts));
        let figures = [
            ("used units", used(|_| true), got.used()),
            ("reserved units", used(is_reserved), got.reserved()),
            ("retry times", exactly(refusal.iter().count() as u64), got.waits.iter().count() as u64),
            ("microseconds until the retry time", most.min(last)..=most, micros(got_most)),
            ("microseconds until the retry time without reserved units", least.min(last)..=least, micros(got_least)),
            ("microseconds until the reset time", exactly(self.reset_after()), micros(got.reset_after())),
        ];
        match figures.into_iter().find(|(_, right, got)| !right.contains(got)) {
            Some((what, right, got)) => Err(format!("expected {} {what} of {name:?}, got {got}", right.end())),
            None => Ok(()),
        }
    }

    /// When the last of the entries leaves at which a store looks.
    fn last_looked_at(&self) -> u64 {
        let entries = self.entries.iter().filter(|entry| !self.is_estimated(entry.kind));
        let mut leaves: Vec<u64> = entries.map(|entry| entry.at + self.window - self.now).collect();
        leaves.sort_unstable();
        leaves.get(LOOKED_AT - 1).copied().unwrap_or(u64::MAX)
    }

    fn reset_after(&self) -> u64 {
        // Entries of later times stay there until a check is refused.
        match self.entries.iter().map(|entry| entry.at).min() {
            Some(oldest) if self.counts() != Counts::Counter => oldest + self.window - self.now,
            _ => {
                let used = self.used(self.now, self.now, |_| true);
                self.until(used.saturating_sub(1), |at| self.used(at, at, |_| true))
            }
        }
    }

    /// Counts the units of an admitted charge.
    fn admit(&mut self, id: AdmissionId, is_of_caller: bool) {
        let is_named = is_of_caller || self.charge.lease().is_some() || self.counts() == Counts::Log;
        let (at, kind) = match is_named {
            true if self.charge.is_reserved() => (self.charged_at(self.now), Kind::Reserved(id)),
            true => (self.charged_at(self.now), Kind::Named(id)),
            false => (self.recorded(self.now), Kind::Sum),
        };
        self.write(at, self.charge.cost(), kind, self.now);
    }

    fn write(&mut self, at: u64, units: u64, kind: Kind, admitted: u64) {
        if self.is_estimated(kind) {
            // The two numbers of a counter are brought up to the present.
            self.move_back(|kind| kind == Kind::Sum);
            let (window, this_window) = (self.window, self.now / self.window);
            self.entries.retain(|entry| entry.kind != Kind::Sum || entry.at / window + 1 >= this_window);
        }
        self.entries.push(Entry { at, units, kind, admitted });
    }

    /// Lets entries of later times count as of now.
    fn move_back(&mut self, which: fn(Kind) -> bool) {
        let latest = self.recorded(self.now);
        for entry in self.entries.iter_mut().filter(|entry| which(entry.kind)) {
            entry.at = entry.at.min(latest);
        }
    }

    /// The time of this very admission; of one that may have lost its exact time `Some(None)`.
    fn admission(&self, id: AdmissionId) -> Option<Option<u64>> {
        let is_it = |entry: &&Entry| {
            [Kind::Named(id), Kind::Reserved(id)].contains(&entry.kind) && entry.units == self.charge.cost()
        };
        let entry = self.entries.iter().find(is_it)?;
        let at = self.charge.lease_micros().map_or(entry.at, |lease| (entry.at + self.window).saturating_sub(lease));
        Some((at == entry.admitted && self.counts() == Counts::Log).then_some(at))
    }

    /// Sets the cost of an admission, and returns whether it was known.
    fn settle(&mut self, settlement: &Settlement, cost: u64) -> bool {
        let (id, at, latest) = (settlement.id(), settlement.at_micros(), self.charged_at(settlement.at_micros()));
        let kind = if self.charge.is_reserved() { Kind::Reserved(id) } else { Kind::Named(id) };
        // After the clock has stepped back it may have an earlier time. A later one is another
        // admission of this id.
        let is_it = |entry: &Entry| entry.kind == kind && entry.units == self.charge.cost() && entry.at <= latest;
        let Some(place) = self.entries.iter().position(is_it) else { return self.settle_late(id, at, cost) };
        let entry = self.entries.remove(place);
        // Units with a lease count from their admission on.
        let at = if self.charge.lease().is_some() { at.min(self.now) } else { entry.at };
        match self.counts() {
            _ if cost == 0 => {}
            Counts::Log => self.write(at, cost, Kind::Settled(id), entry.admitted),
            Counts::Counter => self.write(self.recorded(at.min(self.now)), cost, Kind::Sum, entry.admitted),
            _ => self.write(self.recorded(at), cost, Kind::Sum, entry.admitted),
        }
        if self.counts() == Counts::Counter && self.used(self.now, self.now, |_| true) == 0 {
            self.entries.clear();
        }
        true
    }

    /// After the lease, the cost counts as if settled at the admission: once, and as long as it
    /// would still count.
    fn settle_late(&mut self, id: AdmissionId, at: u64, cost: u64) -> bool {
        let time = self.recorded(at);
        let is_settled = self.entries.iter().any(|entry| entry.kind == Kind::Settled(id) && entry.at == time);
        let is_late = self.charge.lease_micros().is_some_and(|lease| at + lease <= self.now);
        let counts = cost > 0 && is_late && !is_settled && self.now < at.min(time) + self.window;
        if counts {
            self.entries.push(Entry { at: time, units: cost, kind: Kind::Settled(id), admitted: at });
        }
        counts
    }
}

fn is_reserved(kind: Kind) -> bool {
    matches!(kind, Kind::Reserved(_))
}
