//! Decisions per second over the connections of an application's pool, against connections of the
//! store's own: 256 tasks, 10,000 keys.

use bb8_redis::{RedisConnectionManager, bb8::Pool};
use tower::Layer;
use tower_sliding_window::{Limiter, RedisStore};

use super::Outcome;
use crate::{
    contenders::{Inner, Layered, our_layer_on, ours, wide},
    load::{KEYS, closed_loop, two_threads},
    measure::{Contest, Effort, Unit},
    server::Server,
};

pub(crate) fn run(effort: Effort) -> Outcome {
    let (runtime, server) = (two_threads(), Server::start());
    let pooled = |tests_connections: bool| {
        runtime.block_on(async {
            let manager = RedisConnectionManager::new(server.url()).expect("a URL");
            let pool = Pool::builder()
                .max_size(4)
                .min_idle(4)
                .test_on_check_out(tests_connections);
            let pool = pool.build(manager).await.expect("the server is up");
            let store = RedisStore::builder(pool)
                .connect()
                .await
                .expect("the server is up");
            Layered(our_layer_on(Limiter::new(store), wide()).layer(Inner))
        })
    };
    let own = runtime.block_on(ours(&server, wide()));
    let sides = [
        ("over a pool of bb8-redis", pooled(false)),
        ("over one that tests its connections", pooled(true)),
        ("over connections of its own", own),
    ];
    let mut contest = Contest::new("decisions a second, 10,000 keys", Unit::PerSecond);
    for (label, layered) in &sides {
        contest = contest.side(*label, || {
            server.run::<()>("FLUSHALL");
            runtime.block_on(closed_loop(layered, effort.round, KEYS, true))
        });
    }
    Ok(vec![contest.measure(effort.rounds)])
}
