//! The response to a rejected request.

use std::{fmt::Write, time::Duration};

use http::{
    HeaderValue, Response,
    header::{CACHE_CONTROL, CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE},
    request::Parts,
};

use super::{
    super::headers::{HeaderSets, retry_after_seconds, write_retry_after},
    Rejection,
};
use crate::{check::random, decision::Decision, limit::text::whole_number};

/// Makes the response to a rejected request. See the [module docs](super).
#[diagnostic::on_unimplemented(
    message = "`{Self}` makes no response with a body of type `{B}`",
    note = "`GrpcResponse` needs a body with a `Default`, the other responders one that can be made of a `String`, such as \
            `axum::body::Body` or `Full<Bytes>`",
    note = "if a layer inside of the limits wraps the body, as compression and tracing do, put this line between them: \
            `.map_response(|response: http::Response<_>| response.map(axum::body::Body::new))`, for tonic with \
            `tonic::body::Body::new`; or put that layer outside of the limits",
    note = "for a body of any other type, put this line into the limits: \
            `.respond_with(|rejection: &Rejection, head: http::Response<()>| rejection.problem(head).map(Body::from))`, for \
            tonic with `tonic::body::Body::new`; a server of gRPC alone needs only `.respond_with(GrpcResponse)`"
)]
pub trait RejectionResponse<B> {
    /// Makes the response. `head` has its status and headers, and the responder may change both.
    /// `request` is the request head, for servers that speak several protocols, such as HTTP and
    /// gRPC.
    fn respond(&self, rejection: &Rejection, request: &Parts, head: Response<()>) -> Response<B>;
}

impl<F, B> RejectionResponse<B> for F
where
    F: Fn(&Rejection, Response<()>) -> Response<B>,
{
    fn respond(&self, rejection: &Rejection, _: &Parts, head: Response<()>) -> Response<B> {
        self(rejection, head)
    }
}

/// The default response: problem details (RFC 9457) as `application/problem+json`, whatever the
/// request accepts.
///
/// ```json
/// {
///   "type": "https://iana.org/assignments/http-problem-types#quota-exceeded",
///   "title": "Quota Exceeded",
///   "status": 429,
///   "detail": "The limit 'login' is used up. Retry in 42 seconds.",
///   "violated-policies": ["login"],
///   "retry-after": 42
/// }
/// ```
///
/// * The type is `quota-exceeded` for a 429 by a limit, and `temporary-reduced-capacity` for a 503,
///   both from the `RateLimit` [draft](crate::HeaderSets::RATE_LIMIT). IANA registers them only
///   when the draft becomes an RFC. All other responses have no type, which means `about:blank`.
/// * `violated-policies` names the limits that have refused, except [hidden](crate::Charge::hidden)
///   ones.
/// * `JsonResponse` works with every body that can be made from a `String`, such as axum's and
///   `http_body_util::Full<Bytes>`. For other bodies, use [`Rejection::problem`].
#[derive(Clone, Copy, Debug, Default)]
pub struct JsonResponse;

impl<B: From<String>> RejectionResponse<B> for JsonResponse {
    fn respond(&self, rejection: &Rejection, _: &Parts, head: Response<()>) -> Response<B> {
        rejection.problem(head).map(B::from)
    }
}

impl Rejection {
    /// The response head: status and headers, with the figures in these header sets.
    pub(crate) fn head(&self, sets: HeaderSets) -> Response<()> {
        let mut head = Response::new(());
        *head.status_mut() = self.status();
        let headers = head.headers_mut();
        // A rejection is for one client at one moment, so caches must not store it (RFC 6585,
        // section 4, for 429).
        headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
        match self {
            Self::Limited(decision) | Self::Banned(decision) => {
                decision.write_headers(sets, headers);
                write_retry_after(headers, decision.retry_after().unwrap_or_default());
            }
            Self::NoKey(error) => {
                if let Some(challenge) = &error.challenge {
                    headers.insert(WWW_AUTHENTICATE, challenge.clone());
                }
            }
            Self::Unavailable(_) => {
                write_retry_after(headers, Duration::from_secs(1 + random() % 5));
            }
            Self::NeverFits(_) | Self::Denied | Self::NotSetUp(_) => {}
        }
        head
    }

    /// A sentence for the client. It does not contain hidden limits, keys, or details about the
    /// server. Escape it in HTML, since it may repeat a custom extractor's
    /// [`KeyError`](crate::extract::KeyError). For a plain text response:
    ///
    /// ```
    /// use axum::body::Body;
    /// use http::Response;
    /// use tower_sliding_window::{Limit, MemoryStore, PeerIp, RateLimitLayer, Rejection};
    ///
    /// let layer = RateLimitLayer::new(MemoryStore::new())
    ///     .limit(Limit::per_minute("login", 5).by(PeerIp::new()))
    ///     .respond_with(|rejection: &Rejection, head: Response<()>| head.map(|()| Body::from(rejection.detail())));
    /// ```
    #[must_use]
    pub fn detail(&self) -> String {
        let mut detail = String::new();
        let wait = self.decision().and_then(Decision::retry_after);
        let seconds = wait.map(|wait| retry_after_seconds(wait).to_string());
        self.write_detail(&mut detail, seconds.as_deref());
        detail
    }

