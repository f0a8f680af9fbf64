-- Goes through the checks and settlements of a batch, in order. This file also has the shortest way
-- of deciding a check. The shortest way counts a single unit if its log is empty, or if the log has
-- capacity and no entry has left. It also takes places. The shortest way needs no function and no
-- table. With a function that looks at a key, as in fast.lua, a check that is alone would cost
-- Redis 16 % more instructions, and a check in a batch 25 % more. The shortest way reads the
-- server's expiries, so it needs Redis 7.0 and the server's clock.
--
-- Takes  call, ceil, is_expiry_telling, is_server_time, now, other_ways, score, score_of, short,
--        SLACK, try
-- Gives  reply
--
-- A place is an entry of one unit in an exact log. The process that has taken the place renews the
-- entry as long as the request runs. The life of a place is the window of the log: a place that is
-- not renewed within its life is free, such as the places of a dead process. To free a place, its
-- process removes the entry, without this script. An entry whose life is over may be renewed as
-- long as it is still in the key. Even so, a key never has more entries than the limit has places.
-- An admission does not count entries whose life is over, but it drops at least one of them if
-- there are any. There is one exception: a process takes its lost places again, even if the limit
-- has no place left. Each write sets the expiry of the key to two lives + SLACK from now.

local reply, r, a, k = { now, nil, nil }, 1, 2, 0  -- has room for three, since a table that grows is slow
local do_next, read_charges, charge_of
while k < #KEYS do
  local kind, copies, keys, step, checks, charges = ARGV[a], 1, 1, 1, nil, nil
  local units, window, places, life, p  -- p: which of the keys the place has
  if short then
    kind, checks = 'single', #KEYS
    if #short ~= 8 * checks + 16 then kind, checks = 'place', 1 end
    units, window, places, life, p = struct.unpack(kind == 'single' and '<dd' or '<ddddd', short, 8 * checks + 1)
  elseif kind == 'single' or kind == 'place' then
    units, window, a = ARGV[a + 1] + 0, ARGV[a + 2] + 0, a + 3
    if kind == 'place' then places, life, p, a = ARGV[a] + 0, ARGV[a + 1] + 0, ARGV[a + 2] + 0, a + 3 end
  elseif kind == 'renew' then
    life, a = ARGV[a + 1] + 0, a + 2
  else
    if not do_next then do_next, read_charges, charge_of = other_ways(now, score, score_of, SLACK, is_server_time, is_expiry_telling) end
    if kind == 'settle' or kind == 'settle again' then step = 2 end
    copies, keys = ARGV[a + 1] + 0, ARGV[a + 2] + 0
    charges, a = read_charges(a + 3, keys, kind == 'plain')
  end
  -- These values are the same for all checks of the run.
  local window_ms, due, cutoff, since, expiry_of_place, renewed
  local is_short_way = units and is_expiry_telling
  if is_short_way then
    window_ms, cutoff = ceil(window / 1000), score_of(now - window)
    -- The expiry, in microseconds, of a log whose oldest entry is just leaving.
    due = (2 * window_ms + SLACK) * 1000 - window + now
  end
  -- The expiry is a text, since Redis would otherwise format the number in each call.
  if life then expiry_of_place = string.format('%.0f', 2 * ceil(life / 1000) + SLACK) end
  if p and units > 0 then keys = 2 end
  checks = checks or ARGV[a] + 0
  for i = 1, checks do
    local at = a + 1 + (i - 1) * step
    local id = short and string.sub(short, 8 * i - 7, 8 * i) or ARGV[at]
    local key, place = KEYS[k + 1], p and KEYS[k + p]
    if p then key = keys == 2 and KEYS[k + 3 - p] end
    local is_counted, used, reset, held, expires, size
    if is_short_way then
      if place then held = try('ZCARD', place) end
      if place and held ~= 0 then since = since or score_of(now - life) end
      is_counted = not place or held == 0 or type(held) == 'number' and held < places and try('ZCOUNT', place, since, '+inf') == 0
      if key and is_counted then
        expires = call('PEXPIRETIME', key)
        local fits, left, expiry = true, window, nil
        if expires == -2 then
          size, expiry = 0, ceil(now / 1000) + window_ms + SLACK
        else
          size, left = try('ZCARD', key), expires * 1000 - due
          -- A log of one entry expires a window earlier than a log of more entries, so the second
          -- entry moves the expiry.
          if size == 1 then left, expiry = left + window_ms * 1000, expires + window_ms end
          -- A difference of less than a millisecond may come from rounding.
          fits = left >= 1000 and not (expiry and left > window + 1000)
            and try('ZCOUNT', key, cutoff, '+inf') == 0 and size < units
        end
        -- A server without memory refuses this write.
        is_counted = fits and try('ZADD', key, score, id) == 1
        if is_counted then
          if expiry then call('PEXPIREAT', key, expiry) end
          used, reset = size + 1, left < window and left or window
        end
      end
      if place and is_counted then
        is_counted = try('ZADD', place, score, id) == 1
        if is_counted then
          call('PEXPIRE', place, expiry_of_place)
          held = held + 1
        else
          expires, size = nil, nil  -- the unit may be counted by now, and then both numbers are wrong
        end
      end
    end
    if is_counted then
      -- The reply to a check that is alone needs no table. With one, Redis would need 5 % more
      -- instructions for such a check.
      if short and keys == #KEYS then
        if keys == 1 then return struct.pack('<ddd', now, used or held, reset or 0) end
        if p == 1 then return struct.pack('<ddddd', now, held, 0, used, reset) end
        return struct.pack('<ddddd', now, used, reset, held, 0)
      end
      if p == 1 then reply[r + 1], reply[r + 2], r = held, 0, r + 2 end
      if key then reply[r + 1], reply[r + 2], r = used, reset, r + 2 end
      if p == 2 then reply[r + 1], reply[r + 2], r = held, 0, r + 2 end
    elseif kind == 'renew' then
      local is_held = try('ZADD', key, 'XX', 'CH', score, id) == 1
      local removed = not is_held and try('ZREM', key, id)
      if is_held and key ~= renewed or removed == 1 then
        -- A server without memory accepts the ZADD after a ZREM.
        if not is_held then call('ZADD', key, score, id) end
        call('PEXPIRE', key, expiry_of_place)
        is_held, renewed = true, key
      elseif removed and removed ~= 0 and not string.find(removed.err, 'WRONGTYPE', 1, true) then
        call('ZREM', key, id)  -- fails, since the error is one of the server
      end
      reply[r + 1], r = is_held and 1 or 0, r + 1
    else
      if not do_next then do_next, read_charges, charge_of = other_ways(now, score, score_of, SLACK, is_server_time, is_expiry_telling) end
      if not charges then
        charges = { charge_of(p and places or units, 1, life or window) }
        if keys == 2 then table.insert(charges, 3 - p, charge_of(units, 1, window)) end
      end
      r = do_next(kind, copies, charges, id, ARGV[at + 1], k, reply, r, p ~= 1 and expires, p ~= 1 and size)
    end
    k = k + keys
  end
  a = a + 1 + checks * step
end
-- If each check has only figures, the reply to the short form is a text of doubles.
if short and r == 1 + 2 * #KEYS then return struct.pack('<' .. string.rep('d', r), unpack(reply)) end
return reply
