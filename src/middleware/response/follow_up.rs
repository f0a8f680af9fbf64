//! The follow-up of an admitted request: the settlements, blocks and reports that its response may
//! need.

use std::{
    future::{Future, poll_fn},
    sync::Arc,
    task::Poll,
    time::{Duration, SystemTime},
};

use http::response;

use super::{
    super::{
        events::Events,
        plan::{CheckDetails, time_waited},
        policy::{Exchange, Policy},
    },
    upstream::{BlockRequest, block_request},
};
use crate::{
    check::{Charge, Check},
    decision::{Decision, Settlement},
    error::Error,
    key::Key,
    limit::Limit,
    limiter::{Deadline, FailureMode, Limiter},
    local::Detachable,
};

/// The settlements and blocks that a response waits for, and the decision after them. They go on
/// if the deadline passes or the client leaves. Otherwise a client could avoid the count of its
/// units by leaving before the settlements.
pub(crate) type Settling = Deadline<Detachable<Option<Decision>>>;

/// A call to an upstream counts as of its response, since the upstream may count the call that
/// late. But the call counts at most a tenth of the window later than its admission. So the delay
/// costs at most a tenth of the throughput.
const MAX_DELAY_DIVISOR: u32 = 10;

/// The precision of stores.
const MICRO: Duration = Duration::from_micros(1);

impl Policy {
    /// Begins the settlements and blocks that this response needs. `None` if the response needs
    /// none.
    pub(super) fn follow_up(
        self: &Arc<Self>,
        details: &CheckDetails,
        admitted: &Decision,
        response: &response::Parts,
    ) -> Option<Settling> {
        let waited = time_waited(&response.extensions);
        let check = details.check.as_ref()?;
        let heeds = self.limits.iter().any(|limit| limit.heeds_upstream);
        let block = heeds
            .then(|| block_request(response.status, &response.headers, SystemTime::now()))
            .flatten();
        // For each charge: the cost to settle, if there is one, and the delay, if the charged limit
        // heeds the upstream. With a delay, the cost counts as of the admission plus the delay.
        let mut costs = Vec::<(Option<u64>, Option<Duration>)>::new();
        let mut spent = Vec::new();
        let mut blocked = Vec::new();
        for ((index, charge), status) in check.charges().enumerate().zip(admitted.statuses()) {
            let limit = self.limit_of(details, index);
            let heeds_upstream = limit.is_some_and(|limit| limit.heeds_upstream);
            // A limit in the shadow that would have refused has counted nothing.
            let has_counted = status.retry_after().is_none() && charge.cost() > 0;
            let cost = limit.filter(|_| has_counted).map(|limit| {
                match (limit.cost_afterwards(), &details.request) {
                    (Some(cost), Some(request)) => cost(&Exchange {
                        request,
                        response,
                        cost: charge.cost(),
                    }),
                    _ => charge.cost(),
                }
            });
            if let Some(units @ 1..) = cost.filter(|_| charge.takes_nothing()) {
                // The status has the limit that was charged. If this process has decided, the
                // charged limit is a share of the layer's limit.
                spent.push((index, charge.as_spent(status.limit.clone(), units)));
            }
            let lease = charge.lease().filter(|_| has_counted);
            let settled = cost.filter(|_| lease.is_some());
            // The delay shortens the lease in the settlement. At least a microsecond of the lease
            // remains, so that the store still sees whether the lease has ended.
            let delay = lease.filter(|_| heeds_upstream);
            let delay = delay.map(|lease| {
                (charge.limit().window() / MAX_DELAY_DIVISOR).min(lease.saturating_sub(MICRO))
            });
            if let Some(block) = block.filter(|_| heeds_upstream && !charge.is_shadow()) {
                // A refusal by the upstream blocks the charged key. Any other response blocks the
                // charged key only if units were left at the admission, or if the settlement gives
                // units back.
                let gives_back = settled.is_some_and(|cost| cost < charge.cost());
                if block.is_refusal || status.remaining() > 0 || gives_back {
                    blocked.push((charge.limit().clone(), charge.key().clone(), block));
                }
            }
            costs.push((settled, delay));
        }
        // A charge is settled even if its cost does not change. Until the settlement, the units of
        // the charge may be given back, so refusals of other requests have a short retry time.
        let settlement = |is_delayed: bool| {
            let mut costs = costs.iter();
            let cost = |_: &Charge| {
                costs
                    .next()
                    .filter(|(_, delay)| delay.is_some() == is_delayed)?
                    .0
            };
            Settlement::new(check.clone(), admitted, cost)
        };
        let at_admission = costs
            .iter()
            .any(|(cost, delay)| delay.is_none() && cost.is_some());
        let at_admission = at_admission.then(|| settlement(false));
        let delay = costs.iter().filter_map(|(_, delay)| *delay).min();
        let at_response = delay.map(|delay| settlement(true).counting_later_by(delay));
        let settlements: Vec<_> = at_admission.into_iter().chain(at_response).collect();
        let settles = !settlements.is_empty() || !spent.is_empty();
        if !settles && blocked.is_empty() {
            return None;
        }
        let policy = Arc::clone(self);
        let is_local = admitted.local_cause().is_some();
        let admitted = admitted.clone().without_places();
        let charged = details.charged.clone();
        let follow_up = self.limiter.detachable(async move {
            let Self {
                limiter, events, ..
            } = &*policy;
            let settled = if settles {
                Some(settle(limiter, admitted, settlements, spent, is_local).await)
            } else {
                None
            };
            let settled = settled
                .and_then(|settled| settled.inspect_err(|error| events.not_settled(error)).ok());
            block_all(limiter, events, blocked).await;
            Some(policy.ban(limiter, settled?, &charged, is_local).await)
        });
        Some(self.limiter.within(follow_up, waited))
    }
}

