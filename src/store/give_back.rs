//! Gives units back to a store, and tries again while it fails.

use std::{future::Future, time::Duration};

use tokio::time::{sleep, timeout};

use crate::{error::StoreError, settlement::Settlement};

/// How long a process tries to give units back.
pub(crate) const MOST_TIME: Duration = Duration::from_secs(10);

/// The wait before the first repetition. Each further one is twice as long.
const FIRST_WAIT: Duration = Duration::from_millis(10);

/// Settles one after the other, each as often as it takes, within [`MOST_TIME`] for all.
pub(crate) async fn give_back<F, T>(settlements: Vec<Settlement>, settle: impl Fn(Settlement) -> F)
where
    F: Future<Output = Result<T, StoreError>>,
{
    let give_back = async {
        let mut wait = FIRST_WAIT;
        for settlement in settlements {
            while settle(settlement.clone()).await.is_err() {
                sleep(wait).await;
                wait *= 2;
            }
        }
    };
    let _ = timeout(MOST_TIME, give_back).await;
}
