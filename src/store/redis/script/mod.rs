//! The Lua script that decides.

use std::sync::LazyLock;

/// `head.lua` describes its arguments and its reply.
pub(super) const DECIDE: &str = concat!(
    include_str!("head.lua"),
    // In functions, because most calls never need what these files define. `members.lua` has the
    // arguments, `settle.lua` and `ways.lua` end with what they return.
    "local function other_ways(...)\n",
    include_str!("members.lua"),
    include_str!("fast.lua"),
    "local function general_way()\n",
    include_str!("entries.lua"),
    include_str!("totals.lua"),
    include_str!("copies.lua"),
    include_str!("counter.lua"),
    include_str!("log.lua"),
    include_str!("check.lua"),
    include_str!("settle.lua"),
    "end\n",
    include_str!("ways.lua"),
    "end\n",
    include_str!("run.lua"),
);

/// Runs each of its commands without an effect.
pub(super) const TRY_OUT: &str = include_str!("try_out.lua");

pub(super) static SHA1: LazyLock<String> = LazyLock::new(|| redis::Script::new(DECIDE).get_hash().to_owned());
