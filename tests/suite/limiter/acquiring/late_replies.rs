//! Replies that arrive in another order than the store decided hide no units that have returned.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::{
    task::JoinSet,
    time::{sleep, timeout},
};
use tower_sliding_window::{
    Charge, Check, Decision, Key, Limit, Limiter, MemoryStore, Store,
    settlement::{Settled, Settlement},
    store::StoreFuture,
};

use crate::support::{check_of, ms};

fn of(limit: &Limit, key: impl Into<Key>, cost: u64) -> Charge {
    Charge::new(limit.clone(), key, cost).unwrap()
}

/// The key, and milliseconds before and after the decision.
type Delays = (&'static str, u64, u64);

/// A store whose delays a test writes down: for each key of the last charge, those of its checks in
/// order, before and after it decides.
#[derive(Clone)]
struct Scripted {
    store: MemoryStore,
    delays: Arc<Mutex<Vec<Delays>>>,
}

impl std::fmt::Debug for Scripted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Scripted")
    }
}

impl Scripted {
    fn new(delays: &[Delays]) -> Self {
        Self {
            store: MemoryStore::new(),
            delays: Arc::new(Mutex::new(delays.to_vec())),
        }
    }

    fn of(&self, check: &Check) -> (Duration, Duration) {
        let key = check.charges().last().unwrap().key().clone();
        let mut delays = self.delays.lock().unwrap();
        let place = delays
            .iter()
            .position(|(name, ..)| name.as_bytes() == key.value());
        place.map_or((ms(0), ms(0)), |place| {
            let (_, before, after) = delays.remove(place);
            (ms(before), ms(after))
        })
    }
}

impl Store for Scripted {
    fn decide(&self, check: Check) -> StoreFuture<Decision> {
        let (store, (before, after)) = (self.store.clone(), self.of(&check));
        Box::pin(async move {
            sleep(before).await;
            let reply = store.decide(check).await;
            sleep(after).await;
            reply
        })
    }

    fn settle(&self, settlement: Settlement) -> StoreFuture<Settled> {
        let (store, (before, after)) = (self.store.clone(), self.of(&settlement.check));
        Box::pin(async move {
            sleep(before).await;
            let reply = store.settle(settlement).await;
            sleep(after).await;
            reply
        })
    }

    fn reset(&self, limit: Limit, key: Key) -> StoreFuture<()> {
        self.store.reset(limit, key)
    }
}

