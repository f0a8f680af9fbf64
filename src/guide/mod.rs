//! The guide: one page for each task. Each opens with an example.

/// # Guard an application in another language
#[doc = include_str!("another_language.md")]
pub mod another_language {}
#[doc = include_str!("at_most_n_at_once.md")]
pub mod at_most_n_at_once {}
#[doc = include_str!("around_a_client.md")]
pub mod around_a_client {}
#[doc = include_str!("before_production.md")]
pub mod before_production {}
#[doc = include_str!("behind_a_proxy.md")]
pub mod behind_a_proxy {}
#[doc = include_str!("choosing_keys.md")]
pub mod choosing_keys {}
#[doc = include_str!("choosing_limits.md")]
pub mod choosing_limits {}
#[doc = include_str!("costs_known_afterwards.md")]
pub mod costs_known_afterwards {}
#[doc = include_str!("existing_connections.md")]
pub mod existing_connections {}
#[doc = include_str!("grpc.md")]
pub mod grpc {}
#[doc = include_str!("hot_keys.md")]
pub mod hot_keys {}
#[doc = include_str!("large_limits.md")]
pub mod large_limits {}
#[doc = include_str!("limits_by_plan.md")]
pub mod limits_by_plan {}
#[doc = include_str!("moving_here.md")]
pub mod moving_here {}
#[doc = include_str!("recipes.md")]
pub mod recipes {}
#[doc = include_str!("redis_is_far_away.md")]
pub mod redis_is_far_away {}
#[doc = include_str!("running_redis.md")]
pub mod running_redis {}
#[doc = include_str!("several_limits.md")]
pub mod several_limits {}
#[doc = include_str!("testing_your_limits.md")]
pub mod testing_your_limits {}
#[doc = include_str!("what_an_attacker_can_do.md")]
pub mod what_an_attacker_can_do {}
#[doc = include_str!("what_happens_when.md")]
pub mod what_happens_when {}
#[doc = include_str!("when_redis_fails.md")]
pub mod when_redis_fails {}
