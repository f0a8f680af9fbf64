//! The settings of a breaker.

use std::time::Duration;

/// Settings of a breaker, which stops asking a store that has failed repeatedly.
///
/// 1. It opens after five [failures](Self::failures) in a row by default. A failure is a check, settlement or reset that the
///    store answers with an error, or not within the deadline. Any answer starts the count anew.
/// 2. While it is open, callers get [`Error::BreakerOpen`](crate::Error::BreakerOpen) with the last failure at once. Then
///    the route's [failure mode](crate::limiter::FailureMode) or the caller decides. The [refusal cache](crate::Limiter::refusal_cache) still refuses.
/// 3. All clones of a store with a [local state](crate::Store::local_state), such as `RedisStore`, share one breaker with
///    the default settings. A limiter or layer that sets a breaker has its own, which its clones share. On other stores,
///    each limiter or layer has its own.
/// 4. A timeout counts only for checks with the same deadline or a shorter one, so a limiter with a short deadline never
///    cuts off one with more time. An error counts for all. An answer counts for all deadlines that are at least as long as
///    it took. A timeout does not count if the request had spent more than half of the deadline elsewhere.
/// 5. While it is open, a probe goes to the store every [200 ms](Self::probe_every): the same check at no cost, with
///    the longest deadline of the refused callers. No caller waits for it. The probes are a task on a caller's runtime,
///    which ends when the breaker closes or the last limiter is dropped. If that runtime ends, the runtime of another
///    caller runs the probes. If that runtime blocks, or there is none, a caller's own check serves as the probe, once
///    no probe has begun or ended for twice the interval plus the caller's deadline.
/// 6. An answered probe closes it. After that, a single failure opens it again. Once another check is answered, it
///    again takes the full number of failures.
/// 7. A cost above the limit, a limit that cannot be chosen, and an error
///    [of one check alone](crate::error::StoreError::of_one_check) are not failures of the store.
///
/// A closed breaker costs a check one atomic load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub struct Breaker {
    pub(super) failures: u32,
    pub(super) probe_every: Duration,
}

impl Breaker {
    /// A breaker that opens after five failures in a row, and then sends a probe every 200 ms.
    pub const fn new() -> Self {
        Self { failures: 5, probe_every: Duration::from_millis(200) }
    }

    /// The number of failures in a row that open it. Default: 5. With zero it never opens: the store is asked every time.
    pub const fn failures(mut self, in_a_row: u32) -> Self {
        self.failures = in_a_row;
        self
    }

    /// The time between two probes, at least a millisecond. Default: 200 ms. For that long it may stay open after the store
    /// is back.
    pub const fn probe_every(mut self, interval: Duration) -> Self {
        self.probe_every = interval;
        self
    }
}

impl Default for Breaker {
    fn default() -> Self {
        Self::new()
    }
}
