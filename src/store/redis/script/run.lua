-- The loop over the checks and settlements of a batch, in order. Lua makes functions anew in each call, so those that single.lua
-- does not need are made when a check needs them.

local reply, r, a, k = { now }, 1, 2, 0
local do_next, read_charges, charge_of, take_place, keep_places
while a <= #ARGV do
  local kind, copies, step, charges = ARGV[a], 1, 1, nil
  local keys, units, window, due, cutoff = 1, nil, nil, nil, nil
  local p, places, life, since, expiry  -- p: which of the keys is that of the place
  if kind == 'single' or kind == 'place' then
    units, window, a = ARGV[a + 1] + 0, ARGV[a + 2] + 0, a + 3
    if is_expiry_telling and now >= window then
      due, cutoff = (2 * ceil(window / 1000) + SLACK) * 1000 - window + now, score_of(now - window)
    end
    if kind == 'place' then
      places, life, p, a = ARGV[a] + 0, ARGV[a + 1] + 0, ARGV[a + 2] + 0, a + 3
      keys, since, cutoff = units > 0 and 2 or 1, score_of(now - life), now >= life and cutoff
    end
  elseif kind == 'free' then
    keys, a = ARGV[a + 1] + 0, a + 2
  elseif kind == 'renew' then
    life, a = ARGV[a + 1] + 0, a + 2
  else
    if not do_next then do_next, read_charges, charge_of = other_ways() end
    if kind == 'settle' or kind == 'settle again' then step = 2 end
    copies, keys = ARGV[a + 1] + 0, ARGV[a + 2] + 0
    charges, a = read_charges(a + 3, keys, kind == 'plain')
  end
  local keeps = kind == 'free' or kind == 'renew'
  if (p or keeps) and not take_place then take_place, keep_places = ways_of_places() end
  -- As a text, since Redis would format the number in each call.
  if life then expiry = string.format('%.0f', 2 * ceil(life / 1000) + SLACK) end
  local last = a + ARGV[a] * step
  for place = a + 1, last, step do
    local id, used, reset, length = ARGV[place], nil, nil, nil
    if cutoff and not p then
      used, reset = count_one(KEYS[k + 1], id, units, window, due, cutoff)
    elseif cutoff then
      length, reset = take_place(k, keys, p, id, units, window, due, cutoff, places, life, since, expiry, reply, r)
    elseif keeps then
      length = keep_places(k, keys, id, expiry, reply, r)
    end
    if used then
      reply[r + 1], reply[r + 2], r = used, reset, r + 2
    elseif length then
      r = length
    else
      if not do_next then do_next, read_charges, charge_of = other_ways() end
      if not charges then
        charges = { charge_of(p and places or units, 1, life or window) }
        if keys == 2 then table.insert(charges, 3 - p, charge_of(units, 1, window)) end
      end
      r = do_next(kind, copies, charges, place, k, reply, r, reset)
    end
    k = k + keys
  end
  a = last + 1
end
return reply
