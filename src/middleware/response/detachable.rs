//! A future that is completed even if it is dropped.

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll},
};

use tokio::runtime::Handle;

/// A future that a task of the current runtime completes if it is dropped before its end. Without a runtime it ends there.
/// It needs a deadline of its own, since nothing waits for the task.
pub(crate) struct Detachable<T: 'static> {
    future: Option<Pin<Box<dyn Future<Output = T> + Send>>>,
}

impl<T: 'static> Detachable<T> {
    pub(crate) fn new(future: impl Future<Output = T> + Send + 'static) -> Self {
        Self { future: Some(Box::pin(future)) }
    }
}

impl<T: 'static> Future for Detachable<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        // Put back only while pending, so that a future that panics is not polled again by a task.
        let Some(mut future) = self.future.take() else { return Poll::Pending };
        let polled = future.as_mut().poll(cx);
        if polled.is_pending() {
            self.future = Some(future);
        }
        polled
    }
}

impl<T: 'static> Drop for Detachable<T> {
    fn drop(&mut self) {
        if let Some(future) = self.future.take()
            && let Ok(runtime) = Handle::try_current()
        {
            runtime.spawn(async move { drop(future.await) });
        }
    }
}
