//! What one limit counts for one key.

use std::{sync::Arc, time::Duration};

use super::holding::Holding;
use crate::{
    check::Charge,
    decision::LimitStatus,
    limit::Limit,
    settlement::{Account, Settlement},
    window::{Attempt, Window},
};

#[derive(Debug)]
pub(super) struct Slot {
    window: Window,
    /// The length of the window at the last admission, which is what a sweep goes by.
    length: u64,
}

/// What a check needs to know of a charge before all of its charges are counted, or none.
#[derive(Debug)]
pub(super) struct Look {
    /// Entries that had left the window, and are dropped.
    pub(super) gone: usize,
    /// Entries to remember if the check is admitted: none for a charge that is free, or counted already, or that is
    /// counted together with others.
    pub(super) new: usize,
    /// Whether the charge does not fit.
    pub(super) refuses: bool,
    /// Of a slot that is new, if room has been taken for it.
    pub(super) holding: Option<Arc<Holding>>,
}

/// How a charge stands, in microseconds.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Standing {
    used: u64,
    reset_after: u64,
    retry_after: Option<u64>,
}

/// What came of the settlement of one charge.
pub(super) struct Outcome {
    pub(super) standing: Standing,
    pub(super) is_known: bool,
}

impl Slot {
    pub(super) fn new(limit: &Limit) -> Self {
        Self { window: Window::new(limit), length: limit.window_micros() }
    }

    /// Decides a charge that is alone in its check. Room for what is gone is `exchanged` for that of what is new.
    #[inline]
    pub(super) fn decide<E>(
        &mut self,
        charge: &Charge,
        attempt: Attempt,
        exchanged: impl FnOnce(usize, usize) -> Result<(), E>,
    ) -> Result<Standing, E> {
        let Look { gone, new, refuses, .. } = self.look(charge, attempt);
        if refuses {
            exchanged(gone, 0)?;
            return Ok(self.refuse(charge, attempt));
        }
        exchanged(gone, new)?;
        Ok(self.admit(charge, attempt))
    }

    /// Drops what has left the window, and looks at what is left.
    pub(super) fn look(&mut self, charge: &Charge, attempt: Attempt) -> Look {
        let gone = self.window.trim(attempt.now, charge.limit().window_micros());
        let counts = self.counts(charge, attempt);
        let new = if counts { self.window.growth(charge, attempt) } else { 0 };
        Look { gone, new, refuses: counts && !self.fits(charge, attempt), holding: None }
    }

    /// How a charge stands in a check that is refused, by it or by another charge.
    pub(super) fn refuse(&mut self, charge: &Charge, attempt: Attempt) -> Standing {
        let refuses = self.counts(charge, attempt) && !self.fits(charge, attempt);
        let most = charge.limit().units().saturating_sub(charge.cost());
        let wait = refuses.then(|| self.window.wait_for(most, attempt.now, charge.limit()));
        self.standing(charge, attempt.now, wait)
    }

    /// Counts a charge of a check that is admitted, and says how it stands then.
    pub(super) fn admit(&mut self, charge: &Charge, attempt: Attempt) -> Standing {
        if self.counts(charge, attempt) {
            self.window.admit(charge, attempt);
            self.length = charge.limit().window_micros();
        }
        self.standing(charge, attempt.now, None)
    }

    /// Sets what an admission has cost. Room for what is gone is `exchanged` for that of what is new, which only a
    /// settlement after the lease is.
    pub(super) fn settle<E>(
        &mut self,
        now: u64,
        settlement: &Settlement,
        account: Account<'_>,
        mut exchanged: impl FnMut(usize, usize) -> Result<(), E>,
    ) -> Result<Outcome, E> {
        let charge = account.charge();
        let length = charge.limit().window_micros();
        exchanged(self.window.trim(now, length), 0)?;
        let (before, mut new) = (self.window.len(), 0);
        let is_known = self.window.settle(now, settlement, account, |entries| {
            new = entries;
            exchanged(0, new)
        })?;
        exchanged((before + new).saturating_sub(self.window.len()), 0)?;
        self.length = length;
        Ok(Outcome { standing: self.standing(charge, now, None), is_known })
    }

    /// Drops what has left the window of the last admission, and says how many entries that were.
    pub(super) fn sweep(&mut self, now: u64) -> usize {
        let gone = self.window.trim(now, self.length);
        self.window.shrink();
        gone
    }

    /// The number of entries.
    pub(super) fn entries(&self) -> usize {
        self.window.len()
    }

    /// Whether nothing is left to remember.
    pub(super) fn is_empty(&self) -> bool {
        self.window.len() == 0
    }

    /// Whether an admission of the charge is to be counted: it is not free, and not counted already.
    fn counts(&self, charge: &Charge, attempt: Attempt) -> bool {
        let is_counted = || attempt.is_given && self.window.contains(charge, attempt.id);
        charge.cost() > 0 && !is_counted()
    }

    fn fits(&self, charge: &Charge, attempt: Attempt) -> bool {
        let limit = charge.limit();
        self.window.used(attempt.now, limit.window_micros()) + charge.cost() <= limit.units()
    }

    fn standing(&self, charge: &Charge, now: u64, retry_after: Option<u64>) -> Standing {
        let limit = charge.limit();
        let (used, reset_after) = (self.window.used(now, limit.window_micros()), self.window.reset_after(now, limit));
        Standing { used, reset_after, retry_after }
    }
}

impl Standing {
    /// As it is told of the charge. Nothing is counted by default.
    #[inline]
    pub(super) fn of(self, charge: &Charge) -> LimitStatus {
        let Self { used, reset_after, retry_after } = self;
        LimitStatus::new(charge, used, Duration::from_micros(reset_after), retry_after.map(Duration::from_micros))
    }
}
