//! How long a request waits for decisions, through all layers on its way.
//!
//! Each layer waits for at most its own deadline, less what was waited before, but for 5 ms if nothing is left: so a store
//! that hangs turns no limit off on another that answers. All together wait for at most the longest of their deadlines, and
//! 5 ms for each layer that found nothing left.

use std::time::Duration;

use http::request::Parts;

/// In a request's extensions, for the layers further in.
#[derive(Clone, Copy)]
struct Waited(Duration);

/// How long a request has waited for the layers that it has passed.
pub(super) fn waited(request: &Parts) -> Duration {
    request.extensions.get().map(|Waited(time)| *time).unwrap_or_default()
}

/// Notes how long it has waited by now.
pub(super) fn note_waited(request: &mut Parts, time: Duration) {
    if !time.is_zero() {
        request.extensions.insert(Waited(time));
    }
}
