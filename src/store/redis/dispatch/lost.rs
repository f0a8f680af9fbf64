//! Places and units that have to be given back: a batch may have taken them before its connection
//! broke or its runtime ended, or a check may have taken them in only some slots.

use std::{
    borrow::Cow,
    mem,
    sync::{Arc, LazyLock},
    time::Duration,
};

use tokio::{runtime::Handle, task::JoinSet, time::sleep};

use super::{
    dispatcher::Common,
    job::{Answer, Job, refund_by_id},
};
use crate::{
    check::{Charge, Check},
    decision::{Decision, Settlement},
    local::Underway,
    logging::{Throttle, warn},
    metrics,
    store::give_back,
};

/// Lost places and units are given back twice, with this wait in between. The first time may be too
/// early: since it uses another connection, a server that stalled may run the lost batch only
/// afterwards.
const BEFORE_SECOND_RELEASE: Duration = Duration::from_millis(500);

/// When dropped, gives back everything in `taken`. It does so in a task on the current runtime, or
/// in a thread if there is no runtime or the runtime ends.
pub(super) struct Lost {
    common: Arc<Common>,
    taken: Vec<Settlement>,
    _underway: Underway,
}

impl Common {
    /// Gives back the units that a check has counted. The next check comes after that. The refund
    /// is sent although its answer is dropped here. If there is no runtime, it is sent without a
    /// queue.
    pub(super) fn give_back(self: &Arc<Self>, check: &Check, decision: &Decision) {
        let refund = Lost::refund(check, decision, self);
        if let (Some(refund), Ok(dispatcher)) = (refund, self.own_dispatcher()) {
            drop(dispatcher.enqueue(refund));
        }
    }
}

impl Lost {
    /// Returns the job that gives back the units that a check has counted, or `None` if it has not
    /// counted any.
    pub(super) fn refund(
        check: &Check,
        decision: &Decision,
        common: &Arc<Common>,
    ) -> Option<Box<Job>> {
        let (id, mut statuses) = (decision.id(), decision.statuses());
        let refund = Settlement::by_id(check.clone(), id, decision.at(), |charge| {
            // A charge in the shadow that does not fit is not counted.
            let is_counted = statuses.next().is_some_and(|status| status.waits.is_none());
            (is_counted && charge.units() > 0).then_some(0)
        });
        refund
            .accounts()
            .find(|(_, cost)| decision.is_allowed() && cost.is_some())?;
        // Units in a sum are given back only once. A second refund would take units from other
        // admissions.
        let again = refund_by_id(check, id, Charge::is_found_by_id);
        let lost = Self::new(common, again.into_iter().collect());
        let state = &common.local_state;
        let job = Job::refund(refund, state, |refund, answer| lost.hear(refund, answer));
        Some(job)
    }

    /// Receives a refund's answer, and reports units that stay counted.
    fn hear(mut self, refund: &Settlement, answer: &Answer) {
        static LINE: LazyLock<Throttle> = LazyLock::new(Throttle::default);
        let stays = match answer {
            Ok((decision, was_applied)) => {
                self.taken.clear();
                !was_applied && refund.may_count_at(decision.at())
            }
            Err(_) => self.taken.is_empty(),
        };
        if stays {
            metrics::failed(Some("not_given_back"), &Cow::Borrowed(""));
            if let Some(suppressed) = LINE.pass() {
                let limit = refund.check.first().limit().name();
                warn!(
                    limit,
                    suppressed, "units of a refused check stay counted until they leave the window"
                );
            }
        }
    }

    pub(super) fn new(common: &Arc<Common>, taken: Vec<Settlement>) -> Self {
        Self {
            common: Arc::clone(common),
            taken,
            _underway: common.local_state.owed.begin(),
        }
    }
}

impl Drop for Lost {
    fn drop(&mut self) {
        if !self.taken.is_empty() {
            let (common, taken) = (Arc::clone(&self.common), mem::take(&mut self.taken));
            let owed = &self.common.local_state.owed;
            owed.complete(Handle::try_current().ok(), move || {
                Box::pin(free(Arc::clone(&common), taken.clone()))
            });
        }
    }
}

async fn free(common: Arc<Common>, taken: Vec<Settlement>) {
    free_once(&common, &taken).await;
    sleep(BEFORE_SECOND_RELEASE).await;
    free_once(&common, &taken).await;
}

/// Sends all settlements at the same time, so that they share one batch.
async fn free_once(common: &Arc<Common>, taken: &[Settlement]) {
    let mut calls = JoinSet::new();
    for settlement in taken {
        let common = Arc::clone(common);
        // Each try looks up a dispatcher, since the dispatcher of a runtime that is ending is
        // useless.
        calls.spawn(give_back(vec![settlement.clone()], move |settlement| {
            let common = Arc::clone(&common);
            let job = Job::settle(settlement, &common.local_state);
            async move { common.dispatcher().await?.ask_slots(job).await }
        }));
    }
    calls.join_all().await;
}
