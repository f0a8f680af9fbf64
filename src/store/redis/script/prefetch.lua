-- The way of most prefetches: of an exact log that no entry has left, and that has an older entry than the prefetch. It does what
-- check.lua and settle.lua do. All that such a log needs is at its end, so a prefetch costs three or four calls to take, and
-- five to give back. run.lua goes on from the first prefetch that needs more.

-- Reads the sums of a log, and the member and time of its oldest entry. Returns nothing if an entry has left, or if the
-- oldest one is ahead of the clock.
local function read_end(charge, key)
  local last = pcall('ZREVRANGE', key, 0, 2, 'WITHSCORES')
  local sum, held, place = 0, 0, 1
  if last[1] == 'used' then
    sum, place = tonumber(last[2]), 3
    if last[3] == 'held' then held, place = tonumber(last[4]), 5 end
  else
    sum = #last == 6 and call('ZCARD', key)
  end
  local oldest = last[place + 1] and -tonumber(last[place + 1])
  if not sum or not oldest or oldest > now or oldest + charge.window <= now then return end
  -- Other numbers than these are not of our making.
  if not (sum % 1 == 0 and held % 1 == 0 and held >= 0 and held <= sum and sum < 2 ^ 53) then return end
  return sum, held, last[place], oldest
end

local function prefetch_member(id, units)
  return id .. '+0' .. string.format('%.0f', units)
end

-- Replies the status of a log that was changed so.
local function reply_end(charge, key, sum, held, oldest)
  local left = charge.window_ms + SLACK
  if is_expiry_telling then
    -- Mostly it stays. Under another window than this, it may be too early for the units of the prefetch.
    local expires = ceil(oldest / 1000) + charge.window_ms + left
    if call('PEXPIRETIME', key) ~= expires then call('PEXPIREAT', key, expires) end
  elseif is_server_time then
    call('PEXPIREAT', key, present + left)
  else
    call('PEXPIRE', key, left)
  end
  local reset = oldest + charge.window - now
  reply[r + 1], reply[r + 2] = sum, reset
  r = r + 2
  if held > 0 then
    reply[r], reply[r + 1] = -1 - reset, held
    r = r + 1
  end
  k = k + 1
  return true
end

-- Takes a prefetch. Returns false if it has done nothing.
local function take_prefetch(charge, key, id)
  local sum, held, _, oldest = read_end(charge, key)
  if not sum or sum + charge.cost > charge.units then return false end
  sum, held = sum + charge.cost, held + charge.cost
  local ends = score_of(now + charge.lease - charge.window)
  -- A server without memory refuses this write.
  local written = pcall('ZADD', key, sum, 'used', held, 'held', ends, prefetch_member(id, charge.cost))
  return type(written) ~= 'table' and reply_end(charge, key, sum, held, oldest)
end

-- Gives back what is unspent of a prefetch. Returns false if it has done nothing.
local function give_back(charge, key, id, at)
  local member = prefetch_member(id, charge.cost)
  local sum, held, first, oldest = read_end(charge, key)
  if not sum or first == member or held < charge.cost then return false end
  local ends = call('ZSCORE', key, member)
  ends = ends and -tonumber(ends)
  if not ends or ends > at + charge.lease - charge.window then return false end
  sum, held = sum - charge.cost + charge.settled, held - charge.cost
  -- The first write, so that a server without memory lets units be given back.
  if held > 0 then call('ZREM', key, member) else call('ZREM', key, member, 'held') end
  local sums = held > 0 and { sum, 'used', held, 'held' } or { sum, 'used' }
  if charge.settled > 0 then
    -- All units that are spent by now count from now at the latest.
    sums[#sums + 1] = score_of(ends < now and ends or now)
    sums[#sums + 1] = id .. string.format('%.0f', charge.settled) .. '.'
  end
  call('ZADD', key, unpack(sums))
  r = r + 1
  reply[r] = -2
  return reply_end(charge, key, sum, held, oldest)
end

-- Takes or gives back a prefetch, if it is one, and if there is no more to do. Returns false if it has done nothing.
local function do_prefetch(shape, i)
  local charge = shape[1]
  if #shape > 1 or not charge.is_prefetch or charge.part or now < charge.window then return false end
  local key = KEYS[k + 1]
  if shape.kind == 'settle' then return charge.settled and give_back(charge, key, ARGV[i], ARGV[i + 1] + 0) end
  return shape.kind == 'any' and shape.copies == 1 and take_prefetch(charge, key, ARGV[i])
end

while a < #ARGV and not resume do
  for i = shape.first, shape.last, shape.is_settlement and 2 or 1 do
    if not do_prefetch(shape, i) then
      resume = i
      break
    end
  end
  if not resume then
    a = shape.last
    if a < #ARGV then shape = read_shape(a + 1) end
  end
end
if a == #ARGV then return reply end
