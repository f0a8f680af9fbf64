//! The limits of a layer, and the check that they make of a request.
//!
//! Chosen limits may be the same for a request: two of one name for one key make one charge, by the stricter of them.

use std::{cmp::Reverse, sync::Arc};

use http::request::Parts;

use super::{
    super::{degraded::Degraded, headers::PartitionKeys, rejection::Rejection},
    keyed_limit::{DraftCharge, KeyedLimit},
};
use crate::{
    check::{Charge, Check, charged_twice},
    error::{ConfigError, ConfigErrorKind, Error, NeverFits},
    limit::Limit,
    split::is_of_one_whole,
};

/// The limits of a layer. No two that are not chosen for each request have one name.
#[derive(Clone, Debug, Default)]
pub(crate) struct Limits {
    pub(crate) all: Vec<KeyedLimit>,
    pub(crate) any_settles: bool,
    pub(crate) any_heeds_upstream: bool,
    pub(crate) any_is_chosen: bool,
    pub(crate) any_is_shadow: bool,
    pub(crate) all_are_shadow: bool,
}

impl Limits {
    /// Adds a limit, unless another has its name.
    pub(crate) fn push(&mut self, limit: KeyedLimit) -> Result<(), ConfigError> {
        if let Some(name) = limit.limit().map(Limit::name)
            && self.all.iter().any(|other| other.limit().is_some_and(|other| other.name() == name))
        {
            let text = format!("two limits of one layer are named {name:?}");
            return Err(ConfigError::new(ConfigErrorKind::SameLimit, text));
        }
        // Here, so that no request has to look through all limits for it.
        self.any_settles |= limit.cost_afterwards.is_some();
        self.any_heeds_upstream |= limit.heeds_upstream;
        self.any_is_chosen |= limit.limit().is_none();
        self.any_is_shadow |= limit.is_shadow;
        self.all_are_shadow = limit.is_shadow && (self.all.is_empty() || self.all_are_shadow);
        self.all.push(limit);
        Ok(())
    }

    /// Whether the check of a request is kept until its response, to settle it.
    pub(crate) fn keeps_check(&self) -> bool {
        self.any_settles || self.any_heeds_upstream
    }

    /// For a log line.
    pub(crate) fn names(&self) -> String {
        let names = self.all.iter().map(|limit| limit.limit().map_or("a chosen one", Limit::name));
        names.collect::<Vec<_>>().join(", ")
    }

    /// The charges of a request, none of which needs a choice.
    #[inline]
    pub(crate) fn check(
        &self,
        request: &Parts,
        cost: u64,
        partition_keys: Option<&PartitionKeys>,
    ) -> Result<CheckBuilder, Rejection> {
        let mut builder = CheckBuilder::new(self.keeps_check());
        for (index, limit) in self.all.iter().enumerate() {
            match limit.plain_charge(request, cost)? {
                Some(charge) => builder.add_charge(index, charge),
                None => builder.add(index, limit.draft(request, cost)?),
            }
        }
        builder.keep_check();
        if let Some(keys) = partition_keys {
            builder.add_partition_keys(keys);
        }
        Ok(builder)
    }
}

/// Makes a check out of charges.
pub(crate) struct CheckBuilder {
    pub(crate) check: Option<Check>,
    pub(crate) details: Option<Box<CheckDetails>>,
    keeps_check: bool,
}

/// The details of a check that its response needs. Most checks have none, so they are boxed.
#[derive(Default)]
pub(crate) struct CheckDetails {
    /// The check itself, if the response settles it.
    pub(crate) check: Option<Check>,
    pub(crate) charged: Vec<ChargedLimit>,
    /// Of the charges of the check, if the response shows them.
    pub(crate) partition_keys: Vec<String>,
    /// The limits in the shadow that cannot charge the request, and why.
    pub(crate) left_out: Vec<(Option<Limit>, Rejection)>,
    /// Set if a limit could not be chosen.
    pub(crate) unchosen: Option<Degraded>,
}

/// A limit of the layer and its charge. Two chosen limits may have one charge.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChargedLimit {
    pub(crate) charge_index: usize,
    pub(crate) limit_index: usize,
    /// The cost by this limit alone.
    pub(crate) cost: u64,
}

impl CheckBuilder {
    /// With `keeps_check`, the details get a copy of the check, to settle it afterwards.
    #[inline]
    pub(super) fn new(keeps_check: bool) -> Self {
        Self { check: None, details: None, keeps_check }
    }

    fn add(&mut self, limit_index: usize, draft: DraftCharge) {
        match draft {
            DraftCharge::Charge(charge) => self.add_charge(limit_index, charge),
            DraftCharge::LeftOut(limit, rejection) => self.details().left_out.push((limit, rejection)),
            DraftCharge::Unlimited | DraftCharge::ToChoose(..) => {}
        }
    }

    /// Adds a charge on a limit that has no other charge.
    #[inline]
    fn add_charge(&mut self, limit_index: usize, charge: Charge) {
        if self.keeps_check {
            let charge_index = self.check.iter().flat_map(Check::charges).count();
            self.details().charged.push(ChargedLimit { charge_index, limit_index, cost: charge.cost() });
        }
        match &mut self.check {
            Some(check) => check.add_distinct(charge),
            none => *none = Some(Check::new(charge)),
        }
    }

    /// Copies the check into the details, now that it is complete.
    #[inline]
    fn keep_check(&mut self) {
        if self.keeps_check
            && let Some(details) = &mut self.details
        {
            details.check.clone_from(&self.check);
        }
    }

    /// Adds the partition keys of the check, now that it is complete.
    pub(super) fn add_partition_keys(&mut self, keys: &PartitionKeys) {
        if let Some(check) = &self.check {
            let keys = keys.of(check);
            self.details().partition_keys = keys;
        }
    }

    pub(super) fn details(&mut self) -> &mut CheckDetails {
        self.details.get_or_insert_default()
    }

    /// Adds the charges of all limits of the layer, in order, some of which were chosen.
    pub(super) fn add_all(&mut self, drafts: Vec<DraftCharge>) -> Result<(), Error> {
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
        self.details().left_out.push((Some(charge.limit().clone()), rejection));
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
