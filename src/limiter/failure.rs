//! What happens to the work when there is no decision.

use std::num::NonZeroU32;

use crate::limit::Limit;

/// What to do when the store cannot decide in time.
///
/// No mode applies to a refusal, nor to a request that has no key: only to a store that is slow or gone, and to a limit
/// that cannot be [chosen](crate::KeyedLimit::chosen) and has no [fallback](crate::KeyedLimit::fallback). `Open` leaves that
/// limit out, and the others decide. The other modes refuse the work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum FailureMode {
    /// Let the work through, without rate-limit figures.
    #[default]
    Open,
    /// Refuse the work until the store is back.
    Closed,
    /// Decide in this process, under a share of each limit. See [`Share`].
    Local(Share),
}

/// Which share of each limit one process may admit while the store cannot decide: one of as many as there are processes.
///
/// 1. Of a limit of `n` units, each of `p` processes admits at most `n / p` in a window, rounded down. So all of them
///    together admit at most the limit, if there are no more processes than that.
/// 2. Every check asks the store first, so it decides again as soon as it answers. It does not hear of what was admitted
///    meanwhile, nor does the process know what the store has counted before: in a window that holds a change from the
///    one to the other, both may admit up to the limit.
/// 3. A cost above the share, as any cost where the share is less than one unit, is refused until the store is back:
///    with its error, by a layer with a 503. It would fit into the limit, so it is not
///    [`NeverFits`](crate::Error::NeverFits).
/// 4. A limit in the [shadow](crate::Charge::in_shadow) keeps all of its units, since it refuses nothing. One
///    that could not be [chosen](crate::KeyedLimit::chosen), and has no fallback, has no share: refused, as in 3.
/// 5. What is reserved in the process is settled in the process, through a clone of the same limiter, also when the store
///    is back. A settlement [by id](crate::Settlement::by_id) goes to the store, which does not know it.
/// 6. A limiter and its clones, or a layer and its services, share what they count, in a
///    [`MemoryStore`](crate::MemoryStore) of the usual capacity. Layers that share a limit share it here only if they are
///    made [on one limiter](crate::RateLimitLayer::on).
///
/// ```
/// # #[cfg(feature = "redis")]
/// # fn settings() -> Result<(), Box<dyn std::error::Error>> {
/// use tower_sliding_window::{Everyone, Limit, RateLimitLayer, RedisStore, Share};
///
/// // Four instances: without Redis, each admits 25 a minute.
/// let layer = RateLimitLayer::new(RedisStore::builder("redis://127.0.0.1:6379").build()?)
///     .limit(Limit::per_minute("requests", 100).by(Everyone))
///     .fail_local(Share::one_of(4));
/// # Ok(()) }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    processes: NonZeroU32,
}

impl Share {
    /// The share of one of so many processes. Where their number is not known before run time, it comes
    /// [from](Self::from) a [`NonZeroU32`].
    ///
    /// # Panics
    ///
    /// If there are none. In a `const`, that does not compile.
    #[must_use]
    #[track_caller]
    pub const fn one_of(processes: u32) -> Self {
        match NonZeroU32::new(processes) {
            Some(processes) => Self { processes },
            None => panic!("a share is one of at least one process"),
        }
    }

    /// The limit of this process, if that is at least one unit.
    pub(super) fn of(self, limit: &Limit) -> Option<Limit> {
        limit.of_units(limit.units() / u64::from(self.processes.get()))
    }
}

impl From<NonZeroU32> for Share {
    fn from(processes: NonZeroU32) -> Self {
        Self { processes }
    }
}

impl FailureMode {
    /// Its name in metrics.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Closed => "closed",
            Self::Local(_) => "local",
        }
    }

    /// The share to decide under in this process, if that is what to do.
    pub(crate) fn share(self) -> Option<Share> {
        if let Self::Local(share) = self { Some(share) } else { None }
    }
}
