-- The heads of a key, and dropping entries that have left.
--
-- Takes  byte, call, char, clamped, DROPPED, floor, max, min, NAMED, outlive, score_of, text,
--        time_in, weigh, weigh_all
-- Gives  read_totals, add_to_total, add_named, add_to_sum, trim
--
-- Heads     As long as all entries are of one unit, their number is the total. After that the score of one more member,
--           'used', is the total of all entries. It is positive, so 'used' has the last rank. While units are reserved, the
--           score of 'held' is their total. It has the rank before, since it is never greater. Neither has as many bytes as
--           an id. The numbers of a counter have a head behind these two.

-- Reads the total and the reserved units. `last` has members and scores from the last rank on, and
-- the heads begin at `place`.
local function read_totals(log, last, place)
  -- Not of our making is a 'held' above the total. It must not hide that.
  local used, held = place, place + 2
  if last[held] == 'used' and last[used] == 'held' then used, held = held, used end
  if last[used] ~= 'used' then return end
  log.has_total, log.total, log.heads = true, clamped(tonumber(last[used + 1])), log.heads + 1
  if last[held] ~= 'held' then return end
  log.reserved, log.heads = min(clamped(tonumber(last[held + 1])), log.total), log.heads + 1
end

-- Sets the total and the reserved units, and writes them.
local function write_totals(log, total, reserved)
  local before = log.reserved
  -- Not by what ZADD adds: a member of this name that is no head is not of our making, and becomes
  -- one.
  if not log.has_total then log.has_total, log.heads = true, log.heads + 1 end
  log.total = clamped(total)
  log.reserved = min(clamped(reserved), log.total)
  if log.reserved > 0 then
    call('ZADD', log.key, log.total, 'used', log.reserved, 'held')
    if before == 0 then log.heads = log.heads + 1 end
  else
    call('ZADD', log.key, log.total, 'used')
    if before > 0 then log.heads = log.heads - call('ZREM', log.key, 'held') end
  end
end

-- Adds units to the total, `reserved` of them reserved, or takes them away.
local function add_to_total(log, units, reserved)
  -- An entry that has left leaves the total when it is dropped. So it has to be in it from the
  -- start.
  if not log.has_total then log.total = log.total + log.gone end
  log.used = clamped(log.used + units)
  write_totals(log, log.total + units, log.reserved + (reserved or 0))
end

-- Counts units in an entry of their own, and in the total.
local function add_named(log, time, member, units)
  local reserved = log.is_reserving and units or 0
  add_to_total(log, units, reserved)
  -- Where an id was given again, one of as many units may stand there that has left: it is then no
  -- longer there to be dropped.
  if call('ZADD', log.key, score_of(time), member) == 0 then
    add_to_total(log, -units, -reserved)
    log.gone = log.gone - 1
  end
end

-- Adds units to those without an id that were admitted at the same recorded time.
local function add_to_sum(log, time, units)
  local at = score_of(time)
  -- Among entries of one time, that without an id is the first.
  local earlier = call('ZRANGEBYSCORE', log.key, at, at, 'LIMIT', 0, 1)[1]
  if earlier and byte(earlier) == NAMED then earlier = nil end
  if earlier then units = units + weigh(log, earlier) end
  local part = floor(time / log.part)
  local sum = char(part % NAMED, floor(part / NAMED) % 256) .. text(units)
  -- A compact log must not have one entry more even for a moment: beyond 128 Redis changes how it
  -- keeps a set, for good.
  if earlier and earlier ~= sum then call('ZREM', log.key, earlier) end
  call('ZADD', log.key, at, sum)
end

-- Writes a key anew with these entries, each with its score. The many others are freed off the
-- server's main thread.
local function keep_only(log, entries)
  local scored, newest = {}, log.at
  for i = #entries, 1, -1 do
    scored[#scored + 1] = entries[i]
  end
  call('UNLINK', log.key)
  if log.counts then call('ZADD', log.key, '+inf', log.counts) end
  if #entries > 0 then
    call('ZADD', log.key, unpack(scored))
    log.oldest, newest = time_in(scored[1]), max(newest, time_in(entries[2]))
  end
  log.heads = log.counts and 1 or 0
  if log.has_total then
    log.has_total, log.reserved = false, 0
    write_totals(log, weigh_all(log, entries, 2))
  end
  outlive(log, newest)
end

-- Drops entries that have left the window, and notes in the log how many are still there. One check
-- drops a bounded number: beyond that, entries of one unit are not counted, and others count until
-- a later check drops them.
local function trim(log, gone)
  local live, dropped = call('ZCARD', log.key) - gone - log.heads, min(gone, DROPPED)
  if not log.has_total then log.total = live end
  if live == 0 and not log.is_counter then
    call('UNLINK', log.key)
    log.total, log.reserved, log.heads, log.has_total = 0, 0, 0, false
  elseif dropped < gone and live <= DROPPED then
    keep_only(log, live > 0 and call('ZRANGE', log.key, 0, live - 1, 'WITHSCORES') or {})
  else
    local last, units, reserved = -1 - log.heads, 0, 0
    if log.has_total then
      units, reserved = weigh_all(log, call('ZREVRANGE', log.key, log.heads, log.heads + dropped - 1), 1)
    end
    -- The first write, so that a server without memory lets the totals follow.
    call('ZREMRANGEBYRANK', log.key, last + 1 - dropped, last)
    if log.has_total then write_totals(log, log.total - units, log.reserved - reserved) end
    log.gone = gone - dropped
  end
end
