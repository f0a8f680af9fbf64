//! The places of concurrent limits that programs hold.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use tower_sliding_window::Decision;

/// An admission is some hundred bytes.
pub(crate) const MOST_HELD: usize = 100_000;

#[derive(Default)]
pub(crate) struct HeldPlaces(Mutex<HashMap<u64, Held>>);

struct Held {
    /// Holds the places until it is dropped.
    _decision: Decision,
    until: Instant,
    /// The charges as text, which a settlement has to repeat.
    charges: String,
}

impl HeldPlaces {
    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Held>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether there is room for it.
    pub(crate) fn hold(&self, id: u64, decision: Decision, until: Instant, charges: String) -> bool {
        let mut held = self.lock();
        let has_room = held.len() < MOST_HELD;
        if has_room {
            held.insert(id, Held { _decision: decision, until, charges });
        }
        has_room
    }

    /// Frees the places of an admission, if it was of these charges.
    pub(crate) fn free(&self, id: u64, charges: &str) -> bool {
        let mut held = self.lock();
        held.get(&id).is_some_and(|held| held.charges == charges) && held.remove(&id).is_some()
    }

    pub(crate) fn free_overdue(&self) {
        let now = Instant::now();
        let overdue: Vec<_> = self.lock().extract_if(|_, held| held.until <= now).collect();
        // Not under the lock.
        drop(overdue);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tower_sliding_window::{Key, Limit, Limiter, MemoryStore};

    use super::*;

    #[tokio::test]
    async fn a_full_process_holds_no_more_until_one_is_freed() {
        let limiter = Limiter::new(MemoryStore::new());
        let decision = limiter.check(&Limit::concurrent("jobs", 1), &Key::from("ada"), 1).await.unwrap();
        let held = HeldPlaces::default();
        let hold = |id, lease| held.hold(id, decision.clone(), Instant::now() + lease, "jobs".to_owned());
        for id in 0..MOST_HELD as u64 {
            assert!(hold(id, if id < 3 { Duration::ZERO } else { Duration::from_secs(60) }));
        }
        assert!(!hold(1 << 40, Duration::ZERO));
        assert!(!held.free(7, "other") && held.free(7, "jobs") && !held.free(7, "jobs"));
        assert!(hold(1 << 40, Duration::ZERO) && !hold(1 << 41, Duration::ZERO));
        held.free_overdue();
        assert_eq!(held.lock().len(), MOST_HELD - 4);
    }
}
