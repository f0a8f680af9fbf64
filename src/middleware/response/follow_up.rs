//! The follow-up of a request with more than figures in its response: settlements, blocks, refusals of limits in the shadow.

use std::{sync::Arc, time::SystemTime};

use http::{Response, request, response};

use super::{
    super::{
        events::Event,
        policy::Policy,
        rejection::shadow::ShadowRefusals,
        request::{ChargedLimit, CheckDetails, Exchange, Limits},
    },
    block::Block,
    detachable::Detachable,
    settlements::Settlements,
    upstream::block_request,
};
use crate::{
    check::{Charge, Check},
    decision::Decision,
    key::Key,
    limit::Limit,
};

/// Most requests have no follow-up, so it is boxed.
pub(super) struct FollowUp<R> {
    policy: Arc<Policy<R>>,
    admitted: Option<AdmittedCheck>,
    shadow: Option<ShadowRefusals>,
}

/// A check that is settled after its response, or whose limits the upstream may block.
struct AdmittedCheck {
    check: Check,
    charged: Vec<ChargedLimit>,
    decision: Decision,
    /// Kept if a limit computes its cost from it.
    request: Option<request::Parts>,
}

/// A call counts as of its response, since the upstream may have counted it that late, but at most this part of the window
/// later than its admission. This is the throughput that it can cost.
const MAX_DELAY_DIVISOR: u32 = 10;

/// The settlements and blocks that a response waits for, and the decision after the settlements. They go on if the client
/// leaves, since it would otherwise leave with units that it has used.
pub(crate) type Settling = Detachable<Option<Decision>>;

impl<R> FollowUp<R> {
    /// The follow-up of a request that is let through. `request` clones its parts.
    pub(super) fn new(
        policy: &Arc<Policy<R>>,
        details: Option<Box<CheckDetails>>,
        decision: Option<&Decision>,
        request: impl FnOnce() -> request::Parts,
    ) -> Option<Box<Self>> {
        let CheckDetails { check, charged, left_out, .. } = details.map(|details| *details).unwrap_or_default();
        let shadow = policy.shadow_refusals(decision, left_out);
        let admitted = check.zip(decision).map(|(check, decision)| {
            let settles = |charged: &ChargedLimit| {
                policy.limits.get(charged.limit_index).is_some_and(|limit| limit.cost_afterwards().is_some())
            };
            let request = charged.iter().any(settles).then(request);
            AdmittedCheck { check, charged, decision: decision.clone(), request }
        });
        let is_needed = shadow.is_some() || admitted.is_some();
        is_needed.then(|| Box::new(Self { policy: Arc::clone(policy), admitted, shadow }))
    }

    /// Begins the settlements and blocks.
    pub(super) fn settle<B>(&self, response: Response<B>) -> (Response<B>, Option<Settling>) {
        let Some(admitted) = &self.admitted else { return (response, None) };
        let (parts, body) = response.into_parts();
        let settlements = admitted.settlements(&self.policy, &parts);
        let block = admitted.block(settlements.as_ref(), &self.policy.limits, &parts);
        let is_needed = settlements.is_some() || block.is_some();
        let settling = is_needed.then(|| {
            let (limiter, events) = (self.policy.limiter.clone(), Arc::clone(&self.policy.settings.events));
            Detachable::new(async move {
                let settled = match settlements {
                    Some(settlements) => {
                        let settled = settlements.apply(&limiter).await;
                        settled.inspect_err(|error| events.log(Event::NotSettled(error))).ok()
                    }
                    None => None,
                };
                if let Some(block) = block {
                    let blocked = limiter.within(block.apply(&limiter, &events)).await.and_then(|blocked| blocked);
                    if let Err(error) = blocked {
                        events.log(Event::NotBlocked(&error));
                    }
                }
                settled
            })
        });
        (Response::from_parts(parts, body), settling)
    }
}

impl<R> FollowUp<R> {
    pub(super) fn write_shadow<B>(self, response: &mut Response<B>) {
        if let Some(shadow) = self.shadow {
            shadow.write(response, self.policy.settings.shadow_header.as_ref());
        }
    }
}

impl AdmittedCheck {
    fn settlements<R>(&self, policy: &Policy<R>, response: &response::Parts) -> Option<Settlements> {
        let limits = &policy.limits;
        let cost = |charge: &Charge, charged: &ChargedLimit| {
            let Some(cost) = limits.get(charged.limit_index)?.cost_afterwards() else { return Some(charged.cost) };
            Some(cost(&Exchange::new(self.request.as_ref()?, response, charge.cost())))
        };
        Settlements::new(&self.check, &self.charged, &self.decision, cost, |charge, charged| {
            limits.get(charged.limit_index)?.heeds_upstream().then(|| charge.limit().window() / MAX_DELAY_DIVISOR)
        })
    }

    /// The block that the upstream asks for. If it has not refused the call, a limit that was used up here, and gives
    /// nothing back, is not blocked.
    fn block(&self, settlements: Option<&Settlements>, limits: &Limits, response: &response::Parts) -> Option<Block> {
        if !limits.any_heeds_upstream {
            return None;
        }
        let request = block_request(response.status, &response.headers, SystemTime::now())?;
        let blocked: Vec<_> =
            self.heeding(limits, |index| request.is_refusal || self.has_left(index, settlements)).collect();
        (!blocked.is_empty()).then_some(Block { limits: blocked, request })
    }

    /// Whether a limit had something left at the admission, or gets something back.
    fn has_left(&self, index: usize, settlements: Option<&Settlements>) -> bool {
        let left = self.decision.statuses().nth(index).is_none_or(|status| status.remaining() > 0);
        left || settlements.is_some_and(|settlements| settlements.gives_back(index))
    }

    /// The limits and keys that heed the upstream: the key of a charge, if it `is_blocked`, and all other parts of a split
    /// limit.
    fn heeding(&self, limits: &Limits, is_blocked: impl Fn(usize) -> bool) -> impl Iterator<Item = (Limit, Key)> {
        let charges = self.check.charges().enumerate().filter(|(_, charge)| !charge.is_shadow());
        charges.flat_map(move |(index, charge)| {
            let charged = self.charged.iter().filter(move |charged| charged.charge_index == index);
            let heeding =
                charged.filter_map(|charged| limits.get(charged.limit_index)).find(|limit| limit.heeds_upstream());
            let mut keys = heeding.map(|limit| limit.all_parts_of(charge.key())).unwrap_or_default();
            if !is_blocked(index) {
                keys.retain(|key| key != charge.key());
            }
            keys.into_iter().map(|key| (charge.limit().clone(), key))
        })
    }
}
