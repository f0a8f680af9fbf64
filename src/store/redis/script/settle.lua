-- Settles an admission, charge by charge. If one charge cannot be settled, the others are settled
-- nevertheless.
--
-- Takes  add_to_sum, add_to_total, begin_with, call, countable, DROPPED, faded, failure_of, find,
--        following, is_full, LOOKED_AT, named, named_at, now, outlive, read, recorded_at, score_of,
--        shared, sum_at, text, time_in, time_of, write_status
-- Gives  settle

local MOST = 128  -- the most copies that travel together

-- Counts settled units, in the sum for their time or in a separate entry. In a separate entry, a
-- point follows the units, so that a search for the id no longer finds the entry. If an earlier
-- admission with the same id was settled, the key may already have the same member. In that case, a
-- time follows the point, chosen so that the member is new.
local function add_settled(log, id, time, units, is_summed)
  if is_summed then return add_to_sum(log, recorded_at(log, time), units) end
  local begin, later = begin_with(log, id) .. text(units) .. '.', 0
  local member = begin
  while later < LOOKED_AT and call('ZSCORE', log.key, member) do
    member, later = begin .. text(time + later), later + 1
  end
  call('ZADD', log.key, score_of(time), member)
end

-- Returns true if the key still has an entry that a settlement has left at this time under this id.
local function has_settled(log, id, time)
  local at, prefix = score_of(time), begin_with(log, id)
  for _, member in ipairs(call('ZRANGEBYSCORE', log.key, at, at, 'LIMIT', 0, DROPPED)) do
    if string.sub(member, 1, #prefix) == prefix and string.find(member, '%.%d*$', #prefix + 1) then return true end
  end
  return false
end

-- Settles units after their lease has ended, but within their window. Counts them as of the time at
-- which they were reserved. Returns true if they were counted.
local function settle_late(log, id, time, cost)
  if cost == 0 or not log.lease or now < time + log.lease or now >= time + log.window then return false end
  local at = log.is_counter and time or recorded_at(log, time)
  -- The units' fixed window may have ended already.
  if at + log.window <= now or has_settled(log, id, at) then return false end
  local is_without_id = is_full(log)
  add_to_total(log, cost)
  add_settled(log, id, is_without_id and time or at, cost, is_without_id)
  return true
end

-- Finds the entry that an admission shares with its copies. Returns the entry, its time, and the
-- number of copies.
local function find_shared(log, id)
  local first = string.sub(id, 1, 7) .. '\0'
  for copies = math.max(string.byte(id, 8) + 1, 2), MOST do
    local member = shared(first, copies, log.cost)
    local at = find(log, member)
    if at then return member, at, copies end
  end
end

-- Settles units that still count under their id. Returns true if there were any.
local function settle_named(log, id, time, cost)
  local member, copies = named(log, id, log.cost, log.is_reserving), 1
  local at = find(log, member)
  if not at and not log.sub_window and not log.lease and not log.lasts and log.cost > 0 then
    member, at, copies = find_shared(log, id)
  end
  -- A place may have been renewed since its admission, so its time may be later.
  if not at or at > named_at(log, time) and not log.lasts then return false end
  -- If a prefetch is settled before its life ends, the units that were spent count from now.
  time = log.lease and math.min(log.is_prefetch and at or time, now) or at
  -- The first write only removes an entry, so a server without memory accepts it and the writes
  -- after it. So units can be given back on such a server, too.
  call('ZREM', log.key, member)
  if log.has_total or cost > 0 then
    add_to_total(log, cost - log.cost, log.is_reserving and -log.cost)
  else
    log.total, log.used = log.total - log.cost, log.used - log.cost
  end
  -- Each of the other copies gets its own entry.
  local place = copies > 1 and string.byte(id, 8) or 0
  for other = -place, copies - 1 - place do
    if other ~= 0 then call('ZADD', log.key, score_of(time), named(log, following(id, other), log.cost)) end
  end
  if cost > 0 then add_settled(log, id, time, cost, log.sub_window) end
  return true
end

-- Takes an admission's units from the sum for its time. This is for an admission without its own
-- entry. Returns false if the sum has fewer units.
local function take_from_sum(log, time)
  local at = recorded_at(log, time)
  if sum_at(log, score_of(at)) < log.cost then return false end
  add_to_sum(log, at, -log.cost)
  add_to_total(log, -log.cost)
  return true
end

-- Sets an admission's real cost, as of the admission's time. Returns true if the admission was
-- known.
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
  -- An exact log's oldest entry may have been removed, so the expiry is set anew. The newest entry
  -- that is left may be as old as the admission.
  local newest = time_in(call('ZRANGE', log.key, '0', '0', 'WITHSCORES')[2])
  outlive(log, math.min(newest, log.at), log.sub_window)
  return true
end

-- Settles an admission. Returns its record, or an error text. A second try cannot distinguish an
-- admission that the first try has settled from an unknown one, so it reports every admission as
-- known.
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
