//! The sliding log whose members are times. It is small, because two admissions in one microsecond
//! become one.

use redis::Script;

use crate::server::Server;

/// Its name in tables and plots.
pub(crate) const LOG_BY_TIME: &str = "a log of times";

/// A name of 38 bytes, as long as ours for the same limit, so that the logs are compared and not
/// their names.
const KEY: &str = "ratelimit:{user:1234:in:eu-1}:requests";

/// Sends so many checks in a row for one user, all admitted.
pub(crate) fn fill_log_by_time(server: &Server, admissions: u64) {
    let script = Script::new(
        "local time = redis.call('TIME')
         local now = time[1] * 1000000 + time[2]
         redis.call('ZREMRANGEBYSCORE', KEYS[1], 0, now - ARGV[2] * 1000)
         if redis.call('ZCARD', KEYS[1]) >= tonumber(ARGV[1]) then return 0 end
         redis.call('ZADD', KEYS[1], now, string.format('%.0f', now))
         redis.call('PEXPIRE', KEYS[1], ARGV[2])
         return 1",
    );
    let mut connection = server.connection();
    for _ in 0..admissions {
        let allowed: u64 = script
            .key(KEY)
            .arg(admissions)
            .arg(3_600_000)
            .invoke(&mut connection)
            .expect("an answer");
        assert_eq!(allowed, 1, "the limit is filled, not passed");
    }
    let entries: u64 = server.run(&format!("ZCARD {KEY}"));
    assert_eq!(entries, admissions, "no two in one microsecond");
}
