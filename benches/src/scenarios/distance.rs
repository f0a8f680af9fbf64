//! A Redis that is far away, with the default settings of the store and the limiter: the requests
//! without a decision, the time of decisions as a multiple of the round trip, and the requests that
//! wait although their limit has prefetch. Then a limit that two processes share, one near Redis
//! and one far away.

use std::{
    collections::VecDeque,
    future::{Future, poll_fn},
    pin::pin,
    task::Poll,
    time::{Duration, Instant, SystemTime},
};

use tokio::{
    task::JoinSet,
    time::{sleep, sleep_until},
};
use tower_sliding_window::{
    Decision, Error, Limit, Limiter, RedisStore, limit::prefetch::DEFAULT_LIFE,
};

use super::Outcome;
use crate::{
    contenders::{OURS, wide},
    dice::Dice,
    load::{KEYS, two_threads},
    measure::{Comparison, Effort, Series, Unit},
    proxy::{Distance, Proxy},
    server::Server,
};

/// Requests a second.
const STEADY: f64 = 1_000.0;
const TENANT: f64 = 200.0;

/// The shared limit, and the requests a second of each of its processes.
const UNITS: usize = 2_000;
const WINDOW: Duration = Duration::from_secs(10);
const SHARE: f64 = 200.0;

pub(crate) fn run(effort: Effort) -> Outcome {
    let server = Server::start();
    let lasting = effort.round * effort.rounds as u32 / 2;
    println!("\nThe times that 50 % / 99 % of the requests took at most, in milliseconds");
    println!(
        "| round trip | PING | without a decision | a lone user | {STEADY} a second | of PING | {TENANT} a second with prefetch | that wait | the machine was late by |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    let mut comparisons = Vec::new();
    for distance in [0.1, 1.0, 5.0, 20.0, 40.0, 80.0, 200.0].map(away) {
        comparisons.extend(measure(&server, distance, lasting)?);
    }
    for distance in [
        Distance {
            jitter: Duration::from_millis(10),
            ..away(20.0)
        },
        Distance {
            loss: 0.005,
            ..away(40.0)
        },
    ] {
        comparisons.extend(measure(&server, distance, lasting)?);
    }
    share(&server, WINDOW * (effort.rounds as u32 / 2 + 1))?;
    Ok(comparisons)
}

fn away(millis: f64) -> Distance {
    Distance {
        trip: Duration::from_secs_f64(millis / 1e3),
        jitter: Duration::ZERO,
        loss: 0.0,
    }
}

struct Reply {
    /// Since the start of its load.
    asked: Duration,
    took: Duration,
    /// True if it was not decided at once.
    waits: bool,
    /// When the reply came. For a request that waits, the time of the decision by Redis, which is
    /// on this machine.
    at: SystemTime,
    outcome: Result<Decision, Error>,
}

/// Prints the row of one distance: from the start over a ramp to a steady load, then a lone user,
/// and then a busy tenant.
fn measure(server: &Server, distance: Distance, lasting: Duration) -> Outcome {
    server.run::<()>("FLUSHALL");
    let proxy = Proxy::start(server, distance);
    let second = Duration::from_secs(1);
    let (pings, ramp, steady, alone, tenant) = two_threads().block_on(async {
        let pings = pings(&proxy, lasting).await?;
        let limiter = limiter(&proxy).await?;
        let mut dice = Dice::new(30);
        let ramp = arrivals(31, lasting, |at| {
            (STEADY * at.div_duration_f64(lasting)).max(1.0)
        });
        let ramp = ask_at(&limiter, &wide(), &ramp, || dice.below(KEYS)).await;
        let steady = ask_at(
            &limiter,
            &wide(),
            &arrivals(32, lasting, |_| STEADY),
            || dice.below(KEYS),
        )
        .await;
        let asking = limiter.clone();
        let alone = one_by_one(lasting, move |asked| ask(&asking, &wide(), KEYS, asked)).await;
        let prefetched = wide().prefetch(DEFAULT_LIFE);
        let tenant = ask_at(
            &limiter,
            &prefetched,
            &arrivals(33, second + lasting, |_| TENANT),
            || KEYS + 1,
        )
        .await;
        Ok::<_, String>((pings, ramp, steady, alone, tenant))
    })?;
    let all: Vec<&Reply> = [&ramp, &steady, &alone, &tenant]
        .into_iter()
        .flatten()
        .collect();
    let errors: Vec<&Error> = all
        .iter()
        .filter_map(|reply| reply.outcome.as_ref().err())
        .collect();
    let begun = tenant.partition_point(|reply| reply.asked < second);
    let later = &tenant[begun..];
    let waiting = later.iter().filter(|reply| reply.waits).count() as f64 / later.len() as f64;
    let took = |replies: &[Reply]| times(replies.iter().map(|reply| reply.took));
    let (alone, steady, later, pings) = (took(&alone), took(&steady), took(later), times(pings));
    println!(
        "| {} | {} | {} of {} | {} | {} | {:.2} | {} | {:.2} % | {:.1} |",
        name(distance),
        show(&pings),
        errors.len(),
        all.len(),
        show(&alone),
        show(&steady),
        part(&steady, 50).div_duration_f64(part(&pings, 50)),
        show(&later),
        waiting * 100.0,
        proxy.latest().as_secs_f64() * 1e3
    );
    show_first(&errors);
    let against_pings = |what: &str, times: &[Duration]| Comparison {
        what: format!("median time, {what}, {}", name(distance)),
        unit: Unit::Micros,
        us: Series {
            label: OURS.to_owned(),
            figures: vec![part(times, 50).as_secs_f64() * 1e6],
        },
        others: vec![Series {
            label: "PING".to_owned(),
            figures: vec![part(&pings, 50).as_secs_f64() * 1e6],
        }],
    };
    Ok(vec![
        against_pings("alone", &alone),
        against_pings("busy", &steady),
    ])
}

/// Prints the row of a limit that two processes share, which ask for twice as much.
fn share(server: &Server, lasting: Duration) -> Result<(), String> {
    server.run::<()>("FLUSHALL");
    let limit = Limit::per("shared", UNITS as u64, WINDOW).prefetch(DEFAULT_LIFE);
    let proxies = [0.1, 80.0].map(|millis| Proxy::start(server, away(millis)));
    let [near, far] = two_threads().block_on(async {
        let limiters = [limiter(&proxies[0]).await?, limiter(&proxies[1]).await?];
        let [of_near, of_far] = [41, 43].map(|seed| arrivals(seed, lasting, |_| SHARE));
        let (near, far) = tokio::join!(
            ask_at(&limiters[0], &limit, &of_near, || 0),
            ask_at(&limiters[1], &limit, &of_far, || 0)
        );
        Ok::<_, String>([near, far])
    })?;
    let admitted = |replies: &[Reply]| {
        let is_admitted = |reply: &&Reply| reply.outcome.as_ref().is_ok_and(Decision::is_allowed);
        replies
            .iter()
            .filter(is_admitted)
            .map(|reply| reply.at)
            .collect::<Vec<_>>()
    };
    let admitted = [admitted(&near), admitted(&far)];
    let mut asked: Vec<Duration> = near.iter().chain(&far).map(|reply| reply.asked).collect();
    let errors: Vec<&Error> = near
        .iter()
        .chain(&far)
        .filter_map(|reply| reply.outcome.as_ref().err())
        .collect();
    let total = admitted.iter().map(Vec::len).sum::<usize>();
    asked.sort_unstable();
    let exact = exact(&asked);
    println!(
        "\n{UNITS} units in {WINDOW:?} for two processes with prefetch, {SHARE} requests a second each"
    );
    println!(
        "| most in a window | admitted | of an exact log | at 0.1 ms | at 80 ms | without a decision |"
    );
    println!("|---|---|---|---|---|---|");
    println!(
        "| {} | {total} of {} | {:.2} % | {} | {} | {} |",
        most_in_a_window(admitted.concat()),
        asked.len(),
        total as f64 * 100.0 / exact as f64,
        admitted[0].len(),
        admitted[1].len(),
        errors.len()
    );
    show_first(&errors);
    Ok(())
}

/// With the default settings.
async fn limiter(proxy: &Proxy) -> Result<Limiter, String> {
    RedisStore::connect(proxy.url())
        .await
        .map(Limiter::new)
        .map_err(|error| error.to_string())
}

/// The times of PINGs over a bare connection, one by one.
async fn pings(proxy: &Proxy, lasting: Duration) -> Result<Vec<Duration>, String> {
    let client = redis::Client::open(proxy.url()).expect("a URL");
    let connection = client
        .get_multiplexed_async_connection()
        .await
        .map_err(|error| error.to_string())?;
    let ping = move |_| {
        let mut connection = connection.clone();
        async move {
            let sent = Instant::now();
            // Under loss a reply may come too late for the client.
            let _ = redis::cmd("PING").query_async::<()>(&mut connection).await;
            sent.elapsed()
        }
    };
    Ok(one_by_one(lasting, ping).await)
}

/// One request after the other, with pauses, in a task as in a server.
async fn one_by_one<T, F>(
    lasting: Duration,
    mut ask: impl FnMut(Duration) -> F + Send + 'static,
) -> Vec<T>
where
    T: Send + 'static,
    F: Future<Output = T> + Send,
{
    let asking = tokio::spawn(async move {
        let (started, mut replies) = (Instant::now(), Vec::new());
        while started.elapsed() < lasting {
            replies.push(ask(started.elapsed()).await);
            sleep(Duration::from_millis(10)).await;
        }
        replies
    });
    asking.await.expect("the task ends")
}

/// Asks at these times, whether or not there are replies.
async fn ask_at(
    limiter: &Limiter,
    limit: &Limit,
    arrivals: &[Duration],
    mut key: impl FnMut() -> usize,
) -> Vec<Reply> {
    let (started, mut requests) = (tokio::time::Instant::now(), JoinSet::new());
    for arrival in arrivals {
        sleep_until(started + *arrival).await;
        requests.spawn(ask(limiter, limit, key(), *arrival));
    }
    let mut replies = requests.join_all().await;
    replies.sort_unstable_by_key(|reply| reply.asked);
    replies
}

fn ask(
    limiter: &Limiter,
    limit: &Limit,
    key: usize,
    asked: Duration,
) -> impl Future<Output = Reply> + Send + 'static + use<> {
    let check = limiter.check(limit, key.to_string(), 1);
    async move {
        let (started, mut check) = (Instant::now(), pin!(check));
        let (outcome, waits) = match poll_fn(|cx| Poll::Ready(check.as_mut().poll(cx))).await {
            Poll::Ready(outcome) => (outcome, false),
            Poll::Pending => (check.await, true),
        };
        let took = started.elapsed();
        let at = outcome
            .as_ref()
            .ok()
            .filter(|_| waits)
            .map_or_else(SystemTime::now, Decision::at);
        Reply {
            asked,
            took,
            waits,
            at,
            outcome,
        }
    }
}

