//! Work that goes on when the response future is dropped.

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll},
};

use tokio::runtime::Handle;

type Boxed<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// A future that is handed to a task of the current runtime if it is dropped before its end. Without a runtime it ends
/// there. It has a deadline of its own, since nobody waits for the task.
pub(super) struct Errand<T: 'static> {
    future: Option<Boxed<T>>,
    goes_on: bool,
}

impl<T: 'static> Errand<T> {
    pub(super) fn new(future: impl Future<Output = T> + Send + 'static) -> Self {
        Self { future: Some(Box::pin(future)), goes_on: true }
    }

    /// One that ends where it is dropped, as futures do.
    pub(super) fn given_up_when_dropped(future: Boxed<T>) -> Self {
        Self { future: Some(future), goes_on: false }
    }

    /// There is nothing to be done any more.
    pub(super) fn call_off(&mut self) {
        self.future = None;
    }
}

impl<T: 'static> Future for Errand<T> {
    type Output = T;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<T> {
        // A future that panics has ended, too: so it is back only where it is not ready.
        let Some(mut future) = self.future.take() else { return Poll::Pending };
        let polled = future.as_mut().poll(cx);
        if polled.is_pending() {
            self.future = Some(future);
        }
        polled
    }
}

impl<T: 'static> Drop for Errand<T> {
    fn drop(&mut self) {
        if let Some(future) = self.future.take().filter(|_| self.goes_on)
            && let Ok(runtime) = Handle::try_current()
        {
            runtime.spawn(async move { drop(future.await) });
        }
    }
}
