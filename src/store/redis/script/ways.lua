-- The two ways: reading the charges of a run, and sending each of its checks the fast way or the
-- general one.
--
-- Takes  decide_fast, general_way, is_expiry_telling, now, score_of, SLACK
-- Gives  do_next, read_charges, charge_of

-- A charge. The words are those of head.lua.
local function charge_of(units, cost, window, algorithm, lease, mode)
  local millis, entries, is_spent = math.ceil(window / 1000), tonumber(algorithm), string.find(mode, '^spent')
  local charge = {
    units = units, cost = cost, window = window,
    -- Units that have to be left, and units that are counted.
    needs = is_spent and 0 or cost, takes = string.find(mode, '^left') and 0 or cost,
    -- The milliseconds that a key outlives its oldest entry: if that is all, of one unit, and else.
    life = millis + SLACK, long_life = 2 * millis + SLACK,
    cutoff = score_of(now - window),  -- the score above which entries have left, and heads
    is_counter = algorithm == 'counter', is_compact = entries ~= nil, is_place = algorithm == 'concurrent',
    ends = string.match(algorithm, '^ends (.+)'),  -- when the periods of a calendar end
    lease = lease > 0 and lease, is_reserving = lease > 0 and not is_spent, is_prefetch = lease > window,
    is_shadow = string.find(mode, 'shadow$'), settled = tonumber(string.match(mode, '%d+$')),
  }
  -- Admissions of one part of the window are put together. An exact log has no parts.
  charge.part = algorithm ~= 'log' and not charge.is_place and (entries and math.ceil(window / (entries - 2)) or window)
  charge.__index = charge  -- for its logs
  return charge
end

-- Reads so many charges of a run from these arguments on: three or six figures of each. Returns
-- them, and the place behind.
local function read_charges(place, count, is_plain)
  local charges = {}
  for i = 1, count do
    local algorithm, lease, mode, step = 'log', 0, '', 3
    if not is_plain then algorithm, lease, mode, step = ARGV[place + 3], ARGV[place + 4] + 0, ARGV[place + 5], 6 end
    charges[i] = charge_of(ARGV[place] + 0, ARGV[place + 1] + 0, ARGV[place + 2] + 0, algorithm, lease, mode)
    place = place + step
  end
  return charges, place
end

local decide, settle

-- Decides the check, or settles the admission, of this id, whose keys begin behind `k`. Appends its
-- outcome to the reply of length `r`, and returns the new length. The expiry of the first key and
-- the number of its entries may be known.
local function do_next(kind, copies, charges, id, at, k, reply, r, expires, size)
  local is_fast = is_expiry_telling and (kind == 'single' or kind == 'place' or kind == 'plain')
  if is_fast and decide_fast(charges, 1, k, id, copies, reply, r, expires, size) then return r + 2 * #charges end
  if not decide then decide, settle = general_way() end
  local is_again = string.find(kind, 'again$')
  local is_settled = string.find(kind, '^settle')
  reply[r + 1] = is_settled and settle(charges, k, id, at + 0, is_again) or decide(charges, k, id, copies, is_again)
  return r + 1
end

return do_next, read_charges, charge_of
