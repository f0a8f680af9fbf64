//! Limits that are chosen for each request.

use std::{error, sync::Arc, time::Duration};

use http::request::Parts;
use tokio::time::Instant;

use super::{
    super::{events::Degraded, extract::KeyExtractor, futures::join, rejection::Rejection},
    Decided, Plan, Policy,
    check::CheckDetails,
    keyed_limit::{ChooseLimit, ChosenLimit, DraftCharge, KeyedLimit, LimitFuture},
    time_waited,
};
use crate::{error::Error, key::Key, limit::Limit, limiter::FailureMode};

impl KeyedLimit {
    /// A limit that `choose` chooses for each request: by its plan, tenant or path. The closure reads the request, and its
    /// future may wait for a cache or a database.
    ///
    /// ```
    /// use std::convert::Infallible;
    /// use http::request::Parts;
    /// use tower_sliding_window::{Header, KeyedLimit, Limit};
    ///
    /// const FREE: Limit = Limit::per_hour("calls", 100);
    /// const PRO: Limit = Limit::per_hour("calls", 10_000);
    ///
    /// let calls = KeyedLimit::chosen(Header::new("x-tenant"), |parts: &Parts| {
    ///     let tenant = parts.headers["x-tenant"].clone();
    ///     async move {
    ///         Ok::<_, Infallible>(match tenant.as_bytes() {
    ///             b"us" => None, // no limit
    ///             b"acme" => Some(PRO),
    ///             _ => Some(FREE),
    ///         })
    ///     }
    /// });
    /// ```
    ///
    /// 1. The key comes first: a request without one is rejected before a limit is chosen.
    /// 2. With `None`, only the layer's other limits charge the request. If there are none, it goes through without a decision
    ///    and without figures, unless its key is [banned](Self::ban).
    /// 3. All chosen limits of a layer are chosen at once. Choice and decision share the layer's deadline.
    /// 4. An error, or a choice that is too slow, is [`Error::LimitNotChosen`](crate::Error::LimitNotChosen) and concerns this
    ///    limit alone. Its [fallback](Self::fallback) is charged in its place. Without a fallback, the layer's failure mode
    ///    decides. Fail-open leaves the limit out, and the others decide. Fail-closed and fail-local respond with 503 at once,
    ///    and nothing is charged. A limit in the [shadow](Self::in_shadow) is left out. So don't return an error for a tenant
    ///    that must not get in, since fail-open would let it in: [`deny`](crate::RateLimitLayer::deny) its key, or leave it to
    ///    your authentication.
    /// 5. Limits of one name, window and [`Algorithm`](crate::Algorithm) share the units of a key. So a tenant keeps its used units
    ///    when it moves to another plan. Under another window or algorithm it starts anew.
    /// 6. Two such limits for one key are one limit, as for [`PeerIp`](crate::PeerIp) and [`ClientIp`](crate::ClientIp) without a
    ///    proxy. The one of fewer units is charged, at the larger cost. A limit in the shadow is left out beside one that is not.
    /// 7. No limit is chosen for a request that the layer's other limits are known to refuse: because the
    ///    [refusal cache](crate::Limiter::refusal_cache) remembers it, or because the store
    ///    [decides at once](crate::Store::decide_now), as `MemoryStore` does. So a client that is over a limit by address costs
    ///    about one look-up a second, and one that is [banned](Self::ban), also by this limit, too. All other requests cost one each: keep a cache in `choose`. A layer that
    ///    [waits](crate::RateLimitLayer::wait_up_to) for capacity always chooses.
    /// 8. A choice that panics ends its own request, as a handler that panics does. Nothing is charged for it.
    #[must_use]
    pub fn chosen<E, C, F, L, X>(extractor: E, choose: C) -> Self
    where
        E: KeyExtractor,
        C: Fn(&Parts) -> F + Send + Sync + 'static,
        F: Future<Output = Result<L, X>> + Send + 'static,
        L: Into<Option<Limit>>,
        X: Into<Box<dyn error::Error + Send + Sync>>,
    {
        let choose = move |parts: &Parts| -> LimitFuture {
            let choice = choose(parts);
            Box::pin(async move {
                let chosen = choice.await.map_err(|cause| Error::LimitNotChosen(cause.into().into()));
                chosen.map(Into::into)
            })
        };
        Self::new(None, Some(ChooseLimit::Later(Arc::new(choose))), extractor)
    }

