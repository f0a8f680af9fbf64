//! Blocks of units that limiters spend by themselves: for a store whose local state [has them](crate::LocalState::with_blocks). Others
//! never get a block, and keep these rules.

use super::super::trial::{MICROSECOND, Trial, ms, plain_check};
use crate::{
    admission::AdmissionId,
    algorithm::Algorithm,
    check::{Charge, Check},
    key::Key,
    limit::{Limit, blocks::Blocks},
    store::{LocalState, Store},
};

const LIMIT: Limit = Limit::per_second("blocks", 100);
const LIFE: u64 = 100_000;

impl Trial {
    /// The exact and the compact logs of a store with blocks. A limit in blocks counts on any other store, too.
    async fn logs_in_blocks(&self) -> Vec<Limit> {
        let plain = Limit::per_second("plain", 100).in_blocks(Blocks::new());
        assert_eq!(self.spend(&plain, 1).await.used(), 1);
        if self.store.local_state().and_then(LocalState::blocks).is_none() {
            return Vec::new();
        }
        self.algorithms()
            .into_iter()
            .filter(|algorithm| algorithm.is_log())
            .map(|algorithm| LIMIT.with_algorithm(algorithm))
            .collect()
    }
}

fn block_of(limit: &Limit, units: u64) -> Check {
    Check::new(Charge::block(limit.clone(), Key::from("ada"), units, LIFE)).with_id(AdmissionId::fresh())
}

/// Neither refusals nor a clock that steps back make it shorter: its units are spent until the end of its life.
pub(super) async fn a_block_counts_until_a_window_after_its_life(test: Trial) {
    let test = test.without_deny_cache();
    for limit in test.logs_in_blocks().await {
        let admitted = test.take(&block_of(&limit, 100)).await;
        assert_eq!((admitted.used(), admitted.binding().reserved()), (100, 100));
        let refuse = async || {
            let refused = test.spend(&limit, 1).await;
            assert!(!refused.is_allowed() && refused.is_refused_by_reservations(), "{refused:?}");
        };
        refuse().await;
        test.clock.step_back(ms(300));
        refuse().await;
        test.clock.advance(ms(300) + limit.window() + ms(100) - MICROSECOND);
        refuse().await;
        test.clock.advance(MICROSECOND);
        assert_eq!(test.used(&limit).await, 0);
    }
}

/// From the settlement on, since all of them were spent by then.
pub(super) async fn the_spent_units_of_a_block_count_for_a_window(test: Trial) {
    let test = test.without_deny_cache();
    for limit in test.logs_in_blocks().await {
        let (check, single) = (block_of(&limit, 60), plain_check(&limit, 1));
        let admitted = test.take(&check).await;
        test.clock.advance(ms(40));
        assert_eq!(test.settled(&check, &admitted, 10).await, (true, 10));
        let single = test.take(&single).await;
        assert_eq!((single.used(), single.binding().reserved()), (11, 0));
        // A compact log counts until the end of a sub-window.
        let rounding = if limit.algorithm() == Algorithm::log() { 0 } else { 1_000_000 };
        test.clock.advance(limit.window() - MICROSECOND);
        assert_eq!(test.used(&limit).await, 11);
        test.clock.advance(MICROSECOND * (1 + rounding));
        assert_eq!(test.used(&limit).await, 0);
    }
}
