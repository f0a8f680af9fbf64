//! The options for a limit's costs, which are known before a request or only after its response.

use std::{fmt, sync::Arc, time::Duration};

use http::request::Parts;

use super::keyed_limit::{Exchange, KeyedLimit};

impl KeyedLimit {
    /// Sets the units that a request takes from this limit. Default: the layer's
    /// [`cost`](crate::RateLimitLayer::cost).
    ///
    /// A request takes exactly one place from a [concurrent](crate::Limit::concurrent) limit, so
    /// layers do not accept a cost on such a limit: see
    /// [`RateLimitLayer::limits`](crate::RateLimitLayer::limits).
    pub fn cost(mut self, cost: impl Fn(&Parts) -> u64 + Send + Sync + 'static) -> Self {
        self.cost = Some(Arc::new(cost));
        self
    }

    /// Computes the actual cost of a request from its response. The actual cost replaces the
    /// charge, which is the number of units taken at admission and reserved until the response.
    /// Default: the response does not change the cost.
    ///
    /// ```
    /// use tower_sliding_window::{Limit, PeerIp};
    ///
    /// // Only failed logins count.
    /// let login = Limit::per_minute("login", 5).by(PeerIp::new()).settle(|exchange| u64::from(exchange.response.status == 401));
    /// ```
    ///
    /// To avoid reserving, [count afterwards](Self::count_afterwards):
    ///
    /// | | `settle` | `count_afterwards` |
    /// |---|---|---|
    /// | before the response | the charge counts | nothing counts |
    /// | a request is refused if | its charge does not fit | nothing is left |
    /// | the limit can be exceeded | by the part of a cost that is above the charge | by the cost of all requests in flight |
    /// | concurrent requests whose cost turns out to be 0 | some are refused, with a retry time of a second | are not refused |
    /// | the cost counts as of | the admission | the response |
    /// | without a response | the charge counts until its lease ends | nothing counts |
    /// | store calls | two | two, or one if the cost is 0 |
    /// | use for | limits that must hold: tokens, money, password guesses | requests that are usually free, or whose cost is not known before the response: bytes sent, failed logins by many users behind one address |
    ///
    /// * The layer settles all limits before it returns the response. Each store call takes at most
    ///   the layer's deadline. The response shows the units left after the settlements.
    /// * A cost above the charge counts in full, even beyond the limit. Further requests are then
    ///   refused until enough units have left the window.
    /// * A request without a response stays charged until its [`lease`](Self::lease) ends. This
    ///   happens if the client hangs up, or if the service fails or panics. A request may also stay
    ///   charged if the store does not answer the settlement.
    /// * The cost is computed from the response head. If a body uses units while streaming,
    ///   [reserve](crate::Limiter::reserve) units in the handler, and settle them when the body
    ///   ends: see the example `llm_tokens`.
    /// * At least one unit is reserved, even at a cost of 0. A request that passed without a
    ///   decision is not settled.
    /// * If only reserved units stand in the way of a request, the retry time is [a
    ///   second](crate::Limiter::retry_reserved_after), since these units may be given back at any
    ///   time.
    ///
    /// **Count per client.** A reservation takes units from all clients that share the key. With
    /// [`Everyone`](crate::Everyone), a single client that keeps sending requests and hanging up
    /// could exhaust the limit for everybody.
    pub fn settle(mut self, cost: impl Fn(&Exchange<'_>) -> u64 + Send + Sync + 'static) -> Self {
        self.settle = Some(Arc::new(cost));
        self
    }

    /// Counts the cost of a request once its response has arrived, without reserving. A request is
    /// admitted while the limit has any unit left. The table at [`settle`](Self::settle) compares
    /// the two methods. Layers do not accept a limit with both: see
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
    /// * Requests in flight can exceed the limit: `n` concurrent requests from a client, each
    ///   costing at most `c` units, exceed it by up to `n · c - 1` units. A client that sends 1,000
    ///   passwords at once gets 1,000 tries. If the limit must hold, [settle](Self::settle)
    ///   instead, or bound `n` by another limit or a concurrency limit.
    /// * Units above the limit count too: further requests are refused until enough units have left
    ///   the window.
    /// * The [layer's cost](crate::RateLimitLayer::cost), which is known before the response, does
    ///   not apply to this limit. Layers do not accept a limit that also has its own
    ///   [`cost`](Self::cost): see [`RateLimitLayer::limits`](crate::RateLimitLayer::limits).
    /// * A request dropped before its response costs nothing. If the store cannot count a cost, a
    ///   log line says so, and the cost may stay uncounted.
    /// * The cost is computed from the response head. If it is known only when the body ends, count
    ///   it in the handler with [`Charge::spent`](crate::Charge::spent).
    pub fn count_afterwards(
        mut self,
        cost: impl Fn(&Exchange<'_>) -> u64 + Send + Sync + 'static,
    ) -> Self {
        self.count_afterwards = Some(Arc::new(cost));
        self
    }

    /// Sets the lease: the longest time that units stay reserved without being
    /// [settled](Self::settle). After that, they are given back. Default: a minute, or the window
    /// if it is shorter.
    ///
    /// * If a client hangs up or a process is killed, its reserved units are not available to
    ///   others until the lease ends. With a lease as long as the window, a dropped request pays
    ///   its charge in full, so hanging up gains nothing.
    /// * A response that takes longer than the lease is still settled, and its cost counts as of
    ///   the admission. Between the lease's end and the settlement, other clients can spend those
    ///   units. So make the lease longer than most responses take.
    ///
    /// A limit with a lease also needs `settle`. Otherwise, layers do not accept it: see
    /// [`RateLimitLayer::limits`](crate::RateLimitLayer::limits).
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = Some(lease);
        self
    }
}

impl fmt::Debug for Exchange<'_> {
    // Shows no headers, since they may hold secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exchange")
            .field("method", &self.request.method)
            .field("status", &self.response.status)
            .field("cost", &self.cost)
            .finish_non_exhaustive()
    }
}
