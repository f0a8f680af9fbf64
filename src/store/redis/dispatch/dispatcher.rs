//! What the dispatchers of a store share, and the state of one dispatcher: its queues and
//! connections. This file also sends single commands, such as the reset of a key, and tries a new
//! store out. `send.rs` sends checks and settlements.

use std::{
    error::Error,
    future::Future,
    iter,
    sync::{Arc, Mutex, Weak, atomic::AtomicBool},
    time::{Duration, Instant},
};

use redis::{Cmd, RedisError, cmd};
use tokio::{
    runtime::{Handle, Id},
    sync::watch,
    task::JoinSet,
};

use super::{
    job::Job,
    queue::{CAPACITY, Queue},
};
use crate::{
    check::{Charge, Check},
    clock::ManualClock,
    error::{StoreError, StoreErrorKind},
    key::Key,
    limit::Limit,
    local::LocalState,
    store::redis::{
        connect::{ASKING, Pool, Server, failure, needs_new_connection, was_not_run},
        keys::Keys,
        script::COMMANDS,
    },
};

/// The number of pairs of queues for a cluster. Most clusters have fewer nodes.
const CLUSTER_QUEUES: usize = 16;

/// The state that all dispatchers of a store share. Each runtime has one dispatcher.
pub(crate) struct Common {
    pub(crate) server: Arc<Server>,
    pub(crate) keys: Keys,
    /// The clock of a test. `None` if the script reads the server's clock.
    pub(crate) clock: Option<ManualClock>,
    pub(crate) local_state: LocalState,
    /// The dispatchers of the store, of which there is mostly one. Each is stored with the id of
    /// its runtime, so that a look-up for a runtime upgrades only the pointer to that runtime's
    /// dispatcher. If a look-up upgraded the other pointers as well, a dispatcher might end
    /// meanwhile. The look-up would then drop that dispatcher, and the futures that wait for it,
    /// under the lock.
    pub(crate) dispatchers: Mutex<Vec<(Id, Weak<Dispatcher>)>>,
    /// Tells each dispatcher when the last clone of the store is dropped.
    pub(crate) store: watch::Receiver<()>,
    /// Whether each batch has keys of one slot only. This is so in a cluster, and after a server
    /// has refused keys of several slots.
    pub(crate) is_by_slot: AtomicBool,
}

/// Sends the jobs of one tokio runtime. Each runtime that uses the store has a dispatcher of its
/// own.
///
/// 1. A connection, and a task that sends, work only while their runtime is driven. So each runtime
///    has its own queue and connections, and a runtime that is not driven, or ends, delays no
///    other.
/// 2. A task of the runtime owns the dispatcher, so the dispatcher ends with the runtime.
/// 3. All dispatchers end with the store.
pub(crate) struct Dispatcher {
    pub(super) common: Arc<Common>,
    pub(crate) runtime: Handle,
    pub(super) pool: Pool,
    /// Pairs of queues. The second queue of a pair is for releases, which are settlements that only
    /// free places. The first queue is for checks and for all other settlements. For a single
    /// server there is one pair. For a cluster, the slots are divided into equal parts, and each
    /// part has a pair, so that a slow node delays only its own checks.
    pub(super) queues: Box<[[Arc<Queue>; 2]]>,
}

impl Dispatcher {
    pub(super) fn new(common: Arc<Common>, runtime: Handle) -> Self {
        let server = &common.server;
        let count = if server.is_cluster() {
            CLUSTER_QUEUES
        } else {
            1
        };
        let queue = || Queue::new(server.settings.connections as usize, CAPACITY / count);
        let queues = iter::repeat_with(|| [queue(), queue()])
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

    pub(super) fn is_worth_another_try(&self, error: &RedisError) -> bool {
        needs_new_connection(error) || self.has_certainly_not_run(error)
    }

    pub(super) fn has_certainly_not_run(&self, error: &RedisError) -> bool {
        self.is_by_slot() && was_not_run(error)
    }

    /// Forgets the counted units of a limit and a key.
    pub(crate) async fn reset(self: Arc<Self>, limit: Limit, key: &Key) -> Result<(), StoreError> {
        let _outdated = self.common.local_state.outdate([(&limit, key)], None);
        let key = self.common.keys.of(&limit, key);
        self.in_task(|dispatcher| async move { dispatcher.send(cmd("UNLINK").arg(key)).await })
            .await
    }

    /// Runs a future that needs a connection, in a task. The task ends if the caller stops waiting.
    /// Only the task keeps the dispatcher. So the dispatcher ends with its runtime, even if nobody
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

    /// Sends a command. If this first try fails, and a second try may help, sends the command
    /// again. The command may run twice, so two runs must have the effect of one.
    pub(super) async fn send(&self, command: &Cmd) -> Result<(), StoreError> {
        let send = async |again| {
            let (connection, _pooled) = self.pool.take().await?;
            Ok::<_, StoreError>(connection.send(command, again, Instant::now()).await)
        };
        let mut reply = send(false).await?;
        if reply
            .as_ref()
            .is_err_and(|error| self.is_worth_another_try(error))
        {
            reply = send(true).await?;
        }
        reply.map(drop).map_err(failure)
    }

    /// Runs each command of the script. Then asks for a check that takes nothing, on two keys, or
    /// on one key if the server is known to refuse keys of several slots. If this succeeds, the
    /// server has been reached, knows the script, and lets this user run all commands that will be
    /// needed, on the keys of the store. The store then also knows whether the server refuses keys
    /// of several slots.
    pub(crate) async fn try_out(self: Arc<Self>) -> Result<(), StoreError> {
        self.in_task(|dispatcher| async move {
            dispatcher.run_commands().await?;
            let keys: &[&str] = if dispatcher.is_by_slot() {
                &["1"]
            } else {
                &["1", "2"]
            };
            let charge =
                |key: &&str| Charge::fitting(Limit::per_second("connect", 1), (*key).into(), 0);
            if let Some(check) = Check::of_distinct(keys.iter().map(charge)) {
                let _ = Arc::clone(&dispatcher)
                    .ask(Job::decide(check, Duration::MAX))
                    .await?;
            }
            dispatcher.pool.open_all().await;
            Ok(())
        })
        .await
    }

    /// Runs each command of the script once, all at the same time, on a key that no limit has. If
    /// the user may not run a command, the error names it. The error of the script would not.
    async fn run_commands(self: &Arc<Self>) -> Result<(), StoreError> {
        let key = format!("{}:", self.common.keys.prefix);
        let mut runs = JoinSet::new();
        // While a slot moves, the client sends ASKING to the slot's new node.
        for words in COMMANDS
            .split(", ")
            .chain(self.common.server.is_cluster().then_some("ASKING"))
        {
            let mut command = Cmd::new();
            for word in words.split(' ') {
                command.arg(if word == "KEY" { &key } else { word });
            }
            let dispatcher = Arc::clone(self);
            runs.spawn(async move { (words, dispatcher.send(&command).await) });
        }
        while let Some(run) = runs.join_next().await {
            match run.map_err(without_runtime)? {
                // Before 7.0, Redis does not know PEXPIRETIME, and the script does without it. An
                // error for lack of memory is no failure either, since the server may have memory
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

/// The error when there is no runtime, or when the runtime has ended. This error is no failure of
/// the store.
pub(crate) fn without_runtime(cause: impl Into<Box<dyn Error + Send + Sync>>) -> StoreError {
    StoreError::new(ASKING, StoreErrorKind::Other, cause).of_one_check()
}
