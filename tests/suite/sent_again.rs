//! A check that is sent again with its id is one admission: as long as any of its limits knows it, it was admitted whole.
//! And a settlement finds it, however often it was sent, and whichever clock it had then.

use std::{
    iter,
    time::{Duration, SystemTime},
};

use tokio::time::sleep;
use tower_sliding_window::{
    AdmissionId, Algorithm, Breaker, Charge, Check, Decision, DenyCache, Limit, LimitStatus, Limiter, ManualClock,
    RedisStore, Settlement, Store,
};

use crate::support::{Fixture, PATIENCE, for_every_store, proxy::Proxy, redis_server::RedisServer};

const SHORT: Limit = Limit::per("short", 3, Duration::from_secs(10));
const LONG: Limit = Limit::per_hour("long", 3);

const ALGORITHMS: [Algorithm; 4] = [Algorithm::log(), Algorithm::compact(16), Algorithm::counter(), Algorithm::fixed()];

/// So much later than the first try comes the second one. Replies have half a second.
const LATER: Duration = ms(200);

const fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

const fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

fn charge(limit: &Limit, cost: u64) -> Charge {
    Charge::new(limit.clone(), "ada", cost).unwrap()
}

fn all(charges: impl IntoIterator<Item = Charge>) -> Check {
    let mut charges = charges.into_iter();
    let first = Check::new(charges.next().unwrap());
    charges.try_fold(first, Check::and).unwrap()
}

fn used(decision: &Decision) -> Vec<u64> {
    decision.statuses().map(LimitStatus::used).collect()
}

impl<S: Store> Fixture<S> {
    async fn decide(&self, check: &Check) -> Decision {
        self.limiter.check_all(check.clone()).await.unwrap()
    }

    async fn fill(&self, limit: &Limit, cost: u64) {
        assert!(self.limiter.check(limit, "ada", cost).await.unwrap().is_allowed());
    }

    async fn refund(&self, check: &Check, decision: &Decision) -> (bool, Vec<u64>) {
        let settled = self.limiter.settle(Settlement::refund(check.clone(), decision)).await.unwrap();
        (settled.was_applied(), used(settled.decision()))
    }
}

/// To a second after an hour of the clock has begun, so that no long window is near its end.
fn to_the_start_of_an_hour(clock: &ManualClock) {
    let since = clock.now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_micros() % 3_600_000_000;
    clock.advance(seconds(3_601) - Duration::from_micros(u64::try_from(since).unwrap()));
}

/// The shorter window has passed, and others have spent all of both limits since: it is neither charged again nor refused.
async fn what_any_limit_still_knows_is_neither_charged_again_nor_refused(test: Fixture<impl Store>) {
    for (number, (short, long)) in
        ALGORITHMS.into_iter().flat_map(|short| ALGORITHMS.into_iter().map(move |long| (short, long))).enumerate()
    {
        for (lease, is_reversed) in
            [(None, false), (None, true), (Some(seconds(600)), false), (Some(seconds(600)), true)]
        {
            let case = format!("{short:?} {long:?} {lease:?} {is_reversed}");
            to_the_start_of_an_hour(&test.clock);
            let limits = [SHORT.with_algorithm(short), LONG.with_algorithm(long)];
            let mut charges = limits.each_ref().map(|limit| lease.into_iter().fold(charge(limit, 1), Charge::reserve));
            if is_reversed {
                charges.reverse();
            }
            let id = AdmissionId::from(1_000 + number as u64);
            let check = all(charges).with_id(id);
            let first = test.decide(&check).await;
            assert!(first.is_allowed() && used(&first) == [1, 1], "{case}");

            test.clock.advance(2 * SHORT.window());
            test.fill(&limits[0], 3).await;
            test.fill(&limits[1], 2).await;
            let again = test.decide(&check).await;
            assert!(again.is_allowed() && again.id() == id, "{case}: {again:?}");
            assert_eq!(used(&again), [3, 3], "{case}");
            assert_eq!(again.statuses().filter_map(LimitStatus::retry_after).count(), 0, "{case}");
            if long == Algorithm::log() {
                assert_eq!(again.at(), first.at(), "{case}");
            }

            // One refund gives back all that was counted of it.
            let left = if is_reversed { [2, 3] } else { [3, 2] };
            assert_eq!(test.refund(&check, &again).await, (true, left.to_vec()), "{case}");
            assert_eq!(test.refund(&check, &first).await, (false, left.to_vec()), "{case}");

            // Given back, it is that of a new admission, and so it is when the longest window has passed, too.
            let refused = test.decide(&check).await;
            assert!(!refused.is_allowed() && refused.limit() == &limits[0], "{case}");
            for limit in &limits {
                test.limiter.reset(limit, "ada").await.unwrap();
            }
            let known = test.decide(&check).await;
            assert!(known.is_allowed() && used(&known) == [1, 1], "{case}");
            test.clock.advance(3 * LONG.window());
            let new = test.decide(&check).await;
            assert_eq!((new.is_allowed(), new.at(), used(&new)), (true, test.clock.now(), vec![1, 1]), "{case}");
            for limit in &limits {
                test.limiter.reset(limit, "ada").await.unwrap();
            }
        }
    }
}

