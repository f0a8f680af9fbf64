//! Settlements after the end of a lease, of admissions that share one id. Each counts once.

use std::time::Duration;

use tower_sliding_window::{
    Algorithm, Check, Decision, Limit, Store, check::AdmissionId, settlement::Settlement,
};

use crate::support::{
    ALGORITHMS, Fixture, charge, for_every_store, seconds, to_the_start_of_a_window,
};

const LEASE: Duration = Duration::from_secs(1);

impl<S: Store> Fixture<S> {
    async fn take(&self, check: &Check) -> Decision {
        let decision = self.limiter.check_all(check.clone()).await.unwrap();
        assert!(decision.is_allowed(), "{decision:?}");
        decision
    }

    /// Settles, and returns whether it was applied and how many units are used then.
    async fn settled(&self, check: &Check, admitted: &Decision, cost: u64) -> (bool, u64) {
        let settled = self
            .limiter
            .settle(Settlement::new(check.clone(), admitted, |_| Some(cost)))
            .await
            .unwrap();
        (settled.was_applied, settled.decision.binding().used)
    }

    async fn units_used(&self, limit: &Limit) -> u64 {
        self.limiter
            .peek(limit, "ada")
            .await
            .unwrap()
            .binding()
            .used
    }
}

fn reserved(limit: &Limit, cost: u64) -> Check {
    Check::new(charge(limit, cost).reserve(LEASE)).with_id(AdmissionId(4711))
}

async fn the_end_of_an_older_admission_hides_no_younger_settlement(
    test: Fixture<impl Store + Clone>,
) {
    for algorithm in ALGORITHMS {
        let limit = Limit::per_minute("tokens", 100).with_algorithm(algorithm);
        // A fixed window does not tell two admissions of one id apart, and a counter counts those
        // of the window before.
        if [Algorithm::FIXED_WINDOW, Algorithm::SLIDING_WINDOW_COUNTER].contains(&algorithm) {
            continue;
        }
        to_the_start_of_a_window(&test.clock, limit.window());
        let check = reserved(&limit, 60);
        let first = test.take(&check).await;
        test.clock.advance(seconds(5));
        assert_eq!(test.settled(&check, &first, 10).await, (true, 10));
        test.clock.advance(seconds(25));
        let second = test.take(&check).await;
        test.clock.advance(seconds(5));
        assert_eq!(test.settled(&check, &second, 11).await, (true, 21));
        test.clock.advance(seconds(35));
        assert_eq!(
            test.units_used(&limit).await,
            11,
            "{algorithm:?}: the first has left the window"
        );
        assert_eq!(
            test.settled(&check, &second, 11).await,
            (false, 11),
            "{algorithm:?}"
        );
    }
}

async fn an_id_given_very_often_is_settled_once_each_time(test: Fixture<impl Store + Clone>) {
    for algorithm in [Algorithm::SLIDING_LOG, Algorithm::compact_log(250)] {
        let limit = Limit::per("tokens", 1_000, seconds(600)).with_algorithm(algorithm);
        to_the_start_of_a_window(&test.clock, limit.window());
        let check = reserved(&limit, 3);
        let mut admissions = Vec::new();
        for used in (2..=240).step_by(2) {
            let admitted = test.take(&check).await;
            test.clock.advance(seconds(2));
            assert_eq!(
                test.settled(&check, &admitted, 2).await,
                (true, used),
                "{algorithm:?}"
            );
            admissions.push(admitted);
            test.clock.advance(seconds(2));
        }
        for admitted in &admissions {
            assert_eq!(
                test.settled(&check, admitted, 2).await,
                (false, 240),
                "{algorithm:?}"
            );
        }
        // The first was admitted 480 seconds ago, and each further one 4 seconds later.
        test.clock.advance(seconds(120 + 110 * 4 + 1));
        let used = test.units_used(&limit).await;
        assert!(
            (16..=22).contains(&used),
            "{algorithm:?}: {used} used where about 10 of 120 are left"
        );
        test.clock.advance(seconds(60));
        assert_eq!(test.units_used(&limit).await, 0, "{algorithm:?}");
    }
}

for_every_store! {
    the_end_of_an_older_admission_hides_no_younger_settlement
    an_id_given_very_often_is_settled_once_each_time
}
