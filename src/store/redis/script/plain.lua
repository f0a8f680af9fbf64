-- The way of most checks: one charge, on an exact log from which nothing has left, with room. Returns whether that is so;
-- if not, nothing is done. `decide` in check.lua would do the same.
local function decide_plainly(key, id, units, cost, window, cutoff)
  -- What is counted is what has expired, and the sum.
  local beyond, used, is_summed = pcall('ZCOUNT', key, cutoff, '+inf'), 0, false
  if beyond == 1 then
    local last = call('ZREVRANGE', key, 0, 0, 'WITHSCORES')
    used, is_summed = tonumber(last[2]), last[1] == 'used'
  end
  if beyond ~= 0 and not is_summed then return false end

  local window_ms, expires = ceil(window / 1000), call('PEXPIRETIME', key)
  local oldest, is_covered
  if expires ~= -2 then
    used = is_summed and used or call('ZCARD', key)
    if used + cost > units then return false end
    oldest = (expires - 2 * window_ms - SLACK) * 1000
    is_covered = oldest - 1000 + window >= now
    if not is_covered then
      local rank = is_summed and 1 or 0
      local first = call('ZREVRANGE', key, rank, rank, 'WITHSCORES')[2]
      oldest = first and -tonumber(first) or now + 1
      if oldest > now then return false end
    end
  end

  -- The first write, since a server without memory refuses no other.
  if is_summed or cost > 1 then
    call('ZADD', key, used + cost, 'used', score, cost > 1 and id .. string.format('%.0f', cost) or id)
  else
    call('ZADD', key, score, id)
  end
  if not oldest then
    call('PEXPIREAT', key, present + window_ms + SLACK)
  elseif not is_covered then
    call('PEXPIREAT', key, ceil(oldest / 1000) + 2 * window_ms + SLACK)
  end
  reply[r + 1], reply[r + 2] = used + cost, oldest and oldest < now and oldest + window - now or window
  r, k = r + 2, k + 1
  return true
end

-- Whether the checks of a run may be decided so.
local function is_plain(run)
  return ARGV[run + 1] == 'plain' and ARGV[run] == '1' and ARGV[run + 2] == '1' and ARGV[run + 4] ~= '0'
end

-- The first check that needs more is left to run.lua, and all that follow it.
local resume
while is_expiry_telling and a < #ARGV and not resume do
  local run = a + 1
  if not is_plain(run) then break end
  local units, cost, window = ARGV[run + 3] + 0, ARGV[run + 4] + 0, ARGV[run + 5] + 0
  local cutoff = string.format('%.0f', window - now)
  local first = run + 7
  local last = first - 1 + ARGV[first - 1]
  for i = first, last do
    if not decide_plainly(KEYS[k + 1], ARGV[i], units, cost, window, cutoff) then
      resume = i
      break
    end
  end
  if not resume then a = last end
end
if a == #ARGV then return reply end
