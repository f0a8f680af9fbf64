//! The response to a rejected request.

use std::{fmt::Write, time::Duration};

use http::{
    HeaderValue, Response,
    header::{CONTENT_TYPE, WWW_AUTHENTICATE},
};

use super::{
    super::headers::{Figures, ResetFormat, forbid_storing, retry_after_seconds, write_retry_after},
    reason::Rejection,
};
use crate::admission::random;

/// Makes the response to a rejected request. See the [module docs](super).
#[diagnostic::on_unimplemented(
    message = "`{Self}` makes no response with a body of type `{B}`",
    note = "the default response needs a body that can be made of a `String`; \
            for others say how with `RateLimitLayer::on_rejection`"
)]
pub trait RejectionResponse<B> {
    /// The response. `head` has the status and the headers, which may be changed.
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

/// The default response: a short JSON body.
///
/// It works with every body that can be made of a `String`, such as axum's and `http_body_util::Full<Bytes>`. For other
/// bodies, use [`RateLimitLayer::on_rejection`](crate::RateLimitLayer::on_rejection).
#[derive(Clone, Copy, Debug, Default)]
pub struct JsonResponse;

impl<B: From<String>> RejectionResponse<B> for JsonResponse {
    fn respond(&self, rejection: &Rejection, mut head: Response<()>) -> Response<B> {
        head.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        head.map(|()| rejection.json().into())
    }
}

impl Rejection {
    /// The figures that clients see.
    pub(crate) fn figures(&self) -> Option<Figures> {
        if let Self::Limited(decision) = self { Figures::of(decision) } else { None }
    }

    /// The responder's response, with the rejection in its extensions. With `format`, it has figures.
    pub(crate) fn into_response_by<R: RejectionResponse<B>, B>(
        self,
        responder: &R,
        format: Option<ResetFormat>,
    ) -> Response<B> {
        let mut response = responder.respond(&self, self.head(format));
        response.extensions_mut().insert(self);
        response
    }

    fn head(&self, format: Option<ResetFormat>) -> Response<()> {
        let mut head = Response::new(());
        *head.status_mut() = self.status();
        let headers = head.headers_mut();
        forbid_storing(headers);
        if let Some((figures, format)) = self.figures().zip(format) {
            figures.write(format, headers);
        }
        match self {
            Self::Limited(decision) => write_retry_after(headers, decision.retry_after().unwrap_or_default()),
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
                r#"{{"error":"rate limit exceeded"{},"retry_after":{}}}"#,
                decision.visible().map(|status| format!(r#","limit":"{}""#, status.limit().name())).unwrap_or_default(),
                retry_after_seconds(decision.retry_after().unwrap_or_default()),
            ),
            Self::NeverFits(error) if error.is_hidden() => {
                r#"{"error":"request costs more than the limit"}"#.to_owned()
            }
            Self::NeverFits(error) => format!(
                r#"{{"error":"request costs more than the limit","limit":"{}","cost":{},"units":{}}}"#,
                error.limit().name(),
                error.cost(),
                error.limit().units(),
            ),
            // The server's mistake is for its log only.
            Self::NoKey(error) if error.status().is_server_error() => r#"{"error":"internal error"}"#.to_owned(),
            Self::NoKey(error) => format!(r#"{{"error":"{}"}}"#, escaped(&error.to_string())),
            Self::Denied => r#"{"error":"denied"}"#.to_owned(),
            Self::Unavailable(_) => r#"{"error":"rate limiting is unavailable"}"#.to_owned(),
        }
    }
}

/// A text escaped for a JSON string (RFC 8259, section 7).
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