    /// Writes the sentence for the client. Only a key error's sentence needs escapes in JSON.
    fn write_detail(&self, text: &mut String, retry_after: Option<&str>) {
        // Writing to a String cannot fail.
        match self {
            Self::Limited(decision) | Self::Banned(decision) => {
                let visible = decision.visible();
                match visible {
                    Some(status) => text.extend(["The limit '", status.limit.name(), "'"]),
                    None => text.push_str("A limit"),
                }
                text.push_str(match visible {
                    _ if matches!(self, Self::Banned(_)) => " bans this client.",
                    Some(status) if status.remaining() > 0 => " has too few units left.",
                    _ => " is used up.",
                });
                if let Some(seconds) = retry_after {
                    let plural = if seconds == "1" { "" } else { "s" };
                    text.extend([" Retry in ", seconds, " second", plural, "."]);
                }
            }
            Self::NeverFits(error) if error.is_hidden => {
                text.push_str("The request costs more than a limit ever admits.");
            }
            Self::NeverFits(error) => {
                let cost = error.cost;
                let name = error.limit.name();
                let _ = match error.limit.units() {
                    0 => write!(text, "The limit '{name}' admits no requests."),
                    units => write!(
                        text,
                        "The request costs {cost} units. The limit '{name}' never admits more than {units}."
                    ),
                };
            }
            // A setup mistake on the server is reported only in the server's log.
            Self::NoKey(error) if error.status().is_server_error() => {
                text.push_str("The server has made a mistake.");
            }
            Self::NoKey(error) => drop(write!(text, "The request cannot be counted: {error}.")),
            Self::NotSetUp(_) => text.push_str("The server has made a mistake."),
            Self::Denied => text.push_str("The server does not take requests from this client."),
            Self::Unavailable(_) => {
                text.push_str("The server cannot count requests at the moment.");
            }
        }
    }

    /// The [`JsonResponse`], but with a `String` body, for services whose body type cannot be made
    /// from a `String`. [`respond_with`](crate::RateLimitLayer::respond_with) has an example.
    #[must_use]
    pub fn problem(&self, mut head: Response<()>) -> Response<String> {
        head.headers_mut().insert(
            CONTENT_TYPE,
            HeaderValue::from_static("application/problem+json"),
        );
        let text = self.problem_details(&head);
        head.map(|()| text)
    }

    /// The problem details (RFC 9457) as JSON, written piece by piece, since the formatting macros
    /// would double the instructions for a refused request.
    fn problem_details(&self, head: &Response<()>) -> String {
        // A responder around `JsonResponse` may have removed `Retry-After`, or set a date, which
        // would break the JSON.
        let retry_after = head
            .headers()
            .get(RETRY_AFTER)
            .and_then(|seconds| seconds.to_str().ok())
            .filter(|text| whole_number(text).is_some());
        let mut body = String::with_capacity(320);
        match self {
            Self::Limited(_) | Self::NeverFits(_) => body.push_str(concat!(
                r#"{"type":"https://iana.org/assignments/http-problem-types#quota-exceeded","#,
                r#""title":"Quota Exceeded","status":429,"detail":""#
            )),
            Self::Unavailable(_) => body.push_str(concat!(
                r#"{"type":"https://iana.org/assignments/http-problem-types#temporary-reduced-capacity","#,
                r#""title":"Temporary Reduced Capacity","status":503,"detail":""#
            )),
            Self::NoKey(_) | Self::Denied | Self::Banned(_) | Self::NotSetUp(_) => {
                let status = head.status();
                let title = status.canonical_reason().unwrap_or("Rejected");
                body.extend([r#"{"title":""#, title, r#"","status":"#, status.as_str(), r#","detail":""#]);
            }
        }
        match self {
            Self::NoKey(_) => body.push_str(&escaped(&self.detail())),
            _ => self.write_detail(&mut body, retry_after),
        }
        let (mut before, mut after) = (r#"","violated-policies":[""#, "\"");
        self.violated_limits(|name| {
            body.extend([before, name]);
            (before, after) = (r#"",""#, r#""]"#);
        });
        body.push_str(after);
        if let Some(seconds) = retry_after {
            body.extend([r#","retry-after":"#, seconds]);
        }
        body.push('}');
        body
    }
}

/// Escapes text for a JSON string (RFC 8259, section 7).
fn escaped(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        // Writing to a String cannot fail.
        let _ = match c {
            '"' | '\\' => write!(escaped, "\\{c}"),
            c if c.is_control() => write!(escaped, "\\u{:04x}", u32::from(c)),
            c => write!(escaped, "{c}"),
        };
    }
    escaped
}
