//! The check of a request: the charges of all limits in the layer.
//!
//! A check has at most one charge per identity and key, but two limits that are chosen for each
//! request may have the same identity and key. The layer then rejects the request, and the log
//! shows the setup mistake. For fixed limits, building the layer already fails if two have the same
//! name.

use std::time::Duration;

use http::request::Parts;

use crate::{
    check::{Charge, Check, charged_twice},
    error::NeverFits,
    limit::Limit,
    middleware::{
        policy::{KeyedLimit, Policy},
        rejection::{Rejection, ShadowRefusals},
    },
};

/// The default lease. It is longer than most responses take, but not much longer, since a client
/// that hangs up keeps its units from others until the lease ends.
const DEFAULT_LEASE: Duration = Duration::from_secs(60);

/// A request's charge under one limit, and the charge that begins the limit's ban. The first charge
/// is `None` if no limit was chosen. The second charge is `None` if the limit has no ban.
type Draft = Result<(Option<Charge>, Option<Box<Charge>>), LeftOut>;

/// The limit that cannot charge the request, if the limit is known, and the rejection that says
/// why.
type LeftOut = (Option<Limit>, Rejection);

impl KeyedLimit {
    /// Makes the request's charges. `cost` is the layer's cost. A limit with its own cost ignores
    /// it.
    fn draft(&self, parts: &Parts, cost: u64) -> Draft {
        let cost = self.cost.as_ref().map_or(cost, |own| own(parts));
        let key = self.extractor.extract(parts);
        let key = key.map_err(|error| (self.limit().cloned(), Rejection::NoKey(error)))?;
        let limit = match &self.limit {
            Ok(limit) => Some(limit.clone()),
            Err(choose) => {
                let limit = choose(parts);
                if let Err(error) = self.has_effect_on(limit.as_ref()) {
                    return Err((limit, Rejection::NotSetUp(error)));
                }
                limit
            }
        };
        let ban = self
            .ban
            .as_ref()
            .map(|ban| Charge::ban(ban.limit.clone(), key.clone(), ban.time));
        let ban = ban.map(|begins| Box::new(self.flagged(begins)));
        // Without a chosen limit, the key may still be banned.
        let Some(limit) = limit else {
            return Ok((None, ban));
        };
        let key = match &self.split {
            Some(split) => split.next_key(key),
            None => key,
        };
        let lease = self.lease.unwrap_or(DEFAULT_LEASE);
        let settled_within = self.settle.is_some().then_some(lease);
        // A charge of 0 units would leave no entry to settle, and would not take a place.
        let least = u64::from(settled_within.is_some() || limit.is_concurrent());
        let charge = if self.count_afterwards.is_some() {
            Charge::any_left(limit, key)
        } else {
            Charge::new(limit, key, cost.max(least))
        };
        let mut charge = charge.map_err(|error| {
            let error = NeverFits {
                is_hidden: self.is_hidden,
                ..error
            };
            (Some(error.limit.clone()), Rejection::NeverFits(error))
        })?;
        // If the limit heeds an upstream, the units are reserved until the response, and then count
        // as if admitted at the response.
        let heeding = (self.heeds_upstream && charge.units() > 0).then(|| charge.limit().window());
        if let Some(lease) = settled_within.or(heeding) {
            charge = charge.reserve(lease);
        }
        Ok((Some(self.flagged(charge)), ban))
    }

    fn flagged(&self, mut charge: Charge) -> Charge {
        if self.is_hidden {
            charge = charge.hidden();
        }
        if self.is_shadow {
            charge = charge.in_shadow();
        }
        charge
    }
}

impl Policy {
    /// The limit for a charge. `None` for a ban's charge.
    pub(crate) fn limit_of(
        &self,
        details: &CheckDetails,
        charge_index: usize,
    ) -> Option<&KeyedLimit> {
        let charged = details
            .charged
            .iter()
            .find(|charged| charged.charge_index == charge_index)?;
        self.limits.get(charged.limit_index)
    }
}

