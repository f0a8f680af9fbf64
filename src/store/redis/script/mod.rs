//! The Lua script that decides.

use std::sync::LazyLock;

/// `head.lua` describes its arguments and its reply.
pub(super) const DECIDE: &str = concat!(
    include_str!("head.lua"),
    include_str!("quick.lua"),
    include_str!("shape.lua"),
    include_str!("plain.lua"),
    include_str!("prefetch.lua"),
    include_str!("entries.lua"),
    include_str!("sums.lua"),
    include_str!("counter.lua"),
    include_str!("log.lua"),
    include_str!("check.lua"),
    include_str!("settle.lua"),
    include_str!("run.lua"),
);

pub(super) static SHA1: LazyLock<String> = LazyLock::new(|| redis::Script::new(DECIDE).get_hash().to_owned());
