//! Crowded checks. A check is crowded if more equal checks are waiting than its limits can admit.

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
/// units than its limit has may itself cause its checks to fail. If these failures opened the
/// breaker, a fail-open route would let the client through. Other clients' checks are not equal, so
/// their failures count.
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
            // This fails only if the entry was removed meanwhile, and no code removes entries.
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
