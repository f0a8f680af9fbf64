-- Decides a batch of checks, one after the other. Each check is admitted whole or refused whole. A check may come in
-- several copies, from several callers: they are decided as if one after the other, too.
--
-- KEYS   one sorted set a charge: the log of one limit for one identity
-- ARGV   now        microseconds since the Unix epoch, or '' for the server's own clock
--        then for each check
--          charges  how many there are; they take the next keys, in order
--          copies   how many
--          id       eight bytes: the identity of the first copy's admission; those of the others follow it
--          given    '1' if the same id may have been counted before, else '0'
--          then for each charge
--            units  the limit
--            cost   units to take; 0 asks without spending
--            window microseconds
-- reply  a flat list: now, then for each check
--          admitted how many copies, the first ones; or an error text if a key could not be read
--          then for each charge
--            used   units in the window after the decision
--            reset  microseconds until the oldest of them leaves the window, 0 if there are none
--            retry  microseconds until this charge would no longer refuse one more copy, 0 if it refused none
--
-- The log   one entry an admission, or one for all admitted copies of a check: score = its time in microseconds,
--           member = its id, and behind the id its units if there are more than 1. One more member, 'used', has the sum
--           of all entries as its negated score, which puts it before every entry: one read of the first ranks gives
--           the sum and the oldest entry.
-- Cost      O(log n) a charge, and O(1) more for each entry that has expired. A refusal whose log has costs above 1
--           reads as many entries as have to leave: no more than the cost of the refused charge.
-- Expiry    window + 1 s after the last admission. A refusal moves no expiry and adds no entry.
-- Numbers   integers below 2^53 in doubles, written with %.0f: `..` and tostring would lose digits.
-- Server    Redis 6.2 or newer, and what is compatible with it. Commands: TIME ZRANGE ZRANGEBYSCORE ZREVRANGE ZSCORE
--           ZCARD ZADD ZREMRANGEBYRANK PEXPIRE UNLINK.

local SLACK = 1000  -- milliseconds a key outlives its last unit: a promoted replica's clock may be ahead
local CHUNK = 500   -- entries read at a time

local function text(number)
  return string.format('%.0f', number)
end

local function ttl(window)
  return text(math.ceil(window / 1000) + SLACK)
end

local function entry(id, units)
  return units == 1 and id or id .. text(units)
end

local function weight(member)
  return tonumber(string.sub(member, 9)) or 1
end

-- Drops what has expired. Returns the units left, the time of the oldest entry, and whether 'used' is now out of date.
-- Or nil and an error text, before anything was written.
local function trim(key, cutoff)
  local first = redis.pcall('ZRANGE', key, 0, 2, 'WITHSCORES')
  if first.err then return nil, first.err end
  if #first == 0 then return 0, nil, false end

  local used, oldest, second = -tonumber(first[2]), tonumber(first[4]), tonumber(first[6])
  if oldest > cutoff then return used, oldest, false end

  -- The usual case in a steady stream: one entry has left and the next has not.
  if second and second > cutoff then
    redis.call('ZREMRANGEBYRANK', key, 1, 1)
    return used - weight(first[3]), second, true
  end

  local newest = redis.call('ZREVRANGE', key, 0, 0, 'WITHSCORES')
  if tonumber(newest[2]) <= cutoff then
    redis.call('UNLINK', key)
    return 0, nil, false
  end
  repeat
    local expired = redis.call('ZRANGEBYSCORE', key, 0, text(cutoff), 'LIMIT', 0, CHUNK)
    for _, member in ipairs(expired) do
      used = used - weight(member)
    end
    if #expired > 0 then redis.call('ZREMRANGEBYRANK', key, 1, #expired) end
  until #expired < CHUNK
  return used, tonumber(redis.call('ZRANGE', key, 1, 1, 'WITHSCORES')[2]), true
end

