//! Limits on a Redis Cluster, decided as on one server, while nodes fail and slots move.

use std::{
    collections::HashSet,
    net::TcpListener,
    time::{Duration, Instant},
};

use tokio::{
    task::{JoinSet, yield_now},
    time::sleep,
};
use tower_sliding_window::{
    Algorithm, Charge, Check, Error, Limit, Limiter, RedisStore,
    check::AdmissionId,
    error::StoreErrorKind,
    limit::prefetch::DEFAULT_LIFE,
    limiter::Breaker,
    settlement::Settlement,
    store::{self, ManualClock, RedisSource},
};

use crate::support::{
    ALGORITHMS, TEST_TIMEOUT,
    load::Load,
    log::Log,
    ms,
    outage::{DEADLINE, millis, row},
    redis_cluster::RedisCluster,
    redis_server::RedisServer,
    until, with_causes,
};

fn charge(limit: &Limit, key: &str, cost: u64) -> Charge {
    Charge::new(limit.clone(), key, cost).unwrap()
}

/// A seed that hangs is no node of the cluster, or a node whose slots nobody has then.
#[tokio::test]
async fn a_process_starts_while_a_node_or_a_seed_hangs() {
    let cluster = RedisCluster::start(3).await;
    let hangs = TcpListener::bind("127.0.0.1:0").unwrap();
    let hangs = hangs.local_addr().unwrap();
    let nodes = [0, 1].map(|node| cluster.0[node].address());
    let url = format!("redis+cluster://{hangs},{},{}", nodes[0], nodes[1]);
    store::connect(&url).await.unwrap();
    for node in &cluster.0 {
        node.run::<()>("CONFIG SET cluster-require-full-coverage no");
    }
    cluster.0[1].pause();
    let source = RedisSource::cluster([cluster.0[0].url()]);
    RedisStore::builder(source).connect().await.unwrap();
}

#[tokio::test]
async fn connections_to_nodes_that_are_closed_while_idle_fail_nothing() {
    let cluster = RedisCluster::start(3).await;
    let limiter = cluster.limiter(cluster.builder());
    for round in 1..=3 {
        sleep(ms(700)).await;
        cluster
            .0
            .iter()
            .for_each(|node| node.run::<()>("CLIENT KILL TYPE normal SKIPME yes"));
        // One node after the other.
        for key in ["ada", "bob", "eve", "joe"] {
            for algorithm in ALGORITHMS {
                let limit = Limit::per_day("calls", 100).with_algorithm(algorithm);
                assert_eq!(
                    limiter.check(&limit, key, 1).await.unwrap().binding().used,
                    round,
                    "{algorithm:?} {key}"
                );
            }
        }
    }
}

/// Its login is for all nodes. The first node is down.
#[tokio::test]
async fn a_url_may_name_a_cluster() {
    let cluster = RedisCluster::start(3).await;
    cluster
        .0
        .iter()
        .for_each(|node| node.run::<()>("ACL SETUSER shop on >s3:cr/t ~* +@all"));
    let connect = async |login: &str| {
        let url = format!(
            "redis+cluster://{login}127.0.0.1:1,{}",
            cluster.0[0].address()
        );
        store::connect(&url).await.map_err(|error| error.kind)
    };
    for (round, login) in [(1, ""), (2, "shop:s3%3Acr%2Ft@")] {
        let limiter = Limiter::new(connect(login).await.unwrap()).deadline(TEST_TIMEOUT);
        for key in ["ada", "bob", "eve", "joe"] {
            assert_eq!(
                limiter
                    .check(&Limit::per_hour("calls", 100), key, 1)
                    .await
                    .unwrap()
                    .binding()
                    .used,
                round
            );
        }
    }
    assert_eq!(
        connect("shop:wrong@").await.unwrap_err(),
        StoreErrorKind::Denied
    );
    let error = RedisStore::connect(&cluster.0[0].url()).await.unwrap_err();
    assert!(
        with_causes(&error).contains("use `RedisSource::cluster`"),
        "{}",
        with_causes(&error)
    );
}

