//! One trial of a store: a limiter on a store that remembers nothing yet, by a clock that the rule
//! moves.

use std::time::{Duration, UNIX_EPOCH};

use tower_sliding_window::{
    Algorithm, Charge, Check, Decision, Limit, Limiter, Store, settlement::Settlement,
    store::ManualClock,
};

use crate::support::{ALGORITHMS, Fixture};

pub(super) const MICROSECOND: Duration = Duration::from_micros(1);

pub(super) struct Trial {
    pub(super) limiter: Limiter,
    pub(super) clock: ManualClock,
    /// What has to live as long as the store.
    _store: Box<dyn std::any::Any>,
}

impl Trial {
    pub(super) fn of<S: Store>(fixture: Fixture<S>) -> Self {
        Self {
            limiter: fixture.limiter.clone(),
            clock: fixture.clock.clone(),
            _store: Box::new(fixture),
        }
    }

    /// Every check reaches the store.
    pub(super) fn without_refusal_cache(self) -> Self {
        Self {
            limiter: self.limiter.refusal_cache(Duration::ZERO),
            ..self
        }
    }

    pub(super) fn algorithms(&self) -> Vec<Algorithm> {
        ALGORITHMS.into()
    }

    pub(super) fn counts_by(&self, _: Algorithm) -> bool {
        true
    }

    /// Spends units of the key `ada`.
    pub(super) async fn spend(&self, limit: &Limit, cost: u64) -> Decision {
        self.limiter.check(limit, "ada", cost).await.unwrap()
    }

    /// Decides all limits together, for the key `ada`.
    pub(super) async fn spend_all(&self, limits: &[Limit], cost: u64) -> Decision {
        self.decide(&check_of(limits.iter().map(|limit| charge(limit, cost))))
            .await
    }

    pub(super) async fn decide(&self, check: &Check) -> Decision {
        self.limiter.check_all(check.clone()).await.unwrap()
    }

    /// Decides a check that must be admitted.
    pub(super) async fn take(&self, check: &Check) -> Decision {
        let decision = self.decide(check).await;
        assert!(decision.is_allowed(), "{decision:?}");
        decision
    }

    /// Settles, and returns whether it was applied and how many units are used then.
    pub(super) async fn settled(
        &self,
        check: &Check,
        admitted: &Decision,
        cost: u64,
    ) -> (bool, u64) {
        let settled = self
            .limiter
            .settle(Settlement::new(check.clone(), admitted, |_| Some(cost)))
            .await
            .unwrap();
        (settled.was_applied, settled.decision.binding().used)
    }

    /// The units that the key `ada` has used.
    pub(super) async fn used(&self, limit: &Limit) -> u64 {
        self.limiter
            .peek(limit, "ada")
            .await
            .unwrap()
            .binding()
            .used
    }
}

/// A charge to the key `ada`.
pub(super) fn charge(limit: &Limit, cost: u64) -> Charge {
    Charge::new(limit.clone(), "ada", cost).unwrap()
}

pub(super) fn check_of(charges: impl IntoIterator<Item = Charge>) -> Check {
    let mut charges = charges.into_iter();
    let first = Check::new(charges.next().unwrap());
    charges.try_fold(first, Check::and).unwrap()
}

pub(super) fn plain_check(limit: &Limit, cost: u64) -> Check {
    Check::new(charge(limit, cost))
}

pub(super) fn reserved_check(limit: &Limit, cost: u64, lease: Duration) -> Check {
    Check::new(charge(limit, cost).reserve(lease))
}

pub(super) const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

pub(super) const fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// Advances the clock to the moment at which its next window begins, as fixed windows count them.
pub(super) fn to_next_window(clock: &ManualClock, window: Duration) {
    let since_1970 = clock.now().duration_since(UNIX_EPOCH).unwrap().as_micros();
    let elapsed = u64::try_from(since_1970 % window.as_micros()).unwrap();
    clock.advance(window - Duration::from_micros(elapsed));
}

/// Advances the clock to a second after its next window has begun, so that no algorithm is near the
/// end of a window.
pub(super) fn to_the_start_of_a_window(clock: &ManualClock, window: Duration) {
    to_next_window(clock, window);
    clock.advance(seconds(1));
}

/// Numbers that look random and are the same in every run.
pub(super) struct Numbers(pub(super) u64);

impl Numbers {
    pub(super) fn below(&mut self, end: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % end
    }
}
