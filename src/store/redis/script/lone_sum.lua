-- Decides a lone check under a fixed window, counter or compact log, in the short form. Of the
-- script's functions, only those in estimates.lua and sums.lua are created for it.
--
-- Takes  is_expiry_telling, now, short, SLACK, sums
-- Gives  nothing

if is_expiry_telling and short and #short == 40 then
  local used, reset, retry = sums(now, SLACK)(KEYS[1], struct.unpack('<ddddd', short))
  if retry then return { now, { 0, -1, used, reset, 0, retry, retry } } end
  if used then return struct.pack('<ddd', now, used, reset) end
end
