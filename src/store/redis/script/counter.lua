-- How a counter counts. The units of the present window of the clock count in full. The units of
-- the previous window count in proportion to the part of that window that the sliding window still
-- overlaps, rounded up to whole units. Entries with an id count in full.
--
-- Takes  call, clamped, now, recorded_at, text
-- Gives  estimate_now, read_counts, write_counts, add_to_counts, falls_to
--
-- One member has two numbers, and the start of a window. The first number is the units of that
-- window, and the second is the units of the window before it. The score of this member is
-- infinite, so the member is behind all others. The key expires two windows + SLACK after the start
-- of the newest window.

-- The estimate at `time`, which is in the window that begins at `start`.
local function estimate(log, current, previous, start, time)
  return current + math.ceil(previous * (start + log.window - time) / log.window)
end

local function estimate_now(log)
  return estimate(log, log.current, log.previous, log.at, now)
end

-- Reads the two numbers of a counter, if the last member of its key has them.
local function read_counts(log, last)
  log.current, log.previous = 0, 0
  local start, current, previous = string.match(last or '', '^(%d+):(%d+):(%d+)$')
  if not start then return end
  log.counts = last
  start, current, previous = clamped(tonumber(start)), clamped(tonumber(current)), clamped(tonumber(previous))
  if start > log.at then
    -- The clock has stepped back: units of a later window count as those of now.
    log.ahead = { start = start, current = current, previous = previous }
    log.current = current + previous
  elseif start == log.at then
    log.current, log.previous = current, previous
  elseif start + log.window >= log.at then
    log.previous = current
  end
end

-- Writes the numbers of the present window.
local function write_counts(log)
  local counts, before = text(log.at) .. ':' .. text(log.current) .. ':' .. text(log.previous), log.counts
  if counts == before then return end
  call('ZADD', log.key, '+inf', counts)
  if before then call('ZREM', log.key, before) end
  log.counts, log.ahead = counts, nil
end

-- Counts units in the window of the clock in which they were admitted, unless that window counts no
-- longer.
local function add_to_counts(log, time, units)
  local start = recorded_at(log, time)
  if start >= log.at then
    log.used, log.current = log.used + units, log.current + units
  elseif start + log.window >= log.at then
    log.previous = log.previous + units
  end
  write_counts(log)
end

-- The first moment, not before `from`, at which the estimate is at most `most`. Returns `from` for
-- a log that is no counter, since such a log has no estimate.
local function falls_to(log, most, from)
  if not log.is_counter then return from end
  local start, current, previous, ahead = log.at, log.current, log.previous, log.ahead
  -- After a step back, units of a later window count in full until that window begins.
  if ahead and current > most then
    start, current, previous, from = ahead.start, ahead.current, ahead.previous, math.max(from, ahead.start)
  end
  while current + previous > 0 do
    local stop = start + log.window
    if current <= most and from < stop then
      -- The estimate is computed in doubles, so the true moment may be a microsecond or two before
      -- or after the computed one.
      local overlap = previous > 0 and math.floor((most - current) * log.window / previous) or log.window
      local fits = math.max(from, stop - overlap - 2)
      while fits < stop and estimate(log, current, previous, start, fits) > most do
        fits = fits + 1
      end
      if fits < stop then return fits end
    end
    start, from, current, previous = stop, math.max(from, stop), 0, current
  end
  return from
end
