//! Chosen limits may be the same for a request: two of one name for one key make one charge, by the stricter of them.

use std::{cmp::Reverse, sync::Arc};

use super::{
    super::rejection::{Rejection, shadow::LeftOut},
    charge::{DraftCharge, UnchosenLimit},
    limits::{ChargedLimit, CheckBuilder},
};
use crate::{
    check::{Charge, Check, charged_twice},
    error::Error,
    error::NeverFits,
    split::is_of_one_whole,
};

impl CheckBuilder {
    pub(super) fn with_unchosen(unchosen: Vec<UnchosenLimit>, keeps_check: bool) -> Self {
        let mut builder = Self::new(keeps_check);
        if !unchosen.is_empty() {
            builder.details().unchosen = unchosen;
        }
        builder
    }

    /// Adds the charges of all limits of the layer, in order, some of which were chosen.
    pub(super) fn add_all<C>(&mut self, drafts: Vec<DraftCharge<C>>) -> Result<(), Error> {
        for (limit_index, draft) in drafts.into_iter().enumerate() {
            match draft {
                DraftCharge::Charge(charge) => self.add_or_merge(limit_index, charge)?,
                draft => self.add(limit_index, draft),
            }
        }
        self.keep_check();
        Ok(())
    }

    /// Of two charges on one limit and key, the stricter is kept, but one in the shadow never replaces one that is not.
    fn add_or_merge(&mut self, limit_index: usize, charge: Charge) -> Result<(), Error> {
        let same = self.check.iter().flat_map(Check::charges).enumerate().find(|(_, other)| is_same(other, &charge));
        let Some((charge_index, other)) = same.map(|(index, other)| (index, other.clone())) else {
            self.add_charge(limit_index, charge);
            return Ok(());
        };
        let charged = ChargedLimit { charge_index, limit_index, cost: charge.cost() };
        match (other.is_shadow(), charge.is_shadow()) {
            (false, true) => self.leave_out_duplicate(&charge),
            (true, false) => {
                if let Some(details) = &mut self.details {
                    details.charged.retain(|other| other.charge_index != charge_index);
                }
                if let Some(shadow) = self.replace(charge, charged) {
                    self.leave_out_duplicate(&shadow);
                }
            }
            (_, is_shadow) => match stricter(&other, &charge) {
                Ok(stricter) => drop(self.replace(stricter, charged)),
                Err(error) if is_shadow => self.leave_out(&charge, Rejection::NeverFits(error)),
                Err(error) => return Err(error.into()),
            },
        }
        Ok(())
    }

    /// Returns the charge that was there before.
    fn replace(&mut self, charge: Charge, charged: ChargedLimit) -> Option<Charge> {
        let old = self.check.as_mut().map(|check| check.replace(charged.charge_index, charge));
        if self.keeps_check {
            self.details().charged.push(charged);
        }
        old
    }

    fn leave_out_duplicate(&mut self, charge: &Charge) {
        let error = Error::LimitNotChosen(Arc::new(charged_twice(charge.limit())));
        self.leave_out(charge, Rejection::Unavailable(error));
    }

    fn leave_out(&mut self, charge: &Charge, rejection: Rejection) {
        self.details().left_out.push(LeftOut::new(Some(charge.limit().clone()), rejection, charge.is_hidden()));
    }
}

/// Whether both count under one name for one key, or for two parts of it.
fn is_same(one: &Charge, other: &Charge) -> bool {
    one.limit().name() == other.limit().name() && is_of_one_whole(one.key(), other.key())
}

/// One charge instead of two: on the limit of fewer units, or of the longer window if these are equal, at the larger cost, and
/// hidden if either is. If only one is reserved, the charge is reserved for the whole window, since the other would count for
/// that long. A charge that only asks if anything is left is settled with the other, which is reserved for it.
fn stricter(one: &Charge, other: &Charge) -> Result<Charge, NeverFits> {
    let looseness = |charge: &Charge| (charge.limit().units(), Reverse(charge.limit().window()));
    let kept = if looseness(other) < looseness(one) { other } else { one };
    let is_hidden = one.is_hidden() || other.is_hidden();
    let (limit, key) = (kept.limit().clone(), kept.key().clone());
    let charge = if one.takes_nothing() && other.takes_nothing() {
        Ok(Charge::any_left(limit, key))
    } else {
        Charge::new(limit, key, one.cost().max(other.cost()))
    };
    let charge = charge.map_err(|error| NeverFits { is_hidden, ..error })?;
    let charge = if is_hidden { charge.hidden() } else { charge };
    let charge = match (one.lease(), other.lease()) {
        (None, None) if one.takes_nothing() == other.takes_nothing() => charge,
        (Some(one), Some(other)) => charge.reserve(one.max(other)),
        (Some(lease), None) if other.takes_nothing() => charge.reserve(lease),
        (None, Some(lease)) if one.takes_nothing() => charge.reserve(lease),
        _ => charge.reserve(kept.limit().window()),
    };
    Ok(if kept.is_shadow() { charge.in_shadow() } else { charge })
}
