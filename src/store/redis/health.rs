//! What is known of the health of a connection to one server.

use std::{
    future::Future,
    mem,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use redis::{RedisResult, Value};

use super::connection::ends_the_connection;

/// A connection that left this many requests in a row unanswered is dropped.
pub(super) const MAX_UNANSWERED: u32 = 3;

/// A caller that leaves sooner, as when its client hangs up, says nothing of the connection.
const SOON: Duration = Duration::from_millis(5);

/// Shared by all that send over the connection.
#[derive(Debug)]
pub(super) struct Health {
    /// The generation that it belongs to, and the present one of its pool.
    generation: u64,
    present: Arc<AtomicU64>,
    unanswered: AtomicU32,
}

impl Health {
    /// Of a connection that is about to be made: if the generation ends meanwhile, it may have reached the old server.
    pub(super) fn of_next(present: &Arc<AtomicU64>) -> Self {
        let generation = present.load(Ordering::Relaxed);
        Self { generation, present: Arc::clone(present), unanswered: AtomicU32::new(0) }
    }

    pub(super) fn has_broken(&self) -> bool {
        self.unanswered.load(Ordering::Relaxed) >= MAX_UNANSWERED
            || self.generation != self.present.load(Ordering::Relaxed)
    }

    /// Waits for a reply, and notes what it says about the connection.
    pub(super) async fn watch(&self, reply: impl Future<Output = RedisResult<Value>>) -> RedisResult<Value> {
        let asked = Asked { health: self, at: Instant::now() };
        let outcome = reply.await.and_then(Value::extract_error);
        if outcome.as_ref().is_err_and(redis::RedisError::is_timeout) {
            return outcome;
        }
        mem::forget(asked);
        match &outcome {
            Err(error) if ends_the_connection(error) => self.end_generation(),
            _ => self.unanswered.store(0, Ordering::Relaxed),
        }
        outcome
    }

    /// Every connection of this generation is replaced, once however many of them fail.
    fn end_generation(&self) {
        let next = self.generation + 1;
        let _ = self.present.compare_exchange(self.generation, next, Ordering::Relaxed, Ordering::Relaxed);
    }
}

/// A request that counts as unanswered when this is dropped: the reply took too long for the client, or for the caller, whose
/// deadline drops the wait in the middle of it.
struct Asked<'a> {
    health: &'a Health,
    at: Instant,
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        if self.at.elapsed() >= SOON {
            self.health.unanswered.fetch_add(1, Ordering::Relaxed);
        }
    }
}
