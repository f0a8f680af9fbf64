-- The shortest way: one unit of an exact log that is new, or that has capacity and of which no entry has left. It needs no
-- table, and one function. It reads the server's expiries, so it needs Redis 7.0 and the server's clock.

-- Counts the unit under an id that is new. Returns the units used and the reset. If there is more to do it does nothing, and
-- returns nil, the expiry of the key and the number of its entries, if it knows those. `due` is the expiry, in microseconds, of
-- a log whose oldest entry is just leaving.
local function count_one(key, id, units, window, due, cutoff)
  local expires = call('PEXPIRETIME', key)
  if expires == -2 then
    -- A server without memory refuses this write.
    if pcall('ZADD', key, score, id) ~= 1 then return end
    call('PEXPIREAT', key, ceil(now / 1000) + ceil(window / 1000) + SLACK)
    return 1, window
  end
  local used, reset, expiry = pcall('ZCARD', key), expires * 1000 - due, nil
  -- One entry of one unit expires a window earlier, and the second moves the expiry.
  if used == 1 then
    local window_ms = ceil(window / 1000)
    reset, expiry = reset + window_ms * 1000, expires + window_ms
  end
  -- Less than a millisecond may come from rounding.
  if reset < 1000 or expiry and reset > window + 1000
    or pcall('ZCOUNT', key, cutoff or score_of(now - window), '+inf') ~= 0
    or used >= units or pcall('ZADD', key, score, id) ~= 1 then
    return nil, expires, used
  end
  if expiry then call('PEXPIREAT', key, expiry) end
  return used + 1, reset < window and reset or window
end
