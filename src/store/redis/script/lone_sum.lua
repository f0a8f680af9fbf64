-- A check of a fixed window, a counter or a compact log that is alone in its batch, in the short
-- form. Nothing of the script is made for it but sums.lua.
--
-- Takes  is_expiry_telling, now, short, SLACK, sums
-- Gives  nothing

if is_expiry_telling and short and #short == 40 then
  local used, reset, retry = sums(now, SLACK)(KEYS[1], struct.unpack('<ddddd', short))
  if retry then return { now, { 0, -1, used, reset, 0, retry, retry } } end
  if used then return struct.pack('<ddd', now, used, reset) end
end
