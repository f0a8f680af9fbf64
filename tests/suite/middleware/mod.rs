//! `RateLimitLayer` and its service: what a client gets, and what a request is charged.

#[cfg(all(feature = "grpc", feature = "metrics"))]
mod attacks;
mod bans;
mod choosing;
mod concurrent_limits;
mod count_afterwards;
mod degraded_responses;
mod dropped_requests;
#[cfg(feature = "grpc")]
mod grpc;
mod headers;
mod heeding_upstreams;
mod held_bodies;
mod hidden_limits;
mod immediate_decisions;
mod outbound;
mod rate_limit_fields;
mod responses;
mod servers;
mod service_contract;
mod settling;
mod shadow;
mod skipping;
mod stacked;
mod stacks;
mod usage;
