-- Decides a batch of checks, one after the other. Each check is admitted whole or refused whole. A check may come in
-- several copies, from several callers: they are decided as if one after the other, too.
--
-- KEYS   one sorted set a charge: the log of one limit for one identity
-- ARGV   now        microseconds since the Unix epoch, or '' for the server's own clock
--        shapes     how many follow; then for each shape, which many checks may have in common
--          copies   of the check
--          given    '1' if its id may have been counted before, else '0'
--          charges  how many; then for each charge
--            units  the limit
--            cost   units to take; 0 asks without spending
--            window microseconds
--        then for each check
--          shape    its number, from 1; its charges take the next keys, in order
--          id       eight bytes: the identity of the first copy's admission; those of the others follow it
-- reply  a flat list: now, then for each check
--          admitted how many copies, the first ones; or an error text if a key could not be read
--          then for each charge
--            used   units in the window after the decision
--            reset  microseconds until the oldest of them leaves the window, 0 if there are none
--            retry  microseconds until this charge would no longer refuse one more copy, 0 if it refused none
--
-- The log   one entry an admission, or one for all admitted copies of a check: score = its time in microseconds,
--           member = its id, and behind the id its units if there are more than 1. Once there has been such an entry,
--           one more member, 'used', has the sum of all entries as its negated score, which puts it before them all:
--           one read of the first ranks gives the sum and the oldest entry. Until then the sum is the number of entries.
-- Cost      O(log n) a charge, and O(1) more for each entry that has expired. A refusal whose log has the sum written
--           down reads as many entries as have to leave: no more than the cost of the refused charge.
-- Expiry    window + 1 s after the last admission. A refusal moves no expiry and adds no entry.
-- Numbers   integers below 2^53 in doubles. As arguments they are exact; in texts they are written with %.0f, since
--           `..` and tostring would lose digits.
-- Server    Redis 6.2 or newer, and what is compatible with it. Commands: TIME ZRANGE ZRANGEBYSCORE ZREVRANGE ZSCORE
--           ZCARD ZADD ZREMRANGEBYRANK ZREMRANGEBYSCORE PEXPIRE UNLINK.

local SLACK = 1000  -- milliseconds a key outlives its last unit: a promoted replica's clock may be ahead
local CHUNK = 500   -- entries read at a time

local call, pcall, floor, max, min = redis.call, redis.pcall, math.floor, math.max, math.min

local function text(number)
  return string.format('%.0f', number)
end

local function entry(id, units)
  return units == 1 and id or id .. text(units)
end

local function weight(member)
  return tonumber(string.sub(member, 9)) or 1
end

-- Drops what has expired. Returns the units left, the time of the oldest entry, whether their sum is written down, and
-- whether what is written is out of date. Or nil and an error text, before anything was written.
local function trim(key, cutoff)
  local first = pcall('ZRANGE', key, 0, 0, 'WITHSCORES')
  if first.err then return nil, first.err end
  local member, score = first[1], tonumber(first[2])
  if not member then return 0, nil, false, false end

  local is_summed = member == 'used'
  local oldest = is_summed and tonumber(call('ZRANGE', key, 1, 1, 'WITHSCORES')[2]) or score
  if oldest > cutoff then
    return is_summed and -score or call('ZCARD', key), oldest, is_summed, false
  end

  -- A large log that is all gone is freed at once, off the server's main thread.
  local size = call('ZCARD', key)
  if size > CHUNK and tonumber(call('ZREVRANGE', key, 0, 0, 'WITHSCORES')[2]) <= cutoff then
    call('UNLINK', key)
    return 0, nil, false, false
  end
  if not is_summed then
    local left = size - call('ZREMRANGEBYSCORE', key, 0, text(cutoff))
    if left == 0 then return 0, nil, false, false end
    return left, tonumber(call('ZRANGE', key, 0, 0, 'WITHSCORES')[2]), false, false
  end

  -- What leaves has to be subtracted. In a steady stream that is one entry.
  local used, chunk = -score, 2
  while true do
    local entries, expired = call('ZRANGE', key, 1, chunk, 'WITHSCORES'), 0
    while expired * 2 < #entries and tonumber(entries[expired * 2 + 2]) <= cutoff do
      used = used - weight(entries[expired * 2 + 1])
      expired = expired + 1
    end
    -- No entries but a sum: not of our making, and nothing to go on with.
    if used == 0 or #entries == 0 then
      call('UNLINK', key)
      return 0, nil, false, false
    end
    call('ZREMRANGEBYRANK', key, 1, expired)
    oldest = tonumber(entries[expired * 2 + 2])
    if oldest then return used, oldest, true, true end
    chunk = min(chunk * 8, CHUNK)
  end
end

