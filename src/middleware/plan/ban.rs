//! Bans: after a limit has refused a key, a ban refuses the key for a time.
//!
//! 1. A ban is a lease on the only unit of its own limit, which uses the exact log. The lease is
//!    the ban's time. The check of a request only asks whether the unit is taken.
//! 2. A refusal by the store or by this process begins the ban. If the limit settles or counts
//!    afterwards, a response that uses it up begins the ban, too.
//! 3. All processes take the unit under the same id, so a ban begins once, however many requests
//!    and processes try to begin it.

use std::cmp::Reverse;

use super::check::ChargedLimit;
use crate::{
    check::Charge,
    decision::{Decision, LimitStatus},
    limiter::Limiter,
    middleware::{
        policy::{KeyedLimit, Policy},
        rejection::Rejection,
    },
};

impl KeyedLimit {
    /// True if the limit begins its ban. `status` is the limit's status after a request with this
    /// cost.
    fn bans(&self, status: &LimitStatus, cost: u64) -> bool {
        let settled = status.used.saturating_sub(status.reserved);
        // If only requests in line are in the way, the request fits. If only reserved units are in
        // the way, the request would fit once they are given back. Neither case begins a ban.
        let has_refused =
            status.retry_after().is_some() && settled.saturating_add(cost) > status.limit.units();
        let begins =
            has_refused || self.cost_afterwards().is_some() && settled >= status.limit.units();
        begins && self.ban.as_ref().is_some_and(|ban| !ban.time.is_zero())
    }
}

impl Policy {
    /// The bans that a decision begins, each with its index in the check.
    fn begun<'a>(
        &self,
        decision: &Decision,
        charged: &'a [ChargedLimit],
    ) -> Vec<(usize, &'a Charge)> {
        let mut begun = Vec::new();
        for charged in charged {
            // A ban in force does not begin again. A shadow limit does not begin a ban that
            // refuses.
            if let Some((ban_index, begins)) = &charged.ban
                && let Some(ban) = decision.statuses().nth(*ban_index)
                && ban.retry_after().is_none()
                && ban.is_shadow == begins.is_shadow()
                && let Some(limit) = self.limits.get(charged.limit_index)
                && let Some(status) = decision.statuses().nth(charged.charge_index)
                && limit.bans(status, charged.cost)
            {
                begun.push((*ban_index, &**begins));
            }
        }
        // If several limits begin one ban, the longest time applies.
        begun.sort_by_key(|(ban_index, begins)| (*ban_index, Reverse(begins.lease())));
        begun.dedup_by_key(|(ban_index, _)| *ban_index);
        begun
    }

    /// Begins the bans of used-up limits, and adds the bans' statuses to the decision. `is_local`
    /// is true if this process decides in the store's place.
    pub(crate) async fn ban(
        &self,
        limiter: &Limiter,
        mut decision: Decision,
        charged: &[ChargedLimit],
        is_local: bool,
    ) -> Decision {
        for (ban_index, begins) in self.begun(&decision, charged) {
            match limiter.ban(begins.clone(), is_local).await {
                Ok(refusal) => decision = decision.with_statuses_of(&refusal, &[ban_index]),
                Err(error) => self.events.not_banned(&error),
            }
        }
        decision
    }

    /// The rejection for a refused request: [`Rejection::Banned`] if a ban has refused.
    pub(crate) fn refusal(&self, decision: Decision) -> Rejection {
        let mut bans = self.limits.iter().filter_map(|limit| limit.ban.as_ref());
        let is_banned = bans.any(|ban| {
            let mut refusing = decision.refusing();
            refusing.any(|status| status.limit.is_one_with(&ban.limit))
        });
        if is_banned {
            Rejection::Banned(decision)
        } else {
            Rejection::Limited(decision)
        }
    }
}
