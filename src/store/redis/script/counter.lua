-- How a counter estimates. The units of the present window of the clock count in full. The units of
-- the previous window count in proportion to the part of that window that the sliding window still
-- overlaps, rounded up to whole units. Entries with an id count in full.
--
-- Takes  now, score_of, sum_at
-- Gives  counts_of, faded, falls_to, finish_of, overlapping
--
-- The units of each window are the sum of the end of that window. So the sum of the previous window
-- leaves the log when the present window ends, and no unit of the sum counts any more.

-- How many of the `previous` units count at `time`. `time` is in the window that ends at `finish`,
-- and the units are those of the window before it.
local function overlapping(log, previous, finish, time)
  return math.ceil(previous * (finish - time) / log.window)
end

-- The end of the present window. If all entries are ahead of the clock, this is the end of the
-- window of the oldest entry.
local function finish_of(log)
  local oldest = log.oldest or 0
  return math.max(log.at, oldest + -oldest % log.window)
end

-- How many units of the previous window no longer count.
local function faded(log)
  local finish = finish_of(log)
  if not log.is_counter or finish - log.window < (log.oldest or finish) then return 0 end
  log.previous = math.min(sum_at(log, score_of(finish - log.window)), log.total)
  return log.previous - overlapping(log, log.previous, finish, now)
end

-- The units of the present window and of the previous window.
local function counts_of(log)
  log.current = log.current or sum_at(log, score_of(finish_of(log)))
  return log.current, log.previous
end

-- The first moment, not before `from`, at which the estimate is at most `most`. Returns `from` for
-- a log that is no counter, since such a log has no estimate.
local function falls_to(log, most, from)
  if not log.is_counter then return from end
  local finish, current, previous = finish_of(log), counts_of(log)
  while current + previous > 0 do
    if current <= most and from < finish then
      -- The estimate is computed in doubles, so the true moment may be a microsecond or two before
      -- or after the computed one.
      local overlap = previous > 0 and math.floor((most - current) * log.window / previous) or log.window
      local fits = math.max(from, finish - overlap - 2)
      while fits < finish and current + overlapping(log, previous, finish, fits) > most do
        fits = fits + 1
      end
      if fits < finish then return fits end
    end
    finish, from, current, previous = finish + log.window, math.max(from, finish), 0, current
  end
  return from
end
