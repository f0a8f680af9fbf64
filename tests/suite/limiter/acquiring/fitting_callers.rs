//! Which callers ask when units return: by arrival, and by the least units that may be used then.

use std::{sync::atomic::Ordering, time::Duration};

use tower_sliding_window::{Charge, Check, Decision, Limit, settlement::Settlement};

use super::{CALLS, Test, check_of_ada};
use crate::support::{check_of, let_tasks_run, ms};

/// A caller in a line of its own.
fn own(cost: u64, name: &'static str) -> Check {
    check_of([
        Charge::new(CALLS, "ada", cost).unwrap(),
        Charge::new(Limit::per_hour("own", 9), name, 1).unwrap(),
    ])
}

impl Test {
    async fn spend(&self, cost: u64) -> Decision {
        self.limiter.check_all(check_of_ada(cost)).await.unwrap()
    }

    async fn give_back(&self, cost: u64, spent: &Decision) {
        let refund = Settlement::new(check_of_ada(cost), spent, |_| Some(0));
        assert!(self.limiter.settle(refund).await.unwrap().was_applied);
        let_tasks_run().await;
    }
}

/// The first to arrive needs all units that return, the second only one.
#[tokio::test(start_paused = true)]
async fn of_the_callers_that_fit_the_first_to_arrive_asks() {
    let test = Test::start();
    let (_, spent) = (test.spend(1).await, test.spend(2).await);
    let _large = test.wait("large", own(2, "a"), Duration::MAX).await;
    let _small = test.wait("small", own(1, "b"), Duration::MAX).await;
    test.give_back(2, &spent).await;
    assert_eq!(test.admitted(), ["large"]);
}

/// Two units leave the window, and before the caller's timer is due, a third returns.
#[tokio::test(start_paused = true)]
async fn the_reply_to_a_settlement_says_which_units_have_left_the_window() {
    let test = Test::start();
    assert!(test.spend(2).await.is_allowed());
    test.clock.advance(ms(50));
    let spent = test.spend(1).await;
    let _waiting = test.wait("of two", check_of_ada(2), Duration::MAX).await;
    test.clock.advance(ms(50));
    test.give_back(1, &spent).await;
    assert_eq!(test.admitted(), ["of two"]);
}

/// The store fails when the first of two callers asks for units that have returned.
#[tokio::test(start_paused = true)]
async fn no_other_caller_asks_a_store_that_has_failed() {
    let test = Test::start();
    let spent = test.spend(3).await;
    let failed = test.wait("failed", own(1, "a"), Duration::MAX).await;
    let waiting = test.wait("waiting", own(1, "b"), Duration::MAX).await;
    test.checks_sent();
    test.store.fails.store(true, Ordering::SeqCst);
    let refund = Settlement::new(check_of_ada(3), &spent, |_| Some(2));
    assert!(test.limiter.settle(refund).await.unwrap().was_applied);
    let_tasks_run().await;
    assert_eq!(
        (
            failed.is_finished(),
            waiting.is_finished(),
            test.checks_sent()
        ),
        (false, false, 1)
    );

    test.store.fails.store(false, Ordering::SeqCst);
    test.pass(ms(99)).await;
    assert_eq!(test.checks_sent(), 0, "it asks again after a pause");
    test.pass(ms(1)).await;
    assert!(test.admitted().contains(&"failed"));
}
