-- How a counter counts: the units of the present window of the clock, and those of the one before by how much of it the
-- sliding window still overlaps, rounded up to whole units. What has an id of its own counts in full.
--
-- The two numbers stand in one member behind all others, with the start of their window: its score is infinite. What has an
-- id is kept and summed up as in a log. The key expires two windows + SLACK after the start of the newest window.

local counter = {}

-- The units of two windows, of which the present one has begun at `start`.
function counter.estimate(charge, current, previous, start, time)
  return current + ceil(previous * (start + charge.window - time) / charge.window)
end

local function estimate_now(charge)
  return counter.estimate(charge, charge.current, charge.previous, charge.at, now)
end

-- Notes the numbers as they are in the present window. What was counted in a later one counts as counted now.
local function note_counts(charge, start, current, previous)
  if start > charge.at then
    charge.ahead = { start = start, current = current, previous = previous }
    charge.current = current + previous
  elseif start == charge.at then
    charge.current, charge.previous = current, previous
  elseif start + charge.window >= charge.at then
    charge.previous = current
  end
end

-- Looks at a counter, and notes in the charge how it stands. Returns an error text if it cannot be read.
function counter.look(charge, key)
  local last = pcall('ZREVRANGE', key, 0, 3, 'WITHSCORES')
  if last.err then return last.err end
  charge.current, charge.previous, charge.counts, charge.ahead = 0, 0, nil, nil
  local start, current, previous = string.match(last[1] or '', '^(%d+):(%d+):(%d+)$')
  if start then
    charge.heads, charge.counts = 1, last[1]
    note_counts(charge, clamped(tonumber(start)), clamped(tonumber(current)), clamped(tonumber(previous)))
  end
  read_heads(charge, last, 2 * charge.heads + 1)
  local oldest = last[2 * charge.heads + 2]
  if oldest and time_in(oldest) + charge.window <= now then
    trim(charge, key, call('ZCOUNT', key, charge.cutoff, '+inf') - charge.heads)
  end
  charge.oldest = charge.sum > 0 and time_of(charge, key, 0) or nil
  charge.used = charge.sum + estimate_now(charge)
end

-- Writes the numbers down, as of the present window. Returns whether they are the first of it.
local function write_counts(charge, key)
  local counts, before = text(charge.at) .. ':' .. text(charge.current) .. ':' .. text(charge.previous), charge.counts
  if counts == before then return false end
  call('ZADD', key, '+inf', counts)
  if before then
    call('ZREM', key, before)
  else
    charge.heads = charge.heads + 1
  end
  charge.counts, charge.ahead = counts, nil
  return not before or string.match(before, '^%d+') ~= text(charge.at)
end

-- The first moment from `from` on at which at most so many units are estimated.
local function first_fit(charge, most, from)
  local start, current, previous = charge.at, charge.current, charge.previous
  local ahead = charge.ahead
  -- Until the window of the clock in which they were counted, nothing changes.
  if ahead and current > most then
    start, current, previous, from = ahead.start, ahead.current, ahead.previous, max(from, ahead.start)
  end
  while from >= start + charge.window do
    if current + previous == 0 then return from end
    start, current, previous = start + charge.window, 0, current
  end
  while true do
    if counter.estimate(charge, current, previous, start, from) <= most then return from end
    local stop = start + charge.window
    if current <= most then
      -- The estimate is of doubles, so the moment it comes down to is looked for by a step or two.
      local fits = max(stop - min(floor((most - current) * charge.window / previous), charge.window), from + 1)
      while fits > from + 1 and counter.estimate(charge, current, previous, start, fits - 1) <= most do
        fits = fits - 1
      end
      while fits < stop and counter.estimate(charge, current, previous, start, fits) > most do
        fits = fits + 1
      end
      if fits < stop then return fits end
    end
    start, from, current, previous = stop, stop, 0, current
  end
end

-- Whether this very admission has been counted before: 1 or 0, and under which time.
function counter.counted_before(charge, key, id)
  local reserved = found(charge, key, named(charge, id, charge.cost, true))
  local at = reserved or found(charge, key, named(charge, id, charge.cost))
  return at and 1 or 0, at
end