/// Beside charges that take nothing, that were spent, or that are in the shadow.
async fn charges_of_every_kind_are_part_of_what_is_known(test: Fixture<impl Store>) {
    let third = |units| Limit::per_minute("third", units);
    let free = || charge(&third(3), 0);
    let any_left = || Charge::any_left(third(3), "ada");
    let spent = || Charge::spent(third(3), "ada", 5);
    let shadow = || charge(&third(3), 1).in_shadow();
    let shadow_left = || Charge::any_left(third(3), "ada").in_shadow();
    let kinds: [(&str, &dyn Fn() -> Charge, u64); 5] = [
        ("free", &free, 0),
        ("any left", &any_left, 0),
        ("spent", &spent, 5),
        ("shadow", &shadow, 1),
        ("any left, in the shadow", &shadow_left, 0),
    ];
    for (number, (kind, made, units)) in kinds.into_iter().enumerate() {
        for place in 0..3 {
            to_the_start_of_an_hour(&test.clock);
            let mut charges = vec![charge(&SHORT, 1), charge(&LONG, 1)];
            charges.insert(place, made());
            let check = all(charges).with_id(AdmissionId::from(2_000 + number as u64));
            let first = test.decide(&check).await;
            let told = |decision: &Decision| {
                let used_of = |name| decision.statuses().find(|status| status.limit().name() == name).unwrap().used();
                (decision.is_allowed(), [used_of("short"), used_of("long"), used_of("third")])
            };
            assert_eq!(told(&first), (true, [1, 1, units]), "{kind}");

            // All of the third is spent by now, and nothing of the first is known.
            test.clock.advance(2 * SHORT.window());
            let more = 3_u64.saturating_sub(units);
            if more > 0 {
                test.fill(&third(3), more).await;
            }
            let again = test.decide(&check).await;
            assert_eq!(told(&again), (true, [0, 1, units.max(3)]), "{kind}: {again:?}");
            assert_eq!((again.at(), again.shadow_refusals().count()), (first.at(), 0), "{kind}");
            for limit in [&SHORT, &LONG, &third(3)] {
                test.limiter.reset(limit, "ada").await.unwrap();
            }
        }
    }

    // A limit in the shadow knows what it has counted as well as any other. What it has left out it does not know.
    for (spent_before, is_known) in [(0, true), (3, false)] {
        if spent_before > 0 {
            test.fill(&LONG, spent_before).await;
        }
        let check = all([charge(&SHORT, 1), charge(&LONG, 1).in_shadow()]).with_id(AdmissionId::from(3_000));
        let first = test.decide(&check).await;
        assert_eq!(first.shadow_refusals().count(), usize::from(!is_known));
        test.clock.advance(2 * SHORT.window());
        let again = test.decide(&check).await;
        assert_eq!((again.is_allowed(), again.at() == first.at()), (true, is_known));
        assert_eq!(used(&again)[0], u64::from(!is_known));
        test.limiter.reset(&LONG, "ada").await.unwrap();
        test.limiter.reset(&SHORT, "ada").await.unwrap();
    }

    // What only asks is known by nobody.
    let check = Check::new(Charge::any_left(SHORT, "ada")).with_id(AdmissionId::from(4_000));
    for _ in 0..3 {
        assert!(test.decide(&check).await.is_allowed());
        test.fill(&SHORT, 1).await;
    }
    assert!(!test.decide(&check).await.is_allowed());
}

