//! Sends the checks and settlements of one runtime, and single commands: resets a key, and tries a new store out.

use std::{
    collections::BTreeMap,
    error::Error,
    future::Future,
    iter,
    sync::{Arc, Weak, atomic::Ordering},
    time::{Duration, Instant},
};

use redis::{RedisError, RedisResult, Value, cmd};
use tokio::{
    runtime::Handle,
    task::{JoinSet, yield_now},
    time::sleep,
};

use super::{
    batch::Batch,
    job::{Answer, Job, hash_slot},
    queue::{CAPACITY, Permit, Queue},
};
use crate::{
    check::Check,
    clock::Clock,
    error::{StoreError, StoreErrorKind},
    key::Key,
    limit::Limit,
    local::LocalState,
    metrics,
    store::redis::{
        connect::{ASKING, Connection, Pool, Server, failure, needs_new_connection, was_not_run},
        keys::{HASH_SLOTS, Keys},
    },
};

/// The queues of a cluster: more than most clusters have nodes.
const CLUSTER_QUEUES: usize = 16;

/// To a server that is far away, a batch leaves this often, and only so many are in flight.
const BATCH_INTERVAL: Duration = Duration::from_millis(1);
const MOST_IN_FLIGHT: u128 = 64;

/// The parts of a store that the dispatchers of all runtimes share.
pub(crate) struct Config {
    pub(crate) server: Arc<Server>,
    pub(crate) keys: Keys,
    /// The clock of the store, instead of the server's, which the script reads.
    pub(crate) clock: Option<Clock>,
    pub(crate) local_state: LocalState,
}

pub(crate) struct Dispatcher {
    pub(super) config: Arc<Config>,
    pub(crate) runtime: Handle,
    pool: Pool,
    /// One, and one of releases. In a cluster, one of each for each of equal parts of the slots, so that a slow node delays only its
    /// own checks.
    queues: Box<[[Arc<Queue>; 2]]>,
}

impl Dispatcher {
    pub(crate) fn new(config: Arc<Config>, runtime: Handle) -> Self {
        let server = &config.server;
        let count = if server.is_cluster() { CLUSTER_QUEUES } else { 1 };
        let queue = || Queue::new(server.connections() as usize, CAPACITY / count);
        let queues = iter::repeat_with(|| [queue(), queue()]).take(count).collect();
        let pool = Pool::new(server, Arc::clone(&config.local_state.round_trip.distance));
        Self { config, runtime, pool, queues }
    }

    pub(crate) fn is_cluster(&self) -> bool {
        self.queues.len() > 1
    }

    /// Sends a job, or lets a task do it. While it waits for the answer, it holds nothing of the dispatcher, which so ends with its
    /// runtime, even if nobody polls the future.
    ///
    /// If nothing is in flight and a connection works, the caller of a check sends it.
    pub(crate) async fn ask(self: Arc<Self>, job: Box<Job>) -> Answer {
        let (queue, wait) = (self.queue(job.check(), job.is_release()), job.may_wait());
        // Until the first reply, a task sends it, and hears the reply even if it comes too late for the caller.
        if job.is_check()
            && wait.is_none()
            && let Some(permit) = queue.lone_permit()
            && self.config.local_state.round_trip.known().is_some()
            && let Some(connection) = self.pool.share()
        {
            let (dispatcher, config) = (Arc::downgrade(&self), Arc::clone(&self.config));
            drop(self);
            // In a box, since only few futures send their check themselves.
            return Box::pin(send_alone(job, connection, permit, dispatcher, config)).await;
        }
        // Dropped after it, so that the job of a caller that stops waiting is cancelled before it is counted.
        let (answer, caller) = match queue.push(job) {
            Ok(queued) => queued,
            Err(answer) => return answer,
        };
        match wait {
            None => {
                if let Some(permit) = self.batch_permit(queue) {
                    self.runtime.spawn(Arc::clone(&self).serve(permit));
                }
            }
            Some(wait) if !queue.is_gathering.swap(true, Ordering::SeqCst) => {
                self.runtime.spawn(Arc::clone(&self).serve_after(wait, Arc::clone(queue)));
            }
            Some(_) => {}
        }
        drop(self);
        let answer = answer.await;
        caller.leave();
        answer.unwrap_or_else(|error| Err(without_runtime(error)))
    }

