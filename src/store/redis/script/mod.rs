//! The Lua script that decides.

use std::sync::LazyLock;

/// `head.lua` describes its arguments and its reply.
pub(super) const DECIDE: &str = concat!(
    include_str!("head.lua"),
    // In functions, because most calls never need what these files define. They take what they
    // share of the head as arguments, and name the rest anew: a function that refers to locals of
    // another costs more to make.
    "local function other_ways(now, score, score_of, SLACK, is_server_time, is_expiry_telling)\n",
    "local call, try, ceil = redis.call, redis.pcall, math.ceil\n",
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
    "return decide, settle\nend\n",
    include_str!("ways.lua"),
    "return do_next, read_charges, charge_of\nend\n",
    include_str!("run.lua"),
);

/// Runs each of its commands without an effect.
pub(super) const TRY_OUT: &str = include_str!("try_out.lua");

pub(super) static SHA1: LazyLock<String> = LazyLock::new(|| redis::Script::new(DECIDE).get_hash().to_owned());
