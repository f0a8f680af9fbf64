-- Decides a batch of checks and settles admissions, one after the other. A check is admitted whole
-- or refused whole. Equal checks of several callers may come as copies of one check: the copies are
-- decided as if they came one after the other.
--
-- Takes  nothing
-- Gives  SLACK, call, try, ceil, short, now, score, is_server_time, is_expiry_telling
--
-- The script is the Lua files of this folder, as mod.rs lists them. lone.lua decides a single unit
-- that is alone, by the rule in unit.lua, and lone_sum.lua a lone check of a fixed window, a
-- counter or a compact log. run.lua goes through any other batch: it decides single units itself,
-- renews places, and sends other checks one of three ways. sums.lua decides most checks of one
-- fixed window, counter or compact log. take.lua decides checks of exact logs that have capacity,
-- and of places. The general way decides any check, and settles. Its files say how entries look
-- (entries.lua), what a key has (totals.lua, log.lua), and what is done with a key (check.lua,
-- settle.lua). In each call, Lua makes all functions of a script anew, with the variables that the
-- functions share. So functions are made only when they are needed. Each function gets, as an
-- argument, the log or charge that it reads and changes.
--
-- A shorter way only decides what it can decide as the general way would: with the same reply, and
-- the same entries in the key. Here, too, a server without memory refuses the first write.
--
-- KEYS   one sorted set a charge
-- ARGV   now        microseconds since the Unix epoch, or '' for the server's own clock
--        then runs of checks that differ only in their keys and ids
--          kind     'plain': charges of exact logs, or one charge of a fixed window, a counter or a compact log, that count or
--                     refuse, at any cost but 0, under ids that are new
--                   'any': any checks
--                   'settle': admissions, which are settled
--                   'renew': a place, which is renewed
--          figures  doubles, little-endian: the copies of each check, and then for each charge
--            units  the limit
--            cost   units to take; 0 asks without spending
--            window microseconds; of a place its life, negated
--            sub_window  the length of a sub-window; 0 for an exact log and a place; the window for a fixed window, a counter and
--                       a calendar
--            later  how much later than its start the admissions of a sub-window are recorded. If this is the window, the
--                       algorithm is the counter
--            lease  only of 'any' and 'settle': microseconds for which the units are reserved; 0 if no unit is. A lease is at most
--                       the window, except for a prefetch. The lease of a prefetch is its life and a window: a process spends
--                       the units during the life, and they count for a window after the life
--          ids      for each check, whose charges take the next keys, in order: eight bytes, the id of the first copy; the ids of
--                     the other copies follow it. If it is an admission that is settled, a double follows: when it was decided
--          and only of 'any' and 'settle'
--          again    'again' if an earlier try may have counted the checks, or settled the admission, and otherwise ''
--          then for each charge
--            ends   when the periods of a calendar end, or ''
--            mode   of a check: '' if the charge refuses and takes its units, 'shadow' if it never refuses, 'left' if
--                       it takes nothing, 'left shadow' for both, 'spent' if it takes its units even beyond the limit; of
--                       an admission: the real cost, with 'spent ' in front of it if its units were spent, and 'refund ' if they were
--                       certainly counted, possibly without an id; or another word to leave the charge as it is
--        or, by the server's clock, a short form
--          of one run of 'plain': its figures and ids, without now and kind
--          of a single unit that is alone: its id, and as doubles units and window, in one argument
--          of one check of a fixed window, a counter or a compact log that is alone: its five figures, without an id
-- reply  a list: now, then for each check two figures a charge, if a shorter way than the general one has counted the check,
--            used   units in the window after the decision
--            reset  microseconds until fewer units are used, 0 if none are used. A time that was read from an expiry may be
--                   too late: by up to 1 millisecond, or by the life of a prefetch that was the first entry. Also, `used` may count
--                   entries that have left, if the clock has stepped back or another program has set the expiry
--        of each place that is renewed, 1 if the place was held, or 0
--        or a record, as of each refusal, which is a list,
--          admitted how many copies are admitted; of an admission that is settled, 1 if any limit knew the admission
--          at       the time at which an earlier try has counted the check; -1 if none has
--          then for each charge
--            used, reset  as above
--            reserved     how many of the used units are reserved
--            retry        microseconds until this charge no longer refuses one more copy, 0 if it refuses no copy
--            least        the retry time if all reserved units were given back now
--        or, if a key failed, a text: the number of its charge, from 1, and the error
--        The reply to the short form is a string of doubles, if each check has only figures
--
-- Words     the same in Rust (`window/`, `dispatch/`) and in Lua
--           plain      a charge of an exact log that counts or refuses, and reserves nothing
--           named      an entry that has the id of an admission
--           sum        an entry of units without ids, admitted at one recorded time
--           total      the units of all entries of a key; it is the score of a head
--           head       a member that is no entry: the total 'used', or the reserved units
--           reserved   units that count until they are settled or their lease ends. Their head has the name 'held'. If a later
--                      version gave this head another name, all windows would start anew
--           settled    an entry that a settlement has left, or a charge's real cost
--           gone       an entry that has left the window, and may still be in the key
--           sub_window the part of a window whose admissions are recorded under one time
--           copies     equal checks that travel as one
--           single     a check of one unit of one plain charge
--           place      an entry of a concurrent limit: an exact log whose entries are renewed as long as they are held
--           log        a charge, and what its key has at present, whatever the algorithm
-- Cost      O(log n) a charge, where n is the number of entries in its key. Each entry that is read
--           or dropped adds O(1), and each that is moved O(log n). A charge reads at most 100
--           entries for a retry time, moves at most 100 after a step back of the clock, and drops
--           at most 500. At most, this takes some 0.5 ms.
--           * If more than 100 entries would have to leave, the retry time is the moment at which the last of the 100 that
--             were read leaves. That is a lower bound.
--           * If more entries have left than may be dropped, and at most 500 entries stay, the key is written anew with only
--             the entries that stay. If more stay, the entries that were not dropped do not count in a key without a total. In
--             a key with a total, the entries that were not dropped count until later checks drop them.
--           * If more entries are ahead of the clock than may be moved, each refusal moves the newest of them.
--           * Under an algorithm other than the log, a key keeps at most 10,000 named entries. Further units have no id.
-- Numbers   integers up to 2^53 in doubles. In texts they are written with %.0f, since `..` and tostring lose digits.
--           Times become scores by score_of. Numbers that are read from a key are clamped to that range.
-- Writes    A server without memory, which is one whose memory is used up, refuses only the first write of a script, and only if
--           this write adds something. So a check begins with a ZADD, which such a server refuses, and a settlement begins
--           with a ZREM, which it accepts. The refusal of a check adds no entry. It moves the expiry of a key only if it has
--           dropped or moved entries.
-- Errors    An error of one key, such as a wrong type, is the outcome of the check that met it. So is the error of a server
--           without memory. An error of the server, such as READONLY, ends the script before anything is written.
-- Server    Redis 6.2 or newer, or Valkey. Commands: TIME PEXPIRETIME ZCARD ZCOUNT ZRANGE ZREVRANGE ZRANGEBYSCORE ZSCORE
--           ZADD ZREM ZREMRANGEBYRANK PEXPIRE PEXPIREAT UNLINK.

local call, try, ceil = redis.call, redis.pcall, math.ceil
local short = #ARGV == 1 and ARGV[1]
local now, score = not short and #ARGV > 2 and tonumber(ARGV[1])  -- the time of all checks, and the same time as a score
local is_server_time = not now
-- For how many milliseconds a key outlives its last unit, since the clock of a promoted replica may
-- be ahead. If the clock is not the server's, it is that of a test. The clock of a test may stand
-- still, while keys expire by the server's clock. So the keys of a test live longer.
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

-- Whether the expiry of a key can be read, and tells the times of the key's entries. PEXPIRETIME,
-- which reads it, came with Redis 7.0, as REDIS_VERSION_NUM did. So a server that has the one has
-- the other. If entries have the time of a clock that is not the server's, an expiry tells nothing
-- about the entries.
local is_expiry_telling = is_server_time and redis.REDIS_VERSION_NUM
