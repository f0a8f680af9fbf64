//! What a row's options mean alone: the figures that the invariants compare with.

use super::{
    app::App,
    table::{PLACES, UNITS},
};

/// True if one of these holds of a row.
impl App {
    pub(super) fn is(&self, dimension: &str, names: &[&str]) -> bool {
        // Without a transport there is no layer.
        let has_layer = !self.is_alone()
            || !["ban", "mode", "time", "list", "response", "stack"].contains(&dimension);
        has_layer && self.row.is(dimension, names)
    }

    pub(super) fn is_concurrent(&self) -> bool {
        self.is("kind", &["concurrent"])
    }

    pub(super) fn is_shadow(&self) -> bool {
        self.is("show", &["in_shadow"])
    }

    pub(super) fn is_visible(&self) -> bool {
        self.is("show", &["visible"])
    }

    pub(super) fn has_place(&self) -> bool {
        self.is_concurrent() || self.is("beside", &["a place", "a place of another key"])
    }

    pub(super) fn has_ban(&self) -> bool {
        self.is("ban", &["ban"])
    }

    pub(super) fn is_exact(&self) -> bool {
        self.is("kind", &["log", "compact"])
    }

    pub(super) fn heeds(&self) -> bool {
        !self.is_alone() && !self.is_shadow() && self.is("charge", &["heed_upstream"])
    }

    pub(super) fn knows_costs_afterwards(&self) -> bool {
        !self.is_alone() && self.is("charge", &["settle", "count_afterwards"])
    }

    pub(super) fn counts_afterwards(&self) -> bool {
        !self.is_alone() && self.is("charge", &["count_afterwards"])
    }

    /// True if the limit under test refuses a client that goes on sending.
    pub(super) fn is_used_up(&self) -> bool {
        !self.is_concurrent() && !self.is_shadow() && !self.is("charge", &["a cost of 0"])
    }

    /// Requests that cost something and that one window admits, sent one after the other. `None` if
    /// it is no limit to them.
    pub(super) fn admitted(&self) -> Option<usize> {
        let cost = if self.is("charge", &["a cost of 2", "a layer's cost of 2"]) {
            2
        } else {
            1
        };
        self.is_used_up().then_some((UNITS / cost) as usize)
    }

    /// The most that any span of one window admits, with the documented error of the algorithm.
    pub(super) fn most_in_a_window(&self) -> Option<usize> {
        // A counter errs by at most one limit, and a boundary lies in each window of the clock.
        let error = if self.is("kind", &["counter", "fixed"]) {
            2
        } else {
            1
        };
        Some(self.admitted()? * error).filter(|_| !self.counts_afterwards())
    }

    /// The most that are inside at once.
    pub(super) fn most_inside(&self) -> Option<usize> {
        let main = (self.is_concurrent() && !self.is_shadow()).then_some(UNITS as usize);
        let place = self
            .is("beside", &["a place", "a place of another key"])
            .then_some(PLACES as usize);
        main.into_iter().chain(place).min()
    }

    pub(super) fn can_be_lost(&self) -> bool {
        !self.is("store", &["memory"])
    }

    /// True if a block ends no sooner, since no boundary of a window lies in between.
    pub(super) fn blocks_in_full(&self) -> bool {
        !self.is_shadow()
            && !self.is("charge", &["a cost of 0"])
            && !self.is("kind", &["counter", "fixed"])
    }

    /// Requests at once that no bound on what waits for one key refuses.
    pub(super) fn fitting(&self) -> usize {
        // All of them may come to one of the two parts.
        let parts = if self.is("kind", &["split"]) { 2 } else { 1 };
        let admitted = self.admitted().map(|admitted| admitted / parts);
        admitted
            .into_iter()
            .chain(self.most_inside())
            .min()
            .unwrap_or(UNITS as usize / parts)
    }

    /// True if a client that was refused just now is refused for longer than this process remembers
    /// it.
    pub(super) fn refuses_for_long(&self) -> bool {
        self.has_ban() || self.is("kind", &["log", "compact", "calendar"])
    }

    /// True if this process remembers the refusals of its store.
    pub(super) fn remembers(&self) -> bool {
        self.is("store", &["redis", "pool", "cluster"]) && !self.is("limiter", &["refusal_cache=0"])
    }

    /// What becomes of a client of whom nothing is known, while the store is lost.
    pub(super) fn when_lost(&self) -> Lost {
        if self.is_alone() {
            return if self.is("limiter", &["limiter's fail_local"]) {
                Lost::Local
            } else {
                Lost::Closed
            };
        }
        // A request that no limit can refuse is let through.
        let is_free =
            self.is("charge", &["a cost of 0"]) && !self.is_concurrent() && !self.has_ban();
        let can_be_refused =
            !self.is("beside", &["no other limit"]) || !self.is_shadow() && !is_free;
        match self.row.of("mode") {
            "fail_closed" if can_be_refused => Lost::Closed,
            "fail_local" => Lost::Local,
            "default mode" if self.is("limiter", &["limiter's fail_local"]) => Lost::Local,
            _ => Lost::Open,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lost {
    Open,
    Closed,
    Local,
}
