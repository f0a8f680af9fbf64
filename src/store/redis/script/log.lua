-- How a log counts: an exact one, a compact one, and a fixed window.
--
-- The sum   As long as all entries are of one unit, their number is the sum. Once there has been another, one more member,
--           'used', has the sum of all entries as its score, which puts it behind them all: one read of the last ranks
--           gives the sum and the oldest entry.
-- Copies    Copies of a check that are admitted together to an exact log share an entry under the first one's id, with
--           their units; a few of cost 1 get entries of their own.
-- Expiry    An exact log of one entry expires a window + SLACK after it. Any other expires two windows + SLACK after its
--           oldest entry, which is late enough for all that is admitted in the window after that entry: so most admissions
--           need not move it, and read from it when the oldest entry leaves. No decision depends on it, only that figure.
--           By another clock than the server's, every admission moves it. Other logs expire a window + SLACK after their
--           newest entry.

local CHUNK = 500  -- entries read at a time
local RESENT = 5000000  -- microseconds between two tries of a batch at most: more than connecting and a reply may take
local FEW = 4      -- so many copies of cost 1 get entries of their own: two that met by chance are not worth a sum

-- The id so many places further. Its last byte does not run over within the copies of a check.
local function following(id, places)
  return string.sub(id, 1, 7) .. string.char(string.byte(id, 8) + places)
end

-- The time of the entry of this rank, from the oldest.
local function time_of(key, rank)
  local found = call('ZREVRANGE', key, rank, rank, 'WITHSCORES')[2]
  return found and -tonumber(found) or now
end

-- Drops what has expired, and notes in the charge what is left.
local function trim(charge, key)
  local cutoff, last = now - charge.window, call('ZREVRANGE', key, 0, 0, 'WITHSCORES')

  -- A large log that is all gone is freed at once, off the server's main thread.
  local size = call('ZCARD', key)
  if size > CHUNK and -tonumber(call('ZRANGE', key, 0, 0, 'WITHSCORES')[2]) <= cutoff then
    call('UNLINK', key)
    return
  end
  if last[1] ~= 'used' then
    charge.used = size - call('ZREMRANGEBYSCORE', key, text(-cutoff), 0)
    charge.oldest = charge.used > 0 and time_of(key, 0) or nil
    return
  end

  -- What leaves has to be subtracted. In a steady stream that is one entry.
  local used, chunk = tonumber(last[2]), 2
  while true do
    local entries, expired = call('ZREVRANGE', key, 1, chunk, 'WITHSCORES'), 0
    while expired * 2 < #entries and -tonumber(entries[expired * 2 + 2]) <= cutoff do
      used = used - weight(charge, entries[expired * 2 + 1])
      expired = expired + 1
    end
    -- No entries but a sum: not of our making, and nothing to go on with.
    if used == 0 or #entries == 0 then
      call('UNLINK', key)
      return
    end
    call('ZREMRANGEBYRANK', key, -1 - expired, -2)
    local oldest = tonumber(entries[expired * 2 + 2])
    if oldest then
      charge.used, charge.oldest, charge.is_summed, charge.is_stale = used, -oldest, true, true
      return
    end
    chunk = min(chunk * 8, CHUNK)
  end
end

local log = {}

-- Looks at the log of a charge, and notes in the charge how it stands. Returns an error text if it cannot be read.
function log.look(charge, key)
  local beyond = pcall('ZCOUNT', key, charge.cutoff, '+inf')
  if type(beyond) == 'table' then return beyond.err end
  -- What is counted is what has expired, and the sum.
  local last = beyond == 1 and call('ZREVRANGE', key, 0, 0, 'WITHSCORES')
  charge.is_summed = last and last[1] == 'used'
  if beyond > 0 and not charge.is_summed then
    trim(charge, key)
    return
  end

  local expires = is_expiry_telling and charge.is_exact and call('PEXPIRETIME', key)
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

-- How many copies of a check have been counted under this id before: all that were admitted share one entry, or have one
-- each.
function log.counted_before(charge, key, id, copies)
  if copies == 1 and call('ZSCORE', key, named(charge, id, charge.cost, true)) then return 1 end
  for count = copies, 1, -1 do
    local member = count == 1 and named(charge, id, charge.cost) or named_together(id, count, charge.cost)
    if call('ZSCORE', key, member) then
      while charge.is_exact and charge.cost == 1 and count < copies and call('ZSCORE', key, following(id, count)) do
        count = count + 1
      end
      return count
    end
  end
  return 0
end

-- Counts units under an id.
function log.admit(charge, key, id, units, is_given)
  charge.used = charge.used + units
  local time, is_first = charge.at, true
  if not charge.is_exact or charge.lease > 0 then
    charge.is_summed = true
    call('ZADD', key, charge.used, 'used')
    if charge.lease > 0 then
      time = charge.kept_at
      call('ZADD', key, text(-time), named(charge, id, units, true))
    elseif is_given then
      call('ZADD', key, text(-time), named(charge, id, units))
    else
      is_first = join(charge, key, time, units)
    end
    -- What an entry of this time has set may have been moved: by what was admitted before it, when the clock had stepped
    -- back, or under a shorter window.
    if is_first or not outlives(key, charge, charge.at, 1) then outlive(key, charge, charge.at, 1) end
    charge.oldest = min(charge.oldest or time, time)
    return
  end

  if charge.is_summed or units > 1 and (charge.cost > 1 or units > FEW) then
    charge.is_summed = true
    local member = units == charge.cost and named(charge, id, units) or named_together(id, units / charge.cost, charge.cost)
    call('ZADD', key, charge.used, 'used', score, member)
  else
    call('ZADD', key, score, id)
    for places = 2, units do
      call('ZADD', key, score, following(id, places - 1))
    end
  end
  if not charge.is_covered then
    if is_expiry_telling and charge.oldest and charge.oldest <= now then
      outlive(key, charge, charge.oldest, 2)
    else
      outlive(key, charge, now, 1)
    end
  end
  charge.oldest = charge.oldest or now
