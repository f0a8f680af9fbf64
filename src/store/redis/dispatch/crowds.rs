//! Crowds of equal checks that wait together: see rule 9 of the [queue](super::queue).

use std::{sync::Arc, time::SystemTime};

use crate::{
    check::{AdmissionId, Check},
    decision::{Decision, LimitStatus},
    key::{ByDigest, Digester},
};

/// A crowd of equal checks. Each check has a clone of the crowd until the check is answered, so the
/// number of clones tells the number of checks.
#[derive(Clone, Default)]
pub(super) struct Crowd(Arc<()>);

impl Crowd {
    /// Finds or makes the crowd that a check joins. `crowds` has the crowds by the digests of their
    /// checks. Returns `None` if the limits of the check admit any number of equal checks. Crowds
    /// without checks are removed once there are more than `most` crowds.
    pub(super) fn join(
        crowds: &mut ByDigest<Self>,
        check: &Check,
        digester: &Digester,
        most: usize,
    ) -> Option<Self> {
        most_admitted(check)?;
        if crowds.len() > most {
            crowds.retain(|_, Self(members)| Arc::strong_count(members) > 1);
        }
        let digest = check.charges().fold(0_u64, |digest, charge| {
            let cost = 2 * charge.cost() + 1;
            digest
                .rotate_left(1)
                .wrapping_add(charge.digest(digester).wrapping_mul(cost))
        });
        Some(crowds.entry(digest).or_default().clone())
    }

    /// The number of the other checks in the crowd. The clone in the table of crowds and the clone
    /// of this check are left out.
    fn ahead(&self) -> u64 {
        Arc::strong_count(&self.0) as u64 - 2
    }

    /// Returns true if the limits of this check can never admit more equal checks than are ahead of
    /// it. Cancelled checks, whose number `cancelled` returns, do not count.
    pub(super) fn refuses(&self, check: &Check, cancelled: impl FnOnce() -> u64) -> bool {
        most_admitted(check)
            .is_some_and(|most| self.ahead() >= most && self.ahead() - cancelled() >= most)
    }

    /// The refusal of this check.
    pub(super) fn refusal(&self, check: &Check) -> Decision {
        Decision::new(check, SystemTime::now(), AdmissionId::fresh(), |charge| {
            let most = charge.limit().units().checked_div(charge.units());
            LimitStatus::estimate(
                charge,
                charge.can_refuse() && most.is_some_and(|most| self.ahead() >= most),
            )
        })
    }

    pub(super) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// The most equal checks that the limits of this check can ever admit together. `None` if no limit
/// bounds the number. Equal checks under one id are one admission, so no limit bounds their number.
fn most_admitted(check: &Check) -> Option<u64> {
    let charges = check
        .charges()
        .filter(|charge| check.id().is_none() && charge.can_refuse());
    charges
        .filter_map(|charge| charge.limit().units().checked_div(charge.units()))
        .min()
}
