//! The refusals that a deny cache may repeat, and whether it repeats them correctly.

use std::collections::HashMap;

use crate::support::model::{ModelCharge, RETRY_RESERVED_AFTER, Standing, Takes};

/// The status of each limit and key at the refusals of the last second: all that a deny cache may know.
#[derive(Default)]
pub(super) struct Refusals(HashMap<(usize, usize), Vec<Refused>>);

struct Refused {
    at: u64,
    cost: u64,
    standing: Standing,
}

impl Refusals {
    pub(super) fn note(&mut self, now: u64, charges: &[ModelCharge], id: Option<u64>, told: &[Standing]) {
        if id.is_some() || !is_refused(charges, told) {
            return;
        }
        for (charge, standing) in charges.iter().zip(told) {
            let refused = self.0.entry(charge.bucket).or_default();
            refused.retain(|refused| now.wrapping_sub(refused.at) < 1_000_000);
            refused.push(Refused { at: now, cost: charge.cost, standing: standing.clone() });
        }
    }

    /// Whether the check was refused by cached statuses, and correctly: the model also refuses it, for at least as
    /// long.
    pub(super) fn has_refused(
        &self,
        now: u64,
        (charges, id): (&[ModelCharge], Option<u64>),
        told: &[Standing],
        expected: &[Standing],
    ) -> bool {
        let retry = |standings: &[Standing]| {
            charges.iter().zip(standings).filter(|(charge, _)| !charge.is_shadow).filter_map(|(_, s)| s.retry).max()
        };
        let is_known = charges.iter().zip(told).zip(expected).all(|((charge, told), expected)| {
            let refused = self.0.get(&charge.bucket).into_iter().flatten();
            refused.into_iter().any(|refused| refused.is_told(now, charge, told, expected))
        });
        id.is_none() && is_known && is_refused(charges, told) && retry(told) <= retry(expected)
    }
}

impl Refused {
    /// Whether the status of a charge follows from this refusal and is correct.
    fn is_told(&self, now: u64, charge: &ModelCharge, told: &Standing, expected: &Standing) -> bool {
        let (elapsed, left) = (now.wrapping_sub(self.at), charge.limit.units().saturating_sub(self.standing.used));
        let refused = self.standing.retry.filter(|_| self.cost <= charge.cost);
        let reset = self.standing.reset.saturating_sub(elapsed);
        let settled = self.standing.used - self.standing.reserved;
        // Until a unit leaves. If returned reservations would be enough, at most `RETRY_RESERVED_AFTER`.
        let least = if settled + charge.cost > charge.limit.units() { reset } else { reset.min(RETRY_RESERVED_AFTER) };
        let not_before = match refused {
            Some(refused) if self.standing.reserved == 0 => refused.saturating_sub(elapsed),
            // Part of the retry time is exact, and part waits for reservations.
            Some(_) => told.retry.unwrap_or(0).max(least),
            None => least,
        };
        let refuses = charge.takes != Takes::WhatWasSpent && charge.cost > left;
        let follows = Standing {
            used: self.standing.used,
            reserved: self.standing.reserved,
            reset,
            retry: refuses.then_some(not_before),
            by_reservations: refuses && told.by_reservations && settled + charge.cost <= charge.limit.units(),
        };
        // With no units left nothing can be admitted, but spent units still count.
        let is_exact =
            left == 0 && refused.is_some() && self.cost == charge.cost && self.standing.used == expected.used;
        elapsed < 1_000_000
            && *told == follows
            && told.used <= expected.used
            && (told.retry.is_none() || expected.retry >= told.retry)
            && (!is_exact || told == expected)
    }
}

fn is_refused(charges: &[ModelCharge], standings: &[Standing]) -> bool {
    charges.iter().zip(standings).any(|(charge, standing)| !charge.is_shadow && standing.retry.is_some())
}
