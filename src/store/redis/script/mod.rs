//! A Lua script on the server: sent by its hash, and whole only when the server does not know it.

use redis::{Cmd, ErrorKind, RedisResult, ServerErrorKind, Value, cmd};

use super::connection::Connection;

/// The script that decides: `head.lua` says what it takes and what it replies.
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

/// How much will be sent, about: what grows step by step is copied at each.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    pub(super) arguments: usize,
    pub(super) bytes: usize,
}

pub(super) struct Script {
    source: &'static str,
    sha1: String,
}

impl Script {
    pub(super) fn new(source: &'static str) -> Self {
        Self { source, sha1: redis::Script::new(source).get_hash().to_owned() }
    }

    /// Runs the script with the keys and arguments that `fill` appends.
    ///
    /// NOSCRIPT is answered by one EVAL, which runs the script and loads it: one round trip, on the right server, and
    /// without the permission that SCRIPT LOAD needs. It is not repeated: a server that loses scripts that fast is
    /// not helped by a loop.
    ///
    /// There is `room` for so many arguments and bytes to begin with.
    pub(super) async fn run(
        &self,
        connection: &mut Connection<'_>,
        room: Room,
        fill: impl Fn(&mut Cmd),
    ) -> RedisResult<Value> {
        let mut evalsha = Cmd::with_capacity(2 + room.arguments, 64 + room.bytes);
        fill(evalsha.arg("EVALSHA").arg(&self.sha1));
        match connection.send(&evalsha).await {
            Err(error) if error.kind() == ErrorKind::Server(ServerErrorKind::NoScript) => {
                let mut eval = cmd("EVAL");
                fill(eval.arg(self.source));
                connection.send(&eval).await
            }
            outcome => outcome,
        }
    }
}
