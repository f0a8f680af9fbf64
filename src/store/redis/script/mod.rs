//! The Lua script that decides.

use std::sync::LazyLock;

/// The script that decides and settles. `head.lua` describes its arguments and its reply.
pub(super) const DECIDE: &str = concat!(
    include_str!("head.lua"),
    // Most calls never need what the files from `fast.lua` to `ways.lua` define. So these files are
    // in three functions, each inside the one before: `other_ways`, `general_way` and
    // `make_settle`. `fast.lua` reads the arguments of `other_ways`, and `ways.lua` ends with its
    // results.
    "local function other_ways(...)\n",
    include_str!("fast.lua"),
    "local function general_way()\n",
    include_str!("entries.lua"),
    include_str!("totals.lua"),
    include_str!("log.lua"),
    include_str!("check.lua"),
    "local function make_settle()\n",
    include_str!("settle.lua"),
    "end\nreturn decide, make_settle\nend\n",
    include_str!("ways.lua"),
    "end\n",
    include_str!("run.lua"),
);

/// The commands of [`DECIDE`], with arguments under which they change nothing. None creates `KEY`.
pub(super) const COMMANDS: &str = "TIME, EVAL return 0, ZCARD KEY, ZCOUNT KEY 0 0, ZRANGE KEY 0 0, ZREVRANGE KEY 0 0, \
    ZRANGEBYSCORE KEY 0 0, ZSCORE KEY 0, ZADD KEY XX 0 0, ZREM KEY 0, ZREMRANGEBYRANK KEY 0 0, \
    PEXPIRE KEY 1, PEXPIREAT KEY 1, PEXPIRETIME KEY, UNLINK KEY";

pub(super) static SHA1: LazyLock<String> =
    LazyLock::new(|| redis::Script::new(DECIDE).get_hash().to_owned());
