//! A clock that has stepped back: both stores count the same within a window of 1970, and no reset
//! time is too early after the server's own clock has stepped.

use std::time::{Duration, SystemTime};

use Action::{IsRefused, Peeks, Reserves, Settles, Takes, Waits};
use tower_sliding_window::{
    Algorithm, Check, Decision, Limit, Limiter, check::AdmissionId, decision::LimitStatus,
    settlement::Settlement, store::ManualClock,
};

use crate::support::{
    ALGORITHMS, Figures, Numbers, TEST_TIMEOUT, charge,
    clock_steps::{Action, HISTORIES},
    memory, redis,
    redis_server::RedisServer,
    seconds,
};

const CALLS: Limit = Limit::per("calls", 100, Duration::from_secs(10));

/// Random histories within the first windows of 1970, with steps back to it: both stores decide
/// each step alike.
#[tokio::test]
async fn both_stores_count_the_same_within_a_window_of_1970() {
    let (memory, redis) = (
        memory().without_refusal_cache(),
        redis().without_refusal_cache(),
    );
    let mut numbers = Numbers(1970);
    for round in 0..120 {
        let limit = CALLS.with_algorithm(ALGORITHMS[round % ALGORITHMS.len()]);
        let clocks = [&memory.clock, &redis.clock];
        let all = |change: &dyn Fn(&ManualClock)| clocks.into_iter().for_each(change);
        all(&|clock| clock.step_back(Duration::MAX));
        memory.limiter.reset(&limit, "ada").await.unwrap();
        redis.limiter.reset(&limit, "ada").await.unwrap();
        let mut admitted: Vec<(Check, Decision)> = Vec::new();
        let mut history = Vec::new();
        for step in 0..30 {
            let time = Duration::from_micros(numbers.below(4) * numbers.below(2_500_000));
            all(&|clock| clock.advance(time));
            // Only one of the stores keeps counts that have expired, and they would count again
            // after a step back.
            if numbers.below(12) == 0 && limit.algorithm() != Algorithm::SLIDING_WINDOW_COUNTER {
                all(&|clock| clock.step_back(Duration::MAX));
            }
            let (cost, kind) = (
                [0, 1, 1, 7, 30][numbers.below(5) as usize],
                numbers.below(6),
            );
            let lease = Duration::from_micros(1 + numbers.below(12_000_000));
            history.push(format!("{:?}: {kind} {cost} {lease:?}", clocks[0].now()));
            let case = || format!("{limit:?}, step {step} of {history:#?}");
            if let (0, Some((check, decision))) = (kind, admitted.last()) {
                let settlement = || Settlement::new(check.clone(), decision, |_| Some(cost));
                let of_memory = memory.limiter.settle(settlement()).await.unwrap();
                let of_redis = redis.limiter.settle(settlement()).await.unwrap();
                assert_eq!(of_memory.was_applied, of_redis.was_applied, "{}", case());
                let [memory, redis] =
                    [of_memory, of_redis].map(|settled| Figures::all_of(&settled.decision));
                assert_eq!(memory, redis, "{}", case());
                continue;
            }
            let made = charge(&limit, cost);
            let made = if kind == 1 { made.reserve(lease) } else { made };
            // A repeated check keeps its id. A new one gets its id here, because each store would
            // generate its own.
            let id = if kind == 2 {
                1_000 + numbers.below(3)
            } else {
                u64::try_from(round * 100 + step).unwrap()
            };
            let check = Check::new(made).with_id(AdmissionId(1 << 40 | id));
            let of_memory = memory.limiter.check_all(check.clone()).await.unwrap();
            let of_redis = redis.limiter.check_all(check.clone()).await.unwrap();
            assert_eq!(
                Figures::all_of(&of_memory),
                Figures::all_of(&of_redis),
                "{}",
                case()
            );
            assert_eq!(of_memory.at(), of_redis.at(), "{}", case());
            if of_memory.is_allowed() {
                admitted.push((check, of_memory));
            }
        }
    }
}

/// A log by the server's own clock, which cannot be set. Instead, the entries and the expiry of the
/// log are moved.
struct Shifted {
    server: RedisServer,
    connection: redis::Connection,
    limiter: Limiter,
    key: String,
}

impl Shifted {
    async fn start() -> Self {
        let server = RedisServer::start();
        let store = server.store().build().unwrap();
        let limiter = Limiter::new(store)
            .deadline(TEST_TIMEOUT)
            .refusal_cache(Duration::ZERO);
        assert!(limiter.check(&CALLS, "ada", 1).await.unwrap().is_allowed());
        let (connection, key) = (server.connect(), server.keys().remove(0));
        Self {
            server,
            connection,
            limiter,
            key,
        }
    }

