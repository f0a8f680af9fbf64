//! The rules of a decision, written as plainly as possible: all admissions in one list, with the
//! time passed in. Every store decides the same.

mod tally;

use std::{
    collections::HashMap,
    iter,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use tower_sliding_window::{
    Algorithm, Charge, Check, Decision, Key, Limit,
    check::Takes,
    decision::LimitStatus,
    settlement::{Settled, Settlement},
};

use self::tally::{Admitted, Counted, Refusal, Tally};

/// Says in words how a store's replies differ from the rules.
///
/// It gets each reply in the order in which the store has decided, with the time at which it has,
/// and finds by itself what the reply has to be. Histories of your own can be compared with it,
/// such as those of a store behind a limiter:
///
/// ```
/// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use tower_sliding_window::{Charge, Check, Limit, Limiter, MemoryStore, store::ManualClock};
/// use tower_sliding_window_conformance::Oracle;
///
/// let clock = ManualClock::new();
/// let limiter = Limiter::new(MemoryStore::new().clock(&clock));
/// let mut oracle = Oracle::new();
/// for cost in [2, 3, 1] {
///     let check = Check::new(Charge::new(Limit::per_minute("calls", 5), "ada", cost)?);
///     let decision = limiter.check_all(check.clone()).await?;
///     oracle.decide(clock.now(), &check, &decision)?;
/// }
/// # Ok(()) }
/// ```
///
/// It knows the four [algorithms](Algorithm) of windows, neither places of
/// [concurrent](Limit::concurrent) limits nor periods of the calendar.
#[derive(Clone, Debug)]
pub struct Oracle {
    counted: HashMap<Identity, Counted>,
    entries_read: usize,
    reset_late_by: Duration,
    expected: Option<Decision>,
}

/// Limits of one identity share their units for a key.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Identity {
    name: String,
    window: Duration,
    algorithm: Algorithm,
    key: Key,
}

impl Identity {
    fn of(limit: &Limit, key: &Key) -> Self {
        let name = limit.name().to_owned();
        Self {
            name,
            window: limit.window(),
            algorithm: limit.algorithm(),
            key: key.clone(),
        }
    }
}

impl Oracle {
    /// An oracle to which nothing was admitted yet. All figures have to be exact.
    #[must_use]
    pub fn new() -> Self {
        Self {
            counted: HashMap::new(),
            entries_read: usize::MAX,
            reset_late_by: Duration::ZERO,
            expected: None,
        }
    }

    /// For a store that reads so many entries of a key at most, such as the 100 of `RedisStore`: if
    /// more have to leave, a retry time may be earlier, but not before these have left. Default:
    /// every retry time is exact.
    #[must_use]
    pub fn reading_entries(self, most: usize) -> Self {
        Self {
            entries_read: most,
            ..self
        }
    }

    /// For a store whose reset times may be late by less than this, such as the millisecond of
    /// `RedisStore` by the server's clock. Default: every reset time is exact.
    #[must_use]
    pub fn reset_late_by(self, less_than: Duration) -> Self {
        Self {
            reset_late_by: less_than,
            ..self
        }
    }

    /// Decides a check as the rules say, `now` by the store's clock.
    ///
    /// # Errors
    ///
    /// How the store's decision differs.
    ///
    /// # Panics
    ///
    /// If a limit is concurrent, or by the calendar.
    pub fn decide(&mut self, now: SystemTime, check: &Check, got: &Decision) -> Result<(), String> {
        every_charge_has_a_status(check, got)?;
        let id = check.id().unwrap_or_else(|| got.id());
        // A check that was admitted before is admitted again, and counts nothing.
        let takes_units = |charge: &Charge| charge.cost() > 0 && charge.takes() != Takes::Nothing;
        let is_own = |charge: &&Charge| check.id().is_some() && takes_units(charge);
        let admission = |charge| self.of(charge, now).admission(id);
        let admitted: Vec<Admitted> = check
            .charges()
            .filter(is_own)
            .filter_map(admission)
            .collect();
        let is_new = admitted.is_empty();
        let refusal = |charge| self.of(charge, now).refusal().filter(|_| is_new);
        let refusals: Vec<Option<Refusal>> = check.charges().map(refusal).collect();
        let charged = || iter::zip(check.charges(), &refusals);
        let is_admitted =
            charged().all(|(charge, refusal)| refusal.is_none() || charge.is_shadow());
        for (charge, refusal) in charged() {
            if refusal.is_some() {
                // A clock that has stepped back refuses for no longer than a window from the first
                // refusal on.
                self.of(charge, now).come_back();
            } else if is_admitted && is_new && takes_units(charge) {
                self.of(charge, now).admit(id, check.id().is_some());
            }
        }
        // Limits may know admissions of different times by the id of a check.
        let is_known = admitted.iter().any(|admitted| admitted.is_at(got.at()));
        let at = if is_known {
            got.at()
        } else {
            admitted.first().map_or(now, |admitted| admitted.at)
        };
        let mut given = iter::zip(refusals, got.statuses());
        let expected = Decision::new(check, at, id, |charge| {
            let (refusal, got) = given.next().unwrap();
            self.status(charge, now, refusal, got)
        });
        self.compare(expected, got)
    }

