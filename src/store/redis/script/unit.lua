-- A single unit in an exact log. Inlined into lone.lua and run.lua, for a line with its name, since
-- a function costs Redis more than the unit. Reads the locals call, ceil, id, key, now, score,
-- SLACK, try, units and window, and
--
-- millis             the window in milliseconds
-- due                the expiry when a log's oldest entry is just leaving
--
-- Sets these locals, which are nil before:
--
-- expires, size      the key's expiry, and the number of its members
-- used, reset        if the unit is counted or refused, as head.lua describes
-- retry              if it is refused
--
-- Decisions do not depend on an expiry, here or in take.lua. Without a total, each entry is one
-- unit, so at most ZCARD units are used: entries that have left, or are ahead of the clock, only
-- make the number too large. ZSCORE shows whether there is a total. The expiry tells whether an
-- entry has left, and when the oldest leaves. If the clock has stepped back, or another program has
-- set the expiry, only these figures may be wrong. Once the log is full, the entries are read.
expires = call('PEXPIRETIME', key)
local fits, expiry = expires == -2 and units > 0, nil
if fits then
  size, reset, expiry = 0, window, ceil(now / 1000) + millis + SLACK
else
  size, reset = try('ZCARD', key), expires * 1000 - due
  -- A log with one entry expires a window earlier than one with more, so the second moves the
  -- expiry.
  if size == 1 then reset, expiry = reset + millis * 1000, expires + millis end
  -- A difference of less than a millisecond may come from rounding.
  fits = reset >= 1000 and not (expiry and reset > window + 1000) and size ~= units
    and not try('ZSCORE', key, 'used') and size < units
end
-- A server without memory refuses this write.
if fits and try('ZADD', key, score, id) == 1 then
  if expiry then call('PEXPIREAT', key, expiry) end
  used, reset = size + 1, reset < window and reset or window
elseif size == units and reset > 0 then
  -- The log is full, and no entry has left: one more unit fits when the oldest leaves. The general
  -- way moves entries that are ahead of the clock.
  local oldest = call('ZREVRANGE', key, '0', '0', 'WITHSCORES')[2]
  local leaves = oldest and oldest + 0 < 0 and window - oldest - now
  if leaves and leaves > 0 and call('ZCOUNT', key, '-inf', '(' .. score) == 0 then
    used, reset, retry = size, leaves, leaves
  end
end
