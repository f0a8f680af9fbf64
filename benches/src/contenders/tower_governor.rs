//! The crate tower_governor: GCRA within one process.

use http::Request;
use tower::Layer;
use tower_governor::{
    GovernorError, GovernorLayer, governor::GovernorConfigBuilder, key_extractor::KeyExtractor,
};

use super::{Contender, Inner, Layered, Quota, Routed};

/// Its name in tables and plots.
pub(crate) const TOWER_GOVERNOR: &str = "tower_governor";

/// With the headers that ours also sends: limit and remaining.
macro_rules! with_headers {
    ($quota:expr) => {
        GovernorLayer::new(
            GovernorConfigBuilder::default()
                .period($quota.window / $quota.units)
                .burst_size($quota.units)
                .key_extractor(XKey)
                .use_headers()
                .finish()
                .expect("a quota above nothing"),
        )
    };
}

pub(crate) fn tower_governor(quota: Quota) -> impl Contender {
    Layered(with_headers!(quota).layer(Inner))
}

/// The same in front of a route of axum.
pub(crate) fn tower_governor_routed(quota: Quota) -> Routed {
    Routed(Routed::new().0.layer(with_headers!(quota)))
}

pub(crate) fn tower_governor_without_headers(quota: Quota) -> impl Contender {
    let config = GovernorConfigBuilder::default()
        .period(quota.window / quota.units)
        .burst_size(quota.units)
        .key_extractor(XKey)
        .finish()
        .expect("a quota above nothing");
    Layered(GovernorLayer::new(config).layer(Inner))
}

#[derive(Clone)]
struct XKey;

impl KeyExtractor for XKey {
    type Key = Box<[u8]>;

    fn extract<T>(&self, request: &Request<T>) -> Result<Self::Key, GovernorError> {
        Ok(request.headers()["x-key"].as_bytes().into())
    }
}