#[tokio::test]
async fn a_cluster_decides_as_one_server_does() {
    let (cluster, clock) = (RedisCluster::start(3).await, ManualClock::new());
    cluster.builder().connect().await.unwrap();
    let limiter = cluster.limiter(cluster.builder().clock(&clock));
    limiter_of_one_key(&limiter, &clock).await;
    for algorithm in [
        Algorithm::SLIDING_LOG,
        Algorithm::FIXED_WINDOW,
        Algorithm::SLIDING_WINDOW_COUNTER,
        Algorithm::compact_log(60),
    ] {
        several_keys(&limiter, &clock, algorithm).await;
    }
    ids_and_settlements(&limiter).await;
    limiter
        .reset(&Limit::per_hour("burst", 3), "key-0")
        .await
        .unwrap();
    clock.advance(Duration::from_secs(3 * 3600));
    assert!(
        RedisStore::builder(RedisSource::cluster([""; 0]))
            .build()
            .is_err()
    );
    let slots: HashSet<usize> = (0..3)
        .filter(|node| !cluster.0[*node].keys().is_empty())
        .collect();
    assert_eq!(slots.len(), 3, "every node has its share");
}

/// One node is enough.
#[tokio::test]
async fn a_cluster_that_evicts_is_logged() {
    let (log, cluster) = (Log::start(), RedisCluster::start(3).await);
    cluster.0[1].run::<()>("CONFIG SET maxmemory-policy volatile-lru");
    cluster.0[1].run::<()>("CONFIG SET maxmemory 100mb");
    let _store = cluster.builder().connect().await.unwrap();
    until("no line", || {
        log.text()
            .contains("this Redis does not suit rate limits server=the cluster of")
    })
    .await;
}

/// Many keys at once, in all slots, each with two limits.
async fn limiter_of_one_key(limiter: &Limiter, clock: &ManualClock) {
    let (burst, hourly) = (Limit::per_second("burst", 3), Limit::per_hour("hourly", 4));
    let mut tasks = Vec::new();
    for number in 0..100 {
        let (limiter, burst, hourly) = (limiter.clone(), burst.clone(), hourly.clone());
        tasks.push(tokio::spawn(async move {
            let key = format!("key-{number}");
            let mut admitted = 0;
            for _ in 0..5 {
                let check = Check::new(charge(&burst, &key, 1))
                    .and(charge(&hourly, &key, 1))
                    .unwrap();
                let decision = limiter.check_all(check).await.unwrap();
                admitted += u64::from(decision.is_allowed());
                assert_eq!(
                    decision
                        .statuses()
                        .map(|status| status.used)
                        .collect::<Vec<_>>(),
                    [admitted; 2]
                );
            }
            assert_eq!(admitted, 3);
        }));
    }
    for task in tasks {
        task.await.unwrap();
    }
    clock.advance(Duration::from_secs(1));
    let check = Check::new(charge(&burst, "key-7", 2))
        .and(charge(&hourly, "key-7", 2))
        .unwrap();
    let refused = limiter.check_all(check).await.unwrap();
    assert_eq!(
        refused.retry_after(),
        Some(Duration::from_secs(3599)),
        "the hour refuses, the second does not"
    );
    assert_eq!(
        limiter.peek(&burst, "key-7").await.unwrap().binding().used,
        0
    );
}

