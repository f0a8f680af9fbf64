//! The costs of a limit: before a request, and after its response.

use std::{fmt, sync::Arc, time::Duration};

use http::request::Parts;

use super::keyed_limit::{Exchange, KeyedLimit};

impl KeyedLimit {
    /// The units that a request takes of this limit. Default: the
    /// [`cost`](crate::RateLimitLayer::cost) of the layer.
    ///
    /// A request takes exactly one place of a [concurrent](crate::Limit::concurrent) limit, so such
    /// a limit takes no cost of its own: see
    /// [`RateLimitLayer::limits`](crate::RateLimitLayer::limits).
    pub fn cost(mut self, cost: impl Fn(&Parts) -> u64 + Send + Sync + 'static) -> Self {
        self.cost = Some(Arc::new(cost));
        self
    }

    /// Sets the units that a request has really cost, by its response. Until the response, the
    /// charge of the request is reserved. Default: a request costs its charge.
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
    /// | more than the limit is spent | by the cost of a request above its charge | by the cost of all requests in flight |
    /// | concurrent requests that turn out to be free | some are refused, with a retry time of a second | none is refused |
    /// | the cost counts as of | the admission | the response |
    /// | without a response | the charge counts until its lease ends | nothing counts |
    /// | calls of the store | two | two, or one if the cost is 0 |
    /// | use it for | limits that must hold: tokens, money, guesses of a password | requests that are mostly free, or whose cost is unknown before: bytes sent, failed logins of many users behind one address |
    ///
    /// * All limits of a request are settled together, within the layer's deadline, before the
    ///   response goes out. The response shows the units that are left then.
    /// * A cost above the charge counts in full, even above the limit: the next requests are
    ///   refused.
    /// * A request without a response stays charged until its [`lease`](Self::lease) ends: its
    ///   client has hung up, or the service has failed or panicked. A request whose settlement gets
    ///   no reply may stay charged, too.
    /// * The cost is computed from the head of the response. For units that a body uses while it is
    ///   streamed, [reserve](crate::Limiter::reserve) them in the handler and settle at the end of
    ///   the body: see the example `llm_tokens`.
    /// * At least one unit is reserved, even at a cost of 0. A request that was let through without
    ///   a decision is not settled.
    /// * If only reserved units are in the way, the retry time is [a
    ///   second](crate::Limiter::retry_reserved_after), since they may be given back at any time.
    ///
    /// **Count by client.** A reservation takes units from all clients that share the key. With
    /// [`Everyone`](crate::Everyone), a single client could exhaust the limit for everybody: it
    /// sends requests and hangs up, again and again.
    pub fn settle(mut self, cost: impl Fn(&Exchange<'_>) -> u64 + Send + Sync + 'static) -> Self {
        self.cost_afterwards = Some(Arc::new(cost));
        self.counts_afterwards = false;
        self
    }

    /// Counts the units that a request has cost when its response is there, and reserves nothing
    /// before. A request is admitted while anything is left of the limit. If both this and
    /// [`settle`](Self::settle) are called, the last call holds. `settle` has a table of when to
    /// use which.
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
    /// * The requests in flight can exceed the limit: with `n` concurrent requests of a client,
    ///   each of at most `c` units, by up to `n · c - 1` units. A client that sends 1,000 passwords
    ///   at once gets 1,000 tries. Where that matters, [settle](Self::settle) instead, or bound `n`
    ///   by another limit or a concurrency limit.
    /// * Units above the limit count, too: the next requests are refused until enough of them have
    ///   left the window.
    /// * The [`cost`](Self::cost) before the response has no effect.
    /// * A request that is dropped before its response costs nothing. If the count fails, that is
    ///   logged, and the units may be missing.
    /// * The cost is computed from the head of the response. A handler that knows it only at the
    ///   end of the body counts it with [`Charge::spent`](crate::Charge::spent).
    pub fn count_afterwards(mut self, cost: impl Fn(&Exchange<'_>) -> u64 + Send + Sync + 'static) -> Self {
        self.cost_afterwards = Some(Arc::new(cost));
        self.counts_afterwards = true;
        self
    }

    /// How long a charge stays reserved if it is not [settled](Self::settle). After this time, its
    /// units are given back. Default: a minute, or the window if that is shorter.
    ///
    /// * If a client hangs up or a process is killed, the units are taken from others for this
    ///   long. With the window as the lease, a dropped request pays its charge in full, so that
    ///   hanging up brings a client nothing.
    /// * A response that takes longer than its lease is still settled, as of its admission. But its
    ///   units are free for others in between, so make the lease longer than most responses take.
    ///
    /// A limit with a lease has to settle. Otherwise no layer takes it: see
    /// [`RateLimitLayer::limits`](crate::RateLimitLayer::limits).
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = Some(lease);
        self
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
