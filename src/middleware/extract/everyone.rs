//! One key for all requests.

use http::request::Parts;

use super::{extractor::KeyExtractor, key_error::KeyError};
use crate::key::Key;

/// One key for all requests, for a limit on the load of the whole service.
///
/// A single client can use it up for all others, so add a limit by client. [Settle](crate::KeyedLimit::settle) that one: under
/// this key, a client that hangs up would keep its reserved units from all others.
///
/// ```
/// use tower_sliding_window::{Everyone, Limit};
///
/// let total = Limit::per_second("total", 5_000).by(Everyone);
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Everyone;

impl KeyExtractor for Everyone {
    fn extract(&self, _: &Parts) -> Result<Key, KeyError> {
        Ok(Key::new("everyone", ""))
    }
}
