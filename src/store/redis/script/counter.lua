-- How a counter counts: the units of the present window of the clock, and those of the one before by how much of it the
-- sliding window still overlaps, rounded up to whole units. What has an id of its own counts in full.
--
-- It is an entry a window, and one for each id: few enough to be read whole. It expires two windows + SLACK after the
-- start of the newest window, or a window after the newest id.

local counter = {}

-- Looks at a counter, and notes in the charge how it stands. Returns an error text if it cannot be read.
function counter.look(charge, key)
  local entries = pcall('ZREVRANGE', key, 0, -1, 'WITHSCORES')
  if entries.err then return entries.err end
  local start = charge.at
  charge.current, charge.previous, charge.held, charge.departures = 0, 0, 0, {}
  charge.gone, charge.is_ahead = {}, false
  for i = 1, #entries, 2 do
    local member, time, units = entries[i], -tonumber(entries[i + 1]), weight(charge, entries[i])
    local is_kept = string.byte(member) == KEPT
    if is_kept and time + charge.window > now then
      charge.held = charge.held + units
      table.insert(charge.departures, { at = min(time, now) + charge.window, units = units })
      charge.is_ahead = charge.is_ahead or time > now
    elseif not is_kept and time >= start then
      charge.current = charge.current + units
      charge.is_ahead = charge.is_ahead or time > start
    elseif not is_kept and time >= start - charge.window then
      charge.previous = charge.previous + units
    else
      table.insert(charge.gone, member)
    end
  end
  charge.used = charge.held + counter.estimate(charge, charge.current, charge.previous, start, now)
end

-- The units of two windows, of which the present one has begun at `start`.
function counter.estimate(charge, current, previous, start, time)
  return current + ceil(previous * (start + charge.window - time) / charge.window)
end

-- The first moment from `from` on at which at most so many units are estimated.
local function first_fit(charge, most, from)
  local start, current, previous = charge.at, charge.current, charge.previous
  while from >= start + charge.window do
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

-- The time under which something with an id is recorded, if it has not left the window.
local function found(charge, key, member)
  local at = call('ZSCORE', key, member)
  return at and -tonumber(at) + charge.window > now and -tonumber(at)
end

-- Whether this very admission has been counted before.
function counter.counted_before(charge, key, id)
  local held = found(charge, key, named(charge, id, charge.cost, true))
  return (held or found(charge, key, named(charge, id, charge.cost))) and 1 or 0
end

-- Drops what has left the window, all but what has just been written again.
local function forget(charge, key, written)
  for _, member in ipairs(charge.gone) do
    if member ~= written then call('ZREM', key, member) end
  end
end

-- Where the clock has stepped back, what was counted in later windows counts as counted now.
local function pull_back_counts(charge, key)
  local units = 0
  for _, member in ipairs(call('ZRANGEBYSCORE', key, '-inf', '(' .. text(-charge.at))) do
    if string.byte(member) ~= KEPT then
      units = units + weight(charge, member)
      call('ZREM', key, member)
    end
  end
  if units > 0 then join(charge, key, charge.at, units) end
  outlive(key, charge, charge.at, 2)
end

-- Counts units under an id.
function counter.admit(charge, key, id, units, is_given)
  charge.used = charge.used + units
  local written
  if charge.lease > 0 or is_given then
    local is_held = charge.lease > 0
    local time = charge.kept_at
    written = named(charge, id, units, is_held)
    call('ZADD', key, text(-time), written)
    charge.held = charge.held + units
    table.insert(charge.departures, { at = time + charge.window, units = units })
    outlive(key, charge, charge.at, 2)
  else
    charge.current = charge.current + units
    local is_first = join(charge, key, charge.at, units)
    if is_first or not outlives(key, charge, charge.at, 2) then outlive(key, charge, charge.at, 2) end
    if charge.is_ahead then pull_back_counts(charge, key) end
  end
  forget(charge, key, written)
end

function counter.keep() end

-- Microseconds until fewer units are used.
function counter.reset(charge)
  return charge.used > 0 and counter.fit(charge, charge.used - 1) - now or 0
end

-- Microseconds until at most so many units are used.
function counter.wait(charge, key, most)
  if charge.is_ahead then
    pull_back_counts(charge, key)
    for _, member in ipairs(call('ZRANGEBYSCORE', key, '-inf', '(' .. score)) do
      if string.byte(member) == KEPT then call('ZADD', key, score, member) end
    end
  end
  return counter.fit(charge, most) - now
end

-- The first moment from now on at which at most so many units are used.
function counter.fit(charge, most)
  local held, from = charge.held, now
  table.sort(charge.departures, function(one, other) return one.at < other.at end)
  -- Between two departures of what is held, only the estimate falls.
  for _, departure in ipairs(charge.departures) do
    local fits = most >= held and first_fit(charge, most - held, from)
    if fits and (fits < departure.at or fits == from) then return fits end
    held, from = held - departure.units, max(departure.at, from)
  end
  return first_fit(charge, most, from)
end

-- Sets what an admission has cost, as of when it was, and returns whether it was known.
function counter.settle(charge, key, id, time, cost)
  local member = named(charge, id, charge.cost, charge.lease > 0)
  local at = found(charge, key, member)
  if not at or at > kept_at(charge, time) then return false end
  local start = recorded_at(charge, charge.lease > 0 and min(time, now) or at)
  -- The first write, so that a server without memory lets units be given back.
  call('ZREM', key, member)
  if cost > 0 and start >= charge.at - charge.window then
    join(charge, key, min(start, charge.at), cost)
  end
  forget(charge, key)
  counter.look(charge, key)
  -- All that is left may be of the window before.
  local is_present = charge.current > 0
  for _, departure in ipairs(charge.departures) do
    is_present = is_present or departure.at > charge.at + charge.window
  end
  outlive(key, charge, is_present and charge.at or charge.at - charge.window, 2)
  return true
end
