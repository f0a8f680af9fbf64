//! Crowded checks: more equal ones wait than their limits can admit.

#[cfg(feature = "redis")]
use std::time::Duration;
use std::{hash::BuildHasherDefault, time::Instant};

#[cfg(feature = "redis")]
use quick_cache::sync::{EntryAction, EntryResult};
use quick_cache::{UnitWeighter, sync::Cache};

use crate::{
    check::Check,
    key::{Digester, Prehashed},
};

/// The most checks that are remembered.
const CAPACITY: usize = 1_000;

/// The digests of crowded checks, and until when they are crowded. A client that asks for far more
/// than its limit may cause its checks' failures itself. If they opened the breaker, it would pass
/// by fail-open. Other clients' checks are not equal, so their failures count.
pub(crate) struct Crowded {
    digester: Digester,
    until: Cache<u64, Instant, UnitWeighter, BuildHasherDefault<Prehashed>>,
}

impl Crowded {
    /// Remembers a check for as long as equal checks with this `deadline` may wait.
    #[cfg(feature = "redis")]
    pub(crate) fn note(&self, check: &Check, deadline: Duration) {
        let digest = check.digest(&self.digester);
        let Some(until) = Instant::now().checked_add(deadline.saturating_mul(2)) else {
            return;
        };
        let entry = self.until.entry(&digest, None, |_, known| {
            // Equal checks may have a longer deadline.
            *known = until.max(*known);
            EntryAction::Retain(())
        });
        if let EntryResult::Vacant(vacant) = entry {
            // Fails only if the entry was removed meanwhile, which nobody does.
            let _ = vacant.insert(until);
        }
    }

    /// True if equal checks are crowded.
    pub(crate) fn has(&self, check: &Check) -> bool {
        let until = self.until.get(&check.digest(&self.digester));
        until.is_some_and(|until| Instant::now() <= until)
    }
}

impl Default for Crowded {
    fn default() -> Self {
        let hasher = BuildHasherDefault::default();
        let until = Cache::with(0, CAPACITY as u64, UnitWeighter, hasher, Default::default());
        Self {
            digester: Digester::default(),
            until,
        }
    }
}
