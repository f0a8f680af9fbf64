//! What happens to the work when there is no decision.

/// What to do when the store cannot decide in time.
///
/// Neither mode applies to a refusal, nor to a request that has no key: only to a store that is slow or gone, or where a
/// limit cannot be [chosen](crate::KeyedLimit::chosen).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum FailureMode {
    /// Let the work through, without rate-limit figures.
    #[default]
    Open,
    /// Refuse the work until the store is back.
    Closed,
}
