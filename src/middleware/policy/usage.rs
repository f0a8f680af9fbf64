//! How the limits of a layer stand for the client of a request, and their reset.

use std::iter;

use http::request::Parts;

use super::{
    super::{futures::join, rejection::Rejection},
    CheckDetails, Policy,
};
use crate::{
    check::{Charge, Check},
    decision::LimitStatus,
    limiter::{FailureMode, Limiter},
    split::Split,
};

/// The most charges that one check asks for. A check of all parts could keep a server from others for longer than their deadline.
const AT_ONCE: usize = 64;

/// A charge at no cost to each limit of a request, and the charges to its parts, or to itself if it is whole.
type Usage = Vec<(Charge, Vec<Charge>)>;

impl Policy {
    pub(in super::super) async fn peek(&self, request: &Parts) -> Result<Vec<LimitStatus>, Rejection> {
        let (limits, limiter) = (self.usage(request)?, self.store_alone());
        let mut parts = limits.iter().flat_map(|(_, parts)| parts).cloned();
        let mut statuses = Vec::new();
        while let Some(check) = Check::of_distinct(parts.by_ref().take(AT_ONCE)) {
            statuses.extend(limiter.check_all(check).await?.statuses().cloned());
        }
        let mut statuses = statuses.iter();
        let mut of_parts = |parts: &[Charge]| statuses.by_ref().take(parts.len()).collect::<Vec<_>>();
        Ok(limits.iter().map(|(whole, parts)| LimitStatus::sum(whole, &of_parts(parts))).collect())
    }

    pub(in super::super) async fn reset(&self, request: &Parts) -> Result<(), Rejection> {
        let (limits, limiter) = (self.usage(request)?, self.store_alone());
        // Held places are no figures of the past.
        let parts = limits.iter().flat_map(|(_, parts)| parts).filter(|part| !part.limit().is_concurrent());
        let resets = parts.map(|part| limiter.reset(part.limit(), part.key().clone()));
        let mut failure = None;
        join(resets, |reset| failure = reset.err().or_else(|| failure.take())).await;
        failure.map_or(Ok(()), |error| Err(error.into()))
    }

    fn usage(&self, request: &Parts) -> Result<Usage, Rejection> {
        let drafts = self.limits.iter().map(|limit| limit.whole_at_no_cost().draft(request, 0));
        let details = CheckDetails::of(drafts)?;
        let whole = details.check.iter().flat_map(Check::charges).map(Charge::without_cost).enumerate();
        let in_parts = whole.map(|(index, whole)| {
            let limit = details.charged.iter().find(|charged| charged.charge_index == index);
            let split = limit.and_then(|charged| self.limits.get(charged.limit_index)?.parts);
            let parts = match split.map(|parts| Split::of_at_most(whole.limit().clone(), parts)) {
                Some(split) => split.keys(whole.key().clone()).map(|key| whole.part(split.limit(), key)).collect(),
                None => iter::once(whole.clone()).collect(),
            };
            (whole, parts)
        });
        Ok(in_parts.collect())
    }

    /// A store that fails is an error, and no share tells how its limits stand.
    fn store_alone(&self) -> Limiter {
        self.limiter.clone().with_failure_mode(FailureMode::Closed)
    }
}
