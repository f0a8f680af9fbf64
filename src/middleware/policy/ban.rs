//! Bans: a key that has used up a limit is refused for a time.
//!
//! 1. A ban is an exact log of one unit, which the check of a request only asks for. The unit has
//!    the ban's time as its lease.
//! 2. A refusal begins it, whether the store or this process has refused, and so does a count
//!    afterwards that leaves nothing.
//! 3. It is taken under one id for all, so that it begins once, however many requests and processes
//!    begin it.

use std::{cmp::Reverse, time::Duration};

use http::StatusCode;

use super::{super::rejection::Rejection, Policy, check::BanCharge, keyed_limit::KeyedLimit};
use crate::{
    algorithm::Algorithm,
    decision::{Decision, LimitStatus},
    limit::Limit,
    limiter::Limiter,
};

#[derive(Clone)]
pub(super) struct Ban {
    pub(super) limit: Limit,
    pub(super) time: Duration,
}

impl KeyedLimit {
    /// Bans a key that has used up the limit: for this time, which may be longer than the window,
    /// all requests of the key are refused, by all processes. Default: a key is refused until
    /// enough units have left the window.
    ///
    /// The bans are a limit of one unit. No ban is longer than its window, here or by hand: a
    /// longer time is shortened to it. So give it the window of the longest ban that you want.
    ///
    /// ```
    /// use std::time::Duration;
    /// use http::StatusCode;
    /// use tower_sliding_window::{Limit, Limiter, MemoryStore, PeerIp, RateLimitLayer};
    ///
    /// const BAN: Limit = Limit::per_day("login.ban", 1);
    ///
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// // Five failed logins in a minute are a ban of a quarter of an hour.
    /// let store = MemoryStore::new();
    /// let failures = Limit::per_minute("login", 5)
    ///     .by(PeerIp::new())
    ///     .settle(|exchange| u64::from(exchange.response.status == StatusCode::UNAUTHORIZED))
    ///     .ban(BAN, Duration::from_secs(15 * 60))
    ///     .ban_status(StatusCode::FORBIDDEN);
    /// let layer = RateLimitLayer::new(store.clone()).limit(failures);
    ///
    /// // By hand, and lifted.
    /// let (limiter, key) = (Limiter::new(store), PeerIp::new().key("203.0.113.7".parse()?));
    /// limiter.block(&BAN, key.clone(), Duration::from_secs(24 * 60 * 60)).await?;
    /// limiter.reset(&BAN, key).await?;
    /// # Ok(()) }
    /// ```
    ///
    /// * A refusal by the limit begins the ban. If only [reserved](crate::Charge::reserve) units
    ///   refuse, or others that [wait](crate::RateLimitLayer::wait_up_to) in line, it does not. Nor
    ///   do the places of a [concurrent](Limit::concurrent) limit, so a layer takes none with a
    ///   ban. A limit that [settles](Self::settle) or [counts afterwards](Self::count_afterwards)
    ///   bans as soon as its response leaves nothing. That response keeps its status, and shows the
    ///   figures of the ban already.
    /// * With a time of zero, the limit begins no ban. Then only bans by hand hold.
    /// * It lasts for exactly the time from its begin on: requests that are refused meanwhile do
    ///   not prolong it. Redis keeps its key for the window of the ban's limit, which is 365 days
    ///   at most: the limit of a ban of a century does not compile, or is a `ConfigError`.
    /// * The rejection is [`Rejection::Banned`], also of the request that begins it. Its figures
    ///   are those of the ban, such as the limit `login.ban`, or of the limit itself if that
    ///   refuses for longer. Until then, clients do not see the ban.
    /// * After a ban is lifted, a limit that is still used up begins another at the next refusal.
    ///   [`RateLimitLayer::reset`](crate::RateLimitLayer::reset) resets both. Another window of the
    ///   ban's limit lifts all bans.
    /// * A ban concerns the key: in all parts of a [split](Self::split) limit, and where no limit
    ///   is [chosen](Self::chosen) for a request.
    /// * Limits of a layer that find the same key may have one ban. If several begin it at once,
    ///   the longest time holds. Its status is that of the first of them. It is hidden if any of
    ///   them is, and a limit in the shadow begins none that the others heed.
    /// * A limit in the [shadow](Self::in_shadow) bans in the shadow, and one that is
    ///   [hidden](Self::hidden) has a hidden ban.
    /// * Each check also asks for the ban, so it takes no [prefetch](crate::limit::prefetch). A ban
    ///   that the store does not take is logged, and the next refusal begins it. A
    ///   [full](crate::MemoryStore#when-it-is-full) `MemoryStore` takes none.
    /// * While Redis is gone, a ban stands in the processes that
    ///   [know](crate::Limiter::refusal_cache) it, until it is over, in every failure mode: those
    ///   that have begun it or refused by it. In others the failure mode decides. A process that
    ///   decides in the store's place bans by itself. A Redis that restarts empty has forgotten the
    ///   bans.
    ///
    /// # Panics
    ///
    /// If the limit of the bans has more than one unit, or another algorithm than the
    /// [log](crate::Algorithm::sliding_log).
    #[track_caller]
    pub fn ban(mut self, ban: Limit, time: Duration) -> Self {
        let is_ban = ban.units() == 1 && ban.algorithm() == Algorithm::sliding_log();
        assert!(is_ban, "the limit of bans has one unit, and counts by the exact log");
        self.ban = Some(Ban { limit: ban, time });
        self
    }

