//! The scenarios, each a list of comparisons.

mod attack;
mod burst;
mod cost;
mod distance;
mod entries;
mod exhaustion;
mod fleet;
mod flood;
mod heed;
mod http;
mod in_process;
mod limits;
mod lone;
mod memory;
mod one_client;
mod pool;
mod prefetch;
mod script_time;
mod server_time;
mod throughput;
mod zipf;

pub(crate) use self::fleet::{CLIENT, run_client};
use crate::{
    measure::{Effort, Outcome},
    research::{early_refusals, regions},
};

pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    pub(crate) run: fn(Effort) -> Outcome,
}

pub(crate) const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "many-keys",
        run: throughput::many_keys,
    },
    Scenario {
        name: "steady",
        run: throughput::steady,
    },
    Scenario {
        name: "limits",
        run: limits::run,
    },
    Scenario {
        name: "hot-key",
        run: throughput::hot_key,
    },
    Scenario {
        name: "zipf",
        run: zipf::run,
    },
    Scenario {
        name: "prefetch",
        run: prefetch::run,
    },
    Scenario {
        name: "exhaustion",
        run: exhaustion::run,
    },
    Scenario {
        name: "burst",
        run: burst::run,
    },
    Scenario {
        name: "lone",
        run: lone::run,
    },
    Scenario {
        name: "server-time",
        run: server_time::run,
    },
    Scenario {
        name: "script-time",
        run: script_time::run,
    },
    Scenario {
        name: "pool",
        run: pool::run,
    },
    Scenario {
        name: "cost",
        run: cost::run,
    },
    Scenario {
        name: "entries",
        run: entries::run,
    },
    Scenario {
        name: "memory",
        run: memory::run,
    },
    Scenario {
        name: "flood",
        run: flood::run,
    },
    Scenario {
        name: "in-process",
        run: in_process::run,
    },
    Scenario {
        name: "http",
        run: http::run,
    },
    Scenario {
        name: "one-client",
        run: one_client::run,
    },
    Scenario {
        name: "attack",
        run: attack::run,
    },
    Scenario {
        name: "heed",
        run: heed::run,
    },
];

/// Scenarios that run only if they are named, since they take long.
pub(crate) const BY_NAME: &[Scenario] = &[
    Scenario {
        name: "heed-long",
        run: heed::run_long,
    },
    Scenario {
        name: "early-refusals",
        run: early_refusals::run,
    },
    Scenario {
        name: "fleet",
        run: fleet::run,
    },
    Scenario {
        name: "tails",
        run: fleet::tails,
    },
    Scenario {
        name: "distance",
        run: distance::run,
    },
    Scenario {
        name: "regions",
        run: regions::run,
    },
];
