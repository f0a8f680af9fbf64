//! A rejection that a handler of axum or tonic returns.

use std::sync::LazyLock;

use super::{
    super::{events::Events, rejection::Rejection},
    degraded::Degraded,
};
use crate::{limiter::FailureMode, metrics};

/// The default response of a layer that fails closed, with the same [`Degraded`], log lines and metrics. It has
/// the default [sets of headers](crate::HeaderSets).
#[cfg(feature = "axum")]
impl axum::response::IntoResponse for Rejection {
    fn into_response(self) -> axum::response::Response {
        use super::super::{
            headers::{Figures, HeaderSets},
            rejection::JsonResponse,
        };

        let degraded = report(&self);
        let figures = self.decision().map(|decision| Figures::of(HeaderSets::default(), decision, Vec::new));
        let head = self.head(figures.as_ref());
        let mut response: axum::response::Response = JsonResponse::problem(&self, head);
        response.extensions_mut().insert(self);
        if let Some(degraded) = degraded {
            response.extensions_mut().insert(degraded);
        }
        response
    }
}

/// The status of a [`GrpcResponse`](crate::GrpcResponse) of a layer that fails closed, with the same log lines and metrics. It
/// has no `x-ratelimit-*`.
#[cfg(feature = "grpc")]
impl From<Rejection> for tonic::Status {
    fn from(rejection: Rejection) -> Self {
        report(&rejection);
        rejection.to_grpc(rejection.head(None).into_parts().0.headers)
    }
}

/// Logs and counts a rejection, as a layer does.
fn report(rejection: &Rejection) -> Option<Degraded> {
    /// Shared by all handlers of the process.
    static EVENTS: LazyLock<Events> = LazyLock::new(Events::default);

    rejection.log(&EVENTS);
    metrics::rejected(rejection.label(), EVENTS.layer());
    match rejection {
        Rejection::Unavailable(error) => {
            Some(Degraded::undecided(error, FailureMode::Closed, &EVENTS, &|| "a handler's".to_owned()))
        }
        _ => None,
    }
}
