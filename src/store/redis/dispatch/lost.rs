//! Places and units that may have been taken, although no reply says so: of a batch whose connection broke or whose runtime ended, and of a
//! check that only some slots have admitted.

use std::{mem, sync::Arc, time::Duration};

use tokio::{task::JoinSet, time::sleep};

use super::{
    cross_slot::ask_slots,
    dispatcher::{Config, Dispatcher},
    job::Job,
};
use crate::{decision::Settlement, local::Underway, store::give_back};

/// A server that has stood still may run a lost batch a moment after what came over another connection.
const BEFORE_SECOND_RELEASE: Duration = Duration::from_millis(500);

/// A thread gives them back once this is dropped, whatever has become of the runtime.
pub(super) struct Lost {
    config: Arc<Config>,
    taken: Vec<Settlement>,
    underway: Underway,
}

impl Lost {
    pub(super) fn new(config: &Arc<Config>, taken: Vec<Settlement>) -> Self {
        Self { config: Arc::clone(config), taken, underway: config.local_state.owed.begin() }
    }

    /// Nothing is lost.
    pub(super) fn forget(mut self) {
        self.taken.clear();
    }
}

impl Drop for Lost {
    fn drop(&mut self) {
        if !self.taken.is_empty() {
            let (config, taken) = (Arc::clone(&self.config), mem::take(&mut self.taken));
            let underway = self.underway.clone();
            self.config.local_state.owed.on_thread(async move {
                if let Ok(dispatcher) = config.dispatcher() {
                    free(dispatcher, &taken).await;
                }
                drop(underway);
            });
        }
    }
}

async fn free(dispatcher: Arc<Dispatcher>, taken: &[Settlement]) {
    let release = async || {
        // Together, so that they travel in one batch.
        let give_back = |taken: &Settlement| {
            let dispatcher = Arc::clone(&dispatcher);
            let settle =
                move |taken| ask_slots(Arc::clone(&dispatcher), Job::settle(taken, &dispatcher.config.local_state));
            give_back(vec![taken.clone()], settle)
        };
        taken.iter().map(give_back).collect::<JoinSet<_>>().join_all().await;
    };
    release().await;
    sleep(BEFORE_SECOND_RELEASE).await;
    release().await;
}
