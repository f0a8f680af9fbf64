//! Failure modes, and decisions in this process while the store cannot decide.

use std::num::NonZeroU32;

use super::Core;
use crate::{check::Check, decision::Decision, error::Error, metrics, store::Store};

/// The behavior when the store cannot decide in time.
///
/// Under every failure mode, a refusal stays a refusal, and a layer rejects a request without a
/// key. A refusal or a ban that the process [knows](crate::Limiter::refusal_cache) stands until its
/// time has passed, even if the store fails. So a client does not gain by making its checks fail.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum FailureMode {
    /// Let the request through, without rate-limit figures. But if the refusal cache knows a
    /// refusal for the request, it gets this refusal.
    #[default]
    Open,
    /// Reject the request, as long as the store cannot decide. But if the refusal cache knows a
    /// refusal for the request, it gets this refusal.
    Closed,
    /// Decide in this process, under a share of each limit. See [`Share`].
    Local(Share),
}

// `Limit::shared_by` divides the units.
/// The fraction of each limit that one process may admit while the store cannot decide: one `p`th
/// with `p` processes.
///
/// 1. Under a limit of `n` units, each of `p` processes admits at most `n / p` in a window, rounded
///    down. So if there are no more than `p` processes, together they admit at most the limit.
/// 2. Every check still goes to the store first, except while the
///    [breaker](crate::limiter::Breaker) is open. So the store decides again as soon as it answers
///    a check or a probe. The store and the processes count separately. So in a window in which the
///    store fails or comes back, up to twice the limit may be admitted: once by the store, and once
///    by all processes together.
/// 3. A check with a cost above the share fails until the store is back. A limiter returns the
///    store's error, and a layer answers with a 503. If the share is less than one unit, any cost
///    is above it. The error is not [`NeverFits`](crate::Error::NeverFits), since the cost fits
///    into the whole limit.
/// 4. A limit in the [shadow](crate::Charge::in_shadow) keeps all its units.
/// 5. Units that were reserved in the process are settled in the process, even if the store is
///    back. The settlement has to go through a clone of the same limiter. A settlement [by
///    id](crate::settlement::Settlement::by_id) goes to the store, which does not know the
///    admission.
/// 6. A limiter and its clones, or a layer and its services, count in one
///    [`MemoryStore`](crate::MemoryStore) with the default capacity. Layers that share a limit
///    count together in the process if they are made [on one limiter](crate::RateLimitLayer::new).
///    Otherwise they count separately.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    processes: NonZeroU32,
}

impl Share {
    /// One process's share, out of this number of `processes`.
    ///
    /// # Panics
    ///
    /// If `processes` is 0. In a `const`, 0 does not compile.
    #[track_caller]
    pub const fn one_of(processes: u32) -> Self {
        match NonZeroU32::new(processes) {
            Some(processes) => Self { processes },
            None => panic!("a share is one of at least one process"),
        }
    }
}

impl FailureMode {
    /// The label in metrics.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Closed => "closed",
            Self::Local(_) => "local",
        }
    }
}

impl Core {
    /// Decides a check that the store has failed to decide. If the refusal cache knows a refusal
    /// for the check, returns it. Otherwise decides under the failure mode's share. Returns the
    /// store's error if the mode has no share, or if the share can never admit the check.
    pub(super) fn decide_instead(
        &self,
        check: Option<&Check>,
        mode: FailureMode,
        error: Error,
    ) -> Result<Decision, Error> {
        metrics::failed(error.label(), &self.layer);
        if let Some(refusal) = check.and_then(|check| self.known(check)) {
            return Ok(refusal.repeated());
        }
        if let FailureMode::Local(share) = mode
            && let Some(check) = check.and_then(|check| check.shared_by(share.processes))
            && let Some(Ok(decision)) = self.local.decide_now(&check)
        {
            metrics::decided(&decision, &self.layer);
            let decision = decision.instead_of(error);
            return Ok(decision.with_retry_reserved_after(self.retry_reserved_after));
        }
        Err(error)
    }
}