/// Checks of three keys. The second one is exhausted first.
async fn several_keys(limiter: &Limiter, clock: &ManualClock, algorithm: Algorithm) {
    let name = |what: &str| {
        format!(
            "{what}-{}",
            format!("{algorithm:?}")
                .to_lowercase()
                .replace(|c: char| !c.is_ascii_alphanumeric(), "-")
        )
    };
    let limit = |what: &str, units| {
        Limit::new(name(what), units, Duration::from_secs(7 * 86_400))
            .unwrap()
            .with_algorithm(algorithm)
    };
    let (wide, narrow, last) = (limit("wide", 10), limit("narrow", 5), limit("last", 8));
    for number in 0..10 {
        let keys = [
            format!("a-{number}"),
            format!("b-{number}"),
            format!("c-{number}"),
        ];
        let check = |cost| {
            Check::new(charge(&wide, &keys[0], 2))
                .and(charge(&narrow, &keys[1], cost))
                .unwrap()
                .and(charge(&last, &keys[2], 1).in_shadow())
                .unwrap()
        };
        for admitted in 1..=2 {
            let decision = limiter.check_all(check(2)).await.unwrap();
            assert!(decision.is_allowed());
            let used: Vec<_> = decision.statuses().map(|status| status.used).collect();
            assert_eq!(used, [2 * admitted, 2 * admitted, admitted]);
        }
        let refused = limiter.check_all(check(2)).await.unwrap();
        assert!(!refused.is_allowed(), "{algorithm:?}");
        assert!(refused.retry_after().is_some());
        assert_eq!(refused.binding().limit.name(), narrow.name());
        for (limit, key, used) in [
            (&wide, &keys[0], 4),
            (&narrow, &keys[1], 4),
            (&last, &keys[2], 2),
        ] {
            let status = refused
                .statuses()
                .find(|status| status.limit.name() == limit.name())
                .unwrap();
            assert_eq!(status.used, used, "as the refusal says, {algorithm:?}");
            // It is given back behind the refusal.
            let peek = async || limiter.peek(limit, key.as_str()).await.unwrap();
            let asked = Instant::now();
            while peek().await.binding().used > used && asked.elapsed() < TEST_TIMEOUT {}
            assert_eq!(
                peek().await.binding().used,
                used,
                "the refused check has charged nothing"
            );
        }
        assert!(
            limiter.check_all(check(1)).await.unwrap().is_allowed(),
            "other checks may use the remaining units"
        );
    }
    clock.advance(Duration::from_secs(1));
}

async fn ids_and_settlements(limiter: &Limiter) {
    let (tokens, calls) = (Limit::per_hour("tokens", 100), Limit::per_hour("calls", 2));
    for number in 0..10 {
        let (one, other) = (format!("one-{number}"), format!("other-{number}"));
        let check = Check::new(charge(&tokens, &one, 40).reserve(Duration::from_secs(60)))
            .and(charge(&calls, &other, 1))
            .unwrap();
        let with_id = check.clone().with_id(AdmissionId(number));
        for _ in 0..3 {
            assert!(
                limiter
                    .check_all(with_id.clone())
                    .await
                    .unwrap()
                    .is_allowed(),
                "the same counts once"
            );
        }
        let used = async || {
            let (tokens, calls) = (
                limiter.peek(&tokens, one.as_str()),
                limiter.peek(&calls, other.as_str()),
            );
            [
                tokens.await.unwrap().binding().used,
                calls.await.unwrap().binding().used,
            ]
        };
        assert_eq!(used().await, [40, 1]);
        let admitted = limiter.check_all(check.clone()).await.unwrap();
        assert_eq!(used().await, [80, 2]);
        let only_tokens = |charge: &Charge| (charge.limit().name() == "tokens").then_some(7);
        let settled = limiter
            .settle(Settlement::new(check.clone(), &admitted, only_tokens))
            .await
            .unwrap();
        assert!(settled.was_applied);
        assert_eq!(
            settled
                .decision
                .statuses()
                .map(|status| status.used)
                .collect::<Vec<_>>(),
            [47, 2]
        );
        assert!(!limiter.check_all(check.clone()).await.unwrap().is_allowed());
        assert_eq!(used().await, [47, 2]);
        let refunded = limiter.settle(Settlement::by_id(
            check.clone(),
            AdmissionId(number),
            admitted.at(),
            |_| Some(0),
        ));
        assert!(refunded.await.unwrap().was_applied);
        assert_eq!(used().await, [7, 1]);
        limiter.reset(&tokens, one.as_str()).await.unwrap();
        assert_eq!(used().await, [0, 1]);
    }
}

