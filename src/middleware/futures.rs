//! Futures that are polled together.

use std::{
    future::{Future, poll_fn},
    task::Poll,
};

/// The most futures that are polled at once, since each reply polls all of them. The other futures
/// lose no time, since the deadline of a future begins when the future is first polled.
const AT_ONCE: usize = 256;

/// Polls many futures at once, and gives each output to `take`. Ends when all futures have ended.
pub(crate) async fn join<F: Future>(futures: impl Iterator<Item = F>, mut take: impl FnMut(F::Output)) {
    let mut pending: Vec<_> = futures.map(Box::pin).collect();
    poll_fn(|cx| {
        let mut place = 0;
        while place < pending.len().min(AT_ONCE) {
            match pending[place].as_mut().poll(cx) {
                Poll::Ready(output) => {
                    drop(pending.swap_remove(place));
                    take(output);
                }
                Poll::Pending => place += 1,
            }
        }
        if pending.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}
