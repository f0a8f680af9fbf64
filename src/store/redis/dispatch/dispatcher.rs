//! Sends the checks and settlements of one runtime.

use std::{
    collections::HashMap,
    error::Error,
    future::{Future, pending},
    iter,
    pin::Pin,
    sync::{Arc, OnceLock},
    task::{Context, Poll, ready},
    time::Duration,
};

use redis::{RedisError, RedisResult, Value};
use tokio::{
    runtime::Handle,
    sync::oneshot,
    task::{AbortHandle, JoinSet, yield_now},
    time::sleep,
};

use super::{
    batch::{Batch, TimeSource},
    queue::{CAPACITY, Job, Permit, Queue},
};
use crate::{
    admission::AdmissionId,
    check::{Charge, Check},
    decision::Decision,
    error::StoreError,
    local::LocalState,
    metrics::{self, Stopwatch},
    settlement::{Settled, Settlement},
    store::redis::{
        connect::{Connection, Pool, Server, needs_new_connection, was_not_run},
        keys::{HASH_SLOTS, Keys},
    },
};

/// The queues of a cluster: more than most clusters have nodes.
const CLUSTER_QUEUES: usize = 16;

/// The parts of a store that the dispatchers of all runtimes share.
pub(crate) struct Config {
    pub(crate) server: Arc<Server>,
    pub(crate) keys: Keys,
    pub(crate) time: TimeSource,
    pub(crate) local_state: LocalState,
}

pub(crate) struct Dispatcher {
    pub(super) config: Arc<Config>,
    runtime: Handle,
    pub(super) pool: Pool,
    /// One. In a cluster, one for each of equal parts of the slots, so that a slow node delays only its own checks.
    queues: Box<[Arc<Queue>]>,
    guard_task: OnceLock<AbortHandle>,
}

impl Dispatcher {
    pub(super) fn new(config: Arc<Config>, runtime: Handle) -> Self {
        let server = &config.server;
        let count = if server.is_cluster() { CLUSTER_QUEUES } else { 1 };
        let queue = || Queue::new(server.connections() as usize, CAPACITY / count);
        let queues = iter::repeat_with(queue).take(count).collect();
        let pool = Pool::new(server);
        Self { config, runtime, pool, queues, guard_task: OnceLock::new() }
    }

    /// Drops the guard when the runtime shuts down, or with this.
    pub(super) fn drop_with_runtime(&self, guard: impl Send + 'static) {
        let task = self.runtime.spawn(async move {
            let _guard = guard;
            pending::<()>().await;
        });
        let _ = self.guard_task.set(task.abort_handle());
    }

    pub(super) fn keys(&self) -> &Keys {
        &self.config.keys
    }

    pub(crate) fn runtime(&self) -> &Handle {
        &self.runtime
    }

    pub(crate) fn is_cluster(&self) -> bool {
        self.queues.len() > 1
    }

    /// Sends a check. In a cluster, all its keys are in one slot.
    pub(crate) fn decide(self: &Arc<Self>, check: Check) -> Result<Pending<Decision>, StoreError> {
        let (caller, result) = oneshot::channel();
        let job = Job::Decide { check, caller, copies: Vec::new(), id: AdmissionId::from(0) };
        Ok(Pending { result, sending: self.submit(Box::new(job))? })
    }

    /// Sends a settlement. In a cluster, all its keys are in one slot.
    pub(crate) fn settle(self: &Arc<Self>, settlement: Settlement) -> Result<Pending<Settled>, StoreError> {
        let (caller, result) = oneshot::channel();
        // A block outdates no refusal: one that counts its units as reserved is used for a life at most.
        let is_single = |charge: &&Charge| !charge.is_block();
        let limits = settlement.check().charges().filter(is_single).map(|charge| charge.limit().clone()).collect();
        let outdated = self.config.local_state.outdate(limits, None);
        Ok(Pending { result, sending: self.submit(Box::new(Job::Settle { settlement, caller, outdated }))? })
    }

