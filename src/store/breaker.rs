//! The breaker: a store that has failed repeatedly is not asked. [`Breaker`] has its rules.

use std::{fmt, future::Future, sync::Arc, time::Duration};

use tokio::{runtime::Handle, time::sleep};

use super::{health::Health, local_state::LocalState};
use crate::{
    decision::Decision,
    error::{Error, StoreError},
};

/// Settings of a breaker: when to answer at once, without asking a store that has failed repeatedly.
///
/// 1. It opens after so many [failures](Self::failures) in a row, five by default: checks, settlements or resets that the
///    store answers with an error, or not within the deadline. Each answer that it does give begins the count anew.
/// 2. While it is open, every answer is [`Error::BreakerOpen`] with the last failure, at once: what happens then is the
///    route's [failure mode](crate::FailureMode), or the caller's choice. A refusal that is
///    [remembered](crate::DenyCache) still is one.
/// 3. A store that has a [local state](crate::Store::local_state), as `RedisStore` has, has one breaker for all of its clones, whatever
///    limiters and layers are made on them, with the usual settings. One that is set on a limiter or layer is its own. Of
///    other stores, each limiter and its clones, or each layer and its services, have one.
/// 4. A limiter in a hurry keeps nobody with more time from the store: a timeout counts only for questions with the same
///    deadline or a shorter one. Questions with a longer deadline are asked until as many of them have failed. An error
///    counts for all, and an answer for all that have as much time as it took. Where less than half of the deadline was
///    left, since the request had waited elsewhere before, a timeout counts for none.
/// 5. As soon as somebody asks, and then [once in a while](Self::probe_every), 200 ms by default, whether anybody asks or
///    not, a probe goes to the store: the same question at no cost. Nobody waits for it. It has as much time as the longest
///    deadline of those who were answered by the breaker. The probes are a task of a caller's runtime that ends when the
///    breaker closes, or with the last limiter that uses it. When that runtime ends, another caller's takes over. Where it
///    stands still, or there is none, the check of one caller is the probe each time that one is overdue: after twice the
///    time between two probes and that caller's deadline.
/// 6. A probe that is answered in time closes it. The next failure then opens it again; after the next answer it takes as
///    many as at first.
/// 7. A cost above the limit, or a limit that cannot be chosen, is not the store's failure, nor is what a store says
///    about [one check alone](crate::StoreError::of_one_check).
/// 8. A closed breaker costs a check the look at one number.
///
/// ```
/// # #[cfg(feature = "redis")]
/// # fn settings() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
/// use tower_sliding_window::{Breaker, Limiter, RedisStore};
///
/// let limiter = Limiter::new(RedisStore::builder("redis://127.0.0.1:6379").build()?);
/// let calm = limiter.clone().breaker(Breaker::new().failures(20).probe_every(Duration::from_secs(1)));
/// let every_time = limiter.breaker(Breaker::off());
/// # Ok(()) }
/// ```
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

    /// No breaker: the store is asked every time.
    pub const fn off() -> Self {
        Self::new().failures(0)
    }

    /// After how many failures in a row it opens. Default: 5. None is [`off`](Self::off).
    pub const fn failures(mut self, in_a_row: u32) -> Self {
        self.failures = in_a_row;
        self
    }

    /// How much time there is between two probes at least, a millisecond or more. Default: 200 ms. For so long it may stay
    /// open after the store is back.
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

/// A limiter's way to a breaker. As long as there is one, probes go on.
pub(crate) struct Circuit(Arc<Health>);

impl Circuit {
    /// The one that all limiters on a store use; a limiter's own where the store has no local state.
    pub(crate) fn of_store(local_state: Option<&LocalState>) -> Self {
        local_state.map_or_else(|| Self::own(Breaker::new()), |local_state| Self::to(Arc::clone(local_state.health())))
    }

    /// One that nobody else uses.
    pub(crate) fn own(settings: Breaker) -> Self {
        Self::to(Arc::new(Health::new(settings)))
    }

    fn to(health: Arc<Health>) -> Self {
        health.add_user();
        Self(health)
    }

    /// Whether questions with this deadline are not asked.
    pub(crate) fn is_open_for(&self, deadline: Duration) -> bool {
        self.0.is_open_for(deadline)
    }

    /// What to answer instead of asking the store, if it is open. Then `probes` may be what to send from now on, each with
    /// the deadline that it is given.
    pub(crate) fn refuse<P, F>(&self, deadline: Duration, probes: impl FnOnce() -> P) -> Option<Error>
    where
        P: Fn(Duration) -> F + Send + 'static,
        F: Future<Output = Result<Result<Decision, StoreError>, Error>> + Send + 'static,
    {
        if !self.is_open_for(deadline) {
            return None;
        }
        let cause = self.0.answer(deadline)?;
        if self.0.sees_to_probes(deadline) && !self.send(&Handle::try_current().ok()?, deadline, probes) {
            return None;
        }
        Some(Error::BreakerOpen(cause))
    }

    /// Counts what came of a question that took so long.
    pub(crate) fn heard<T>(&self, outcome: &Result<T, Error>, took: impl FnOnce() -> Duration) {
        match outcome {
            Ok(_) => self.0.heard_answer(took),
            Err(error) if error.is_the_stores() => self.0.heard_failure(error),
            Err(_) => {}
        }
    }

    /// Sends probes until one is answered, unless there is a task that does and does not get on. Of the limiters, that
    /// holds only what does not keep them alive.
    fn send<P, F>(&self, runtime: &Handle, deadline: Duration, probes: impl FnOnce() -> P) -> bool
    where
        P: Fn(Duration) -> F + Send + 'static,
        F: Future<Output = Result<Result<Decision, StoreError>, Error>> + Send + 'static,
    {
        let mut sent = self.0.probes();
        if sent.as_ref().is_some_and(|sent| !sent.is_finished()) {
            return false;
        }
        let (health, every, probe) = (Arc::downgrade(&self.0), self.0.probe_every(), probes());
        let task = runtime.spawn(async move {
            loop {
                let Some(deadline) = health.upgrade().map(|health| health.begin_probe(deadline)) else { return };
                let pause = sleep(every);
                let outcome = probe(deadline).await.and_then(|answer| Ok(answer?));
                if !health.upgrade().is_some_and(|health| health.end_probe(outcome)) {
                    return;
                }
                pause.await;
            }
        });
        *sent = Some(task.abort_handle());
        true
    }
}

impl Clone for Circuit {
    fn clone(&self) -> Self {
        Self::to(Arc::clone(&self.0))
    }
}

impl Drop for Circuit {
    fn drop(&mut self) {
        self.0.remove_user();
    }
}

impl fmt::Debug for Circuit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
