-- The heads of a key, and dropping entries that have left.
--
-- Takes  call, clamped, DROPPED, LARGEST, NAMED, now, outlive, score_of, text, time_in, weigh_all
-- Gives  heads_of, time_of, countable, add_to_total, add_named, sum_at, add_to_sum, trim
--
-- Heads     As long as all entries are of one unit, their number is the total. After that, one more member, 'used', has the
--           total of all entries as its score. This score is positive, and the scores of entries are negative, so 'used'
--           comes after all entries. While units are reserved, another member, 'held', has their number as its score. This
--           number is never above the total, so 'held' has the rank before 'used'. Both names are shorter than an id.

-- How many heads a key has.
local function heads_of(log)
  return (log.has_total and 1 or 0) + (log.has_held and 1 or 0)
end

-- The time of the entry of this rank, where 0 is the oldest entry that has not left the window.
local function time_of(log, rank)
  rank = rank + heads_of(log) + log.gone
  local at = call('ZREVRANGE', log.key, rank, rank, 'WITHSCORES')[2]
  return at and time_in(at) or now
end

-- How many of these units the total of a log can still take. Doubles are exact up to LARGEST.
local function countable(log, units)
  return math.max(0, math.min(units, LARGEST - 1 - log.total))
end

-- Adds `units` to the total, and `reserved` to the reserved units. Negative numbers take units
-- away.
local function add_to_total(log, units, reserved)
  -- If the key has no total yet, it gets one here. Later, each entry that has left is dropped, and
  -- its units are taken from the total. So the total has to include these units from the start.
  if not log.has_total then log.total = log.total + log.gone end
  log.used, log.total = clamped(log.used + units), clamped(log.total + units)
  log.reserved = math.min(clamped(log.reserved + (reserved or 0)), log.total)
  if log.reserved > 0 then
    call('ZADD', log.key, log.total, 'used', log.reserved, 'held')
  else
    call('ZADD', log.key, log.total, 'used')
    if log.has_held then call('ZREM', log.key, 'held') end
  end
  log.has_total, log.has_held = true, log.reserved > 0
end

-- Counts units in an entry of their own, and in the total.
local function add_named(log, time, member, units)
  local reserved = log.is_reserving and units or 0
  add_to_total(log, units, reserved)
  -- If an id was given again, the key may have the same member already, from an entry that has
  -- left. Then ZADD has replaced that entry, and no later check takes its units from the total.
  if call('ZADD', log.key, score_of(time), member) == 0 then add_to_total(log, -units, -reserved) end
end

-- The units of the sum of the recorded time that has this score, and the member of the sum, if
-- there is one.
local function sum_at(log, score)
  -- Among the entries of one time, the entry without an id comes first.
  local member = call('ZRANGEBYSCORE', log.key, score, score, 'LIMIT', '0', '1')[1]
  if not member or string.byte(member) == NAMED then return 0 end
  return clamped(tonumber(string.sub(member, 3))), member
end

-- Adds units to the sum of their recorded time, or begins that sum. A sum without units is removed.
-- Returns whether there was such a sum.
local function add_to_sum(log, time, units)
  local score = score_of(time)
  local before, earlier = sum_at(log, score)
  units = units + before
  if time == log.at then log.current = units end
  local number = math.floor(time / log.sub_window)
  local bytes = string.char(number % NAMED, math.floor(number / NAMED) % 256)
  local sum = bytes .. text(units)
  -- The earlier sum is removed before the new one is added. With both, a compact log could exceed
  -- 128 entries for a moment, and then Redis changes the encoding of the set for good.
  if earlier and earlier ~= sum then call('ZREM', log.key, earlier) end
  -- A sum ahead of the clock may have these bytes and units, too. Then ZADD has moved it to this
  -- time, and a zero makes another member of this one.
  while units > 0 and call('ZADD', log.key, score, sum) == 0 and sum ~= earlier do
    sum = bytes .. '0' .. string.sub(sum, 3)
  end
  return before > 0
end

-- Writes a key anew with these entries, each with its score. Redis frees the many other entries
-- outside its main thread.
local function keep_only(log, entries)
  local scored, has_total = {}, log.has_total and #entries > 0  -- without entries, no total is left
  for i = #entries, 1, -1 do
    scored[#scored + 1] = entries[i]
  end
  call('UNLINK', log.key)
  if #entries > 0 then call('ZADD', log.key, unpack(scored)) end
  log.has_total, log.has_held = false, false
  log.total, log.reserved = weigh_all(log, entries, 2)
  if has_total then add_to_total(log, 0) end
  if #scored > 0 then outlive(log, math.max(log.at, time_in(entries[2]))) end
end

-- Drops entries that have left the window, and notes in the log how many of them are still in the
-- key. One check drops a bounded number of entries. In a key without a total, the entries that it
-- does not drop do not count. In a key with a total, these entries count until a later check drops
-- them.
local function trim(log, gone)
  local heads, dropped = heads_of(log), math.min(gone, DROPPED)
  local live = call('ZCARD', log.key) - gone - heads
  if live == 0 or dropped < gone and live <= DROPPED then
    return keep_only(log, live > 0 and call('ZRANGE', log.key, 0, live - 1, 'WITHSCORES') or {})
  end
  local left = log.has_total and call('ZREVRANGE', log.key, heads, heads + dropped - 1)
  -- This is the first write, and it only removes entries. A server without memory accepts it, and
  -- then also the writes of the totals after it.
  call('ZREMRANGEBYRANK', log.key, -heads - dropped, -heads - 1)
  if left then
    local units, reserved = weigh_all(log, left, 1)
    add_to_total(log, -units, -reserved)
  else
    log.total = live
  end
  log.gone = gone - dropped
end
