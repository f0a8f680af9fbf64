//! One limit's status in a [`decision`](crate::decision).

use std::{cmp::Reverse, time::Duration};

use crate::{check::Charge, clock::micros, limit::Limit};

/// The state of one limit for the charged key after a decision.
#[derive(Clone, Debug)]
#[must_use]
#[non_exhaustive]
pub struct LimitStatus {
    /// The limit.
    pub limit: Limit,
    /// The units in the window, including this check's if it was admitted.
    pub used: u64,
    /// The used units that are [reserved](Charge::reserve), and may be given back. Under a
    /// [concurrent](Limit::concurrent) limit, all used units are reserved.
    pub reserved: u64,
    /// True if the limit is in the [shadow](Charge::in_shadow).
    pub is_shadow: bool,
    // Times are microseconds, so that a status has less than 128 bytes. The compiler then moves it
    // in registers instead of calling `memcpy`.
    /// The time until fewer units count. A place under a concurrent limit may be freed earlier.
    pub(crate) leaves_after: u64,
    /// A refusal's two retry times: see [`new`](Self::new).
    pub(crate) waits: Option<(u64, u64)>,
    /// The retry time if only reserved units are in the way.
    reserved_after: u64,
    /// True if the charge is [hidden](Charge::hidden).
    pub(super) is_hidden: bool,
    /// True if the charge has asked for units. Spent charges and charges at no cost do not ask.
    #[cfg_attr(
        not(feature = "metrics"),
        expect(dead_code, reason = "only metrics ask")
    )]
    pub(crate) has_asked: bool,
    is_ban: bool,
    /// True if the figures are this process's estimate, not the store's.
    pub(crate) is_estimate: bool,
}

/// The default for [`Limiter::retry_reserved_after`](crate::Limiter::retry_reserved_after).
pub(crate) const RETRY_RESERVED_AFTER: Duration = Duration::from_secs(1);

impl LimitStatus {
    /// The status for `charge`. After the decision, `used` units are in the window, and `reserved`
    /// of them are reserved. `reset_after` is the time until the oldest one leaves the window; zero
    /// without units.
    ///
    /// `waits` has two retry times if this charge refused the check. The first assumes that all
    /// reserved units are given back now, and is zero if the check would then fit. The second
    /// assumes that no units are given back before their lease ends, so it is an upper bound for
    /// the first. Without reserved units, both are the same.
    pub fn new(
        charge: &Charge,
        used: u64,
        reserved: u64,
        reset_after: Duration,
        waits: Option<(Duration, Duration)>,
    ) -> Self {
        let waits = waits.map(|(least, most)| (rounded_up(least), rounded_up(most)));
        Self::of_micros(charge, used, reserved, rounded_up(reset_after), waits)
    }

    /// Does the same as [`new`](Self::new), with times in microseconds.
    #[inline]
    pub(crate) fn of_micros(
        charge: &Charge,
        used: u64,
        reserved: u64,
        leaves_after: u64,
        waits: Option<(u64, u64)>,
    ) -> Self {
        Self {
            limit: charge.limit().clone(),
            used,
            reserved,
            leaves_after,
            waits,
            reserved_after: micros(RETRY_RESERVED_AFTER),
            is_shadow: charge.is_shadow(),
            is_hidden: charge.is_hidden,
            has_asked: charge.cost() > 0 && !charge.is_spent(),
            is_ban: charge.is_ban,
            is_estimate: false,
        }
    }

    /// The same figures for `charge`, in a status that does not refuse the check.
    pub(crate) fn for_charge(&self, charge: &Charge) -> Self {
        Self::of_micros(charge, self.used, self.reserved, self.leaves_after, None)
    }

    /// The status for `charge` if this process refuses the check without asking the store, since
    /// equal checks already wait for the store. If `refuses` is set, the charge's limit is shown as
    /// used up, since the waiting checks will use it up. Otherwise the figures are not known.
    pub(crate) fn estimate(charge: &Charge, refuses: bool) -> Self {
        let (units, time) = if refuses {
            (charge.limit().units(), charge.limit().window_micros())
        } else {
            (0, 0)
        };
        // The units count as reserved, since they may not be spent after all: some waiting checks
        // may be refused, or their callers may leave.
        let waits = refuses.then_some((0, time));
        let mut status = Self::of_micros(charge, units, units, time, waits);
        status.is_estimate = true;
        status
    }

    /// Returns the same figures, except that if the charge does not fit, the limit refuses the
    /// check until the reset time.
    pub(crate) fn refused_until_reset(mut self, charge: &Charge) -> Self {
        let settled = self.used.saturating_sub(self.reserved);
        let would_fit =
            self.reserved > 0 && settled.saturating_add(charge.cost()) <= self.limit.units();
        let refuses = !charge.is_spent() && charge.cost() > self.remaining();
        let least = if would_fit { 0 } else { self.leaves_after };
        self.waits = refuses.then_some((least, self.leaves_after));
        self
    }

