//! What one limit counts for one key.

use std::time::Duration;

use super::room::{Full, Room};
use crate::{admission::AdmissionId, check::Charge, decision::LimitStatus, window::Log};

#[derive(Debug, Default)]
pub(super) struct Slot {
    log: Log,
    /// The window of the last admission, which is what a sweep goes by.
    window: u64,
}

/// When a check is decided, and under which identity.
#[derive(Clone, Copy, Debug)]
pub(super) struct Attempt {
    pub(super) now: u64,
    pub(super) id: AdmissionId,
    /// Whether the identity is the caller's, so that it may be in a log already.
    pub(super) is_given: bool,
}

/// What a check needs to know of a charge before all of its charges are counted, or none.
#[derive(Clone, Copy, Debug)]
pub(super) struct Look {
    /// Admissions that had left the window, and are dropped.
    pub(super) gone: usize,
    /// Admissions to remember if the check is admitted: none for a charge that is free, or counted already.
    pub(super) new: usize,
    /// Whether the charge does not fit.
    pub(super) refuses: bool,
}

impl Slot {
    /// Decides a charge that is alone in its check.
    pub(super) fn decide(&mut self, charge: &Charge, attempt: Attempt, room: &Room) -> Result<LimitStatus, Full> {
        let Look { gone, new, refuses } = self.look(charge, attempt);
        if refuses {
            room.give_back(gone);
            return Ok(self.refuse(charge, attempt));
        }
        room.exchange(gone, new)?;
        Ok(self.admit(charge, attempt))
    }

    /// Drops what has left the window, and looks at what is left.
    pub(super) fn look(&mut self, charge: &Charge, attempt: Attempt) -> Look {
        let gone = self.log.trim(attempt.now, charge.limit().window_micros());
        let counts = self.counts(charge, attempt);
        Look { gone, new: counts.into(), refuses: counts && self.excess(charge) > 0 }
    }

    /// How a charge stands in a check that is refused, by it or by another charge.
    pub(super) fn refuse(&mut self, charge: &Charge, attempt: Attempt) -> LimitStatus {
        let excess = if self.counts(charge, attempt) { self.excess(charge) } else { 0 };
        let wait = (excess > 0).then(|| self.log.wait_for(excess, attempt.now, charge.limit().window_micros()));
        self.status(charge, attempt, wait.map(Duration::from_micros))
    }

    /// Counts a charge of a check that is admitted, and says how it stands then.
    pub(super) fn admit(&mut self, charge: &Charge, attempt: Attempt) -> LimitStatus {
        if self.counts(charge, attempt) {
            self.log.admit(attempt.now, charge.cost(), attempt.id);
            self.window = charge.limit().window_micros();
        }
        self.status(charge, attempt, None)
    }

    /// Drops what has left the window of the last admission, and says how many admissions that were.
    pub(super) fn sweep(&mut self, now: u64) -> usize {
        let gone = self.log.trim(now, self.window);
        self.log.shrink();
        gone
    }

    /// The number of admissions.
    pub(super) fn admissions(&self) -> usize {
        self.log.len()
    }

    /// Whether nothing is left to remember.
    pub(super) fn is_empty(&self) -> bool {
        self.log.is_empty()
    }

    /// Whether an admission of the charge is to be remembered: it is not free, and not counted already.
    fn counts(&self, charge: &Charge, attempt: Attempt) -> bool {
        let is_counted = || attempt.is_given && self.log.contains(attempt.id, charge.cost());
        charge.cost() > 0 && !is_counted()
    }

    /// The units by which the charge does not fit.
    fn excess(&self, charge: &Charge) -> u64 {
        (self.log.used() + charge.cost()).saturating_sub(charge.limit().units())
    }

    fn status(&self, charge: &Charge, attempt: Attempt, retry_after: Option<Duration>) -> LimitStatus {
        let reset_after = self.log.reset_after(attempt.now, charge.limit().window_micros());
        LimitStatus::new(charge, self.log.used(), Duration::from_micros(reset_after), retry_after)
    }
}
