//! The Lua script that decides.

use std::sync::LazyLock;

/// The script that decides and settles. `head.lua` describes its arguments and reply.
pub(super) static DECIDE: LazyLock<String> =
    LazyLock::new(|| PARTS.replace("--> unit.lua\n", include_str!("unit.lua")));

const PARTS: &str = concat!(
    include_str!("head.lua"),
    include_str!("lone.lua"),
    // Functions that few calls need are created inside wrapper functions. The wrappers get the
    // values that they use from the files above as arguments, since a function that refers to
    // another function's locals costs more to create.
    "local function sums(now, SLACK)\n",
    include_str!("estimates.lua"),
    include_str!("sums.lua"),
    "return decide_sum\nend\n",
    include_str!("lone_sum.lua"),
    "local function other_ways(now, score, SLACK)\nlocal call, try, ceil = redis.call, redis.pcall, math.ceil\n",
    include_str!("take.lua"),
    "return take, score_of, entries_of, FEW, LOOKED_AT\nend\n",
    "local function general_way(now, SLACK, is_server_time, is_expiry_telling, score_of, entries_of, FEW, LOOKED_AT)\n",
    "local call, try = redis.call, redis.pcall\n",
    include_str!("estimates.lua"),
    include_str!("entries.lua"),
    include_str!("totals.lua"),
    include_str!("log.lua"),
    include_str!("check.lua"),
    "local function make_settle()\n",
    include_str!("settle.lua"),
    "return settle\nend\nreturn decide, make_settle, charge_of\nend\n",
    include_str!("run.lua"),
);

/// The commands that the script uses, with arguments under which they do not change anything. None
/// creates `KEY`.
pub(super) const COMMANDS: &str = "TIME, EVAL return 0, ZCARD KEY, ZCOUNT KEY 0 0, ZRANGE KEY 0 0, ZREVRANGE KEY 0 0, \
    ZRANGEBYSCORE KEY 0 0, ZSCORE KEY 0, ZADD KEY XX 0 0, ZREM KEY 0, ZREMRANGEBYRANK KEY 0 0, \
    PEXPIRE KEY 1, PEXPIREAT KEY 1, PEXPIRETIME KEY, UNLINK KEY";

pub(super) static SHA1: LazyLock<String> =
    LazyLock::new(|| redis::Script::new(&DECIDE).get_hash().to_owned());
