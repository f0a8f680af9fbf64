-- How a log counts, whatever the algorithm.
--
-- Takes  add_named, add_to_sum, add_to_total, call, countable, entries_of, faded, FEW, heads_of,
--        is_expiry_telling, MOST_NAMED, named, named_at, now, outlive, read_totals, recorded_at,
--        shared, time_in, time_of, trim
-- Gives  read, is_full, count

-- Reads the key of a charge, and drops the entries that have left. Returns a log, which has all
-- that the charge has, and
--   key
--   used, total, reserved  the used units, the units in entries, and the reserved units
--   oldest                 the time under which the oldest entry is recorded, if there is one
--   has_total, has_held    whether the key has the heads of the total and of the reserved units
--   gone                   how many entries have left and are still in the key
--   at                     the time under which an admission of now is recorded
local function read(charge, key)
  local log = {
    key = key, used = 0, total = 0, reserved = 0, gone = 0, at = recorded_at(charge, now),
    has_total = false, has_held = false, previous = 0,  -- a table that grows is slow
  }
  setmetatable(log, { __index = charge })
  -- Counts the entries that have left, and the heads.
  local beyond = call('ZCOUNT', key, log.cutoff, '+inf')
  local last = beyond > 0 and call('ZREVRANGE', key, '0', '1', 'WITHSCORES') or {}
  read_totals(log, last)
  local gone = beyond - heads_of(log)
  if gone > 0 then
    trim(log, gone)
  elseif not log.has_total then
    log.total = call('ZCARD', key)
  end
  -- The total still has units of entries that have left if more entries have left than one check
  -- may drop. Then no retry time and no reset time is known.
  log.is_behind = log.has_total and log.gone > 0
  local oldest = gone == 0 and last[2 * beyond + 2]
  if log.total > 0 then log.oldest = oldest and time_in(oldest) or time_of(log, 0) end
  log.used = log.total - faded(log)
  -- The expiry tells when the oldest entry leaves. Since the oldest entry was dropped, the expiry
  -- is set anew.
  if gone > 0 and not log.part and is_expiry_telling and log.oldest then outlive(log, now) end
  return log
end

-- Whether a key has as many named entries as it may have.
local function is_full(log)
  return log.part and call('ZCARD', log.key) >= MOST_NAMED
end

-- Counts copies of a check that are admitted together.
local function count(log, id, copies, is_again)
  local units, time, is_exact = log.takes * copies, log.at, not log.part and not log.lease
  if is_exact and not log.has_total and log.cost == 1 and copies <= FEW then
    call('ZADD', log.key, entries_of(id, copies))
    log.total, log.used = log.total + units, log.used + units
  elseif is_exact or (log.lease or is_again) and not is_full(log) then
    time = named_at(log, now)
    local is_shared = is_exact and copies > 1
    add_named(log, time, is_shared and shared(id, copies, log.cost) or named(log, id, units, log.is_reserving), units)
  else
    units = countable(log, units)
    add_to_total(log, units)
    -- A key outlives its sums from their first unit on. Where the expiry cannot be read, an earlier
    -- one may have replaced it.
    if add_to_sum(log, log.at, units) and is_expiry_telling then return end
  end
  log.oldest = math.min(log.oldest or time, time)
  outlive(log, log.at, true)
end
