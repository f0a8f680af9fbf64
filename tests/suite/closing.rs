//! Closing a limit: until when everybody is refused, and what counts afterwards.

use std::{
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Waker},
    time::{Duration, UNIX_EPOCH},
};

use tower_sliding_window::{
    Algorithm, Charge, Check, Error, Key, Limit, Limiter, ManualClock, MemoryStore, Settlement, Store,
};

use crate::support::{
    Fixture, for_every_store,
    stores::{Failing, Silent},
};

const CALLS: Limit = Limit::per_minute("calls", 10);
const MICRO: Duration = Duration::from_micros(1);

const fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// Units that leave meanwhile make no room, and those that do not leave count afterwards.
async fn a_closed_limit_refuses_everybody_until_exactly_then(test: Fixture<impl Store>) {
    for cost in [3, 2] {
        assert!(test.limiter.check(&CALLS, "ada", cost).await.unwrap().is_allowed());
        test.clock.advance(seconds(25));
    }
    // The three leave in 10 s, the two in 35 s.
    test.limiter.close(&CALLS, "ada", seconds(30)).await.unwrap();
    for elapsed in [0, 9, 10, 11, 29] {
        let refused = test.limiter.check(&CALLS, "ada", 1).await.unwrap();
        assert_eq!(refused.retry_after(), Some(seconds(30 - elapsed)), "after {elapsed} s");
        test.clock.advance(match elapsed {
            0 => seconds(9),
            9 | 10 => seconds(1),
            11 => seconds(18),
            _ => seconds(1) - MICRO,
        });
    }
    assert_eq!(test.limiter.check(&CALLS, "ada", 1).await.unwrap().retry_after(), Some(MICRO));
    test.clock.advance(MICRO);
    assert_eq!(test.limiter.check(&CALLS, "ada", 8).await.unwrap().used(), 10);
    assert!(test.limiter.check(&CALLS, "bob", 10).await.unwrap().is_allowed(), "nobody else's was closed");
}

async fn a_limit_is_closed_for_its_window_at_most_and_for_no_time_not_at_all(test: Fixture<impl Store>) {
    test.limiter.close(&CALLS, "ada", Duration::ZERO).await.unwrap();
    assert_eq!(test.limiter.peek(&CALLS, "ada").await.unwrap().used(), 0);
    test.limiter.close(&CALLS, "ada", Duration::MAX).await.unwrap();
    assert_eq!(test.limiter.check(&CALLS, "ada", 1).await.unwrap().retry_after(), Some(CALLS.window()));
    test.clock.advance(CALLS.window());
    assert!(test.limiter.check(&CALLS, "ada", 10).await.unwrap().is_allowed());
}

async fn a_limit_that_is_used_up_is_left_as_it_is(test: Fixture<impl Store>) {
    assert!(test.limiter.check(&CALLS, "ada", 10).await.unwrap().is_allowed());
    test.clock.advance(seconds(50));
    test.limiter.close(&CALLS, "ada", seconds(30)).await.unwrap();
    assert_eq!(test.limiter.check(&CALLS, "ada", 1).await.unwrap().retry_after(), Some(seconds(10)));
}

async fn a_reset_opens_what_is_closed(test: Fixture<impl Store>) {
    test.limiter.close(&CALLS, "ada", seconds(30)).await.unwrap();
    test.limiter.reset(&CALLS, "ada").await.unwrap();
    assert!(test.limiter.check(&CALLS, "ada", 10).await.unwrap().is_allowed());
}

/// Other algorithms keep less, and close for as long as they can.
async fn every_algorithm_closes(test: Fixture<impl Store>) {
    let part = CALLS.window() / 14;
    for (algorithm, longest) in [
        (Algorithm::compact(16), seconds(30) + part),
        (Algorithm::counter(), seconds(30)),
        (Algorithm::fixed(), seconds(30)),
    ] {
        let since = test.clock.now().duration_since(UNIX_EPOCH).unwrap().as_micros() % 60_000_000;
        // A second after the clock's window has begun.
        test.clock.advance(seconds(61) - Duration::from_micros(since as u64));
        let limit = CALLS.with_algorithm(algorithm);
        assert!(test.limiter.check(&limit, "ada", 4).await.unwrap().is_allowed());
        test.clock.advance(seconds(1));
        test.limiter.close(&limit, "ada", seconds(30)).await.unwrap();
        let wait = test.limiter.check(&limit, "ada", 1).await.unwrap().retry_after().unwrap();
        assert!((seconds(30)..=longest).contains(&wait), "{algorithm:?}: {wait:?}");
    }
}

/// Somebody spends a unit before each reservation.
#[derive(Clone)]
struct Busy {
    store: MemoryStore,
    spent: Arc<AtomicU64>,
}

impl Store for Busy {
    type Decide = <MemoryStore as Store>::Decide;
    type Settle = <MemoryStore as Store>::Settle;
    type Reset = <MemoryStore as Store>::Reset;

    fn decide(&self, check: Check) -> Self::Decide {
        for charge in check.charges().filter(|charge| charge.lease().is_some()) {
            let one = Check::new(Charge::new(charge.limit().clone(), charge.key().clone(), 1).unwrap());
            // The in-process store decides when it is first polled.
            let decided = pin!(self.store.decide(one)).poll(&mut Context::from_waker(Waker::noop()));
            assert!(decided.is_ready());
            self.spent.fetch_add(1, Ordering::SeqCst);
        }
        self.store.decide(check)
    }

    fn settle(&self, settlement: Settlement) -> Self::Settle {
        self.store.settle(settlement)
    }

    fn reset(&self, limit: Limit, key: Key) -> Self::Reset {
        self.store.reset(limit, key)
    }
}

#[tokio::test]
async fn a_limit_is_closed_though_others_go_on_to_spend() {
    for (limit, algorithm) in [CALLS, Limit::per_minute("many", 100_000)]
        .into_iter()
        .flat_map(|limit| [Algorithm::log(), Algorithm::fixed()].map(|algorithm| (limit.clone(), algorithm)))
    {
        let clock = ManualClock::new();
        let store = Busy { store: MemoryStore::builder().clock(&clock).build(), spent: Arc::default() };
        let (limiter, limit) = (Limiter::new(store.clone()), limit.with_algorithm(algorithm));
        limiter.close(&limit, "ada", seconds(30)).await.unwrap();
        assert!(store.spent.load(Ordering::SeqCst) > 1, "a race was lost");
        assert!(!limiter.check(&limit, "ada", 1).await.unwrap().is_allowed(), "{limit:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn without_a_store_nothing_is_closed_and_the_error_says_so() {
    let failing = Limiter::new(Failing).close(&CALLS, "ada", seconds(30)).await;
    assert!(matches!(failing, Err(Error::Unavailable(_))));
    let silent = Limiter::new(Silent).close(&CALLS, "ada", seconds(30)).await;
    assert!(matches!(silent, Err(Error::TimedOut { .. })));
}

for_every_store! {
    a_closed_limit_refuses_everybody_until_exactly_then
    a_limit_is_closed_for_its_window_at_most_and_for_no_time_not_at_all
    a_limit_that_is_used_up_is_left_as_it_is
    a_reset_opens_what_is_closed
    every_algorithm_closes
}
