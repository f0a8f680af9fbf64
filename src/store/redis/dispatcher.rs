//! Sends what waits in the queue, one batch a slot.

use std::{error::Error, future::Future, pin::Pin, sync::Arc};

use redis::{RedisError, Value, cmd};
use tokio::{runtime::Handle, sync::oneshot, task::yield_now};

use super::{
    batch::Batch,
    connection::{Connections, ends_the_connection},
    keys::redis_key,
    queue::{Job, Outcome, Queue, Slot},
    script::Script,
};
use crate::{
    check::Check,
    error::StoreError,
    key::Key,
    limit::Limit,
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
        let script = Script::new(include_str!("sliding_log.lua"));
        let epoch = Epoch::by(clock.clone().unwrap_or_else(Clock::monotonic));
        Self { connections, script, queue: Queue::new(max_in_flight), prefix, clock, epoch }
    }

    pub(super) fn epoch(&self) -> &Epoch {
        &self.epoch
    }

    pub(super) fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Queues a check, and sees to it that it is sent: in a task, or, if nothing is in flight, by whoever polls the
    /// future that comes with its outcome.
    pub(super) fn submit(self: &Arc<Self>, check: Check) -> Result<Submitted, StoreError> {
        let failed = |cause| StoreError::new("deciding a check", cause);
        let runtime = Handle::try_current().map_err(failed)?;
        let (job, outcome) = Job::new(check);
        if let Some(slot) = self.queue.enter_alone() {
            return Ok((outcome, Some(Box::pin(Arc::clone(self).serve_one(job, slot, runtime)))));
        }
        self.queue.push(job).map_err(|full| StoreError::new("deciding a check", full))?;
        if let Some(slot) = self.queue.enter() {
            runtime.spawn(Arc::clone(self).serve(slot));
        }
        Ok((outcome, None))
    }

    /// Sends one check, and leaves what has queued up meanwhile to a task.
    async fn serve_one(self: Arc<Self>, job: Job, slot: Slot, runtime: Handle) {
        self.decide(Batch::new(vec![job])).await;
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
                self.decide(Batch::new(jobs)).await;
                continue;
            }
            match slot.leave() {
                Some(again) => slot = again,
                None => return,
            }
        }
    }

    async fn decide(&self, batch: Batch) {
        let reply = self.send(&batch).await;
        batch.finish(reply.map_err(|cause| StoreError::new("deciding a check", cause)));
    }

    /// Sends a batch, and once more if the connection was broken.
    async fn send(&self, batch: &Batch) -> Result<Value, Cause> {
        let now = self.clock.as_ref().map_or_else(String::new, |clock| clock.now().to_string());
        match self.try_send(batch, &now, false).await? {
            Err(error) if ends_the_connection(&error) => Ok(self.try_send(batch, &now, true).await??),
            outcome => Ok(outcome?),
        }
    }

    /// The inner error is the server's or the connection's, the outer one that there was no connection.
    async fn try_send(&self, batch: &Batch, now: &str, again: bool) -> Result<Result<Value, RedisError>, Cause> {
        let mut connection = self.connections.get().await?;
        Ok(self.script.run(&mut connection, |command| batch.write(command, &self.prefix, now, again)).await)
    }

    /// Sends a batch of nothing: reaches the server, loads the script, and tells whether this user may run it.
    pub(super) async fn try_out(&self) -> Result<(), StoreError> {
        let reply = self.send(&Batch::default()).await;
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
        self.epoch.end(limit);
        let outcome = outcome.await;
        self.epoch.end(limit);
        outcome.map_err(|cause: Cause| StoreError::new("resetting a key", cause))
    }
}

/// Where the outcome of a check arrives, and what has to be polled until then, if anything.
pub(super) type Submitted = (oneshot::Receiver<Outcome>, Option<Sending>);

pub(super) type Sending = Pin<Box<dyn Future<Output = ()> + Send>>;

type Cause = Box<dyn Error + Send + Sync>;
