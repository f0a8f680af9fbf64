-- Decides a batch of checks and settlements, in order. A check is either admitted under all its
-- limits, or refused. Equal checks from several callers may arrive as copies of one check. They are
-- decided as if they had arrived one after the other.
--
-- Takes  nothing
-- Gives  SLACK, call, try, ceil, short, now, score, is_server_time, is_expiry_telling
--
-- The script is the Lua files in this folder, as mod.rs lists them. lone.lua decides a lone single
-- unit, with the code in unit.lua. lone_sum.lua decides a lone check under a fixed window, counter
-- or compact log. run.lua goes through any other batch: it decides single units itself, renews
-- places, and decides other checks in one of three ways. sums.lua decides most checks with one
-- fixed window, counter or compact log. take.lua decides checks under exact logs that have
-- capacity, and checks that take places. The general way decides any check, and makes settlements:
-- entries.lua has the entry format, totals.lua and log.lua read a key, and check.lua and settle.lua
-- change it. In each call, Lua creates a script's functions anew, with their shared variables, so
-- they are created only when needed. Each function gets the log or charge that it reads and changes
-- as an argument.
--
-- A shorter way decides a check only if the general way would give the same reply and leave the
-- same entries. In a shorter way, too, a server without memory refuses the first write.
--
-- KEYS   one sorted set per charge
-- ARGV   now        microseconds since the Unix epoch, or '' for the server's own clock
--        then runs: checks that differ only in their keys and ids
--          kind     'plain': checks with new ids, whose charges count or refuse, at any cost but 0:
--                   charges under exact logs, or one charge under a fixed window, counter or
--                   compact log
--                   'any': any checks
--                   'settle': settlements
--                   'renew': a place to renew
--          figures  doubles, little-endian: the number of copies of each check, and for each charge
--            units  the limit
--            cost   units to take; 0 asks without spending
--            window in microseconds; for a place, its life, negated
--            sub_window  a sub-window's length; 0 for an exact log or a place; the whole window
--                        for a fixed window, counter or calendar
--            later       how long after a sub-window's start its admissions are recorded; equal to
--                        the window only for the counter
--            lease       only in 'any' and 'settle': microseconds for which the units are reserved,
--                        or 0. A lease is at most the window, except a prefetch's. A prefetch's
--                        lease is its life plus a window: a process spends the units during the
--                        life, and they count for one more window
--          ids      for each check, whose charges take the next keys in order: the first copy's id,
--                   in eight bytes; the other copies' ids count up from it. For a settlement, a
--                   double follows: the time at which the admission was decided
--          and only in 'any' and 'settle'
--          again    'again' if an earlier try may have counted the checks, or settled the
--                   admission; otherwise ''
--          then for each charge
--            ends   the times at which the calendar's periods end, or ''
--            mode   for a check: '' if the charge may refuse it and takes its units, 'shadow' if it
--                   never refuses it, 'left' if it takes nothing, 'left shadow' for both, 'spent'
--                   if it takes its units even beyond the limit; for a settlement: the real cost,
--                   after 'spent ' if the units were spent, and after 'refund ' if they were
--                   certainly counted, possibly without an id; with any other word, the charge is
--                   not settled
--        or, with the server's clock, a short form
--          for one 'plain' run: its figures and ids, without now and kind
--          for a lone single unit: its id, followed by units and window as doubles, in one argument
--          for a lone check under a fixed window, counter or compact log: its five figures, without
--            an id
-- reply  a list: now, and for each check, if a shorter way counted it, two figures per charge,
--            used   units in the window after the decision
--            reset  microseconds until fewer units are used, or 0 if none are. A time that was read
--                   from an expiry may be too late by up to 1 ms, or by a prefetch's life if the
--                   first entry was a prefetch. `used` may include entries that have left, if the
--                   clock has stepped back or another program has set the expiry
--        for each place to renew, 1 if it was still held, or 0
--        or a record, which every refused check has: a list,
--          admitted how many copies are admitted; for a settlement, 1 if any limit knew the
--                   admission
--          at       the time at which an earlier try counted the check; -1 if none did
--          then for each charge
--            used, reset  as above
--            reserved     how many used units are reserved
--            retry        microseconds until one more copy fits; 0 if the charge does not refuse
--                         any copy
--            least        the retry time if all reserved units were given back now
--        or, if a key failed, a text: the charge's number, from 1, and the error
--        The reply to the short form is a string of doubles, if every check has only figures
--
-- Words     the same in Rust (`window/`, `dispatch/`) and in Lua
--           plain      a charge under an exact log that counts or refuses, and does not reserve
--                      units
--           named      an entry that has an admission's id
--           sum        an entry for units without ids, admitted at one recorded time
--           total      the units in all entries under a key; it is the score of a head
--           head       a member that is not an entry: 'used' for the total, or 'held' for the
--                      reserved units
--           reserved   units that count until they are settled or their lease ends. Renaming their
--                      head 'held' in a later version would start all windows anew
--           settled    an entry that a settlement has left in a key, or a charge's real cost
--           gone       an entry that has left the window, but may still be in the key
--           sub_window the piece of a window whose admissions are recorded under one time
--           copies     equal checks that travel as one
--           single     a check with one plain charge for one unit
--           place      a permit under a concurrent limit: an entry in an exact log, renewed as
--                      long as it is held
--           log        a charge, and the present contents of its key, under any algorithm
-- Cost      O(log n) per charge, for n entries under its key. Each entry that is read or dropped
--           adds O(1), and each that is moved O(log n). A charge reads at most 100 entries for a
--           retry time, moves at most 100 after the clock steps back, and drops at most 500.
--           Together, that takes at most about 0.5 ms.
--           * If more than 100 entries would have to leave, the retry time lasts until the last of
--             those 100 leaves. It is a lower bound.
--           * If more entries have left than may be dropped, and at most 500 stay, the key is
--             rewritten with only those. If more stay, the entries that are not dropped yet do not
--             count in a key without a total. In a key with a total, they count until later checks
--             drop them.
--           * If more entries are ahead of the clock than may be moved at once, each refusal moves
--             the newest ones.
--           * Except under the exact log, a key keeps at most 10,000 named entries. Further units
--             are counted without an id.
-- Numbers   integers up to 2^53 in doubles. They are converted to text with %.0f, since `..` and
--           tostring lose digits, and times are converted to scores with score_of. Numbers from a
--           key are clamped to that range.
-- Writes    A server without memory is one that has used all the memory that it may. It refuses
--           only a script's first write, and only if that write adds something. So a check begins
--           with a ZADD, which such a server refuses, and a settlement begins with a ZREM, which it
--           accepts. A refused check does not add entries. It sets a key's expiry only if it has
--           dropped or moved entries.
-- Errors    An error with one key, such as a wrong type, affects only the check that uses this key.
--           The same holds for an error because memory is used up. An error with the whole server,
--           such as READONLY, ends the script before it writes.
-- Server    Redis 6.2 or newer, or Valkey. Commands: TIME PEXPIRETIME ZCARD ZCOUNT ZRANGE ZREVRANGE
--           ZRANGEBYSCORE ZSCORE ZADD ZREM ZREMRANGEBYRANK PEXPIRE PEXPIREAT UNLINK.

local call, try, ceil = redis.call, redis.pcall, math.ceil
local short = #ARGV == 1 and ARGV[1]
local now, score = not short and #ARGV > 2 and tonumber(ARGV[1])  -- the time of all checks, and the same time as a score
local is_server_time = not now
-- How many milliseconds a key outlives its last unit, since a promoted replica's clock may be
-- ahead. A test's clock may stand still, while keys expire by the server's clock. So keys live
-- longer in a test.
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

-- True if a key's expiry can be read, and tells its entries' times. The command that reads it,
-- PEXPIRETIME, came with Redis 7.0, as did REDIS_VERSION_NUM. So a server that has one of them has
-- the other. If entries follow a test's clock, an expiry does not tell their times.
local is_expiry_telling = is_server_time and redis.REDIS_VERSION_NUM
