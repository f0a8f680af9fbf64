//! Sends what waits in the queue of a runtime, one batch a slot.

#[cfg(feature = "cluster")]
use std::collections::HashMap;
use std::{
    error::Error,
    future::{Future, pending},
    iter,
    pin::Pin,
    sync::{Arc, OnceLock},
};

use redis::{RedisError, Value, cmd};
use tokio::{
    runtime::Handle,
    sync::oneshot,
    task::{AbortHandle, JoinSet, yield_now},
};

use super::{
    batch::Batch,
    connection::{Connection, Connections, ends_the_connection},
    job::{GivenBack, Job, Outcome, ToDecide, ToSettle},
    queue::{Alone, CAPACITY, Queue, Slot},
    runtimes::Ending,
    shared::Shared,
};
#[cfg(feature = "cluster")]
use super::{
    connection::is_elsewhere,
    keys::{HASH_SLOTS, Keys},
};
use crate::{
    check::Check,
    decision::Decision,
    error::StoreError,
    key::Key,
    limit::Limit,
    metrics::{self, Stopwatch},
    settlement::{Settled, Settlement},
};

/// Into how many parts the checks of a cluster queue up: more than most have nodes.
#[cfg(feature = "cluster")]
const CLUSTER_QUEUES: usize = 16;

pub(super) struct Dispatcher {
    shared: Arc<Shared>,
    runtime: Handle,
    connections: Connections,
    /// One, or in a cluster one for each of so many equal parts of the slots, so that a node that is slow holds up its
    /// own checks only.
    queues: Box<[Arc<Queue>]>,
    keeper: OnceLock<AbortHandle>,
}

impl Dispatcher {
    pub(super) fn new(shared: Arc<Shared>, runtime: Handle) -> Self {
        let connections = Connections::new(&shared);
        #[cfg(feature = "cluster")]
        let queues = if shared.target.is_cluster() { CLUSTER_QUEUES } else { 1 };
        #[cfg(not(feature = "cluster"))]
        let queues = 1;
        let queue = || Queue::new(shared.connections as usize, CAPACITY / queues);
        let queues = iter::repeat_with(queue).take(queues).collect();
        Self { shared, runtime, connections, queues, keeper: OnceLock::new() }
    }

    /// Keeps something for as long as the runtime lasts and this lives.
    pub(super) fn keep(&self, kept: Ending) {
        let keeper = self.runtime.spawn(async move {
            let _kept = kept;
            pending::<()>().await;
        });
        let _ = self.keeper.set(keeper.abort_handle());
    }

    #[cfg(feature = "cluster")]
    pub(super) fn keys(&self) -> &Keys {
        &self.shared.keys
    }

    pub(super) fn runtime(&self) -> &Handle {
        &self.runtime
    }

    /// Sends a check. In a cluster, all of it lives in one slot.
    pub(super) fn decide(self: &Arc<Self>, check: Check) -> Result<Submitted<Decision>, StoreError> {
        let (caller, outcome) = oneshot::channel();
        Ok((outcome, self.submit(Job::Decide(Box::new(ToDecide { check, caller })))?))
    }

    /// Sends a settlement. In a cluster, all of it lives in one slot.
    pub(super) fn settle(self: &Arc<Self>, settlement: Settlement) -> Result<Submitted<Settled>, StoreError> {
        let (caller, outcome) = oneshot::channel();
        let given_back = GivenBack::new(
            &self.shared.local_state,
            settlement.check().charges().map(|charge| charge.limit().clone()).collect(),
        );
        Ok((outcome, self.submit(Job::Settle(Box::new(ToSettle { settlement, caller, given_back })))?))
    }

    /// Queues a job, and sees to it that it is sent: in a task, or, if nothing is in flight and a connection is idle, by
    /// the future that this returns.
    fn submit(self: &Arc<Self>, job: Job) -> Result<Option<Sending>, StoreError> {
        let (queue, doing) = (self.queue(&job), job.doing());
        if job.may_be_taken_back()
            && let Some(alone) = queue.enter_alone()
            && let Some(connection) = self.connections.share_idle()
        {
            return Ok(Some(Box::pin(Arc::clone(self).send_alone(job, connection, alone))));
        }
        // Others are answered as ever: that one cannot come along is no reason to ask no more.
        queue.push(job).map_err(|full| {
            metrics::queue_full();
            StoreError::new(doing, full).of_one_check()
        })?;
        if let Some(slot) = queue.enter() {
            self.runtime.spawn(Arc::clone(self).serve(slot));
        }
        Ok(None)
    }

