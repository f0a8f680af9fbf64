//! Places and units that may have been taken, although no reply says so. They belong to a batch
//! whose connection broke or whose runtime ended, or to a check that only some slots have admitted.

use std::{mem, sync::Arc, time::Duration};

use tokio::{runtime::Handle, task::JoinSet, time::sleep};

use super::{dispatcher::Common, job::Job};
use crate::{decision::Settlement, local::Underway, store::give_back};

/// Lost places and units are given back twice, and this is the wait between the two times. The
/// first time may be too early: it uses another connection, so a server that stood still may run
/// the lost batch only afterwards.
const BEFORE_SECOND_RELEASE: Duration = Duration::from_millis(500);

/// Places and units that are given back when this value is dropped, if any are in `taken` then. A
/// task of the current runtime gives them back. If there is no runtime, or if the runtime ends, a
/// thread does it.
pub(super) struct Lost {
    common: Arc<Common>,
    pub(super) taken: Vec<Settlement>,
    underway: Underway,
    is_in_task: bool,
}

impl Lost {
    pub(super) fn new(common: &Arc<Common>, taken: Vec<Settlement>) -> Self {
        Self {
            common: Arc::clone(common),
            taken,
            underway: common.local_state.owed.begin(),
            is_in_task: false,
        }
    }
}

impl Drop for Lost {
    fn drop(&mut self) {
        if self.taken.is_empty() {
            return;
        }
        let common = Arc::clone(&self.common);
        let taken = mem::take(&mut self.taken);
        let underway = self.underway.clone();
        match Handle::try_current() {
            Ok(runtime) if !self.is_in_task => {
                let mut lost = Self {
                    common,
                    taken,
                    underway,
                    is_in_task: true,
                };
                runtime.spawn(async move {
                    free(&lost.common, &lost.taken).await;
                    lost.taken.clear();
                });
            }
            _ => self.common.local_state.owed.on_thread(async move {
                free(&common, &taken).await;
                drop(underway);
            }),
        }
    }
}

async fn free(common: &Arc<Common>, taken: &[Settlement]) {
    let release = async || {
        // All settlements are sent at the same time, so that they travel in one batch.
        let give_back = |taken: &Settlement| {
            let common = Arc::clone(common);
            // Each try finds a dispatcher anew, since the dispatcher of a runtime that ends is of
            // no use.
            let settle = move |taken| {
                let dispatcher = common.dispatcher();
                let job = Job::settle(taken, &common.local_state);
                async move { dispatcher?.ask_slots(job).await }
            };
            give_back(vec![taken.clone()], settle)
        };
        taken
            .iter()
            .map(give_back)
            .collect::<JoinSet<_>>()
            .join_all()
            .await;
    };
    release().await;
    sleep(BEFORE_SECOND_RELEASE).await;
    release().await;
}