/// Random arrivals at a rate that changes, at most that of the steady load.
fn arrivals(seed: u64, lasting: Duration, rate: impl Fn(Duration) -> f64) -> Vec<Duration> {
    let (mut dice, mut at, mut arrivals) = (Dice::new(seed), Duration::ZERO, Vec::new());
    while at < lasting {
        if dice.fraction() * STEADY < rate(at) {
            arrivals.push(at);
        }
        // Exponential, as between independent clients.
        at += Duration::from_secs_f64(-(1.0 - dice.fraction()).ln() / STEADY);
    }
    arrivals
}

/// The requests that an exact log without any delay admits.
fn exact(asked: &[Duration]) -> usize {
    let (mut log, mut admitted) = (VecDeque::new(), 0);
    for at in asked {
        while log
            .front()
            .is_some_and(|admitted| *at - *admitted >= WINDOW)
        {
            log.pop_front();
        }
        if log.len() < UNITS {
            log.push_back(*at);
            admitted += 1;
        }
    }
    admitted
}

fn most_in_a_window(mut admitted: Vec<SystemTime>) -> usize {
    admitted.sort_unstable();
    let (mut begin, mut most) = (0, 0);
    for (end, at) in admitted.iter().enumerate() {
        while at
            .duration_since(admitted[begin])
            .is_ok_and(|age| age >= WINDOW)
        {
            begin += 1;
        }
        most = most.max(end + 1 - begin);
    }
    most
}

fn show_first(errors: &[&Error]) {
    if let Some(error) = errors.first() {
        println!("(the first without a decision: {error})");
    }
}

fn times(times: impl IntoIterator<Item = Duration>) -> Vec<Duration> {
    let mut times: Vec<Duration> = times.into_iter().collect();
    times.sort_unstable();
    times
}

/// The time that so many percent of the requests took at most.
fn part(times: &[Duration], percent: usize) -> Duration {
    times[(times.len() - 1) * percent / 100]
}

fn show(times: &[Duration]) -> String {
    [50, 99]
        .map(|percent| format!("{:.3}", part(times, percent).as_secs_f64() * 1e3))
        .join(" / ")
}

fn name(Distance { trip, jitter, loss }: Distance) -> String {
    let millis = |time: Duration| time.as_secs_f64() * 1e3;
    let jitter = if jitter.is_zero() {
        String::new()
    } else {
        format!(" ± {}", millis(jitter))
    };
    let loss = if loss > 0.0 {
        format!(", {} % lost", loss * 100.0)
    } else {
        String::new()
    };
    format!("{}{jitter} ms{loss}", millis(trip))
}