-- The time of the entry with whose leaving at least `units` units have left.
local function departure(key, used, units)
  if redis.call('ZCARD', key) - 1 == used then
    return tonumber(redis.call('ZRANGE', key, units, units, 'WITHSCORES')[2])
  end
  local rank = 1
  while true do
    local entries = redis.call('ZRANGE', key, rank, rank + CHUNK - 1, 'WITHSCORES')
    for i = 1, #entries, 2 do
      units = units - weight(entries[i])
      if units <= 0 then return tonumber(entries[i + 1]) end
    end
    rank = rank + CHUNK
  end
end

-- The clock has stepped back: entries from the future count as having happened now, so that the key is right again
-- after one window.
local function pull_back(key, now, expiry)
  local future = redis.call('ZRANGEBYSCORE', key, '(' .. now, '+inf')
  for _, member in ipairs(future) do
    redis.call('ZADD', key, now, member)
  end
  redis.call('PEXPIRE', key, expiry)
end

-- How many copies of a check an earlier try has counted under this id: all that it admitted share one entry.
local function counted_before(key, id, cost, copies)
  for count = copies, 1, -1 do
    if redis.call('ZSCORE', key, entry(id, count * cost)) then return count end
  end
  return 0
end

local now
if ARGV[1] == '' then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
else
  now = tonumber(ARGV[1])
end
local now_text = text(now)

local reply, r = { now }, 1  -- and its length
local k, a = 0, 1            -- how many keys and arguments the checks so far have taken
local used, oldest, stale, counted = {}, {}, {}, {}  -- of each charge of a check

while a < #ARGV do
  local charges, copies, id, given = tonumber(ARGV[a + 1]), tonumber(ARGV[a + 2]), ARGV[a + 3], ARGV[a + 4] == '1'
  a = a + 4

  -- First look at every charge, then write: no key is written unless all of them fit.
  local admitted, before, failure = copies, 0, nil
  for i = 1, charges do
    local key, at = KEYS[k + i], a + 3 * i
    local units, cost, window = tonumber(ARGV[at - 2]), tonumber(ARGV[at - 1]), tonumber(ARGV[at])
    if failure then
      used[i], oldest[i], stale[i] = 0, nil, false
    else
      used[i], oldest[i], stale[i] = trim(key, now - window)
      if not used[i] then
        failure, used[i], oldest[i] = oldest[i], 0, nil
      end
    end
    counted[i] = 0
    if cost > 0 and not failure then
      if given then
        counted[i] = counted_before(key, id, cost, copies)
        before = math.max(before, counted[i])
      end
      local fitting = math.max(0, math.floor((units - used[i]) / cost))
      admitted = math.min(admitted, counted[i] + fitting)
    end
  end
  -- What an earlier try has refused stays refused.
  if before > 0 then admitted = math.min(admitted, before) end

  r = r + 1
  reply[r] = failure or admitted

  local is_explained = admitted == copies
  for i = 1, charges do
    local key, at = KEYS[k + i], a + 3 * i
    local units, cost, window = tonumber(ARGV[at - 2]), tonumber(ARGV[at - 1]), tonumber(ARGV[at])
    local taken, retry = cost * (admitted - counted[i]), 0

    if taken > 0 and not failure then
      used[i] = used[i] + taken
      oldest[i] = oldest[i] or now
      redis.call('ZADD', key, text(-used[i]), 'used', now_text, entry(id, taken))
      redis.call('PEXPIRE', key, ttl(window))
    elseif stale[i] then
      redis.call('ZADD', key, text(-used[i]), 'used')
    end

    -- Whether this charge refuses the first copy that is not admitted; one that it has counted before it does not.
    local excess = used[i] + cost - units
    if admitted < copies and admitted >= counted[i] and cost > 0 and excess > 0 and not failure then
      local free_at = departure(key, used[i], excess)
      if free_at > now then
        pull_back(key, now_text, ttl(window))
        free_at = now
      end
      retry = free_at + window - now
      is_explained = true
    end

    reply[r + 1] = used[i]
    reply[r + 2] = oldest[i] and math.min(oldest[i], now) + window - now or 0
    reply[r + 3] = retry
    r = r + 3
  end
  if not is_explained then reply[r] = 1 end

  k = k + charges
  a = a + 3 * charges
end

return reply
