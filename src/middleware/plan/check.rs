//! The check of a request: the charges of all limits of the layer.
//!
//! If limits are chosen for each request, two limits of a request may turn out to have the same
//! identity and the same key. A check has only one charge of an identity and key. So the layer
//! rejects such a request, and the log shows the mistake in the set-up. For limits that are not
//! chosen, building the layer already fails if two limits have the same name.

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

/// The charge of a request under one limit, and the charge that begins the ban of the limit. The
/// first is `None` if no limit was chosen for the request. The second is `None` if the limit has no
/// ban.
type Draft = Result<(Option<Charge>, Option<Box<Charge>>), LeftOut>;

/// A limit that cannot charge the request, if the limit is known, and the rejection that says why.
type LeftOut = (Option<Limit>, Rejection);

impl KeyedLimit {
    /// The charges of a request. `cost` is the cost that the layer computes. A limit with a cost of
    /// its own ignores `cost`.
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
        // If no limit is chosen for a request, its key may still be banned.
        let Some(limit) = limit else {
            return Ok((None, ban));
        };
        let key = match &self.split {
            Some(split) => split.next_key(key),
            None => key,
        };
        let lease = self.lease.unwrap_or(DEFAULT_LEASE);
        let settled_within = self.settle.is_some().then_some(lease);
        // A charge of 0 units would leave no entry to settle, and would take no place.
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
        // If the limit heeds an upstream, the units are reserved until the response. After the
        // response, the units count as if the request had been admitted at the response.
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
    /// The limit of a charge. `None` for the charge of a ban.
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

/// The details of a check that the response to the request needs. Most responses need no details,
/// so the details are boxed.
#[derive(Default)]
pub(crate) struct CheckDetails {
    /// The check itself, if the response may settle the check, or block its limits.
    pub(crate) check: Option<Check>,
    pub(crate) charged: Vec<ChargedLimit>,
    /// The limits in the shadow that cannot charge the request, and why.
    pub(crate) left_out: Vec<LeftOut>,
    /// The admitted request, if a limit computes the cost afterwards from the request and its
    /// response.
    pub(crate) request: Option<Box<Parts>>,
    /// The limits in the shadow that would have refused the admitted request.
    pub(crate) shadow: Option<ShadowRefusals>,
}

/// A limit of the layer and its charge.
#[derive(Clone)]
pub(crate) struct ChargedLimit {
    pub(super) charge_index: usize,
    pub(super) limit_index: usize,
    pub(super) cost: u64,
    /// The index of the charge that asks whether the limit's ban has begun, and the charge that
    /// begins the ban.
    pub(super) ban: Option<(usize, Box<Charge>)>,
}

impl CheckDetails {
    /// Makes one check of the charges of all limits, in order. A limit in the shadow that cannot
    /// charge the request is left out. Any other limit that cannot charge the request rejects it.
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

    /// Adds the charge of a limit, and the charge that asks whether the limit's ban has begun.
    /// Returns an error if the check already has a charge of the same identity and key. But if only
    /// the earlier charge is in the shadow, the new charge replaces the earlier charge, whose limit
    /// is left out.
    fn add(
        &mut self,
        limit_index: usize,
        charge: Option<Charge>,
        ban: Option<Box<Charge>>,
    ) -> Result<(), LeftOut> {
        let Some(charge) = charge else {
            // Only a limit that charges the request begins the ban.
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

    /// Adds a charge that asks whether a ban has begun. All limits that have this ban share one
    /// such charge. Returns the index of the charge.
    fn add_ban(&mut self, begins: &Charge) -> usize {
        let (ban_index, same) = self.index_of(begins);
        match (same, &mut self.check) {
            (Some(other), Some(check)) => check.replace(ban_index, other.asked_with(begins)),
            (_, check) => Check::push(check, begins.asks()),
        }
        ban_index
    }

    /// Finds in the check the charge of the same identity and key as `charge`. Returns the index of
    /// the found charge, and the found charge itself. If there is no such charge, returns the index
    /// that a new charge gets.
    fn index_of(&self, charge: &Charge) -> (usize, Option<Charge>) {
        for (index, other) in self.check.iter().flat_map(Check::charges).enumerate() {
            if other.is_one_with(charge) {
                return (index, Some(other.clone()));
            }
        }
        (self.check.iter().flat_map(Check::charges).count(), None)
    }
}

/// The reason to leave out a limit that another limit of the layer repeats.
fn twice(limit: &Limit) -> LeftOut {
    let error = charged_twice(limit);
    (Some(limit.clone()), Rejection::NotSetUp(error))
}
