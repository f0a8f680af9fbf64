//! The guide: one page for each task.
//!
//! | I want to … | page |
//! |---|---|
//! | limit by address, API key, user or tenant; exempt or block some clients | [`choosing_keys`] |
//! | combine limits; limit each route on its own; hide a limit from clients | [`several_limits`] |
//! | count only failed logins, or the tokens that a response used | [`costs_known_afterwards`] |
//! | give each plan or tenant its own limit | [`limits_by_plan`] |
//! | decide what a route does while Redis is slow or gone | [`when_redis_fails`] |
//! | limit calls to an upstream, or wait instead of being refused | [`around_a_client`] |
//! | limit to millions of units, or spread a hot key over a cluster | [`large_limits`] |
//! | set up Redis: permissions, memory, cluster, sentinel, TLS | [`running_redis`] |
//! | test my limits, or try one on real traffic before it refuses | [`testing_your_limits`] |
//! | look up a fault: its effect, and how long it lasts | [`what_happens_when`] |
//! | know what a hostile client can do | [`what_an_attacker_can_do`] |

#[doc = include_str!("around_a_client.md")]
pub mod around_a_client {}

#[doc = include_str!("choosing_keys.md")]
pub mod choosing_keys {}

#[doc = include_str!("costs_known_afterwards.md")]
pub mod costs_known_afterwards {}

#[doc = include_str!("large_limits.md")]
pub mod large_limits {}

#[doc = include_str!("limits_by_plan.md")]
pub mod limits_by_plan {}

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
