-- The choice between the two ways of deciding a check: reads the charges of a run, and sends each
-- check of the run the fast way or the general way.
--
-- Takes  decide_fast, general_way, is_expiry_telling, now, score_of, SLACK
-- Gives  do_next, read_charges, charge_of

-- Makes a plain charge: head.lua has the word.
local function charge_of(units, cost, window)
  local millis = math.ceil(window / 1000)
  return {
    units = units, cost = cost, window = window,
    needs = cost, takes = cost,  -- units that have to be left, and units that are counted
    -- The milliseconds that a key outlives its oldest entry: `life` if that is the only entry and
    -- has one unit, otherwise `long_life`.
    life = millis + SLACK, long_life = 2 * millis + SLACK,
    cutoff = score_of(now - window),  -- above this score are the entries that have left, and the heads
  }
end

-- Reads `count` charges of a run, from argument number `index` on. A charge has three figures if
-- `is_plain`, and six if not. Returns the charges, and the number of the argument behind them.
local function read_charges(index, count, is_plain)
  local charges = {}
  for i = 1, count do
    local charge = charge_of(ARGV[index] + 0, ARGV[index + 1] + 0, ARGV[index + 2] + 0)
    index, charges[i] = index + 3, charge
    if not is_plain then
      local window, algorithm, lease, mode = charge.window, ARGV[index], ARGV[index + 1] + 0, ARGV[index + 2]
      local entries = tonumber(algorithm)
      charge.is_counter, charge.is_place = algorithm == 'counter', algorithm == 'concurrent'
      charge.ends = string.match(algorithm, '^ends (.+)')  -- when the periods of a calendar end
      -- Admissions of one sub-window are put together. An exact log has no sub-windows.
      charge.sub_window = algorithm ~= 'log' and not charge.is_place and (entries and math.ceil(window / (entries - 2)) or window)
      -- An admission gets a time that is this much later than the start of its sub-window.
      charge.later = entries and charge.sub_window - 1 or charge.is_counter and window or 0
      charge.lease, charge.is_reserving, charge.is_prefetch = lease > 0 and lease, lease > 0, lease > window
      if mode ~= '' then
        charge.is_shadow, charge.settled = string.find(mode, 'shadow$'), tonumber(string.match(mode, '%d+$'))
        if string.find(mode, '^spent') then charge.needs, charge.is_reserving = 0, false end
        if string.find(mode, '^left') then charge.takes = 0 end
      end
      index = index + 3
    end
  end
  return charges, index
end

local decide, make_settle, settle

-- Decides the check, or settles the admission, of this id, whose keys begin behind `k`. Appends its
-- outcome to the reply of length `r`, and returns the new length. `expires` and `size` are the
-- expiry of the first key and the number of its entries, if they are known.
local function do_next(kind, copies, charges, id, at, k, reply, r, expires, size)
  local is_fast = is_expiry_telling and (kind == 'single' or kind == 'place' or kind == 'plain')
  if is_fast and decide_fast(charges, 1, k, id, copies, reply, r, expires, size) then return r + 2 * #charges end
  if not decide then decide, make_settle = general_way() end
  if kind == 'settle' or kind == 'settle again' then
    settle = settle or make_settle()
    reply[r + 1] = settle(charges, k, id, at + 0, kind == 'settle again')
  else
    reply[r + 1] = decide(charges, k, id, copies, kind == 'again')
  end
  return r + 1
end

return do_next, read_charges, charge_of
