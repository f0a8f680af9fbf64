//! One lock's worth of logs.

use std::{
    borrow::Cow,
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use crate::{admission::AdmissionId, check::Charge, decision::LimitStatus, key::Key, limit::Limit, window::Log};

#[derive(Debug)]
pub(super) struct Shard {
    /// By the limit's name, then by the key: so a look-up needs neither an allocation nor a copy.
    limits: HashMap<Cow<'static, str>, HashMap<Key, Entry>>,
    /// The admissions of all shards together.
    admissions: Arc<AtomicUsize>,
}

#[derive(Debug, Default)]
struct Entry {
    log: Log,
    /// The window of the last admission, which is what a sweep goes by.
    window: u64,
}

impl Shard {
    pub(super) fn new(admissions: Arc<AtomicUsize>) -> Self {
        Self { limits: HashMap::new(), admissions }
    }

    /// Whether `charge` does not fit now.
    pub(super) fn refuses(&mut self, charge: &Charge, given: Option<AdmissionId>, now: u64) -> bool {
        self.excess(charge, given, now) > 0
    }

    /// How `charge` stands in a check that is refused, by it or by another charge.
    pub(super) fn refuse(&mut self, charge: &Charge, given: Option<AdmissionId>, now: u64) -> LimitStatus {
        let window = charge.limit().window_micros();
        let excess = self.excess(charge, given, now);
        let Some(log) = self.log(charge) else { return LimitStatus::new(charge, 0, Duration::ZERO, None) };
        let retry_after = (excess > 0).then(|| Duration::from_micros(log.wait_for(excess, now, window)));
        LimitStatus::new(charge, log.used(), Duration::from_micros(log.reset_after(now, window)), retry_after)
    }

    /// Counts `charge` under `id`, unless it was `given` that id and is in the log already, and says how it stands then.
    pub(super) fn admit(
        &mut self,
        charge: &Charge,
        given: Option<AdmissionId>,
        id: AdmissionId,
        now: u64,
    ) -> LimitStatus {
        let window = charge.limit().window_micros();
        let is_counted = given.is_some() && self.log(charge).is_some_and(|log| log.contains(id, charge.cost()));
        if charge.cost() > 0 && !is_counted {
            let logs = self.limits.entry(charge.limit().shared_name()).or_default();
            let entry = logs.entry(charge.key().clone()).or_default();
            entry.log.admit(now, charge.cost(), id);
            entry.window = window;
            self.admissions.fetch_add(1, Ordering::Relaxed);
        }
        let (used, reset_after) = self.log(charge).map_or((0, 0), |log| (log.used(), log.reset_after(now, window)));
        LimitStatus::new(charge, used, Duration::from_micros(reset_after), None)
    }

    /// Forgets a key under a limit.
    pub(super) fn remove(&mut self, limit: &Limit, key: &Key) {
        if let Some(entry) = self.limits.get_mut(limit.name()).and_then(|logs| logs.remove(key)) {
            self.admissions.fetch_sub(entry.log.len(), Ordering::Relaxed);
        }
    }

    /// Drops what has expired, under every limit and for every key.
    pub(super) fn sweep(&mut self, now: u64) {
        let mut gone = 0;
        for logs in self.limits.values_mut() {
            logs.retain(|_, entry| {
                gone += entry.log.trim(now, entry.window);
                entry.log.shrink();
                !entry.log.is_empty()
            });
        }
        self.limits.retain(|_, logs| !logs.is_empty());
        self.admissions.fetch_sub(gone, Ordering::Relaxed);
    }

    pub(super) fn keys(&self) -> usize {
        self.limits.values().map(HashMap::len).sum()
    }

    /// The units by which `charge` does not fit; 0 for a charge that is free, or in the log already.
    fn excess(&mut self, charge: &Charge, given: Option<AdmissionId>, now: u64) -> u64 {
        let cost = charge.cost();
        let Some(log) = self.trimmed(charge, now) else { return 0 };
        if cost == 0 || given.is_some_and(|id| log.contains(id, cost)) {
            return 0;
        }
        (log.used() + cost).saturating_sub(charge.limit().units())
    }

    fn trimmed(&mut self, charge: &Charge, now: u64) -> Option<&mut Log> {
        let log = &mut self.limits.get_mut(charge.limit().name())?.get_mut(charge.key())?.log;
        self.admissions.fetch_sub(log.trim(now, charge.limit().window_micros()), Ordering::Relaxed);
        Some(log)
    }

    fn log(&mut self, charge: &Charge) -> Option<&mut Log> {
        Some(&mut self.limits.get_mut(charge.limit().name())?.get_mut(charge.key())?.log)
    }
}
