//! The check that the limits of a layer make of a request.
//!
//! If limits are chosen for each request, two limits of a request may turn out to have the same
//! identity and the same key. A check has only one charge of an identity and key, so the two limits
//! make one charge, the [stricter](stricter) one.

use std::time::Duration;

use http::request::Parts;

use crate::{
    check::{Charge, Check, charged_twice},
    error::{Error, NeverFits, StoreError, StoreErrorKind},
    limit::Limit,
    middleware::{
        policy::KeyedLimit,
        rejection::{Rejection, ShadowRefusals},
    },
    split::{Split, is_of_one_whole},
};

/// The default lease. It is longer than most responses take, but not much longer, since a client
/// that hangs up keeps its units from others until the lease ends.
const DEFAULT_LEASE: Duration = Duration::from_secs(60);

/// The charge of a request under one limit, and the charge that begins the ban of the limit. The
/// first is `None` if no limit was chosen for the request. The second is `None` if the limit has no
/// ban. The error has the limit, if it is known, and the rejection that says why the limit cannot
/// charge the request.
type Draft = Result<(Option<Charge>, Option<Box<Charge>>), (Option<Limit>, Rejection)>;

impl KeyedLimit {
    /// The charge of a [plain](Self::is_plain) limit, made without the detour over a [`Draft`].
    /// `None` if the limit is chosen.
    #[inline]
    pub(super) fn plain_charge(&self, parts: &Parts, cost: u64) -> Result<Option<Charge>, Rejection> {
        let Ok(limit) = &self.limit else { return Ok(None) };
        let key = self.extractor.extract(parts).map_err(Rejection::NoKey)?;
        if cost > limit.units() {
            return Err(Rejection::NeverFits(NeverFits { limit: limit.clone(), cost, is_hidden: false }));
        }
        Ok(Some(Charge::fitting(limit.clone(), key, cost)))
    }

    /// The charge of a request of this cost. Without a cost, the charge takes no units, and only
    /// asks how the limit stands.
    pub(crate) fn draft(&self, parts: &Parts, cost: Option<u64>) -> Draft {
        let cost = cost.map(|cost| self.cost.as_ref().map_or(cost, |own| own(parts)));
        let no_key = |error| (self.limit().cloned(), Rejection::NoKey(error));
        let key = self.extractor.extract(parts).map_err(no_key)?;
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
        let ban = self.ban.as_ref().map(|ban| Charge::ban(ban.limit.clone(), key.clone(), ban.time));
        let ban = ban.map(|begins| Box::new(self.flagged(begins)));
        // If no limit is chosen for a request, its key may still be banned.
        let Some(limit) = limit else { return Ok((None, ban)) };
        let (limit, key) = match self.parts {
            Some(parts) => {
                let split = Split::of_at_most(limit, parts);
                let key = split.next_key(key);
                (split.limit, key)
            }
            None => (limit, key),
        };
        let settled_within =
            (self.cost_afterwards.is_some() && !self.counts_afterwards).then(|| self.lease.unwrap_or(DEFAULT_LEASE));
        // A charge of 0 units would leave no entry to settle, and would take no place.
        let least = u64::from(settled_within.is_some() || limit.is_concurrent());
        let charge = match cost {
            None => Charge::new(limit, key, 0),
            Some(_) if self.counts_afterwards => Charge::any_left(limit, key),
            Some(cost) => Charge::new(limit, key, cost.max(least)),
        };
        let charge = charge.map_err(|error| {
            let error = NeverFits { is_hidden: self.is_hidden, ..error };
            (Some(error.limit.clone()), Rejection::NeverFits(error))
        })?;
        // If the limit heeds an upstream, the units are reserved until the response. After the
        // response, the units count as if the request had been admitted at the response.
        let heeding = (self.heeds_upstream && charge.units() > 0).then(|| charge.limit().window());
        let charge = settled_within.or(heeding).into_iter().fold(charge, Charge::reserve);
        Ok((Some(self.flagged(charge)), ban))
    }

    fn flagged(&self, charge: Charge) -> Charge {
        let charge = if self.is_hidden { charge.hidden() } else { charge };
        if self.is_shadow { charge.in_shadow() } else { charge }
    }
}

/// The details of a check that the response to the request needs. Most responses need no details,
/// so the details are boxed.
#[derive(Default)]
pub(crate) struct CheckDetails {
    /// The check itself, if the response may settle the check, or block its limits.
    pub(crate) check: Option<Check>,
    pub(crate) charged: Vec<ChargedLimit>,
    pub(crate) bans: Vec<BanCharge>,
    /// The limits in the shadow that cannot charge the request, and why.
    pub(crate) left_out: Vec<(Option<Limit>, Rejection)>,
    /// The admitted request, if a limit computes the cost afterwards from the request and its
    /// response.
    pub(crate) request: Option<Box<Parts>>,
    /// The limits in the shadow that would have refused the admitted request.
    pub(crate) shadow: Option<ShadowRefusals>,
}

/// A limit of the layer and its charge. Two chosen limits may have one charge.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ChargedLimit {
    pub(crate) charge_index: usize,
    pub(crate) limit_index: usize,
    /// The cost that this limit alone would charge.
    pub(crate) cost: u64,
}