    pub(super) fn queue(&self, check: &Check, is_release: bool) -> &Arc<Queue> {
        let queues = match &*self.queues {
            [queues] => queues,
            all => &all[usize::from(hash_slot(check, &self.config.keys)) * all.len() / usize::from(HASH_SLOTS)],
        };
        &queues[usize::from(is_release)]
    }

    /// So many batches are in flight that a check waits for no more than a fraction of the round trip. A server that is slow, and not
    /// far away, gets no more of them: they would wait there, where keys take no turns.
    fn batch_permit(&self, queue: &Arc<Queue>) -> Option<Permit> {
        queue.batch_permit(|| {
            let round_trip = &self.config.local_state.round_trip;
            let round_trip = round_trip.smoothed().min(round_trip.distance());
            (round_trip.as_micros() / BATCH_INTERVAL.as_micros()).min(MOST_IN_FLIGHT) as usize
        })
    }

    /// Lets prefetches wait for each other.
    async fn serve_after(self: Arc<Self>, wait: Duration, queue: Arc<Queue>) {
        sleep(wait).await;
        // A prefetch that comes later is gathered by another task.
        queue.is_gathering.store(false, Ordering::SeqCst);
        if let Some(permit) = self.batch_permit(&queue) {
            self.serve(permit).await;
        }
    }

    /// Sends batches until the queue is empty.
    async fn serve(self: Arc<Self>, mut permit: Permit) {
        loop {
            // Tasks that are ready to run may add their checks to the batch.
            yield_now().await;
            let Some(jobs) = permit.next_batch() else { return };
            self.send_all(jobs).await;
        }
    }

    /// Sends jobs as one batch. In a cluster, sends the jobs of each slot as one batch, all at once.
    async fn send_all(self: &Arc<Self>, jobs: Vec<Box<Job>>) {
        if !self.is_cluster() {
            return self.send_batch(jobs).await;
        }
        let mut slots = BTreeMap::<u16, Vec<_>>::new();
        for job in jobs {
            slots.entry(hash_slot(job.check(), &self.config.keys)).or_default().push(job);
        }
        let send = |jobs| {
            let dispatcher = Arc::clone(self);
            async move { dispatcher.send_batch(jobs).await }
        };
        let mut batches: JoinSet<_> = slots.into_values().map(send).collect();
        while batches.join_next().await.is_some() {}
    }

    async fn send_batch(&self, mut jobs: Vec<Box<Job>>) {
        let connection = self.pool.take().await;
        // Callers may have stopped waiting while the connection was opened.
        jobs.retain(|job| !job.is_cancelled());
        if jobs.is_empty() {
            return;
        }
        let mut batch = Batch::new(jobs, self.config.clock.as_ref());
        let reply = self.try_send(connection, &batch, false).await;
        let reply = self.try_again(&mut batch, reply).await;
        batch.finish(reply);
    }

    /// The reply after a second try, if that may help. A node of a cluster that does not have the slot has run nothing, so all
    /// jobs are sent again. After a broken connection, only those that count once. A check whose callers have left is not.
    async fn try_again(
        &self,
        batch: &mut Batch,
        mut reply: Result<RedisResult<Value>, StoreError>,
    ) -> Result<Value, StoreError> {
        if let Ok(Err(error)) = &reply
            && self.is_worth_another_try(error)
        {
            let (has_not_run, failed) = (self.has_certainly_not_run(error), failure(error.clone()));
            if batch.keep(|job| has_not_run || job.is_repeatable(), &failed) {
                let connection = self.pool.take().await;
                if batch.keep(|job| !job.is_cancelled(), &failed) {
                    reply = self.try_send(connection, batch, true).await;
                }
            }
        }
        reply?.map_err(failure)
    }

    fn is_worth_another_try(&self, error: &RedisError) -> bool {
        needs_new_connection(error) || self.has_certainly_not_run(error)
    }