-- The time of the entry with whose leaving at least `units` units have left.
local function departure(key, is_summed, units, now)
  if not is_summed then
    return tonumber(call('ZRANGE', key, units - 1, units - 1, 'WITHSCORES')[2])
  end
  local rank = 1
  while true do
    local entries = call('ZRANGE', key, rank, rank + CHUNK - 1, 'WITHSCORES')
    -- A sum above the entries is not of our making; no script may loop for ever over it.
    if #entries == 0 then return now end
    for i = 1, #entries, 2 do
      units = units - weight(entries[i])
      if units <= 0 then return tonumber(entries[i + 1]) end
    end
    rank = rank + CHUNK
  end
end

-- Where the clock has stepped back, entries from the future count as having happened now, so that the key is right again
-- after one window.
local function pull_back(key, now, expiry)
  if tonumber(call('ZREVRANGE', key, 0, 0, 'WITHSCORES')[2]) <= now then return end
  for _, member in ipairs(call('ZRANGEBYSCORE', key, '(' .. text(now), '+inf')) do
    call('ZADD', key, now, member)
  end
  call('PEXPIRE', key, expiry)
end

-- How many copies of a check an earlier try has counted under this id: all that it admitted share one entry.
local function counted_before(key, id, cost, copies)
  for count = copies, 1, -1 do
    if call('ZSCORE', key, entry(id, count * cost)) then return count end
  end
  return 0
end

local now = tonumber(ARGV[1])
if not now then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end

local now_text = text(now)  -- quicker to pass on than the number

local shapes = {}
local a = 2  -- how many arguments have been taken
for number = 1, tonumber(ARGV[2]) do
  local shape = { copies = tonumber(ARGV[a + 1]), given = ARGV[a + 2] == '1', charges = tonumber(ARGV[a + 3]) }
  a = a + 3
  for i = 1, shape.charges do
    local window = tonumber(ARGV[a + 3])
    shape[i] = {
      units = tonumber(ARGV[a + 1]),
      cost = tonumber(ARGV[a + 2]),
      window = window,
      expiry = math.ceil(window / 1000) + SLACK,
    }
    a = a + 3
  end
  shapes[number] = shape
end

local reply, r = { now }, 1  -- and its length
local k = 0                  -- how many keys have been taken
local used, oldest, is_summed, is_stale, counted = {}, {}, {}, {}, {}  -- of each charge of a check

while a < #ARGV do
  local shape, id = shapes[tonumber(ARGV[a + 1])], ARGV[a + 2]
  local copies, charges = shape.copies, shape.charges
  a = a + 2

  -- First look at every charge, then write: no key is written unless all of them fit.
  local admitted, before, failure = copies, 0, nil
  for i = 1, charges do
    local charge = shape[i]
    local cost = charge.cost
    counted[i] = 0
    if not failure then
      used[i], oldest[i], is_summed[i], is_stale[i] = trim(KEYS[k + i], now - charge.window)
      failure = not used[i] and oldest[i] or nil
    end
    if failure then
      used[i], oldest[i], is_stale[i] = 0, nil, false
    elseif cost > 0 then
      if shape.given then
        counted[i] = counted_before(KEYS[k + i], id, cost, copies)
        before = max(before, counted[i])
      end
      admitted = min(admitted, counted[i] + max(0, floor((charge.units - used[i]) / cost)))
    end
  end
  -- What an earlier try has refused stays refused.
  if before > 0 then admitted = min(admitted, before) end

  r = r + 1
  reply[r] = failure or admitted

  local is_explained = admitted == copies
  for i = 1, charges do
    local key, charge = KEYS[k + i], shape[i]
    local cost, window, retry = charge.cost, charge.window, 0

    local taken = cost * (admitted - counted[i])
    if taken > 0 and not failure then
      used[i] = used[i] + taken
      oldest[i] = oldest[i] or now
      if taken > 1 or is_summed[i] then
        call('ZADD', key, -used[i], 'used', now_text, entry(id, taken))
      else
        call('ZADD', key, now_text, id)
      end
      call('PEXPIRE', key, charge.expiry)
    elseif is_stale[i] then
      call('ZADD', key, -used[i], 'used')
    end

    -- Whether this charge refuses the first copy that is not admitted; one that it has counted before it does not.
    local excess = used[i] + cost - charge.units
    if admitted < copies and admitted >= counted[i] and cost > 0 and excess > 0 and not failure then
      pull_back(key, now, charge.expiry)
      retry = departure(key, is_summed[i] or taken > 1, excess, now) + window - now
      is_explained = true
    end

    reply[r + 1] = used[i]
    reply[r + 2] = oldest[i] and min(oldest[i], now) + window - now or 0
    reply[r + 3] = retry
    r = r + 3
  end
  if not is_explained then reply[r] = 1 end

  k = k + charges
end

return reply
