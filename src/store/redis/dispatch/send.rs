//! Sends checks and settlements, through the [`Dispatcher`] for the caller's runtime. Callers or
//! tasks send them, alone or in batches, with one retry if it may help.

use std::{
    collections::BTreeMap,
    mem,
    sync::{Arc, Weak, atomic::Ordering},
    time::Duration,
};

use redis::{ErrorKind, RedisResult, ServerErrorKind::CrossSlot, Value};
use tokio::{
    task::{JoinSet, yield_now},
    time::{sleep, timeout},
};

use super::{
    batch::Batch,
    dispatcher::{Dispatcher, without_runtime},
    job::{Answer, Job, only_slot},
    queue::{Permit, Queue, Queued},
};
use crate::{
    error::StoreError,
    metrics,
    store::redis::connect::{Connection, Taken, failure},
};

/// If the server is far away, one batch per millisecond of the round trip may be in flight, up to
/// this number. In any case, there may be one batch in flight per connection.
const MOST_IN_FLIGHT: u128 = 64;

/// The outer error means that there was no connection. The inner one is from the connection or
/// server.
type Reply = Result<RedisResult<Value>, StoreError>;

impl Dispatcher {
    /// Sends a job, or lets a task send it. While this future waits, it does not keep the
    /// dispatcher alive. So the dispatcher ends with its runtime, even if nobody polls the future.
    ///
    /// If few checks are in flight and a connection works, the caller itself sends its check.
    pub(crate) async fn ask(self: Arc<Self>, job: Box<Job>) -> Answer {
        let slot = self.slot_of(job.check().first().key());
        if job.is_check()
            && job.may_wait().is_none()
            && let Some(connection) = self.pool.share()
            && let Some(permit) = self.lone_permit(slot)
        {
            let batch = Batch::new(vec![job], slot, &self.common);
            let dispatcher = Arc::downgrade(&self);
            drop(self);
            // Boxed, since few callers' futures send the check themselves, and this inner future
            // would enlarge all of them.
            return Box::pin(send_alone(batch, connection, permit, dispatcher)).await;
        }
        let queued = self.enqueue(job);
        drop(self);
        answer_to(queued).await
    }

    /// Queues a job, and lets a task serve the queue. If the job cannot be queued, returns its
    /// answer.
    pub(super) fn enqueue(self: &Arc<Self>, job: Box<Job>) -> Queued {
        let slot = self.slot_of(job.check().first().key());
        let queue = self.queue(slot, job.is_release());
        let wait = job.may_wait();
        let queued = queue.push(job)?;
        if let Some(wait) = wait {
            if !queue.is_gathering.swap(true, Ordering::SeqCst) {
                self.runtime
                    .spawn(Arc::clone(self).serve_after(wait, Arc::clone(queue)));
            }
        } else if let Some(permit) = self.batch_permit(queue) {
            self.runtime.spawn(Arc::clone(self).serve(permit));
        }
        Ok(queued)
    }

    /// The permit to send a batch. If the server is far away, more batches may be in flight, so
    /// that a check queues for only a fraction of the round trip. If the server is near but slow,
    /// no more batches are sent: they would wait at the server, without fair queueing across keys.
    fn batch_permit(&self, queue: &Arc<Queue>) -> Option<Permit> {
        queue.batch_permit(|| {
            let round_trip = &self.common.local_state.round_trip;
            let round_trip = round_trip.smoothed().min(round_trip.distance());
            round_trip.as_millis().min(MOST_IN_FLIGHT) as usize
        })
    }

    /// Lets prefetches wait for each other, and then serves the queue.
    async fn serve_after(self: Arc<Self>, wait: Duration, queue: Arc<Queue>) {
        sleep(wait).await;
        // If prefetches come later, another task gathers them.
        queue.is_gathering.store(false, Ordering::SeqCst);
        if let Some(permit) = self.batch_permit(&queue) {
            self.serve(permit).await;
        }
    }

    /// Sends batches until the queue is empty.
    async fn serve(self: Arc<Self>, mut permit: Permit) {
        let mut was_alone = false;
        loop {
            // Tasks that are ready may still add their checks to the batch. After a lone check with
            // none behind it, this task does not wait for them. The next check then finds no batch
            // in flight, so its caller sends it.
            if !was_alone || permit.has_waiting() {
                yield_now().await;
            }
            let Some(jobs) = permit.next_batch() else {
                return;
            };
            was_alone = jobs.len() == 1;
            self.send_all(jobs).await;
        }
    }

    /// Sends jobs as one batch. If batches are by slot, sends one batch per slot, all at the same
    /// time.
    async fn send_all(self: &Arc<Self>, jobs: Vec<Box<Job>>) {
        if !self.is_by_slot() {
            return self.send_batch(jobs, None).await;
        }
        // The entry for `None` has cross-slot checks that came before the server first refused one.
        let mut slots = BTreeMap::<Option<u16>, Vec<_>>::new();
        for job in jobs {
            let slot = only_slot(job.check(), &self.common.keys);
            slots.entry(slot).or_default().push(job);
        }
        let mut batches = JoinSet::new();
        for (slot, jobs) in slots {
            let dispatcher = Arc::clone(self);
            batches.spawn(async move { dispatcher.send_batch(jobs, slot).await });
        }
        while batches.join_next().await.is_some() {}
    }

