//! What the dispatchers of all runtimes have in common.

use std::time::Duration;

use super::{keys::Keys, script::Script, target::Target, time::Time};
use crate::store::local_state::LocalState;

pub(super) struct Shared {
    pub(super) target: Target,
    /// The name of each connection, if it gets one.
    pub(super) client_name: Option<String>,
    /// How many connections a runtime has at most, and how many batches of each queue it has in flight.
    pub(super) connections: u32,
    pub(super) connect_timeout: Duration,
    pub(super) keys: Keys,
    pub(super) script: Script,
    pub(super) time: Time,
    pub(super) local_state: LocalState,
}
