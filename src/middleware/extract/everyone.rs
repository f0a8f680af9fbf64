//! One key for all.

use http::request::Parts;

use super::{KeyError, KeyExtractor};
use crate::key::Key;

/// One key for all requests: a limit on what the service takes in total.
///
/// Any client can use it up for all others, so put a limit by client beside it. A limit that
/// [settles](crate::KeyedLimit::settle) had better count by client: a client that hangs up keeps its reservation from all
/// others that share the key.
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
