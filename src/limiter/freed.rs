//! The callers that wait for units of a limit and key, and which of them ask when some are freed.
//!
//! 1. The first in a line waits in the list of one limit and key: of those that refuse it, the one that does so for longest. Until units
//!    of that one are freed, no others help it. Then it asks, or goes over to the list of the next that still refuses it.
//! 2. The callers that freed units may admit ask in the order of their arrival, and no more callers than there are units. A caller that
//!    does not use the units passes them on.
//! 3. Units that nobody in the list asks for are for callers whose checks are on their way: these may have been refused before.

use std::{collections::BTreeMap, iter};

use tokio::time::Instant;

use crate::decision::LimitStatus;

/// Freed units choose by arrival among the callers of so many different costs, the lowest.
const COMPARED_COSTS: usize = 16;

/// A limit and key of a caller.
#[derive(Clone, Copy)]
pub(super) struct Wanted {
    pub(super) digest: u64,
    /// The units that have to be left.
    pub(super) cost: u64,
    /// The units that an admission takes.
    pub(super) takes: u64,
    /// [`Pair::freed`] when the caller asked.
    pub(super) freed_before: u128,
    /// How long it refuses the caller, as far as is known.
    pub(super) until: Instant,
}

/// Units of a limit and key that were freed, and all that were left then.
#[derive(Clone, Copy)]
pub(super) struct Freed {
    pub(super) digest: u64,
    pub(super) units: u64,
    pub(super) left: u64,
}

/// A limit and key that callers want.
#[derive(Default)]
pub(super) struct Pair {
    pub(super) callers: usize,
    /// All units that were freed, and that nobody in the list has asked for.
    pub(super) freed: u128,
    /// The last of them that another caller has asked for.
    claimed: u128,
    /// How many were left when the last of them were freed.
    left: u64,
    /// The list: the line of each caller, by its cost and number.
    pub(super) refused: BTreeMap<(u64, u64), u64>,
}

impl Freed {
    /// The units that are left of those with which a caller has asked, as the reply shows.
    pub(super) fn after(self, wanted: &Wanted, status: &LimitStatus, is_allowed: bool) -> Self {
        let used = if is_allowed { wanted.takes } else { 0 };
        // For those that need less, even if the figures of a store contradict its refusal.
        let most = status.refuses().map_or(u64::MAX, |_| wanted.cost.saturating_sub(1));
        Self { units: self.units.saturating_sub(used), left: status.remaining().min(most), ..self }
    }
}

impl Pair {
    /// Takes the first caller that these units may admit out of the list: its cost and line. `None` if there is none.
    pub(super) fn take(&mut self, freed: &Freed) -> Option<(u64, u64)> {
        let next = |least: u64| {
            let is_enough = freed.units > 0 && least <= freed.left;
            let mut fitting = is_enough.then(|| self.refused.range((least, 0)..=(freed.left, u64::MAX)))?;
            fitting.next().map(|(caller, _)| *caller)
        };
        let costs = iter::successors(next(0), |(cost, _)| next(cost.checked_add(1)?));
        match costs.take(COMPARED_COSTS).min_by_key(|(_, number)| *number) {
            Some(first) => self.refused.remove(&first).map(|line| (first.0, line)),
            None if freed.units > 0 => {
                (self.freed, self.left) = (self.freed + u128::from(freed.units), freed.left);
                None
            }
            None => None,
        }
    }

    /// The units that were freed after the caller has asked, and that no other has asked for. None if fewer are left than it needs: two
    /// callers that are refused would pass them to each other for ever.
    pub(super) fn unclaimed(&self, wanted: &Wanted) -> u128 {
        let unclaimed = self.freed.saturating_sub(wanted.freed_before.max(self.claimed));
        if wanted.cost <= self.left { unclaimed } else { 0 }
    }

    /// The caller asks with as many of these units as it needs.
    pub(super) fn claim(&mut self, wanted: &Wanted) -> Option<Freed> {
        let units = u64::try_from(self.unclaimed(wanted)).unwrap_or(u64::MAX).min(wanted.cost);
        self.claimed = self.claimed.max(wanted.freed_before) + u128::from(units);
        (units > 0).then_some(Freed { digest: wanted.digest, units, left: u64::MAX })
    }
}