/// What happens in a scripted test: at these milliseconds, a caller of this name and cost arrives,
/// or units return.
enum Event {
    Arrives(&'static str, u64),
    Returns(&'static str, u64),
    Checks(u64),
}

/// Returns the callers that still wait a second later, and how many units are left. `used` are the
/// names and units of those that return.
async fn scripted(
    delays: &[Delays],
    units: u64,
    events: impl IntoIterator<Item = (u64, Event)>,
) -> (Vec<&'static str>, u64) {
    let store = Scripted::new(delays);
    let limiter = Limiter::new(store.clone()).deadline(Duration::from_secs(100));
    let (shared, own) = (
        Limit::per_hour("shared", units),
        Limit::per_hour("own", 1_000),
    );
    let events: Vec<_> = events.into_iter().collect();
    let mut spent = BTreeMap::new();
    let mut rest = units;
    for (_, event) in &events {
        if let Event::Returns(name, units) = event {
            let check = check_of([of(&shared, "all", *units), of(&own, *name, 1)]);
            spent.insert(
                *name,
                (check.clone(), store.store.decide(check).await.unwrap()),
            );
            rest -= units;
        }
    }
    assert!(
        store
            .store
            .decide(Check::new(of(&shared, "all", rest)))
            .await
            .unwrap()
            .is_allowed()
    );
    let waiting: Arc<Mutex<Vec<&'static str>>> = Arc::default();
    let mut tasks = JoinSet::new();
    for (at, event) in events {
        let (limiter, waiting, shared, own) = (
            limiter.clone(),
            waiting.clone(),
            shared.clone(),
            own.clone(),
        );
        let spent = match &event {
            Event::Returns(name, _) => spent.remove(name),
            _ => None,
        };
        tasks.spawn(async move {
            sleep(ms(at)).await;
            match event {
                Event::Arrives(name, cost) => {
                    waiting.lock().unwrap().push(name);
                    let check = check_of([of(&shared, "all", cost), of(&own, name, 1)]);
                    assert!(
                        limiter
                            .acquire_all(check, Duration::MAX)
                            .await
                            .unwrap()
                            .is_allowed()
                    );
                    waiting.lock().unwrap().retain(|other| *other != name);
                }
                Event::Returns(..) => {
                    let (check, decision) = spent.unwrap();
                    let shared = &shared;
                    let cost = |charge: &Charge| (charge.limit() == shared).then_some(0);
                    assert!(
                        limiter
                            .settle(Settlement::new(check, &decision, cost))
                            .await
                            .unwrap()
                            .was_applied
                    );
                }
                Event::Checks(cost) => {
                    assert!(
                        limiter
                            .check(&shared, "all", cost)
                            .await
                            .unwrap()
                            .is_allowed()
                    );
                }
            }
        });
    }
    sleep(ms(1_000)).await;
    let left = Limiter::new(store.store.clone())
        .peek(&shared, "all")
        .await
        .unwrap()
        .remaining();
    tasks.abort_all();
    let waiting = waiting.lock().unwrap().clone();
    (waiting, left)
}

/// One caller waits for one unit. The first that returns is taken by a check; the second returns
/// while the caller's refusal is on its way.
#[tokio::test(start_paused = true)]
async fn a_refusal_that_is_late_hides_no_unit_that_returned_since() {
    use Event::{Arrives, Checks, Returns};
    let delays = [("a", 0, 0), ("a", 5, 10)];
    let events = [
        (0, Arrives("a", 1)),
        (10, Returns("first", 1)),
        (12, Checks(1)),
        (18, Returns("second", 1)),
    ];
    assert_eq!(scripted(&delays, 4, events).await, (vec![], 0));
}

/// A caller of a large cost asks with a part of its units that has returned, and uses less than all
/// that have.
#[tokio::test(start_paused = true)]
async fn a_caller_of_a_large_cost_claims_no_units_that_it_leaves() {
    use Event::{Arrives, Returns};
    let delays = [("small", 0, 50), ("large", 0, 20)];
    let events = [
        (0, Arrives("small", 1)),
        (10, Returns("first", 5)),
        (11, Arrives("large", 6)),
        (20, Returns("second", 3)),
    ];
    assert_eq!(scripted(&delays, 8, events).await, (vec![], 1));
}

/// The reply to the first settlement comes after that to the second.
#[tokio::test(start_paused = true)]
async fn replies_to_settlements_in_another_order_hide_no_units() {
    use Event::{Arrives, Returns};
    let delays = [("a", 0, 50), ("first", 0, 20), ("second", 0, 0)];
    let events = [
        (0, Arrives("a", 2)),
        (10, Returns("first", 1)),
        (20, Returns("second", 1)),
    ];
    assert_eq!(scripted(&delays, 4, events).await, (vec![], 0));
}

/// An admission is decided first, and its reply comes after others have used the rest. One unit
/// returns, so one of two callers asks.
#[tokio::test(start_paused = true)]
async fn a_late_reply_does_not_hide_that_units_were_used_since() {
    let (shared, own) = (Limit::per_hour("shared", 4), Limit::per_hour("own", 1_000));
    let store = Scripted::new(&[
        ("late", 0, 50),
        ("a", 0, 0),
        ("a", 0, 0),
        ("b", 0, 0),
        ("b", 0, 0),
    ]);
    let limiter = Limiter::new(store.clone());
    let mut tasks = JoinSet::new();
    let acquire = |name| check_of([of(&shared, "all", 1), of(&own, name, 1)]);
    let checks = ["late", "a", "b"].map(acquire);
    for (at, check) in [0, 20, 30].into_iter().zip(checks) {
        let limiter = limiter.clone();
        tasks.spawn(async move {
            sleep(ms(at)).await;
            limiter.acquire_all(check, Duration::MAX).await
        });
    }
    sleep(ms(10)).await;
    let three = check_of([of(&shared, "all", 3)]);
    let spent = limiter.check_all(three.clone()).await.unwrap();
    assert!(spent.is_allowed());
    sleep(ms(90)).await;
    assert!(
        limiter
            .settle(Settlement::new(three, &spent, |_| Some(2)))
            .await
            .unwrap()
            .was_applied
    );
    sleep(ms(10)).await;
    assert_eq!(
        *store.delays.lock().unwrap(),
        [("b", 0, 0)],
        "only the first has asked again"
    );
}

/// Two settlements return a unit each, and the later reply says that more are used. The caller that
/// was woken for the first leaves without asking, so the units are for the next.
#[tokio::test(start_paused = true)]
async fn a_caller_that_leaves_hides_no_units_that_a_late_reply_has_hidden() {
    let (shared, own) = (Limit::per_hour("shared", 4), Limit::per_hour("own", 1_000));
    let store = Scripted::new(&[("first", 0, 20), ("second", 0, 0)]);
    let limiter = Limiter::new(store.clone()).deadline(Duration::from_secs(100));
    let mut spent = Vec::new();
    for name in ["first", "second"] {
        let check = check_of([of(&shared, "all", 1), of(&own, name, 1)]);
        let decision = store.store.decide(check.clone()).await.unwrap();
        spent.push(Settlement::new(check, &decision, |charge| {
            (charge.key() == &Key::from("all")).then_some(0)
        }));
    }
    assert!(
        store
            .store
            .decide(Check::new(of(&shared, "all", 2)))
            .await
            .unwrap()
            .is_allowed()
    );
    let acquire = |name, cost| {
        let limiter = limiter.clone();
        let check = check_of([of(&shared, "all", cost), of(&own, name, 1)]);
        async move { limiter.acquire_all(check, Duration::MAX).await }
    };
    let mut small = Box::pin(acquire("small", 1));
    assert!(
        timeout(ms(5), &mut small).await.is_err(),
        "it is refused, and not polled any more"
    );
    let large = tokio::spawn(acquire("large", 2));
    sleep(ms(1)).await;
    let [first, second] = <[Settlement; 2]>::try_from(spent).ok().unwrap();
    let settled = tokio::spawn({
        let limiter = limiter.clone();
        async move { limiter.settle(first).await }
    });
    sleep(ms(5)).await;
    assert!(limiter.settle(second).await.unwrap().was_applied);
    assert!(settled.await.unwrap().unwrap().was_applied);
    drop(small);
    sleep(ms(50)).await;
    assert!(large.is_finished());
}