/// Pairs of a few keys, in either order. Only refused checks return units.
#[tokio::test]
async fn racing_checks_of_several_keys_never_exceed_the_limit() {
    let cluster = RedisCluster::start(3).await;
    let limiter = cluster.limiter(cluster.builder());
    let limit = Limit::per_hour("pairs", 40);
    let pair = |one: u64, other: u64| {
        let limit = Limit::per_hour("pairs", 40);
        Check::new(charge(&limit, &format!("key-{one}"), 1))
            .and(charge(&limit, &format!("key-{other}"), 1))
            .unwrap()
    };
    let mut tasks = Vec::new();
    for task in 0..16 {
        let limiter = limiter.clone();
        tasks.push(tokio::spawn(async move {
            let mut admitted = [0_u64; 4];
            for round in 0..40 {
                let (one, other) = ((task + round) % 4, (task + round + 1 + round % 3) % 4);
                if limiter
                    .check_all(pair(one, other))
                    .await
                    .unwrap()
                    .is_allowed()
                {
                    admitted[one as usize] += 1;
                    admitted[other as usize] += 1;
                }
            }
            admitted
        }));
    }
    let mut admitted = [0; 4];
    for task in tasks {
        for (sum, units) in admitted.iter_mut().zip(task.await.unwrap()) {
            *sum += units;
        }
    }
    for (number, admitted) in admitted.into_iter().enumerate() {
        let used = limiter
            .peek(&limit, format!("key-{number}").as_str())
            .await
            .unwrap()
            .binding()
            .used;
        assert!(used <= limit.units());
        assert_eq!(used, admitted, "only refused checks return their units");
    }
    assert!(admitted.iter().sum::<u64>() >= limit.units());
}

/// A primary is killed under load. Its slots are decided again once its replica is promoted, and
/// replicated units stay spent.
#[tokio::test]
async fn losing_a_primary_exceeds_no_limit() {
    let mut cluster = RedisCluster::start(6).await;
    // The default: decisions are back only once the dead primary is given up.
    let limiter = cluster.limiter(cluster.builder().reply_timeout(Duration::from_millis(500)));
    let spent = Limit::per_hour("spent", 3);
    for number in 0..60 {
        for _ in 0..3 {
            assert!(
                limiter
                    .check(&spent, format!("key-{number}"), 1)
                    .await
                    .unwrap()
                    .is_allowed()
            );
        }
    }
    until("the replicas do not follow", || {
        let of = |role: &str, offset: &str| -> Vec<String> {
            let replications = cluster
                .0
                .iter()
                .map(|node| node.run::<String>("INFO replication"));
            let with_role = replications.filter(|replication| replication.contains(role));
            let offsets = with_role.filter_map(|replication| {
                replication
                    .lines()
                    .find_map(|line| line.strip_prefix(offset).map(str::to_owned))
            });
            let mut offsets: Vec<_> = offsets.collect();
            offsets.sort();
            offsets
        };
        let replicas = of("role:slave", "slave_repl_offset:");
        replicas.len() == 3 && replicas == of("role:master", "master_repl_offset:")
    })
    .await;

    let (steady, check) = (Limit::per_hour("steady", 1_000_000), spent.clone());
    // A machine that is busy cannot decide the checks of all clients within the default deadline.
    let load = Load::of_checks(&limiter, move |number| {
        Check::new(charge(&check, &format!("key-{}", number % 60), 1))
            .and(charge(&steady, &format!("load-{number}"), 1).in_shadow())
            .unwrap()
    });
    load.goes_on().await;
    let lost = cluster.0.iter().position(RedisServer::is_primary).unwrap();
    cluster.0[lost].kill();
    let nodes = cluster
        .0
        .iter()
        .enumerate()
        .filter(|(number, _)| *number != lost)
        .map(|(_, node)| node);
    until("no replica is promoted", || {
        nodes.clone().filter(|node| node.is_primary()).count() == 3
    })
    .await;
    let promoted = Instant::now();
    for number in 0..60 {
        let key = format!("key-{number}");
        while limiter
            .check(&spent, key.as_str(), 1)
            .await
            .map_or(true, |decision| {
                assert!(!decision.is_allowed(), "{key} is admitted a fourth time");
                false
            })
        {
            // A busy machine needs time to find the new primary.
            assert!(
                promoted.elapsed() < 3 * TEST_TIMEOUT,
                "{key} is not decided again"
            );
            sleep(Duration::from_millis(10)).await;
        }
    }
    load.goes_on().await;
    let report = load.end().await;
    let back = millis(report.failed_after(promoted));
    row(
        "Redis Cluster: a primary is killed",
        format!(
            "all decided again {back} after its replica was promoted; over-admitted {}",
            report.admitted
        ),
        "decisions back within 2 s of the new primary; over-admission 0 where replication had caught up",
    );
    assert_eq!(report.admitted, 0, "replicated units stay spent");
}

