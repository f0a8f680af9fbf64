//! The costs of a limit: before a request, and after its response.

use std::{fmt, sync::Arc, time::Duration};

use http::request::Parts;

use super::keyed_limit::{Exchange, KeyedLimit};

impl KeyedLimit {
    /// Sets the units that a request takes of this limit. Default: the
    /// [`cost`](crate::RateLimitLayer::cost) of the layer.
    ///
    /// A request takes exactly one place of a [concurrent](crate::Limit::concurrent) limit. So a
    /// cost would have no effect on such a limit, and no layer accepts the two together: see
    /// [`RateLimitLayer::limits`](crate::RateLimitLayer::limits).
    pub fn cost(mut self, cost: impl Fn(&Parts) -> u64 + Send + Sync + 'static) -> Self {
        self.cost = Some(Arc::new(cost));
        self
    }

    /// Computes the true cost of a request from its response. The true cost then counts instead of
    /// the charge: the units that the request took at its admission. Until the response, these
    /// units are reserved. Default: the response does not change the cost.
    ///
    /// ```
    /// use tower_sliding_window::{Limit, PeerIp};
    ///
    /// // Only failed logins count.
    /// let login = Limit::per_minute("login", 5).by(PeerIp::new()).settle(|exchange| u64::from(exchange.response.status == 401));
    /// ```
    ///
    /// To reserve nothing, [count afterwards](Self::count_afterwards) instead:
    ///
    /// | | `settle` | `count_afterwards` |
    /// |---|---|---|
    /// | before the response | the charge counts | nothing counts |
    /// | a request is refused if | its charge does not fit | nothing is left |
    /// | the limit can be exceeded | by the part of a cost that is above the charge | by the cost of all requests in flight |
    /// | concurrent requests whose cost turns out to be 0 | some are refused, with a retry time of a second | none is refused |
    /// | the cost counts as of | the admission | the response |
    /// | without a response | the charge counts until its lease ends | nothing counts |
    /// | calls of the store | two | two, or one if the cost is 0 |
    /// | use for | limits that must hold: tokens, money, guesses of a password | requests that are mostly free, or whose cost is unknown before: bytes sent, failed logins of many users behind one address |
    ///
    /// * The layer settles all limits of a request before the response goes out. Each call of the
    ///   store takes at most the layer's deadline. The response shows the units that are left after
    ///   the settlements.
    /// * A cost above the charge counts in full, even if it exceeds the limit. Then the next
    ///   requests are refused until enough units have left the window.
    /// * A request without a response stays charged until its [`lease`](Self::lease) ends. A
    ///   request gets no response if its client has hung up, or if the service has failed or
    ///   panicked. A request whose settlement gets no reply may stay charged, too.
    /// * The cost is computed from the head of the response. If a body uses units while it is
    ///   streamed, [reserve](crate::Limiter::reserve) units in the handler, and settle them at the
    ///   end of the body: see the example `llm_tokens`.
    /// * At least one unit is reserved, even at a cost of 0. A request that was let through without
    ///   a decision is not settled.
    /// * If only reserved units are in the way of a request, the retry time is [a
    ///   second](crate::Limiter::retry_reserved_after), since reserved units may be given back at
    ///   any time.
    ///
    /// **Count by client.** A reservation takes units from all clients that share the key. With
    /// [`Everyone`](crate::Everyone), a single client that sends requests and hangs up, again and
    /// again, could exhaust the limit for everybody.
    pub fn settle(mut self, cost: impl Fn(&Exchange<'_>) -> u64 + Send + Sync + 'static) -> Self {
        self.settle = Some(Arc::new(cost));
        self
    }

    /// Counts the cost of a request when its response is there, and reserves nothing before. A
    /// request is admitted while any unit is left of the limit. A table at [`settle`](Self::settle)
    /// compares the two. A layer returns an error for a limit that has both: see
    /// [`RateLimitLayer::limits`](crate::RateLimitLayer::limits).
    ///
    /// ```
    /// use tower_sliding_window::{Limit, PeerIp};
    ///
    /// // Five failed logins a minute. Successful ones are never in the way of each other.
    /// let failures = Limit::per_minute("failed-logins", 5)
    ///     .by(PeerIp::new())
    ///     .count_afterwards(|exchange| u64::from(exchange.response.status == 401));
    /// ```
    ///
    /// * The requests in flight can exceed the limit: `n` concurrent requests of a client, each of
    ///   at most `c` units, exceed the limit by up to `n · c - 1` units. A client that sends 1,000
    ///   passwords at once gets 1,000 tries. If the limit must hold, [settle](Self::settle)
    ///   instead, or bound `n` by another limit or a concurrency limit.
    /// * Units above the limit count, too: the next requests are refused until enough units have
    ///   left the window.
    /// * The [cost of the layer](crate::RateLimitLayer::cost), which is computed before the
    ///   response, has no effect on this limit. A layer returns an error for a limit that also has
    ///   a [`cost`](Self::cost) of its own: see
    ///   [`RateLimitLayer::limits`](crate::RateLimitLayer::limits).
    /// * A request that is dropped before its response costs nothing. If the store cannot count the
    ///   cost of a request, a log line says so, and the cost may stay uncounted.
    /// * The cost is computed from the head of the response. A handler that knows the cost only at
    ///   the end of the body counts the cost itself, by [`Charge::spent`](crate::Charge::spent).
    pub fn count_afterwards(
        mut self,
        cost: impl Fn(&Exchange<'_>) -> u64 + Send + Sync + 'static,
    ) -> Self {
        self.count_afterwards = Some(Arc::new(cost));
        self
    }

    /// Sets how long the units of a request stay reserved if they are not [settled](Self::settle).
    /// After the lease, the units are given back. Default: a minute, or the window if the window is
    /// shorter.
    ///
    /// * If a client hangs up or a process is killed, the reserved units are missing for other
    ///   clients until the lease ends. If the lease is as long as the window, a dropped request
    ///   pays its charge in full, so a client gains nothing by hanging up.
    /// * A request whose response takes longer than the lease is still settled, as of its
    ///   admission. Between the end of the lease and the settlement, other clients can spend the
    ///   units of this request. So make the lease longer than most responses take.
    ///
    /// A layer returns an error for a limit that has a lease but does not settle: see
    /// [`RateLimitLayer::limits`](crate::RateLimitLayer::limits).
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = Some(lease);
        self
    }
}

impl fmt::Debug for Exchange<'_> {
    // Shows no headers, since headers may hold secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exchange")
            .field("method", &self.request.method)
            .field("status", &self.response.status)
            .field("cost", &self.cost)
            .finish_non_exhaustive()
    }
}
