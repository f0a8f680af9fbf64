-- The sums of the entries of a key, and dropping entries that have left.

-- Reads the heads into the charge. `last` has members and scores from the last rank on, and the heads begin at `place`.
local function read_heads(charge, last, place)
  -- Not of our making is a 'held' above the sum. It must not hide that.
  local sum, held = place, place + 2
  if last[held] == 'used' and last[sum] == 'held' then sum, held = held, sum end
  if last[sum] ~= 'used' then return end
  charge.is_summed, charge.sum, charge.heads = true, clamped(tonumber(last[sum + 1])), charge.heads + 1
  if last[held] ~= 'held' then return end
  charge.reserved, charge.heads = min(clamped(tonumber(last[held + 1])), charge.sum), charge.heads + 1
end

-- Writes the sums. `reserved_before` is the sum of reserved units that the key has.
local function write_heads(charge, key, reserved_before)
  if charge.reserved > 0 then
    call('ZADD', key, charge.sum, 'used', charge.reserved, 'held')
    if reserved_before == 0 then charge.heads = charge.heads + 1 end
  else
    call('ZADD', key, charge.sum, 'used')
    if reserved_before > 0 then
      call('ZREM', key, 'held')
      charge.heads = charge.heads - 1
    end
  end
end

-- Adds units to the sum, `reserved` of them reserved, or takes them away, and writes the sums.
local function add_to_sum(charge, key, units, reserved)
  if not charge.is_summed then
    -- An entry that has left leaves the sum when it is dropped. So it has to be in it from the start.
    charge.is_summed, charge.heads, charge.sum = true, charge.heads + 1, charge.sum + charge.expired
  end
  charge.sum, charge.used = clamped(charge.sum + units), clamped(charge.used + units)
  local before = charge.reserved
  charge.reserved = min(clamped(before + (reserved or 0)), charge.sum)
  write_heads(charge, key, before)
end

-- Counts units in an entry of their own, and in the sum.
local function add_entry(charge, key, time, member, units)
  local reserved = charge.is_reserving and units or 0
  add_to_sum(charge, key, units, reserved)
  -- Where an id was given again, one of as many units may stand there that has left: it is then no longer there to be
  -- dropped.
  if call('ZADD', key, score_of(time), member) == 0 then
    add_to_sum(charge, key, -units, -reserved)
    charge.expired = charge.expired - 1
  end
end

-- Writes a key anew with a few entries. The many others are freed off the server's main thread.
local function keep_only(charge, key, entries)
  local scored = {}
  local function keep(at, member)
    scored[#scored + 1], scored[#scored + 2] = at, member
  end
  if charge.counts then keep('+inf', charge.counts) end
  if charge.is_summed then keep(charge.sum, 'used') end
  if charge.reserved > 0 then keep(charge.reserved, 'held') end
  charge.heads = #scored / 2
  for i = 1, #entries, 2 do
    keep(entries[i + 1], entries[i])
  end
  call('UNLINK', key)
  if #scored == 0 then return end
  call('ZADD', key, unpack(scored))
  charge.oldest = #entries > 0 and time_in(entries[#entries]) or nil
  outlive_entries(charge, key, max(charge.at, #entries > 0 and time_in(entries[2]) or 0))
end

-- Drops entries that have left the window, and notes in the charge how many units are left. One check drops a bounded
-- number: beyond that, entries of one unit are not counted, and others count until a later check drops them.
local function trim(charge, key, expired)
  local live, dropped = call('ZCARD', key) - expired - charge.heads, min(expired, DROPPED)
  if live == 0 and not charge.is_counter then
    call('UNLINK', key)
    charge.sum, charge.reserved, charge.heads, charge.is_summed = 0, 0, 0, false
  elseif dropped < expired and live <= DROPPED then
    local entries = live > 0 and call('ZRANGE', key, 0, live - 1, 'WITHSCORES') or {}
    charge.sum, charge.reserved = weights(charge, entries, 2)
    keep_only(charge, key, entries)
  else
    local last, before = -1 - charge.heads, charge.reserved
    if charge.is_summed then
      local units, reserved = weights(charge, call('ZREVRANGE', key, charge.heads, charge.heads + dropped - 1), 1)
      charge.sum = clamped(charge.sum - units)
      charge.reserved = min(clamped(before - reserved), charge.sum)
    else
      charge.sum = live
    end
    -- The first write, so that a server without memory lets the sums follow.
    call('ZREMRANGEBYRANK', key, last + 1 - dropped, last)
    if charge.is_summed then write_heads(charge, key, before) end
    charge.expired = expired - dropped
  end
end
