//! The exchange that a cost is computed from.

use std::fmt;

use http::{StatusCode, request, response};

/// The units that a request has cost, by its response.
pub(crate) type CostAfterwards = dyn Fn(&Exchange<'_>) -> u64 + Send + Sync;

/// A request and its response, from which a limit computes the cost to [settle](crate::KeyedLimit::settle).
pub struct Exchange<'a> {
    request: &'a request::Parts,
    response: &'a response::Parts,
    cost: u64,
}

impl<'a> Exchange<'a> {
    pub(crate) fn new(request: &'a request::Parts, response: &'a response::Parts, cost: u64) -> Self {
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

    /// The units that the limit has charged.
    #[must_use]
    pub fn cost(&self) -> u64 {
        self.cost
    }
}

impl fmt::Debug for Exchange<'_> {
    // Without headers, since they may hold secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exchange")
            .field("method", &self.request.method)
            .field("status", &self.response.status)
            .field("cost", &self.cost)
            .finish_non_exhaustive()
    }
}