end

-- Writes down what has been found out without an admission.
function log.keep(charge, key)
  if charge.is_stale then call('ZADD', key, charge.used, 'used') end
end

-- Microseconds until fewer units are in the window.
function log.reset(charge)
  return charge.oldest and max(0, min(charge.oldest, charge.at) + charge.window - now) or 0
end

-- Where the clock has stepped back, entries from the future count as having happened now, so that the key is right again
-- after one window.
local function pull_back(charge, key)
  local at, joined = text(-charge.at), 0
  if -tonumber(call('ZRANGE', key, 0, 0, 'WITHSCORES')[2]) <= charge.at then return end
  for _, member in ipairs(call('ZRANGEBYSCORE', key, '-inf', '(' .. at)) do
    if charge.is_exact or string.byte(member) == KEPT then
      call('ZADD', key, at, member)
    else
      joined = joined + weight(charge, member)
      call('ZREM', key, member)
    end
  end
  if joined > 0 then join(charge, key, charge.at, joined) end
  outlive(key, charge, charge.at, 1)
end

-- Microseconds until at most so many units are in the window. Only asked where there are more.
function log.wait(charge, key, most)
  pull_back(charge, key)
  local excess, rank = charge.used - most, 1
  if not charge.is_summed then return time_of(key, excess - 1) + charge.window - now end
  while true do
    local entries = call('ZREVRANGE', key, rank, rank + CHUNK - 1, 'WITHSCORES')
    -- A sum above the entries is not of our making; no script may loop for ever over it.
    if #entries == 0 then return charge.window end
    for i = 1, #entries, 2 do
      excess = excess - weight(charge, entries[i])
      if excess <= 0 then return -tonumber(entries[i + 1]) + charge.window - now end
    end
    rank = rank + CHUNK
  end
end

-- The entry that an admission shares with equal ones that were decided at the same time, how many places before it that
-- entry's own id is, and the entry's score. What was sent again was told later than the first try has counted it.
local function shared(charge, key, id, time)
  for _, earlier in ipairs({ 0, RESENT }) do
    local entries = call('ZRANGEBYSCORE', key, text(-time), text(earlier - time), 'WITHSCORES', 'LIMIT', 0, CHUNK)
    for i = 1, #entries, 2 do
      local member = entries[i]
      local units, cost = weight(charge, member)
      local places = string.byte(id, 8) - (string.byte(member, 8) or 256)
      local is_ours = cost == charge.cost and places >= 0 and string.sub(member, 1, 7) == string.sub(id, 1, 7)
      if is_ours and places * cost < units then return member, places, entries[i + 1] end
    end
  end
end

-- Sets what an admission has cost, as of when it was, and returns whether it was known.
function log.settle(charge, key, id, time, cost)
  local member, copies, place = named(charge, id, charge.cost, charge.lease > 0), 1, 0
  local found = call('ZSCORE', key, member)
  if not found and charge.is_exact and charge.lease == 0 and charge.cost > 0 then
    member, place, found = shared(charge, key, id, time)
    copies = found and weight(charge, member) / charge.cost
  end
  if not found or -tonumber(found) > kept_at(charge, time) then return false end

  time = charge.lease > 0 and min(time, now) or -tonumber(found)
  charge.used = charge.used - charge.cost + cost
  -- The first write, so that a server without memory lets units be given back.
  call('ZREM', key, member)
  if charge.is_summed or cost > 0 then
    charge.is_summed = true
    call('ZADD', key, charge.used, 'used')
  end
  -- Who shared the entry have one of their own from now on.
  for places = 0, copies - 1 do
    if places ~= place then
      local other = string.sub(id, 1, 7) .. string.char(string.byte(id, 8) - place + places)
      call('ZADD', key, text(-time), named(charge, other, charge.cost))
    end
  end
  if cost > 0 and charge.is_exact then
    local settled = named_settled(id, cost)
    -- Whoever gives an id again after its settlement may settle it to the same. No number minds spaces behind it.
    while call('ZSCORE', key, settled) do settled = settled .. ' ' end
    call('ZADD', key, text(-time), settled)
  elseif cost > 0 then
    join(charge, key, recorded_at(charge, time), cost)
  end
  if charge.used == 0 then
    call('UNLINK', key)
    charge.oldest = nil
  else
    -- The oldest may have gone, so the expiry must not tell of it any more. The newest may be as old as the admission.
    local newest = -tonumber(call('ZRANGE', key, 0, 0, 'WITHSCORES')[2])
    outlive(key, charge, min(newest, charge.at), 1)
    charge.oldest = time_of(key, charge.is_summed and 1 or 0)
  end
  return true
end
