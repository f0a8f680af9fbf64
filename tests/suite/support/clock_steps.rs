//! Histories of a limit before its clock steps back.

use std::time::Duration;

use Action::{IsRefused, Peeks, Reserves, Settles, Takes, Waits};

use super::ms;

/// An action on a limit before the clock steps back. Each takes a second.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Action {
    Takes(u64),
    Reserves(u64),
    /// Reserves the first number of units, and settles them at the second.
    Settles(u64, u64),
    /// Advances the clock.
    Waits(Duration),
    /// A peek or a refusal, which drops expired entries.
    Peeks,
    IsRefused,
}

/// A reservation has a lease of 7 s.
pub(crate) const HISTORIES: [&[Action]; 12] = [
    &[Takes(1)],
    &[Takes(1), Takes(1), Takes(1)],
    &[Takes(7)],
    &[Takes(2), Takes(1), Takes(7)],
    &[Reserves(5)],
    &[Takes(1), Reserves(5), Takes(1)],
    &[Settles(5, 2), Takes(1)],
    &[Takes(1), Takes(1), Settles(1, 0)],
    &[Settles(1, 1)],
    // The first unit has expired and is dropped.
    &[Takes(1), Takes(1), Takes(1), Waits(ms(7_100)), Peeks],
    &[Takes(2), Takes(1), Takes(7), Waits(ms(7_100)), IsRefused],
    &[Takes(1), Waits(ms(9_100)), Takes(1), Takes(1), Peeks],
];