    /// Queues a job for a task that sends it. If nothing is in flight and a connection works, the returned future sends
    /// it instead. A block first waits for others.
    fn submit(self: &Arc<Self>, job: Box<Job>) -> Result<Option<Sending>, StoreError> {
        let (queue, doing, may_wait) = (self.queue(&job), job.doing(), job.may_wait());
        if matches!(*job, Job::Decide { .. })
            && may_wait.is_none()
            && let Some(permit) = queue.lone_permit()
            && let Some(connection) = self.pool.share()
        {
            return Ok(Some(Box::pin(Arc::clone(self).send_alone(job, connection, permit))));
        }
        // An error of this check only: the others in the queue are decided, so a breaker must not count it.
        queue.push(job).map_err(|full| {
            // Blocks leave the queue to callers long before it is full, and are asked for again.
            if !full.is_of_block {
                metrics::queue_full();
            }
            StoreError::new(doing, full).of_one_check()
        })?;
        if let Some(time) = may_wait {
            if queue.begin_gathering() {
                self.runtime.spawn(Arc::clone(self).serve_after(time, Arc::clone(queue)));
            }
        } else if let Some(permit) = queue.batch_permit() {
            self.runtime.spawn(Arc::clone(self).serve(permit));
        }
        Ok(None)
    }

    /// Counts a cancelled job in every queue, since it is not known which one holds it.
    pub(super) fn note_cancelled(&self) {
        self.queues.iter().for_each(|queue| queue.note_cancelled());
    }

    fn queue(&self, job: &Job) -> &Arc<Queue> {
        match &*self.queues {
            [queue] => queue,
            queues => &queues[usize::from(job.hash_slot(self.keys())) * queues.len() / usize::from(HASH_SLOTS)],
        }
    }

    /// Sends a lone check. A task takes over after an error: a future that may not be polled must not wait for a connection.
    async fn send_alone(self: Arc<Self>, job: Box<Job>, mut connection: Connection, _permit: Permit) {
        metrics::batch(1, || 0);
        let (batch, stopwatch) = (Batch::new(vec![job], &self.config.time), Stopwatch::start());
        let reply = batch.send(&mut connection, self.keys(), false).await;
        stopwatch.script();
        match reply {
            Ok(reply) => batch.finish(Ok(reply)),
            Err(error) => {
                let dispatcher = Arc::clone(&self);
                self.runtime.spawn(async move { dispatcher.finish(batch, Ok(Err(error))).await });
            }
        }
    }

    /// Lets blocks wait for each other.
    async fn serve_after(self: Arc<Self>, time: Duration, queue: Arc<Queue>) {
        sleep(time).await;
        queue.end_gathering();
        if let Some(permit) = queue.batch_permit() {
            self.serve(permit).await;
        }
    }

    /// Sends batches until the queue is empty.
    async fn serve(self: Arc<Self>, mut permit: Permit) {
        loop {
            // Tasks that are ready to run may add their checks to the batch.
            yield_now().await;
            let jobs = permit.queue().next_batch();
            if !jobs.is_empty() {
                metrics::batch(jobs.len(), || permit.queue().len());
                self.send_all(jobs).await;
                continue;
            }
            match permit.renew() {
                Some(renewed) => permit = renewed,
                None => return,
            }
        }
    }

    /// Sends jobs as one batch. In a cluster, sends the jobs of each slot as one batch, all at once.
    async fn send_all(self: &Arc<Self>, jobs: Vec<Box<Job>>) {
        if !self.is_cluster() {
            return self.send_batch(jobs).await;
        }
        let mut batches = JoinSet::new();
        for jobs in group_by_slot(self.keys(), jobs) {
            let dispatcher = Arc::clone(self);
            batches.spawn(async move { dispatcher.send_batch(jobs).await });
        }
        while batches.join_next().await.is_some() {}
    }

