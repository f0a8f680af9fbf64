//! Checks that the store sends again after their reply was lost: each counts once, and a settlement
//! finds it.

use std::{iter, time::Duration};

use tokio::time::sleep;
use tower_sliding_window::{
    Check, Decision, Error, Limit, Limiter, RedisStore, limiter::Breaker, settlement::Settlement,
    store::ManualClock,
};

use crate::support::{
    TEST_TIMEOUT, charge, check_of, ms, proxy::Proxy, redis_server::RedisServer, seconds,
};

const LONG: Limit = Limit::per_hour("long", 3);

/// The delay between the first and the second try. The store waits half a second for a reply.
const LATER: Duration = ms(200);

fn used(decision: &Decision) -> Vec<u64> {
    decision.statuses().map(|status| status.used).collect()
}

/// A server behind a proxy that loses and delays replies, and a limiter that reaches it directly.
struct Lossy {
    server: RedisServer,
    proxy: Proxy,
    limiter: Limiter,
    direct: Limiter,
}

impl Lossy {
    /// With one batch in flight at a time, by the server's clock.
    async fn start() -> Self {
        let server = RedisServer::start();
        let proxy = Proxy::start(&server).await;
        let limiter = |url: &str| {
            let store = RedisStore::builder(url)
                .connections(1)
                .connect_timeout(TEST_TIMEOUT)
                .reply_timeout(TEST_TIMEOUT);
            let store = store.build().unwrap();
            Limiter::new(store)
                .deadline(TEST_TIMEOUT)
                .breaker(Breaker::OFF)
                .refusal_cache(Duration::ZERO)
        };
        let (through, direct) = (limiter(proxy.url()), limiter(&server.url()));
        for limiter in [&through, &direct] {
            assert!(limiter.peek(&LONG, "nobody").await.unwrap().is_allowed());
        }
        Self {
            server,
            proxy,
            limiter: through,
            direct,
        }
    }

    /// Sends checks whose first reply is lost, and runs `meanwhile` before the second try, which
    /// comes `LATER`.
    async fn ask_twice(
        &self,
        checks: impl IntoIterator<Item = Check>,
        meanwhile: impl AsyncFnOnce(),
    ) -> Vec<Decision> {
        self.proxy.delay_replies(LATER);
        self.proxy.lose_replies(1);
        let asked: Vec<_> = checks
            .into_iter()
            .map(|check| tokio::spawn(self.limiter.check_all(check)))
            .collect();
        meanwhile().await;
        self.proxy.delay_replies(Duration::ZERO);
        let mut decisions = Vec::new();
        for decision in asked {
            decisions.push(decision.await.unwrap().unwrap());
        }
        assert!(self.proxy.has_lost_them());
        decisions
    }

    async fn used(&self, limit: &Limit) -> u64 {
        self.direct.peek(limit, "ada").await.unwrap().binding().used
    }

    /// Waits until the first try has used so many units.
    async fn until_used(&self, limit: &Limit, units: u64) {
        while self.used(limit).await != units {
            sleep(ms(5)).await;
        }
    }

    /// Spends units through the direct limiter, as soon as they are free.
    async fn spend_directly(&self, limit: &Limit, units: u64) {
        while !self
            .direct
            .check(limit, "ada", units)
            .await
            .unwrap()
            .is_allowed()
        {
            sleep(ms(5)).await;
        }
    }
}

/// Single checks and copies that may share an entry, reserved or not. The shorter window has passed
/// before the second try, and another caller has spent that limit.
#[tokio::test]
async fn a_resent_check_is_admitted_whole_after_the_shorter_window() {
    let lossy = Lossy::start().await;
    for (copies, cost, lease) in [
        (1, 1, false),
        (1, 7, false),
        (3, 1, false),
        (40, 1, false),
        (40, 7, false),
        (1, 1, true),
        (5, 7, true),
    ] {
        let case = format!("{copies} {cost} {lease}");
        let all_of_it = copies * cost;
        let short = Limit::per("short", all_of_it, LATER / 2);
        let long = Limit::per_hour("long", all_of_it);
        let made = |limit: &Limit| {
            (0..u64::from(lease)).fold(charge(limit, cost), |charge, _| {
                charge.reserve(seconds(600))
            })
        };
        let check = check_of([made(&short), made(&long)]);
        let decisions = lossy
            .ask_twice(iter::repeat_n(check.clone(), copies as usize), async || {
                lossy.until_used(&long, all_of_it).await;
                lossy.spend_directly(&short, all_of_it).await;
            })
            .await;
        let mut left = all_of_it;
        for decision in decisions {
            assert!(decision.is_allowed(), "{case}: {decision:?}");
            assert_eq!(lossy.used(&long).await, left, "{case}");
            let settled = lossy
                .limiter
                .settle(Settlement::new(check.clone(), &decision, |_| Some(0)))
                .await
                .unwrap();
            left -= cost;
            assert!(settled.was_applied, "{case}");
            assert_eq!(
                settled.decision.statuses().nth(1).unwrap().used,
                left,
                "{case}"
            );
        }
        assert!(
            lossy.used(&short).await <= all_of_it,
            "{case}: only the units of the other caller"
        );
        lossy.direct.reset(&short, "ada").await.unwrap();
    }
}

