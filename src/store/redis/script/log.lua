-- How a log counts under any algorithm.
--
-- Takes  add_named, add_to_sum, add_to_total, call, clamped, countable, entries_of, falls_to, FEW,
--        heads_of, is_expiry_telling, MOST_NAMED, named, named_at, now, outlive, recorded_at,
--        score_of, shared, sum_at, time_in, time_of, trim
-- Gives  counts_of, faded, log_falls_to, finish_of, overlapping, read, is_full, count
--
-- Counter   A sliding window counter, which estimates the used units. Units in the clock's present
--           window count in full. Units in the previous window count in proportion to how much of
--           it the sliding window still overlaps, rounded up to whole units. Entries with an id
--           count in full. Each window's units are in one sum, which is recorded at the window's
--           end. So the previous window's sum leaves the log when the present window ends. By then,
--           none of its units count any more.

-- Returns how many of the `previous` units count at `time`, in the window that ends at `finish`.
-- The `previous` units are from the window before that one.
local function overlapping(log, previous, finish, time)
  return math.ceil(previous * (finish - time) / log.window)
end

-- Returns the end of the present window. If all entries are ahead of the clock, returns the end of
-- the oldest entry's window instead.
local function finish_of(log)
  local oldest = log.oldest or 0
  return math.max(log.at, oldest + -oldest % log.window)
end

-- Returns how many of the previous window's units no longer count.
local function faded(log)
  local finish = finish_of(log)
  if not log.is_counter or finish - log.window < (log.oldest or finish) then return 0 end
  log.previous = math.min(sum_at(log, score_of(finish - log.window)), log.total)
  return log.previous - overlapping(log, log.previous, finish, now)
end

-- Returns the units in a counter's sums for the present and the previous window. For other logs,
-- returns 0 and 0.
local function counts_of(log)
  if not log.is_counter then return 0, 0 end
  log.current = log.current or sum_at(log, score_of(finish_of(log)))
  return log.current, log.previous
end

-- Returns the first moment, not before `from`, at which a counter's estimate is at most `most`. For
-- other logs, returns `from`.
local function log_falls_to(log, most, from)
  return falls_to(most, from, log.window, finish_of(log), counts_of(log))
end

-- Reads a charge's key, and drops the entries that have left. Returns a log, which has all fields
-- of the charge, and
--   key
--   used, total, reserved  the used units, the units in entries, and the reserved units
--   oldest                 the time under which the oldest entry is recorded, if there is one
--   has_total, has_held    true if the key has the head for the total, or for the reserved units
--   gone                   how many entries have left but are still in the key
--   at                     the time under which a new admission is recorded
local function read(charge, key)
  local log = setmetatable({
    key = key, used = 0, total = 0, reserved = 0, gone = 0, at = recorded_at(charge, now),
    has_total = false, has_held = false, previous = 0,  -- a table that grows is slow
    is_counter = charge.later == charge.window, is_reserving = charge.lease and not charge.is_spent,
    -- `needs` is how many units must still be left, and `takes` is how many will be counted.
    needs = charge.is_spent and 0 or charge.cost, takes = charge.is_left and 0 or charge.cost,
  }, { __index = charge })
  -- Counts the entries that have left, and the heads.
  local beyond = call('ZCOUNT', key, score_of(now - log.window), '+inf')
  local last = beyond > 0 and call('ZREVRANGE', key, '0', '1', 'WITHSCORES') or {}
  for i = 1, #last, 2 do
    local units = clamped(tonumber(last[i + 1]))
    if last[i] == 'used' then log.has_total, log.total = true, units end
    if last[i] == 'held' then log.has_held, log.reserved = true, units end
  end
  -- If the reserved units exceed the total, another program has written the key.
  log.reserved = math.min(log.reserved, log.total)
  local gone = beyond - heads_of(log)
  if gone > 0 then
    trim(log, gone)
  elseif not log.has_total then
    log.total = call('ZCARD', key)
  end
  -- If more entries have left than one check may drop, their units are still in the total. In that
  -- case, neither the retry time nor the reset time is known.
  log.is_behind = log.has_total and log.gone > 0
  local oldest = gone == 0 and last[2 * beyond + 2]
  if log.total > 0 then log.oldest = oldest and time_in(oldest) or time_of(log, 0) end
  log.used = log.total - faded(log)
  -- The expiry tells when the oldest entry leaves. The oldest entry was dropped, so the expiry is
  -- set anew.
  if gone > 0 and not log.sub_window and is_expiry_telling and log.oldest then outlive(log, now) end
  return log
end

-- Returns true if a key already has as many named entries as it may have.
local function is_full(log)
  return log.sub_window and call('ZCARD', log.key) >= MOST_NAMED
end

-- Counts copies that are admitted together.
local function count(log, id, copies, is_again)
  local units, time, is_exact = log.takes * copies, log.at, not log.sub_window and not log.lease
  if is_exact and not log.has_total and log.cost == 1 and copies <= FEW then
    call('ZADD', log.key, entries_of(id, copies))
    log.total, log.used = log.total + units, log.used + units
  elseif is_exact or (log.lease or is_again) and not is_full(log) then
    time = named_at(log, now)
    local is_shared = is_exact and copies > 1
    add_named(log, time, is_shared and shared(id, copies, log.cost) or named(log, id, units, log.is_reserving), units)
  else
    units = countable(log, units)
    add_to_total(log, units)
    -- When the sum began, it set an expiry that is late enough for all its units. If expiries
    -- cannot be read, another entry may have set an earlier expiry, so it is set again.
    if add_to_sum(log, log.at, units) and is_expiry_telling then return end
  end
  log.oldest = math.min(log.oldest or time, time)
  -- An entry with a lease may be older than the other entries.
  outlive(log, log.at, log.sub_window or not log.lease)
end
