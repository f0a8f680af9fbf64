//! The limits and keys of which more checks wait than can be admitted.

#[cfg(feature = "redis")]
use std::time::Duration;
use std::{hash::BuildHasherDefault, time::Instant};

use quick_cache::{UnitWeighter, sync::Cache};

use crate::{
    check::{Charge, Check},
    key::{Digester, Prehashed},
};

/// The most limits and keys that are remembered.
const CAPACITY: usize = 1_000;

/// The limits and keys that are crowded, and until when. A client that asks for far more than its
/// limit may cause the timeouts of its checks itself. If they opened the breaker, it would pass by
/// fail-open.
pub(crate) struct Crowded {
    digester: Digester,
    until: Cache<u64, Instant, UnitWeighter, BuildHasherDefault<Prehashed>>,
}

impl Crowded {
    /// Notes a charge for as long as equal checks may wait, whose deadline this is.
    #[cfg(feature = "redis")]
    pub(crate) fn note(&self, charge: &Charge, deadline: Duration) {
        let until = Instant::now().checked_add(deadline.saturating_mul(2));
        if let Some(until) = until {
            self.until.insert(charge.digest(&self.digester), until);
        }
    }

    /// True if any charge of a check is crowded.
    pub(crate) fn has(&self, check: &Check) -> bool {
        let is_crowded = |charge: &Charge| {
            let until = self.until.get(&charge.digest(&self.digester));
            until.is_some_and(|until| Instant::now() <= until)
        };
        check.charges().any(is_crowded)
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
