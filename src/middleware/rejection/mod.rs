//! What a client gets instead of the service's response.
//!
//! | rejection | status | headers |
//! |---|---|---|
//! | over a limit | 429 | `Retry-After`, `X-RateLimit-*` |
//! | cost above the limit | 429 | none of these: waiting does not help |
//! | no key | 400; 401 for API keys, with `WWW-Authenticate`; 500 if the server does not know its peers | |
//! | on a list of [denied](super::RateLimitLayer::deny) keys | 403 | |
//! | no decision, or no limit to be chosen, failing closed; a cost above the [share](crate::Share), failing local | 503 | `Retry-After` of 1 to 5 s, drawn at random so that clients do not return all at once |
//!
//! A refusal by [hidden](super::KeyedLimit::hidden) limits alone has no `X-RateLimit-*`, and neither has that of a layer that
//! does not send [these](super::RateLimitLayer::headers). `Retry-After` is no figure, but what a 429 or 503 means, and is
//! sent all the same.
//!
//! All have `Cache-Control: no-store`, a short JSON body, and the [`Rejection`] in the response's extensions, where
//! outer layers find the reason. Where the store has not decided, [`Degraded`](super::Degraded) is there as well.
//!
//! A closure given to [`RateLimitLayer::on_rejection`](super::RateLimitLayer::on_rejection) makes the response. It gets
//! status and headers ready-made, all but `Content-Type`, and keeps of them what it wants. The rejection also tells it of
//! hidden limits; [`Decision::visible`](crate::Decision::visible) is what a client may know.
//!
//! ```
//! use axum::body::Body;
//! use tower_sliding_window::{Limit, MemoryStore, PeerIp, RateLimitLayer, Rejection};
//!
//! let layer = RateLimitLayer::new(MemoryStore::new())
//!     .limit(Limit::per_minute("login", 5).by(PeerIp::new()))
//!     .on_rejection(|rejection, head| match rejection {
//!         Rejection::Limited(_) => head.map(|()| Body::from("Slow down, please.")),
//!         _ => head.map(|()| Body::empty()),
//!     });
//! ```
//!
//! With axum, what has a head and a part that is a response is a response: `(head, Json(..)).into_response()`.
//!
//! A handler that asks a [`Limiter`](crate::Limiter) itself answers as a layer does that fails closed, if it returns its
//! rejection: with axum, that is a response, the default one, with the same log lines. A layer around it leaves its figures
//! as they are, but for the [format](super::RateLimitLayer::reset_format) of the reset. What the store cannot decide, a handler that wants to go on without a decision looks at instead of handing it
//! on with `?`; of an admission, [`write_headers`](crate::Decision::write_headers) tells the client.
//!
//! ```
//! use axum::extract::State;
//! use tower_sliding_window::{Limit, Limiter, MemoryStore, Rejection};
//!
//! const REPORTS: Limit = Limit::per_hour("reports", 100);
//!
//! async fn report(State(limiter): State<Limiter<MemoryStore>>, rows: String) -> Result<&'static str, Rejection> {
//!     // What it costs is known once the body is.
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

mod response;

use std::{error, fmt};

use http::StatusCode;

pub use self::response::{JsonResponse, RejectionResponse};
use super::extract::KeyError;
use crate::{check::NeverFits, decision::Decision, error::Error};

/// Why a request did not reach the service. See the [module docs](self).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Rejection {
    /// A limit refused it. Of a refusal that is a value of its own, this makes an error: `.map_err(Rejection::Limited)?`.
    Limited(Decision),
    /// It costs more than a limit allows at all.
    NeverFits(NeverFits),
    /// It has no key.
    NoKey(KeyError),
    /// Its key is on a list of [denied](super::RateLimitLayer::deny) keys.
    Denied,
    /// The store could not decide, or no limit be chosen, and the layer fails closed, or the request takes more than the
    /// [share](crate::Share) that it fails over to.
    Unavailable(Error),
}

impl Rejection {
    /// The status of the answer.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        match self {
            Self::Limited(_) | Self::NeverFits(_) => StatusCode::TOO_MANY_REQUESTS,
            Self::NoKey(error) => error.status(),
            Self::Denied => StatusCode::FORBIDDEN,
            Self::Unavailable(_) => StatusCode::SERVICE_UNAVAILABLE,
        }
    }
}

/// What a layer would answer that fails closed.
impl From<Error> for Rejection {
    fn from(error: Error) -> Self {
        match error {
            Error::NeverFits(error) => Self::NeverFits(error),
            error => Self::Unavailable(error),
        }
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
            Self::Limited(decision) => write!(
                f,
                "over the limit {:?}; it has room in {:?}",
                decision.limit().name(),
                decision.retry_after().unwrap_or_default(),
            ),
            Self::NeverFits(error) => error.fmt(f),
            Self::NoKey(error) => error.fmt(f),
            Self::Denied => f.write_str("denied"),
            Self::Unavailable(error) => error.fmt(f),
        }
    }
}

impl error::Error for Rejection {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        // Its text is this one's.
        if let Self::Unavailable(error) = self { error.source() } else { None }
    }
}
