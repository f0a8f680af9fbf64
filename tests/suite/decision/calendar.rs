//! Limits by the calendar: on each store, a period ends where its time zone says.

use std::{
    io::{BufRead, BufReader, Write},
    net::TcpStream,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use tower_sliding_window::{Limit, Limiter, MemoryStore, store::ManualClock};

use crate::support::{redis_server::RedisServer, *};

/// Seconds since 1970 of a time in UTC, made by `date -u -d ... +%s`.
const FIRST_OF_MARCH_2028: u64 = 1_835_481_600;

fn limit(text: &str) -> Limit {
    text.parse().unwrap()
}

fn set(clock: &ManualClock, seconds: u64) {
    let (now, then) = (clock.now(), UNIX_EPOCH + Duration::from_secs(seconds));
    match then.duration_since(now) {
        Ok(ahead) => clock.advance(ahead),
        Err(behind) => clock.step_back(behind.duration()),
    }
}

async fn on_each_store(test: impl AsyncFn(Limiter, ManualClock)) {
    let clock = ManualClock::new();
    test(Limiter::new(MemoryStore::new().clock(&clock)), clock).await;
    let (server, clock) = (RedisServer::start(), ManualClock::new());
    let store = server.store().clock(&clock).build().unwrap();
    test(
        Limiter::new(store)
            .deadline(TEST_TIMEOUT)
            .refusal_cache(Duration::ZERO),
        clock,
    )
    .await;
}

/// Spends the limit just before the end of a period, and again just after it.
async fn ends_at(limiter: &Limiter, clock: &ManualClock, limit: &Limit, end: u64) {
    set(clock, end - 1);
    let key = end.to_string();
    let spend = async || {
        limiter
            .check(limit, key.clone(), limit.units())
            .await
            .unwrap()
    };
    assert_eq!(spend().await.binding().reset_after(), seconds(1), "{limit}");
    assert_eq!(spend().await.retry_after(), Some(seconds(1)), "{limit}");
    clock.advance(seconds(1) - MICROSECOND);
    assert!(
        !spend().await.is_allowed(),
        "{limit}: a microsecond before the end"
    );
    clock.advance(MICROSECOND);
    assert!(spend().await.is_allowed(), "{limit}: at the end");
    assert!(!spend().await.is_allowed(), "{limit}: once");
}

#[tokio::test]
async fn a_month_ends_at_midnight_of_its_time_zone() {
    on_each_store(async |limiter: Limiter, clock: ManualClock| {
        // 2028 is a leap year.
        for (zone, hours_ahead) in [
            ("UTC", 0),
            ("Europe/Berlin", 1),
            ("Asia/Kolkata", 5),
            ("America/New_York", -5_i64),
        ] {
            let quota = limit(&format!("quota=10/month {zone}"));
            let half_hour = if zone == "Asia/Kolkata" { 1_800 } else { 0 };
            let end = FIRST_OF_MARCH_2028
                .checked_add_signed(-3_600 * hours_ahead)
                .unwrap()
                - half_hour;
            ends_at(&limiter, &clock, &quota, end).await;
        }
        let contract = limit("contract=10/month(15)");
        ends_at(
            &limiter,
            &clock,
            &contract,
            FIRST_OF_MARCH_2028 + 14 * 86_400,
        )
        .await;
    })
    .await;
}

/// On 29 March 2026 Berlin has a day of 23 hours, and on 25 October one of 25.
#[tokio::test]
async fn a_day_of_daylight_saving_is_whole() {
    on_each_store(async |limiter: Limiter, clock: ManualClock| {
        let daily = limit("daily=3/d Europe/Berlin");
        for (start, hours) in [(1_774_738_800, 23), (1_792_879_200, 25)] {
            ends_at(&limiter, &clock, &daily, start).await;
            set(&clock, start);
            let first = limiter
                .check(&daily, format!("of {start}"), 1)
                .await
                .unwrap();
            assert_eq!(first.binding().reset_after(), seconds(hours * 3_600));
            ends_at(&limiter, &clock, &daily, start + hours * 3_600).await;
        }
    })
    .await;
}

#[tokio::test]
async fn hours_and_weeks_end_as_the_clock_says() {
    on_each_store(async |limiter: Limiter, clock: ManualClock| {
        // 2028-03-01 is a Wednesday.
        let weekly = limit("weekly=5/week");
        ends_at(&limiter, &clock, &weekly, FIRST_OF_MARCH_2028 + 5 * 86_400).await;
        let hourly = limit("hourly=5/h Asia/Kolkata");
        ends_at(&limiter, &clock, &hourly, FIRST_OF_MARCH_2028 + 1_800).await;
    })
    .await;
}

#[tokio::test]
async fn units_are_counted_once_and_given_back() {
    on_each_store(async |limiter: Limiter, clock: ManualClock| {
        set(&clock, FIRST_OF_MARCH_2028 + 86_400);
        let monthly = limit("monthly=100/month");
        let reservation = limiter
            .reserve(&monthly, "ada", 60, seconds(60))
            .await
            .unwrap()
            .unwrap();
        assert!(
            !limiter
                .check(&monthly, "ada", 50)
                .await
                .unwrap()
                .is_allowed()
        );
        assert!(reservation.settle(20).await.unwrap().was_applied);
        assert_eq!(
            limiter.peek(&monthly, "ada").await.unwrap().binding().used,
            20
        );
        let forgotten = limiter
            .reserve(&monthly, "ada", 70, seconds(60))
            .await
            .unwrap()
            .unwrap();
        clock.advance(seconds(60));
        assert_eq!(
            limiter.peek(&monthly, "ada").await.unwrap().binding().used,
            20,
            "the lease has ended"
        );
        assert!(
            forgotten.settle(10).await.unwrap().was_applied,
            "the month has not"
        );
        assert_eq!(
            limiter.peek(&monthly, "ada").await.unwrap().binding().used,
            30
        );
        limiter.block(&monthly, "ada", seconds(30)).await.unwrap();
        assert_eq!(
            limiter
                .check(&monthly, "ada", 1)
                .await
                .unwrap()
                .retry_after(),
            Some(seconds(30))
        );
    })
    .await;
}

#[tokio::test]
async fn a_clock_that_steps_back_opens_no_period_again() {
    on_each_store(async |limiter: Limiter, clock: ManualClock| {
        set(&clock, FIRST_OF_MARCH_2028 + 10);
        let monthly = limit("monthly=2/month");
        assert!(
            limiter
                .check(&monthly, "ada", 2)
                .await
                .unwrap()
                .is_allowed()
        );
        clock.step_back(seconds(20));
        assert!(
            !limiter
                .check(&monthly, "ada", 1)
                .await
                .unwrap()
                .is_allowed()
        );
    })
    .await;
}

/// What a process has met before does not choose the name, which is in the keys of the store.
#[test]
fn a_time_zone_has_the_name_that_the_configuration_gives_it() {
    let pairs = [
        ["Asia/Calcutta", "Asia/Kolkata"],
        ["Europe/Kyiv", "Europe/Kiev"],
        ["US/Eastern", "America/New_York"],
    ];
    for name in pairs.into_iter().flatten() {
        let text = format!("quota=10/month {name}");
        assert_eq!(limit(&text).to_string(), text);
    }
}

/// The script of a store on this server, by the hash under which the store calls it, and the key of
/// the check that it makes.
async fn script_and_key(server: &RedisServer, limit: &Limit) -> [String; 2] {
    let mut stream = TcpStream::connect(server.address()).unwrap();
    stream.write_all(b"MONITOR\r\n").unwrap();
    let limiter = Limiter::new(server.store().build().unwrap()).deadline(TEST_TIMEOUT);
    assert!(limiter.check(limit, "ada", 1).await.unwrap().is_allowed());
    let mut sent = BufReader::new(stream)
        .lines()
        .map_while(Result::ok)
        .filter(|line| line.to_lowercase().contains("\"evalsha\""));
    let script = sent.next().unwrap().split('"').nth(3).unwrap().to_owned();
    [script, server.only_key()]
}

/// Asks the script at `now`, or by the clock of the server, as a process does whose calendar has
/// these ends of periods. Times are seconds since 1970.
fn ask_of_process(
    server: &RedisServer,
    [script, key]: &[String; 2],
    limit: &Limit,
    cost: u64,
    (now, id): (Option<u64>, u64),
    ends: impl Iterator<Item = u64>,
) -> redis::Value {
    let ends: Vec<String> = ends.map(|end| format!("{end}000000")).collect();
    let window = limit.window().as_micros() as f64;
    // One copy; units, cost, window, sub-window, how much later an admission is recorded, and
    // lease.
    let figures = [
        1.0,
        limit.units() as f64,
        cost as f64,
        window,
        window,
        0.0,
        0.0,
    ];
    let mut command = redis::cmd("EVALSHA");
    command
        .arg(script)
        .arg(1)
        .arg(key)
        .arg(now.map_or_else(String::new, |now| format!("{now}000000")))
        .arg("any")
        .arg(figures.map(f64::to_le_bytes).as_flattened())
        .arg(format!("{id:08}"))
        .arg("")
        .arg(ends.join(" "))
        .arg("");
    command.query(&mut server.connect()).unwrap()
}

/// The script of a store gets the time of the process only by the ends of periods, so other ends
/// are another clock.
#[tokio::test]
async fn a_process_whose_clock_is_wrong_by_too_much_has_no_decision() {
    let server = RedisServer::start();
    let hourly = limit("hourly=2/h UTC");
    let script = script_and_key(&server, &hourly).await;
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap()
        .as_secs();
    let (hour, start) = (3_600, now - now % 3_600);
    for (hours_ahead, is_decided) in [
        (100, false),
        (3, false),
        (2, true),
        (0, true),
        (-3, true),
        (-4, false),
        (-100, false),
    ] {
        let ends = (-2..=4).map(|number: i64| {
            start
                .checked_add_signed((hours_ahead + number) * hour)
                .unwrap()
        });
        let reply = ask_of_process(&server, &script, &hourly, 0, (None, 0), ends);
        assert_eq!(
            format!("{reply:?}").contains("periods"),
            !is_decided,
            "{hours_ahead} hours ahead: {reply:?}"
        );
    }
}

/// One process has the older data, by which the day ends an hour earlier. These are the figures of
/// the docs: at most the limit between two neighbouring ends, and twice the limit in a day of
/// either process.
#[tokio::test]
async fn two_editions_of_a_time_zone_admit_up_to_twice_the_limit_where_a_period_moves() {
    let server = RedisServer::start();
    let daily = limit("daily=10/d UTC");
    let script = script_and_key(&server, &daily).await;
    server.run::<()>("FLUSHALL");
    let (hour, day) = (3_600, 86_400);
    let end = FIRST_OF_MARCH_2028;
    let mut admitted = Vec::new();
    let mut id = 0;
    for now in (end - day + hour..end + 2 * day).step_by(1_800) {
        for moved in [0, hour] {
            let ends: Vec<u64> = (0..7)
                .map(|number| end + moved + number * day - 2 * day)
                .collect();
            for _ in 0..6 {
                id += 1;
                let ends = ends.iter().copied();
                let reply = ask_of_process(&server, &script, &daily, 1, (Some(now), id), ends);
                let redis::Value::Array(records) = &reply else {
                    panic!("{reply:?}")
                };
                let redis::Value::Array(record) = &records[1] else {
                    panic!("{reply:?}")
                };
                if record[0] == redis::Value::Int(1) {
                    admitted.push(now);
                }
            }
        }
    }
    let within = |from: u64, until: u64| {
        let within = admitted
            .iter()
            .filter(|&&time| from <= time && time < until);
        within.count()
    };
    // Between two ends of any of the two calendars, the processes share the limit.
    let shared = [
        within(end - day + hour, end),
        within(end, end + hour),
        within(end + hour, end + day),
        within(end + day, end + day + hour),
    ];
    assert!(shared.iter().all(|units| *units <= 10), "{shared:?}");
    let days = [
        within(end - day + hour, end + hour),
        within(end, end + day),
        within(end + hour, end + day + hour),
    ];
    assert_eq!(days, [20, 20, 20], "{shared:?}");
}

#[test]
fn limits_by_the_calendar_are_read_and_written() {
    let mut read = Vec::new();
    for (text, written) in [
        ("quota=10000/month UTC", "quota=10000/month UTC"),
        ("quota=10000/month", "quota=10000/month UTC"),
        ("quota=10000/month Utc", "quota=10000/month UTC"),
        ("quota=10000/month(1) UTC", "quota=10000/month UTC"),
        (
            "quota=10000/month Europe/Berlin",
            "quota=10000/month Europe/Berlin",
        ),
        (
            "quota=10000/month europe/berlin",
            "quota=10000/month Europe/Berlin",
        ),
        (
            "quota=10000/month(15) Europe/Berlin",
            "quota=10000/month(15) Europe/Berlin",
        ),
        ("week=7/week", "week=7/week UTC"),
        ("day=7/d UTC", "day=7/d UTC"),
        ("day=7/day UTC", "day=7/d UTC"),
        ("hour=7/hour UTC", "hour=7/h UTC"),
        // Names without a slash.
        ("day=7/d CET", "day=7/d CET"),
        ("day=7/d Japan", "day=7/d Japan"),
        ("day=7/d EST5EDT", "day=7/d EST5EDT"),
    ] {
        assert_eq!(limit(text).to_string(), written);
        assert_eq!(limit(text), limit(written));
        // Equal texts are equal limits, and different texts are different ones.
        assert!(
            read.iter()
                .all(|(other, its_text)| (*other == limit(text)) == (*its_text == written)),
            "{text}"
        );
        read.push((limit(text), written));
    }
    // Two systems do not mean the same by them.
    for name in ["Localtime", "Etc/Unknown", "../zone"] {
        let error = format!("a=1/month {name}")
            .parse::<Limit>()
            .unwrap_err()
            .to_string();
        assert!(error.contains(&format!("no time zone {name:?}")), "{error}");
    }
    for (text, problem) in [
        ("a=1/month(31)", "days 1 to 28"),
        ("a=1/month(0)", "days 1 to 28"),
        ("a=1/month Europe/Atlantis", "Europe/Atlantis"),
        ("a=1/min UTC", "with a time zone"),
        ("a=1/month UTC log", "has no other algorithm"),
        ("a=1/month UTC prefetch", "prefetch"),
    ] {
        let error = text.parse::<Limit>().unwrap_err().to_string();
        assert!(error.contains(problem), "{error}");
    }
}

#[test]
fn limits_of_other_zones_and_days_are_apart() {
    let server = RedisServer::start();
    one_thread().block_on(async {
        let limiter = Limiter::new(server.store().build().unwrap()).deadline(TEST_TIMEOUT);
        for text in ["month UTC", "month Europe/Berlin", "month(15) UTC", "d UTC"] {
            let limit = Limit::parse("quota", &format!("1/{text}")).unwrap();
            assert!(
                limiter.check(&limit, "ada", 1).await.unwrap().is_allowed(),
                "{text}"
            );
            assert!(
                !limiter.check(&limit, "ada", 1).await.unwrap().is_allowed(),
                "{text}"
            );
        }
        assert_eq!(server.keys().len(), 4);
    });
}
