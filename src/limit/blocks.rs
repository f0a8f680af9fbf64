//! Blocks: units that a process takes at once, and spends without asking the store.
//!
//! While a busy key is far from its limit, the process takes a block of its units in one call. It decides by itself as long as they
//! last, and gives back the rest. [`guide::hot_keys`](crate::guide::hot_keys) says when this pays off.
//!
//! 1. **Never too much.** A block is counted in Redis when it is taken, until a window after its life. So no window ever holds more
//!    than the limit, by any number of processes, even if one is killed or a reply is lost.
//! 2. **Early by little.** A unit that a process holds and does not spend is missing to others for the life of the block, 100 ms by
//!    default, and until the process has given it back, a call later. That call waits for blocks of other keys, for at most a 64th of the
//!    life and 4 ms. A unit that is spent out of a block counts for its window and
//!    at most the life. If the process is killed, its units count for the life of the block and then for a window.
//! 3. **Exact near the limit.** A process takes a block only for a key with sixteen requests within a life. A block has as many
//!    units as the process spends in a life at its present rate, but at most an eighth of the units that are left. If an
//!    eighth is less than sixteen requests, each request asks the store, and its unit counts for exactly one window.
//! 4. A check is decided in the process only if the blocks of all its charges have enough units. Otherwise all of it goes to the
//!    store. So does every check with an [id](crate::Check::with_id), and every check with a charge that
//!    [reserves](crate::Charge::reserve), asks whether [any unit is left](crate::Charge::any_left), counts
//!    [spent](crate::Charge::spent) units or costs nothing. A process takes blocks only if all charges of a check are asked for often.
//! 5. The figures of a decision in the process are those of the store when the block was taken, and the units that this process has
//!    spent since. They are as old as the life at most. Units that other processes hold count as used, and as
//!    [reserved](crate::LimitStatus::reserved), since they may be given back.
//!    A request that was on its way while a block was taken may be counted twice in them until the next reply.
//! 6. An admission in the process has an id that the store does not know, so it cannot be
//!    [settled](crate::settlement). A reservation can, since it always asks the store.
//! 7. A [reset](crate::Limiter::reset) or [pause](crate::Limiter::pause) through a limiter drops the blocks of its store at once. Other
//!    processes may spend what they hold for the rest of its life: after a reset, in addition to the limit.
//! 8. While the store fails, a process first spends what it holds, for the rest of its life.
//! 9. Blocks work with an exact or a [compact](crate::Algorithm::compact) log on a `RedisStore`. They have no effect under other
//!    algorithms, and none on a `MemoryStore`, which decides as quickly. They work on a store of your own if its
//!    [local state](crate::LocalState::with_blocks) has them.
//! 10. Instances may have different blocks for one limit, or none. The parts of a [split](crate::split) limit have blocks of their own.
//!
//! ```
//! use tower_sliding_window::{Blocks, Limit};
//!
//! const API: Limit = Limit::per_minute("api", 600_000).in_blocks(Blocks::new());
//! assert_eq!("api=600000/min blocks".parse(), Ok(API));
//! ```

use std::{fmt, num::NonZeroU32, time::Duration};

use super::Limit;
use crate::config_error::{ConfigError, ConfigErrorKind};

/// Settings of the blocks of a [limit](Limit::in_blocks). See the [module docs](self).
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
#[must_use]
pub struct Blocks {
    most: u32,
    /// Microseconds, and 1 more: so an optional value takes no more memory.
    life: NonZeroU32,
}

impl Blocks {
    /// The shortest life, 1 ms.
    pub const MIN_LIFE: Duration = Duration::from_millis(1);
    /// The longest life, 1 s: keys in Redis outlive their last unit by no more.
    pub const MAX_LIFE: Duration = Duration::from_secs(1);

    /// Blocks with a life of 100 ms, of as many units as rule 3 of the [module docs](self) allows.
    pub const fn new() -> Self {
        Self { most: u32::MAX, life: NonZeroU32::MIN.saturating_add(100_000) }
    }

    /// The most units of a block, 1 to the units of the limit. Default: as many as rule 3 of the [module docs](self) allows.
    pub const fn at_most(mut self, units: u32) -> Self {
        self.most = units;
        self
    }

    /// How long a process may hold a block, 1 ms to 1 s and at most the window. Default: 100 ms.
    ///
    /// With a longer life, fewer requests ask the store, and units are missing to other processes for longer.
    pub const fn life(mut self, life: Duration) -> Self {
        let micros = life.as_micros();
        // A life that is too long for the number is too long for `in_blocks`, too.
        let micros = if micros < u32::MAX as u128 { micros as u32 } else { u32::MAX };
        self.life = NonZeroU32::MIN.saturating_add(micros);
        self
    }

    pub(crate) const fn most(self) -> u64 {
        self.most as u64
    }

    pub(crate) const fn life_micros(self) -> u64 {
        self.life.get() as u64 - 1
    }

    /// Whether blocks of any size are allowed.
    const fn is_unbounded(self) -> bool {
        self.most == u32::MAX
    }
}

impl Default for Blocks {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for Blocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let most = (!self.is_unbounded()).then_some(self.most);
        let life = Duration::from_micros(self.life_micros());
        f.debug_struct("Blocks").field("at_most", &most).field("life", &life).finish()
    }
}

