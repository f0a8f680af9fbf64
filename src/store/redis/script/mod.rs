//! The Lua script that decides.

use std::sync::LazyLock;

/// `head.lua` describes its arguments and its reply.
pub(super) const DECIDE: &str = concat!(
    include_str!("head.lua"),
    "\n",
    include_str!("quick.lua"),
    "\n",
    include_str!("shape.lua"),
    "\n",
    include_str!("plain.lua"),
    "\n",
    include_str!("entries.lua"),
    "\n",
    include_str!("sums.lua"),
    "\n",
    include_str!("counter.lua"),
    "\n",
    include_str!("log.lua"),
    "\n",
    include_str!("check.lua"),
    "\n",
    include_str!("settle.lua"),
    "\n",
    include_str!("run.lua"),
    "\n",
);

pub(super) static SHA1: LazyLock<String> = LazyLock::new(|| redis::Script::new(DECIDE).get_hash().to_owned());
