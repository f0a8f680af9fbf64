-- The shortest way of deciding a check: a single unit that is alone in its batch, in the short
-- form. If no entry has left, it counts the unit, or refuses it if the log is full. Nothing of the
-- script is made before this: no function, and no table. take.lua has the same rule with all that
-- this file leaves out, but its functions cost Redis more than the unit.
--
-- No decision depends on an expiry, here, in run.lua or in take.lua. Without a total, each entry is
-- one unit, so at most ZCARD units are used: entries that have left, or that are ahead of the
-- clock, only make the number too large. ZSCORE tells whether there is a total. The expiry tells
-- whether an entry has left, and when the oldest leaves. If the clock has stepped back, or another
-- program has set the expiry, only these figures may be wrong. Once the log is full, the entries
-- themselves are read.
--
-- Takes  call, ceil, is_expiry_telling, now, score, short, SLACK, try
-- Gives  known_expires, known_size

local known_expires, known_size  -- the expiry of the only key, and the number of its members, if they were read
if is_expiry_telling and short and #short == 24 then
  local key, size, left, expiry = KEYS[1]
  local id, units, window = struct.unpack('<c8dd', short)
  local millis, expires = ceil(window / 1000), call('PEXPIRETIME', key)
  local fits = expires == -2 and units > 0
  if fits then
    size, left, expiry = 0, window, ceil(now / 1000) + millis + SLACK
  else
    size, left = try('ZCARD', key), (expires - 2 * millis - SLACK) * 1000 + window - now
    -- A log of one entry expires a window earlier than a log of more entries, so the second entry
    -- moves the expiry.
    if size == 1 then left, expiry = left + millis * 1000, expires + millis end
    -- A difference of less than a millisecond may come from rounding.
    fits = left >= 1000 and not (expiry and left > window + 1000) and size ~= units
      and not try('ZSCORE', key, 'used') and size < units
  end
  -- A server without memory refuses this write.
  if fits and try('ZADD', key, score, id) == 1 then
    if expiry then call('PEXPIREAT', key, expiry) end
    return struct.pack('<ddd', now, size + 1, left < window and left or window)
  end
  -- The log is full, and no entry has left: one more unit fits when the oldest leaves. The general
  -- way moves entries that are ahead of the clock.
  if size == units and left > 0 then
    local oldest = call('ZREVRANGE', key, '0', '0', 'WITHSCORES')[2]
    local leaves = oldest and oldest + 0 < 0 and window - oldest - now
    if leaves and leaves > 0 and call('ZCOUNT', key, '-inf', '(' .. score) == 0 then
      return { now, { 0, -1, size, leaves, 0, leaves, leaves } }
    end
  end
  known_expires, known_size = expires, size
end