/// The ban of a limit: the limit, the index of the ban in the check, and the charge that begins the
/// ban.
#[derive(Clone)]
pub(crate) struct BanCharge {
    pub(super) charged: ChargedLimit,
    pub(super) ban_index: usize,
    pub(super) begins: Charge,
}

impl CheckDetails {
    /// Makes one check of the charges of all limits, in order. A limit in the shadow that cannot
    /// charge the request is left out. Any other limit that cannot charge the request rejects it.
    pub(crate) fn of(limits: &[KeyedLimit], draft: impl Fn(&KeyedLimit) -> Draft) -> Result<Self, Rejection> {
        let mut details = Self::default();
        for (limit_index, limit) in limits.iter().enumerate() {
            match draft(limit) {
                Ok((charge, ban)) => {
                    charge.map(|charge| details.add_charge(limit_index, charge)).transpose()?;
                    ban.into_iter().for_each(|ban| details.add_ban(limit_index, *ban));
                }
                Err((_, rejection)) if !limit.is_shadow => return Err(rejection),
                Err(left_out) => details.left_out.push(left_out),
            }
        }
        Ok(details)
    }

    /// Adds a charge. Two charges on one limit and key become one charge, the [stricter](stricter)
    /// one. But if only one of the two is in the shadow, the charge in the shadow is left out.
    fn add_charge(&mut self, limit_index: usize, charge: Charge) -> Result<(), Error> {
        let (charge_index, same) = self.place_of(&charge);
        let charged = ChargedLimit { charge_index, limit_index, cost: charge.cost() };
        let Some(other) = same else {
            self.charged.push(charged);
            Check::push(&mut self.check, charge);
            return Ok(());
        };
        match (other.is_shadow(), charge.is_shadow()) {
            (false, true) => self.leave_out_duplicate(&charge),
            (true, false) => {
                self.charged.retain(|other| other.charge_index != charge_index);
                self.replace(charge, charged);
                self.leave_out_duplicate(&other);
            }
            (_, is_shadow) => match stricter(&other, &charge) {
                Ok(stricter) => self.replace(stricter, charged),
                Err(error) if is_shadow => self.leave_out(&charge, Rejection::NeverFits(error)),
                Err(error) => return Err(error.into()),
            },
        }
        Ok(())
    }

    /// Adds a charge that asks for a ban, once for all limits that have this ban. Only a limit that
    /// charges the request begins the ban.
    fn add_ban(&mut self, limit_index: usize, begins: Charge) {
        let (ban_index, same) = self.place_of(&begins);
        match (same, &mut self.check) {
            (Some(other), Some(check)) => check.replace(ban_index, other.asked_with(&begins)),
            (_, check) => Check::push(check, begins.asks()),
        }
        let charged = self.charged.iter().find(|charged| charged.limit_index == limit_index).copied();
        self.bans.extend(charged.map(|charged| BanCharge { charged, ban_index, begins }));
    }

    /// Finds the charge of the check that has the same limit and key as `charge`. If the limit is
    /// split, any part of the same key will do. Returns the index of the charge that was found, and
    /// this charge itself. If none was found, returns the index that a new charge gets.
    fn place_of(&self, charge: &Charge) -> (usize, Option<Charge>) {
        let is_same =
            |other: &Charge| other.limit().is_one_with(charge.limit()) && is_of_one_whole(other.key(), charge.key());
        let charges = || self.check.iter().flat_map(Check::charges);
        let place = charges().position(is_same).unwrap_or_else(|| charges().count());
        (place, charges().nth(place).cloned())
    }

    fn replace(&mut self, charge: Charge, charged: ChargedLimit) {
        if let Some(check) = &mut self.check {
            check.replace(charged.charge_index, charge);
        }
        self.charged.push(charged);
    }

    fn leave_out_duplicate(&mut self, charge: &Charge) {
        let error = StoreError::new("charging a limit", StoreErrorKind::Config, charged_twice(charge.limit()));
        self.leave_out(charge, Rejection::Unavailable(error.of_one_check().into()));
    }

    fn leave_out(&mut self, charge: &Charge, rejection: Rejection) {
        self.left_out.push((Some(charge.limit().clone()), rejection));
    }
}

/// Makes one charge of two: on the limit of fewer units, at the larger cost, and hidden if either
/// charge is hidden. Of two leases, the longer holds. If only one of two charges that take units is
/// reserved, the result is reserved for the whole window, since the other charge would count for
/// the whole window. A charge that takes nothing only asks whether any unit is left, and its cost
/// is counted after the response. If the other charge takes units, both are settled as one, so the
/// result is reserved: for the lease of the charge that takes units, or for the whole window if
/// that charge has no lease.
fn stricter(one: &Charge, other: &Charge) -> Result<Charge, NeverFits> {
    let kept = if other.limit().units() < one.limit().units() { other } else { one };
    let is_hidden = one.is_hidden || other.is_hidden;
    let limit = kept.limit().clone();
    let key = kept.key().clone();
    let charge = if one.takes_nothing() && other.takes_nothing() {
        Charge::any_left(limit, key)
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
