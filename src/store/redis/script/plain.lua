-- The way of most checks: exact logs with room, and ids that nobody has given before. Whether that is so is seen before
-- anything is written; if not, run.lua goes on with that check. `decide` in check.lua would do the same.

local MANY = 100  -- entries that have left: so many are read and dropped in steps elsewhere

-- How a log stands: the units in the window, how many entries have left it, microseconds until the next one does if one is
-- admitted now, the expiry that the key needs then if it has not got it, and the sum if it is written down. Nothing if
-- there is no room, or more to it.
local function look_plainly(key, units, cost, window, window_ms, cutoff)
  -- What is counted is what has left, and the sum.
  local beyond, sum, gone = pcall('ZCOUNT', key, cutoff, '+inf'), false, 0
  if beyond ~= 0 then
    if type(beyond) == 'table' or beyond > MANY then return end
    sum = call('ZSCORE', key, 'used')
    gone = sum and beyond - 1 or beyond
  end
  local expires = gone == 0 and call('PEXPIRETIME', key)
  if expires == -2 then return 0, 0, window, present + window_ms + SLACK end

  local used = sum and tonumber(sum) or call('ZCARD', key) - gone
  if sum and gone > 0 then
    for _, member in ipairs(call('ZREVRANGE', key, 1, gone)) do
      -- Not a number if copies share the entry.
      local entry = #member == 8 and 1 or tonumber(string.sub(member, 9))
      if not entry then return end
      used = used - entry
    end
  end
  if used + cost > units then return end

  local oldest = expires and (expires - 2 * window_ms - SLACK) * 1000
  if oldest and oldest - 1000 + window >= now then
    return used, 0, oldest < now and oldest + window - now or window, nil, sum
  end
  oldest = call('ZREVRANGE', key, beyond, beyond, 'WITHSCORES')[2]
  if oldest then
    oldest = -tonumber(oldest)
    if oldest > now then return end
    return used, gone, oldest + window - now, ceil(oldest / 1000) + 2 * window_ms + SLACK, sum
  end
  if not sum then return used, gone, window, present + window_ms + SLACK end
end

-- Counts units in a log that stands so, and replies.
local function admit_plainly(key, id, cost, used, gone, reset, expiry, sum)
  local is_summed = sum or cost > 1
  -- The first write, since a server without memory refuses no other.
  if is_summed then
    call('ZADD', key, used + cost, 'used', score, cost > 1 and id .. string.format('%.0f', cost) or id)
  else
    call('ZADD', key, score, id)
  end
  if gone > 0 then
    local last = is_summed and -2 or -1
    call('ZREMRANGEBYRANK', key, last + 1 - gone, last)
  end
  if expiry then call('PEXPIREAT', key, expiry) end
  reply[r + 1], reply[r + 2] = used + cost, reset
  r = r + 2
end

-- Checks of one charge first, without a table: a check that is alone is decided sooner than one is made. The first that
-- needs more is left to run.lua, and all that follow it.
local resume
while is_expiry_telling and a < #ARGV and not resume do
  local run = a + 1
  if ARGV[run] ~= '1' or ARGV[run + 1] ~= 'plain' or ARGV[run + 2] ~= '1' or ARGV[run + 4] == '0' then break end
  local units, cost, window = ARGV[run + 3] + 0, ARGV[run + 4] + 0, ARGV[run + 5] + 0
  local window_ms, cutoff = ceil(window / 1000), string.format('%.0f', window - now)
  local first = run + 7
  local last = first - 1 + ARGV[first - 1]
  for i = first, last do
    local key = KEYS[k + 1]
    local used, gone, reset, expiry, sum = look_plainly(key, units, cost, window, window_ms, cutoff)
    if not used then
      resume = i
      break
    end
    admit_plainly(key, ARGV[i], cost, used, gone, reset, expiry, sum)
    k = k + 1
  end
  if not resume then a = last end
end
if a == #ARGV then return reply end
