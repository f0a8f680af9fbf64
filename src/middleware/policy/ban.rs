//! Bans: a key that has used up a limit is refused for a time.
//!
//! 1. A ban is an exact log of one unit, which the check of a request only asks for. The unit has the ban's time as its lease.
//! 2. A refusal begins it, whether the store or this process has refused, and so does a count afterwards that leaves nothing.
//! 3. It is taken under one id for all, so that it begins once, however many requests and processes begin it.

use std::time::Duration;

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
    status: StatusCode,
}

impl KeyedLimit {
    /// Bans a key that has used up the limit: for this time, which may be longer than the window, all requests of the key are
    /// refused, by all processes. Default: a key is refused until enough units have left the window.
    ///
    /// The bans are a limit of one unit. Its window is the longest ban: a longer time, here or by hand, is shortened to it.
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
    /// * A refusal by the limit begins the ban. If only [reserved](crate::Charge::reserve) units refuse, or places of a
    ///   [concurrent](Limit::concurrent) limit, it does not. A limit that [settles](Self::settle) or
    ///   [counts afterwards](Self::count_afterwards) bans as soon as its response leaves nothing.
    /// * It lasts for exactly the time from its begin on: requests that are refused meanwhile do not prolong it. Redis keeps its key for
    ///   the window of the ban's limit, which is 365 days at most: the limit of a ban of a century does not compile, or is a `ConfigError`.
    /// * The rejection is [`Rejection::Banned`], also of the request that begins it. Its figures are those of the ban, such as the limit
    ///   `login.ban`. Until then, clients do not see the ban.
    /// * After a ban is lifted, a limit that is still used up begins another at the next refusal.
    ///   [`RateLimitLayer::reset`](crate::RateLimitLayer::reset) resets both.
    /// * A ban concerns the key, in all parts of a [split](Self::split) limit. Limits of a layer that find the same key may have one ban.
    /// * A limit in the [shadow](Self::in_shadow) bans in the shadow, and one that is [hidden](Self::hidden) has a hidden ban.
    /// * Each check also asks for the ban, so it takes no [prefetch](crate::limit::prefetch). While this process decides in the store's
    ///   place, it bans by itself. A ban that the store does not take is logged, and the next refusal begins it.
    ///
    /// # Panics
    ///
    /// If the limit of the bans has more than one unit, or another algorithm than the [log](crate::Algorithm::sliding_log).
    #[must_use]
    #[track_caller]
    pub fn ban(mut self, ban: Limit, time: Duration) -> Self {
        let is_ban = ban.units() == 1 && ban.algorithm() == Algorithm::sliding_log();
        assert!(is_ban, "the limit of bans has one unit, and counts by the exact log");
        self.ban = Some(Ban { limit: ban, time, status: StatusCode::TOO_MANY_REQUESTS });
        self
    }

    /// Sets the status of rejections by the [ban](Self::ban). Default: 429. It has no effect on a limit without a ban.
    #[must_use]
    pub fn ban_status(mut self, status: StatusCode) -> Self {
        self.ban = self.ban.map(|ban| Ban { status, ..ban });
        self
    }

    pub(super) fn ban_name(&self) -> Option<&str> {
        self.ban.as_ref().map(|ban| ban.limit.name())
    }

    /// Whether this status begins the ban.
    fn bans(&self, status: &LimitStatus) -> bool {
        let has_refused = status.retry_after().is_some() && !status.is_refused_by_reservations();
        let settled = status.used().saturating_sub(status.reserved());
        has_refused || self.cost_afterwards.is_some() && settled >= status.limit().units()
    }
}

impl Policy {
    /// The bans that a decision begins.
    pub(super) fn begun<'a>(&self, decision: &Decision, bans: &'a [BanCharge]) -> Vec<&'a BanCharge> {
        let status = |index| decision.statuses().nth(index);
        let begins = |ban: &&BanCharge| {
            let is_banned = status(ban.ban_index).is_none_or(|status| status.retry_after().is_some());
            let limit = self.limits.get(ban.charged.limit_index).zip(status(ban.charged.charge_index));
            !is_banned && limit.is_some_and(|(limit, status)| limit.bans(status))
        };
        bans.iter().filter(begins).collect()
    }

    /// Begins the bans of limits that are used up, and adds them to the decision.
    pub(in super::super) async fn ban(&self, limiter: &Limiter, decision: Decision, bans: &[BanCharge]) -> Decision {
        let mut banned = decision.clone();
        for BanCharge { ban_index, begins, .. } in self.begun(&decision, bans) {
            match limiter.ban(begins.clone(), decision.local_cause().is_some()).await {
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
        let refuses = |ban: &&Ban| refusing().any(|status| status.limit().is_one_with(&ban.limit));
        match self.limits.iter().filter_map(|limit| limit.ban.as_ref()).find(refuses) {
            Some(ban) => Rejection::Banned(decision, ban.status),
            None => Rejection::Limited(decision),
        }
    }
}
