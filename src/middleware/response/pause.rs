//! Pauses the limits of an upstream that asks for it.

use std::{
    future::{Future, poll_fn},
    mem,
    task::Poll,
};

use super::{
    super::events::{Event, Events},
    upstream::PauseRequest,
};
use crate::{error::Error, key::Key, limit::Limit, limiter::Limiter};

pub(super) struct Pause {
    pub(super) limits: Vec<(Limit, Key)>,
    pub(super) request: PauseRequest,
}

impl Pause {
    /// Pauses all limits at once, so that one that cannot be paused does not use up the time of the others.
    pub(super) async fn apply(self, limiter: &Limiter, events: &Events) -> Result<(), Error> {
        let Self { limits, request } = self;
        let mut pending: Vec<_> =
            limits.into_iter().map(|(limit, key)| Box::pin(pause(limiter, limit, key, request, events))).collect();
        let mut paused = Ok(());
        poll_fn(|cx| {
            pending.retain_mut(|pausing| {
                let Poll::Ready(outcome) = pausing.as_mut().poll(cx) else { return true };
                paused = mem::replace(&mut paused, Ok(())).and(outcome);
                false
            });
            if pending.is_empty() { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
        paused
    }
}

/// Pauses a limit, unless the upstream only reports that nothing is left and the limit agrees.
async fn pause(limiter: &Limiter, limit: Limit, key: Key, request: PauseRequest, events: &Events) -> Result<(), Error> {
    if !request.is_refusal && limiter.clone().with_share(None).peek(&limit, key.clone()).await?.remaining() == 0 {
        return Ok(());
    }
    events.log(Event::UpstreamPauses(request.time));
    limiter.pause(&limit, key, request.time).await
}
