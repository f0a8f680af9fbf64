-- The fastest path, for a lone single unit in the short form. Before this, the script does not
-- create any function or table.
--
-- Takes  call, ceil, is_expiry_telling, now, score, short, SLACK, try
-- Gives  known_expires, known_size

local known_expires, known_size  -- the only key's expiry, and the number of its members, if they were read
if is_expiry_telling and short and #short == 24 then
  local key, id, units, window = KEYS[1], struct.unpack('<c8dd', short)
  local millis = ceil(window / 1000)
  local expires, size, used, reset, retry
  local due = (2 * millis + SLACK) * 1000 - window + now
  --> unit.lua
  if retry then return { now, { 0, -1, used, reset, 0, retry, retry } } end
  if used then return struct.pack('<ddd', now, used, reset) end
  known_expires, known_size = expires, size
end
