//! Compares answers with an exact log of the admissions.

use std::{collections::VecDeque, time::Duration};

use super::{UNITS, WINDOW};

/// An answer of the limit to a request of one unit.
#[derive(Clone, Copy)]
pub(super) struct Answer {
    pub(super) at: Duration,
    pub(super) admitted: bool,
}

/// The result of a comparison.
pub(super) struct Verdict {
    /// The requests that were refused although units were left, as a share of all.
    pub(super) early: f64,
    pub(super) admitted: usize,
    /// The most units in any window above the limit.
    pub(super) above: usize,
}

pub(super) fn judge(mut answers: Vec<Answer>) -> Verdict {
    // Admissions come before refusals of the same microsecond: the units are spent.
    answers.sort_by_key(|answer| (answer.at, !answer.admitted));
    let first = answers.first().map_or(Duration::ZERO, |answer| answer.at);
    let (mut log, mut requests, mut admitted, mut early, mut most) = (VecDeque::new(), 0, 0, 0, 0);
    for answer in answers {
        while log
            .front()
            .is_some_and(|admitted| answer.at - *admitted >= WINDOW)
        {
            log.pop_front();
        }
        if answer.admitted {
            log.push_back(answer.at);
        }
        most = most.max(log.len());
        // In the first window the limit fills up.
        if answer.at - first >= WINDOW {
            requests += 1;
            admitted += usize::from(answer.admitted);
            early += usize::from(!answer.admitted && log.len() < UNITS);
        }
    }
    Verdict {
        early: early as f64 / requests as f64,
        admitted,
        above: most.saturating_sub(UNITS),
    }
}
