//! The window of one limit for one key, as the in-process store uses it.

use std::{sync::Arc, time::Duration};

use super::capacity::LimitUsage;
use crate::{
    check::Charge,
    decision::LimitStatus,
    limit::Limit,
    window::{ChargeSettlement, CheckContext, RetryWait, Window},
};

#[derive(Debug)]
pub(super) struct KeyedWindow {
    window: Window,
    /// The length of the window at the last admission, for sweeps.
    length: u64,
}

/// A charge before its check is counted or refused.
#[derive(Debug)]
pub(super) struct Preview {
    /// Entries that had left the window, and are dropped.
    pub(super) gone: usize,
    /// Entries to add if the check is admitted: none for a charge that takes nothing, or is added to another entry.
    pub(super) new: usize,
    /// When this very check was counted, if it was.
    pub(super) counted_at: Option<u64>,
    /// Whether the charge does not fit.
    pub(super) refuses: bool,
    /// Of a limit for which capacity was taken, but which has no record yet.
    pub(super) usage: Option<Arc<LimitUsage>>,
}

/// The figures of a charge's status, in microseconds. The default is that of an empty window.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Figures {
    used: u64,
    reserved: u64,
    reset_after: u64,
    retry: Option<RetryWait>,
}

impl KeyedWindow {
    pub(super) fn new(limit: &Limit) -> Self {
        Self { window: Window::new(limit), length: limit.window_micros() }
    }

    /// Decides a charge that is alone in its check, and returns when it was counted if that was before. `take_capacity` gets
    /// the numbers of entries that are gone and new.
    #[inline]
    pub(super) fn decide<E>(
        &mut self,
        charge: &Charge,
        context: CheckContext,
        take_capacity: impl FnOnce(usize, usize) -> Result<(), E>,
    ) -> Result<(Figures, Option<u64>), E> {
        let Preview { gone, new, counted_at, refuses, .. } = self.preview(charge, context);
        let is_new = counted_at.is_none() && !refuses;
        take_capacity(gone, if is_new { new } else { 0 })?;
        let figures = match counted_at {
            None if refuses => self.refuse(charge, context),
            None => self.admit(charge, context),
            Some(_) => self.figures(charge, context.now, None),
        };
        Ok((figures, counted_at))
    }

    /// Drops entries that have left the window, and looks at the others.
    #[inline]
    pub(super) fn preview(&mut self, charge: &Charge, context: CheckContext) -> Preview {
        let gone = self.window.trim(context.now, charge.limit().window_micros());
        let new = if charge.units() > 0 { self.window.growth(charge, context) } else { 0 };
        let may_be_counted = context.has_caller_id && charge.units() > 0;
        let counted_at = may_be_counted.then(|| self.window.counted_at(charge, context.id)).flatten();
        Preview { gone, new, counted_at, refuses: !self.fits(charge, context), usage: None }
    }

    /// The figures of a charge in a check that is refused, by it or by another charge.
    #[inline]
    pub(super) fn refuse(&mut self, charge: &Charge, context: CheckContext) -> Figures {
        let most = charge.limit().units().saturating_sub(charge.cost());
        let refuses = !self.fits(charge, context);
        let retry = refuses.then(|| self.window.wait_for(most, context.now, charge.limit()));
        self.figures(charge, context.now, retry)
    }

    /// Counts a charge of a check that is admitted.
    #[inline]
    pub(super) fn admit(&mut self, charge: &Charge, context: CheckContext) -> Figures {
        if charge.units() > 0 {
            self.window.admit(charge, context);
            self.length = charge.limit().window_micros();
        }
        self.figures(charge, context.now, None)
    }

    /// Sets the actual cost of an admission, and returns whether it was known. `take_capacity` gets the numbers of entries
    /// that are gone and new; only a settlement after the lease adds one.
    pub(super) fn settle<E>(
        &mut self,
        now: u64,
        settlement: ChargeSettlement<'_>,
        mut take_capacity: impl FnMut(usize, usize) -> Result<(), E>,
    ) -> Result<(Figures, bool), E> {
        let charge = settlement.charge;
        let length = charge.limit().window_micros();
        take_capacity(self.window.trim(now, length), 0)?;
        let (before, mut new) = (self.window.len(), 0);
        let is_known = self.window.settle(now, settlement, |entries| {
            new = entries;
            take_capacity(0, new)
        })?;
        take_capacity((before + new).saturating_sub(self.window.len()), 0)?;
        self.length = length;
        Ok((self.figures(charge, now, None), is_known))
    }

    /// Drops entries that have left the window of the last admission, and returns how many.
    pub(super) fn sweep(&mut self, now: u64) -> usize {
        let gone = self.window.trim(now, self.length);
        self.window.shrink();
        gone
    }

    pub(super) fn entries(&self) -> usize {
        self.window.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.window.len() == 0
    }

    #[inline]
    fn fits(&self, charge: &Charge, context: CheckContext) -> bool {
        let limit = charge.limit();
        let used = || self.window.used(context.now, limit.window_micros());
        charge.cost() == 0 || charge.is_spent() || used().saturating_add(charge.cost()) <= limit.units()
    }

    #[inline]
    pub(super) fn figures(&self, charge: &Charge, now: u64, retry: Option<RetryWait>) -> Figures {
        let limit = charge.limit();
        let (used, reset_after) = (self.window.used(now, limit.window_micros()), self.window.reset_after(now, limit));
        Figures { used, reserved: self.window.reserved(), reset_after, retry }
    }
}

impl Figures {
    #[inline]
    pub(super) fn status(self, charge: &Charge) -> LimitStatus {
        let Self { used, reserved, reset_after, retry } = self;
        let retry_after = retry.map(|wait| Duration::from_micros(wait.most));
        let status = LimitStatus::new(charge, used, Duration::from_micros(reset_after), retry_after);
        let least = retry.map_or(0, |wait| wait.least);
        status.with_reserved(reserved, Duration::from_micros(least))
    }
}