    fn has_certainly_not_run(&self, error: &RedisError) -> bool {
        self.is_cluster() && was_not_run(error)
    }

    /// Sends a batch over a connection. The outer error says that there was none. The inner
    /// one is of the server or of the connection.
    async fn try_send(
        &self,
        connection: Result<(Connection, impl Send), StoreError>,
        batch: &Batch,
        again: bool,
    ) -> Result<RedisResult<Value>, StoreError> {
        let (mut connection, _pooled) = connection?;
        Ok(batch.send(&mut connection, &self.config, again).await)
    }

    /// Runs the script without a check, and deletes a key that no limit has. So the server is reached, knows the script,
    /// and lets this user run it and write at our keys.
    pub(crate) async fn try_out(self: Arc<Self>) -> Result<(), StoreError> {
        self.in_task(|dispatcher| async move {
            let batch = Batch::new(Vec::new(), dispatcher.config.clock.as_ref());
            let connection = dispatcher.pool.take().await;
            dispatcher.try_send(connection, &batch, false).await?.map_err(failure)?;
            dispatcher.unlink(&format!("{}:", dispatcher.config.keys.prefix)).await?;
            dispatcher.pool.open_all().await;
            Ok(())
        })
        .await
    }

    /// Forgets the counted units of a limit and a key.
    pub(crate) async fn reset(self: Arc<Self>, limit: Limit, key: &Key) -> Result<(), StoreError> {
        let key = self.config.keys.of(&limit, key);
        let outdated = self.config.local_state.outdate(vec![limit], None);
        let result = self.in_task(|dispatcher| async move { dispatcher.unlink(&key).await }).await;
        drop(outdated);
        result
    }

    /// Runs a future that takes a connection in a task, which ends if the caller stops waiting. Only the task holds the dispatcher, so
    /// that it ends with its runtime, even if nobody polls the caller.
    async fn in_task<T, F>(self: Arc<Self>, run: impl FnOnce(Arc<Self>) -> F) -> Result<T, StoreError>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, StoreError>> + Send + 'static,
    {
        let (runtime, mut task) = (self.runtime.clone(), JoinSet::new());
        task.spawn_on(run(self), &runtime);
        let result = task.join_next().await.ok_or_else(|| without_runtime("its task is gone"))?;
        result.unwrap_or_else(|error| Err(without_runtime(error)))
    }

    /// Deletes a key. Deletes it again if the connection was broken, which does no harm.
    async fn unlink(&self, key: &str) -> Result<(), StoreError> {
        let mut command = cmd("UNLINK");
        command.arg(key);
        let send = async |again| {
            let (mut connection, _pooled) = self.pool.take().await?;
            Ok::<_, StoreError>(connection.send(&command, again, Instant::now()).await)
        };
        let mut reply = send(false).await?;
        if reply.as_ref().is_err_and(|error| self.is_worth_another_try(error)) {
            reply = send(true).await?;
        }
        reply.map(drop).map_err(failure)
    }
}

/// Sends the check of its own caller. A task takes over after an error: a future that may not be polled must not wait for a
/// connection.
async fn send_alone(
    job: Box<Job>,
    mut connection: Connection,
    permit: Permit,
    dispatcher: Weak<Dispatcher>,
    config: Arc<Config>,
) -> Answer {
    metrics::batch(1, || 0);
    let mut batch = Batch::new(vec![job], config.clock.as_ref());
    let reply = batch.send(&mut connection, &config, false).await;
    drop(permit);
    let error = match reply {
        Ok(reply) => return batch.only_answer(reply),
        Err(error) => error,
    };
    let Some(dispatcher) = dispatcher.upgrade() else { return Err(without_runtime(error)) };
    let try_again = |dispatcher: Arc<Dispatcher>| async move {
        let reply = dispatcher.try_again(&mut batch, Ok(Err(error))).await?;
        batch.only_answer(reply)
    };
    dispatcher.in_task(try_again).await
}

/// No failure of the store.
pub(crate) fn without_runtime(cause: impl Into<Box<dyn Error + Send + Sync>>) -> StoreError {
    StoreError::new(ASKING, StoreErrorKind::Other, cause).of_one_check()
}
