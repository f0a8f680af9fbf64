//! The Lua script that decides.

use std::sync::LazyLock;

/// `head.lua` describes its arguments and its reply.
pub(super) const DECIDE: &str = concat!(
    include_str!("head.lua"),
    // These files are in functions, because most calls never need what the files define.
    // `fast.lua` reads the arguments, and `settle.lua` and `ways.lua` end with the results.
    "local function other_ways(...)\n",
    include_str!("fast.lua"),
    "local function general_way()\n",
    include_str!("entries.lua"),
    include_str!("totals.lua"),
    include_str!("counter.lua"),
    include_str!("log.lua"),
    include_str!("check.lua"),
    include_str!("settle.lua"),
    "end\n",
    include_str!("ways.lua"),
    "end\n",
    include_str!("run.lua"),
);

/// Runs each command that the script needs, without an effect.
pub(super) const TRY_OUT: &str = include_str!("try_out.lua");

pub(super) static SHA1: LazyLock<String> = LazyLock::new(|| redis::Script::new(DECIDE).get_hash().to_owned());
