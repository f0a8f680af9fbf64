-- Decides a batch: checks and settlements, in order. A check is admitted whole or refused whole.
-- Equal checks from several callers may come as copies of one check, and are decided as if they
-- came one after the other.
--
-- Takes  nothing
-- Gives  SLACK, call, try, ceil, short, now, score, is_server_time, is_expiry_telling
--
-- The script is the Lua files in this folder, as mod.rs lists them. lone.lua decides a lone single
-- unit, by the rule in unit.lua, and lone_sum.lua a lone check under a fixed window, counter or
-- compact log. run.lua goes through any other batch: it decides single units itself, renews places,
-- and sends other checks one of three ways. sums.lua decides most checks with one fixed window,
-- counter or compact log. take.lua decides exact logs with capacity, and places. The general way
-- decides any check, and settles: entries.lua has the entry format, totals.lua and log.lua read a
-- key, and check.lua and settle.lua change it. In each call, Lua creates a script's functions anew,
-- with their shared variables, so they are created only when needed. Each gets the log or charge
-- that it reads and changes as an argument.
--
-- A shorter way decides only where the general way would give the same reply and leave the same
-- entries. There, too, a server without memory refuses the first write.
--
-- KEYS   one sorted set per charge
-- ARGV   now        microseconds since the Unix epoch, or '' for the server's own clock
--        then runs: checks that differ only in their keys and ids
--          kind     'plain': charges under exact logs, or one charge under a fixed window, counter
--                   or compact log, that count or refuse, at any cost but 0, under new ids
--                   'any': any checks
--                   'settle': settlements
--                   'renew': a place to renew
--          figures  doubles, little-endian: the copies of each check, and then for each charge
--            units  the limit
--            cost   units to take; 0 asks without spending
--            window microseconds; for a place its life, negated
--            sub_window  its length; 0 for an exact log or a place; the window for a fixed window,
--                        counter or calendar
--            later       how long after its start a sub-window's admissions are recorded; the
--                        window only for the counter
--            lease       only in 'any' and 'settle': microseconds for which the units are reserved,
--                        or 0. A lease is at most the window, except a prefetch's. That is its life
--                        plus a window: a process spends the units during the life, and they count
--                        for a window after it
--          ids      for each check, whose charges take the next keys in order: eight bytes, the
--                   first copy's id; the other copies' ids follow it. For a settlement, a double
--                   follows: when the admission was decided
--          and only in 'any' and 'settle'
--          again    'again' if an earlier try may have counted the checks, or settled the
--                   admission; otherwise ''
--          then for each charge
--            ends   when the calendar's periods end, or ''
--            mode   for a check: '' if the charge refuses and takes its units, 'shadow' if it
--                   never refuses, 'left' if it takes nothing, 'left shadow' for both, 'spent' if
--                   it takes its units even beyond the limit; for an admission: the real cost,
--                   after 'spent ' if its units were spent, and 'refund ' if they were certainly
--                   counted, possibly without an id; any other word leaves the charge as it is
--        or, by the server's clock, a short form
--          for one 'plain' run: its figures and ids, without now and kind
--          for a lone single unit: its id, and as doubles units and window, in one argument
--          for a lone check under a fixed window, counter or compact log: its five figures, without
--            an id
-- reply  a list: now, then for each check two figures per charge, if a shorter way counted it,
--            used   units in the window after the decision
--            reset  microseconds until fewer units are used, or 0 if none are. If read from an
--                   expiry, it may be too late by up to 1 ms, or by a prefetch's life if that was
--                   the first entry. `used` may count entries that have left, if the clock has
--                   stepped back or another program has set the expiry
--        for each renewed place, 1 if it was held, or 0
--        or a record, as for each refusal: a list,
--          admitted how many copies are admitted; for a settlement, 1 if any limit knew the
--                   admission
--          at       when an earlier try counted the check; -1 if none did
--          then for each charge
--            used, reset  as above
--            reserved     how many used units are reserved
--            retry        microseconds until one more copy fits; 0 if it refuses none
--            least        the retry time if all reserved units were given back now
--        or, if a key failed, a text: its charge's number, from 1, and the error
--        The reply to the short form is a string of doubles, if each check has only figures
--
-- Words     the same in Rust (`window/`, `dispatch/`) and in Lua
--           plain      an exact log's charge that counts or refuses, and reserves nothing
--           named      an entry that has an admission's id
--           sum        an entry for units without ids, admitted at one recorded time
--           total      the units in all entries under a key, which is a head's score
--           head       a member that is no entry: the total 'used', or the reserved units
--           reserved   units that count until they are settled or their lease ends. Their head is
--                      named 'held'. Renaming it in a later version would start all windows anew
--           settled    an entry that a settlement has left, or a charge's real cost
--           gone       an entry that has left the window, and may still be in the key
--           sub_window the piece of a window whose admissions are recorded under one time
--           copies     equal checks that travel as one
--           single     a check with one plain charge for one unit
--           place      a permit under a concurrent limit: an entry in an exact log, renewed as
--                      long as it is held
--           log        a charge, and what its key has at present, whatever the algorithm
-- Cost      O(log n) per charge, for n entries under its key. Each entry that is read or dropped
--           adds O(1), and each that is moved O(log n). A charge reads at most 100 entries for a
--           retry time, moves at most 100 after the clock steps back, and drops at most 500: at
--           most some 0.5 ms.
--           * If more than 100 entries would have to leave, the retry time is when the last of
--             those 100 leaves: a lower bound.
--           * If more entries have left than may be dropped, and at most 500 stay, the key is
--             rewritten with only those. If more stay, the entries left over do not count in a key
--             without a total. In a key with a total, they count until later checks drop them.
--           * If more entries are ahead of the clock than may be moved, each refusal moves the
--             newest.
--           * Except under the log, a key keeps at most 10,000 named entries. Further units have no
--             id.
-- Numbers   integers up to 2^53 in doubles. They become text by %.0f, since `..` and tostring lose
--           digits, and times become scores by score_of. Numbers from a key are clamped to that
--           range.
-- Writes    A server without memory, which has used all that it may, refuses only a script's first
--           write, and only if it adds something. So a check begins with a ZADD, which such a
--           server refuses, and a settlement with a ZREM, which it accepts. A refused check does
--           not add entries. It moves a key's expiry only if it has dropped or moved entries.
-- Errors    One key's error, such as a wrong type, is the outcome only for the check that met it.
--           So is an error for lack of memory. A server's error, such as READONLY, ends the script
--           before it writes.
-- Server    Redis 6.2 or newer, or Valkey. Commands: TIME PEXPIRETIME ZCARD ZCOUNT ZRANGE ZREVRANGE
--           ZRANGEBYSCORE ZSCORE ZADD ZREM ZREMRANGEBYRANK PEXPIRE PEXPIREAT UNLINK.

local call, try, ceil = redis.call, redis.pcall, math.ceil
local short = #ARGV == 1 and ARGV[1]
local now, score = not short and #ARGV > 2 and tonumber(ARGV[1])  -- the time of all checks, and the same time as a score
local is_server_time = not now
-- How many milliseconds a key outlives its last unit, since a promoted replica's clock may be
-- ahead. A test's own clock may stand still, while keys expire by the server's. So keys live longer
-- in a test.
local SLACK = is_server_time and 1000 or 60000

if is_server_time then
  local time = call('TIME')
  local seconds, micros = time[1], time[2]
  -- TIME gives microseconds without leading zeros.
  score = '-' .. seconds .. (#micros == 6 and micros or string.format('%06d', micros))
  now = -score
else
  score = string.format('-%.0f', now)
end

-- True if a key's expiry can be read, and tells its entries' times. PEXPIRETIME reads it, and came
-- with Redis 7.0, as REDIS_VERSION_NUM did. So a server that has one has the other. If entries
-- follow a test's clock, an expiry does not tell their times.
local is_expiry_telling = is_server_time and redis.REDIS_VERSION_NUM
