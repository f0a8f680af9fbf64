//! A runtime's dispatcher: its queues and connections, and the state that it shares with the
//! store's other dispatchers. This file also sends single commands, such as a reset, and tries out
//! a new store. `lone.rs` and `send.rs` send checks and settlements.

use std::{
    error::Error,
    future::Future,
    iter,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use redis::{Cmd, ErrorKind, RedisError, RedisResult, ServerErrorKind, Value, cmd};
use tokio::{
    runtime::{Handle, Id},
    sync::watch,
    task::JoinSet,
    time::timeout,
};

use super::{
    admission::CAPACITY,
    job::Job,
    queue::{Permit, Queue},
};
use crate::{
    check::{Charge, Check},
    clock::ManualClock,
    error::{StoreError, StoreErrorKind},
    key::Key,
    limit::Limit,
    local::{LocalState, Owed, lock},
    metrics,
    store::redis::{
        connect::{ASKING, Pool, Server, failure, needs_new_connection, was_not_run},
        keys::{HASH_SLOTS, Keys},
        script::COMMANDS,
    },
};

/// The number of slot ranges for a cluster. Most clusters have fewer nodes.
const CLUSTER_RANGES: usize = 16;

/// A runtime that is driven runs a new task within this time, even on a busy machine.
const DRIVEN_WITHIN: Duration = Duration::from_secs(1);

/// 2^53: doubles represent every integer up to it.
const MOST_OF_SCRIPT: f64 = 9_007_199_254_740_992.0;

/// The state that a store's dispatchers share. Each runtime has one dispatcher.
pub(crate) struct Common {
    pub(crate) server: Arc<Server>,
    pub(crate) keys: Keys,
    /// A test's clock. `None` if the script reads the server's.
    pub(crate) clock: Option<ManualClock>,
    pub(crate) local_state: LocalState,
    /// The store's dispatchers, usually only one. Each is stored with its runtime's id, so that a
    /// look-up upgrades only one weak pointer. If it upgraded others as well, their dispatchers
    /// might end meanwhile. In that case, the look-up would drop them, and the futures that wait
    /// for them, while it holds the lock.
    pub(crate) dispatchers: Mutex<Vec<(Id, Weak<Dispatcher>)>>,
    /// Tells each dispatcher when the last clone of the store is dropped.
    pub(crate) store: watch::Receiver<()>,
    /// True if each batch has keys in one slot only: in a cluster, and after a server has refused
    /// keys in several slots.
    pub(crate) is_by_slot: AtomicBool,
}

/// Sends the jobs from one tokio runtime.
///
/// 1. Connections, and the tasks that send jobs, work only while their runtime is driven. So each
///    runtime has its own queues and connections, and a runtime that ends or is not driven does not
///    delay others.
/// 2. A task in the runtime owns the dispatcher, so the dispatcher ends with the runtime.
/// 3. All dispatchers end with the store.
pub(crate) struct Dispatcher {
    pub(super) common: Arc<Common>,
    pub(crate) runtime: Handle,
    pub(super) pool: Pool,
    /// Pairs of queues: one for checks and settlements, and one for releases, which are settlements
    /// that only free places. A single server has one pair. A cluster has two per slot range: one
    /// for nodes with even numbers, and one for the others. So a slow node delays only its own
    /// checks, even if the next node has slots in the same range.
    pub(super) queues: Box<[[[Arc<Queue>; 2]; 2]]>,
}

impl Common {
    /// The current runtime's dispatcher. The thread that completes unfinished calls has a runtime
    /// that ends soon, so the application should not open connections there. If the application
    /// opens the connections, that runtime gets another runtime's dispatcher, provided that the
    /// other runtime is driven.
    pub(crate) async fn dispatcher(self: &Arc<Self>) -> Result<Arc<Dispatcher>, StoreError> {
        let runtime = Handle::try_current().map_err(without_runtime)?;
        if let Some(known) = known(&self.dispatchers, runtime.id()) {
            return Ok(known);
        }
        // Boxed to keep this future small, since few calls need the inner one.
        if self.server.is_given()
            && Owed::is_in_brief_runtime()
            && let Some(driven) = Box::pin(self.driven()).await
        {
            return Ok(driven);
        }
        self.own_dispatcher()
    }

    /// The current runtime's own dispatcher.
    pub(super) fn own_dispatcher(self: &Arc<Self>) -> Result<Arc<Dispatcher>, StoreError> {
        let runtime = Handle::try_current().map_err(without_runtime)?;
        let mut all = lock(&self.dispatchers);
        if let Some(known) = find(&all, runtime.id()) {
            return Ok(known);
        }
        let dispatcher = Arc::new(Dispatcher::new(Arc::clone(self), runtime.clone()));
        all.retain(|(_, dispatcher)| dispatcher.strong_count() > 0);
        all.push((runtime.id(), Arc::downgrade(&dispatcher)));
        drop(all);
        let owned = Arc::clone(&dispatcher);
        let mut store = self.store.clone();
        runtime.spawn(async move {
            while store.changed().await.is_ok() {}
            drop(owned);
        });
        Ok(dispatcher)
    }

    /// Returns another runtime's dispatcher, if that runtime soon runs a test task. A
    /// single-threaded runtime may no longer be driven, so it would never send anything.
    async fn driven(&self) -> Option<Arc<Dispatcher>> {
        let own = Handle::try_current().ok()?.id();
        let all = lock(&self.dispatchers).clone();
        let mut tasks = JoinSet::new();
        for (_, other) in all.into_iter().filter(|(id, _)| *id != own) {
            if let Some(dispatcher) = other.upgrade() {
                tasks.spawn_on(async move { other }, &dispatcher.runtime);
            }
        }
        while let Ok(Some(task)) = timeout(DRIVEN_WITHIN, tasks.join_next()).await {
            if let Some(driven) = task.ok().and_then(|driven| driven.upgrade()) {
                return Some(driven);
            }
        }
        None
    }

    /// Samples the round trip from a reply. A reply read after `most` is not a sample, since its
    /// caller may have polled late.
    pub(super) fn heard(
        &self,
        slot: Option<u16>,
        sent: Instant,
        most: Duration,
        reply: &RedisResult<Value>,
    ) {
        if reply.is_ok() {
            let part = slot.and_then(|slot| self.server.node_of(slot));
            // With a test's clock, a reply counts as immediate, however busy the machine is.
            let took = if self.clock.is_some() {
                Duration::ZERO
            } else {
                sent.elapsed()
            };
            if took <= most {
                self.local_state.round_trip.answered(part, sent, took);
            }
        }
        if !is_unknown(reply) {
            metrics::script(sent);
        }
    }
}

impl Dispatcher {
    pub(super) fn new(common: Arc<Common>, runtime: Handle) -> Self {
        let server = &common.server;
        let count = if server.is_cluster() {
            CLUSTER_RANGES
        } else {
            1
        };
        let connections = server.settings.connections as usize;
        let crowded = &common.local_state.crowded;
        let queue = || Queue::new(connections, CAPACITY / count, Arc::clone(crowded));
        let queues = iter::repeat_with(|| [[queue(), queue()], [queue(), queue()]])
            .take(count)
            .collect();
        let pool = Pool::new(server, Arc::clone(&common.local_state.round_trip.distance));
        Self {
            common,
            runtime,
            pool,
            queues,
        }
    }

    /// True if each batch has keys in one slot only.
    pub(crate) fn is_by_slot(&self) -> bool {
        self.common.is_by_slot.load(Ordering::Relaxed)
    }

    /// A key's slot, or `None` if slots make no difference.
    pub(super) fn slot_of(&self, key: &Key) -> Option<u16> {
        self.is_by_slot().then(|| self.common.keys.hash_slot(key))
    }

    /// Returns the slot's queue for releases, or its queue for other jobs. Nodes with neighbouring
    /// slots use different queues.
    pub(super) fn queue(&self, slot: Option<u16>, is_release: bool) -> &Arc<Queue> {
        let of_release = usize::from(is_release);
        let Some(slot) = slot else {
            return &self.queues[0][0][of_release];
        };
        let range = usize::from(slot) * self.queues.len() / usize::from(HASH_SLOTS);
        let node = self.common.server.node_number(slot).unwrap_or(0);
        &self.queues[range][node % 2][of_release]
    }

    /// The permit to send a check without the queue. Until the first reply, a task sends each
    /// check, since a task receives even a reply that comes too late for the caller.
    pub(super) fn lone_permit(&self, slot: Option<u16>) -> Option<Permit> {
        self.common.local_state.round_trip.known()?;
        self.queue(slot, false).lone_permit()
    }

    pub(super) fn is_worth_another_try(&self, error: &RedisError) -> bool {
        needs_new_connection(error) || self.has_certainly_not_run(error)
    }

    pub(super) fn has_certainly_not_run(&self, error: &RedisError) -> bool {
        self.is_by_slot() && was_not_run(error)
    }

    /// Forgets the units that a limit counts for a key.
    pub(crate) async fn reset(self: Arc<Self>, limit: Limit, key: &Key) -> Result<(), StoreError> {
        let _outdated = self.common.local_state.outdate([(&limit, key)], None);
        let key = self.common.keys.of(&limit, key);
        self.in_task(|dispatcher| async move { dispatcher.send(cmd("UNLINK").arg(key)).await })
            .await
    }

    /// Runs a future that needs a connection, in a task that ends if the caller stops waiting. Only
    /// the task keeps the dispatcher alive. So the dispatcher ends with its runtime, even if nobody
    /// polls the caller's future.
    pub(super) async fn in_task<T, F>(
        self: Arc<Self>,
        run: impl FnOnce(Arc<Self>) -> F,
    ) -> Result<T, StoreError>
    where
        T: Send + 'static,
        F: Future<Output = Result<T, StoreError>> + Send + 'static,
    {
        let runtime = self.runtime.clone();
        let mut task = JoinSet::new();
        task.spawn_on(run(self), &runtime);
        let result = task
            .join_next()
            .await
            .ok_or_else(|| without_runtime("its task is gone"))?;
        result.unwrap_or_else(|error| Err(without_runtime(error)))
    }

    /// Sends a command, and retries it once if that may help. The command may run twice, so it must
    /// be idempotent.
    pub(super) async fn send(&self, command: &Cmd) -> Result<(), StoreError> {
        let mut reply = self.try_once(command, false).await?;
        if let Err(error) = &reply
            && self.is_worth_another_try(error)
        {
            reply = self.try_once(command, true).await?;
        }
        reply.map(drop).map_err(failure)
    }

    async fn try_once(&self, command: &Cmd, again: bool) -> Result<RedisResult<Value>, StoreError> {
        let (connection, _pooled) = self.pool.take().await?;
        Ok(connection.send(command, again, Instant::now()).await)
    }

    /// Runs each command that the script uses. After that, asks for a check that takes no units, on
    /// two keys, or on one if the server is known to refuse keys in several slots. Success shows
    /// that the server was reached, knows the script, and lets this user run all commands that will
    /// be needed on the store's keys. It also tells the store whether cross-slot calls work.
    pub(crate) async fn try_out(self: Arc<Self>) -> Result<(), StoreError> {
        self.in_task(|dispatcher| async move {
            // In a cluster, a node that hangs delays the connections by the connect timeout. The
            // calls below give up after the same time, so the connections are opened first.
            if dispatcher.common.server.is_cluster() {
                dispatcher.pool.open_all().await;
            }
            dispatcher.run_commands().await?;
            let last = if dispatcher.is_by_slot() { 1 } else { 2 };
            let limit = Limit::per_second("connect", 1);
            let charges = (1..=last).map(|key: u64| Charge::fitting(limit.clone(), key.into(), 0));
            if let Some(check) = Check::of_distinct(charges) {
                let job = Job::decide(check, Duration::MAX);
                let _ = Arc::clone(&dispatcher).ask(job).await?;
            }
            dispatcher.pool.open_all().await;
            Ok(())
        })
        .await
    }

    /// Runs each command that the script uses, all at the same time, on a key that no limit uses.
    /// If the user may not run a command, the error names the command. The script's error would
    /// not.
    async fn run_commands(self: &Arc<Self>) -> Result<(), StoreError> {
        let key = format!("{}:", self.common.keys.prefix);
        let mut runs = JoinSet::new();
        // While a slot moves, the client sends ASKING to its new node.
        let asking = self.common.server.is_cluster().then_some("ASKING");
        for words in COMMANDS.split(", ").chain(asking) {
            let mut command = Cmd::new();
            for word in words.split(' ') {
                command.arg(if word == "KEY" { &key } else { word });
            }
            let dispatcher = Arc::clone(self);
            runs.spawn(async move { (words, dispatcher.send(&command).await) });
        }
        while let Some(run) = runs.join_next().await {
            match run.map_err(without_runtime)? {
                // Before 7.0, Redis does not know PEXPIRETIME, and the script does without it.
                // Running out of memory is not a failure either, since the server may have memory
                // later.
                (words, Err(error))
                    if error.kind == StoreErrorKind::Other && words.starts_with("PEXPIRETIME") => {}
                (_, Err(error)) if error.kind != StoreErrorKind::OutOfMemory => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }
}

/// A runtime's dispatcher, if it has one.
pub(super) fn known(
    all: &Mutex<Vec<(Id, Weak<Dispatcher>)>>,
    runtime: Id,
) -> Option<Arc<Dispatcher>> {
    find(&lock(all), runtime)
}

fn find(all: &[(Id, Weak<Dispatcher>)], runtime: Id) -> Option<Arc<Dispatcher>> {
    let mut own = all.iter().filter(|(id, _)| *id == runtime);
    own.find_map(|(_, dispatcher)| dispatcher.upgrade())
}

pub(super) fn is_unknown(reply: &RedisResult<Value>) -> bool {
    reply
        .as_ref()
        .is_err_and(|error| error.kind() == ErrorKind::Server(ServerErrorKind::NoScript))
}

/// Reads a number that the script wrote as a double. Returns `None` if anything else wrote it, such
/// as a proxy.
pub(super) fn of_double(double: [u8; 8]) -> Option<u64> {
    let number = f64::from_le_bytes(double);
    let is_of_script = (0.0..=MOST_OF_SCRIPT).contains(&number) && number.fract() == 0.0;
    is_of_script.then_some(number as u64)
}

/// The error for a call without a runtime, or after its runtime has ended. It does not count as a
/// store failure.
pub(crate) fn without_runtime(cause: impl Into<Box<dyn Error + Send + Sync>>) -> StoreError {
    StoreError::new(ASKING, StoreErrorKind::Other, cause).of_one_check()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_numbers_of_the_script_are_read() {
        for number in [0.0, 1.0, MOST_OF_SCRIPT] {
            assert_eq!(of_double(number.to_le_bytes()), Some(number as u64));
        }
        for number in [-1.0, 0.5, MOST_OF_SCRIPT * 2.0, f64::NAN, f64::INFINITY] {
            assert_eq!(of_double(number.to_le_bytes()), None);
        }
        assert_eq!(of_double(*b"abcdefgh"), None);
    }
}
