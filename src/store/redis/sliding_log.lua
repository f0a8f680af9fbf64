-- Decides a batch of checks, one after the other. Each check is admitted whole or refused whole. A check may come in
-- several copies, from several callers: they are decided as if one after the other, too.
--
-- KEYS   one sorted set a charge: the log of one limit for one identity
-- ARGV   now        microseconds since the Unix epoch, or '' for the server's own clock
--        then runs of checks that have all but their keys and ids in common
--          copies   of each check
--          given    '1' if the ids may have been counted before, else '0'
--          charges  how many each check has; then for each charge
--            units  the limit
--            cost   units to take; 0 asks without spending
--            window microseconds
--          checks   how many follow; then for each check, whose charges take the next keys, in order
--            id     eight bytes: the identity of the first copy's admission; those of the others follow it
-- reply  a flat list: now, then for each check
--          -1 - n   if only the first n copies are admitted, or an error text if a key could not be read;
--                   nothing if all copies are admitted
--          then for each charge
--            used   units in the window after the decision
--            reset  microseconds until the oldest of them leaves the window, 0 if there are none; read from an expiry,
--                   it is up to 1 millisecond more
--            retry  only if not all copies are admitted: microseconds until this charge would no longer refuse one
--                   more copy, 0 if it refuses none
--
-- The log   one entry an admission, or one for many copies of a check that are admitted together: score = its time in
--           microseconds, negated, so that the newest stands first, where writing is quick; member = its id, and behind
--           the id its units if there are more than 1. Once there has been such an entry, one more member, 'used', has
--           the sum of all entries as its score, which puts it behind them all: one read of the last ranks gives the
--           sum and the oldest entry. Until then the sum is the number of entries.
-- Expiry    A log of one entry expires a window + SLACK after it. Any other expires two windows + SLACK after its oldest
--           entry, which is late enough for all that is admitted in the window after that entry: so most admissions need
--           not move it, and read from it when the oldest entry leaves. No decision depends on it, only that figure.
--           By another clock than the server's, every admission moves it. A refusal moves no expiry and adds no entry.
-- Cost      O(log n) a charge, and O(1) more for each entry that has expired. A refusal whose log has the sum written
--           down reads as many entries as have to leave: no more than the cost of the refused charge.
-- Numbers   integers below 2^53 in doubles. As arguments they are exact; in texts they are written with %.0f, since
--           `..` and tostring would lose digits.
-- Server    Redis 6.2 or newer, and what is compatible with it. Commands: TIME PEXPIRETIME ZCARD ZCOUNT ZRANGE ZREVRANGE
--           ZRANGEBYSCORE ZSCORE ZADD ZREMRANGEBYRANK ZREMRANGEBYSCORE PEXPIRE PEXPIREAT UNLINK.

local SLACK = 1000  -- milliseconds a key outlives its last unit: a promoted replica's clock may be ahead
local CHUNK = 500   -- entries read at a time
local FEW = 4       -- so many copies of cost 1 get entries of their own: two that met by chance are not worth a sum

local call, pcall, ceil = redis.call, redis.pcall, math.ceil
local now = tonumber(ARGV[1])
local is_server_time = not now
if is_server_time then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end
local present = ceil(now / 1000)           -- milliseconds
local score = string.format('%.0f', -now)  -- of what is admitted now; quicker to pass on than the number
-- PEXPIRETIME came with Redis 7.0, and so did this number. By another clock than the server's an expiry tells nothing.
local is_expiry_telling = is_server_time and redis.REDIS_VERSION_NUM

local reply, r = { now }, 1  -- and its length
local a, k = 1, 0            -- how many arguments and keys have been taken

