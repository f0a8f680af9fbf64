-- How a counter counts: the units of the present window of the clock, and those of the one before by how much of it the
-- sliding window still overlaps, rounded up to whole units. Entries with an id count in full.
--
-- The two numbers are in one member behind all others, with the start of their window: its score is infinite. Entries with
-- an id are summed up as in a log. The key expires two windows + SLACK after the start of the newest window.

-- The units of two windows, of which the present one has begun at `start`.
local function estimate(charge, current, previous, start, time)
  return current + ceil(previous * (start + charge.window - time) / charge.window)
end

local function estimate_now(charge)
  return estimate(charge, charge.current, charge.previous, charge.at, now)
end

-- Reads the status of a counter into the charge: see `read` in log.lua.
local function read_counter(charge, key)
  local last = pcall('ZREVRANGE', key, 0, 3, 'WITHSCORES')
  if last.err then error(last.err, 0) end
  charge.current, charge.previous, charge.counts, charge.ahead = 0, 0, nil, nil
  local start, current, previous = string.match(last[1] or '', '^(%d+):(%d+):(%d+)$')
  if start then
    charge.heads, charge.counts = 1, last[1]
    start, current, previous = clamped(tonumber(start)), clamped(tonumber(current)), clamped(tonumber(previous))
    if start > charge.at then
      -- The clock has stepped back: units of a later window count as those of now.
      charge.ahead = { start = start, current = current, previous = previous }
      charge.current = current + previous
    elseif start == charge.at then
      charge.current, charge.previous = current, previous
    elseif start + charge.window >= charge.at then
      charge.previous = current
    end
  end
  read_heads(charge, last, 2 * charge.heads + 1)
  local oldest = last[2 * charge.heads + 2]
  if oldest and time_in(oldest) + charge.window <= now then
    trim(charge, key, call('ZCOUNT', key, charge.cutoff, '+inf') - charge.heads)
  end
  charge.oldest = charge.sum > 0 and time_of(charge, key, 0) or nil
  charge.used = charge.sum + estimate_now(charge)
end

-- Writes the numbers of the present window. Returns whether they are the first of it.
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

-- Counts units in the window of the clock in which they were admitted, unless it counts no longer. Returns whether they are
-- the first of the present one.
local function count_at(charge, key, time, units)
  local start = recorded_at(charge, time)
  if start >= charge.at then
    charge.used, charge.current = charge.used + units, charge.current + units
  elseif start + charge.window >= charge.at then
    charge.previous = charge.previous + units
  end
  return write_counts(charge, key)
end

-- The first moment, not before `from`, at which the estimate is at most `most`.
local function falls_to(charge, most, from)
  local start, current, previous = charge.at, charge.current, charge.previous
  local ahead = charge.ahead
  -- Units of a later window stay as they are until it begins.
  if ahead and current > most then
    start, current, previous, from = ahead.start, ahead.current, ahead.previous, max(from, ahead.start)
  end
  while from >= start + charge.window do
    if current + previous == 0 then return from end
    start, current, previous = start + charge.window, 0, current
  end
  while true do
    if estimate(charge, current, previous, start, from) <= most then return from end
    local stop = start + charge.window
    if current <= most then
      -- The estimate is of doubles, so the moment it falls to this may be a step or two beside the computed one.
      local fits = max(stop - min(floor((most - current) * charge.window / previous), charge.window), from + 1)
      while fits > from + 1 and estimate(charge, current, previous, start, fits - 1) <= most do
        fits = fits - 1
      end
      while fits < stop and estimate(charge, current, previous, start, fits) > most do
        fits = fits + 1
      end
      if fits < stop then return fits end
    end
    start, from, current, previous = stop, stop, 0, current
  end
end

-- Writes the numbers of a later window as those of the present one. ZREM comes first, so that a server without memory
-- accepts the ZADD.
local function pull_back_counts(charge, key)
  call('ZREM', key, charge.counts)
  charge.counts, charge.heads, charge.ahead = nil, charge.heads - 1, nil
  write_counts(charge, key)
  outlive(key, charge, charge.at, 2)
end