/// A slot moves to other nodes under load, while both nodes get checks of its keys.
#[tokio::test]
async fn moving_a_slot_exceeds_no_limit() {
    let cluster = RedisCluster::start(3).await;
    // The test has its own breaker, because the one of the load may be open at the end.
    let (limiter, loaded) = (
        cluster.limiter(cluster.builder()),
        cluster.limiter(cluster.builder()),
    );
    let (mut decided, mut failed, mut gap) = (0, 0, Duration::ZERO);
    for limit in [
        Limit::per_day("by-log", 20_000),
        Limit::per_day("by-window", 20_000).with_algorithm(Algorithm::FIXED_WINDOW),
        Limit::per_day("by-prefetch", 50_000).prefetch(DEFAULT_LIFE),
    ] {
        let at_most = limit.units();
        let other = Limit::per_hour("other", 1_000_000);
        let in_slot = limit.clone();
        assert!(limiter.check(&limit, "ada", 1).await.unwrap().is_allowed());
        let key = cluster
            .keys()
            .into_iter()
            .find(|key| key.contains(limit.name()))
            .unwrap();
        let mut from = cluster
            .0
            .iter()
            .position(|node| node.keys().contains(&key))
            .unwrap();
        let slot: u16 = cluster.0[from].run(&format!("CLUSTER KEYSLOT {key}"));
        let load = Load::of_checks(&loaded.clone().deadline(DEADLINE), move |number| {
            match number % 2 {
                0 => Check::new(charge(&in_slot, "ada", 1)),
                _ => Check::new(charge(&in_slot, "ada", 1))
                    .and(charge(&other, &format!("key-{number}"), 1))
                    .unwrap(),
            }
        });
        for _ in 0..4 {
            load.goes_on().await;
            let to = (from + 1) % 3;
            let id = |node: usize| cluster.0[node].run::<String>("CLUSTER MYID");
            cluster.0[to].run::<()>(&format!("CLUSTER SETSLOT {slot} IMPORTING {}", id(from)));
            cluster.0[from].run::<()>(&format!("CLUSTER SETSLOT {slot} MIGRATING {}", id(to)));
            sleep(Duration::from_millis(30)).await;
            let address = cluster.0[to].address().replace(':', " ");
            for key in
                cluster.0[from].run::<Vec<String>>(&format!("CLUSTER GETKEYSINSLOT {slot} 100"))
            {
                cluster.0[from].run::<()>(&format!("MIGRATE {address} {key} 0 5000"));
            }
            // Now the old node redirects to the new one, which accepts only redirected commands.
            load.goes_on().await;
            for node in [to, from, (to + 1) % 3] {
                cluster.0[node].run::<()>(&format!("CLUSTER SETSLOT {slot} NODE {}", id(to)));
            }
            from = to;
        }
        load.goes_on().await;
        let (asked, mut own) = (Instant::now(), 1);
        // An error is not a refusal: the slot may be moving.
        loop {
            match limiter.check(&limit, "ada", 1).await {
                Ok(decision) if !decision.is_allowed() => break,
                outcome => own += u64::from(outcome.is_ok()),
            }
            assert!(asked.elapsed() < TEST_TIMEOUT);
            // A decision out of a prefetch does not wait, so the load would have to.
            yield_now().await;
        }
        let report = load.end().await;
        let admitted = report.admitted + own;
        (decided, failed, gap) = (
            decided + report.decided,
            failed + report.failed,
            gap.max(report.longest_gap),
        );
        let used = limiter.peek(&limit, "ada").await.unwrap().binding().used;
        assert!(
            admitted <= used && used <= at_most,
            "{admitted} are admitted, {used} used of {at_most}"
        );
    }
    row(
        "Redis Cluster: a slot moves, twelve times, four of them under a limit with prefetch",
        format!(
            "{decided} decisions, {failed} failed; {} without any at most; over-admitted 0",
            millis(gap)
        ),
        "decisions back within 2 s; over-admission 0",
    );
}

