//! Places and units that may have been taken, although no reply says so: of a batch whose connection broke or whose runtime ended, and of a
//! check that only some slots have admitted.

use std::{mem, sync::Arc, time::Duration};

use tokio::{runtime::Handle, time::sleep};

use super::{
    cross_slot::ask_slots,
    dispatcher::{Config, Dispatcher},
    job::Job,
};
use crate::{
    decision::Settlement,
    local::{Underway, on_thread},
    store::give_back,
};

/// A server that has stood still may run a lost batch a moment after what came over another connection.
const BEFORE_SECOND_RELEASE: Duration = Duration::from_millis(500);

/// They are given back, whatever happens to the task that does it.
pub(super) struct Lost {
    config: Arc<Config>,
    taken: Vec<Settlement>,
    _underway: Underway,
}

impl Lost {
    pub(super) fn new(config: &Arc<Config>, taken: Vec<Settlement>) -> Self {
        Self { config: Arc::clone(config), taken, _underway: config.local_state.owed.begin() }
    }

    pub(super) async fn free(self, dispatcher: Arc<Dispatcher>) {
        free(dispatcher, &self.taken).await;
        self.forget();
    }

    /// Nothing is lost.
    pub(super) fn forget(mut self) {
        self.taken.clear();
    }
}

/// Without its runtime, a thread frees them.
impl Drop for Lost {
    fn drop(&mut self) {
        if !self.taken.is_empty() {
            let lost = Self::new(&self.config, Vec::new());
            let taken = mem::take(&mut self.taken);
            on_thread(async move {
                free(Arc::new(Dispatcher::new(Arc::clone(&lost.config), Handle::current())), &taken).await;
                drop(lost);
            });
        }
    }
}

async fn free(dispatcher: Arc<Dispatcher>, taken: &[Settlement]) {
    let release = || {
        give_back(taken.to_vec(), |taken| {
            ask_slots(Arc::clone(&dispatcher), Job::settle(taken, &dispatcher.config.local_state))
        })
    };
    release().await;
    sleep(BEFORE_SECOND_RELEASE).await;
    release().await;
}