-- Counts units under an id.
function counter.admit(charge, key, id, units, is_given)
  local is_first = true
  if (charge.lease > 0 or is_given) and not is_full(charge, key) then
    add_to_sum(charge, key, units, charge.is_reserving and units)
    write_named(charge, key, charge.kept_at, named(charge, id, units, charge.is_reserving), units)
    charge.oldest = min(charge.oldest or charge.kept_at, charge.kept_at)
  else
    charge.used, charge.current = charge.used + units, charge.current + units
    is_first = write_counts(charge, key)
  end
  if is_first or not outlives(key, charge, charge.at, 2) then outlive(key, charge, charge.at, 2) end
end

-- Microseconds until fewer units are used: until the estimate falls, or the oldest of what has an id leaves.
function counter.reset(charge)
  if charge.is_behind then return 1 end
  local estimate = estimate_now(charge)
  local falls = estimate > 0 and first_fit(charge, estimate - 1, now)
  local leaves = charge.oldest and charge.oldest + charge.window
  local sooner = falls and leaves and min(falls, leaves) or falls or leaves
  return sooner and sooner - now or 0
end

-- The first moment at which at most so many units are used, if those with an id, which leave with these entries, are so many
-- together. Where more of them have to leave than one check may look at, it is at least not before.
local function first_room(charge, most, sum, entries, is_counted)
  local from = now
  -- Between two departures of what has an id, only the estimate falls.
  for i = 1, #entries, 2 do
    if is_counted(entries[i]) then
      local leaves = min(time_in(entries[i + 1]), now) + charge.window
      local fits = most >= sum and first_fit(charge, most - sum, from)
      if fits and (fits < leaves or fits == from) then return fits end
      sum, from = sum - weight(charge, entries[i]), max(leaves, from)
    end
  end
  if sum > 0 and #entries == 2 * LOOKED_AT then return from end
  return first_fit(charge, max(0, most - sum), from)
end

-- Microseconds until at most so many units are used, which are more now, at least. And the same if all reserved units were
-- given back now.
function counter.wait(charge, key, most)
  if charge.ahead then
    -- A server without memory lets the numbers go, and then come again.
    call('ZREM', key, charge.counts)
    charge.counts, charge.heads, charge.ahead = nil, charge.heads - 1, nil
    write_counts(charge, key)
    outlive(key, charge, charge.at, 2)
  end
  if charge.sum > 0 then pull_back(charge, key) end
  if charge.is_behind then return 1, 0 end
  local entries = charge.sum > 0 and next_to_leave(charge, key) or {}
  local wait = first_room(charge, most, charge.sum, entries, function() return true end) - now
  if charge.reserved == 0 then return wait, wait end
  local function is_settled(member)
    return not is_reserved(charge, member)
  end
  return wait, first_room(charge, most, charge.sum - charge.reserved, entries, is_settled) - now
end

-- Adds units to the window of the clock in which they were admitted, unless it counts no longer.
local function add_at(charge, start, units)
  if start >= charge.at then
    charge.current = charge.current + units
  elseif start + charge.window >= charge.at then
    charge.previous = charge.previous + units
  end
end

-- Sets what an admission has cost, as of when it was, and returns whether it was known.
function counter.settle(charge, key, id, time, cost)
  local member = named(charge, id, charge.cost, charge.is_reserving)
  local at = found(charge, key, member)
  if at and at <= kept_at(charge, time) then
    -- The first write, so that a server without memory lets units be given back.
    call('ZREM', key, member)
    add_to_sum(charge, key, -charge.cost, charge.is_reserving and -charge.cost)
    if cost > 0 then
      add_at(charge, recorded_at(charge, charge.lease > 0 and min(time, now) or at), cost)
      write_counts(charge, key)
    end
  elseif is_late(charge, time, cost) and not has_settled(charge, key, id, time) then
    add_to_sum(charge, key, cost)
    write_settled(charge, key, string.char(KEPT) .. named_settled(id, cost), time)
  else
    return false
  end
  charge.used = charge.sum + estimate_now(charge)
  if charge.used == 0 and charge.current + charge.previous == 0 then
    call('UNLINK', key)
    charge.oldest = nil
    return true
  end
  charge.oldest = charge.sum > 0 and time_of(charge, key, 0) or nil
  -- All that is left may be of the window before.
  local newest = call('ZRANGE', key, 0, 0, 'WITHSCORES')
  local is_present = charge.current > 0 or charge.sum > 0 and time_in(newest[2]) > charge.at
  outlive(key, charge, is_present and charge.at or charge.at - charge.window, 2)
  return true
end
