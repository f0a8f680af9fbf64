-- Reads the shape of a run, which begins at this argument: all that its checks have in common.
local function read_shape(place)
  local kind = ARGV[place + 1]
  local shape = {
    copies = ARGV[place] + 0, kind = kind, first = 0, last = 0, has_shadow = false,
    is_plain = kind == 'plain' and ARGV[place] == '1' and is_expiry_telling, is_given = kind == 'again' or kind == 'given',
  }
  local is_settlement = kind == 'settle' or kind == 'settle again'
  if is_settlement then shape.is_settlement = true end
  local charges = ARGV[place + 2]
  place = place + 3
  for i = 1, charges do
    local units, cost, window = ARGV[place] + 0, ARGV[place + 1] + 0, ARGV[place + 2] + 0
    local charge = {
      units = units, cost = cost, window = window, window_ms = ceil(window / 1000),
      -- As a score. Within a window of 1970 nothing has left, and the heads are all that is above 0.
      cutoff = now < window and '(0' or score_of(now - window),
      needs = cost, takes = cost,                                  -- units that have to be left, and units that are counted
      used = 0, sum = false, gone = 0, reset = 0, expiry = false,  -- for plain.lua
    }
    if cost == 0 then shape.is_plain = false end
    place = place + 3
    if kind ~= 'plain' and kind ~= 'again' then
      local algorithm, lease, mode = ARGV[place], ARGV[place + 1] + 0, ARGV[place + 2]
      local entries = tonumber(algorithm)
      charge.is_counter, charge.is_compact = algorithm == 'counter', entries ~= nil
      -- Admissions of one part of the window are put together. An exact log has no parts.
      charge.part = algorithm ~= 'log' and (entries and ceil(window / (entries - 2)) or window)
      charge.lease, charge.is_reserving = lease > 0 and lease, lease > 0 and mode ~= 'spent'
      charge.is_prefetch = lease > window
      charge.is_shadow, charge.settled = mode == 'shadow' or mode == 'left shadow', tonumber(mode)
      if mode == 'spent' then charge.needs = 0 end
      if mode == 'left' or mode == 'left shadow' then charge.takes = 0 end
      shape.has_shadow = shape.has_shadow or charge.is_shadow
      place = place + 3
    end
    shape[i] = charge
  end
  shape.first, shape.last = place + 1, place + ARGV[place] * (is_settlement and 2 or 1)
  return shape
end

-- The time of the oldest entry of an exact log, if its expiry tells it: rounded up by less than a millisecond.
local function oldest_by(expires, charge)
  local oldest = (expires - 2 * charge.window_ms - SLACK) * 1000
  return oldest - 1000 + charge.window >= now and oldest
end
