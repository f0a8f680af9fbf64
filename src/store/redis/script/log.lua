-- How a log counts: an exact one, a compact one, and a fixed window.
--
-- Heads     As long as all entries are of one unit, their number is the sum. Once there has been another, one more member,
--           'used', has the sum of all entries as its score, which puts it behind them all: one read of the last ranks
--           gives the sum and the oldest entry. While units are reserved, the score of 'held' is their sum. It stands
--           right before the other, since it is never greater. Neither has as many bytes as an id.
-- Copies    Copies of a check that are admitted together to an exact log share an entry under the first one's id, with
--           their units; a few of cost 1 get entries of their own. The last byte of the first one's id is 0, and that of
--           each other copy is its place behind it: so the entry is found by the id of any of them.
-- Expiry    An exact log of one entry of one unit expires a window + SLACK after it. Any other expires two windows + SLACK
--           after its oldest entry, which is late enough for all that is admitted in the window after that entry: so most
--           admissions need not move it, and read from it when the oldest entry leaves. No decision depends on it, only
--           that figure. By another clock than the server's, every admission moves it. Other logs expire a window + SLACK
--           after their newest entry.

local LOOKED_AT = 100  -- entries that are looked at for a retry time, or moved after a step back of the clock
local DROPPED = 500    -- entries that have left and are dropped in one check, or that are read to find one
local COPIES = 128     -- the copies of a check that travel together at most
local FEW = 4          -- so many copies of cost 1 get entries of their own: two that met by chance are not worth a sum

-- The id so many places further. Its last byte does not run over within the copies of a check.
local function following(id, places)
  return string.sub(id, 1, 7) .. string.char(string.byte(id, 8) + places)
end

-- The time of the entry of this rank, from the oldest that has not left the window.
local function time_of(charge, key, rank)
  rank = rank + charge.heads + charge.left_behind
  local found = call('ZREVRANGE', key, rank, rank, 'WITHSCORES')[2]
  return found and time_in(found) or now
end

-- The units of some entries together, and how many of them are reserved. Between two entries there are so many places.
local function weights(charge, members, places)
  local sum, reserved = 0, 0
  for i = 1, #members, places do
    local units = weight(charge, members[i])
    sum = sum + units
    if is_reserved(charge, members[i]) then reserved = reserved + units end
  end
  return sum, reserved
end

-- Reads the heads of what some read of the last ranks has given, from this place on, and notes them in the charge.
local function read_heads(charge, last, place)
  -- Not of our making is a 'held' above the sum. It must not hide that.
  local sum, held = place, place + 2
  if last[held] == 'used' and last[sum] == 'held' then sum, held = held, sum end
  if last[sum] ~= 'used' then return end
  charge.is_summed, charge.sum, charge.heads = true, clamped(tonumber(last[sum + 1])), charge.heads + 1
  if last[held] ~= 'held' then return end
  charge.reserved, charge.heads = min(clamped(tonumber(last[held + 1])), charge.sum), charge.heads + 1
end

-- Writes the sums down, of which that of reserved units was so much before.
local function write_heads(charge, key, reserved_before)
  if charge.reserved > 0 then
    call('ZADD', key, charge.sum, 'used', charge.reserved, 'held')
    if reserved_before == 0 then charge.heads = charge.heads + 1 end
  else
    call('ZADD', key, charge.sum, 'used')
    if reserved_before > 0 then
      call('ZREM', key, 'held')
      charge.heads = charge.heads - 1
    end
  end
end

-- Adds units to those of the entries, or takes some away, and writes the sums down. So many of them are reserved.
local function add_to_sum(charge, key, units, reserved)
  if not charge.is_summed then
    -- What has left and is still there leaves the sum when it is dropped. So it has to be in it from the start.
    charge.heads, charge.sum, charge.is_behind = charge.heads + 1, charge.sum + charge.left_behind, charge.left_behind > 0
  end
  charge.sum, charge.used = clamped(charge.sum + units), clamped(charge.used + units)
  charge.is_summed = true
  local before = charge.reserved
  charge.reserved = min(clamped(before + (reserved or 0)), charge.sum)
  write_heads(charge, key, before)
end

-- Writes an entry whose units are in the sum. Where an id was given again, one of as many units may stand there that has
-- left: it is then no longer there to be dropped.
local function write_named(charge, key, time, member, units)
  if call('ZADD', key, text(-time), member) == 0 then
    add_to_sum(charge, key, -units, charge.is_reserving and -units)
    charge.left_behind = charge.left_behind - 1
  end
