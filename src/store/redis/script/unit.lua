-- Decides a single unit in an exact log. This code is inlined into lone.lua and run.lua, where a
-- line names this file, since a function call would cost Redis more than deciding the unit. It
-- reads the locals call, ceil, id, key, now, score, SLACK, try, units and window, and
--
-- millis             the window in milliseconds
-- due                the expiry that a log has when its oldest entry leaves now
--
-- It sets these locals, which are nil before:
--
-- expires, size      the key's expiry, and the number of its members
-- used, reset        set if the unit is counted or refused: see head.lua
-- retry              set if the unit is refused
--
-- Neither here nor in take.lua do decisions depend on an expiry. Without a total, each entry is one
-- unit, so at most ZCARD units are used: entries that have left, or are ahead of the clock, can
-- only make this number too large. ZSCORE shows whether there is a total. The expiry tells whether
-- any entry has left, and when the oldest one leaves. If the clock has stepped back, or another
-- program has set the expiry, only these figures may be wrong. Once the log is full, its entries
-- are read.
expires = call('PEXPIRETIME', key)
local fits, expiry = expires == -2 and units > 0, nil
if fits then
  size, reset, expiry = 0, window, ceil(now / 1000) + millis + SLACK
else
  size, reset = try('ZCARD', key), expires * 1000 - due
  -- A log with one entry expires a window earlier than a log with more entries, so the second entry
  -- moves the expiry.
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
  -- The log is full, and no entry has left: one more unit fits when the oldest entry leaves. If
  -- entries are ahead of the clock, the general way has to move them.
  local oldest = call('ZREVRANGE', key, '0', '0', 'WITHSCORES')[2]
  local leaves = oldest and oldest + 0 < 0 and window - oldest - now
  if leaves and leaves > 0 and call('ZCOUNT', key, '-inf', '(' .. score) == 0 then
    used, reset, retry = size, leaves, leaves
  end
end