    /// The entries with their scores, without the sums.
    fn entries(&mut self) -> Vec<(Vec<u8>, f64)> {
        let all: Vec<(Vec<u8>, f64)> = redis::cmd("ZRANGE")
            .arg(&self.key)
            .arg(0)
            .arg(-1)
            .arg("WITHSCORES")
            .query(&mut self.connection)
            .unwrap();
        all.into_iter()
            .filter(|(member, _)| ![&b"used"[..], b"held"].contains(&&member[..]))
            .collect()
    }

    /// Moves the entries forward, as a clock sees them that stepped back by `millis`. A negative
    /// number moves them back, as time does.
    fn shift(&mut self, millis: i64) {
        let entries = self.entries();
        if entries.is_empty() {
            return;
        }
        let mut pipeline = redis::pipe();
        for (member, score) in entries {
            pipeline
                .cmd("ZADD")
                .arg(&self.key)
                .arg(score - 1e3 * millis as f64)
                .arg(member);
        }
        if !self.server.is_before_7() {
            let expires: i64 = redis::cmd("PEXPIRETIME")
                .arg(&self.key)
                .query(&mut self.connection)
                .unwrap();
            pipeline
                .cmd("PEXPIREAT")
                .arg(&self.key)
                .arg(expires + millis);
        }
        pipeline.exec(&mut self.connection).unwrap();
    }

    async fn perform(&mut self, done: Action) {
        match done {
            Takes(cost) => assert!(
                self.limiter
                    .check(&CALLS, "ada", cost)
                    .await
                    .unwrap()
                    .is_allowed()
            ),
            Reserves(cost) => drop(
                self.limiter
                    .reserve(&CALLS, "ada", cost, seconds(7))
                    .await
                    .unwrap()
                    .unwrap(),
            ),
            Settles(cost, settled) => {
                let reservation = self
                    .limiter
                    .reserve(&CALLS, "ada", cost, seconds(7))
                    .await
                    .unwrap()
                    .unwrap();
                assert!(reservation.settle(settled).await.unwrap().was_applied);
            }
            Waits(_) => {}
            Peeks => drop(self.limiter.peek(&CALLS, "ada").await.unwrap()),
            IsRefused => drop(
                self.limiter
                    .check(&CALLS, "ada", CALLS.units())
                    .await
                    .unwrap(),
            ),
        }
        self.shift(if let Waits(time) = done {
            -i64::try_from(time.as_millis()).unwrap()
        } else {
            -1_000
        });
    }
}

/// The reset time is never before the oldest entry leaves. It is late by at most the step, plus the
/// millisecond by which an expiry is rounded up.
#[tokio::test]
async fn no_reset_time_is_early_after_the_servers_clock_steps_back() {
    let mut log = Shifted::start().await;
    let other = Limit::per_hour("other", 1);
    assert!(
        log.limiter
            .check(&other, "ada", 1)
            .await
            .unwrap()
            .is_allowed()
    );
    let plain = || Check::new(charge(&CALLS, 1));
    let any = || {
        plain()
            .and(charge(&Limit::per_hour("shadow", 100_000), 1).in_shadow())
            .unwrap()
    };
    let refused = || {
        Check::new(charge(&other, 1))
            .and(charge(&CALLS, 1))
            .unwrap()
    };
    let own = || Check::new(charge(&CALLS, 100));
    let weighted = || Check::new(charge(&CALLS, 2));
    let peek = || Check::new(charge(&CALLS, 0));
    let reserving = || Check::new(charge(&CALLS, 1).reserve(seconds(5)));
    let checks: [(&str, &dyn Fn() -> Check); 7] = [
        ("peek", &peek),
        ("refusal by another limit", &refused),
        ("refusal", &own),
        ("plain admission", &plain),
        ("any admission", &any),
        ("weighted admission", &weighted),
        ("reservation", &reserving),
    ];
    let mut problems = Vec::new();
    for history in HISTORIES {
        for step in [0, 1, 3, 150, 1_000, 4_000, 25_000] {
            for (asked, check) in checks {
                log.limiter.reset(&CALLS, "ada").await.unwrap();
                for done in history {
                    log.perform(*done).await;
                }
                log.shift(step);
                for round in 0..3 {
                    let decision = log
                        .limiter
                        .check_all(if round == 0 { check() } else { plain() })
                        .await
                        .unwrap();
                    let at = decision
                        .at()
                        .duration_since(SystemTime::UNIX_EPOCH)
                        .unwrap()
                        .as_micros() as f64;
                    let exact = log
                        .entries()
                        .last()
                        .map_or(0.0, |(_, score)| 1e7 - score - at);
                    let is_ours = |status: &&LimitStatus| status.limit == CALLS;
                    let reported = decision
                        .statuses()
                        .find(is_ours)
                        .unwrap()
                        .reset_after()
                        .as_micros() as f64;
                    let late = reported - exact;
                    if late < 0.0 || late >= 1e3 * (step + 1) as f64 {
                        problems.push(format!(
                            "{history:?}, {step} ms back, {asked}, {round}: {reported} of {exact}"
                        ));
                    }
                }
            }
        }
    }
    assert!(problems.is_empty(), "{problems:#?}");
}