/// Makes all settlements, and counts the `spent` units. If a settlement fails, the other
/// settlements and the count still go on.
async fn settle(
    limiter: &Limiter,
    admitted: Decision,
    settlements: Vec<Settlement>,
    spent: Vec<(usize, Charge)>,
    is_local: bool,
) -> Result<Decision, Error> {
    let mut settled = Ok(admitted);
    for settlement in settlements {
        let outcome = limiter
            .settle(settlement)
            .await
            .map(|settled| settled.decision);
        settled = settled.and(outcome);
    }
    let (indexes, charges): (Vec<_>, Vec<_>) = spent.into_iter().unzip();
    let Some(check) = Check::of_distinct(charges.into_iter()) else {
        return settled;
    };
    let counted = limiter.count(check, is_local).await?;
    settled.map(|decision| decision.with_statuses_of(&counted, &indexes))
}

/// Blocks all limits at the same time. If the limits were blocked one after the other, a limit that
/// cannot be blocked would use up the deadline of the other limits.
async fn block_all(limiter: &Limiter, events: &Events, blocked: Vec<(Limit, Key, BlockRequest)>) {
    if blocked.is_empty() {
        return;
    }
    let open = limiter.clone().with_failure_mode(FailureMode::Open);
    let block = async |(limit, key, request): (Limit, Key, BlockRequest)| {
        // If the upstream has not refused, but reports that nothing is left, the limit needs a
        // block only if the limit has units left.
        if request.is_refusal || open.peek(&limit, key.clone()).await?.remaining() > 0 {
            events.upstream_blocks(request.time.min(limit.window()));
            limiter.block(&limit, key, request.time).await?;
        }
        Ok(())
    };
    let mut blocks: Vec<_> = blocked
        .into_iter()
        .map(|blocked| Box::pin(block(blocked)))
        .collect();
    poll_fn(|cx| {
        blocks.retain_mut(|block| match block.as_mut().poll(cx) {
            Poll::Ready(outcome) => {
                outcome.unwrap_or_else(|error: Error| events.not_blocked(&error));
                false
            }
            Poll::Pending => true,
        });
        if blocks.is_empty() {
            Poll::Ready(())
        } else {
            Poll::Pending
        }
    })
    .await;
}
