-- Places of concurrent limits. A place is an entry of one unit in an exact log, which its process renews as long as it is held: so the
-- window of the log is the time after which the places of a dead process are free.

-- Frees the places of an admission, at a cost of 0, or renews them. Appends to the reply of length `r`, for each, how many are held then if it
-- is freed, and whether it was held.
local function keep_places(charges, k, id, reply, r)
  for i = 1, #charges do
    local charge, key = charges[i], KEYS[k + i]
    local at, used = pcall('ZSCORE', key, id), 0
    -- Another type of value is not of our making.
    local is_there = type(at) == 'string'
    local is_held = is_there and now + at < charge.window
    if is_there and charge.cost == 0 then
      call('ZREM', key, id)
      used = call('ZCOUNT', key, '-inf', now < charge.window and '+inf' or '(' .. charge.cutoff)
    elseif is_held then
      -- A server without memory accepts the ZADD after a ZREM.
      if pcall('ZADD', key, score, id) ~= 0 then
        call('ZREM', key, id)
        call('ZADD', key, score, id)
      end
      call('PEXPIRE', key, 2 * charge.window_ms + SLACK)
    end
    reply[r + 1], reply[r + 2], r = used, is_held and 1 or 0, r + 2
  end
  return r
end
