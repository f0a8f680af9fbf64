-- The two ways: reading the charges of a run, and sending each of its checks the fast way or the
-- general one.
--
-- Takes  ceil, decide_fast, general_way, is_expiry_telling, now, score_of
-- Gives  do_next, read_charges, charge_of

-- A charge that is counted or refused, and not reserved.
local function charge_of(units, cost, window)
  return {
    units = units, cost = cost, window = window, window_ms = ceil(window / 1000),
    -- The score above which entries have left, and heads. Within a window of 1970 nothing has left.
    cutoff = now < window and '(0' or score_of(now - window),
    needs = cost, takes = cost,  -- units that have to be left, and units that are counted
  }
end

-- Reads so many charges of a run from these arguments on: three or six figures of each. Returns
-- them, and the place behind.
local function read_charges(place, count, is_plain)
  local charges = {}
  for i = 1, count do
    local charge = charge_of(ARGV[place] + 0, ARGV[place + 1] + 0, ARGV[place + 2] + 0)
    place, charges[i] = place + 3, charge
    if not is_plain then
      local window, algorithm, lease, mode = charge.window, ARGV[place], ARGV[place + 1] + 0, ARGV[place + 2]
      local entries, is_spent = tonumber(algorithm), string.find(mode, '^spent')
      charge.is_counter, charge.is_compact = algorithm == 'counter', entries ~= nil
      charge.is_place = algorithm == 'concurrent'
      if string.find(algorithm, '^ends ') then
        charge.ends = {}
        for number in string.gmatch(algorithm, '%d+') do
          charge.ends[#charge.ends + 1] = number + 0
        end
      end
      -- Admissions of one part of the window are put together. An exact log has no parts.
      charge.part = algorithm ~= 'log' and not charge.is_place and (entries and ceil(window / (entries - 2)) or window)
      charge.lease, charge.is_reserving, charge.is_prefetch = lease > 0 and lease, lease > 0 and not is_spent, lease > window
      charge.is_shadow, charge.settled = mode == 'shadow' or mode == 'left shadow', tonumber(string.match(mode, '%d+$'))
      if is_spent then charge.needs = 0 end
      if mode == 'left' or mode == 'left shadow' then charge.takes = 0 end
      place = place + 3
    end
  end
  return charges, place
end

local decide, settle

-- Decides the check, or settles the admission, of this id, whose keys begin behind `k`. Appends its
-- outcome to the reply of length `r`, and returns the new length. The expiry of the first key and
-- the number of its entries may be known.
local function do_next(kind, copies, charges, id, at, k, reply, r, expires, size)
  local is_fast = is_expiry_telling and (kind == 'single' or kind == 'place' or kind == 'plain')
  if is_fast and decide_fast(charges, k, id, copies, reply, r, expires, size) then return r + 2 * #charges end
  if not decide then decide, settle = general_way() end
  if kind == 'settle' or kind == 'settle again' then
    reply[r + 1] = settle(charges, k, id, at + 0, kind == 'settle again')
  else
    reply[r + 1] = decide(charges, k, id, copies, kind == 'again')
  end
  return r + 1
end

return do_next, read_charges, charge_of