    /// Counts a caller of this runtime that gives up. In which of the queues its job stands, if at all, is not known.
    pub(super) fn note_given_up(&self) {
        self.queues.iter().for_each(|queue| queue.note_given_up());
    }

    #[cfg(feature = "cluster")]
    pub(super) fn is_cluster(&self) -> bool {
        self.queues.len() > 1
    }

    /// Where a job waits.
    #[cfg_attr(not(feature = "cluster"), expect(unused_variables))]
    fn queue(&self, job: &Job) -> &Arc<Queue> {
        #[cfg(feature = "cluster")]
        if self.is_cluster() {
            return &self.queues[usize::from(job.hash_slot(self.keys())) * self.queues.len() / usize::from(HASH_SLOTS)];
        }
        &self.queues[0]
    }

    /// Sends one job, and leaves all but a reply to a task: a future that is not polled must not wait for a connection.
    async fn send_alone(self: Arc<Self>, job: Job, mut connection: Connection<'static>, _alone: Alone) {
        metrics::batch(1, || 0);
        let (batch, now, stopwatch) = (Batch::new(vec![job]), self.shared.time.now(), Stopwatch::start());
        let reply = self.send(&mut connection, &batch, &now, false).await;
        stopwatch.script();
        match reply {
            Ok(reply) => batch.finish(Ok(reply)),
            Err(error) => {
                let dispatcher = Arc::clone(&self);
                self.runtime.spawn(async move { dispatcher.conclude(batch, now, Ok(Err(error))).await });
            }
        }
    }

    /// Sends batches until nobody waits any more.
    async fn serve(self: Arc<Self>, mut slot: Slot) {
        loop {
            // Who is about to ask may come along.
            yield_now().await;
            let jobs = slot.next_batch();
            if !jobs.is_empty() {
                metrics::batch(jobs.len(), || slot.waiting());
                self.run_all(jobs).await;
                continue;
            }
            match slot.leave() {
                Some(again) => slot = again,
                None => return,
            }
        }
    }

    /// Sends jobs as one batch, or in a cluster those of each slot as one, all at once.
    async fn run_all(self: &Arc<Self>, jobs: Vec<Job>) {
        #[cfg(feature = "cluster")]
        if self.is_cluster() {
            let mut batches = JoinSet::new();
            for jobs in by_slot(self.keys(), jobs) {
                let dispatcher = Arc::clone(self);
                batches.spawn(async move { dispatcher.run(Batch::new(jobs)).await });
            }
            while batches.join_next().await.is_some() {}
            return;
        }
        self.run(Batch::new(jobs)).await;
    }

    /// Sends a batch.
    async fn run(&self, batch: Batch) {
        let now = self.shared.time.now();
        let reply = self.try_send(&batch, &now, false).await;
        self.conclude(batch, now, reply).await;
    }

    /// Answers a batch. Sends it once more if the connection was broken: of that, what counts once however often it is sent.
    /// In a cluster, also what has not run since its slot is elsewhere.
    async fn conclude(&self, mut batch: Batch, now: String, mut reply: Result<Result<Value, RedisError>, Cause>) {
        if let Ok(Err(error)) = &reply
            && self.is_to_be_sent_again(error)
        {
            if !self.is_elsewhere(error) {
                batch = batch.only(Job::is_repeatable, &StoreError::new("asking Redis", error.clone()));
            }
            if !batch.is_empty() {
                reply = self.try_send(&batch, &now, true).await;
            }
        }
        let reply = reply.and_then(|reply| Ok(reply?));
        batch.finish(reply.map_err(|cause| StoreError::new("asking Redis", cause)));
    }

    fn is_to_be_sent_again(&self, error: &RedisError) -> bool {
        ends_the_connection(error) || self.is_elsewhere(error)
    }

