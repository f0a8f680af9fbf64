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
//! All have `Cache-Control: no-store`, a short JSON body, and the [`Rejection`] in the response's extensions, where
//! outer layers find the reason. Where the store has not decided, [`Degraded`] is there as well.
//!
//! A closure given to [`RateLimitLayer::on_rejection`](super::RateLimitLayer::on_rejection) makes the response. It gets
//! status and headers ready-made, all but `Content-Type`, and keeps of them what it wants:
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
//! A handler that asks a [`Limiter`](crate::Limiter) itself answers alike, if it returns its rejection: with axum, that is a
//! response, too, the default one. A layer around it leaves its figures as they are.
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

use std::{
    fmt::{self, Write},
    time::Duration,
};

use http::{
    HeaderValue, Response, StatusCode,
    header::{CONTENT_TYPE, WWW_AUTHENTICATE},
};

use super::{
    extract::KeyError,
    headers::{Figures, ResetFormat, forbid_storing, retry_after_seconds, write_retry_after},
};
use crate::{admission::random, check::NeverFits, decision::Decision, error::Error, limiter::FailureMode};

/// Why a request did not reach the service. See the [module docs](self).
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Rejection {
    /// A limit refused it.
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

    /// The answer, made by a responder, with the reason in its extensions.
    pub(super) fn into_response_by<R: RejectionResponse<B>, B>(
        self,
        responder: &R,
        format: ResetFormat,
    ) -> Response<B> {
        let mut response = responder.respond(&self, self.head(format));
        response.extensions_mut().insert(self);
        response
    }

    /// Status and headers of the answer.
    fn head(&self, format: ResetFormat) -> Response<()> {
        let mut head = Response::new(());
        *head.status_mut() = self.status();
        let headers = head.headers_mut();
        forbid_storing(headers);
        match self {
            Self::Limited(decision) => {
                Figures::of(decision, format).write(headers);
                write_retry_after(headers, decision.retry_after().unwrap_or_default());
            }
            Self::NoKey(error) => {
                if let Some(challenge) = error.challenge() {
                    headers.insert(WWW_AUTHENTICATE, challenge.clone());
                }
            }
            Self::Unavailable(_) => write_retry_after(headers, Duration::from_secs(1 + random() % 5)),
            Self::NeverFits(_) | Self::Denied => {}
        }
        head
    }

    /// The default body.
    fn json(&self) -> String {
        match self {
            Self::Limited(decision) => format!(
                r#"{{"error":"rate limit exceeded","limit":"{}","retry_after":{}}}"#,
                decision.limit().name(),
                retry_after_seconds(decision.retry_after().unwrap_or_default()),
            ),
            Self::NeverFits(error) => format!(
                r#"{{"error":"request costs more than the limit","limit":"{}","cost":{},"units":{}}}"#,
                error.limit().name(),
                error.cost(),
                error.limit().units(),
            ),
            // What the server got wrong is for its log.
            Self::NoKey(error) if error.status().is_server_error() => r#"{"error":"internal error"}"#.to_owned(),
            Self::NoKey(error) => format!(r#"{{"error":"{}"}}"#, escaped(&error.to_string())),
            Self::Denied => r#"{"error":"denied"}"#.to_owned(),
            Self::Unavailable(_) => r#"{"error":"rate limiting is unavailable"}"#.to_owned(),
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

/// The default answer, with a reset in [seconds from now](ResetFormat::DeltaSeconds).
#[cfg(feature = "axum")]
impl axum::response::IntoResponse for Rejection {
    fn into_response(self) -> axum::response::Response {
        self.into_response_by(&JsonResponse, ResetFormat::default())
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

/// A text as it stands between the quotes of a JSON string (RFC 8259, section 7).
fn escaped(text: &str) -> String {
    text.chars().fold(String::with_capacity(text.len()), |mut escaped, c| {
        // Writing to a String cannot fail.
        let _ = match c {
            '"' | '\\' => write!(escaped, "\\{c}"),
            c if c.is_control() => write!(escaped, "\\u{:04x}", u32::from(c)),
            c => write!(escaped, "{c}"),
        };
        escaped
    })
}

/// Makes the response to a rejected request out of its status and headers. See the [module docs](self).
#[diagnostic::on_unimplemented(
    message = "`{Self}` makes no response with a body of type `{B}`",
    note = "the default response needs a body that can be made of a `String`; \
            for others say how with `RateLimitLayer::on_rejection`"
)]
pub trait RejectionResponse<B> {
    /// The response. `head` has the status, the headers and the reason; all may be changed.
    fn respond(&self, rejection: &Rejection, head: Response<()>) -> Response<B>;
}

impl<F, B> RejectionResponse<B> for F
where
    F: Fn(&Rejection, Response<()>) -> Response<B>,
{
    fn respond(&self, rejection: &Rejection, head: Response<()>) -> Response<B> {
        self(rejection, head)
    }
}

/// The default answer: a short JSON body.
///
/// It fits every body that can be made of a `String`, such as axum's and `http_body_util::Full<Bytes>`. For others, say
/// how with [`RateLimitLayer::on_rejection`](super::RateLimitLayer::on_rejection).
#[derive(Clone, Copy, Debug, Default)]
pub struct JsonResponse;

impl<B: From<String>> RejectionResponse<B> for JsonResponse {
    fn respond(&self, rejection: &Rejection, mut head: Response<()>) -> Response<B> {
        head.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        head.map(|()| rejection.json().into())
    }
}

/// In the extensions of every response to a request that the store has not decided, whether it was let through, answered
/// 503, or decided in this process. Of stacked layers, the outermost is told.
#[derive(Clone, Debug)]
pub struct Degraded {
    error: Error,
    mode: FailureMode,
}

impl Degraded {
    pub(super) fn new(error: Error, mode: FailureMode) -> Self {
        Self { error, mode }
    }

    /// Why the store has not decided.
    #[must_use]
    pub fn error(&self) -> &Error {
        &self.error
    }

    /// What was done about it.
    #[must_use]
    pub fn mode(&self) -> FailureMode {
        self.mode
    }
}