    /// A limit that the request alone tells: by its path or a header, or by a value that the program changes while it runs. The
    /// closure returns a limit, or an `Option` of one; `None` leaves the request without this limit.
    ///
    /// ```
    /// use axum::extract::MatchedPath;
    /// use http::{Method, request::Parts};
    /// use tower_sliding_window::{KeyedLimit, Limit, PeerIp};
    ///
    /// // By method and path. `MatchedPath` is there for all layers of the router, but not outside of it.
    /// let calls = KeyedLimit::chosen_now(PeerIp::new(), |request: &Parts| {
    ///     match (&request.method, request.extensions.get::<MatchedPath>()?.as_str()) {
    ///         (&Method::POST, "/login") => Some(Limit::per_minute("login", 5)),
    ///         (_, "/files/{id}") => Some(Limit::per_minute("files", 60)),
    ///         _ => None,
    ///     }
    /// });
    /// ```
    ///
    /// A limit that changes is a value that the closure reads. [`guide::limits_by_plan`](crate::guide::limits_by_plan#a-limit-that-changes)
    /// has an example.
    ///
    /// Other than with [`chosen`](Self::chosen), the closure runs for each request that has a key. It must not wait. It costs no
    /// future, and it cannot fail, so there is no [fallback](Self::fallback).
    #[must_use]
    pub fn chosen_now<E, C, L>(extractor: E, choose: C) -> Self
    where
        E: KeyExtractor,
        C: Fn(&Parts) -> L + Send + Sync + 'static,
        L: Into<Option<Limit>>,
    {
        Self::new(None, Some(ChooseLimit::Now(Arc::new(move |parts| choose(parts).into()))), extractor)
    }

    /// The limit to charge if no limit can be [chosen](Self::chosen), because the choice fails or is too slow. Default: none,
    /// and the layer's failure mode decides. It has no effect on any other limit.
    ///
    /// ```
    /// use http::request::Parts;
    /// use tower_sliding_window::{Header, KeyedLimit, Limit};
    ///
    /// # async fn plan_of(_: http::HeaderValue) -> Result<Limit, std::io::Error> { Ok(Limit::per_hour("calls", 10_000)) }
    /// // While the database of plans is gone, each tenant has the smallest plan.
    /// let calls = KeyedLimit::chosen(Header::new("x-tenant"), |parts: &Parts| plan_of(parts.headers["x-tenant"].clone()))
    ///     .fallback(Limit::per_hour("calls", 100));
    /// ```
    ///
    /// * It is decided together with the layer's other limits, in every failure mode, and has all options of the limit.
    /// * With the name and the window of the chosen limits, it shares their units: a tenant that has already used more than the
    ///   fallback is refused. With a name of its own it counts apart, so that a window may hold the units of both.
    /// * A cost above it is [`NeverFits`](crate::error::NeverFits), even if the limit that could not be chosen has more units.
    /// * [`Degraded::fallbacks`](crate::middleware::Degraded::fallbacks) in the response's extensions, a log line at most once a second, and
    ///   the [metrics](mod@crate::metrics) report it.
    #[must_use]
    pub fn fallback(mut self, limit: Limit) -> Self {
        if let Some(ChooseLimit::Later(_)) = self.choose {
            self.limit = Some(limit);
        }
        self
    }

    /// The charge under the chosen limit, or under the fallback. An error rejects the request, whatever other limits decide.
    fn charge_chosen(
        &self,
        chosen: ChosenLimit,
        (key, cost): (Key, u64),
        mode: FailureMode,
        unchosen: &mut Option<Degraded>,
    ) -> Result<DraftCharge, Error> {
        let limit = match chosen {
            Ok(limit) => limit,
            Err(error) if self.is_shadow && self.limit.is_none() => {
                return Ok(DraftCharge::LeftOut(None, Rejection::Unavailable(error)));
            }
            Err(error) => {
                Degraded::add_unchosen(unchosen, error.clone(), self.limit.as_ref(), mode);
                if self.limit.is_none() && mode != FailureMode::Open {
                    return Err(error);
                }
                self.limit.clone()
            }
        };
        Ok(self.charge(limit, key, cost)?)
    }
}

