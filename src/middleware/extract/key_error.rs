//! The error of an extractor.

use std::{borrow::Cow, error, fmt};

use http::{HeaderValue, StatusCode};

/// Why a request has no key, and the status of its rejection.
#[derive(Clone, Debug)]
pub struct KeyError {
    what: Cow<'static, str>,
    problem: Cow<'static, str>,
    is_missing: bool,
    status: StatusCode,
    challenge: Option<HeaderValue>,
}

impl KeyError {
    /// The request has no `what`. The status is 400.
    #[must_use]
    pub fn missing(what: impl Into<Cow<'static, str>>) -> Self {
        Self {
            what: what.into(),
            problem: "missing".into(),
            is_missing: true,
            status: StatusCode::BAD_REQUEST,
            challenge: None,
        }
    }

    /// The request has a `what` that cannot be used because of `problem`, such as "repeated". The status is 400.
    #[must_use]
    pub fn invalid(what: impl Into<Cow<'static, str>>, problem: impl Into<Cow<'static, str>>) -> Self {
        Self { problem: problem.into(), is_missing: false, ..Self::missing(what) }
    }

    /// Sets the status. A 5xx means that the server is set up wrongly, and is logged.
    #[must_use]
    pub fn with_status(mut self, status: StatusCode) -> Self {
        self.status = status;
        self
    }

    /// Sets the status 401 and this challenge (RFC 9110, section 11.6.1).
    #[must_use]
    pub fn unauthorized(mut self, challenge: HeaderValue) -> Self {
        self.status = StatusCode::UNAUTHORIZED;
        self.challenge = Some(challenge);
        self
    }

    /// Whether the key is absent, rather than present and unusable.
    #[must_use]
    pub fn is_missing(&self) -> bool {
        self.is_missing
    }

    /// The status of the rejection.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        self.status
    }

    /// The value of `WWW-Authenticate` in the response.
    #[must_use]
    pub fn challenge(&self) -> Option<&HeaderValue> {
        self.challenge.as_ref()
    }
}

impl fmt::Display for KeyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.what, self.problem)
    }
}

impl error::Error for KeyError {}
