//! The breaker: a store that has failed several times in a row gets only probes, until it replies again.

mod hanging_server;
mod probing;
mod shared;

use std::{
    future::Future,
    pin::pin,
    task::{Context, Poll, Waker},
    time::Duration,
};

use tower_sliding_window::{Error, Limit, Limiter};

use crate::support::switched::{State, Switched};

const CALLS: Limit = Limit::per_hour("calls", 1_000_000);
const INTERVAL: Duration = Duration::from_millis(200);

/// The time of a machine that is busy.
const SLACK: Duration = Duration::from_secs(5);

/// The answer that comes without any waiting: no timer, no other task.
fn at_once<F: Future>(future: F) -> F::Output {
    match pin!(future).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => output,
        Poll::Pending => panic!("it makes its caller wait"),
    }
}

/// A limiter on a store that has just failed often enough.
async fn limiter_with_open_breaker(state: State) -> (Limiter<Switched>, Switched) {
    let store = Switched::new(state);
    let limiter = Limiter::new(store.clone());
    for _ in 0..5 {
        let error = limiter.check(&CALLS, "ada", 1).await.unwrap_err();
        assert!(matches!(error, Error::Unavailable(_) | Error::TimedOut { .. }));
    }
    assert_eq!(store.asked(), 5);
    (limiter, store)
}

fn is_open(limiter: &Limiter<Switched>) -> bool {
    matches!(at_once(limiter.check(&CALLS, "ada", 1)), Err(Error::BreakerOpen(_)))
}
