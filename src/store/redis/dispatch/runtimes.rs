//! One dispatcher for each tokio runtime that uses the store.
//!
//! 1. A connection, and a task that sends, work only while their runtime is driven. So each runtime has its own queue and
//!    connections, and a runtime that is not driven, or ends, delays no other.
//! 2. A dispatcher ends with its runtime. An idle task notices it: the runtime drops the task when it shuts down.
//! 3. All dispatchers end with the store.

use std::sync::{Arc, PoisonError, RwLock, Weak};

use tokio::{
    runtime::{Handle, Id},
    sync::oneshot,
};

use super::{
    dispatcher::{ASKING, Config, Dispatcher},
    job::{Answer, Job},
};
use crate::error::StoreError;

pub(crate) struct Runtimes {
    config: Arc<Config>,
    /// Few, mostly one.
    dispatchers: RwLock<Vec<(Id, Arc<Dispatcher>)>>,
}

impl Runtimes {
    pub(crate) fn new(config: Config) -> Arc<Self> {
        Arc::new(Self { config: Arc::new(config), dispatchers: RwLock::default() })
    }

    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    /// Sends a job from the current runtime, when this is first polled.
    pub(crate) async fn ask(self: &Arc<Self>, job: Box<Job>) -> Answer {
        let sending = self.current()?.ask(job)?;
        sending.await
    }

    /// The dispatcher of the current runtime.
    pub(crate) fn current(self: &Arc<Self>) -> Result<Arc<Dispatcher>, StoreError> {
        let runtime = Handle::try_current().map_err(|cause| StoreError::new(ASKING, cause).of_one_check())?;
        let known = find(&self.dispatchers.read().unwrap_or_else(PoisonError::into_inner), runtime.id());
        Ok(known.unwrap_or_else(|| self.add(runtime)))
    }

    fn add(self: &Arc<Self>, runtime: Handle) -> Arc<Dispatcher> {
        let (is_alive, has_ended) = oneshot::channel();
        let dispatcher = {
            let mut all = self.dispatchers.write().unwrap_or_else(PoisonError::into_inner);
            let id = runtime.id();
            // Another thread of the same runtime may have added it.
            if let Some(known) = find(&all, id) {
                return known;
            }
            let dispatcher = Arc::new(Dispatcher::new(Arc::clone(&self.config), runtime, is_alive));
            all.push((id, Arc::clone(&dispatcher)));
            dispatcher
        };
        let guard = RuntimeGuard { runtimes: Arc::downgrade(self), dispatcher: Arc::downgrade(&dispatcher) };
        // Without the lock: a runtime that is shutting down drops the guard at once, which takes the lock.
        dispatcher.runtime.spawn(async move {
            let _guard = guard;
            let _ = has_ended.await;
        });
        dispatcher
    }

    fn remove(&self, ended: &Weak<Dispatcher>) {
        let mut all = self.dispatchers.write().unwrap_or_else(PoisonError::into_inner);
        let index = all.iter().position(|(_, dispatcher)| Arc::as_ptr(dispatcher) == ended.as_ptr());
        let dispatcher = index.map(|index| all.swap_remove(index));
        // Unlocked first: dropping the dispatcher may wake a caller, which may come here.
        drop(all);
        drop(dispatcher);
    }
}

fn find(dispatchers: &[(Id, Arc<Dispatcher>)], runtime: Id) -> Option<Arc<Dispatcher>> {
    dispatchers.iter().find(|(id, _)| *id == runtime).map(|(_, dispatcher)| Arc::clone(dispatcher))
}

/// Removes the dispatcher when its runtime drops this.
struct RuntimeGuard {
    runtimes: Weak<Runtimes>,
    dispatcher: Weak<Dispatcher>,
}

impl Drop for RuntimeGuard {
    fn drop(&mut self) {
        if let Some(runtimes) = self.runtimes.upgrade() {
            runtimes.remove(&self.dispatcher);
        }
    }
}
