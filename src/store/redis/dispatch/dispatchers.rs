//! One dispatcher for each tokio runtime that uses the store.
//!
//! 1. A connection, and a task that sends, work only while their runtime is driven. So each runtime has its own queue and
//!    connections, and a runtime that is not driven, or ends, delays no other.
//! 2. A dispatcher ends with its runtime. An idle task notices it: the runtime drops the task when it shuts down.
//! 3. All dispatchers end with the store.

use std::sync::{Arc, PoisonError, RwLock, Weak};

use tokio::runtime::{Handle, Id};

use super::dispatcher::{Config, Dispatcher};
use crate::error::StoreError;

pub(crate) struct Dispatchers {
    config: Arc<Config>,
    /// Few, mostly one.
    dispatchers: RwLock<Vec<(Id, Arc<Dispatcher>)>>,
}

impl Dispatchers {
    pub(crate) fn new(config: Config) -> Arc<Self> {
        Arc::new(Self { config: Arc::new(config), dispatchers: RwLock::default() })
    }

    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    /// The dispatcher of the current runtime.
    pub(crate) fn current(self: &Arc<Self>, doing: &'static str) -> Result<Arc<Dispatcher>, StoreError> {
        let runtime = Handle::try_current().map_err(|cause| StoreError::new(doing, cause).of_one_check())?;
        Ok(self.find(runtime.id()).unwrap_or_else(|| self.add(runtime)))
    }

    fn find(&self, runtime: Id) -> Option<Arc<Dispatcher>> {
        find(&self.dispatchers.read().unwrap_or_else(PoisonError::into_inner), runtime)
    }

    fn add(self: &Arc<Self>, runtime: Handle) -> Arc<Dispatcher> {
        let dispatcher = {
            let mut all = self.dispatchers.write().unwrap_or_else(PoisonError::into_inner);
            let id = runtime.id();
            // Another thread of the same runtime may have added it.
            if let Some(known) = find(&all, id) {
                return known;
            }
            let dispatcher = Arc::new(Dispatcher::new(Arc::clone(&self.config), runtime));
            all.push((id, Arc::clone(&dispatcher)));
            dispatcher
        };
        // Without the lock: a runtime that is shutting down drops the guard at once, which takes the lock.
        dispatcher.drop_with_runtime(RuntimeGuard {
            dispatchers: Arc::downgrade(self),
            dispatcher: Arc::downgrade(&dispatcher),
        });
        dispatcher
    }

    /// Counts a cancelled job of this runtime.
    pub(crate) fn note_cancelled(&self, runtime: Id) {
        if let Some(dispatcher) = self.find(runtime) {
            dispatcher.note_cancelled();
        }
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
    dispatchers: Weak<Dispatchers>,
    dispatcher: Weak<Dispatcher>,
}

impl Drop for RuntimeGuard {
    fn drop(&mut self) {
        if let Some(dispatchers) = self.dispatchers.upgrade() {
            dispatchers.remove(&self.dispatcher);
        }
    }
}
