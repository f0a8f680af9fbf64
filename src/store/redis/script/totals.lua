-- A key's heads, and dropping entries that have left.
--
-- Takes  call, clamped, DROPPED, LARGEST, NAMED, now, outlive, score_of, text, time_in, weigh_all
-- Gives  heads_of, time_of, countable, add_to_total, add_named, sum_at, add_to_sum, trim
--
-- Heads     While all entries have one unit, their number is the total. After that, one more
--           member, 'used', has the total as its score. It is positive, and entries' scores are
--           negative, so 'used' comes after all entries. While units are reserved, another member,
--           'held', has their number as its score. It is never above the total, so 'held' ranks
--           before 'used'. Both names are shorter than an id.

-- How many heads a key has.
local function heads_of(log)
  return (log.has_total and 1 or 0) + (log.has_held and 1 or 0)
end

-- The time at this rank, where 0 is the oldest entry that has not left the window.
local function time_of(log, rank)
  rank = rank + heads_of(log) + log.gone
  local at = call('ZREVRANGE', log.key, rank, rank, 'WITHSCORES')[2]
  return at and time_in(at) or now
end

-- How many of these units a log's total can still take. Doubles are exact up to LARGEST.
local function countable(log, units)
  return math.max(0, math.min(units, LARGEST - 1 - log.total))
end

-- Adds `units` to the total, and `reserved` to the reserved units. Both may be negative.
local function add_to_total(log, units, reserved)
  -- A key without a total gets one here. Each entry that has left is dropped later, and its units
  -- are taken from the total, so it has to include them from the start.
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

-- Counts units in their own entry, and in the total.
local function add_named(log, time, member, units)
  local reserved = log.is_reserving and units or 0
  add_to_total(log, units, reserved)
  -- If an id was given again, the key may have the same member, from an entry that has left. ZADD
  -- has then replaced that entry, and later checks do not take its units from the total.
  if call('ZADD', log.key, score_of(time), member) == 0 then add_to_total(log, -units, -reserved) end
end

-- The units in the sum recorded under this score, and its member, if there is one.
local function sum_at(log, score)
  -- Among entries with one time, the entry without an id comes first.
  local member = call('ZRANGEBYSCORE', log.key, score, score, 'LIMIT', '0', '1')[1]
  if not member or string.byte(member) == NAMED then return 0 end
  return clamped(tonumber(string.sub(member, 3))), member
end

-- Adds units to the sum for their recorded time, or begins it. A sum without units is removed.
-- Returns true if there was one.
local function add_to_sum(log, time, units)
  local score = score_of(time)
  local before, earlier = sum_at(log, score)
  units = units + before
  if time == log.at then log.current = units end
  local number = math.floor(time / log.sub_window)
  local bytes = string.char(number % NAMED, math.floor(number / NAMED) % 256)
  local sum = bytes .. text(units)
  -- The earlier sum is removed first. With both, a compact log could exceed 128 entries for a
  -- moment, and then Redis would change the set's encoding for good.
  if earlier and earlier ~= sum then call('ZREM', log.key, earlier) end
  -- A sum ahead of the clock may have the same bytes and units. ZADD has then moved it to this
  -- time, and a zero makes a different member.
  while units > 0 and call('ZADD', log.key, score, sum) == 0 and sum ~= earlier do
    sum = bytes .. '0' .. string.sub(sum, 3)
  end
  return before > 0
end

-- Rewrites a key with these entries, each with its score. UNLINK frees the many others outside
-- Redis's main thread.
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

-- Drops entries that have left the window, and records in `log.gone` how many are still in the key.
-- One check drops a bounded number. In a key without a total, the rest does not count. In a key
-- with a total, it counts until a later check drops it.
local function trim(log, gone)
  local heads, dropped = heads_of(log), math.min(gone, DROPPED)
  local live = call('ZCARD', log.key) - gone - heads
  if live == 0 or dropped < gone and live <= DROPPED then
    return keep_only(log, live > 0 and call('ZRANGE', log.key, 0, live - 1, 'WITHSCORES') or {})
  end
  local left = log.has_total and call('ZREVRANGE', log.key, heads, heads + dropped - 1)
  -- The first write only removes, so a server without memory accepts it, and the totals after it.
  call('ZREMRANGEBYRANK', log.key, -heads - dropped, -heads - 1)
  if left then
    local units, reserved = weigh_all(log, left, 1)
    add_to_total(log, -units, -reserved)
  else
    log.total = live
  end
  log.gone = gone - dropped
end