-- Makes what decides any check. Most batches never need it.
local function decider()
  local floor, max, min = math.floor, math.max, math.min

  -- Lets a key live until an admission of now has left the window.
  local function outlive(key, charge)
    if is_server_time then
      call('PEXPIREAT', key, present + charge.window_ms + SLACK)
    else
      call('PEXPIRE', key, charge.window_ms + SLACK)
    end
  end

  local function entry(id, units)
    return units == 1 and id or id .. string.format('%.0f', units)
  end

  -- The id so many places further. Its last byte does not run over within the copies of a check.
  local function following(id, places)
    return string.sub(id, 1, 7) .. string.char(string.byte(id, 8) + places)
  end

  local function weight(member)
    return tonumber(string.sub(member, 9)) or 1
  end

  -- The time of the entry of this rank, from the oldest.
  local function time_of(key, rank)
    local found = call('ZREVRANGE', key, rank, rank, 'WITHSCORES')[2]
    return found and -tonumber(found) or now
  end

  -- Drops what has expired. Returns the units left, the time of the oldest entry, whether their sum is written down, and
  -- whether what is written is out of date.
  local function trim(key, cutoff)
    local last = call('ZREVRANGE', key, 0, 0, 'WITHSCORES')

    -- A large log that is all gone is freed at once, off the server's main thread.
    local size = call('ZCARD', key)
    if size > CHUNK and -tonumber(call('ZRANGE', key, 0, 0, 'WITHSCORES')[2]) <= cutoff then
      call('UNLINK', key)
      return 0, nil, false, false
    end
    if last[1] ~= 'used' then
      local left = size - call('ZREMRANGEBYSCORE', key, string.format('%.0f', -cutoff), 0)
      if left == 0 then return 0, nil, false, false end
      return left, time_of(key, 0), false, false
    end

    -- What leaves has to be subtracted. In a steady stream that is one entry.
    local used, chunk = tonumber(last[2]), 2
    while true do
      local entries, expired = call('ZREVRANGE', key, 1, chunk, 'WITHSCORES'), 0
      while expired * 2 < #entries and -tonumber(entries[expired * 2 + 2]) <= cutoff do
        used = used - weight(entries[expired * 2 + 1])
        expired = expired + 1
      end
      -- No entries but a sum: not of our making, and nothing to go on with.
      if used == 0 or #entries == 0 then
        call('UNLINK', key)
        return 0, nil, false, false
      end
      call('ZREMRANGEBYRANK', key, -1 - expired, -2)
      local oldest = tonumber(entries[expired * 2 + 2])
      if oldest then return used, -oldest, true, true end
      chunk = min(chunk * 8, CHUNK)
    end
  end

  -- Looks at the log of a charge, and notes in the charge how it stands. Returns an error text if it cannot be read.
  local function look(charge, key)
    charge.used, charge.oldest, charge.counted = 0, nil, 0
    charge.is_summed, charge.is_stale, charge.is_covered = false, false, false
    local beyond = pcall('ZCOUNT', key, charge.cutoff, '+inf')
    if type(beyond) == 'table' then return beyond.err end
    -- What is counted is what has expired, and the sum.
    local last = beyond == 1 and call('ZREVRANGE', key, 0, 0, 'WITHSCORES')
    charge.is_summed = last and last[1] == 'used'
    if beyond > 0 and not charge.is_summed then
      charge.used, charge.oldest, charge.is_summed, charge.is_stale = trim(key, now - charge.window)
      return
    end

    local expires = is_expiry_telling and call('PEXPIRETIME', key)
    if expires == -2 then return end
    charge.used = charge.is_summed and tonumber(last[2]) or call('ZCARD', key)
    -- Rounded up by less than 1000. That it has not left the window says that the expiry is one of two windows.
    local oldest = expires and (expires - 2 * charge.window_ms - SLACK) * 1000
    charge.is_covered = oldest and oldest - 1000 + charge.window >= now
    if charge.is_covered then
      charge.oldest = oldest
    elseif charge.used > 0 then
      charge.oldest = time_of(key, charge.is_summed and 1 or 0)
    end
  end

  -- Counts units under an id.
  local function admit(charge, key, id, units)
    charge.used = charge.used + units
    if charge.is_summed or units > 1 and (charge.cost > 1 or units > FEW) then
      charge.is_summed = true
      call('ZADD', key, charge.used, 'used', score, entry(id, units))
    else
      call('ZADD', key, score, id)
      for places = 2, units do
        call('ZADD', key, score, following(id, places - 1))
      end
    end
    if not charge.is_covered then
      if is_expiry_telling and charge.oldest and charge.oldest <= now then
        call('PEXPIREAT', key, ceil(charge.oldest / 1000) + 2 * charge.window_ms + SLACK)
      else
        outlive(key, charge)
      end
    end
    charge.oldest = charge.oldest or now
  end

  -- The time of the entry with whose leaving at least `units` units have left.
  local function departure(key, is_summed, units)
    if not is_summed then return time_of(key, units - 1) end
    local rank = 1
    while true do
      local entries = call('ZREVRANGE', key, rank, rank + CHUNK - 1, 'WITHSCORES')
      -- A sum above the entries is not of our making; no script may loop for ever over it.
      if #entries == 0 then return now end
      for i = 1, #entries, 2 do
        units = units - weight(entries[i])
        if units <= 0 then return -tonumber(entries[i + 1]) end
      end
      rank = rank + CHUNK
    end
  end

  -- Where the clock has stepped back, entries from the future count as having happened now, so that the key is right again
  -- after one window.
  local function pull_back(charge, key)
    if -tonumber(call('ZRANGE', key, 0, 0, 'WITHSCORES')[2]) <= now then return end
    for _, member in ipairs(call('ZRANGEBYSCORE', key, '-inf', '(' .. score)) do
      call('ZADD', key, score, member)
    end
    outlive(key, charge)
  end

  -- How many copies of a check an earlier try has counted under this id: all that it admitted share one entry, or have
  -- one each.
  local function counted_before(key, id, cost, copies)
    for count = copies, 1, -1 do
      if call('ZSCORE', key, entry(id, count * cost)) then
        while cost == 1 and count < copies and call('ZSCORE', key, following(id, count)) do
          count = count + 1
        end
        return count
      end
    end
    return 0
  end

  local function decide(shape, id)
    -- First look at every charge, then write: no key is written unless all of them fit.
    local copies, admitted, before, failure = shape.copies, shape.copies, 0, nil
    for i = 1, shape.charges do
      local charge, key = shape[i], KEYS[k + i]
      failure = failure or look(charge, key)
      if failure then
        charge.used, charge.oldest, charge.is_stale = 0, nil, false
      elseif charge.cost > 0 then
        if shape.is_given then
          charge.counted = counted_before(key, id, charge.cost, copies)
          before = max(before, charge.counted)
        end
        if charge.used + charge.cost_of_all > charge.units then
          admitted = min(admitted, charge.counted + max(0, floor((charge.units - charge.used) / charge.cost)))
        end
      end
    end
    -- What an earlier try has refused stays refused.
    if before > 0 then admitted = min(admitted, before) end

    local is_whole = admitted == copies and not failure
    if not is_whole then
      r = r + 1
      reply[r] = failure or -1 - admitted
    end

    local is_explained = false
    for i = 1, shape.charges do
      local charge, key = shape[i], KEYS[k + i]
      local units = charge.cost * (admitted - charge.counted)
      if units > 0 and not failure then
        admit(charge, key, id, units)
      elseif charge.is_stale then
        call('ZADD', key, charge.used, 'used')
      end

      reply[r + 1] = charge.used
      reply[r + 2] = charge.oldest and min(charge.oldest, now) + charge.window - now or 0
      r = r + 2
      if not is_whole then
        -- Whether this charge refuses the first copy that is not admitted; one that it has counted before it does not.
        local excess, retry = charge.used + charge.cost - charge.units, 0
        if charge.cost > 0 and excess > 0 and admitted >= charge.counted and not failure then
          pull_back(charge, key)
          retry = departure(key, charge.is_summed, excess) + charge.window - now
          is_explained = true
        end
        r = r + 1
        reply[r] = retry
      end
    end
    -- What is refused only because an earlier try has refused it may be tried again at once.
    if not is_whole and not is_explained then reply[r] = 1 end
    k = k + shape.charges
  end

  return decide
