//! When the shards are swept.

use std::{
    array,
    sync::atomic::{AtomicU64, AtomicUsize, Ordering},
};

/// Many locks, so that threads seldom wait for each other.
pub(super) const SHARDS: usize = 64;

/// All shards are swept within this time, in microseconds, as long as checks arrive.
const CYCLE: u64 = 1_000_000;

#[derive(Debug)]
pub(super) struct Sweeps {
    due: AtomicU64,
    next_shard: AtomicUsize,
    /// When each shard was last swept.
    swept: [AtomicU64; SHARDS],
}

impl Sweeps {
    pub(super) fn new() -> Self {
        let never = || AtomicU64::new(0);
        Self { due: never(), next_shard: AtomicUsize::new(0), swept: array::from_fn(|_| never()) }
    }

    /// The next shard, if it is due.
    #[inline]
    pub(super) fn next_due(&self, now: u64) -> Option<usize> {
        let due = self.due.load(Ordering::Relaxed);
        let next = now.saturating_add(CYCLE / SHARDS as u64);
        // A time far ahead is left over from before the clock stepped back.
        let is_due = due <= now || due > next;
        if !is_due || self.due.compare_exchange(due, next, Ordering::Relaxed, Ordering::Relaxed).is_err() {
            return None;
        }
        Some(self.next_shard.fetch_add(1, Ordering::Relaxed) % SHARDS)
    }

    pub(super) fn has_swept(&self, shard: usize, now: u64) {
        self.swept[shard].store(now, Ordering::Relaxed);
    }

    /// Whether a shard has not been swept for a whole cycle. The first caller to ask gets `true`, and has to sweep it.
    pub(super) fn is_overdue(&self, shard: usize, now: u64) -> bool {
        let swept = self.swept[shard].load(Ordering::Relaxed);
        let is_overdue = swept > now || now - swept >= CYCLE;
        is_overdue && self.swept[shard].compare_exchange(swept, now, Ordering::Relaxed, Ordering::Relaxed).is_ok()
    }
}
