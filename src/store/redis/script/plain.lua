-- The way of what quick.lua leaves: exact logs with room, and ids that nobody has given before. All charges of a check are
-- looked at before anything is written; where it is otherwise, run.lua goes on with that check. `decide` in check.lua would
-- do the same.

local MANY = 100  -- entries that have left: so many are read and dropped in steps elsewhere

-- Notes in a charge how its log stands: the units in the window, how many entries have left it, microseconds until the next
-- one does if one is admitted now, the expiry that the key needs then if it has not got it, and the sum if it is written
-- down. Returns whether there is room, and no more to it.
local function look_plainly(charge, key)
  local window, window_ms = charge.window, charge.window_ms
  -- What is counted is what has left, and the sum.
  local beyond, sum, gone = pcall('ZCOUNT', key, charge.cutoff, '+inf'), false, 0
  if beyond ~= 0 then
    if type(beyond) == 'table' or beyond > MANY then return false end
    sum = call('ZSCORE', key, 'used')
    gone = sum and beyond - 1 or beyond
  end
  local expires = gone == 0 and call('PEXPIRETIME', key)
  charge.sum, charge.gone, charge.expiry = sum, gone, nil
  local first_expiry = present + (charge.cost > 1 and 2 or 1) * window_ms + SLACK
  if expires == -2 then
    charge.used, charge.reset, charge.expiry = 0, window, first_expiry
    return true
  end

  local used = sum and tonumber(sum) or call('ZCARD', key) - gone
  if sum and gone > 0 then
    for _, member in ipairs(call('ZREVRANGE', key, 1, gone)) do
      -- Not a number if copies share the entry, or if this is the sum of what is held.
      local entry = #member == 8 and 1 or tonumber(string.sub(member, 9))
      if not entry then return false end
      used = used - entry
    end
  end
  -- Also where it is no number that a sum can be.
  if not (used >= 0 and used + charge.cost <= charge.units) then return false end
  charge.used = used

  local oldest = expires and (sum or used > 1) and (expires - 2 * window_ms - SLACK) * 1000
  if oldest and oldest - 1000 + window >= now then
    charge.reset = oldest < now and oldest + window - now or window
    return true
  end
  oldest = call('ZREVRANGE', key, beyond, beyond, 'WITHSCORES')[2]
  if oldest then
    oldest = -tonumber(oldest)
    charge.reset, charge.expiry = oldest + window - now, ceil(oldest / 1000) + 2 * window_ms + SLACK
    return oldest <= now
  end
  charge.reset, charge.expiry = window, first_expiry
  return not sum
end

-- Counts the units of a charge in a log that stands so, and replies. Returns false if it has done nothing.
local function admit_plainly(charge, key, id)
  local cost, gone, used = charge.cost, charge.gone, charge.used + charge.cost
  local is_summed, written = charge.sum or cost > 1, nil
  -- The first write of a check is the only one that a server without memory refuses.
  if is_summed then
    written = pcall('ZADD', key, used, 'used', score, cost > 1 and id .. string.format('%.0f', cost) or id)
  else
    written = pcall('ZADD', key, score, id)
  end
  if type(written) == 'table' then return false end
  if gone > 0 then
    local last = is_summed and -2 or -1
    call('ZREMRANGEBYRANK', key, last + 1 - gone, last)
  end
  if charge.expiry then call('PEXPIREAT', key, charge.expiry) end
  reply[r + 1], reply[r + 2] = used, charge.reset
  r = r + 2
  return true
end

-- Decides a check. Returns false if it has done nothing.
local function decide_plainly(id, charges)
  for i = 1, #charges do
    if not look_plainly(charges[i], KEYS[k + i]) then return false end
  end
  for i = 1, #charges do
    if not admit_plainly(charges[i], KEYS[k + i], id) then return false end
  end
  k = k + #charges
  return true
end

-- Whether the checks of a run may be decided so: they have no copies, and none is a question that spends nothing.
local function is_plain(run)
  if not is_expiry_telling or ARGV[run] ~= '1' or ARGV[run + 1] ~= 'plain' then return false end
  for i = 1, ARGV[run + 2] do
    if ARGV[run + 1 + 3 * i] == '0' then return false end
  end
  return true
end

-- The charges of a run, each by its three figures.
local function charges_of(run)
  local charges = {}
  for i = 1, ARGV[run + 2] do
    local place = run + 3 * i
    local window = ARGV[place + 2] + 0
    charges[i] = {
      units = ARGV[place] + 0, cost = ARGV[place + 1] + 0, window = window, window_ms = ceil(window / 1000),
      cutoff = string.format('%.0f', window - now),
    }
  end
  return charges
end

local stopped = resume
resume = nil
while a < #ARGV and not resume do
  local run = a + 1
  if not is_plain(run) then break end
  local charges = charges_of(run)
  local first = run + 4 + 3 * #charges
  local last = first - 1 + ARGV[first - 1]
  for i = stopped or first, last do
    if not decide_plainly(ARGV[i], charges) then
      resume = i
      break
    end
  end
  stopped = nil
  if not resume then a = last end
end
if a == #ARGV then return reply end
