//! `GrpcResponse`, on servers of tonic and around its channels.

mod bad_input;
mod servers;
mod stacked;
mod statuses;

use tower_sliding_window::{Limit, MemoryStore, PeerIp, RateLimitLayer, middleware::GrpcResponse};

const CALLS: Limit = Limit::per_hour("calls", 2);

fn by_peer() -> RateLimitLayer<GrpcResponse> {
    RateLimitLayer::new(MemoryStore::new())
        .limit(CALLS.by(PeerIp::new()))
        .respond_with(GrpcResponse)
}
