//! The follow-up to an admitted request: the settlements, blocks and reports that its response may
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

/// The settlements and blocks that a response waits for, and the decision after them. They continue
/// if the deadline passes or the client leaves. Otherwise a client could escape the charge by
/// leaving first.
pub(crate) type Settling = Deadline<Detachable<Option<Decision>>>;

/// A call to an upstream counts from its response, since the upstream may count it that late. The
/// delay is at most a tenth of the window, so it costs at most a tenth of the throughput.
const MAX_DELAY_DIVISOR: u32 = 10;

/// The precision of times in stores.
const MICRO: Duration = Duration::from_micros(1);

impl Policy {
    /// Begins the settlements and blocks that this response needs. `None` if there are none.
    pub(super) fn follow_up(
        self: &Arc<Self>,
        details: &CheckDetails,
        admitted: &Decision,
        response: &response::Parts,
    ) -> Option<Settling> {
        let waited = time_waited(&response.extensions);
        let check = details.check.as_ref()?;
        let heeds = self.limits.iter().any(|limit| limit.heeds_upstream);
        let block = if heeds {
            block_request(response.status, &response.headers, SystemTime::now())
        } else {
            None
        };
        // The costs to settle, one per charge. They count from the admission. Under limits that
        // heed the upstream, they count from the admission plus the delay.
        let mut at_admission = vec![None; check.charges().count()];
        let mut at_response = at_admission.clone();
        let mut delay: Option<Duration> = None;
        let mut spent = Vec::new();
        let mut blocked = Vec::new();
        for ((index, charge), status) in check.charges().enumerate().zip(admitted.statuses()) {
            let Some(limit) = self.limit_of(details, index) else {
                continue;
            };
            let mut gives_back = false;
            // A shadow limit that would have refused has not counted anything.
            if status.retry_after().is_none() && charge.cost() > 0 {
                let cost = match (limit.cost_afterwards(), &details.request) {
                    (Some(cost), Some(request)) => cost(&Exchange {
                        request,
                        response,
                        cost: charge.cost(),
                    }),
                    _ => charge.cost(),
                };
                if charge.takes_nothing() && cost > 0 {
                    // The status has the limit that was charged. If this process has decided, that
                    // is a share of the layer's limit.
                    spent.push((index, charge.as_spent(status.limit.clone(), cost)));
                }
                // The charge is settled even if its cost does not change. Until then, its units may
                // be given back, so other requests' refusals have a short retry time.
                if let Some(lease) = charge.lease() {
                    gives_back = cost < charge.cost();
                    if limit.heeds_upstream {
                        at_response[index] = Some(cost);
                        // The delay shortens the lease in the settlement. At least a microsecond
                        // remains, so that the store still sees whether the lease has ended.
                        let most = lease.saturating_sub(MICRO);
                        let own = (charge.limit().window() / MAX_DELAY_DIVISOR).min(most);
                        delay = Some(delay.map_or(own, |delay| delay.min(own)));
                    } else {
                        at_admission[index] = Some(cost);
                    }
                }
            }
            // A refusal by the upstream blocks the charged key. Any other response blocks it only
            // if units were left at the admission, or if the settlement gives some units back.
            if let Some(block) = block
                && limit.heeds_upstream
                && !charge.is_shadow()
                && (block.is_refusal || status.remaining() > 0 || gives_back)
            {
                blocked.push((charge.limit().clone(), charge.key().clone(), block));
            }
        }
        let mut settlements = Vec::new();
        if at_admission.iter().any(Option::is_some) {
            settlements.push(Settlement::of_costs(check.clone(), admitted, at_admission));
        }
        if let Some(delay) = delay {
            let settlement = Settlement::of_costs(check.clone(), admitted, at_response);
            settlements.push(settlement.counting_later_by(delay));
        }
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

/// Makes all settlements, and counts the `spent` units. If a settlement fails, the others are still
/// made.
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

/// Blocks all limits concurrently. If they were blocked in turn, a limit that cannot be blocked
/// would use up the deadline for the others.
async fn block_all(limiter: &Limiter, events: &Events, blocked: Vec<(Limit, Key, BlockRequest)>) {
    if blocked.is_empty() {
        return;
    }
    let open = &limiter.clone().with_failure_mode(FailureMode::Open);
    let mut blocks = Vec::with_capacity(blocked.len());
    for (limit, key, request) in blocked {
        blocks.push(Box::pin(async move {
            // If the upstream has not refused but reports nothing left, a block is needed only if
            // the limit has units left.
            if request.is_refusal || open.peek(&limit, key.clone()).await?.remaining() > 0 {
                events.upstream_blocks(request.time.min(limit.window()));
                limiter.block(&limit, key, request.time).await?;
            }
            Ok(())
        }));
    }
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
