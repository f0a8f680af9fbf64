//! How long a caller is ready to wait.

use std::time::Duration;

use tokio::time::Instant;

use crate::decision::Decision;

/// Between two questions for the same room, however short the wait is that a store asks for.
pub(super) const LEAST_PAUSE: Duration = Duration::from_millis(1);

/// A patience that has begun.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    end: Option<Instant>,
}

impl Patience {
    /// Begins now. A patience beyond what a clock can show never ends.
    pub(super) fn new(patience: Duration) -> Self {
        Self { end: Instant::now().checked_add(patience) }
    }

    pub(super) fn end(self) -> Option<Instant> {
        self.end
    }

    pub(super) fn is_over(self) -> bool {
        self.end.is_some_and(|end| end <= Instant::now())
    }

    /// Whether such a wait, from now on, ends before the patience.
    pub(super) fn allows(self, wait: Duration) -> bool {
        is_within(self.left(Instant::now()), wait)
    }

    /// When to ask again after a decision; `None` if it is an admission, or one to wait for longer than this. Reserved units
    /// may be given back at any time: those are waited for as long as there is patience.
    pub(super) fn ask_again_at(self, decision: &Decision) -> Option<Instant> {
        let now = Instant::now();
        let (left, mut wait) = (self.left(now), decision.retry_after()?);
        if decision.is_refused_by_reservations() {
            wait = left.map_or(wait, |left| wait.min(left));
        }
        now.checked_add(wait.max(LEAST_PAUSE)).filter(|_| is_within(left, wait))
    }

    fn left(self, now: Instant) -> Option<Duration> {
        self.end.map(|end| end.saturating_duration_since(now))
    }
}

fn is_within(left: Option<Duration>, wait: Duration) -> bool {
    // A store that always says to come back at once would otherwise be asked for ever.
    left.is_none_or(|left| !left.is_zero() && wait <= left)
}
