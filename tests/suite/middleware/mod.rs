//! `RateLimitLayer` and its service: what a client gets, and what a request is charged.

mod attacks;
mod bans;
mod bodies;
mod choosing;
mod concurrent_limits;
mod count_afterwards;
mod degraded_responses;
mod dropped_requests;
mod effects;
mod exempt_and_denied;
#[cfg(feature = "grpc")]
mod grpc;
mod head_requests;
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
mod stacked_deadlines;
mod stacked_decisions;

mod together;
mod tower_http_stacks;
