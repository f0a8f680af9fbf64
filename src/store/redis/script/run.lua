-- The way through the rest of a batch, from where quick.lua and plain.lua have left it.

-- Reads the shape of a run: all but its ids.
local function shape_at(place)
  local kind = ARGV[place + 1]
  local shape = {
    copies = ARGV[place] + 0, charges = ARGV[place + 2] + 0, has_shadow = false,
    is_plain = kind == 'plain', is_given = kind == 'again' or kind == 'given',
    is_settlement = kind == 'settle' or kind == 'settle again', is_again = kind == 'settle again',
  }
  local figures = (kind == 'plain' or kind == 'again') and 3 or 6
  place = place + 3
  for i = 1, shape.charges do
    local units, cost, window = ARGV[place] + 0, ARGV[place + 1] + 0, ARGV[place + 2] + 0
    local algorithm, lease, mode = 'log', 0, ''
    if figures == 6 then
      algorithm, lease, mode = ARGV[place + 3], ARGV[place + 4] + 0, ARGV[place + 5]
    end
    local entries = tonumber(algorithm)
    local is_spent = mode == 'spent'
    local charge = {
      units = units, cost = cost, window = window, lease = lease, window_ms = ceil(window / 1000),
      -- As a score. Within a window of 1970 nothing has left, and the heads are all that is above 0.
      cutoff = now < window and '(0' or text(window - now),
      needs = is_spent and 0 or cost,                                   -- units that have to be left
      takes = (mode == 'left' or mode == 'left shadow') and 0 or cost,  -- units that are counted
      is_reserving = lease > 0 and not is_spent,
      is_exact = algorithm == 'log', is_counter = algorithm == 'counter', is_compact = entries ~= nil,
      part = entries and ceil(window / (entries - 2)) or window,
      is_shadow = mode == 'shadow' or mode == 'left shadow', settled = tonumber(mode),
    }
    charge.at = recorded_at(charge, now)
    charge.latest = charge.is_counter and now or charge.at  -- the latest time under which anything of now is recorded
    charge.kept_at = kept_at(charge, now)
    shape.has_shadow = shape.has_shadow or charge.is_shadow
    shape[i] = charge
    place = place + figures
  end
  shape.first, shape.last = place + 1, place
  shape.last = place + ARGV[place] * (shape.is_settlement and 2 or 1)
  return shape
end

-- Decides a check. If that fails, nobody else is the worse for it.
local function decide_alone(shape, id)
  local places, keys = r, k
  local is_done, problem = attempt(decide, shape, id)
  if is_done then return end
  for i = places + 1, #reply do
    reply[i] = nil
  end
  r, k = places + 1, keys + shape.charges
  reply[r] = failure_of(shape.at_fault, problem)
  for i = 1, 3 * shape.charges do
    reply[r + i] = 0
  end
  r = r + 3 * shape.charges
end

while a < #ARGV do
  local run = a + 1
  local shape = shape_at(run)
  local may_be_plain = is_plain(run)
  for i = resume or shape.first, shape.last, shape.is_settlement and 2 or 1 do
    if shape.is_settlement then
      settle(shape, ARGV[i], ARGV[i + 1] + 0, shape.is_again)
    elseif not may_be_plain or i == resume or not decide_plainly(ARGV[i], shape) then
      decide_alone(shape, ARGV[i])
    end
  end
  a, resume = shape.last, nil
end

return reply
