//! Sends what waits in the queue, one batch a slot.

use std::{error::Error, future::Future, pin::Pin, sync::Arc};

use redis::{RedisError, Value, cmd};
use tokio::{runtime::Handle, sync::oneshot, task::yield_now};

use super::{
    batch::Batch,
    connection::{Connections, ends_the_connection},
    keys::redis_key,
    queue::{GivenBack, Job, Outcome, Queue, Slot},
    script::{DECIDE, Script},
};
use crate::{
    check::Check,
    decision::Decision,
    error::StoreError,
    key::Key,
    limit::Limit,
    metrics::{self, Stopwatch},
    settlement::{Settled, Settlement},
    store::{clock::Clock, epoch::Epoch},
};

pub(super) struct Dispatcher {
    connections: Connections,
    script: Script,
    queue: Arc<Queue>,
    prefix: String,
    /// A clock of this process instead of the server's.
    clock: Option<Clock>,
    epoch: Epoch,
}

impl Dispatcher {
    pub(super) fn new(connections: Connections, max_in_flight: usize, prefix: String, clock: Option<Clock>) -> Self {
        let script = Script::new(DECIDE);
        let epoch = Epoch::by(clock.clone().unwrap_or_else(Clock::monotonic));
        Self { connections, script, queue: Queue::new(max_in_flight), prefix, clock, epoch }
    }

    pub(super) fn epoch(&self) -> &Epoch {
        &self.epoch
    }

    pub(super) fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Sends a check.
    pub(super) fn decide(self: &Arc<Self>, check: Check) -> Result<Submitted<Decision>, StoreError> {
        let (caller, outcome) = oneshot::channel();
        Ok((outcome, self.submit("deciding a check", Job::Decide { check, caller })?))
    }

    /// Sends a settlement.
    pub(super) fn settle(self: &Arc<Self>, settlement: Settlement) -> Result<Submitted<Settled>, StoreError> {
        let (caller, outcome) = oneshot::channel();
        let given_back =
            GivenBack::new(&self.epoch, settlement.check().charges().map(|charge| charge.limit().clone()).collect());
        Ok((outcome, self.submit("settling an admission", Job::Settle { settlement, caller, given_back })?))
    }

    /// Queues a job, and sees to it that it is sent: in a task, or, if nothing is in flight, by whoever polls the future
    /// that this returns.
    fn submit(self: &Arc<Self>, doing: &'static str, job: Job) -> Result<Option<Sending>, StoreError> {
        let runtime = Handle::try_current().map_err(|cause| StoreError::new(doing, cause))?;
        if let Some(slot) = self.queue.enter_alone() {
            return Ok(Some(Box::pin(Arc::clone(self).serve_one(job, slot, runtime))));
        }
        // Others are answered as ever: that one cannot come along is no reason to ask no more.
        self.queue.push(job).map_err(|full| {
            metrics::queue_full();
            StoreError::new(doing, full).of_one_check()
        })?;
        if let Some(slot) = self.queue.enter() {
            runtime.spawn(Arc::clone(self).serve(slot));
        }
        Ok(None)
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
                self.run(Batch::new(jobs)).await;
                continue;
            }
            match slot.leave() {
                Some(again) => slot = again,
                None => return,
            }
        }
    }

    /// Sends a batch, and once more if the connection was broken: of that, what counts once however often it is sent.
    async fn run(&self, mut batch: Batch) {
        let now = self.now();
        let mut reply = self.try_send(&batch, &now, false).await;
        if let Ok(Err(error)) = &reply
            && ends_the_connection(error)
        {
            batch = batch.without_unrepeatable(&StoreError::new("deciding a check", error.clone()));
            if !batch.is_empty() {
                reply = self.try_send(&batch, &now, true).await;
            }
        }
        let reply = reply.and_then(|reply| Ok(reply?));
        batch.finish(reply.map_err(|cause| StoreError::new("deciding a check", cause)));
    }

    /// Microseconds since the Unix epoch by a clock of this process, or nothing for the server's.
    fn now(&self) -> String {
        self.clock.as_ref().map_or_else(String::new, |clock| clock.now().to_string())
    }

    /// The inner error is the server's or the connection's, the outer one that there was no connection.
    async fn try_send(&self, batch: &Batch, now: &str, again: bool) -> Result<Result<Value, RedisError>, Cause> {
        let stopwatch = Stopwatch::start();
        let reply = match self.connections.get().await {
            Ok(mut connection) => {
                Ok(self.script.run(&mut connection, |command| batch.write(command, &self.prefix, now, again)).await)
            }
            Err(error) => Err(error.into()),
        };
        stopwatch.script();
        reply
    }

    /// Sends a batch of nothing: reaches the server, loads the script, and tells whether this user may run it.
    pub(super) async fn try_out(&self) -> Result<(), StoreError> {
        let reply = self.try_send(&Batch::default(), &self.now(), false).await.and_then(|reply| Ok(reply?));
        reply.map(drop).map_err(|cause| StoreError::new("connecting to Redis", cause))
    }

    /// Deletes a key. Deleting it twice does no harm, so it is sent once more if the connection was broken.
    pub(super) async fn reset(&self, limit: &Limit, key: &Key) -> Result<(), StoreError> {
        let mut command = cmd("UNLINK");
        command.arg(redis_key(&self.prefix, limit, key));
        let unlink = async || Ok::<_, Cause>(self.connections.get().await?.send(&command).await);
        let outcome = async {
            match unlink().await? {
                Err(error) if ends_the_connection(&error) => unlink().await??,
                outcome => outcome?,
            };
            Ok(())
        };
        let given_back = GivenBack::new(&self.epoch, vec![limit.clone()]);
        let outcome = outcome.await;
        drop(given_back);
        outcome.map_err(|cause: Cause| StoreError::new("resetting a key", cause))
    }
}

/// Where the outcome arrives, and what has to be polled until then, if anything.
pub(super) type Submitted<T> = (oneshot::Receiver<Outcome<T>>, Option<Sending>);

pub(super) type Sending = Pin<Box<dyn Future<Output = ()> + Send>>;

type Cause = Box<dyn Error + Send + Sync>;