    async fn send_batch(self: &Arc<Self>, mut jobs: Vec<Box<Job>>, slot: Option<u16>) {
        let taken = self.pool.take().await;
        // Callers may have stopped waiting while the connection opened.
        jobs.retain(|job| !job.is_cancelled());
        if jobs.is_empty() {
            return;
        }
        let mut batch = Batch::new(jobs, slot, &self.common);
        let reply = try_send(taken, &mut batch, false).await;
        self.conclude(batch, reply).await;
    }

    /// Answers a batch's callers, after a retry if that may help.
    async fn conclude(self: &Arc<Self>, mut batch: Batch, mut reply: Reply) {
        if !matches!(reply, Ok(Ok(_))) {
            // Boxed, since few batches are retried, and the inner future would enlarge every
            // batch's.
            reply = Box::pin(self.try_again(&mut batch, reply)).await;
        }
        let refusal = ErrorKind::Server(CrossSlot);
        if batch.slot.is_some() || !matches!(&reply, Ok(Err(error)) if error.kind() == refusal) {
            return batch.finish(reply.and_then(|reply| reply.map_err(failure)));
        }
        // The server refuses keys in several slots. From now on, each batch has keys in one slot
        // only.
        self.common.is_by_slot.store(true, Ordering::Relaxed);
        // Each job gets a new id. An earlier try may have counted it under the old one.
        batch.give_back(&batch.jobs, |_, _| true);
        let jobs = mem::take(&mut batch.jobs);
        for (job, caller) in jobs.into_iter().flat_map(Job::apart) {
            let answer = Arc::clone(self).ask_slots(job);
            self.runtime.spawn(async move { caller.send(answer.await) });
        }
    }

    /// Retries a batch if that may help, and returns the last reply. All jobs are sent again if
    /// none has run, either because a cluster node does not have the slot, or because the
    /// connection did not prove that it works. After a broken connection, only idempotent jobs are
    /// sent again. A check whose caller has left is never sent again.
    async fn try_again(self: &Arc<Self>, batch: &mut Batch, mut reply: Reply) -> Reply {
        let Ok(Err(error)) = &reply else { return reply };
        if self.is_worth_another_try(error) {
            self.common.server.note_moved(error);
            let has_not_run = !batch.is_in_doubt || self.has_certainly_not_run(error);
            let failed = failure(error.clone());
            if batch.keep(|job| has_not_run || job.is_repeatable(), &failed) {
                let taken = self.pool.take().await;
                if batch.keep(|job| !job.is_cancelled(), &failed) {
                    let again = batch.is_in_doubt || self.common.server.is_cluster();
                    reply = try_send(taken, batch, again).await;
                }
            }
        }
        reply
    }
}

/// Waits for a queued job's answer. If the caller stops waiting, the job is cancelled before the
/// queue counts it as cancelled.
pub(super) async fn answer_to(queued: Queued) -> Answer {
    let (answer, mut caller) = match queued {
        Ok(queued) => queued,
        Err(answer) => return *answer,
    };
    let answer = match caller.expected.take() {
        None => answer.await,
        // Boxed, since few checks wait with a timeout.
        Some((refusal, wait)) => match Box::pin(timeout(wait, answer)).await {
            // The failure mode now handles the checks ahead, and may admit all of them.
            Ok(Ok(Err(error))) if !error.is_of_one_check => Ok(Ok((*refusal, false))),
            Ok(answer) => answer,
            Err(_) => return Ok((*refusal, false)),
        },
    };
    caller.leave();
    answer.unwrap_or_else(|error| Err(without_runtime(error)))
}

/// Sends a batch over a connection.
async fn try_send(taken: Result<Taken, StoreError>, batch: &mut Batch, again: bool) -> Reply {
    let (connection, _seat) = taken?;
    Ok(batch.send(&connection, again).await)
}

/// Sends a check in its caller's future.
async fn send_alone(
    mut batch: Batch,
    connection: Arc<Connection>,
    permit: Permit,
    dispatcher: Weak<Dispatcher>,
) -> Answer {
    metrics::batch(1, || 0);
    let reply = batch.send(&connection, false).await;
    permit.end();
    answer_alone(batch, reply, dispatcher).await
}

/// Answers a check that its caller has sent. After an error, a task takes over: the caller may stop
/// polling, and a future that nobody polls must not wait for a connection.
pub(super) async fn answer_alone(
    mut batch: Batch,
    reply: RedisResult<Value>,
    dispatcher: Weak<Dispatcher>,
) -> Answer {
    let error = match reply {
        Ok(reply) => return batch.only_answer(reply),
        Err(error) => error,
    };
    let (Some(dispatcher), Some(job)) = (dispatcher.upgrade(), batch.jobs.first_mut()) else {
        return Err(without_runtime(error));
    };
    let answer = job.wait();
    let runtime = dispatcher.runtime.clone();
    runtime.spawn(async move { dispatcher.conclude(batch, Ok(Err(error))).await });
    let answer = answer.await;
    answer.unwrap_or_else(|error| Err(without_runtime(error)))
}
