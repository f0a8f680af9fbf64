-- Settling an admission: each charge by itself. If one charge cannot be settled, the other charges
-- are settled nevertheless.
--
-- Takes  add_to_sum, add_to_total, begin_with, call, countable, DROPPED, faded, failure_of, find,
--        following, is_full, LOOKED_AT, named, named_at, now, outlive, read, recorded_at, score_of,
--        shared, sum_at, text, time_in, time_of, write_status
-- Gives  settle

local MOST = 128  -- the most copies of a check that travel together

-- Counts the units of a settlement: in the sum of their time, or in an entry of their own. In the
-- entry, the units have a point behind them, so that a search for the id does not find the entry
-- any more. If an id is given and settled again, the key may have the same member already. Then a
-- time follows the point. The time is chosen so that the key has no such member yet.
local function add_settled(log, id, time, units, is_summed)
  if is_summed then return add_to_sum(log, recorded_at(log, time), units) end
  local begin, later = begin_with(log, id) .. text(units) .. '.', 0
  local member = begin
  while later < LOOKED_AT and call('ZSCORE', log.key, member) do
    member, later = begin .. text(time + later), later + 1
  end
  call('ZADD', log.key, score_of(time), member)
end

-- Whether the key still has an entry that a settlement has left at this time under this id.
local function has_settled(log, id, time)
  local at, prefix = score_of(time), begin_with(log, id)
  for _, member in ipairs(call('ZRANGEBYSCORE', log.key, at, at, 'LIMIT', 0, DROPPED)) do
    if string.sub(member, 1, #prefix) == prefix and string.find(member, '%.%d*$', #prefix + 1) then return true end
  end
  return false
end

-- Settles units whose lease is over but whose window is not: counts the units from the time at
-- which they were reserved. Returns whether they were counted.
local function settle_late(log, id, time, cost)
  if cost == 0 or not log.lease or now < time + log.lease or now >= time + log.window then return false end
  local at = log.is_counter and time or recorded_at(log, time)
  -- The fixed window of the units may have ended already.
  if at + log.window <= now or has_settled(log, id, at) then return false end
  local is_without_id = is_full(log)
  add_to_total(log, cost)
  add_settled(log, id, is_without_id and time or at, cost, is_without_id)
  return true
end

-- Finds the entry that an admission shares with its copies: the entry, its time, and how many
-- copies share it.
local function find_shared(log, id)
  local first = string.sub(id, 1, 7) .. '\0'
  for copies = math.max(string.byte(id, 8) + 1, 2), MOST do
    local member = shared(first, copies, log.cost)
    local at = find(log, member)
    if at then return member, at, copies end
  end
end

-- Settles units that still count under their id. Returns whether there were such units.
local function settle_named(log, id, time, cost)
  local member, copies = named(log, id, log.cost, log.is_reserving), 1
  local at = find(log, member)
  if not at and not log.sub_window and not log.lease and not log.lasts and log.cost > 0 then
    member, at, copies = find_shared(log, id)
  end
  -- A place may have been renewed since its admission, so its time may be later.
  if not at or at > named_at(log, time) and not log.lasts then return false end
  -- A prefetch may be settled before its life ends. Its spent units then count from now, not from
  -- the end of the life.
  time = log.lease and math.min(log.is_prefetch and at or time, now) or at
  -- This is the first write. It only removes, so a server without memory accepts it, and the writes
  -- after it. So units can be given back there, too.
  call('ZREM', log.key, member)
  if log.has_total or cost > 0 then
    add_to_total(log, cost - log.cost, log.is_reserving and -log.cost)
  else
    log.total, log.used = log.total - log.cost, log.used - log.cost
  end
  -- The other copies that shared the entry get entries of their own.
  local place = copies > 1 and string.byte(id, 8) or 0
  for other = -place, copies - 1 - place do
    if other ~= 0 then call('ZADD', log.key, score_of(time), named(log, following(id, other), log.cost)) end
  end
  if cost > 0 then add_settled(log, id, time, cost, log.sub_window) end
  return true
end

-- Takes the units of an admission without an entry of its own from the sum of its time. Returns
-- false if that sum has fewer units.
local function take_from_sum(log, time)
  local at = recorded_at(log, time)
  if sum_at(log, score_of(at)) < log.cost then return false end
  add_to_sum(log, at, -log.cost)
  add_to_total(log, -log.cost)
  return true
end

-- Sets the real cost of an admission, as of its own time. Returns whether the admission was known.
local function settle_charge(log, id, time, cost, is_again)
  cost = countable(log, cost)
  local is_known = settle_named(log, id, time, cost) or settle_late(log, id, time, cost)
    or log.is_refund and log.sub_window and not is_again and take_from_sum(log, time)
  if not is_known then return false end
  log.oldest = log.total > 0 and time_of(log, 0) or nil
  log.used = log.total - faded(log)
  if log.used == 0 then
    call('UNLINK', log.key)
    return true
  end
  -- The oldest entry of an exact log may have been removed, so the expiry is set anew. The newest
  -- entry may be as old as the admission.
  local newest = time_in(call('ZRANGE', log.key, '0', '0', 'WITHSCORES')[2])
  outlive(log, math.min(newest, log.at), log.sub_window)
  return true
end

-- Settles an admission. Returns its record, or the text of an error. A second try cannot tell an
-- admission that the first try has settled from an unknown admission. So the second try counts
-- every admission as known.
local function settle(charges, k, id, time, is_again)
  local record, r, failure = { is_again and 1 or 0, -1 }, 2, nil
  for i, charge in ipairs(charges) do
    local is_done, problem = pcall(function()
      local log = read(charge, KEYS[k + i])
      if log.settled and settle_charge(log, id, time, log.settled, is_again) then record[1] = 1 end
      r = write_status(record, r, log, 0, 0)
    end)
    if not is_done then failure = failure_of(i, problem) end
  end
  return failure or record
end