/// The clock of the second try may be behind that of the first, or far ahead of it: the settlement finds the admission by
/// what either of them says.
async fn a_settlement_finds_what_was_sent_again_whichever_clock_it_had(test: Fixture<impl Store>) {
    let steps = [Duration::from_micros(1), ms(1), seconds(1), seconds(30), seconds(600)];
    let (long, forever) = (Limit::per_day("tokens", 100), Limit::per("forever", 100, seconds(86_400 * 7)));
    for (number, algorithm) in ALGORITHMS.into_iter().enumerate() {
        for lease in [None, Some(seconds(3_600)), Some(seconds(20 * 3_600))] {
            for (step, is_back) in steps.into_iter().flat_map(|step| [(step, true), (step, false)]) {
                for cost in [1, 7] {
                    for by_second in [true, false] {
                        let case = format!("{algorithm:?} {lease:?} {step:?} {is_back} {cost} {by_second}");
                        to_the_start_of_an_hour(&test.clock);
                        let charges = [&long, &forever].map(|limit| {
                            let charge = charge(&limit.clone().with_algorithm(algorithm), cost);
                            lease.into_iter().fold(charge, Charge::reserve)
                        });
                        let check = all(charges).with_id(AdmissionId::from(5_000 + number as u64));
                        let first = test.decide(&check).await;
                        if is_back {
                            test.clock.step_back(step);
                        } else {
                            test.clock.advance(step);
                        }
                        let second = test.decide(&check).await;
                        assert!(second.is_allowed() && used(&second) == [cost, cost], "{case}");
                        // Others tell it by what they have recorded.
                        if algorithm == Algorithm::log() {
                            assert_eq!(second.at(), first.at(), "{case}");
                        }
                        let by = if by_second { &second } else { &first };
                        assert_eq!(test.refund(&check, by).await, (true, vec![0, 0]), "{case}");
                        assert_eq!(test.refund(&check, by).await, (false, vec![0, 0]), "{case}");
                        test.clock.advance(seconds(86_400 * 15));
                    }
                }
            }
        }
    }
}

/// Among 600 others of the same time and of times around it.
async fn a_settlement_finds_its_admission_among_many(test: Fixture<impl Store>) {
    let calls = Limit::per_hour("calls", 1_000_000);
    let check = |id: u64, lease: Option<Duration>| {
        Check::new(lease.into_iter().fold(charge(&calls, 1 + id % 3), Charge::reserve)).with_id(AdmissionId::from(id))
    };
    for lease in [None, Some(seconds(3_600))] {
        let mut asked = Vec::new();
        for id in 0..1_200 {
            let check = check(id, lease);
            asked.push((test.decide(&check).await, check));
            // Half of them at one time.
            if id >= 600 {
                test.clock.advance(Duration::from_micros(1));
            }
        }
        // All are sent again, by a clock that is behind.
        test.clock.step_back(ms(5));
        let mut left: u64 = asked.iter().map(|(_, check)| check.charges().map(Charge::cost).sum::<u64>()).sum();
        for (first, check) in &asked {
            let again = test.decide(check).await;
            assert_eq!((again.at(), again.used()), (first.at(), left));
            left -= check.charges().map(Charge::cost).sum::<u64>();
            assert_eq!(test.refund(check, &again).await, (true, vec![left]));
        }
        test.clock.advance(seconds(7_200));
    }
}

for_every_store! {
    what_any_limit_still_knows_is_neither_charged_again_nor_refused
    charges_of_every_kind_are_part_of_what_is_known
    a_settlement_finds_what_was_sent_again_whichever_clock_it_had
    a_settlement_finds_its_admission_among_many
}

/// A server whose replies can be lost and be late, and one that is asked directly.
struct Lossy {
    server: RedisServer,
    proxy: Proxy,
    limiter: Limiter<RedisStore>,
    direct: Limiter<RedisStore>,
}