/// Copies that the first try refused stay refused, and copies that it admitted stay admitted.
#[tokio::test]
async fn resent_copies_are_admitted_as_often_as_in_the_first_try() {
    let lossy = Lossy::start().await;
    for (copies, cost, fit) in [(5, 1, 3), (40, 1, 11), (40, 7, 11), (5, 1, 1), (5, 7, 1)] {
        let case = format!("{fit} of {copies} copies of {cost}");
        let short = Limit::per("short", fit * cost, LATER * 3 / 4);
        let long = Limit::per_hour("long", 10_000);
        let check = check_of([charge(&short, cost), charge(&long, cost)]);
        let decisions = lossy
            .ask_twice(iter::repeat_n(check.clone(), copies), async || {
                lossy.until_used(&long, fit * cost).await;
                lossy.spend_directly(&short, 1).await;
            })
            .await;
        let admitted: Vec<_> = decisions
            .iter()
            .filter(|decision| decision.is_allowed())
            .collect();
        assert_eq!(
            (admitted.len(), lossy.used(&long).await),
            (fit as usize, fit * cost),
            "{case}"
        );
        for decision in decisions.iter().filter(|decision| !decision.is_allowed()) {
            assert!(
                decision.retry_after() > Some(Duration::ZERO),
                "{case}: {decision:?}"
            );
        }
        // The second try charges nothing, so all copies report the same status.
        for decision in &admitted {
            assert_eq!(
                (used(decision), used(decision)[1]),
                (used(admitted[0]), fit * cost),
                "{case}"
            );
        }
        for (place, decision) in admitted.into_iter().enumerate() {
            let settled = lossy
                .limiter
                .settle(Settlement::new(check.clone(), decision, |_| Some(0)))
                .await
                .unwrap();
            let left = (fit - 1 - place as u64) * cost;
            let known = (
                settled.was_applied,
                settled.decision.statuses().nth(1).unwrap().used,
            );
            assert_eq!(known, (true, left), "{case}");
        }
        lossy.direct.reset(&short, "ada").await.unwrap();
    }
}

/// The first reply is lost. Nobody waits any more when the connection for the second try is open.
#[tokio::test]
async fn a_check_whose_callers_have_left_is_not_resent() {
    let lossy = Lossy::start().await;
    let hurried = lossy.limiter.clone().deadline(LATER * 3 / 2);
    lossy.server.run::<()>("CONFIG RESETSTAT");
    lossy.proxy.delay_replies(LATER);
    lossy.proxy.lose_replies(1);
    let asked: Vec<_> = (0..3)
        .map(|_| tokio::spawn(hurried.check(&LONG, "ada", 1)))
        .collect();
    for answer in asked {
        assert!(matches!(answer.await.unwrap(), Err(Error::TimedOut { .. })));
    }
    assert!(lossy.proxy.has_lost_them());
    lossy.proxy.delay_replies(Duration::ZERO);
    // Behind the second try, over the same connection.
    assert_eq!(
        lossy
            .limiter
            .peek(&LONG, "ada")
            .await
            .unwrap()
            .binding()
            .used,
        3
    );
    assert_eq!(
        lossy.server.script_calls(),
        2,
        "the first try, and this check"
    );
}

/// The same for a check that its own caller sends.
#[tokio::test]
async fn a_lone_check_whose_caller_has_left_is_not_resent() {
    let lossy = Lossy::start().await;
    let store = RedisStore::builder(lossy.proxy.url())
        .connect_timeout(TEST_TIMEOUT)
        .reply_timeout(TEST_TIMEOUT);
    let limiter = Limiter::new(store.build().unwrap())
        .deadline(TEST_TIMEOUT)
        .breaker(Breaker::OFF);
    // From then on a connection works.
    assert!(limiter.peek(&LONG, "nobody").await.unwrap().is_allowed());
    lossy.server.run::<()>("CONFIG RESETSTAT");
    lossy.proxy.delay_replies(LATER);
    lossy.proxy.lose_replies(1);
    let asked = tokio::spawn(limiter.deadline(LATER * 3 / 2).check(&LONG, "ada", 1));
    assert!(matches!(asked.await.unwrap(), Err(Error::TimedOut { .. })));
    assert!(lossy.proxy.has_lost_them());
    // The second try would wait for the handshake of its connection.
    sleep(LATER * 5).await;
    assert_eq!(lossy.server.script_calls(), 1, "the first try");
}