impl Policy {
    /// Chooses limits if need be, then decides, or waits in line for capacity. Choice and decision share one deadline.
    pub(super) fn choose_and_decide(
        self: &Arc<Self>,
        mut drafts: Vec<DraftCharge>,
        request: &Parts,
        mode: FailureMode,
    ) -> Plan {
        if let Some(refused) = self.refuse_without_choice(&drafts, mode) {
            return Plan::Decided(refused);
        }
        let (choices, before) = (self.choices(&drafts, request), time_waited(request));
        let policy = Arc::clone(self);
        Plan::Wait(Box::pin(async move {
            let limiter = policy.limiter.clone().with_failure_mode(mode);
            let (begun, mut details) = (Instant::now(), Box::<CheckDetails>::default());
            let chosen = policy.choose(&mut drafts, choices, before, mode, &mut details.unchosen).await;
            let choice = begun.elapsed();
            let mut waited = before.saturating_add(choice);
            let outcome = async {
                chosen?;
                let Some(check) = policy.check(drafts, &mut details)? else { return Ok(None) };
                let decision = match policy.max_wait {
                    Some(max_wait) => limiter.acquire_after(check, max_wait, &mut waited).await?,
                    None => limiter.decide(check, &mut waited).await?,
                };
                let is_local = decision.local_cause().is_some();
                Ok(Some(policy.ban(&limiter, decision, &details.bans, is_local).await))
            };
            let outcome = outcome.await;
            Decided { outcome, mode, details: Some(details), waited: waited.saturating_sub(choice) }
        }))
    }

    /// The choices that may take a while, each with the number of its limit.
    pub(super) fn choices(&self, drafts: &[DraftCharge], request: &Parts) -> Vec<(usize, LimitFuture)> {
        let limits = self.limits.iter().zip(drafts).enumerate();
        let to_choose = limits.filter(|(_, (_, draft))| matches!(draft, DraftCharge::ToChoose(..)));
        to_choose.filter_map(|(index, (limit, _))| Some((index, limit.choose_later(request)?))).collect()
    }

    /// The refusal by the limits that need no choice, if that is known at once: then no limit is chosen. A layer that waits
    /// for capacity always chooses.
    fn refuse_without_choice(&self, drafts: &[DraftCharge], mode: FailureMode) -> Option<Decided> {
        let is_unchosen = |draft: &_| matches!(draft, DraftCharge::ToChoose(..));
        if self.max_wait.is_some() || !drafts.iter().any(is_unchosen) {
            return None;
        }
        let mut details = Box::<CheckDetails>::default();
        details.add(drafts.iter().cloned()).ok()?;
        let check = details.check.take()?;
        let refusal = self.limiter.refuse_now(&check)?;
        // It begins once the store is asked.
        if !self.begun(&refusal, &details.bans).is_empty() {
            return None;
        }
        details.partition_keys = self.partition_keys_of(&check);
        Some(Decided { outcome: Ok(Some(refusal)), mode, details: Some(details), waited: Duration::ZERO })
    }

    /// Chooses all limits at once, within what is left of the deadline, and makes their charges. `mode` is for a limit without
    /// a fallback that cannot be chosen.
    pub(super) async fn choose(
        &self,
        drafts: &mut [DraftCharge],
        mut choices: Vec<(usize, LimitFuture)>,
        waited: Duration,
        mode: FailureMode,
        unchosen: &mut Option<Degraded>,
    ) -> Result<(), Error> {
        let mut charge = |index: usize, chosen: ChosenLimit| {
            if let (Some(limit), Some(draft)) = (self.limits.get(index), drafts.get_mut(index))
                && let DraftCharge::ToChoose(_, key, cost) = draft
            {
                *draft = limit.charge_chosen(chosen, (key.clone(), *cost), mode, unchosen)?;
            }
            Ok(())
        };
        let deadline = match self.limiter.within(join(&mut choices, &mut charge), waited).await {
            Err(Error::TimedOut { deadline, .. }) => deadline,
            chosen => return chosen?,
        };
        let cause = format!("choosing a limit took longer than {deadline:?}");
        let cause = Arc::from(Box::<dyn error::Error + Send + Sync>::from(cause));
        choices.into_iter().try_for_each(|(index, _)| charge(index, Err(Error::LimitNotChosen(Arc::clone(&cause)))))
    }
}
