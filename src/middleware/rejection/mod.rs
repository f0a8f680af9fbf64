//! The response that a rejected request gets instead of the service's response.
//!
//! | rejection | status | headers |
//! |---|---|---|
//! | over a limit | 429 | `Retry-After`, and the [sets](super::HeaderSets) that the layer sends |
//! | cost above the limit, or a limit of 0 units | 429 | neither `Retry-After` nor figures, since waiting does not help |
//! | no key | 400; 401 with `WWW-Authenticate` for API keys; 500 if the server does not know the peer address | |
//! | [banned](super::KeyedLimit::ban) | 429 | as over a limit |
//! | a setup mistake that only a request reveals, such as a body that [cannot hold](crate::guide::at_most_n_at_once#bodies) a concurrent limit's place | 500 | |
//! | [denied](super::RateLimitLayer::deny) | 403 | |
//! | no decision while failing closed, or a cost above the [share](crate::limiter::Share) while failing local | 503 | `Retry-After` of 1 to 5 s, at random so that clients do not all return at once |
//!
//! All these responses have `Cache-Control: no-store`, a [problem details](JsonResponse) body, and
//! the [`Rejection`] in their extensions, so that outer layers see the reason. The response to a
//! `HEAD` request has the same headers, and no content if the crate
//! [knows](crate::guide::at_most_n_at_once#bodies) the body type. If the store has not decided, the
//! extensions also have [`Degraded`](super::Degraded).
//!
//! A refusal has no figures if only [hidden](super::KeyedLimit::hidden) limits refuse, or if the
//! layer [does not send them](super::RateLimitLayer::headers). It still has `Retry-After`.
//!
//! For gRPC clients, use `GrpcResponse`: see [`guide::grpc`](crate::guide::grpc). For any other
//! response, such as plain text, pass a closure to
//! [`respond_with`](super::RateLimitLayer::respond_with). It gets the rejection, and a head with
//! the status and all headers but `Content-Type`. A type that implements [`RejectionResponse`] also
//! gets the request, as in [a page for browsers](crate::guide::recipes#a-page-for-browsers).
//! [`Rejection::detail`] is a sentence for clients. The rejection itself includes hidden limits;
//! [`Decision::visible`](crate::Decision::visible) returns the limit that clients may see.
//!
//! [`JsonResponse`] needs a body that can be made from a `String`. For other bodies, convert the
//! text in a closure: see [`Rejection::problem`].
//!
//! ```
//! use axum::body::Body;
//! use http::Response;
//! use tower_sliding_window::{Limit, MemoryStore, PeerIp, RateLimitLayer, Rejection};
//!
//! let layer = RateLimitLayer::new(MemoryStore::new())
//!     .limit(Limit::per_minute("login", 5).by(PeerIp::new()))
//!     .respond_with(|rejection: &Rejection, head: Response<()>| match rejection {
//!         Rejection::Limited(_) => head.map(|()| Body::from("Slow down, please.")),
//!         _ => head.map(|()| Body::empty()),
//!     });
//! ```
//!
//! With axum, a closure can combine the head with any `IntoResponse` value:
//! `(head, Json(..)).into_response()`.
//!
//! # In a handler
//!
//! With axum, a [`Rejection`] implements `IntoResponse`, so a handler that calls a
//! [`Limiter`](crate::Limiter) can return it. The handler then responds like a layer that fails
//! closed. To go on without a decision, handle the limiter's error instead of passing it on with
//! `?`. [`write_headers`](crate::Decision::write_headers) writes an admission's figures. A layer
//! around the handler keeps the `X-RateLimit-*` from its rejection, with the reset in seconds from
//! now. With tonic, a [`Rejection`] becomes a `Status`: see
//! [`guide::grpc`](crate::guide::grpc#in-a-method).
//!
//! ```
//! use axum::extract::State;
//! use tower_sliding_window::{Limit, Limiter, MemoryStore, Rejection};
//!
//! const REPORTS: Limit = Limit::per_hour("reports", 100);
//!
//! async fn report(State(limiter): State<Limiter>, rows: String) -> Result<&'static str, Rejection> {
//!     // The body is needed to know the cost.
//!     let cost = rows.lines().count() as u64;
//!     match limiter.check(&REPORTS, "everybody", cost).await? {
//!         decision if decision.is_allowed() => Ok("done"),
//!         refusal => Err(Rejection::Limited(refusal)),
//!     }
//! }
//! # use axum::{Router, body::Body, routing::post};
//! # use http::Request;
//! # use tower::ServiceExt;
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let app = Router::new().route("/", post(report)).with_state(Limiter::new(MemoryStore::new()));
//! # let send = |rows: usize| app.clone().oneshot(Request::post("/").body(Body::from("\n".repeat(rows))).unwrap());
//! # assert_eq!(send(60).await?.status(), 200);
//! # let refused = send(60).await?;
//! # assert_eq!((refused.status().as_u16(), &refused.headers()["x-ratelimit-remaining"]), (429, &"40".parse()?));
//! # assert!(!send(101).await?.headers().contains_key("retry-after"));
//! # Ok(()) }
//! ```