/// Check details that the response needs. Boxed, since most responses do not need any.
#[derive(Default)]
pub(crate) struct CheckDetails {
    /// The check, if the response may settle it or block its limits.
    pub(crate) check: Option<Check>,
    pub(crate) charged: Vec<ChargedLimit>,
    /// Shadow limits that cannot charge the request, and why.
    pub(crate) left_out: Vec<LeftOut>,
    /// The admitted request, if a limit computes its cost from request and response.
    pub(crate) request: Option<Box<Parts>>,
    /// Shadow limits that would have refused the admitted request.
    pub(crate) shadow: Option<ShadowRefusals>,
}

/// A limit in the layer and its charge.
#[derive(Clone)]
pub(crate) struct ChargedLimit {
    pub(super) charge_index: usize,
    pub(super) limit_index: usize,
    pub(super) cost: u64,
    /// The index of the charge that asks about the limit's ban, and the charge that begins it.
    pub(super) ban: Option<(usize, Box<Charge>)>,
}

impl CheckDetails {
    /// Combines the charges for all limits into one check, in order. If a shadow limit cannot
    /// charge the request, it is left out. If any other limit cannot charge it, the request is
    /// rejected.
    pub(super) fn of(limits: &[KeyedLimit], parts: &Parts, cost: u64) -> Result<Self, Rejection> {
        let mut details = Self::default();
        for (limit_index, limit) in limits.iter().enumerate() {
            match limit
                .draft(parts, cost)
                .and_then(|(charge, ban)| details.add(limit_index, charge, ban))
            {
                Ok(()) => {}
                Err((_, rejection)) if !limit.is_shadow => return Err(rejection),
                Err(left_out) => details.left_out.push(left_out),
            }
        }
        Ok(details)
    }

    /// Adds a limit's charge, and the charge that asks about its ban. Returns an error if the check
    /// already has a charge with the same identity and key. If only the earlier charge is in shadow
    /// mode, the new charge replaces it, and the shadow limit is left out.
    fn add(
        &mut self,
        limit_index: usize,
        charge: Option<Charge>,
        ban: Option<Box<Charge>>,
    ) -> Result<(), LeftOut> {
        let Some(charge) = charge else {
            // The ban begins only through a limit that charges the request.
            if let Some(begins) = ban {
                self.add_ban(&begins);
            }
            return Ok(());
        };
        let cost = charge.cost();
        let (charge_index, same) = self.index_of(&charge);
        match (same, &mut self.check) {
            (Some(other), Some(check)) if other.is_shadow() && !charge.is_shadow() => {
                self.left_out.push(twice(charge.limit()));
                self.charged
                    .retain(|other| other.charge_index != charge_index);
                check.replace(charge_index, charge);
            }
            (Some(_), _) => return Err(twice(charge.limit())),
            (None, check) => Check::push(check, charge),
        }
        let ban = ban.map(|begins| (self.add_ban(&begins), begins));
        self.charged.push(ChargedLimit {
            charge_index,
            limit_index,
            cost,
            ban,
        });
        Ok(())
    }

    /// Adds a charge that asks about a ban, shared by all limits with this ban. Returns its index.
    fn add_ban(&mut self, begins: &Charge) -> usize {
        let (ban_index, same) = self.index_of(begins);
        match (same, &mut self.check) {
            (Some(other), Some(check)) => check.replace(ban_index, other.asked_with(begins)),
            (_, check) => Check::push(check, begins.asks()),
        }
        ban_index
    }

    /// Returns the index and a clone of the check's charge with the same identity and key as
    /// `charge`, or the index that a new charge gets.
    fn index_of(&self, charge: &Charge) -> (usize, Option<Charge>) {
        for (index, other) in self.check.iter().flat_map(Check::charges).enumerate() {
            if other.is_one_with(charge) {
                return (index, Some(other.clone()));
            }
        }
        (self.check.iter().flat_map(Check::charges).count(), None)
    }
}

/// Returns the entry for a limit that is left out because the layer would charge it twice.
fn twice(limit: &Limit) -> LeftOut {
    let error = charged_twice(limit);
    (Some(limit.clone()), Rejection::NotSetUp(error))
}
