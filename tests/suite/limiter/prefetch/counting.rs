//! How Redis counts a prefetch. A limiter asks for one, and the test sends the same charge again.

use std::sync::{Arc, Mutex};

use tower_sliding_window::{
    Algorithm, Charge, Check, Key, Store,
    check::AdmissionId,
    settlement::{Settled, Settlement},
    store::{LocalState, StoreFuture},
};

use super::*;
use crate::support::MICROSECOND;

/// Keeps the charges that are prefetches.
#[derive(Clone)]
struct Watching {
    store: RedisStore,
    prefetches: Arc<Mutex<Vec<Charge>>>,
}

impl Store for Watching {
    fn decide(&self, check: Check) -> StoreFuture<Decision> {
        let is_prefetch = |charge: &&Charge| {
            charge
                .lease()
                .is_some_and(|lease| lease > charge.limit().window())
        };
        self.prefetches
            .lock()
            .unwrap()
            .extend(check.charges().filter(is_prefetch).cloned());
        self.store.decide(check)
    }

    fn settle(&self, settlement: Settlement) -> StoreFuture<Settled> {
        self.store.settle(settlement)
    }

    fn reset(&self, limit: Limit, key: Key) -> StoreFuture<()> {
        self.store.reset(limit, key)
    }

    fn local_state(&self) -> Option<&LocalState> {
        self.store.local_state()
    }
}

/// A prefetch of this limit for `ada`, of which nothing is left in Redis.
async fn prefetch_of(limit: &Limit, server: &RedisServer, store: &RedisStore) -> Charge {
    let watching = Watching {
        store: store.clone(),
        prefetches: Arc::default(),
    };
    let limiter = Limiter::new(watching.clone()).deadline(TEST_TIMEOUT);
    hold(server, &limiter, limit, "ada").await;
    limiter.shutdown(TEST_TIMEOUT).await.unwrap();
    store.reset(limit.clone(), "ada".into()).await.unwrap();
    watching.prefetches.lock().unwrap().pop().unwrap()
}

async fn decide(store: &RedisStore, limit: &Limit, cost: u64) -> Decision {
    store
        .decide(Check::new(Charge::new(limit.clone(), "ada", cost).unwrap()))
        .await
        .unwrap()
}

#[tokio::test]
async fn a_prefetch_counts_until_a_window_after_its_life_and_its_spent_units_for_a_window() {
    let server = RedisServer::start();
    let clock = ManualClock::new();
    let store = server.store().clock(&clock).build().unwrap();
    for algorithm in [Algorithm::SLIDING_LOG, Algorithm::compact_log(16)] {
        let limit = API.with_algorithm(algorithm);
        let prefetch = prefetch_of(&limit, &server, &store).await;
        let units = prefetch.cost();
        let life = prefetch.lease().unwrap() - limit.window();
        let taken = store
            .decide(Check::new(prefetch.clone()).with_id(AdmissionId::fresh()))
            .await
            .unwrap();
        assert_eq!(
            (taken.binding().used, taken.binding().reserved),
            (units, units)
        );

        // Neither refusals nor a clock that steps back make it shorter: its units are spent until
        // the end of its life.
        let full = Limit::new("api", units, limit.window())
            .unwrap()
            .with_algorithm(algorithm);
        let step = Duration::from_millis(300);
        let none = Duration::ZERO;
        for (back, forward) in [
            (none, none),
            (step, none),
            (none, step + limit.window() + life - MICROSECOND),
        ] {
            clock.step_back(back);
            clock.advance(forward);
            let refused = decide(&store, &full, 1).await;
            assert!(
                is_refused_by_reservations(&refused),
                "{algorithm:?} after {back:?} and {forward:?}: {refused:?}"
            );
        }
        clock.advance(MICROSECOND);
        assert_eq!(decide(&store, &limit, 0).await.binding().used, 0);

        // Its spent units count from the settlement on, since all of them were spent by then.
        let check = Check::new(prefetch).with_id(AdmissionId::fresh());
        let admitted = store.decide(check.clone()).await.unwrap();
        clock.advance(life / 2);
        let spent = units / 2;
        let settled = store
            .settle(Settlement::new(check, &admitted, |_| Some(spent)))
            .await
            .unwrap();
        assert!(settled.was_applied);
        let single = decide(&store, &limit, 1).await;
        assert_eq!(
            (single.binding().used, single.binding().reserved),
            (spent + 1, 0)
        );
        clock.advance(limit.window() - MICROSECOND);
        assert_eq!(decide(&store, &limit, 0).await.binding().used, spent + 1);
        // A compact log counts until the end of a sub-window.
        let rounding = if algorithm == Algorithm::SLIDING_LOG {
            none
        } else {
            limit.window()
        };
        clock.advance(MICROSECOND + rounding);
        assert_eq!(decide(&store, &limit, 0).await.binding().used, 0);
    }
}
