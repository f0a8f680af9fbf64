-- The loop over the checks and settlements of a batch, in order. Lua makes functions anew in each call, so those that single.lua
-- does not need are made when a check needs them.

local reply, r, a, k = { now }, 1, 2, 0
local do_next, read_charges, charge_of
while a <= #ARGV do
  local kind, copies, step, charges = ARGV[a], 1, 1, nil
  local keys, units, window, due, cutoff = 1, nil, nil, nil, nil
  if kind == 'single' then
    units, window, a = ARGV[a + 1] + 0, ARGV[a + 2] + 0, a + 3
    if is_expiry_telling and now >= window then
      due, cutoff = (2 * ceil(window / 1000) + SLACK) * 1000 - window + now, score_of(now - window)
    end
  else
    if not do_next then do_next, read_charges, charge_of = other_ways() end
    if kind == 'settle' or kind == 'settle again' then step = 2 end
    copies, keys = ARGV[a + 1] + 0, ARGV[a + 2] + 0
    charges, a = read_charges(a + 3, keys, kind == 'plain' or kind == 'place')
  end
  local last = a + ARGV[a] * step
  for place = a + 1, last, step do
    local used, reset
    if cutoff then used, reset = count_one(KEYS[k + 1], ARGV[place], units, window, due, cutoff) end
    if used then
      reply[r + 1], reply[r + 2], r = used, reset, r + 2
    else
      if not do_next then do_next, read_charges, charge_of = other_ways() end
      charges = charges or { charge_of(units, 1, window) }
      r = do_next(kind, copies, charges, place, k, reply, r, reset)
    end
    k = k + keys
  end
  a = last + 1
end
return reply
