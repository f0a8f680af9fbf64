//! For how long a connection that many share has said nothing.

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

/// What was asked since the last answer.
#[derive(Debug)]
pub(super) struct Silence {
    unanswered: AtomicU32,
    /// When the first of these was asked.
    since: Mutex<Instant>,
}

impl Silence {
    pub(super) fn new() -> Self {
        Self { unanswered: AtomicU32::new(0), since: Mutex::new(Instant::now()) }
    }

    /// To be told before the wait: a caller whose deadline passes drops its future in the middle of it.
    pub(super) fn asks(&self) {
        if self.unanswered.fetch_add(1, Ordering::Relaxed) == 0 {
            *self.since.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        }
    }

    pub(super) fn hears(&self) {
        self.unanswered.store(0, Ordering::Relaxed);
    }

    /// Whether so many were asked, the first of them so long ago, and none was answered.
    pub(super) fn has_lasted(&self, requests: u32, time: Duration) -> bool {
        self.unanswered.load(Ordering::Relaxed) >= requests
            && self.since.lock().unwrap_or_else(PoisonError::into_inner).elapsed() >= time
    }
}
