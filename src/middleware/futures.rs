//! Futures that are polled together, and a future that is completed even if it is dropped.

use std::{
    future::{Future, poll_fn},
    pin::Pin,
    task::{Context, Poll},
};

use tokio::runtime::Handle;

/// The most futures that are polled at once. Each reply polls all of them, and the deadline of those behind them has not begun yet.
const AT_ONCE: usize = 256;

/// Polls many futures at once, and gives each output to `take` with its number. Ends with the last of them, or when `take`
/// returns an error. The futures that have not ended stay in the list.
pub(crate) async fn join<F, E>(
    pending: &mut Vec<(usize, F)>,
    mut take: impl FnMut(usize, F::Output) -> Result<(), E>,
) -> Result<(), E>
where
    F: Future + Unpin,
{
    poll_fn(|cx| {
        let mut place = 0;
        while place < pending.len().min(AT_ONCE) {
            match Pin::new(&mut pending[place].1).poll(cx) {
                Poll::Ready(output) => take(pending.swap_remove(place).0, output)?,
                Poll::Pending => place += 1,
            }
        }
        if pending.is_empty() { Poll::Ready(Ok(())) } else { Poll::Pending }
    })
    .await
}

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