impl Limit {
    /// The same limit in blocks, which processes take and spend without asking the store: see [`Blocks`](crate::limit::blocks). Default:
    /// every check asks the store.
    ///
    /// # Panics
    ///
    /// If the blocks do not fit, as described there. In a `const`, that does not compile. For values that are not known before run
    /// time there is [`try_in_blocks`](Self::try_in_blocks).
    #[must_use]
    #[track_caller]
    pub const fn in_blocks(mut self, blocks: Blocks) -> Self {
        if let Some(rule) = broken_rule(&self, blocks) {
            panic!("{}", rule);
        }
        self.blocks = Some(blocks);
        self
    }

    /// The same limit in blocks: [`in_blocks`](Self::in_blocks) for values from a configuration.
    ///
    /// # Errors
    ///
    /// [`ConfigError`], naming the value, if a block may be larger than the limit or has no units, if its life is
    /// not 1 ms to 1 s or longer than the window, or if the algorithm is [`fixed`](crate::Algorithm::fixed) or
    /// [`counter`](crate::Algorithm::counter).
    pub fn try_in_blocks(self, blocks: Blocks) -> Result<Self, ConfigError> {
        let name = self.shared_name();
        self.with_blocks(blocks)
            .map_err(|problem| ConfigError::new(ConfigErrorKind::Blocks, format!("limit {name:?}: {problem}")))
    }

    /// An error says which rule the blocks break, and the value.
    pub(super) fn with_blocks(mut self, blocks: Blocks) -> Result<Self, String> {
        let Some(rule) = broken_rule(&self, blocks) else {
            self.blocks = Some(blocks);
            return Ok(self);
        };
        let life = Duration::from_micros(blocks.life_micros());
        Err(match rule {
            ABOVE_LIMIT => format!("{rule}, {}, not {}", self.units, blocks.most),
            LIFE => format!("{rule}, not {life:?}"),
            ABOVE_WINDOW => format!("{rule}, {:?}, not {life:?}", self.window()),
            ALGORITHM => format!("{rule}, not {}", self.algorithm.word()),
            _ => rule.to_owned(),
        })
    }

    /// The blocks, if it has any.
    #[must_use]
    pub const fn blocks(&self) -> Option<Blocks> {
        self.blocks
    }

    /// When to try again if only reserved units refuse: blocks are given back within a life.
    pub(crate) fn retry_reserved_after(&self, wait: Duration) -> Duration {
        self.blocks.map_or(wait, |blocks| wait.min(Duration::from_micros(blocks.life_micros())))
    }
}

const EMPTY: &str = "a block must have at least one unit";
const ABOVE_LIMIT: &str = "a block must have at most the units of the limit";
const LIFE: &str = "the life of a block must be 1 ms to 1 s";
const ABOVE_WINDOW: &str = "the life of a block must be at most the window";
const ALGORITHM: &str = "blocks need an exact or a compact log";

const fn broken_rule(limit: &Limit, blocks: Blocks) -> Option<&'static str> {
    let life = blocks.life_micros();
    if blocks.most == 0 {
        Some(EMPTY)
    } else if !blocks.is_unbounded() && blocks.most() > limit.units {
        Some(ABOVE_LIMIT)
    } else if life < Blocks::MIN_LIFE.as_micros() as u64 || life > Blocks::MAX_LIFE.as_micros() as u64 {
        Some(LIFE)
    } else if life > limit.window_micros {
        Some(ABOVE_WINDOW)
    } else if !limit.algorithm.is_log() {
        Some(ALGORITHM)
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::Algorithm;

    #[test]
    fn an_error_names_the_value_that_does_not_fit() {
        let limit = Limit::per_second("api", 100);
        let millis = Duration::from_millis;
        for (limit, blocks, named) in [
            (limit.clone(), Blocks::new().at_most(0), "a block must have at least one unit"),
            (limit.clone(), Blocks::new().at_most(101), "the units of the limit, 100, not 101"),
            (limit.clone(), Blocks::new().life(Duration::from_micros(999)), "1 ms to 1 s, not 999µs"),
            (limit.clone(), Blocks::new().life(millis(1_001)), "1 ms to 1 s, not 1.001s"),
            (limit.clone(), Blocks::new().life(Duration::MAX), "1 ms to 1 s, not"),
            (limit.clone(), Blocks::new().life(Duration::ZERO), "1 ms to 1 s, not 0ns"),
            (Limit::per("api", 100, millis(50)), Blocks::new(), "at most the window, 50ms, not 100ms"),
            (limit.clone().with_algorithm(Algorithm::fixed()), Blocks::new(), "not fixed"),
            (limit.clone().with_algorithm(Algorithm::counter()), Blocks::new(), "not counter"),
        ] {
            let error = limit.try_in_blocks(blocks).unwrap_err().to_string();
            assert!(error.starts_with("limit \"api\": ") && error.contains(named), "{error}");
        }
        let compact = Limit::per("api", 100, millis(1)).with_algorithm(Algorithm::compact(16));
        assert!(compact.try_in_blocks(Blocks::new().at_most(100).life(millis(1))).is_ok());
        assert!(Limit::per_second("api", u64::from(u32::MAX)).try_in_blocks(Blocks::new().at_most(u32::MAX)).is_ok());
    }

    #[test]
    fn blocks_cost_a_limit_one_word() {
        assert_eq!(size_of::<Option<Blocks>>(), 8);
    }
}
