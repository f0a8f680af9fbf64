//! One key for all.

use http::request::Parts;

use super::{KeyError, KeyExtractor};
use crate::key::Key;

/// One key for all requests: a limit on what the service takes in total.
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