    /// Whether it has not run, since another node of the cluster has its slot.
    #[cfg_attr(not(feature = "cluster"), expect(unused_variables, clippy::unused_self))]
    fn is_elsewhere(&self, error: &RedisError) -> bool {
        #[cfg(feature = "cluster")]
        if self.is_cluster() {
            return is_elsewhere(error);
        }
        false
    }

    /// The inner error is the server's or the connection's, the outer one that there was no connection.
    async fn try_send(&self, batch: &Batch, now: &str, again: bool) -> Result<Result<Value, RedisError>, Cause> {
        let stopwatch = Stopwatch::start();
        let reply = match self.connections.take(again).await {
            Ok(mut connection) => Ok(self.send(&mut connection, batch, now, again).await),
            Err(error) => Err(error.into()),
        };
        stopwatch.script();
        reply
    }

    async fn send(
        &self,
        connection: &mut Connection<'_>,
        batch: &Batch,
        now: &str,
        again: bool,
    ) -> Result<Value, RedisError> {
        let write = |command: &mut _| batch.write(command, &self.shared.keys, now, again);
        self.shared.script.run(connection, batch.room(), write).await
    }

    /// Sends a batch of nothing and deletes a key that no limit has: reaches the server, loads the script, and tells
    /// whether this user may run it there, and write at our keys.
    pub(super) async fn try_out(self: &Arc<Self>) -> Result<(), StoreError> {
        let dispatcher = Arc::clone(self);
        let outcome = self.in_a_task(async move {
            dispatcher.try_send(&Batch::default(), &dispatcher.shared.time.now(), false).await??;
            dispatcher.unlink(&format!("{}:", dispatcher.shared.keys.prefix())).await
        });
        outcome.await.map_err(|cause| StoreError::new("connecting to Redis", cause))
    }

    /// Forgets what a limit counts for a key.
    pub(super) async fn reset(self: &Arc<Self>, limit: Limit, key: &Key) -> Result<(), StoreError> {
        let (dispatcher, key) = (Arc::clone(self), self.shared.keys.of(&limit, key));
        let given_back = GivenBack::new(&self.shared.local_state, vec![limit]);
        let outcome = self.in_a_task(async move { dispatcher.unlink(&key).await }).await;
        drop(given_back);
        outcome.map_err(|cause| StoreError::new("resetting a key", cause))
    }

    /// Does in a task what takes a connection. The task ends with the wait for it.
    async fn in_a_task(&self, doing: impl Future<Output = Result<(), Cause>> + Send + 'static) -> Result<(), Cause> {
        let mut task = JoinSet::new();
        task.spawn_on(doing, &self.runtime);
        while let Some(outcome) = task.join_next().await {
            outcome??;
        }
        Ok(())
    }

    /// Deletes a key. Deleting it twice does no harm, so it is sent once more if the connection was broken.
    async fn unlink(&self, key: &str) -> Result<(), Cause> {
        let mut command = cmd("UNLINK");
        command.arg(key);
        let send = async |again| Ok::<_, Cause>(self.connections.take(again).await?.send(&command).await);
        match send(false).await? {
            Err(error) if self.is_to_be_sent_again(&error) => send(true).await??,
            outcome => outcome?,
        };
        Ok(())
    }
}

impl Drop for Dispatcher {
    fn drop(&mut self) {
        if let Some(keeper) = self.keeper.get() {
            keeper.abort();
        }
    }
}

/// The jobs of each slot, in their order.
#[cfg(feature = "cluster")]
fn by_slot(keys: &Keys, jobs: Vec<Job>) -> Vec<Vec<Job>> {
    let (mut places, mut sets) = (HashMap::new(), Vec::<Vec<Job>>::new());
    for job in jobs {
        let place = *places.entry(job.hash_slot(keys)).or_insert(sets.len());
        match sets.get_mut(place) {
            Some(set) => set.push(job),
            None => sets.push(vec![job]),
        }
    }
    sets
}

/// Where the outcome arrives, and what has to be polled until then, if anything.
pub(super) type Submitted<T> = (oneshot::Receiver<Outcome<T>>, Option<Sending>);

pub(super) type Sending = Pin<Box<dyn Future<Output = ()> + Send>>;

type Cause = Box<dyn Error + Send + Sync>;