impl Lossy {
    /// With one batch at a time in flight, by the server's clock.
    async fn start() -> Self {
        let server = RedisServer::start();
        let proxy = Proxy::start(&server).await;
        let limiter = |url: &str| {
            let store = RedisStore::builder(url).connections(1).connect_timeout(PATIENCE).build().unwrap();
            Limiter::new(store).deadline(PATIENCE).breaker(Breaker::off()).deny_cache(DenyCache::off())
        };
        let (through, direct) = (limiter(proxy.url()), limiter(&server.url()));
        for limiter in [&through, &direct] {
            assert!(limiter.peek(&LONG, "nobody").await.unwrap().is_allowed());
        }
        Self { server, proxy, limiter: through, direct }
    }

    /// Asks, and does this between the two tries, of which the second comes `LATER` than the first.
    async fn ask_twice(&self, checks: impl IntoIterator<Item = Check>, meanwhile: impl AsyncFnOnce()) -> Vec<Decision> {
        self.proxy.delay_replies(LATER);
        self.proxy.lose_replies(1);
        let asked: Vec<_> = checks.into_iter().map(|check| tokio::spawn(self.limiter.check_all(check))).collect();
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
        self.direct.peek(limit, "ada").await.unwrap().used()
    }

    /// Waits for the first try, which uses so many units.
    async fn until_used(&self, limit: &Limit, units: u64) {
        while self.used(limit).await != units {
            sleep(ms(5)).await;
        }
    }

    /// Somebody else spends units, once they are left.
    async fn spend_directly(&self, limit: &Limit, units: u64) {
        while !self.direct.check(limit, "ada", units).await.unwrap().is_allowed() {
            sleep(ms(5)).await;
        }
    }
}

/// Alone and as copies that share an entry or not, reserved or not: of two limits the shorter one's window has passed before
/// the second try, and somebody else has spent all of that limit.
#[tokio::test]
async fn what_is_sent_again_after_the_shorter_window_is_admitted_whole() {
    let lossy = Lossy::start().await;
    for (copies, cost, lease) in
        [(1, 1, false), (1, 7, false), (3, 1, false), (40, 1, false), (40, 7, false), (1, 1, true), (5, 7, true)]
    {
        let case = format!("{copies} {cost} {lease}");
        let all_of_it = copies * cost;
        let short = Limit::per("short", all_of_it, LATER / 2);
        let long = Limit::per_hour("long", all_of_it);
        let made =
            |limit: &Limit| (0..u64::from(lease)).fold(charge(limit, cost), |charge, _| charge.reserve(seconds(600)));
        let check = all([made(&short), made(&long)]);
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
            let settled = lossy.limiter.settle(Settlement::refund(check.clone(), &decision)).await.unwrap();
            left -= cost;
            assert!(settled.was_applied(), "{case}");
            assert_eq!(settled.decision().statuses().nth(1).unwrap().used(), left, "{case}");
        }
        assert!(lossy.used(&short).await <= all_of_it, "{case}: that of somebody else, and no more");
        lossy.direct.reset(&short, "ada").await.unwrap();
    }
}

/// What the first try has refused of several copies stays refused, and what it has admitted admitted.
#[tokio::test]
async fn of_copies_that_are_sent_again_as_many_are_admitted_as_by_the_first_try() {
    let lossy = Lossy::start().await;
    for (copies, cost, fit) in [(5, 1, 3), (40, 1, 11), (40, 7, 11), (5, 1, 1), (5, 7, 1)] {
        let case = format!("{fit} of {copies} copies of {cost}");
        let short = Limit::per("short", fit * cost, LATER * 3 / 4);
        let long = Limit::per_hour("long", 10_000);
        let check = all([charge(&short, cost), charge(&long, cost)]);
        let decisions = lossy
            .ask_twice(iter::repeat_n(check.clone(), copies), async || {
                lossy.until_used(&long, fit * cost).await;
                lossy.spend_directly(&short, 1).await;
            })
            .await;
        let admitted: Vec<_> = decisions.iter().filter(|decision| decision.is_allowed()).collect();
        assert_eq!((admitted.len(), lossy.used(&long).await), (fit as usize, fit * cost), "{case}");
        for decision in decisions.iter().filter(|decision| !decision.is_allowed()) {
            assert!(decision.retry_after() > Some(Duration::ZERO), "{case}: {decision:?}");
        }
        // The second try counts nothing, so the limits stand the same for all copies.
        for decision in &admitted {
            assert_eq!((used(decision), used(decision)[1]), (used(admitted[0]), fit * cost), "{case}");
        }
        for (place, decision) in admitted.into_iter().enumerate() {
            let settled = lossy.limiter.settle(Settlement::refund(check.clone(), decision)).await.unwrap();
            let left = (fit - 1 - place as u64) * cost;
            let known = (settled.was_applied(), settled.decision().statuses().nth(1).unwrap().used());
            assert_eq!(known, (true, left), "{case}");
        }
        lossy.direct.reset(&short, "ada").await.unwrap();
    }
}

