-- The way of most checks: one charge, on an exact log, with room. Returns whether that is so; if not, nothing is done.
-- `decide` in check.lua would do the same.

local MANY = 100  -- entries that have left: so many are read and dropped in steps elsewhere

-- The units of so many entries that have left, of a log with a sum. None if copies share one, or if one is held or settled.
local function units_of_last(key, gone)
  local sum = 0
  for _, member in ipairs(call('ZREVRANGE', key, 1, gone)) do
    local units = string.sub(member, 9)
    units = units == '' and 1 or tonumber(units)
    if not units then return end
    sum = sum + units
  end
  return sum
end

-- The time of the entry of this rank, from the oldest.
local function time_of(key, rank)
  local found = call('ZREVRANGE', key, rank, rank, 'WITHSCORES')[2]
  return found and -tonumber(found)
end

local function decide_plainly(key, id, units, cost, window, cutoff)
  -- What is counted is what has left, and the sum.
  local beyond = pcall('ZCOUNT', key, cutoff, '+inf')
  if type(beyond) == 'table' or beyond > MANY then return false end

  local sum = beyond > 0 and call('ZSCORE', key, 'used')
  local gone = sum and beyond - 1 or beyond
  local gone_units = gone
  if sum and gone > 0 then
    gone_units = units_of_last(key, gone)
    if not gone_units then return false end
  end
  local window_ms, expires = ceil(window / 1000), gone == 0 and call('PEXPIRETIME', key)
  local used, oldest, is_covered = 0, nil, false
  if expires ~= -2 then
    used = (sum and tonumber(sum) or call('ZCARD', key)) - gone_units
    if used + cost > units then return false end
    if expires then
      oldest = (expires - 2 * window_ms - SLACK) * 1000
      is_covered = oldest - 1000 + window >= now
    end
    if not is_covered then
      oldest = time_of(key, beyond)
      if (oldest or now) > now or sum and not oldest then return false end
    end
  end

  -- The first write, since a server without memory refuses no other.
  local is_summed = sum or cost > 1
  if is_summed then
    call('ZADD', key, used + cost, 'used', score, cost > 1 and id .. string.format('%.0f', cost) or id)
  else
    call('ZADD', key, score, id)
  end
  if gone > 0 then
    local last = is_summed and -2 or -1
    call('ZREMRANGEBYRANK', key, last + 1 - gone, last)
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
