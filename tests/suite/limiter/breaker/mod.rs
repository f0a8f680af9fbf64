//! The breaker: a store that has failed several times in a row gets only probes, until it replies
//! again.

mod hanging_server;
mod probing;
mod shared;

use std::{
    future::Future,
    pin::pin,
    task::{Context, Poll, Waker},
    time::Duration,
};

use tower_sliding_window::{
    Error, Limit, Limiter,
    testing::{Fault, FaultyStore},
};

use crate::support::stores::with_fault;

const CALLS: Limit = Limit::per_hour("calls", 1_000_000);
const INTERVAL: Duration = Duration::from_millis(200);

/// Slack for a busy machine.
const SLACK: Duration = Duration::from_secs(5);

/// The output of a future that is ready at its first poll, without a timer or another task.
fn at_once<F: Future>(future: F) -> F::Output {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => output,
        Poll::Pending => panic!("the future is not ready"),
    }
}

/// A limiter on a store that has failed often enough to open the breaker.
async fn limiter_with_open_breaker(fault: Fault) -> (Limiter, FaultyStore) {
    let store = with_fault(fault);
    let limiter = Limiter::new(store.clone());
    for _ in 0..5 {
        let error = limiter.check(&CALLS, "ada", 1).await.unwrap_err();
        assert!(matches!(
            error,
            Error::Unavailable(_) | Error::TimedOut { .. }
        ));
    }
    assert_eq!(store.calls(), 5);
    (limiter, store)
}

fn is_open(limiter: &Limiter) -> bool {
    matches!(
        at_once(limiter.check(&CALLS, "ada", 1)),
        Err(Error::BreakerOpen(_))
    )
}
