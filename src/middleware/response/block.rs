//! Blocks the limits of an upstream that asks for it.

use std::{
    future::{Future, poll_fn},
    mem,
    task::Poll,
};

use super::{
    super::events::{Event, Events},
    upstream::BlockRequest,
};
use crate::{error::Error, key::Key, limit::Limit, limiter::Limiter};

pub(super) struct Block {
    pub(super) limits: Vec<(Limit, Key)>,
    pub(super) request: BlockRequest,
}

impl Block {
    /// Blocks all limits at once, so that one that cannot be blocked does not use up the time of the others.
    pub(super) async fn apply(self, limiter: &Limiter, events: &Events) -> Result<(), Error> {
        let Self { limits, request } = self;
        let mut pending: Vec<_> =
            limits.into_iter().map(|(limit, key)| Box::pin(block(limiter, limit, key, request, events))).collect();
        let mut blocked = Ok(());
        poll_fn(|cx| {
            pending.retain_mut(|blocking| {
                let Poll::Ready(outcome) = blocking.as_mut().poll(cx) else { return true };
                blocked = mem::replace(&mut blocked, Ok(())).and(outcome);
                false
            });
            if pending.is_empty() { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        blocked
    }
}

/// Blocks a limit, unless the upstream only reports that nothing is left and the limit agrees.
async fn block(limiter: &Limiter, limit: Limit, key: Key, request: BlockRequest, events: &Events) -> Result<(), Error> {
    if !request.is_refusal && limiter.clone().with_share(None).peek(&limit, key.clone()).await?.remaining() == 0 {
        return Ok(());
    }
    events.log(Event::UpstreamBlocks(request.time));
    limiter.block(&limit, key, request.time).await
}
