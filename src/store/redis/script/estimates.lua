-- Computes when a counter's estimate falls. log.lua explains how a counter counts.
--
-- Takes  nothing
-- Gives  falls_to

-- Returns the first moment, not before `from`, at which the estimate is at most `most`. The window
-- that ends at `finish` has the `current` units, and the window before it has the `previous` units.
-- Returns `from` if there are no units.
local function falls_to(most, from, window, finish, current, previous)
  while current + previous > 0 do
    if current <= most and from < finish then
      -- The estimate is computed in doubles, so the true moment may be a microsecond or two away.
      local overlap = previous > 0 and math.floor((most - current) * window / previous) or window
      local fits = math.max(from, finish - overlap - 2)
      while fits < finish and current + math.ceil(previous * (finish - fits) / window) > most do
        fits = fits + 1
      end
      if fits < finish then return fits end
    end
    finish, from, current, previous = finish + window, math.max(from, finish), 0, current
  end
  return from
end
