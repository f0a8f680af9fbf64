//! Whose time a store on Redis decides by.

use std::time::{SystemTime, UNIX_EPOCH};

use crate::store::{
    clock::{Clock, ManualClock},
    local_state::LocalState,
};

#[derive(Clone)]
pub(super) enum Time {
    /// The server's, read by the script.
    Server,
    /// The system's, in each process.
    Client,
    Manual(ManualClock),
}

impl Time {
    /// Microseconds since the Unix epoch for the script to decide by, or nothing for the server's own time.
    pub(super) fn now(&self) -> String {
        match self {
            Self::Server => String::new(),
            // Not the monotonic clock: that would drift away from the other processes'.
            Self::Client => SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_micros().to_string(),
            Self::Manual(clock) => Clock::Manual(clock.clone()).now().to_string(),
        }
    }

    /// A local state by a clock that runs as fast.
    pub(super) fn local_state(&self) -> LocalState {
        LocalState::on(match self {
            Self::Server | Self::Client => Clock::monotonic(),
            Self::Manual(clock) => Clock::Manual(clock.clone()),
        })
    }
}
