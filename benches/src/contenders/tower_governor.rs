//! The crate tower_governor: GCRA within one process.

use std::time::Duration;

use http::Request;
use tower::Layer;
use tower_governor::{GovernorError, GovernorLayer, governor::GovernorConfigBuilder, key_extractor::KeyExtractor};

use super::{Contender, Inner, Layered};

/// Its name in tables and plots.
pub(crate) const TOWER_GOVERNOR: &str = "tower_governor";

/// With the headers that ours also sends: limit and remaining.
pub(crate) fn tower_governor() -> impl Contender {
    let config = GovernorConfigBuilder::default()
        .period(PERIOD)
        .burst_size(BURST)
        .key_extractor(XKey)
        .use_headers()
        .finish()
        .expect("a quota above nothing");
    Layered(GovernorLayer::new(config).layer(Inner))
}

pub(crate) fn tower_governor_without_headers() -> impl Contender {
    let config = GovernorConfigBuilder::default()
        .period(PERIOD)
        .burst_size(BURST)
        .key_extractor(XKey)
        .finish()
        .expect("a quota above nothing");
    Layered(GovernorLayer::new(config).layer(Inner))
}

/// Together with the burst: a million a second, like ours.
const PERIOD: Duration = Duration::from_micros(1);
const BURST: u32 = 1_000_000;

#[derive(Clone)]
struct XKey;

impl KeyExtractor for XKey {
    type Key = Box<[u8]>;

    fn extract<T>(&self, request: &Request<T>) -> Result<Self::Key, GovernorError> {
        Ok(request.headers()["x-key"].as_bytes().into())
    }
}
