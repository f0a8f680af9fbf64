//! Bytes of Redis memory per admission: the whole key of an exhausted limit, filled one request at
//! a time.

use std::time::Duration;

use tokio::runtime::Runtime;
use tower_sliding_window::{Limit, Limiter, RedisStore};

use super::Outcome;
use crate::{
    contenders::{LOG_BY_TIME, OURS, fill_log_by_time},
    load::two_threads,
    measure::{Comparison, Contest, Effort, Unit},
    server::Server,
};

pub(crate) fn run(effort: Effort) -> Outcome {
    let (runtime, server) = (two_threads(), Server::start());
    Ok([100, 1_000]
        .map(|units| admissions(&runtime, &server, units, effort))
        .into())
}

fn admissions(runtime: &Runtime, server: &Server, units: u64, effort: Effort) -> Comparison {
    let limit = Limit::per_hour("requests", units);
    let store = runtime
        .block_on(RedisStore::connect(&server.url()))
        .expect("the server is up");
    let limiter = Limiter::new(store).deadline(Duration::from_secs(10));
    let ours = async || {
        for _ in 0..units {
            let decision = limiter.check(&limit, "user:1234", 1).await;
            assert!(decision.expect("an answer").is_allowed());
        }
        let decision = limiter.peek(&limit, "user:1234").await;
        assert_eq!(
            decision.expect("an answer").remaining(),
            0,
            "the limit is used up"
        );
    };
    Contest::new(format!("bytes an admission, limit of {units}"), Unit::Bytes)
        .side(OURS, || {
            server.run::<()>("FLUSHALL");
            runtime.block_on(ours());
            server.memory() / units as f64
        })
        .side(LOG_BY_TIME, || {
            server.run::<()>("FLUSHALL");
            fill_log_by_time(server, units);
            server.memory() / units as f64
        })
        .measure(effort.rounds)
}