/// No node replies for a while: one store has a shorter timeout than the default, and the other a
/// longer one.
#[tokio::test]
async fn a_node_may_take_as_long_as_the_reply_timeout() {
    let cluster = RedisCluster::start(3).await;
    let limiter = |timeout| {
        cluster
            .limiter(cluster.builder().reply_timeout(timeout))
            .deadline(TEST_TIMEOUT)
    };
    let (hasty, patient) = (limiter(Duration::from_millis(50)), limiter(TEST_TIMEOUT));
    let calls = Limit::per_hour("calls", 100);
    for limiter in [&hasty, &patient] {
        assert!(limiter.check(&calls, "ada", 1).await.unwrap().is_allowed());
    }

    cluster.0.iter().for_each(RedisServer::pause);
    let asked = Instant::now();
    let waiting = tokio::spawn(patient.check(&calls, "ada", 1));
    assert!(matches!(
        hasty.check(&calls, "ada", 1).await,
        Err(Error::Unavailable(_))
    ));
    assert!(
        asked.elapsed() < Duration::from_millis(500),
        "the default, and not the setting: {:?}",
        asked.elapsed()
    );
    // Longer than the default, and shorter than the time after which the nodes take each other for
    // lost.
    sleep(Duration::from_millis(900).saturating_sub(asked.elapsed())).await;
    assert!(!waiting.is_finished());
    cluster.0.iter().for_each(RedisServer::resume);
    assert!(waiting.await.unwrap().unwrap().is_allowed());
}

/// A third of the slots hangs with its primary. A store that is made meanwhile decides the checks
/// of all others, once it knows the nodes.
#[tokio::test]
async fn a_new_store_decides_while_a_primary_hangs() {
    let cluster = RedisCluster::start(3).await;
    cluster
        .0
        .iter()
        .for_each(|node| node.run::<()>("CONFIG SET cluster-require-full-coverage no"));
    cluster.0[2].pause();
    let limiter = cluster.limiter(RedisStore::builder(RedisSource::cluster(
        cluster.0.iter().map(RedisServer::url),
    )));
    let limiter = limiter
        .deadline(Duration::from_millis(500))
        .breaker(Breaker::OFF);
    let (calls, begun, mut decided) = (Limit::per_hour("calls", 100), Instant::now(), 0);
    // A store whose batches all go over one client decides 9 to 40 in this time, and others 20
    // within half of it.
    while decided < 20 && begun.elapsed() < Duration::from_secs(24) {
        let mut checks: JoinSet<_> = (0..12)
            .map(|key| limiter.check(&calls, key.to_string(), 1))
            .collect();
        while let Some(outcome) = checks.join_next().await {
            decided += usize::from(outcome.unwrap().is_ok());
        }
    }
    cluster.0[2].resume();
    assert!(
        decided >= 20,
        "{decided} checks for working slots in {:?}",
        begun.elapsed()
    );
}

/// Batches take turns with the connections, so one that stands still stops a part of them.
#[tokio::test]
async fn batches_use_all_connections_to_a_cluster() {
    let cluster = RedisCluster::start(1).await;
    let limiter = Limiter::new(cluster.builder().connections(3).connect().await.unwrap());
    let calls = Limit::per_hour("calls", 100);
    for _ in 0..6 {
        let checks: JoinSet<_> = (0..8).map(|_| limiter.check(&calls, "ada", 1)).collect();
        assert!(
            checks
                .join_all()
                .await
                .into_iter()
                .all(|outcome| outcome.is_ok())
        );
    }
    let clients = cluster.0[0].run::<String>("CLIENT LIST");
    assert_eq!(clients.matches("cmd=evalsha").count(), 3, "{clients}");
}

/// Requests that are in flight together say no more of the connections than one of them.
#[tokio::test]
async fn callers_that_leave_together_end_no_connections_to_a_cluster() {
    let cluster = RedisCluster::start(1).await;
    let store = cluster
        .builder()
        .connections(2)
        .reply_timeout(ms(300))
        .connect()
        .await
        .unwrap();
    let limiter = Limiter::new(store).deadline(ms(100)).breaker(Breaker::OFF);
    let calls = Limit::per_hour("calls", 1_000);
    for _ in 0..3 {
        assert!(limiter.check(&calls, "ada", 1).await.unwrap().is_allowed());
    }
    let opened = cluster.0[0].opened();
    cluster.0[0].pause();
    let checks: JoinSet<_> = (0..4).map(|_| limiter.check(&calls, "ada", 1)).collect();
    assert!(
        checks
            .join_all()
            .await
            .into_iter()
            .all(|outcome| outcome.is_err())
    );
    cluster.0[0].resume();
    sleep(ms(400)).await;
    for _ in 0..3 {
        assert!(limiter.check(&calls, "ada", 1).await.unwrap().is_allowed());
    }
    assert_eq!(cluster.0[0].opened(), opened + 1);
}

