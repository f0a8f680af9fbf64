//! Split limits (sharded counters), for a key that is too hot for one Redis Cluster node.
//!
//! A key lives on one cluster node, which decides all requests for this key. A [`Split`] counts a
//! limit in parts. Each part has its own key, so the keys spread over all nodes. On a single server
//! a split gains nothing.
//!
//! 1. A limit of `n` units in `k` parts becomes `k` limits of `n / k` units, rounded down, under
//!    the same name. Each check is charged to one part, so a window never admits more than `n`
//!    units.
//! 2. A window may admit fewer than `n` units. The remainder of `n / k` is never admitted, and a
//!    check is refused if its part is used up, even if other parts have units left. Requests go to
//!    the parts in turn, and each thread starts at a random part, so the parts' used units differ
//!    only by a few. Give each part hundreds of units.
//! 3. A decision's figures are those of the charged part. A refused client that retries at once may
//!    be admitted by another part.
//! 4. A check that costs more than a part's units fails with
//!    [`NeverFits`](crate::error::NeverFits), even if the cost is below the limit.
//! 5. A settlement goes to the part that was charged. [`acquire`](crate::Limiter::acquire) waits
//!    for units in one part. Under a [`Share`](crate::limiter::Share), a process has a share of
//!    each part, rounded down again.
//! 6. A part's units are separate from the units under every other key, including the same key
//!    under the unsplit limit. So split a limit in all processes or in none. If you change the
//!    number of parts, each part keeps its key, so units in old parts still count. Until one window
//!    after the change, a window may admit more than `n` units, but never more than all old and new
//!    parts together.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")] async fn main() -> Result<(), tower_sliding_window::Error> {
//! use tower_sliding_window::{Limit, Limiter, MemoryStore, split::Split};
//!
//! // 16 parts of 625 units. More parts than units do not compile.
//! const CALLS: Split = Limit::per_minute("calls", 10_000).split(16);
//!
//! let limiter = Limiter::new(MemoryStore::new());
//! for _ in 0..100 {
//!     let decision = limiter.check(&CALLS.part, CALLS.next_key("tenant-7"), 1).await?;
//!     assert!(decision.is_allowed() && decision.binding().limit.units() == 625);
//! }
//!
//! // The units of all parts, and a reset, part by part.
//! let mut used = 0;
//! for key in CALLS.keys("tenant-7") {
//!     used += limiter.peek(&CALLS.part, key.clone()).await?.binding().used;
//!     limiter.reset(&CALLS.part, key).await?;
//! }
//! assert_eq!(used, 100);
//! # Ok(()) }
//! ```
//!
//! For HTTP, use [`Split::by`].

use std::{cell::Cell, num::NonZeroU32};

use crate::{check::random, key::Key, limit::Limit};

/// Other keys never have this namespace by accident.
const NAMESPACE: &str = "\0part";

/// A limit in parts, made by [`Limit::split`]. See the [module docs](self).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Split {
    /// The limit for one part, with its share of the units.
    pub part: Limit,
    parts: NonZeroU32,
}

impl Limit {
    /// Splits the limit into equal parts: see [`split`](crate::split). Set the
    /// [algorithm](Self::with_algorithm) and [prefetch](Self::prefetch) first; they then apply to
    /// each part. A split has no text form, so call this on a [parsed](Self::parse) limit.
    ///
    /// # Panics
    ///
    /// If there are no parts, or if there are more parts than units. In a `const`, this does not
    /// compile.
    #[must_use]
    #[track_caller]
    pub const fn split(self, parts: u32) -> Split {
        match NonZeroU32::new(parts) {
            Some(parts) if parts.get() as u64 <= self.units() => Split {
                part: self.of_part(parts),
                parts,
            },
            _ => panic!(
                "a limit is split into at least one part, and at most as many as it has units"
            ),
        }
    }
}

impl Split {
    /// The key for the next part to charge for `key`.
    pub fn next_key(&self, key: impl Into<Key>) -> Key {
        part_of(next_part(self.parts), &key.into())
    }

    /// The keys of all parts of `key`, to [peek](crate::Limiter::peek) at,
    /// [reset](crate::Limiter::reset) or [block](crate::Limiter::block) them.
    pub fn keys<K: Into<Key>>(&self, key: K) -> impl Iterator<Item = Key> + use<K> {
        let key = key.into();
        (0..self.parts.get()).map(move |number| part_of(number, &key))
    }
}

/// Returns a part's key. Part number and namespace length have a fixed width, so different parts
/// and keys never give the same bytes.
fn part_of(number: u32, key: &Key) -> Key {
    let namespace = key.namespace().as_bytes();
    let length = (namespace.len() as u64).to_le_bytes();
    Key::joined(
        NAMESPACE,
        &[&number.to_le_bytes(), &length, namespace, key.value()],
    )
}

/// Returns the next part to charge: a golden-ratio (Weyl) sequence around a circle on which each
/// part is an arc. Every second or every third step on its own also visits the arcs evenly, so
/// limits and keys that are charged in turn can share one counter.
fn next_part(parts: NonZeroU32) -> u32 {
    const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

    thread_local! {
        static NEXT: Cell<u64> = Cell::new(random());
    }
    let next = NEXT.get();
    NEXT.set(next.wrapping_add(STEP));
    (((next >> 32) * u64::from(parts.get())) >> 32) as u32
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn a_part_is_its_share_rounded_down() {
        for (units, parts, expected) in [
            (10, 1, 10),
            (10, 3, 3),
            (10, 10, 1),
            (Limit::MAX_UNITS, u32::MAX, 1_048_576),
        ] {
            let split = Limit::per_hour("calls", units).split(parts);
            assert_eq!((split.part.units(), split.parts.get()), (expected, parts));
        }
    }

    #[test]
    fn no_part_has_the_key_of_another_or_of_a_whole() {
        let split = Limit::per_hour("calls", 1_000).split(300);
        let wholes = [
            Key::new("a", "bc"),
            Key::new("ab", "c"),
            Key::new("", "abc"),
            Key::new("abc", ""),
            "".into(),
        ];
        let parts_of = |key: &Key| split.keys(key.clone()).collect::<Vec<_>>();
        // A part's parts have their own keys, too.
        let keys: Vec<_> = wholes
            .iter()
            .chain(&parts_of(&wholes[0])[..2])
            .flat_map(parts_of)
            .collect();
        let distinct: HashSet<_> = keys.iter().chain(&wholes).collect();
        assert_eq!(distinct.len(), 7 * 300 + 5);
    }

    /// Parts also take turns if several limits are charged in turn.
    #[test]
    fn parts_take_turns() {
        for (limits, parts) in (1..8).flat_map(|limits| (2..32).map(move |parts| (limits, parts))) {
            let mut times = vec![0; parts as usize];
            for _ in 0..64 * parts {
                for _ in 1..limits {
                    next_part(NonZeroU32::MIN);
                }
                times[next_part(NonZeroU32::new(parts).unwrap()) as usize] += 1;
            }
            assert!(
                times.iter().all(|times| (56..=72).contains(times)),
                "{parts} parts of {limits} limits: {times:?}"
            );
        }
    }
}
