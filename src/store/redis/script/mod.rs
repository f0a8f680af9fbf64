//! The Lua script that decides.

use std::sync::LazyLock;

/// The script that decides and settles. `head.lua` describes its arguments and its reply.
pub(super) const DECIDE: &str = concat!(
    include_str!("head.lua"),
    // Most calls never need what the files from `fast.lua` to `ways.lua` define. So these files are
    // in two functions: in `other_ways`, and in `general_way` inside it. `fast.lua` reads the
    // arguments of `other_ways`. `settle.lua` ends with the results of `general_way`, and
    // `ways.lua` with those of `other_ways`.
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

/// A script that runs each command that [`DECIDE`] needs, without an effect.
pub(super) const TRY_OUT: &str = include_str!("try_out.lua");

pub(super) static SHA1: LazyLock<String> = LazyLock::new(|| redis::Script::new(DECIDE).get_hash().to_owned());
