-- Decides a batch of checks and settles admissions, one after the other. A check is admitted whole or refused whole. Equal
-- checks of several callers may come as copies of one: they are decided as if one after the other, too.
--
-- The script is these files in a row: head.lua; quick.lua, shape.lua, plain.lua and prefetch.lua, which are all that most batches
-- need, and return there; entries.lua, sums.lua, counter.lua and log.lua, how a limit counts; check.lua and settle.lua; and
-- run.lua, the way through the rest of a batch. Lua makes the functions anew in each call, so those that few batches need
-- come last.
--
-- KEYS   one sorted set a charge
-- ARGV   now        microseconds since the Unix epoch, or '' for the server's own clock
--        then runs of checks that differ only in their keys and ids
--          copies   of each check
--          kind     'plain': three figures a charge; 'again': the same, and the ids may have been counted before;
--                   'any': six figures a charge; 'given': the same, and the ids may have been counted before;
--                   'settle', or 'settle again' in a second try: an admission, six figures a charge
--          charges  of each check; then for each charge
--            units  the limit
--            cost   units to take; 0 asks without spending
--            window microseconds
--            and where there are six figures
--            algorithm  'log', 'fixed', 'counter', or the number of entries of a compact log
--            lease      microseconds for which the units are reserved; 0 if they are not. At most the window, but for a prefetch:
--                       units that a process spends by itself until the lease ends but for a window
--            mode       of a check: '' if the charge refuses and takes its units, 'shadow' if it never refuses, 'left' if
--                       it takes nothing, 'left shadow' for both, 'spent' if it takes its units even beyond the limit; of
--                       an admission: the real cost, or '' to leave the charge as it is
--          checks   how many follow; then for each check, whose charges take the next keys, in order
--            id     eight bytes: the id of the first copy; those of the others follow it
--            at     only of an admission: when it was decided
--        or, of a check that is alone, 'plain', of one copy, one charge and one unit, by the server's own clock, only
--          numbers  the limit and its window, as two doubles, little-endian
--          id       as above
-- reply  a flat list: now, then for each check
--          { at }   only if an earlier try has counted it: when that was
--          -1 - n   only if not all copies are admitted, or a charge is a shadow: n copies are. Of an admission: n is 1 if
--                   any limit knew it. If a key failed, a text instead: the place of its charge, from 1, and the error
--          then for each charge
--            used   units in the window after the decision
--            reset  microseconds until fewer are, 0 if there are none; read from an expiry, it is up to 1 millisecond more, or
--                   up to the life of a prefetch if that was the first entry.
--                   If some units are reserved, -1 - reset, and then
--              reserved  how many
--            retry  only after -1 - n of a check: microseconds until this charge no longer refuses one more copy, 0 if it
--                   refuses none; and then, if some units are reserved
--              least     the same if all of them were given back now
--        or, where quick.lua has admitted a check with two arguments, a string of three doubles: now, used, reset
--
-- Cost      O(log n) a charge, and O(1) more for each entry that is read, dropped or moved. A charge reads at most 100
--           entries for a retry time, moves at most 100 after a step back of the clock, and drops at most 500: some 0.5 ms.
--           * A retry time that needs more entries is the time at which the last of those read leaves: a lower bound.
--           * Where more entries have left than may be dropped, those of one unit do not count. Others count until later
--             checks drop them, unless at most 500 entries stay, which are then all that is kept.
--           * Where more entries are ahead of the clock than may be moved, each refusal moves the newest of them.
--           * Under an algorithm other than the log, a key keeps 10,000 entries with an id. Further units have none.
-- Numbers   integers up to 2^53 in doubles. In texts they are written with %.0f, since `..` and tostring lose digits.
--           Numbers that are read from a key are clamped to them.
-- Writes    A server without memory refuses a script only its first write, and only if that adds something. So a check
--           begins with a ZADD, and a settlement with a ZREM. A refusal adds no entry, and moves no expiry but that of a
--           log of which it has dropped the oldest entries.
-- Errors    of one key, such as a wrong type, or of a server without memory, are the outcome of the check that met them. An
--           error of the server, such as READONLY, ends the script before anything is written.
-- Server    Redis 6.2 or newer, or Valkey. Commands: TIME PEXPIRETIME ZCARD ZCOUNT ZRANGE ZREVRANGE ZRANGEBYSCORE ZSCORE
--           ZADD ZREM ZREMRANGEBYRANK PEXPIRE PEXPIREAT UNLINK.

local SLACK = 1000  -- milliseconds a key outlives its last unit: a promoted replica's clock may be ahead

local attempt, call, pcall, ceil = pcall, redis.call, redis.pcall, math.ceil
local is_lone = #ARGV == 2
local now, score = not is_lone and tonumber(ARGV[1]), nil  -- the time, and as a score
local is_server_time = not now

-- The score of an entry of this time. %.0f instead would cost a check that is alone 5 % more instructions.
local function score_of(time)
  local micros = time % 1000000
  return string.format('-%d%06d', (time - micros) / 1000000, micros)
end

if is_server_time then
  local time = call('TIME')
  local seconds, micros = time[1], time[2]
  now = seconds * 1000000 + micros
  -- Mostly no zero is missing in front of the microseconds. That saves a check that is alone 3 % of the instructions.
  score = #micros == 6 and '-' .. seconds .. micros
end
score = score or score_of(now)

-- PEXPIRETIME came with Redis 7.0, and so did this number. By another clock than the server's an expiry tells nothing.
local is_expiry_telling = is_server_time and redis.REDIS_VERSION_NUM

local reply, r = not is_lone and { now }, 1  -- and its length
local a, k = 1, 0                            -- how many arguments and keys have been taken
