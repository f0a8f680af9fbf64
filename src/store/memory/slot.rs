//! What one limit counts for one key.

use std::{sync::Arc, time::Duration};

use super::holding::Holding;
use crate::{
    check::Charge,
    decision::LimitStatus,
    limit::Limit,
    settlement::{Account, Settlement},
    window::{Attempt, Wait, Window},
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
    /// Entries to remember if the check is admitted: none for a charge that takes nothing, or that is counted together with
    /// others.
    pub(super) new: usize,
    /// When this very check was counted, if it was.
    pub(super) counted_at: Option<u64>,
    /// Whether the charge does not fit.
    pub(super) refuses: bool,
    /// Of a slot that is new, if room has been taken for it.
    pub(super) holding: Option<Arc<Holding>>,
}

/// How a charge stands, in microseconds.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Standing {
    used: u64,
    reserved: u64,
    reset_after: u64,
    retry_after: Option<Wait>,
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

    /// Decides a charge that is alone in its check, and says when it was counted if it was before. Room for what is gone is
    /// `exchanged` for that of what is new.
    #[inline]
    pub(super) fn decide<E>(
        &mut self,
        charge: &Charge,
        attempt: Attempt,
        exchanged: impl FnOnce(usize, usize) -> Result<(), E>,
    ) -> Result<(Standing, Option<u64>), E> {
        let Look { gone, new, counted_at, refuses, .. } = self.look(charge, attempt);
        let is_new = counted_at.is_none() && !refuses;
        exchanged(gone, if is_new { new } else { 0 })?;
        let standing = match counted_at {
            None if refuses => self.refuse(charge, attempt),
            None => self.admit(charge, attempt),
            Some(_) => self.standing(charge, attempt.now, None),
        };
        Ok((standing, counted_at))
    }

    /// Drops what has left the window, and looks at what is left.
    pub(super) fn look(&mut self, charge: &Charge, attempt: Attempt) -> Look {
        let gone = self.window.trim(attempt.now, charge.limit().window_micros());
        let new = if charge.units() > 0 { self.window.growth(charge, attempt) } else { 0 };
        let is_known = attempt.is_given && charge.units() > 0;
        let counted_at = is_known.then(|| self.window.counted_at(charge, attempt.id)).flatten();
        Look { gone, new, counted_at, refuses: !self.fits(charge, attempt), holding: None }
    }

    /// How a charge stands in a check that is refused, by it or by another charge.
    pub(super) fn refuse(&mut self, charge: &Charge, attempt: Attempt) -> Standing {
        let most = charge.limit().units().saturating_sub(charge.cost());
        let refuses = !self.fits(charge, attempt);
        let wait = refuses.then(|| self.window.wait_for(most, attempt.now, charge.limit()));
        self.standing(charge, attempt.now, wait)
    }

    /// Counts a charge of a check that is admitted, and says how it stands then.
    pub(super) fn admit(&mut self, charge: &Charge, attempt: Attempt) -> Standing {
        if charge.units() > 0 {
            self.window.admit(charge, attempt);
            self.length = charge.limit().window_micros();
        }
        self.standing(charge, attempt.now, None)
    }

    /// How a charge stands that is neither counted nor refused.
    pub(super) fn stand(&self, charge: &Charge, attempt: Attempt) -> Standing {
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

    /// Whether there is room for the charge, if it needs any.
    fn fits(&self, charge: &Charge, attempt: Attempt) -> bool {
        let limit = charge.limit();
        let used = || self.window.used(attempt.now, limit.window_micros());
        charge.cost() == 0 || charge.is_spent() || used().saturating_add(charge.cost()) <= limit.units()
    }

    fn standing(&self, charge: &Charge, now: u64, retry_after: Option<Wait>) -> Standing {
        let limit = charge.limit();
        let (used, reset_after) = (self.window.used(now, limit.window_micros()), self.window.reset_after(now, limit));
        Standing { used, reserved: self.window.reserved(), reset_after, retry_after }
    }
}

impl Standing {
    /// As it is told of the charge. Nothing is counted by default.
    #[inline]
    pub(super) fn of(self, charge: &Charge) -> LimitStatus {
        let Self { used, reserved, reset_after, retry_after } = self;
        let retry = retry_after.map(|wait| Duration::from_micros(wait.most));
        let status = LimitStatus::new(charge, used, Duration::from_micros(reset_after), retry);
        if reserved == 0 {
            return status;
        }
        let least = retry_after.map_or(0, |wait| wait.least);
        status.with_reserved(reserved, Duration::from_micros(least))
    }
}
