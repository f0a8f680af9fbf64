//! The costs of a limit: before a request, after it, and without a response.

use std::{sync::Arc, time::Duration};

use http::request::Parts;

use super::{super::exchange::Exchange, KeyedLimit};

impl KeyedLimit {
    /// How many units a request takes of this limit, whatever the layer's
    /// [`cost`](crate::RateLimitLayer::cost) says. Default: that.
    #[must_use]
    pub fn cost(mut self, cost: impl Fn(&Parts) -> u64 + Send + Sync + 'static) -> Self {
        self.cost = Some(Arc::new(cost));
        self
    }

    /// Lets the response say how many units a request has really cost. The charge is then only reserved, and it is settled
    /// before the response goes out. Default: a request costs its charge.
    ///
    /// What is reserved may be given back, so a client that only reservations refuse is told to come back after
    /// [a second](crate::RateLimitLayer::retry_reserved_after). To reserve nothing, [count afterwards](Self::count_afterwards):
    ///
    /// | | `settle` | `count_afterwards` |
    /// |---|---|---|
    /// | before the response | the charge counts | nothing counts |
    /// | a request is refused | where its charge does not fit | where nothing is left |
    /// | more than the limit is spent | by what a request costs above its charge | by what all requests in flight cost |
    /// | requests at once that turn out to be free | some are refused, with a retry time of a second | none is refused |
    /// | the cost counts as of | the admission | the response |
    /// | without a response | the charge counts until its lease ends | nothing counts |
    /// | questions to the store | two | two, or one where the cost is 0 |
    /// | take it for | what must not exceed the limit: tokens, money, guesses of a password | what is mostly free, or unknown before: bytes sent, failed logins of many users behind one address |
    ///
    /// ```
    /// use tower_sliding_window::{ApiKey, Limit, PeerIp, Secret};
    ///
    /// // Only failed logins count.
    /// let login = Limit::per_minute("login", 5).by(PeerIp::new()).settle(|o| u64::from(o.status() == 401));
    ///
    /// // Server errors are free.
    /// let calls = Limit::per_hour("calls", 1_000)
    ///     .by(PeerIp::new())
    ///     .settle(|o| if o.status().is_server_error() { 0 } else { o.cost() });
    ///
    /// // The tokens that an answer has used, as its handler says in an extension; 500 are reserved.
    /// #[derive(Clone)]
    /// struct Used(u64);
    ///
    /// let api_key = ApiKey::bearer(&Secret::new("32 random bytes out of the vault")?);
    /// let tokens = Limit::per_hour("tokens", 10_000)
    ///     .by(api_key)
    ///     .cost(|_| 500)
    ///     .settle(|o| o.response().extensions.get().map_or(o.cost(), |Used(tokens)| *tokens));
    /// # Ok::<(), tower_sliding_window::middleware::extract::WeakSecret>(())
    /// ```
    ///
    /// **Count by client.** A reservation takes units from all clients that share the key. By
    /// [`Everyone`](crate::Everyone), a client that sends 20 such requests to the last limit, and hangs up, closes it for
    /// all others until the [`lease`](Self::lease) ends. Then it can do so again.
    ///
    /// 1. All limits of a request are settled at once, within the layer's deadline, also where the cost is the charge. The
    ///    response then shows the units that are left after that.
    /// 2. A cost above the charge is counted, even above the limit: the next requests are refused.
    /// 3. A request that is dropped before its response stays charged until its lease ends, unless
    ///    [`settle_dropped`](Self::settle_dropped) says otherwise. So does a request whose settlement fails. A settlement
    ///    that has begun goes on when the client leaves.
    /// 4. The head of the response tells the cost. Units that a body uses while it is streamed have to be in the charge,
    ///    or the handler [reserves](crate::Limiter::reserve) them, and settles when the body ends: see the example
    ///    `llm_tokens`.
    /// 5. At least one unit is reserved, whatever the cost says, so that there is something to settle. A request that was
    ///    let through without a decision is not settled.
    #[must_use]
    pub fn settle(mut self, cost: impl Fn(&Exchange<'_>) -> u64 + Send + Sync + 'static) -> Self {
        self.settle = Some(Arc::new(cost));
        self.counts_afterwards = false;
        self
    }

    /// Lets the response alone say how many units a request costs. Nothing is reserved: a request is let through while
    /// anything is left of the limit, and its cost is counted, as of then, before its response goes out.
    /// [`settle`](Self::settle) has a table of when to use which. Of the two, the one that is called last holds.
    ///
    /// ```
    /// use tower_sliding_window::{Limit, PeerIp};
    ///
    /// // Five failed logins a minute. Any number of good ones may be on their way at once. So may any number of guesses, unless
    /// // another limit bounds all attempts: see rule 1.
    /// let failures = Limit::per_minute("failed-logins", 5).by(PeerIp::new()).count_afterwards(|o| u64::from(o.status() == 401));
    /// ```
    ///
    /// 1. More than the limit may be spent: by what those requests cost that are in flight when the last unit is. With `n`
    ///    requests of a client at once, each of at most `c` units, that is `n · c` units, less one. A client that sends 1,000
    ///    passwords at once gets 1,000 tries. Where that matters, [settle](Self::settle), or bound `n` by another limit or a
    ///    concurrency limit.
    /// 2. What is counted above the limit is counted: the next requests are refused until enough has left the window.
    /// 3. What a request would [cost](Self::cost) before its response has no meaning for this limit.
    /// 4. A request that is dropped before its response costs nothing, unless [`settle_dropped`](Self::settle_dropped) says
    ///    how much. A count that has begun goes on when the client leaves. If it fails, a log line says so, and nothing is
    ///    counted.
    /// 5. The head of the response tells the cost, as for [`settle`](Self::settle). A handler that knows it only at the end of
    ///    a body counts it itself, by [`Charge::spent`](crate::Charge::spent).
    #[must_use]
    pub fn count_afterwards(mut self, cost: impl Fn(&Exchange<'_>) -> u64 + Send + Sync + 'static) -> Self {
        self.settle = Some(Arc::new(cost));
        self.counts_afterwards = true;
        self
    }

    /// For how long a charge stays reserved that is not [settled](Self::settle): then its units are given back. Default: a
    /// minute, or the window if that is shorter.
    ///
    /// 1. For so long a request without a response takes units from others: one whose client hangs up, or one of a process
    ///    that is killed. Hence the short default.
    /// 2. A response that takes longer than its lease loses nothing. It is settled all the same, and counts as of its
    ///    admission. Only its units are free for others in between, so make the lease longer than most responses take.
    ///
    /// It has no meaning for a limit that does not settle.
    #[must_use]
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// Settles a request at so many units, at most its charge if it has one, as soon as it is dropped before its response:
    /// its client has hung up, or the service has failed or panicked. Default: it stays charged until its
    /// [`lease`](Self::lease) ends, and then has cost nothing.
    ///
    /// ```
    /// use tower_sliding_window::{Limit, PeerIp};
    ///
    /// // 500 are reserved for an answer. A client that leaves before it has used 50.
    /// let tokens = Limit::per_hour("tokens", 10_000)
    ///     .by(PeerIp::new())
    ///     .cost(|_| 500)
    ///     .settle(|o| o.response().headers.get("x-used").and_then(|used| used.to_str().ok()?.parse().ok()).unwrap_or(500))
    ///     .settle_dropped(50);
    /// ```
    ///
    /// 1. With 0, a client that hangs up gets its units back at once. It can make the service work for nothing, as often as
    ///    it likes.
    /// 2. With `u64::MAX`, it pays its charge for the whole window. Where clients share a key, as by
    ///    [`Everyone`](crate::Everyone), it then closes the limit for all of them.
    /// 3. A request that is dropped while the store decides is settled once it is decided, since it may be counted. A request
    ///    that [waits for room](crate::RateLimitLayer::wait_up_to) leaves the line instead. If it is counted at that moment,
    ///    it stays charged until its lease ends.
    /// 4. A task of the current runtime settles, within the layer's deadline. Without a runtime the lease ends the charge.
    ///
    /// It has no meaning for a limit that does not settle.
    #[must_use]
    pub fn settle_dropped(mut self, units: u64) -> Self {
        self.dropped = Some(units);
        self
    }
}