#[cfg(feature = "grpc")]
mod grpc;
mod response;

use std::{error, fmt};

use http::{Response, StatusCode};

#[cfg(feature = "grpc")]
pub use self::grpc::{GrpcOr, GrpcResponse};
pub use self::response::{JsonResponse, RejectionResponse};
use super::extract::KeyError;
use crate::{
    decision::Decision,
    error::{ConfigError, Error, NeverFits, StoreErrorKind},
    limit::Limit,
    logging::Chain,
};

/// Why a request did not reach the service. See the [module docs](self).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Rejection {
    /// A limit refused the request. Some methods, such as
    /// [`Limiter::reserve`](crate::Limiter::reserve), return the refusing [`Decision`] as a value:
    /// turn it into an error with `.map_err(Rejection::Limited)?`.
    Limited(Decision),
    /// A [ban](crate::KeyedLimit::ban) refused the request, or a limit refused it and began a ban.
    Banned(Decision),
    /// The request costs more than a limit ever admits.
    NeverFits(NeverFits),
    /// The request has no key.
    NoKey(KeyError),
    /// The request was [denied](crate::RateLimitLayer::deny) by key, address or closure.
    Denied,
    /// The store could not decide, and the layer fails closed. Or the layer fails local, and the
    /// request costs more than the [share](crate::limiter::Share).
    Unavailable(Error),
    /// The server is set up wrongly, and only a request reveals the mistake. For example, an option
    /// has no effect on the [chosen](crate::KeyedLimit::chosen) limit, two limits have the same
    /// identity and key, the response body cannot [hold the
    /// place](crate::guide::at_most_n_at_once#bodies) of a [concurrent](Limit::concurrent) limit,
    /// or a handler resets, reserves or blocks a concurrent limit. The log says what to change.
    NotSetUp(ConfigError),
}

impl Rejection {
    /// The response status.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        match self {
            Self::Limited(_) | Self::Banned(_) | Self::NeverFits(_) => {
                StatusCode::TOO_MANY_REQUESTS
            }
            Self::NoKey(error) => error.status(),
            Self::Denied => StatusCode::FORBIDDEN,
            Self::Unavailable(_) => StatusCode::SERVICE_UNAVAILABLE,
            Self::NotSetUp(_) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// The decision, if a limit or a ban refused the request.
    pub(crate) fn decision(&self) -> Option<&Decision> {
        if let Self::Limited(decision) | Self::Banned(decision) = self {
            Some(decision)
        } else {
            None
        }
    }

