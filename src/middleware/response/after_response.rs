//! The steps between a response and its client: settlements, counts, and blocks that an upstream asks for.

use std::mem;

use super::{
    super::{
        concurrent::{Detachable, join},
        events::Events,
    },
    upstream::BlockRequest,
};
use crate::{
    check::{Charge, Check},
    decision::Decision,
    error::Error,
    key::Key,
    limit::Limit,
    limiter::Limiter,
    settlement::Settlement,
};

/// What has to happen after a response.
pub(super) struct AfterResponse {
    pub(super) admitted: Decision,
    /// One as of the admission, and one as of the response for limits that heed the upstream.
    pub(super) settlements: Vec<Settlement>,
    /// The units to count afterwards, each with the index of the admitted charge.
    pub(super) spent: Vec<(usize, Charge)>,
    pub(super) blocked: Vec<(Limit, Key)>,
    pub(super) block: Option<BlockRequest>,
}

/// What a response waits for, and the decision after the settlements. It goes on if the client leaves, since a client would
/// otherwise leave with units that it has used.
pub(crate) type Settling = Detachable<Option<Decision>>;

impl AfterResponse {
    /// Does all of it, and returns the decision with the statuses after the settlements.
    pub(super) async fn apply(self, limiter: &Limiter, events: &Events) -> Option<Decision> {
        let Self { admitted, settlements, spent, blocked, block } = self;
        let settles = !settlements.is_empty() || !spent.is_empty();
        let settled = if settles { Some(settle(limiter, admitted, settlements, spent).await) } else { None };
        let settled = settled.and_then(|settled| settled.inspect_err(|error| events.not_settled(error)).ok());
        if let Some(request) = block.filter(|_| !blocked.is_empty()) {
            let begin = |(limit, key)| Box::pin(block_if_open(limiter, limit, key, request, events));
            // All at once, so that one that cannot be blocked does not use up the time of the others.
            let mut pending = blocked.into_iter().map(begin).enumerate().collect();
            let mut outcome = Ok(());
            let joined = join(&mut pending, |_, blocked| {
                outcome = mem::replace(&mut outcome, Ok(())).and(blocked);
                Ok::<(), Error>(())
            });
            let joined = limiter.within(joined).await.and_then(|joined| joined);
            if let Err(error) = joined.and(outcome) {
                events.not_blocked(&error);
            }
        }
        settled
    }
}

/// Settles and counts. A settlement that fails does not stop the others.
async fn settle(
    limiter: &Limiter,
    admitted: Decision,
    settlements: Vec<Settlement>,
    spent: Vec<(usize, Charge)>,
) -> Result<Decision, Error> {
    let is_local = admitted.local_cause().is_some();
    let mut settled = Ok(admitted);
    for settlement in settlements {
        let outcome = limiter.settle(settlement).await.map(|settled| settled.decision().clone());
        settled = settled.and(outcome);
    }
    let (indexes, charges): (Vec<_>, Vec<_>) = spent.into_iter().unzip();
    let mut charges = charges.into_iter();
    let Some(first) = charges.next() else { return settled };
    let mut check = Check::new(first);
    charges.for_each(|charge| check.add_distinct(charge));
    let counted = limiter.count(check, is_local).await?;
    settled.map(|decision| decision.with_statuses_of(&counted, &indexes))
}

/// Blocks a limit, unless the upstream only reports that nothing is left and the limit agrees.
async fn block_if_open(
    limiter: &Limiter,
    limit: Limit,
    key: Key,
    request: BlockRequest,
    events: &Events,
) -> Result<(), Error> {
    if !request.is_refusal && limiter.clone().with_share(None).peek(&limit, key.clone()).await?.remaining() == 0 {
        return Ok(());
    }
    events.upstream_blocks(request.time);
    limiter.block(&limit, key, request.time).await
}
