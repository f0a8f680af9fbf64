//! The refusals that a refusal cache may repeat, and whether it repeats them correctly.

use std::collections::HashMap;

use crate::support::model::{ModelCharge, ModelStatus, RETRY_RESERVED_AFTER, Takes};

/// A refusal is not asked about before this age.
const MAX_AGE: u64 = 1_000_000;

/// The status of each limit and key at the refusals until their own time is over: all that a
/// refusal cache may know.
#[derive(Default)]
pub(super) struct Refusals(HashMap<(usize, usize), Vec<Refused>>);

struct Refused {
    at: u64,
    cost: u64,
    status: ModelStatus,
}

impl Refusals {
    pub(super) fn note(&mut self, now: u64, charges: &[ModelCharge], id: Option<u64>, reported: &[ModelStatus]) {
        if id.is_some() || !is_refused(charges, reported) {
            return;
        }
        for (charge, status) in charges.iter().zip(reported) {
            let refused = self.0.entry(charge.bucket).or_default();
            refused.retain(|refused| now.wrapping_sub(refused.at) < refused.own_time().max(MAX_AGE));
            refused.push(Refused { at: now, cost: charge.cost, status: status.clone() });
        }
    }

    /// Whether the check was refused by cached statuses, and correctly: the model also refuses it,
    /// for at least as long. While others are asked about (`is_alone` is false), also by a refusal
    /// that is older than the greatest age.
    pub(super) fn has_refused(
        &self,
        (now, is_alone): (u64, bool),
        (charges, id): (&[ModelCharge], Option<u64>),
        reported: &[ModelStatus],
        expected: &[ModelStatus],
    ) -> bool {
        let retry = |statuses: &[ModelStatus]| {
            charges.iter().zip(statuses).filter(|(charge, _)| !charge.is_shadow).filter_map(|(_, s)| s.retry).max()
        };
        let is_reported = |charge: &ModelCharge, reported: &ModelStatus, expected: &ModelStatus, max_age: u64| {
            let mut refused = self.0.get(&charge.bucket).into_iter().flatten();
            refused.any(|refused| {
                now.wrapping_sub(refused.at) < max_age && refused.is_reported(now, charge, reported, expected)
            })
        };
        let all = charges.iter().zip(reported).zip(expected).map(|((charge, reported), expected)| {
            let is_known = is_unknown(reported) || is_reported(charge, reported, expected, u64::MAX);
            (is_known, reported.retry.is_some() && is_reported(charge, reported, expected, MAX_AGE))
        });
        // One limit that is known to refuse is enough.
        let (is_known, is_young) = all.fold((true, !is_alone), |all, one| (all.0 && one.0, all.1 || one.1));
        id.is_none() && is_known && is_young && is_refused(charges, reported) && retry(reported) <= retry(expected)
    }
}

impl Refused {
    /// The time in which it cannot have become less.
    fn own_time(&self) -> u64 {
        self.status.retry.map_or(self.status.reset, |retry| retry.min(self.status.reset))
    }

    /// Whether the status of a charge follows from this refusal and is correct.
    fn is_reported(&self, now: u64, charge: &ModelCharge, reported: &ModelStatus, expected: &ModelStatus) -> bool {
        let (elapsed, left) = (now.wrapping_sub(self.at), charge.limit.units().saturating_sub(self.status.used));
        let refused = self.status.retry.filter(|_| self.cost <= charge.cost);
        let reset = self.status.reset.saturating_sub(elapsed);
        let settled = self.status.used - self.status.reserved;
        // Until a unit leaves. If returned reservations would be enough, at most
        // `RETRY_RESERVED_AFTER`.
        let least = if settled + charge.cost > charge.limit.units() { reset } else { reset.min(RETRY_RESERVED_AFTER) };
        let not_before = match refused {
            Some(refused) if self.status.reserved == 0 => refused.saturating_sub(elapsed),
            // Part of the retry time is exact, and part waits for reservations.
            Some(_) => reported.retry.unwrap_or(0).max(least),
            None => least,
        };
        let refuses = charge.takes != Takes::WhatWasSpent && charge.cost > left;
        let follows = ModelStatus {
            used: self.status.used,
            reserved: self.status.reserved,
            reset,
            retry: refuses.then_some(not_before),
            by_reservations: refuses && reported.by_reservations && settled + charge.cost <= charge.limit.units(),
        };
        // With no units left nothing can be admitted, but spent units still count.
        let is_exact = left == 0 && refused.is_some() && self.cost == charge.cost && self.status.used == expected.used;
        elapsed < if refuses { self.status.reset } else { MAX_AGE }
            && *reported == follows
            && reported.used <= expected.used
            && (reported.retry.is_none() || expected.retry >= reported.retry)
            && (!is_exact || reported == expected)
    }
}

/// Whether it is that of a limit of which the cache knows nothing.
fn is_unknown(status: &ModelStatus) -> bool {
    (status.used, status.reserved, status.reset, status.retry) == (0, 0, 0, None)
}

fn is_refused(charges: &[ModelCharge], statuses: &[ModelStatus]) -> bool {
    charges.iter().zip(statuses).any(|(charge, status)| !charge.is_shadow && status.retry.is_some())
}
