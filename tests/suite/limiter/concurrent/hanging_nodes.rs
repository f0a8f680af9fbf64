//! Places on a cluster one of whose nodes stands still.

use tokio::task::JoinSet;

use super::*;
use crate::support::redis_cluster::RedisCluster;

const LIFE: Duration = Duration::from_secs(4);
const PLACES: usize = 1_500;

/// Many places of many keys. Some slots of a healthy node are next to those of the node that hangs.
/// A batch that reaches that node has no reply for as long as the test.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_hangs_costs_no_place_of_another_node() {
    for hanging in 0..3 {
        let cluster = RedisCluster::start(3).await;
        for node in &cluster.0 {
            node.run::<()>("CONFIG SET cluster-require-full-coverage no");
        }
        let store = cluster.builder().connections(1).connect().await.unwrap();
        let limiter = Limiter::new(store)
            .refusal_cache(Duration::ZERO)
            .deadline(TEST_TIMEOUT);
        let streams = Limit::concurrent("streams", 4).freed_after(LIFE);
        let entering: JoinSet<_> = (0..PLACES)
            .map(|number| limiter.check(&streams, format!("key-{number}"), 1))
            .collect();
        let held = entering.join_all().await.into_iter();
        let held: Vec<_> = held.map(Result::unwrap).collect();
        let of_node = cluster.0[hanging].keys().len();
        cluster.0[hanging].pause();
        // By then, each place was renewed once, or is lost.
        sleep(LIFE + seconds(3)).await;
        let lost = held.iter().filter(|place| place.has_lost_place()).count();
        cluster.0[hanging].resume();
        println!("node {hanging}: {lost} of {of_node} are lost");
        assert_eq!(lost, of_node, "of node {hanging}");
        drop(held);
    }
}
