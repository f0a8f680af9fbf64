//! What one limit makes of a request, before its check is whole.

use std::time::Duration;

use super::{rejection::Rejection, shadow::LeftOut};
use crate::{
    check::{Charge, NeverFits},
    key::Key,
    limit::Limit,
};

/// What one limit makes of a request.
pub(super) enum Draft {
    Charge(Charge),
    /// The limit is in the shadow, and cannot charge the request.
    LeftOut(LeftOut),
}

/// How a limit charges.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms {
    /// For how long it reserves its units, if it settles them.
    pub(super) lease: Option<Duration>,
    pub(super) is_shadow: bool,
}

impl Terms {
    pub(super) fn charge(self, limit: Limit, key: Key, cost: u64) -> Result<Draft, NeverFits> {
        match Charge::new(limit, key, cost) {
            Ok(charge) => {
                let charge = self.lease.into_iter().fold(charge, Charge::reserve);
                Ok(Draft::Charge(if self.is_shadow { charge.in_shadow() } else { charge }))
            }
            Err(error) if self.is_shadow => {
                Ok(Draft::LeftOut(LeftOut::new(Some(error.limit().clone()), Rejection::NeverFits(error))))
            }
            Err(error) => Err(error),
        }
    }

    /// What is a rejection where the limit is not in the shadow.
    pub(super) fn forgive(self, limit: Option<&Limit>, rejection: Rejection) -> Result<Draft, Rejection> {
        if self.is_shadow { Ok(Draft::LeftOut(LeftOut::new(limit.cloned(), rejection))) } else { Err(rejection) }
    }
}