end

-- Reads the shape of a run: all but its ids.
local function shape_at(place)
  local shape = { copies = ARGV[place] + 0, is_given = ARGV[place + 1] == '1', charges = ARGV[place + 2] + 0 }
  for i = 1, shape.charges do
    place = place + 3
    local units, cost, window = ARGV[place] + 0, ARGV[place + 1] + 0, ARGV[place + 2] + 0
    shape[i] = {
      units = units, cost = cost, cost_of_all = cost * shape.copies, window = window, window_ms = ceil(window / 1000),
      cutoff = string.format('%.0f', window - now),  -- as a score
      -- How it stands in the check at hand. `is_covered` says that the expiry is late enough for one more entry.
      used = 0, oldest = nil, counted = 0, is_summed = false, is_stale = false, is_covered = false,
    }
  end
  return shape
end

-- The way of most checks, before anything is set up that it does not need: one charge, on a log from which nothing has
-- left, with room. Returns whether that is so; if not, nothing is done. What `decider` makes would do the same.
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

local decide
while a < #ARGV do
  local run, charges, shape = a + 1, ARGV[a + 3] + 0, nil
  local is_plain = ARGV[run] == '1' and ARGV[run + 1] == '0' and charges == 1 and ARGV[run + 4] ~= '0'
  local units, cost, window, cutoff
  if is_plain and is_expiry_telling then
    units, cost, window = ARGV[run + 3] + 0, ARGV[run + 4] + 0, ARGV[run + 5] + 0
    cutoff = string.format('%.0f', window - now)
  end
  local first = run + 4 + 3 * charges
  a = first - 1 + ARGV[first - 1]
  for i = first, a do
    if not (cutoff and decide_plainly(KEYS[k + 1], ARGV[i], units, cost, window, cutoff)) then
      decide, shape = decide or decider(), shape or shape_at(run)
      decide(shape, ARGV[i])
    end
  end
end

return reply
