//! The places of concurrent limits that programs hold.

use std::{
    collections::HashMap,
    hash::{BuildHasher, RandomState},
    sync::{Mutex, MutexGuard, PoisonError},
    time::Instant,
};

use tower_sliding_window::Decision;

/// The most admissions, and the most bytes of their charges as text.
const MOST_HELD: usize = 20_000;
const MOST_BYTES: usize = 256 << 20;

#[derive(Default)]
pub(crate) struct HeldPlaces {
    held: Mutex<HeldAdmissions>,
    digester: RandomState,
}

#[derive(Default)]
struct HeldAdmissions {
    by_ticket: HashMap<u64, Held>,
    bytes: usize,
}

struct Held {
    /// Holds the places until it is dropped.
    _decision: Decision,
    until: Instant,
    bytes: usize,
}

impl HeldPlaces {
    fn lock(&self) -> MutexGuard<'_, HeldAdmissions> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A number that only the caller knows that was told it. Ids count up, so others know them.
    pub(crate) fn ticket(&self, id: u64, charges: &str) -> u64 {
        self.digester.hash_one((id, charges))
    }

    pub(crate) fn is_full(&self) -> bool {
        let held = self.lock();
        held.by_ticket.len() >= MOST_HELD || held.bytes >= MOST_BYTES
    }

    pub(crate) fn hold(&self, ticket: u64, decision: Decision, until: Instant, bytes: usize) {
        let mut held = self.lock();
        held.by_ticket.insert(
            ticket,
            Held {
                _decision: decision,
                until,
                bytes,
            },
        );
        held.bytes += bytes;
    }

    /// Frees the places of an admission.
    pub(crate) fn free(&self, ticket: u64) -> bool {
        let mut held = self.lock();
        let freed = held.by_ticket.remove(&ticket);
        held.bytes -= freed.as_ref().map_or(0, |freed| freed.bytes);
        drop(held);
        freed.is_some()
    }

    pub(crate) fn free_overdue(&self) {
        let now = Instant::now();
        let mut held = self.lock();
        let overdue: Vec<_> = held
            .by_ticket
            .extract_if(|_, held| held.until <= now)
            .collect();
        held.bytes -= overdue.iter().map(|(_, held)| held.bytes).sum::<usize>();
        // Their places are not freed under the lock.
        drop(held);
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
        let decision = limiter
            .check(&Limit::concurrent("jobs", 1), &Key::from("ada"), 1)
            .await
            .unwrap();
        let held = HeldPlaces::default();
        let hold = |ticket, lease, bytes| {
            held.hold(ticket, decision.clone(), Instant::now() + lease, bytes);
        };
        for ticket in 0..MOST_HELD as u64 {
            assert!(!held.is_full());
            hold(
                ticket,
                if ticket < 3 {
                    Duration::ZERO
                } else {
                    Duration::from_secs(60)
                },
                9,
            );
        }
        assert!(held.is_full());
        assert!(held.free(7) && !held.free(7));
        assert!(!held.is_full());
        held.free_overdue();
        let left = held.lock().by_ticket.len();
        assert_eq!(
            (left, held.lock().bytes),
            (MOST_HELD - 4, 9 * (MOST_HELD - 4))
        );
        hold(1, Duration::ZERO, MOST_BYTES);
        assert!(held.is_full());
        held.free_overdue();
        assert!(!held.is_full());
    }
}
