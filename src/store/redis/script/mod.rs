//! The Lua script that decides: sent by its hash, and whole only if the server does not know it.

use std::sync::LazyLock;

use redis::{Cmd, ErrorKind, RedisResult, ServerErrorKind, Value, cmd};

use super::connect::Connection;

/// `head.lua` describes its arguments and its reply.
const DECIDE: &str = concat!(
    include_str!("head.lua"),
    "\n",
    include_str!("quick.lua"),
    "\n",
    include_str!("plain.lua"),
    "\n",
    include_str!("entries.lua"),
    "\n",
    include_str!("log.lua"),
    "\n",
    include_str!("counter.lua"),
    "\n",
    include_str!("check.lua"),
    "\n",
    include_str!("settle.lua"),
    "\n",
    include_str!("run.lua"),
    "\n",
);

static SHA1: LazyLock<String> = LazyLock::new(|| redis::Script::new(DECIDE).get_hash().to_owned());

/// Runs the script with the keys and arguments that `write` appends: about so many `arguments`.
///
/// NOSCRIPT is followed by one EVAL, which runs the script and loads it: one round trip, to the right server, and without the
/// permission that SCRIPT LOAD needs. It is not repeated: a loop does not help a server that loses scripts that fast.
pub(super) async fn run(
    connection: &mut Connection,
    again: bool,
    arguments: usize,
    write: impl Fn(&mut Cmd),
) -> RedisResult<Value> {
    // With capacity for all, so that the command is not copied each time it grows.
    let mut evalsha = Cmd::with_capacity(2 + arguments, 64 + 32 * arguments);
    write(evalsha.arg("EVALSHA").arg(&*SHA1));
    match connection.send(&evalsha, again).await {
        Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript) => {
            let mut eval = cmd("EVAL");
            write(eval.arg(DECIDE));
            connection.send(&eval, again).await
        }
        result => result,
    }
}
