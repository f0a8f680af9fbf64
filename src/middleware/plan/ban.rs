//! Bans: a key that a limit has refused is refused for a time.
//!
//! 1. A ban has a limit of its own, with a single unit, that counts by the exact log. The ban takes
//!    this unit. The unit has the ban's time as its lease. The check of a request only asks whether
//!    the unit is taken.
//! 2. A refusal begins the ban, whether the store or this process has refused. If the limit settles
//!    or counts afterwards, a response that leaves no units of the limit begins the ban, too.
//! 3. All processes take the unit under the same id. So a ban begins once, however many requests
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
    /// True if the limit begins its ban. `status` is the limit's status after a request of this
    /// cost.
    fn bans(&self, status: &LimitStatus, cost: u64) -> bool {
        let settled = status.used.saturating_sub(status.reserved);
        // If only requests in line are in the way, the request fits. If only reserved units are in
        // the way, the request would fit after they are given back. Neither refusal begins a ban.
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
            // A ban that already holds does not begin again. A limit in the shadow begins no ban
            // that refuses.
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
        // If several limits begin one ban, the longest time holds.
        begun.sort_by_key(|(ban_index, begins)| (*ban_index, Reverse(begins.lease())));
        begun.dedup_by_key(|(ban_index, _)| *ban_index);
        begun
    }

    /// Begins the bans of limits that are used up, and adds the statuses of the bans to the
    /// decision. `is_local` tells whether this process decides in the store's place.
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

    /// The rejection of a refused request: [`Rejection::Banned`] if a ban has refused.
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