    /// Sets the status of rejections by the [ban](Self::ban). Default: 429. A layer takes no limit
    /// with it that has no ban.
    pub fn ban_status(mut self, status: StatusCode) -> Self {
        self.ban_status = Some(status);
        self
    }

    pub(super) fn ban_name(&self) -> Option<&str> {
        self.ban.as_ref().map(|ban| ban.limit.name())
    }

    /// Whether this status of a request of this cost begins the ban.
    fn bans(&self, status: &LimitStatus, cost: u64) -> bool {
        let settled = status.used().saturating_sub(status.reserved());
        // Others that wait in line refuse a request that fits, and one that would fit if reserved
        // units were given back.
        let has_refused = status.retry_after().is_some() && settled.saturating_add(cost) > status.limit().units();
        let begins = has_refused || self.cost_afterwards.is_some() && settled >= status.limit().units();
        begins && self.ban.as_ref().is_some_and(|ban| !ban.time.is_zero())
    }
}

impl Policy {
    /// The bans that a decision begins.
    pub(super) fn begun<'a>(&self, decision: &Decision, bans: &'a [BanCharge]) -> Vec<&'a BanCharge> {
        let status = |index| decision.statuses().nth(index);
        let begins = |ban: &&BanCharge| {
            // One in the shadow begins none that refuses.
            let may_begin =
                |status: &LimitStatus| status.retry_after().is_none() && status.is_shadow() == ban.begins.is_shadow();
            let limit = self.limits.get(ban.charged.limit_index).zip(status(ban.charged.charge_index));
            status(ban.ban_index).is_some_and(may_begin)
                && limit.is_some_and(|(limit, status)| limit.bans(status, ban.charged.cost))
        };
        let mut begun: Vec<_> = bans.iter().filter(begins).collect();
        // The longest of those that several limits begin.
        begun.sort_by_key(|ban| (ban.ban_index, Reverse(ban.begins.lease())));
        begun.dedup_by_key(|ban| ban.ban_index);
        begun
    }

    /// Begins the bans of limits that are used up, and adds them to the decision.
    /// `is_local` if this process decides in the store's place.
    pub(in super::super) async fn ban(
        &self,
        limiter: &Limiter,
        decision: Decision,
        bans: &[BanCharge],
        is_local: bool,
    ) -> Decision {
        let mut banned = decision.clone();
        for BanCharge { ban_index, begins, .. } in self.begun(&decision, bans) {
            match limiter.ban(begins.clone(), is_local).await {
                Ok(refusal) => banned = banned.with_statuses_of(&refusal, &[*ban_index]),
                Err(error) => self.events.not_banned(&error),
            }
        }
        banned
    }

    /// A refusal as one of a ban, if a ban has refused.
    pub(in super::super) fn of_ban(&self, rejection: Rejection) -> Rejection {
        let Rejection::Limited(decision) = rejection else { return rejection };
        let refusing = || decision.statuses().filter(|status| status.refuses().is_some());
        let refuses = |ban: &Ban| refusing().any(|status| status.limit().is_one_with(&ban.limit));
        match self.limits.iter().find(|limit| limit.ban.as_ref().is_some_and(refuses)) {
            Some(limit) => Rejection::Banned(decision, limit.ban_status.unwrap_or(StatusCode::TOO_MANY_REQUESTS)),
            None => Rejection::Limited(decision),
        }
    }
}