    /// Settles an admission as the rules say, each charge by itself.
    ///
    /// # Errors
    ///
    /// How the store's reply differs.
    ///
    /// # Panics
    ///
    /// As [`decide`](Self::decide).
    pub fn settle(
        &mut self,
        now: SystemTime,
        settlement: &Settlement,
        got: &Settled,
    ) -> Result<(), String> {
        every_charge_has_a_status(&settlement.check, &got.decision)?;
        let mut was_applied = false;
        for (charge, cost) in settlement.accounts() {
            was_applied |= cost.is_some_and(|cost| self.of(charge, now).settle(settlement, cost));
        }
        if got.was_applied != was_applied {
            let counted = |is_counted| if is_counted { "counted" } else { "not counted" };
            return Err(format!(
                "expected it to be {}, got {}",
                counted(was_applied),
                counted(got.was_applied)
            ));
        }
        let mut statuses = got.decision.statuses();
        let status = |charge: &Charge| self.status(charge, now, None, statuses.next().unwrap());
        let expected = Decision::new(&settlement.check, now, settlement.id, status);
        self.compare(expected, &got.decision)
    }

    /// Forgets the units that `limit` counts for `key`.
    pub fn reset(&mut self, limit: &Limit, key: &Key) {
        self.counted.remove(&Identity::of(limit, key));
    }

    /// The decision that was expected last. Of several that the settings allow, it is the one that
    /// the store has made, as far as it may.
    #[must_use]
    pub fn expected(&self) -> Option<&Decision> {
        self.expected.as_ref()
    }

    fn of<'a>(&'a mut self, charge: &'a Charge, now: SystemTime) -> Tally<'a> {
        let identity = Identity::of(charge.limit(), charge.key());
        let counted = self
            .counted
            .entry(identity)
            .or_insert_with(|| Counted::by(charge.limit().algorithm()));
        Tally::new(counted, charge, micros(now))
    }

    /// The status of a charge, with the times that the store has found where others may be right,
    /// too.
    fn status(
        &mut self,
        charge: &Charge,
        now: SystemTime,
        refusal: Option<Refusal>,
        got: &LimitStatus,
    ) -> LimitStatus {
        let entries_read = self.entries_read;
        let reset_late_by = self.reset_late_by;
        let tally = self.of(charge, now);
        let reset = tally.reset_after();
        let is_late = got
            .reset_after()
            .checked_sub(reset)
            .is_some_and(|late| late < reset_late_by);
        let retry = refusal.map(|refusal| {
            let exact = refusal.retry_after();
            let earliest = refusal.before(tally.leaving_of(entries_read)).retry_after();
            got.retry_after()
                .filter(|retry| (earliest..=exact).contains(retry))
                .unwrap_or(exact)
        });
        let is_by_reservations = refusal.is_some_and(Refusal::is_by_reservations);
        let least = if is_by_reservations {
            Duration::ZERO
        } else {
            Duration::MAX
        };
        let reset = if is_late { got.reset_after() } else { reset };
        LimitStatus::new(
            charge,
            tally.used(),
            tally.reserved(),
            reset,
            retry.map(|retry| (least, retry)),
        )
    }

    fn compare(&mut self, expected: Decision, got: &Decision) -> Result<(), String> {
        let expected = self.expected.insert(expected);
        if got.id() != expected.id() {
            return Err(format!("got the id {:?}", got.id()));
        }
        if got.is_allowed() != expected.is_allowed() {
            let verdict = |decision: &Decision| {
                if decision.is_allowed() {
                    "an admission"
                } else {
                    "a refusal"
                }
            };
            let used = got.binding().used;
            let limit = got.binding().limit.name();
            let expected = verdict(expected);
            let got = verdict(got);
            return Err(format!(
                "expected {expected}, got {got} with {used} used units of {limit:?}"
            ));
        }
        let at = |decision: &Decision| micros(decision.at());
        if at(got) != at(expected) {
            return Err(format!(
                "expected a decision of the time {}, got one of {}",
                at(expected),
                at(got)
            ));
        }
        iter::zip(expected.statuses(), got.statuses())
            .try_for_each(|(expected, got)| compare(expected, got))
    }
}

impl Default for Oracle {
    fn default() -> Self {
        Self::new()
    }
}

fn every_charge_has_a_status(check: &Check, got: &Decision) -> Result<(), String> {
    let charges = check.charges().count();
    let statuses = got.statuses().count();
    if charges == statuses {
        Ok(())
    } else {
        Err(format!("expected {charges} statuses, got {statuses}"))
    }
}

/// An error says which figure of a status differs.
fn compare(expected: &LimitStatus, got: &LimitStatus) -> Result<(), String> {
    let name = expected.limit.name();
    if got.limit.name() != name {
        return Err(format!(
            "expected the status of {name:?}, got that of {:?}",
            got.limit.name()
        ));
    }
    type Figure = fn(&LimitStatus) -> u64;
    let figures: [(&str, Figure); 6] = [
        ("used units", |status| status.used),
        ("reserved units", |status| status.reserved),
        ("retry times", |status| {
            status.retry_after().iter().count() as u64
        }),
        ("microseconds until the retry time", |status| {
            status.retry_after().map_or(0, micros_of)
        }),
        ("refusals by reserved units alone", |status| {
            status.is_refused_by_reservations().into()
        }),
        ("microseconds until the reset time", |status| {
            micros_of(status.reset_after())
        }),
    ];
    match figures
        .into_iter()
        .find(|(_, figure)| figure(expected) != figure(got))
    {
        Some((what, figure)) => Err(format!(
            "expected {} {what} of {name:?}, got {}",
            figure(expected),
            figure(got)
        )),
        None => Ok(()),
    }
}

/// Stores count in whole microseconds.
fn micros_of(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

fn micros(time: SystemTime) -> u64 {
    micros_of(time.duration_since(UNIX_EPOCH).unwrap_or_default())
}

fn time(micros: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_micros(micros)
}
