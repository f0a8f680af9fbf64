//! The limits of a layer, and the check that they make of a request.

use http::request::Parts;

use super::{
    super::{
        headers::PartitionKeys,
        rejection::{Rejection, shadow::LeftOut},
    },
    charge::{DraftCharge, UnchosenLimit},
    keyed_limit::KeyedLimit,
};
use crate::{
    check::{Charge, Check},
    error::{ConfigError, ConfigErrorKind},
    limit::Limit,
};

/// The limits of a layer. No two that are not chosen for each request have one name.
#[derive(Clone, Debug, Default)]
pub(crate) struct Limits {
    all: Vec<KeyedLimit>,
    any_settles: bool,
    pub(crate) any_heeds_upstream: bool,
    pub(crate) any_is_chosen: bool,
    pub(crate) any_is_shadow: bool,
    pub(crate) all_are_shadow: bool,
}

impl Limits {
    /// Adds a limit, unless another has its name.
    pub(crate) fn push(&mut self, limit: KeyedLimit) -> Result<(), ConfigError> {
        if let Some(name) = limit.limit().map(Limit::name)
            && self.iter().any(|other| other.limit().is_some_and(|other| other.name() == name))
        {
            let text = format!("two limits of one layer are named {name:?}");
            return Err(ConfigError::new(ConfigErrorKind::SameLimit, text));
        }
        // Here, so that no request has to look through all limits for it.
        self.any_settles |= limit.cost_afterwards().is_some();
        self.any_heeds_upstream |= limit.heeds_upstream();
        self.any_is_chosen |= limit.limit().is_none();
        self.any_is_shadow |= limit.is_shadow();
        self.all_are_shadow = limit.is_shadow() && (self.all.is_empty() || self.all_are_shadow);
        self.all.push(limit);
        Ok(())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &KeyedLimit> {
        self.all.iter()
    }

    pub(crate) fn get(&self, index: usize) -> Option<&KeyedLimit> {
        self.all.get(index)
    }

    /// Whether the check of a request is kept until its response, to settle it.
    pub(crate) fn keeps_check(&self) -> bool {
        self.any_settles || self.any_heeds_upstream
    }

    /// For a log line.
    pub(crate) fn names(&self) -> String {
        let names = self.iter().map(|limit| limit.limit().map_or("a chosen one", Limit::name));
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
        for (index, limit) in self.iter().enumerate() {
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
    pub(super) keeps_check: bool,
}

/// The details of a check that its response needs. Most checks have none, so they are boxed.
#[derive(Default)]
pub(crate) struct CheckDetails {
    /// The check itself, if the response settles it.
    pub(crate) check: Option<Check>,
    pub(crate) charged: Vec<ChargedLimit>,
    /// Of the charges of the check, if the response shows them.
    pub(crate) partition_keys: Vec<String>,
    pub(crate) left_out: Vec<LeftOut>,
    pub(crate) unchosen: Vec<UnchosenLimit>,
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

    pub(super) fn add<C>(&mut self, limit_index: usize, draft: DraftCharge<C>) {
        match draft {
            DraftCharge::Charge(charge) => self.add_charge(limit_index, charge),
            DraftCharge::LeftOut(left_out) => self.details().left_out.push(left_out),
            DraftCharge::Unlimited | DraftCharge::ToChoose(_) => {}
        }
    }

    /// Adds a charge on a limit that has no other charge.
    #[inline]
    pub(super) fn add_charge(&mut self, limit_index: usize, charge: Charge) {
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
    pub(super) fn keep_check(&mut self) {
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
}
