//! A rejection that an axum handler returns.

use std::sync::LazyLock;

use axum::response::{IntoResponse, Response};

use super::{
    super::{
        events::Events,
        headers::XRateLimit,
        rejection::{JsonResponse, Rejection},
    },
    degraded::Degraded,
};
use crate::limiter::FailureMode;

/// The default response of a layer that fails closed, with the same [`Degraded`], log lines and metrics. Its reset is in
/// [seconds from now](crate::ResetFormat::DeltaSeconds), or in the format of the layer around it.
impl IntoResponse for Rejection {
    fn into_response(self) -> Response {
        /// Shared by all handlers of the process.
        static EVENTS: LazyLock<Events> = LazyLock::new(Events::default);

        self.log(&EVENTS);
        let degraded = match &self {
            Self::Unavailable(error) => {
                Some(Degraded::undecided(error, FailureMode::Closed, &EVENTS, &|| "a handler's".to_owned()))
            }
            _ => None,
        };
        let head = self.head(Some(&XRateLimit::default()));
        let mut response: Response = JsonResponse::problem(&self, head);
        response.extensions_mut().insert(self);
        if let Some(degraded) = degraded {
            response.extensions_mut().insert(degraded);
        }
        response
    }
}