/// The server's clock cannot be set. So the entries of the first try are moved to where a clock that was ahead would have put
/// them, before the second try comes.
#[tokio::test]
async fn a_settlement_finds_what_a_clock_that_was_ahead_has_counted() {
    let lossy = Lossy::start().await;
    let limit = Limit::per_hour("long", 1_000_000);
    for ahead in [ms(2), seconds(2), seconds(600)] {
        for (copies, cost, lease) in
            [(1, 1, false), (1, 7, false), (3, 1, false), (40, 1, false), (40, 7, false), (5, 7, true)]
        {
            let case = format!("{ahead:?} {copies} {cost} {lease}");
            let reserved = (0..u64::from(lease)).fold(charge(&limit, cost), |charge, _| charge.reserve(seconds(600)));
            let check = Check::new(reserved);
            let decisions = lossy
                .ask_twice(iter::repeat_n(check.clone(), copies as usize), async || {
                    lossy.until_used(&limit, copies * cost).await;
                    let key = lossy.server.keys().remove(0);
                    let mut connection = lossy.server.connect();
                    let entries: Vec<(Vec<u8>, f64)> =
                        redis::cmd("ZRANGE").arg(&key).arg(0).arg(-1).arg("WITHSCORES").query(&mut connection).unwrap();
                    for (member, score) in entries.into_iter().filter(|(_, score)| *score < 0.0) {
                        let moved = score - ahead.as_micros() as f64;
                        redis::cmd("ZADD").arg(&key).arg(moved).arg(member).exec(&mut connection).unwrap();
                    }
                })
                .await;
            let mut left = copies * cost;
            for decision in decisions {
                assert!(decision.is_allowed(), "{case}");
                let settled = lossy.limiter.settle(Settlement::refund(check.clone(), &decision)).await.unwrap();
                left -= cost;
                assert_eq!((settled.was_applied(), settled.decision().used()), (true, left), "{case}");
            }
        }
    }
}

/// Copies that share an entry are found among any number of entries of the same time, and what cannot be found costs the
/// server no more than a look for each number of copies that there can be.
#[tokio::test]
async fn a_settlement_of_copies_is_found_with_bounded_work() {
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let store = RedisStore::builder(&server.url()).clock(&clock).connections(1).connect_timeout(PATIENCE).build();
    let limiter = Limiter::new(store.unwrap()).deadline(PATIENCE).deny_cache(DenyCache::off());
    let limit = Limit::per_hour("calls", 1_000_000);
    let mut groups = Vec::new();
    let mut sum = 0;
    for (copies, cost) in [(40, 3), (2, 3), (128, 3), (7, 1), (64, 2)] {
        let check = Check::new(charge(&limit, cost));
        let asked: Vec<_> = (0..copies).map(|_| tokio::spawn(limiter.check_all(check.clone()))).collect();
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
                let settled = limiter.settle(Settlement::refund(check.clone(), &decision)).await.unwrap();
                sum -= if is_known { cost } else { 0 };
                let told = (settled.was_applied(), settled.decision().used());
                assert_eq!(told, (is_known, sum), "{copies} copies of {cost}");
                most = most.max(commands(&server.run::<String>("INFO commandstats")));
            }
        }
    }
    println!("at most {most} commands for a settlement");
    // As many looks as there can be copies, as many entries as have shared one, and what any settlement takes.
    assert!(most <= 2 * 128 + 16, "{most}");
}