    /// Calls `take` with the name of each limit that has refused and is not hidden.
    pub(crate) fn violated_limits<'a>(&'a self, mut take: impl FnMut(&'a str)) {
        if let Self::NeverFits(error) = self
            && !error.is_hidden
        {
            take(error.limit.name());
        }
        let refusing = self.decision().into_iter().flat_map(Decision::refusing);
        for status in refusing.filter(|status| !status.is_hidden()) {
            take(status.limit.name());
        }
    }

    /// The metrics label.
    pub(crate) fn label(&self) -> &'static str {
        match self {
            Self::Limited(_) => "limited",
            Self::Banned(_) => "banned",
            Self::NeverFits(error) if error.limit.units() == 0 => "limited",
            Self::NeverFits(_) => "never_fits",
            // A key error with a 5xx is the server's mistake. Clients cannot cause it, so it is
            // safe to alert on this label.
            Self::NoKey(error) if error.status().is_server_error() => "not_set_up",
            Self::NotSetUp(_) => "not_set_up",
            Self::NoKey(_) => "no_key",
            Self::Denied => "denied",
            Self::Unavailable(_) => "unavailable",
        }
    }
}

/// The rejection of a request without a decision: a 429 for a cost that never fits, a 500 for a
/// setup mistake, and a 503 for any other error.
impl From<Error> for Rejection {
    fn from(error: Error) -> Self {
        match error {
            Error::NeverFits(error) => Self::NeverFits(error),
            // The handler has made a mistake, such as resetting a concurrent limit. Waiting does
            // not help, so this is not a 503.
            Error::Unavailable(error)
                if error.kind == StoreErrorKind::Config && error.is_of_one_check =>
            {
                Self::NotSetUp(ConfigError::new(Chain(&error).to_string()))
            }
            error => Self::Unavailable(error),
        }
    }
}

impl From<NeverFits> for Rejection {
    fn from(error: NeverFits) -> Self {
        Self::NeverFits(error)
    }
}

impl From<KeyError> for Rejection {
    fn from(error: KeyError) -> Self {
        Self::NoKey(error)
    }
}

impl fmt::Display for Rejection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Limited(decision) | Self::Banned(decision) => write!(
                f,
                "over the limit {:?}; retry in {:?}",
                decision.binding().limit.name(),
                decision.retry_after().unwrap_or_default(),
            ),
            Self::NeverFits(error) => error.fmt(f),
            Self::NoKey(error) => error.fmt(f),
            Self::Denied => f.write_str("denied"),
            Self::Unavailable(error) => error.fmt(f),
            Self::NotSetUp(error) => error.fmt(f),
        }
    }
}

impl error::Error for Rejection {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        // The rejection's text already is this error's, so skip to the next cause.
        if let Self::Unavailable(error) = self {
            error.source()
        } else {
            None
        }
    }
}

/// A report in a response's extensions: the [shadow](crate::KeyedLimit::in_shadow) limits that
/// would have refused the request, in all layers that it went through.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ShadowRefusals {
    /// Decisions that contain a shadow refusal: see [`Decision::shadow_refusals`].
    pub decisions: Vec<Decision>,
    /// Limits that could not charge the request and were left out of its check, each with the
    /// rejection that it would have caused. The limit is `None` if none had been
    /// [chosen](crate::KeyedLimit::chosen) yet.
    pub left_out: Vec<(Option<Limit>, Rejection)>,
}

impl ShadowRefusals {
    /// The names of all limits that would have refused the request.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let refusals = self
            .decisions
            .iter()
            .flat_map(Decision::shadow_refusals)
            .map(|status| status.limit.name());
        refusals.chain(
            self.left_out
                .iter()
                .filter_map(|(limit, _)| Some(limit.as_ref()?.name())),
        )
    }

    /// Merges this report with the one that inner layers have left in the response's extensions.
    pub(crate) fn add_to<B>(mut self, response: &mut Response<B>) {
        if let Some(inner) = response.extensions_mut().remove::<Self>() {
            self.decisions.extend(inner.decisions);
            self.left_out.extend(inner.left_out);
        }
        response.extensions_mut().insert(self);
    }
}