    async fn send_batch(&self, jobs: Vec<Box<Job>>) {
        let batch = Batch::new(jobs, &self.config.time);
        let reply = self.try_send(&batch, false).await;
        self.finish(batch, reply).await;
    }

    /// Gives the callers of a batch their results, after a second try if that may help. A node of a cluster that does not have
    /// the slot has run nothing, so all jobs are sent again. After a broken connection, only those that count once.
    async fn finish(&self, mut batch: Batch, mut reply: Result<RedisResult<Value>, Cause>) {
        if let Ok(Err(error)) = &reply
            && self.is_worth_another_try(error)
        {
            if !self.has_certainly_not_run(error) {
                batch.keep_repeatable(&StoreError::new("asking Redis", error.clone()));
            }
            if !batch.is_empty() {
                reply = self.try_send(&batch, true).await;
            }
        }
        let reply = reply.and_then(|reply| Ok(reply?));
        batch.finish(reply.map_err(|cause| StoreError::new("asking Redis", cause)));
    }

    pub(super) fn is_worth_another_try(&self, error: &RedisError) -> bool {
        needs_new_connection(error) || self.has_certainly_not_run(error)
    }

    fn has_certainly_not_run(&self, error: &RedisError) -> bool {
        self.is_cluster() && was_not_run(error)
    }

    /// The outer error says that there was no connection. The inner one is of the server or of the connection.
    pub(super) async fn try_send(&self, batch: &Batch, again: bool) -> Result<RedisResult<Value>, Cause> {
        let stopwatch = Stopwatch::start();
        let reply = match self.pool.take().await {
            Ok((mut connection, _pooled)) => Ok(batch.send(&mut connection, self.keys(), again).await),
            Err(error) => Err(error.into()),
        };
        stopwatch.script();
        reply
    }
}

impl Drop for Dispatcher {
    fn drop(&mut self) {
        if let Some(task) = self.guard_task.get() {
            task.abort();
        }
    }
}

/// The jobs of each slot, in their order.
fn group_by_slot(keys: &Keys, jobs: Vec<Box<Job>>) -> Vec<Vec<Box<Job>>> {
    let (mut indices, mut groups) = (HashMap::new(), Vec::<Vec<Box<Job>>>::new());
    for job in jobs {
        let index = *indices.entry(job.hash_slot(keys)).or_insert(groups.len());
        match groups.get_mut(index) {
            Some(group) => group.push(job),
            None => groups.push(vec![job]),
        }
    }
    groups
}

/// A check or settlement on its way.
pub(crate) struct Pending<T> {
    result: oneshot::Receiver<Result<T, StoreError>>,
    /// Sends a lone check. Otherwise a task does it.
    sending: Option<Sending>,
}

type Sending = Pin<Box<dyn Future<Output = ()> + Send>>;

pub(super) type Cause = Box<dyn Error + Send + Sync>;

impl<T> Pending<T> {
    /// The result that a task will send.
    pub(super) fn from_task(result: oneshot::Receiver<Result<T, StoreError>>) -> Self {
        Self { result, sending: None }
    }

    /// Stops waiting. Returns whether a task may still have to send the job.
    pub(crate) fn cancel(&mut self) -> bool {
        let is_open = self.sending.is_none() && !self.result.is_terminated();
        if is_open {
            self.result.close();
        }
        is_open
    }
}

impl<T> Future for Pending<T> {
    type Output = Result<T, StoreError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if let Some(sending) = &mut self.sending {
            // The result is not polled meanwhile: it would wake this very task.
            ready!(sending.as_mut().poll(cx));
            self.sending = None;
        }
        let result = ready!(Pin::new(&mut self.result).poll(cx));
        // Only a runtime that shuts down drops a job without a result.
        Poll::Ready(result.unwrap_or_else(|gone| Err(StoreError::new("asking Redis", gone).of_one_check())))
    }
}
