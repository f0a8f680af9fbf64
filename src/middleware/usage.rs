//! Shows and resets what the limits of a layer count for the client of a request.

use std::iter;

use http::request::Parts;

use super::{futures::join, layer::RateLimitLayer, plan::CheckDetails, policy::Policy, rejection::Rejection};
use crate::{
    check::{Charge, Check},
    decision::LimitStatus,
    limiter::{FailureMode, Limiter},
    split::Split,
};

/// The most charges that one check asks for. A check of all parts of a limit could keep the store's
/// server busy for longer than the deadline of other checks.
const AT_ONCE: usize = 64;

/// For each limit of a request: a charge at no cost on the whole limit, and a charge at no cost on
/// each part of the limit. A limit that is not split is its only part.
type Usage = Vec<(Charge, Vec<Charge>)>;

impl<R> RateLimitLayer<R> {
    /// Returns the status of each limit of the layer for the client of a request, and spends
    /// nothing. The layer extracts the keys and chooses the limits as for a request to the service.
    /// Limits that are hidden or in the shadow have a status, too. The status of a
    /// [split](super::KeyedLimit::split) limit is the sum of its parts.
    ///
    /// ```
    /// use axum::extract::State;
    /// use http::request::Parts;
    /// use tower_sliding_window::{RateLimitLayer, Rejection};
    ///
    /// /// What is left for the caller. The state is a clone of the layer of other routes, so that this one costs nothing.
    /// async fn left(State(limits): State<RateLimitLayer>, request: Parts) -> Result<String, Rejection> {
    ///     let limits = limits.peek(&request).await?;
    ///     let lines = limits.iter().filter(|status| !status.is_hidden());
    ///     Ok(lines.map(|status| format!("{}: {}\n", status.limit().name(), status.remaining())).collect())
    /// }
    /// ```
    ///
    /// * A limit that is [chosen](super::KeyedLimit::chosen) as `None` for the request has no
    ///   status. If a limit is chosen by the path, give `request` the path that you ask about.
    /// * A [ban](super::KeyedLimit::ban) has a status of its own. The only unit of the ban's limit
    ///   is used while the ban lasts.
    /// * A request that the layer would deny, exempt or skip gets the same statuses as any other
    ///   request.
    /// * If there are more than 64 limits and parts, `peek` asks the store in several calls, each
    ///   with a deadline of its own.
    /// * The type of a layer whose responder is a closure cannot be written. So clone the layer for
    ///   the state before you call [`respond_with`](Self::respond_with): the layer and the clone
    ///   count the same limits.
    /// * [`guide::choosing_keys`](crate::guide::choosing_keys#show-and-reset-a-client) has a
    ///   handler for the operator.
    ///
    /// # Errors
    ///
    /// [`Rejection::NoKey`] if the request has no key for a limit. [`Rejection::NotSetUp`] if an
    /// option has no effect on a chosen limit. [`Rejection::Unavailable`] if the store does not
    /// answer within the deadline, whatever the failure mode.
    pub async fn peek(&self, request: &Parts) -> Result<Vec<LimitStatus>, Rejection> {
        let (limits, limiter) = self.policy.usage(request)?;
        let mut parts = limits.iter().flat_map(|(_, parts)| parts).cloned();
        let mut statuses = Vec::new();
        while let Some(check) = Check::of_distinct(parts.by_ref().take(AT_ONCE)) {
            statuses.extend(limiter.check_all(check).await?.statuses().cloned());
        }
        let mut statuses = statuses.iter();
        let mut of_parts = |parts: &[Charge]| statuses.by_ref().take(parts.len()).collect::<Vec<_>>();
        Ok(limits.iter().map(|(whole, parts)| LimitStatus::sum(whole, &of_parts(parts))).collect())
    }

    /// Resets the limits of the layer for the client of a request: the limits and keys that
    /// [`peek`](Self::peek) shows, with all parts. Places of a
    /// [concurrent](crate::Limit::concurrent) limit are not reset, since requests still hold these
    /// places. [`Limiter::reset`](crate::Limiter::reset) resets a single limit.
    ///
    /// # Errors
    ///
    /// As for [`peek`](Self::peek). If one limit cannot be reset, the other limits still are.
    pub async fn reset(&self, request: &Parts) -> Result<(), Rejection> {
        let (limits, limiter) = self.policy.usage(request)?;
        // Requests hold places at this moment, so a reset cannot forget the places.
        let parts = limits.iter().flat_map(|(_, parts)| parts).filter(|part| !part.limit().is_concurrent());
        let resets = parts.map(|part| limiter.reset(part.limit(), part.key().clone()));
        let mut failure = None;
        join(resets, |reset| failure = reset.err().or_else(|| failure.take())).await;
        failure.map_or(Ok(()), |error| Err(error.into()))
    }
}

impl Policy {
    /// The limits of a request, and a limiter that asks only the store. If the store fails, this
    /// limiter returns an error, since a share cannot tell what the store has counted.
    fn usage(&self, request: &Parts) -> Result<(Usage, Limiter), Rejection> {
        let details = CheckDetails::of(&self.limits, |limit| limit.whole().draft(request, None))?;
        let whole = details.check.iter().flat_map(Check::charges).map(Charge::without_cost).enumerate();
        let in_parts = whole.map(|(index, whole)| {
            let parts = self.limit_of(&details, index).and_then(|limit| limit.parts);
            let parts = match parts.map(|parts| Split::of_at_most(whole.limit().clone(), parts)) {
                Some(split) => split.keys(whole.key().clone()).map(|key| whole.part(&split.limit, key)).collect(),
                None => iter::once(whole.clone()).collect(),
            };
            (whole, parts)
        });
        Ok((in_parts.collect(), self.limiter.clone().with_failure_mode(FailureMode::Closed)))
    }
}
