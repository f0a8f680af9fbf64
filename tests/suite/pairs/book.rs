//! The handler of each app, and its book of the requests that have reached it: what the limits say
//! is compared with this.

use std::{
    convert::Infallible,
    sync::{Arc, Mutex},
    time::{Duration, SystemTime},
};

use axum::body::{Body, Bytes};
use futures_util::stream;
use http::{Response, StatusCode, header::RETRY_AFTER};
use tokio::time::{Instant, sleep};
use tower_sliding_window::Decision;

use crate::support::ms;

/// The header of all responses of the handler.
pub(super) const HANDLED: &str = "x-handled";

/// For so long a request, a body or a kept decision lasts that does not end at once.
pub(super) const LASTING: Duration = ms(250);

/// What a request asks of the handler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Doing {
    Reply,
    /// With 204, which costs nothing where costs are known afterwards.
    ReplyFree,
    /// As an upstream that asks its callers to stay away.
    Refuse,
    ReplyLate,
    Stream,
    /// As the task of a WebSocket, after the reply.
    KeepDecision,
}

pub(super) const DOINGS: [Doing; 6] = [
    Doing::Reply,
    Doing::ReplyFree,
    Doing::Refuse,
    Doing::ReplyLate,
    Doing::Stream,
    Doing::KeepDecision,
];

/// What the layer under test has said of a request.
#[derive(Clone, Copy, Debug)]
pub(super) struct Said {
    pub(super) at: SystemTime,
    /// True if this process has decided in the store's place.
    pub(super) is_local: bool,
}

/// A request that has reached the handler.
#[derive(Clone)]
pub(super) struct Visit {
    pub(super) client: String,
    /// `None` if it was let through without a decision.
    pub(super) said: Option<Said>,
    pub(super) began: Instant,
    pub(super) ended: Option<Instant>,
}

#[derive(Clone, Default)]
pub(super) struct Book(Arc<Mutex<Vec<Visit>>>);

/// A visit that has not ended.
struct Inside(Book, usize);

impl Drop for Inside {
    fn drop(&mut self) {
        self.0.0.lock().unwrap()[self.1].ended = Some(Instant::now());
    }
}

impl Book {
    /// `ends_with_head`: whether a body is no longer inside.
    pub(super) async fn handle(
        &self,
        client: String,
        doing: Doing,
        said: Option<Said>,
        decision: Option<Decision>,
        ends_with_head: bool,
    ) -> Response<Body> {
        let inside = self.enter(client, said);
        let mut response = Response::builder().header(HANDLED, "1");
        let mut body = Body::from("handled");
        match doing {
            Doing::Reply => {}
            Doing::ReplyFree => {
                (response, body) = (response.status(StatusCode::NO_CONTENT), Body::empty());
            }
            Doing::Refuse => {
                response = response
                    .status(StatusCode::TOO_MANY_REQUESTS)
                    .header(RETRY_AFTER, "2");
            }
            Doing::ReplyLate => sleep(LASTING).await,
            Doing::Stream => {
                let inside = Some(inside).filter(|_| !ends_with_head);
                body =
                    Body::from_stream(stream::unfold(
                        (0, inside),
                        async |(part, inside)| match part {
                            0 => Some((Ok::<_, Infallible>(Bytes::from("begun")), (1, inside))),
                            _ => {
                                sleep(LASTING).await;
                                None
                            }
                        },
                    ));
                return response.body(body).unwrap();
            }
            // Without a decision there is nothing to keep, and nobody counts the request.
            Doing::KeepDecision => {
                if let Some(decision) = decision {
                    tokio::spawn(async move {
                        sleep(LASTING).await;
                        drop(inside);
                        drop(decision);
                    });
                }
                return response.body(body).unwrap();
            }
        }
        drop(inside);
        response.body(body).unwrap()
    }

    fn enter(&self, client: String, said: Option<Said>) -> Inside {
        let mut visits = self.0.lock().unwrap();
        visits.push(Visit {
            client,
            said,
            began: Instant::now(),
            ended: None,
        });
        Inside(self.clone(), visits.len() - 1)
    }

    pub(super) fn of(&self, client: &str) -> Vec<Visit> {
        self.0
            .lock()
            .unwrap()
            .iter()
            .filter(|visit| visit.client == client)
            .cloned()
            .collect()
    }
}

/// The most of them that have been inside at one moment. What is seen a little late to have ended
/// is not counted.
pub(super) fn most_at_once(visits: &[Visit]) -> usize {
    let slack = ms(20);
    let is_inside = |visit: &&Visit, at| {
        visit.began <= at
            && visit
                .ended
                .is_none_or(|ended| ended.checked_sub(slack).is_some_and(|ended| ended > at))
    };
    visits
        .iter()
        .map(|one| {
            visits
                .iter()
                .filter(|visit| is_inside(visit, one.began))
                .count()
        })
        .max()
        .unwrap_or(0)
}

/// The most of them that a span of this length has admitted.
pub(super) fn most_in(window: Duration, visits: &[Visit]) -> usize {
    let mut times: Vec<SystemTime> = visits
        .iter()
        .filter_map(|visit| Some(visit.said?.at))
        .collect();
    times.sort_unstable();
    let since = |from: usize| {
        times[from..]
            .iter()
            .take_while(|at| at.duration_since(times[from]).unwrap() < window)
            .count()
    };
    (0..times.len()).map(since).max().unwrap_or(0)
}
