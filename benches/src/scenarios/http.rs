//! The speed that an HTTP server keeps: an axum route under wrk, with server and client on one
//! machine, all admitted.

use std::{
    io::Write,
    process::{Command, Stdio},
    time::Duration,
};

use axum::{Router, http::HeaderValue, middleware::map_response, response::Response, routing::get};
use tempfile::NamedTempFile;
use tokio::{net::TcpListener, runtime::Runtime};
use tower_sliding_window::limit::prefetch::{DEFAULT_LIFE, MAX_LIFE};

use super::Outcome;
use crate::{
    contenders::{
        OURS, OURS_WITH_LONG_PREFETCH, OURS_WITH_PREFETCH, TOWER_RATE_LIMIT_REDIS, long_prefetches,
        our_layer, tower_rate_limit_redis_layer, wide,
    },
    load::{KEYS, two_threads},
    measure::{Contest, Effort, Unit},
    server::Server,
};

const BARE: &str = "the route without a limiter";

/// All that a limiter adds for the client.
const HEADERS: &str = "the route with three fixed headers";
const FIXED: [(&str, &str); 3] = [
    ("x-ratelimit-limit", "1000000000"),
    ("x-ratelimit-remaining", "999999999"),
    ("x-ratelimit-reset", "3600"),
];

/// Requests of all keys, one after the other, made in advance.
const REQUESTS: &str = "\
local requests, last = {}, 0
function init()
  for key = 1, KEYS do
    wrk.headers['x-key'] = key
    requests[key] = wrk.format()
  end
end
function request()
  last = last % #requests + 1
  return requests[last]
end
";

pub(crate) fn run(effort: Effort) -> Outcome {
    if Command::new("wrk")
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_err()
    {
        return Err("wrk is not installed: `apt-get install wrk` or `brew install wrk`, then run this again".into());
    }
    let (runtime, server) = (two_threads(), Server::start());
    let url = runtime.block_on(serve(&runtime, &server));
    let (many, thousand) = (script(KEYS), script(1_000));
    let measure = |script: &NamedTempFile, route: &str| {
        server.run::<()>("FLUSHALL");
        let url = format!("{url}/{route}");
        // A process knows which keys are busy after the longest life of a prefetch. The other sides
        // get as long to warm up.
        requests_per_second(&url, script, 2 * MAX_LIFE);
        requests_per_second(&url, script, effort.round)
    };
    let contest = Contest::new("requests a second, axum under wrk", Unit::PerSecond)
        .side(OURS, || measure(&many, "ours"))
        .side(TOWER_RATE_LIMIT_REDIS, || measure(&many, "rival"))
        .side(BARE, || measure(&many, "bare"));
    let prefetch = Contest::new("the same, a thousand keys", Unit::PerSecond)
        .side(OURS_WITH_LONG_PREFETCH, || {
            measure(&thousand, "long-prefetch")
        })
        .side(OURS_WITH_PREFETCH, || measure(&thousand, "prefetch"))
        .side(OURS, || measure(&thousand, "ours"))
        .side(HEADERS, || measure(&thousand, "headers"))
        .side(BARE, || measure(&thousand, "bare"));
    Ok([contest, prefetch]
        .map(|contest| contest.measure(effort.rounds))
        .into())
}

/// The script of wrk for so many keys.
fn script(keys: usize) -> NamedTempFile {
    let mut script = NamedTempFile::new().expect("a temporary file");
    script
        .write_all(REQUESTS.replace("KEYS", &keys.to_string()).as_bytes())
        .expect("room for it");
    script
}

/// One server with a route for each side. A route without requests costs nothing.
async fn serve(runtime: &Runtime, server: &Server) -> String {
    let hello = || get(|| async { "hello" });
    let app = Router::new()
        .route("/ours", hello().layer(our_layer(server, wide()).await))
        .route(
            "/prefetch",
            hello().layer(our_layer(server, wide().prefetch(DEFAULT_LIFE)).await),
        )
        .route(
            "/long-prefetch",
            hello().layer(our_layer(server, wide().prefetch(long_prefetches())).await),
        )
        .route(
            "/rival",
            hello().layer(tower_rate_limit_redis_layer(server).await),
        )
        .route("/headers", hello().layer(map_response(with_headers)))
        .route("/bare", hello());
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("a bound address");
    runtime.spawn(async { axum::serve(listener, app).await });
    format!("http://{address}")
}

async fn with_headers(mut response: Response) -> Response {
    for (name, value) in FIXED {
        response
            .headers_mut()
            .insert(name, HeaderValue::from_static(value));
    }
    response
}

fn requests_per_second(url: &str, script: &NamedTempFile, round: Duration) -> f64 {
    // wrk takes only whole seconds.
    let duration = format!("-d{}", round.as_secs().max(1));
    let output = Command::new("wrk")
        .args(["-t1", "-c64", &duration, "-s"])
        .args([script.path().as_os_str(), url.as_ref()])
        .output()
        .expect("wrk runs");
    let report = String::from_utf8_lossy(&output.stdout);
    // Fast responses that do not come from the guarded route must not count.
    let is_clean =
        output.status.success() && !report.contains("Non-2xx") && !report.contains("Socket errors");
    assert!(
        is_clean,
        "not all requests were answered well:\n{report}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let figure = report
        .lines()
        .find_map(|line| line.strip_prefix("Requests/sec:"))
        .expect("a figure");
    figure.trim().parse().expect("a number")
}
