-- Reads and writes a key's heads, and drops entries that have left the window.
--
-- Takes  call, clamped, DROPPED, LARGEST, NAMED, now, outlive, score_of, text, time_in, weigh_all
-- Gives  heads_of, time_of, countable, add_to_total, add_named, sum_at, add_to_sum, trim
--
-- Heads     As long as every entry has one unit, the total is the number of entries. After that,
--           one more member, 'used', has the total as its score. The total is positive, and
--           entries' scores are negative, so 'used' comes after all entries. While units are
--           reserved, another member, 'held', has their number as its score. This number is never
--           above the total, so 'held' ranks before 'used'. Both names are shorter than an id.

-- Returns how many heads a key has.
local function heads_of(log)
  return (log.has_total and 1 or 0) + (log.has_held and 1 or 0)
end

-- Returns the time of the entry at this rank. Rank 0 is the oldest entry that has not left the
-- window.
local function time_of(log, rank)
  rank = rank + heads_of(log) + log.gone
  local at = call('ZREVRANGE', log.key, rank, rank, 'WITHSCORES')[2]
  return at and time_in(at) or now
end

-- Returns how many of these units can still be added to a log's total. Doubles are exact up to
-- LARGEST.
local function countable(log, units)
  return math.max(0, math.min(units, LARGEST - 1 - log.total))
end

-- Adds `units` to the total, and `reserved` to the reserved units. Both may be negative.
local function add_to_total(log, units, reserved)
  -- A key without a total gets one here. When an entry that has left is dropped later, its units
  -- are taken from the total. So the total has to include these units from the start.
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

-- Counts units in a separate entry, and adds them to the total.
local function add_named(log, time, member, units)
  local reserved = log.is_reserving and units or 0
  add_to_total(log, units, reserved)
  -- If an id was used before, the key may already have the same member, from an entry that has
  -- left. In this case, ZADD has replaced that entry, and no later check takes its units from the
  -- total.
  if call('ZADD', log.key, score_of(time), member) == 0 then add_to_total(log, -units, -reserved) end
end

-- Returns the units in the sum recorded under this score, and the sum's member, if there is a sum.
local function sum_at(log, score)
  -- Among entries with the same time, the entry without an id comes first.
  local member = call('ZRANGEBYSCORE', log.key, score, score, 'LIMIT', '0', '1')[1]
  if not member or string.byte(member) == NAMED then return 0 end
  return clamped(tonumber(string.sub(member, 3))), member
end

-- Adds units to the sum for their recorded time, or begins a new sum. If no units are left in the
-- sum, removes it. Returns true if there was a sum before.
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
  -- A sum ahead of the clock may have the same bytes and units. In this case, ZADD has moved that
  -- sum to this time, and a zero is inserted to make a different member.
  while units > 0 and call('ZADD', log.key, score, sum) == 0 and sum ~= earlier do
    sum = bytes .. '0' .. string.sub(sum, 3)
  end
  return before > 0
end

-- Rewrites a key so that only these entries are left. `entries` has each entry followed by its
-- score. UNLINK frees the many other entries outside Redis's main thread.
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

-- Drops entries that have left the window, and records in `log.gone` how many of them are still in
-- the key. Each check drops at most a fixed number. In a key without a total, the remaining ones do
-- not count. In a key with a total, they count until a later check drops them.
local function trim(log, gone)
  local heads, dropped = heads_of(log), math.min(gone, DROPPED)
  local live = call('ZCARD', log.key) - gone - heads
  if live == 0 or dropped < gone and live <= DROPPED then
    return keep_only(log, live > 0 and call('ZRANGE', log.key, 0, live - 1, 'WITHSCORES') or {})
  end
  local left = log.has_total and call('ZREVRANGE', log.key, heads, heads + dropped - 1)
  -- The first write only removes entries. So a server without memory accepts it, and also accepts
  -- the later write to the total.
  call('ZREMRANGEBYRANK', log.key, -heads - dropped, -heads - 1)
  if left then
    local units, reserved = weigh_all(log, left, 1)
    add_to_total(log, -units, -reserved)
  else
    log.total = live
  end
  log.gone = gone - dropped
end
