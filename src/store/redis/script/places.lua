-- Places of concurrent limits. A place is an entry of one unit in an exact log, which its process renews as long as it is held: so the
-- window of the log is the time after which the places of a dead process are free.

-- Frees the places of an admission, at a cost of 0, or renews them. Returns the record: whether any was held.
local function keep_places(charges, k, id)
  local record = { 0, -1, 0, 0, 0, 0, 0 }
  for i = 1, #charges do
    local charge, key = charges[i], KEYS[k + i]
    local at, r = pcall('ZSCORE', key, id), 5 * i - 2
    -- Another type of value is not of our making.
    local is_there = type(at) == 'string'
    if is_there and now + at < charge.window then record[1] = 1 end
    record[r], record[r + 1], record[r + 2], record[r + 3], record[r + 4] = 0, 0, 0, 0, 0
    if is_there and charge.cost == 0 then
      call('ZREM', key, id)
      record[r] = call('ZCOUNT', key, '-inf', now < charge.window and '+inf' or '(' .. charge.cutoff)
    elseif is_there and now + at < charge.window then
      -- A server without memory accepts the ZADD after a ZREM.
      if pcall('ZADD', key, score, id) ~= 0 then
        call('ZREM', key, id)
        call('ZADD', key, score, id)
      end
      call('PEXPIRE', key, 2 * charge.window_ms + SLACK)
    end
  end
  return record
end