#[tokio::test]
async fn an_unreachable_cluster_is_reported() {
    assert!(
        RedisStore::builder(RedisSource::cluster(["redis://127.0.0.1:1/"]))
            .connect()
            .await
            .is_err()
    );
    let store = RedisStore::builder(RedisSource::cluster(["redis://127.0.0.1:1/"]))
        .connect_timeout(TEST_TIMEOUT)
        .build()
        .unwrap();
    let Err(Error::Unavailable(error)) = Limiter::new(store)
        .deadline(TEST_TIMEOUT)
        .check(&Limit::per_hour("calls", 1), "ada", 1)
        .await
    else {
        panic!("the error is not Unavailable");
    };
    assert!(format!("{error:?}").contains("127.0.0.1:1"), "{error:?}");
}

/// Three primaries have a third of the slots each, so one of them has not all keys of a try-out.
#[tokio::test]
async fn a_cluster_node_given_to_builder_says_moved() {
    let cluster = RedisCluster::start(3).await;
    let limiter = Limiter::new(RedisStore::builder(cluster.0[0].url()).build().unwrap())
        .deadline(TEST_TIMEOUT);
    let limit = Limit::per_hour("calls", 1);
    let mut moved = None;
    for key in 0..50 {
        moved = moved.or(limiter.check(&limit, key.to_string(), 1).await.err());
    }
    let Some(Error::Unavailable(error)) = moved else {
        panic!("{moved:?}")
    };
    assert!(
        with_causes(&error).contains("Moved"),
        "{}",
        with_causes(&error)
    );
    assert!(
        with_causes(&error).contains("use `RedisSource::cluster`"),
        "{}",
        with_causes(&error)
    );
    assert_eq!(error.kind, StoreErrorKind::Other);
}

/// The error of a cluster that is set up wrongly says what is wrong.
#[tokio::test]
async fn mistakes_in_setting_a_cluster_up_are_named() {
    let refused = async |url: String| {
        let store = RedisStore::builder(RedisSource::cluster([url]))
            .connect_timeout(TEST_TIMEOUT)
            .connect()
            .await;
        let error = store.expect_err("the mistake is not seen");
        (error.kind, with_causes(&error))
    };
    let cluster = RedisCluster::start(1).await;
    let node = &cluster.0[0];
    let (kind, text) = refused(node.url() + "1").await;
    // Valkey 9 may have more, and has one by default.
    let is_named =
        text.contains("not allowed in cluster mode") || text.contains("DB index is out of range");
    assert!(
        kind == StoreErrorKind::Config && is_named,
        "{kind:?} {text}"
    );

    node.run::<()>("CONFIG SET requirepass s3cret");
    let with_login = |login: &str| node.url().replace("redis://", &format!("redis://{login}"));
    for login in ["", ":wrong@", "nobody:wrong@"] {
        for protocol in ["", "?protocol=resp3"] {
            let (kind, text) = refused(with_login(login) + protocol).await;
            assert!(
                kind == StoreErrorKind::Denied && !text.contains("wrong@"),
                "{login:?}: {kind:?} {text}"
            );
            assert!(!text.contains("it hangs up"), "{text}");
        }
    }
    let (kind, text) = refused(with_login("s3cret@")).await;
    assert!(
        kind == StoreErrorKind::Config && text.contains("A password alone is"),
        "{kind:?} {text}"
    );
    RedisStore::builder(RedisSource::cluster([with_login(":s3cret@")]))
        .connect_timeout(TEST_TIMEOUT)
        .connect()
        .await
        .unwrap();

    // Nothing listens there.
    let (mut client, announce) = (
        redis::Client::open(with_login(":s3cret@")).unwrap(),
        "127.0.0.9",
    );
    redis::cmd("CONFIG")
        .arg(&["SET", "cluster-announce-ip", announce])
        .exec(&mut client)
        .unwrap();
    until("the node announces no other address", || {
        // Valkey 8.0 repeats its last reply until the slots change.
        let mut cluster = |arguments: &[&str]| {
            redis::cmd("CLUSTER")
                .arg(arguments)
                .query::<redis::Value>(&mut client)
        };
        cluster(&["DELSLOTS", "0"])
            .and_then(|_| cluster(&["ADDSLOTS", "0"]))
            .unwrap();
        format!("{:?}", cluster(&["SLOTS"]).unwrap()).contains(announce)
    })
    .await;
    let (kind, text) = refused(with_login(":s3cret@")).await;
    assert!(
        kind == StoreErrorKind::Unreachable && text.contains("cluster-announce-ip"),
        "{kind:?} {text}"
    );

    let (kind, text) = refused(RedisServer::start().url()).await;
    assert!(
        kind == StoreErrorKind::Unreachable && text.contains("use `RedisStore::builder`"),
        "{kind:?} {text}"
    );
}