end

-- Lets a log live as its entries need it: of an exact one the oldest of them tells, of others the newest.
local function outlive_entries(charge, key, newest)
  if charge.is_exact and is_expiry_telling and charge.oldest then
    outlive(key, charge, charge.oldest, 2)
  else
    outlive(key, charge, newest, charge.is_counter and 2 or 1)
  end
end

-- Writes a key anew with a few entries. The many others are freed off the server's main thread.
local function keep_only(charge, key, entries)
  local scored = {}
  local function keep(at, member)
    scored[#scored + 1], scored[#scored + 2] = at, member
  end
  if charge.counts then keep('+inf', charge.counts) end
  if charge.is_summed then keep(charge.sum, 'used') end
  if charge.reserved > 0 then keep(charge.reserved, 'held') end
  charge.heads = #scored / 2
  for i = 1, #entries, 2 do
    keep(entries[i + 1], entries[i])
  end
  call('UNLINK', key)
  if #scored == 0 then return end
  call('ZADD', key, unpack(scored))
  charge.oldest = #entries > 0 and time_in(entries[#entries]) or nil
  outlive_entries(charge, key, max(charge.at, #entries > 0 and time_in(entries[2]) or 0))
end

-- Drops what has left the window, and notes in the charge what is left. One check drops no more than it may: behind that,
-- entries of one unit are not counted, and others count until a later check drops them.
local function trim(charge, key, expired)
  local live, dropped = call('ZCARD', key) - expired - charge.heads, min(expired, DROPPED)
  if live == 0 and not charge.is_counter then
    call('UNLINK', key)
    charge.sum, charge.reserved, charge.heads, charge.is_summed = 0, 0, 0, false
  elseif dropped < expired and live <= DROPPED then
    local entries = live > 0 and call('ZRANGE', key, 0, live - 1, 'WITHSCORES') or {}
    charge.sum, charge.reserved = weights(charge, entries, 2)
    keep_only(charge, key, entries)
  else
    local last, before = -1 - charge.heads, charge.reserved
    if charge.is_summed then
      local units, reserved = weights(charge, call('ZREVRANGE', key, charge.heads, charge.heads + dropped - 1), 1)
      charge.sum, charge.is_behind = clamped(charge.sum - units), dropped < expired
      charge.reserved = min(clamped(before - reserved), charge.sum)
    else
      charge.sum = live
    end
    -- The first write, so that a server without memory lets the sums follow.
    call('ZREMRANGEBYRANK', key, last + 1 - dropped, last)
    if charge.is_summed then write_heads(charge, key, before) end
    charge.left_behind = expired - dropped
  end
end

local log = {}

-- Looks at the log of a charge, and notes in the charge how it stands. Returns an error text if it cannot be read.
function log.look(charge, key)
  local beyond = pcall('ZCOUNT', key, charge.cutoff, '+inf')
  if type(beyond) == 'table' then return beyond.err end
  -- What is counted is what has expired, and the heads.
  if beyond > 0 then read_heads(charge, call('ZREVRANGE', key, 0, 1, 'WITHSCORES'), 1) end
  local expired = beyond - charge.heads
  if expired > 0 then
    trim(charge, key, expired)
    charge.used = charge.sum
    charge.oldest = charge.sum > 0 and time_of(charge, key, 0) or nil
    -- If the clock steps back, the expiry must not tell of what has been dropped as if it were still to leave.
    if charge.is_exact and is_expiry_telling and charge.oldest then outlive(key, charge, charge.oldest, 2) end
    return
  end

  local expires = is_expiry_telling and charge.is_exact and call('PEXPIRETIME', key)
  if expires == -2 then return end
  if not charge.is_summed then charge.sum = call('ZCARD', key) end
  charge.used = charge.sum
  -- Rounded up by less than 1000. That of one entry of one unit is of one window, and tells nothing.
  local oldest = expires and (charge.is_summed or charge.sum > 1) and (expires - 2 * charge.window_ms - SLACK) * 1000
  charge.is_covered = oldest and oldest - 1000 + charge.window >= now
  if charge.is_covered and oldest <= now then
    charge.oldest = oldest
  elseif charge.sum > 0 then
    charge.oldest = time_of(charge, key, 0)
  end
end

-- How many copies of a check have been counted under this id before, and under which time: all that were admitted share
-- one entry, or have one each.
function log.counted_before(charge, key, id, copies)
  local reserved = copies == 1 and found(charge, key, named(charge, id, charge.cost, true))
  if reserved then return 1, reserved end
  for count = copies, 1, -1 do
    local member = count == 1 and named(charge, id, charge.cost) or named_together(id, count, charge.cost)
    local at = found(charge, key, member)
    if at then
      while charge.is_exact and charge.cost == 1 and count < copies and call('ZSCORE', key, following(id, count)) do
        count = count + 1
      end
      return count, at
    end
  end
  return 0
end

-- Whether a key has as many entries with ids as it may have.
local function is_full(charge, key)
  return not charge.is_exact and call('ZCARD', key) >= MOST_KEPT
end

-- Counts units under an id.
function log.admit(charge, key, id, units, is_given)
  local time, is_first = charge.at, true
  if not charge.is_exact or charge.lease > 0 then
    local is_named = (charge.lease > 0 or is_given) and not is_full(charge, key)
    add_to_sum(charge, key, units, is_named and charge.is_reserving and units)
    if is_named then
      time = charge.kept_at
      write_named(charge, key, time, named(charge, id, units, charge.is_reserving), units)
    else
      is_first = join(charge, key, time, units)
    end
    charge.oldest = min(charge.oldest or time, time)
    -- What an entry of this time has set may have been moved: by what was admitted before it, when the clock had stepped
    -- back, or under a shorter window.
    if is_first or not outlives(key, charge, charge.at, 1) then outlive_entries(charge, key, charge.at) end
    return
  end

  if charge.is_summed or units > 1 and (charge.cost > 1 or units > FEW) then
    add_to_sum(charge, key, units)
    local member = units == charge.cost and named(charge, id, units) or named_together(id, units / charge.cost, charge.cost)
    write_named(charge, key, now, member, units)
  else
    call('ZADD', key, score, id)
    for places = 2, units do
      call('ZADD', key, score, following(id, places - 1))
    end
    charge.sum, charge.used = charge.sum + units, charge.used + units
  end
  charge.oldest = min(charge.oldest or now, now)
  if not charge.is_covered then
    if is_expiry_telling and not charge.is_summed and charge.sum == 1 then
      outlive(key, charge, now, 1)
    else
      outlive_entries(charge, key, now)
    end
  end
end

-- Microseconds until fewer units are in the window.
function log.reset(charge)
  if charge.is_behind then return 1 end
  return charge.oldest and max(0, charge.oldest + charge.window - now) or 0
end

-- Where the clock has stepped back, entries from the future count as having happened now, so that the key is right again
-- after one window. Each refusal moves the newest of them, as many as one check may. A server without memory moves none.
local function pull_back(charge, key)
  local first = call('ZRANGE', key, 0, 0, 'WITHSCORES')
  if #first == 0 or time_in(first[2]) <= charge.latest then return end
  local at, joined = text(-charge.latest), 0
  for _, member in ipairs(call('ZRANGEBYSCORE', key, '-inf', '(' .. at, 'LIMIT', 0, LOOKED_AT)) do
    if charge.is_exact or string.byte(member) == KEPT then
      if pcall('ZADD', key, at, member) ~= 0 then return end
    else
      joined = joined + weight(charge, member)
      call('ZREM', key, member)
    end
  end
  if joined > 0 then join(charge, key, charge.latest, joined) end
  charge.oldest = time_of(charge, key, 0)
  outlive_entries(charge, key, charge.at)
end

-- The next entries to leave, the oldest first: their members and scores.
local function next_to_leave(charge, key)
  local first = charge.heads + charge.left_behind
  return call('ZREVRANGE', key, first, first + LOOKED_AT - 1, 'WITHSCORES')
end

-- Microseconds until at most so many units are in the window, which are more now; or, where more entries have to leave than
-- one check may look at, at least not before. And the same if all reserved units were given back now.
function log.wait(charge, key, most)
  pull_back(charge, key)
  -- A later check will know better.
  if charge.is_behind then return 1, 0 end
  local leaves, excess, settled = now, charge.sum - most, charge.sum - charge.reserved - most
  local settled_leaves = settled > 0 and now
  if not charge.is_summed then
    leaves = time_of(charge, key, excess - 1)
    settled_leaves = leaves
  else
    local entries = next_to_leave(charge, key)
    for i = 1, #entries, 2 do
      local units = weight(charge, entries[i])
      leaves, excess = time_in(entries[i + 1]), excess - units
      if settled > 0 then
        settled_leaves = leaves
        if not is_reserved(charge, entries[i]) then settled = settled - units end
      end
      if excess <= 0 then break end
    end
  end
  local function wait_for(time)
    return min(time, charge.latest) + charge.window - now
  end
  return wait_for(leaves), settled_leaves and wait_for(settled_leaves) or 0
end

-- The entry that an admission shares with equal ones, how many places before it that entry's own id is, and the entry's
-- time.
local function shared(charge, key, id)
  local first, place = string.sub(id, 1, 7) .. '\0', string.byte(id, 8)
  for count = max(place + 1, 2), COPIES do
    local member = named_together(first, count, charge.cost)
    local at = found(charge, key, member)
    if at then return member, place, at end
  end
end

-- Whether an exact log, or a counter, still has the entry that a settlement has left at a time under this id.
local function has_settled(charge, key, id, time)
  local at = text(-time)
  local prefix = charge.is_exact and id or string.char(KEPT) .. id
  for _, member in ipairs(call('ZRANGEBYSCORE', key, at, at, 'LIMIT', 0, DROPPED)) do
    -- There may be spaces behind it.
    if string.sub(member, 1, #prefix) == prefix and string.find(member, '%. *$') then return true end
  end
  return false
end

-- Whether what was reserved at this time can be settled no more but by counting it anew: its lease is over, and its window
-- is not.
local function is_late(charge, time, cost)
  return cost > 0 and charge.lease > 0 and time + charge.lease <= now and now < time + charge.window
end

-- Writes an entry of a settlement. Whoever gives an id again after its settlement may settle it to the same: no number minds
-- spaces behind it.
local function write_settled(charge, key, member, time)
  for _ = 1, LOOKED_AT do
    if not call('ZSCORE', key, member) then break end
    member = member .. ' '
  end
  call('ZADD', key, text(-time), member)
end

-- Counts what was settled when its lease was over, as of when it was reserved, and returns whether it was news.
local function settle_late(charge, key, id, time, cost)
  if charge.is_exact then
    if has_settled(charge, key, id, time) then return false end
    add_to_sum(charge, key, cost)
    write_settled(charge, key, named_settled(id, cost), time)
  else
    local at = min(recorded_at(charge, time), charge.at)
    -- A fixed window may have ended before.
    if at + charge.window <= now then return false end
    if call('ZSCORE', key, named_late(id)) then return false end
    local is_named = not is_full(charge, key)
    add_to_sum(charge, key, cost)
    join(charge, key, at, cost)
    if is_named then call('ZADD', key, text(-at), named_late(id)) end
  end
  return true
end

-- Sets what an admission has cost, as of when it was, and returns whether it was known.
function log.settle(charge, key, id, time, cost)
  local member, copies, place = named(charge, id, charge.cost, charge.is_reserving), 1, 0
  local at = found(charge, key, member)
  if not at and charge.is_exact and charge.lease == 0 and charge.cost > 0 then
    member, place, at = shared(charge, key, id)
    copies = at and weight(charge, member) / charge.cost
  end
  if not at or at > kept_at(charge, time) then
    if not is_late(charge, time, cost) or not settle_late(charge, key, id, time, cost) then return false end
  else
    time = charge.lease > 0 and min(time, now) or at
    -- The first write, so that a server without memory lets units be given back.
    call('ZREM', key, member)
    if charge.is_summed or cost > 0 then
      add_to_sum(charge, key, cost - charge.cost, charge.is_reserving and -charge.cost)
    else
      charge.sum, charge.used = charge.sum - charge.cost, charge.used - charge.cost
    end
    -- Who shared the entry have one of their own from now on.
    for places = 0, copies - 1 do
      if places ~= place then
        local other = string.sub(id, 1, 7) .. string.char(string.byte(id, 8) - place + places)
        call('ZADD', key, text(-time), named(charge, other, charge.cost))
      end
    end
    if cost > 0 and charge.is_exact then
      write_settled(charge, key, named_settled(id, cost), time)
    elseif cost > 0 then
      join(charge, key, recorded_at(charge, time), cost)
    end
  end
  if charge.used == 0 then
    call('UNLINK', key)
    charge.oldest = nil
  else
    -- The oldest may have gone, so the expiry must not tell of it any more. The newest may be as old as the admission.
    local newest = time_in(call('ZRANGE', key, 0, 0, 'WITHSCORES')[2])
    charge.oldest = time_of(charge, key, 0)
    outlive_entries(charge, key, min(newest, charge.at))
  end
  return true
end
