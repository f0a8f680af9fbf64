//! The refusals that a refusal cache may repeat, and whether it repeats them correctly.

use std::{
    collections::HashMap,
    iter,
    time::{Duration, SystemTime},
};

use tower_sliding_window::{
    Charge, Check, Decision, Key, Limit, check::Takes, decision::LimitStatus,
};

use crate::support::Figures;

/// A refusal is not asked about before this age.
const MAX_AGE: Duration = Duration::from_secs(1);

/// How long a check that only reservations refuse is refused at least, unless they leave before.
const RETRY_RESERVED_AFTER: Duration = Duration::from_secs(1);

/// The status of each limit and key at the refusals until their own time is over: all that a
/// refusal cache may know.
#[derive(Default)]
pub(super) struct Refusals(HashMap<(Limit, Key), Vec<Refused>>);

struct Refused {
    at: SystemTime,
    cost: u64,
    figures: Figures,
}

/// A check that a limiter has decided.
#[derive(Clone, Copy)]
pub(super) struct Decided<'a> {
    pub(super) now: SystemTime,
    pub(super) check: &'a Check,
    pub(super) decision: &'a Decision,
    /// True if it was alone in its batch.
    pub(super) is_alone: bool,
}

impl Refusals {
    pub(super) fn note(
        &mut self,
        Decided {
            now,
            check,
            decision,
            ..
        }: Decided<'_>,
    ) {
        if decision.is_allowed() {
            return;
        }
        for (charge, status) in iter::zip(check.charges(), decision.statuses()) {
            let refused = self.0.entry(place(charge)).or_default();
            refused.retain(|refused| refused.age(now) < refused.own_time().max(MAX_AGE));
            refused.push(Refused {
                at: now,
                cost: charge.cost(),
                figures: Figures::of(status),
            });
        }
    }

    /// True if the check was refused by cached statuses, and correctly: the oracle also refuses it,
    /// for at least as long. While others are asked about, also by a refusal that is older than the
    /// greatest age.
    pub(super) fn have_refused(&self, decided: Decided<'_>, expected: &Decision) -> bool {
        let Decided {
            now,
            check,
            decision,
            is_alone,
        } = decided;
        let is_reported =
            |charge: &Charge, reported: &LimitStatus, expected: &LimitStatus, max_age: Duration| {
                let mut refused = self.0.get(&place(charge)).into_iter().flatten();
                refused.any(|refused| {
                    refused.age(now) < max_age
                        && refused.is_reported(now, charge, reported, expected)
                })
            };
        let mut is_known = true;
        // One limit that is known to refuse is enough.
        let mut is_young = !is_alone;
        for (charge, (reported, expected)) in iter::zip(
            check.charges(),
            iter::zip(decision.statuses(), expected.statuses()),
        ) {
            is_known &=
                is_unknown(reported) || is_reported(charge, reported, expected, Duration::MAX);
            is_young |= reported.retry_after().is_some()
                && is_reported(charge, reported, expected, MAX_AGE);
        }
        let is_no_longer = decision.retry_after() <= expected.retry_after();
        check.id().is_none() && is_known && is_young && !decision.is_allowed() && is_no_longer
    }
}

impl Refused {
    fn age(&self, now: SystemTime) -> Duration {
        now.duration_since(self.at).unwrap_or(Duration::MAX)
    }

    /// The time in which it cannot have become less.
    fn own_time(&self) -> Duration {
        self.figures
            .retry
            .map_or(self.figures.reset, |retry| retry.min(self.figures.reset))
    }

    /// True if the status of a charge follows from this refusal and is correct.
    fn is_reported(
        &self,
        now: SystemTime,
        charge: &Charge,
        reported: &LimitStatus,
        expected: &LimitStatus,
    ) -> bool {
        let known = &self.figures;
        let reported = Figures::of(reported);
        let expected = Figures::of(expected);
        let units = charge.limit().units();
        let age = self.age(now);
        let left = units.saturating_sub(known.used);
        let refused = known.retry.filter(|_| self.cost <= charge.cost());
        let reset = known.reset.saturating_sub(age);
        let fits_without_reserved = known.used - known.reserved + charge.cost() <= units;
        // Until a unit leaves. If returned reservations would be enough, at most
        // `RETRY_RESERVED_AFTER`.
        let least = if fits_without_reserved {
            reset.min(RETRY_RESERVED_AFTER)
        } else {
            reset
        };
        let not_before = match refused {
            Some(refused) if known.reserved == 0 => refused.saturating_sub(age),
            // Part of the retry time is exact, and part waits for reservations.
            Some(_) => reported.retry.unwrap_or_default().max(least),
            None => least,
        };
        let refuses = charge.takes() != Takes::Always && charge.cost() > left;
        let follows = Figures {
            used: known.used,
            reserved: known.reserved,
            reset,
            retry: refuses.then_some(not_before),
            is_by_reservations: refuses && reported.is_by_reservations && fits_without_reserved,
        };
        // With no units left nothing can be admitted, but spent units still count.
        let is_exact = left == 0
            && refused.is_some()
            && self.cost == charge.cost()
            && known.used == expected.used;
        age < if refuses { known.reset } else { MAX_AGE }
            && reported == follows
            && reported.used <= expected.used
            && (reported.retry.is_none() || expected.retry >= reported.retry)
            && (!is_exact || reported == expected)
    }
}

fn place(charge: &Charge) -> (Limit, Key) {
    (charge.limit().clone(), charge.key().clone())
}

/// True if it is that of a limit of which the cache knows nothing.
fn is_unknown(status: &LimitStatus) -> bool {
    Figures::of(status) == Figures::default()
}