/// A crowd of callers that time out leaves no crowd of checks: those that wait for their first slot
/// are not sent.
#[tokio::test]
async fn checks_of_several_slots_are_not_sent_once_their_callers_have_left() {
    const CROWD: usize = 400;
    let cluster = RedisCluster::start(3).await;
    let store = cluster.builder().connections(1);
    let limiter = cluster.limiter(store).deadline(Duration::from_millis(50));
    let limit = Limit::per_hour("both", 1_000_000);
    let check = || {
        Check::new(charge(&limit, "key-1", 1))
            .and(charge(&limit, "key-2", 1))
            .unwrap()
    };
    assert!(
        limiter
            .clone()
            .deadline(TEST_TIMEOUT)
            .check_all(check())
            .await
            .unwrap()
            .is_allowed()
    );
    cluster
        .primaries()
        .for_each(|node| node.run::<()>("CLIENT PAUSE 1000"));
    let mut crowd = JoinSet::new();
    for _ in 0..CROWD {
        crowd.spawn(limiter.check_all(check()));
    }
    assert!(crowd.join_all().await.iter().all(Result::is_err));
    let used = limiter
        .clone()
        .deadline(TEST_TIMEOUT)
        .check_all(check())
        .await
        .unwrap()
        .binding()
        .used;
    assert!(
        used < 2 + 2 * 64,
        "{used} of {CROWD} were counted, more than the batches that were on their way"
    );
}

/// Callers that have left take no place in the queue from others, also if their checks are of
/// several slots.
#[tokio::test]
async fn checks_of_several_slots_leave_the_queue_with_their_callers() {
    let cluster = RedisCluster::start(3).await;
    let store = cluster.builder().connections(1);
    let limiter = cluster
        .limiter(store)
        .deadline(Duration::from_millis(300))
        .breaker(Breaker::OFF);
    let limit = Limit::per_hour("both", 1_000_000);
    let check = || {
        Check::new(charge(&limit, "key-1", 1))
            .and(charge(&limit, "key-2", 1))
            .unwrap()
    };
    for key in ["key-1", "key-2"] {
        assert!(
            limiter
                .clone()
                .deadline(TEST_TIMEOUT)
                .check(&limit, key, 1)
                .await
                .unwrap()
                .is_allowed()
        );
    }
    cluster
        .primaries()
        .for_each(|node| node.run::<()>("CLIENT PAUSE 20000"));
    // More than the queue of a part of the slots has places. The first batch leaves before the
    // others come.
    let mut crowd = JoinSet::new();
    for number in 0..6_000 {
        crowd.spawn(limiter.check_all(check()));
        if number == 200 {
            sleep(Duration::from_millis(100)).await;
        }
    }
    assert!(crowd.join_all().await.iter().all(Result::is_err));
    // One of them is in the slot that is asked first. It waits in the queue, where the others were.
    for key in ["key-1", "key-2"] {
        let outcome = limiter.check(&limit, key, 1).await;
        assert!(
            matches!(outcome, Err(Error::TimedOut { .. })),
            "{key}: {outcome:?}"
        );
    }
}
