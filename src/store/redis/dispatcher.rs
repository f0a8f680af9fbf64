//! Sends what waits in the queue, one batch a slot.

#[cfg(feature = "cluster")]
use std::collections::HashMap;
use std::{error::Error, future::Future, iter, pin::Pin, sync::Arc};

use redis::{RedisError, Value, cmd};
#[cfg(feature = "cluster")]
use tokio::task::JoinSet;
use tokio::{
    runtime::Handle,
    sync::oneshot,
    task::{self, yield_now},
};

use super::{
    batch::Batch,
    connection::{Connections, ends_the_connection},
    job::{GivenBack, Job, Outcome, ToDecide, ToSettle},
    keys::redis_key,
    queue::{CAPACITY, Queue, Slot},
    script::{DECIDE, Script},
    time::Time,
};
#[cfg(feature = "cluster")]
use super::{connection::is_elsewhere, keys::HASH_SLOTS};
use crate::{
    check::Check,
    decision::Decision,
    error::StoreError,
    key::Key,
    limit::Limit,
    metrics::{self, Stopwatch},
    settlement::{Settled, Settlement},
    store::epoch::Epoch,
};

pub(super) struct Dispatcher {
    connections: Connections,
    script: Script,
    /// One, or in a cluster one for each of so many equal parts of the slots, so that a node that is slow holds up its
    /// own checks only.
    queues: Box<[Arc<Queue>]>,
    prefix: String,
    time: Time,
    epoch: Epoch,
}

impl Dispatcher {
    pub(super) fn new(
        connections: Connections,
        queues: usize,
        max_in_flight: usize,
        prefix: String,
        time: Time,
    ) -> Self {
        let script = Script::new(DECIDE);
        let epoch = time.epoch();
        let queues = iter::repeat_with(|| Queue::new(max_in_flight, CAPACITY / queues)).take(queues).collect();
        Self { connections, script, queues, prefix, time, epoch }
    }

    pub(super) fn epoch(&self) -> &Epoch {
        &self.epoch
    }

    pub(super) fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Sends a check. In a cluster, all of it lives in one slot.
    pub(super) fn decide(self: &Arc<Self>, check: Check) -> Result<Submitted<Decision>, StoreError> {
        let (caller, outcome) = oneshot::channel();
        Ok((outcome, self.submit(Job::Decide(Box::new(ToDecide { check, caller })))?))
    }

    /// Sends a settlement. In a cluster, all of it lives in one slot.
    pub(super) fn settle(self: &Arc<Self>, settlement: Settlement) -> Result<Submitted<Settled>, StoreError> {
        let (caller, outcome) = oneshot::channel();
        let given_back =
            GivenBack::new(&self.epoch, settlement.check().charges().map(|charge| charge.limit().clone()).collect());
        Ok((outcome, self.submit(Job::Settle(Box::new(ToSettle { settlement, caller, given_back })))?))
    }

    /// Queues a job, and sees to it that it is sent: in a task, or, if nothing is in flight, by whoever polls the
    /// future that this returns.
    fn submit(self: &Arc<Self>, job: Job) -> Result<Option<Sending>, StoreError> {
        let doing = job.doing();
        let runtime = || Handle::try_current().map_err(|cause| StoreError::new(doing, cause));
        let queue = self.queue(&job);
        if job.may_be_taken_back()
            && let Some(slot) = queue.enter_alone()
        {
            return Ok(Some(Box::pin(Arc::clone(self).serve_one(job, slot, runtime()?))));
        }
        // What is a task has a runtime. To ask for its handle is to count a reference, which all threads do at one place.
        if task::try_id().is_none() {
            runtime()?;
        }
        // Others are answered as ever: that one cannot come along is no reason to ask no more.
        queue.push(job).map_err(|full| {
            metrics::queue_full();
            StoreError::new(doing, full).of_one_check()
        })?;
        if let Some(slot) = queue.enter() {
            runtime()?.spawn(Arc::clone(self).serve(slot));
        }
        Ok(None)
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
            return &self.queues[usize::from(job.hash_slot()) * self.queues.len() / usize::from(HASH_SLOTS)];
        }
        &self.queues[0]
    }

    /// Sends one job, and leaves what has queued up meanwhile to a task.
    async fn serve_one(self: Arc<Self>, job: Job, slot: Slot, runtime: Handle) {
        metrics::batch(1, || 0);
        self.run(Batch::new(vec![job])).await;
        if let Some(slot) = slot.leave() {
            runtime.spawn(self.serve(slot));
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
            for jobs in by_slot(jobs) {
                let dispatcher = Arc::clone(self);
                batches.spawn(async move { dispatcher.run(Batch::new(jobs)).await });
            }
            while batches.join_next().await.is_some() {}
            return;
        }
        self.run(Batch::new(jobs)).await;
    }

    /// Sends a batch, and once more if the connection was broken: of that, what counts once however often it is sent.
    /// In a cluster, also what has not run since its slot is elsewhere.
    async fn run(&self, mut batch: Batch) {
        let (now, mut again) = (self.time.now(), false);
        let mut reply = self.try_send(&batch, &now, again).await;
        if let Ok(Err(error)) = &reply
            && self.is_to_be_sent_again(error)
        {
            if !self.is_elsewhere(error) {
                batch = batch.only(Job::is_repeatable, &StoreError::new("asking Redis", error.clone()));
            }
            if !batch.is_empty() {
                again = true;
                reply = self.try_send(&batch, &now, again).await;
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
        let reply = match self.connections.get(again).await {
            Ok(mut connection) => {
                let write = |command: &mut _| batch.write(command, &self.prefix, now, again);
                Ok(self.script.run(&mut connection, batch.room(), write).await)
            }
            Err(error) => Err(error.into()),
        };
        stopwatch.script();
        reply
    }

    /// Sends a batch of nothing and deletes a key that no limit has: reaches the server, loads the script, and tells
    /// whether this user may run it there, and write at our keys.
    pub(super) async fn try_out(&self) -> Result<(), StoreError> {
        let outcome = async {
            self.try_send(&Batch::default(), &self.time.now(), false).await??;
            self.unlink(&format!("{}:", self.prefix)).await
        };
        outcome.await.map_err(|cause| StoreError::new("connecting to Redis", cause))
    }

    /// Forgets what a limit counts for a key.
    pub(super) async fn reset(&self, limit: &Limit, key: &Key) -> Result<(), StoreError> {
        let given_back = GivenBack::new(&self.epoch, vec![limit.clone()]);
        let outcome = self.unlink(&redis_key(&self.prefix, limit, key)).await;
        drop(given_back);
        outcome.map_err(|cause| StoreError::new("resetting a key", cause))
    }

    /// Deletes a key. Deleting it twice does no harm, so it is sent once more if the connection was broken.
    async fn unlink(&self, key: &str) -> Result<(), Cause> {
        let mut command = cmd("UNLINK");
        command.arg(key);
        let send = async |again| Ok::<_, Cause>(self.connections.get(again).await?.send(&command).await);
        match send(false).await? {
            Err(error) if self.is_to_be_sent_again(&error) => send(true).await??,
            outcome => outcome?,
        };
        Ok(())
    }
}

/// The jobs of each slot, in their order.
#[cfg(feature = "cluster")]
fn by_slot(jobs: Vec<Job>) -> Vec<Vec<Job>> {
    let (mut places, mut sets) = (HashMap::new(), Vec::<Vec<Job>>::new());
    for job in jobs {
        let place = *places.entry(job.hash_slot()).or_insert(sets.len());
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