/// The server's clock cannot be set. Instead, the entries of the first try are moved before the
/// second try, to where a clock that was ahead would have put them.
#[tokio::test]
async fn a_settlement_finds_entries_of_a_clock_that_was_ahead() {
    let lossy = Lossy::start().await;
    let limit = Limit::per_hour("long", 1_000_000);
    for ahead in [ms(2), seconds(2), seconds(600)] {
        for (copies, cost, lease) in [
            (1, 1, false),
            (1, 7, false),
            (3, 1, false),
            (40, 1, false),
            (40, 7, false),
            (5, 7, true),
        ] {
            let case = format!("{ahead:?} {copies} {cost} {lease}");
            let reserved = (0..u64::from(lease)).fold(charge(&limit, cost), |charge, _| {
                charge.reserve(seconds(600))
            });
            let check = Check::new(reserved);
            let decisions = lossy
                .ask_twice(iter::repeat_n(check.clone(), copies as usize), async || {
                    lossy.until_used(&limit, copies * cost).await;
                    let key = lossy.server.keys().remove(0);
                    let mut connection = lossy.server.connect();
                    let entries: Vec<(Vec<u8>, f64)> = redis::cmd("ZRANGE")
                        .arg(&key)
                        .arg(0)
                        .arg(-1)
                        .arg("WITHSCORES")
                        .query(&mut connection)
                        .unwrap();
                    for (member, score) in entries.into_iter().filter(|(_, score)| *score < 0.0) {
                        let moved = score - ahead.as_micros() as f64;
                        redis::cmd("ZADD")
                            .arg(&key)
                            .arg(moved)
                            .arg(member)
                            .exec(&mut connection)
                            .unwrap();
                    }
                })
                .await;
            let mut left = copies * cost;
            for decision in decisions {
                assert!(decision.is_allowed(), "{case}");
                let settled = lossy
                    .limiter
                    .settle(Settlement::new(check.clone(), &decision, |_| Some(0)))
                    .await
                    .unwrap();
                left -= cost;
                assert_eq!(
                    (settled.was_applied, settled.decision.binding().used),
                    (true, left),
                    "{case}"
                );
            }
        }
    }
}

/// Copies that share an entry are found among any number of entries of the same time. A settlement
/// that finds nothing costs one look-up per possible number of copies.
#[tokio::test]
async fn settling_copies_takes_bounded_work() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let store = server.store().clock(&clock).connections(1).build();
    let limiter = Limiter::new(store.unwrap())
        .deadline(TEST_TIMEOUT)
        .refusal_cache(Duration::ZERO);
    let limit = Limit::per_hour("calls", 1_000_000);
    let mut groups = Vec::new();
    let mut sum = 0;
    for (copies, cost) in [(40, 3), (2, 3), (128, 3), (7, 1), (64, 2)] {
        let check = Check::new(charge(&limit, cost));
        let asked: Vec<_> = (0..copies)
            .map(|_| tokio::spawn(limiter.check_all(check.clone())))
            .collect();
        let mut decisions = Vec::new();
        for decision in asked {
            decisions.push(decision.await.unwrap().unwrap());
        }
        groups.push((check, cost, decisions));
        sum += copies * cost;
        for _ in 0..150 {
            assert!(limiter.check(&limit, "ada", 1).await.unwrap().is_allowed());
            sum += 1;
        }
    }
    let commands = |stats: &str| -> u64 {
        let calls = |line: &str| {
            let (name, rest) = line.strip_prefix("cmdstat_")?.split_once(":calls=")?;
            let calls = rest.split(',').next()?.parse::<u64>().ok()?;
            name.starts_with('z').then_some(calls)
        };
        stats.lines().filter_map(calls).sum()
    };
    let mut most = 0;
    for (check, cost, decisions) in groups {
        let copies = decisions.len();
        for decision in decisions.into_iter().rev() {
            for is_known in [true, false] {
                server.run::<()>("CONFIG RESETSTAT");
                let settled = limiter
                    .settle(Settlement::new(check.clone(), &decision, |_| Some(0)))
                    .await
                    .unwrap();
                sum -= if is_known { cost } else { 0 };
                let reported = (settled.was_applied, settled.decision.binding().used);
                assert_eq!(reported, (is_known, sum), "{copies} copies of {cost}");
                most = most.max(commands(&server.run::<String>("INFO commandstats")));
            }
        }
    }
    println!("at most {most} commands for a settlement");
    // One look-up per possible number of copies, one per copy that shared the entry, and those of
    // any settlement.
    assert!(most <= 2 * 128 + 16, "{most}");
}
