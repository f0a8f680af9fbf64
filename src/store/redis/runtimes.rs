//! One dispatcher for each tokio runtime that uses the store.
//!
//! 1. A connection works only while the runtime that made it is driven, and so does a task that sends. Each runtime has a queue,
//!    slots and connections of its own. One that stands still, or ends, holds up no other.
//! 2. A dispatcher ends with its runtime. A task that does nothing tells: the runtime drops it when it ends.
//! 3. All dispatchers end with the store.

use std::sync::{Arc, PoisonError, RwLock, Weak};

use tokio::runtime::{Handle, Id};

use super::{dispatcher::Dispatcher, shared::Shared};
use crate::error::StoreError;

pub(super) struct Runtimes {
    shared: Arc<Shared>,
    /// Few, mostly one.
    dispatchers: RwLock<Vec<(Id, Arc<Dispatcher>)>>,
}

impl Runtimes {
    pub(super) fn new(shared: Shared) -> Arc<Self> {
        Arc::new(Self { shared: Arc::new(shared), dispatchers: RwLock::default() })
    }

    pub(super) fn shared(&self) -> &Shared {
        &self.shared
    }

    /// The dispatcher of the runtime that this is called in.
    pub(super) fn dispatcher(self: &Arc<Self>, doing: &'static str) -> Result<Arc<Dispatcher>, StoreError> {
        let runtime = Handle::try_current().map_err(|cause| StoreError::new(doing, cause).of_one_check())?;
        let id = runtime.id();
        let known = find(&self.dispatchers.read().unwrap_or_else(PoisonError::into_inner), id);
        Ok(known.unwrap_or_else(|| self.register(id, runtime)))
    }

    fn register(self: &Arc<Self>, id: Id, runtime: Handle) -> Arc<Dispatcher> {
        let dispatcher = {
            let mut all = self.dispatchers.write().unwrap_or_else(PoisonError::into_inner);
            // Another thread of the same runtime may have been here first.
            if let Some(known) = find(&all, id) {
                return known;
            }
            let dispatcher = Arc::new(Dispatcher::new(Arc::clone(&self.shared), runtime));
            all.push((id, Arc::clone(&dispatcher)));
            dispatcher
        };
        // Without the lock: a runtime that is about to end drops the task at once, and that takes the lock.
        dispatcher.keep(Ending { runtimes: Arc::downgrade(self), dispatcher: Arc::downgrade(&dispatcher) });
        dispatcher
    }

    /// Counts a caller that gives up, of the runtime in which it has asked.
    pub(super) fn note_given_up(&self, runtime: Id) {
        let known = find(&self.dispatchers.read().unwrap_or_else(PoisonError::into_inner), runtime);
        if let Some(dispatcher) = known {
            dispatcher.note_given_up();
        }
    }

    fn forget(&self, ended: &Weak<Dispatcher>) {
        let mut all = self.dispatchers.write().unwrap_or_else(PoisonError::into_inner);
        let place = all.iter().position(|(_, dispatcher)| Arc::as_ptr(dispatcher) == ended.as_ptr());
        let dispatcher = place.map(|place| all.swap_remove(place));
        // What it drops may wake a waiter, which may come here.
        drop(all);
        drop(dispatcher);
    }
}

fn find(dispatchers: &[(Id, Arc<Dispatcher>)], runtime: Id) -> Option<Arc<Dispatcher>> {
    dispatchers.iter().find(|(id, _)| *id == runtime).map(|(_, dispatcher)| Arc::clone(dispatcher))
}

/// Held by a task of the runtime for as long as that lasts.
pub(super) struct Ending {
    runtimes: Weak<Runtimes>,
    dispatcher: Weak<Dispatcher>,
}

impl Drop for Ending {
    fn drop(&mut self) {
        if let Some(runtimes) = self.runtimes.upgrade() {
            runtimes.forget(&self.dispatcher);
        }
    }
}
