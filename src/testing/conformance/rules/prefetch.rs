//! The rules of a store whose limits may have prefetch.

use std::time::Duration;

use super::{Kept, MICROSECOND, Trial, expect};
use crate::{
    algorithm::Algorithm,
    check::{AdmissionId, Charge, Check},
    key::Key,
    limit::{Limit, prefetch::Prefetch},
    store::LocalState,
};

/// The logs of a store with prefetches. A limit with prefetch counts on any other store, too.
async fn prefetch(trial: &Trial, algorithms: Vec<Algorithm>) -> Result<Vec<Limit>, String> {
    let limit = Limit::per_second("prefetch", 100);
    let plain = limit.clone().prefetch(Prefetch::new());
    expect("used units of a limit with prefetch", 1, trial.spend(&plain, 1).await?.used())?;
    let _ = trial.store().reset(plain, Key::from("ada")).await;
    let has_prefetches = trial.store().local_state().and_then(LocalState::prefetches).is_some();
    let logs = algorithms.into_iter().filter(|algorithm| has_prefetches && algorithm.is_log());
    Ok(logs.map(|algorithm| limit.clone().with_algorithm(algorithm)).collect())
}

fn prefetch_of(limit: &Limit, units: u64) -> Check {
    Check::new(Charge::prefetch(limit.clone(), Key::from("ada"), units, 100_000)).with_id(AdmissionId::fresh())
}

/// Neither refusals nor a clock that steps back make it shorter: its units are spent until the end of its life.
pub(super) async fn prefetches(trial: Trial, algorithms: Vec<Algorithm>) -> Kept {
    for limit in prefetch(&trial, algorithms).await? {
        let prefetch = trial.decide(prefetch_of(&limit, 100)).await?;
        expect("used and reserved units of a prefetch", (100, 100), (prefetch.used(), prefetch.binding().reserved()))?;
        let life = limit.window() + Duration::from_millis(100);
        for (back, forward) in [(0, 0), (300_000, 0), (0, 300_000 + life.as_micros() as u64 - 1)] {
            trial.clock.step_back(Duration::from_micros(back));
            trial.clock.advance(Duration::from_micros(forward));
            let refused = trial.spend(&limit, 1).await?;
            let by_reservations = (refused.is_allowed(), refused.is_refused_by_reservations());
            expect("an admission, and a refusal by reservations", (false, true), by_reservations)?;
        }
        trial.clock.advance(MICROSECOND);
        expect("used units after the life of a prefetch and a window", 0, trial.used(&limit).await?)?;
    }
    Ok(())
}

/// From the settlement on, since all of them were spent by then.
pub(super) async fn spent_prefetches(trial: Trial, algorithms: Vec<Algorithm>) -> Kept {
    for limit in prefetch(&trial, algorithms).await? {
        let check = prefetch_of(&limit, 60);
        let admitted = trial.decide(check.clone()).await?;
        trial.clock.advance(Duration::from_millis(40));
        trial.settle(check, &admitted, 10).await?;
        let single = trial.spend(&limit, 1).await?;
        expect("used and reserved units", (11, 0), (single.used(), single.binding().reserved()))?;
        trial.clock.advance(limit.window() - MICROSECOND);
        expect("used units before a window has passed", 11, trial.used(&limit).await?)?;
        // A compact log counts until the end of a sub-window.
        let rounding = if limit.algorithm() == Algorithm::sliding_log() { Duration::ZERO } else { limit.window() };
        trial.clock.advance(MICROSECOND + rounding);
        expect("used units after a window", 0, trial.used(&limit).await?)?;
    }
    Ok(())
}
