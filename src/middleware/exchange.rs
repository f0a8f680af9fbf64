//! What a request has come to.

use std::fmt;

use http::{StatusCode, request, response};

/// A request and the response to it, by which a limit [settles](super::KeyedLimit::settle) what it has cost.
pub struct Exchange<'a> {
    request: &'a request::Parts,
    response: &'a response::Parts,
    cost: u64,
}

impl<'a> Exchange<'a> {
    pub(super) fn new(request: &'a request::Parts, response: &'a response::Parts, cost: u64) -> Self {
        Self { request, response, cost }
    }

    /// The request as it came, without its body.
    #[must_use]
    pub fn request(&self) -> &'a request::Parts {
        self.request
    }

    /// The service's response, without its body.
    #[must_use]
    pub fn response(&self) -> &'a response::Parts {
        self.response
    }

    /// The response's status.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        self.response.status
    }

    /// What the limit has charged, in units.
    #[must_use]
    pub fn cost(&self) -> u64 {
        self.cost
    }
}

impl fmt::Debug for Exchange<'_> {
    // Headers may hold secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exchange")
            .field("method", &self.request.method)
            .field("status", &self.response.status)
            .field("cost", &self.cost)
            .finish_non_exhaustive()
    }
}
