-- The loop over the checks and settlements of a batch, in order. Lua makes functions anew in each call, so those that single.lua
-- does not need are made when a check needs them.

local reply, r, a, k = { now }, 1, 2, 0
local do_next, read_charges, charge_of
while a <= #ARGV do
  local kind, copies, step, charges = ARGV[a], 1, 1, nil
  local keys, units, window, due, cutoff = 1, nil, nil, nil, nil
  local places, life, since, expiry, p, renewed  -- p: which of the keys is that of the place
  if kind == 'single' or kind == 'place' then
    units, window, a = ARGV[a + 1] + 0, ARGV[a + 2] + 0, a + 3
    if is_expiry_telling and now >= window and not run then
      due, cutoff = (2 * ceil(window / 1000) + SLACK) * 1000 - window + now, score_of(now - window)
    end
    if kind == 'place' then
      places, life, p, a = ARGV[a] + 0, ARGV[a + 1] + 0, ARGV[a + 2] + 0, a + 3
      keys, since, cutoff = units > 0 and 2 or 1, score_of(now - life), now >= life and cutoff
    end
  elseif kind == 'renew' then
    life, a = ARGV[a + 1] + 0, a + 2
  else
    if not do_next then do_next, read_charges, charge_of = other_ways() end
    if kind == 'settle' or kind == 'settle again' then step = 2 end
    copies, keys = ARGV[a + 1] + 0, ARGV[a + 2] + 0
    charges, a = read_charges(a + 3, keys, kind == 'plain')
  end
  -- As a text, since Redis would format the number in each call.
  if life then expiry = string.format('%.0f', 2 * ceil(life / 1000) + SLACK) end
  local last = a + ARGV[a] * step
  for place = a + 1, last, step do
    local used, reset, held, size
    if cutoff and not p then
      used, reset, size = count_one(KEYS[k + 1], ARGV[place], units, window, due, cutoff)
    elseif cutoff and take_place then
      local key = keys == 2 and KEYS[k + 3 - p]
      used, reset, held, size = take_place(key, ARGV[place], units, window, due, cutoff, KEYS[k + p], places, life,
        expiry, since)
      if held and p == 2 then reply[r + 1], reply[r + 2], r = used, reset, r + 2 end
      if held and keys > p then reply[r + 1], reply[r + 2], r = held, 0, r + 2 end
      if held and keys == p then used, reset = held, 0 end
    end
    if used then
      reply[r + 1], reply[r + 2], r = used, reset, r + 2
    elseif kind == 'renew' then
      local key, id = KEYS[k + 1], ARGV[place]
      held = pcall('ZADD', key, 'XX', 'CH', score, id) == 1
      local removed = not held and pcall('ZREM', key, id)
      if held and key ~= renewed or removed == 1 then
        -- A server without memory accepts the ZADD after a ZREM.
        if not held then call('ZADD', key, score, id) end
        call('PEXPIRE', key, expiry)
        held, renewed = true, key
      elseif removed and removed ~= 0 and not string.find(removed.err, 'WRONGTYPE', 1, true) then
        call('ZREM', key, id)  -- fails, since the error is one of the server
      end
      reply[r + 1], r = held and 1 or 0, r + 1
    else
      if not do_next then do_next, read_charges, charge_of = other_ways() end
      if not charges then
        charges = { charge_of(p and places or units, 1, life or window) }
        if keys == 2 then table.insert(charges, 3 - p, charge_of(units, 1, window)) end
      end
      -- Of a check that is alone, lone.lua knows them.
      if not reset then reset, size = expires, entries end
      r = do_next(kind, copies, charges, place, k, reply, r, p ~= 1 and reset, p ~= 1 and size)
    end
    k = k + keys
  end
  a = last + 1
end
return reply
