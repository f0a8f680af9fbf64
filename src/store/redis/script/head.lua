-- Decides a batch of checks and settles admissions, one after the other. Each check is admitted whole or refused whole. A
-- check may come in several copies, from several callers: they are decided as if one after the other, too.
--
-- The script is these files, one after the other: head.lua; quick.lua and plain.lua, which are all that most batches need,
-- and return where they were; entries.lua, log.lua and counter.lua, how a limit counts; check.lua and settle.lua, what is
-- done; run.lua, the way through the rest of a batch. To make a function takes its time, too: hence the order.
--
-- KEYS   one sorted set a charge: what one limit has admitted for one identity
-- ARGV   now        microseconds since the Unix epoch, or '' for the server's own clock
--        then runs of checks that have all but their keys and ids in common
--          copies   of each check
--          kind     'plain': three figures a charge; 'again': the same, and the ids may have been counted before;
--                   'any': six figures a charge; 'given': the same, with ids that the callers gave, and may have given
--                   before; 'settle' and 'settle again': an admission
--          charges  how many each check has; then for each charge
--            units  the limit
--            cost   units to take; 0 asks without spending
--            window microseconds
--            where there are six figures
--            algorithm  'log', 'fixed', 'counter', or the entries of a compact log
--            lease      microseconds to hold the units for, at most the window; 0 for a charge that holds none
--            mode       of a check: '' for a charge that refuses, and takes its units; 'shadow' for one that never refuses,
--                       'left' for one that takes nothing, 'left shadow' for both, 'spent' for one that takes its units
--                       even beyond its limit; of an admission: what it has really cost, '' to leave it as it is
--          checks   how many follow; then for each check, whose charges take the next keys, in order
--            id     eight bytes: the identity of the first copy's admission; those of the others follow it
--            at     only of an admission: when it was decided
-- reply  a flat list: now, then for each check
--          { at }   only if it was counted by an earlier try: when that was
--          -1 - n   if only the first n copies are admitted, or a charge is in the shadow, or a text if a key could not be
--                   read or written: the place of its charge, from 1, and the error; nothing if all copies are admitted. Of
--                   an admission: n is 1 if any limit knew it
--          then for each charge
--            used   units in the window after the decision
--            reset  microseconds until fewer are, 0 if there are none; read from an expiry, it is up to 1 millisecond more.
--                   If some units are reserved, -1 - reset, and then
--              reserved  how many
--            retry  only where -1 - n was sent, and not of an admission: microseconds until this charge would no longer
--                   refuse one more copy, 0 if it refuses none; and then, if some units are reserved
--              least     the same if all of them were given back now
--
-- Cost      O(log n) a charge, and O(1) more for each entry that is read, dropped or moved. Whatever its key holds, a charge
--           reads at most 100 entries for a retry time, moves at most 100 after a step back of the clock, and drops at most
--           500 that have left: some 0.5 ms. A batch is of at most 64 different checks.
--           * A retry time that would need more entries to be read is told as when the last of those read leaves: the check
--             does not pass before that.
--           * Where more entries have left than may be dropped, those of one unit do not count. Those with units of their
--             own count until later checks drop them, unless at most 500 entries stay, which are then all that is kept.
--           * Where more entries are ahead of the clock than may be moved, each refusal moves the newest of them.
--           * Under an algorithm other than the log, a key keeps 10,000 entries with an id. What comes beyond them counts
--             without one.
-- Numbers   integers up to 2^53 in doubles. As arguments they are exact; in texts they are written with %.0f, since
--           `..` and tostring would lose digits. What a key holds is clamped to them where it is read.
-- Writes    The first one of a check is a ZADD, since a server without memory refuses no other, and that of a settlement a
--           ZREM, so that it does not. A refusal adds no entry, and moves no expiry but that of a log of which it has dropped
--           the oldest entries.
-- Errors    of one key, such as a wrong type, or of a server without memory, are the outcome of the check that met them. An
--           error of the server, such as READONLY, ends the script before anything is written.
-- Server    Redis 6.2 or newer, and what is compatible with it. Commands: TIME PEXPIRETIME ZCARD ZCOUNT ZRANGE ZREVRANGE
--           ZRANGEBYSCORE ZSCORE ZADD ZREM ZREMRANGEBYRANK PEXPIRE PEXPIREAT UNLINK.

local SLACK = 1000  -- milliseconds a key outlives its last unit: a promoted replica's clock may be ahead

local attempt, call, pcall, ceil = pcall, redis.call, redis.pcall, math.ceil
local now = tonumber(ARGV[1])
local is_server_time = not now
if is_server_time then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end
local present = ceil(now / 1000)           -- milliseconds
local score = string.format('%.0f', -now)  -- of what is admitted now; quicker to pass on than the number
-- PEXPIRETIME came with Redis 7.0, and so did this number. By another clock than the server's an expiry tells nothing.
local is_expiry_telling = is_server_time and redis.REDIS_VERSION_NUM

local reply, r = { now }, 1  -- and its length
local a, k = 1, 0            -- how many arguments and keys have been taken