    /// Makes the limit refuse the check for the time `wait`. If the reserved units' retry time is
    /// longer, a concurrent limit uses that time instead.
    pub(crate) fn refused_for(&mut self, wait: Duration) {
        let mut wait = rounded_up(wait);
        // A place becomes free when another request ends, and `wait` cannot tell when that is.
        if self.limit.is_concurrent() {
            wait = wait.max(self.reserved_after);
        }
        self.waits = Some((wait, wait));
    }

    /// Raises a refusal's two [retry times](Self::waits) to at least these values.
    pub(crate) fn not_before(mut self, (least, most): (u64, u64)) -> Self {
        self.waits = self.waits.map(|own| (own.0.max(least), own.1.max(most)));
        self
    }

    /// True if the limit refuses, and reserved units may be the reason.
    #[inline]
    pub(crate) fn waits_for_reserved(&self) -> bool {
        self.waits.is_some() && (self.reserved > 0 || self.limit.is_concurrent())
    }

    /// Sets the retry time that applies if only reserved units are in the way.
    pub(crate) fn set_retry_reserved_after(&mut self, wait: Duration) {
        self.reserved_after = rounded_up(self.limit.retry_reserved_after(wait));
    }

    /// Leaves out units that this process holds unspent, and units reserved for it.
    pub(crate) fn leave_out(&mut self, held: u64, reserved: u64) {
        self.used = self.used.saturating_sub(held);
        self.reserved = self.reserved.saturating_sub(reserved);
    }

    /// The figures without this charge's units, which were counted and are given back.
    #[cfg(feature = "redis")]
    pub(crate) fn given_back(mut self, charge: &Charge) -> Self {
        // A charge in the shadow that does not fit was not counted.
        if self.waits.is_none() {
            let is_reserved =
                charge.takes_place() || charge.lease().is_some() && !charge.is_spent();
            self.leave_out(charge.units(), if is_reserved { charge.units() } else { 0 });
        }
        if self.used == 0 {
            self.leaves_after = 0;
        }
        self
    }

    /// The units left; 0 if more units are used than the limit has, for example after it was
    /// lowered.
    pub fn remaining(&self) -> u64 {
        self.limit.units().saturating_sub(self.used)
    }

    /// The time until fewer units count; zero if none do. Under a
    /// [compact](crate::Algorithm::compact_log) log it may be a sub-window longer than the window.
    /// For a [concurrent](Limit::concurrent) limit it is zero, since a place may be free at any
    /// time.
    pub fn reset_after(&self) -> Duration {
        let is_concurrent = self.limit.is_concurrent();
        Duration::from_micros(if is_concurrent { 0 } else { self.leaves_after })
    }

    /// How long this limit alone refuses the check; `None` if it does not refuse. For a limit in
    /// the [shadow](Charge::in_shadow), this is how long it would refuse the check.
    pub fn retry_after(&self) -> Option<Duration> {
        // The result is `reserved_after`, or `least` if that is longer: until then, the check is
        // refused because of units that are not reserved. It is at most `most`: by then, enough
        // units have left even if none is given back early.
        let (least, most) = self.waits?;
        Some(Duration::from_micros(
            self.reserved_after.max(least).min(most),
        ))
    }

    /// True if the limit refused the check, and would not have refused it without the reserved
    /// units.
    pub fn is_refused_by_reservations(&self) -> bool {
        self.reserved > 0 && self.waits.is_some_and(|(least, _)| least == 0)
    }

    /// True if the limit is [hidden](Charge::hidden) from clients. A [ban](crate::KeyedLimit::ban)
    /// is hidden until it begins. If a check is refused [without the
    /// store](crate::Limiter::refusal_cache), a limit with unknown figures is hidden, too. Unknown
    /// figures are zero.
    pub fn is_hidden(&self) -> bool {
        self.is_hidden
            || self.waits.is_none() && (self.is_estimate || self.is_ban && self.used == 0)
    }

    /// Returns the binding status: this one or `other`.
    pub(crate) fn binding<'a>(&'a self, other: &'a Self) -> &'a Self {
        if other.rank() < self.rank() {
            other
        } else {
            self
        }
    }

    /// The limit with the lower rank is binding. A place may become free at any moment, so a
    /// concurrent limit's figures tell little. So if two limits have equal retry times, or neither
    /// has one, a limit with a window is binding rather than a concurrent one.
    fn rank(&self) -> impl Ord {
        (
            self.is_shadow,
            Reverse(self.retry_after()),
            self.limit.is_concurrent(),
            self.remaining(),
            Reverse(self.leaves_after),
        )
    }

    /// The retry time, if the limit refuses the check.
    pub(crate) fn refuses(&self) -> Option<Duration> {
        let wait = self.retry_after()?;
        (!self.is_shadow).then_some(wait)
    }
}

/// A duration in microseconds, rounded up so that nobody comes back too early.
fn rounded_up(duration: Duration) -> u64 {
    micros(duration.saturating_add(Duration::from_nanos(999)))
}
