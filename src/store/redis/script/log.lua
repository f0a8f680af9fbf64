-- How a log counts: an exact one, a compact one, and a fixed window.
--
-- Takes  add_copies, add_named, add_to_counts, add_to_sum, add_to_total, call, is_expiry_telling,
--        min, MOST_NAMED, named, named_at, now, outlive, read_counter, read_totals, recorded_at,
--        time_of, trim
-- Gives  read, is_full, count

-- Reads the key of a charge into it, which makes it a log, and drops the entries that have left. A
-- log has
--   key
--   used, total, reserved  the units used, those of them in entries, and those of them that are reserved
--   oldest                 the time of the oldest entry
--   heads, has_total       how many heads there are, and whether one of them is the total
--   gone                   how many entries have left and are still there
--   at                     the time under which an admission of now is recorded
-- and of a counter what read_counter notes.
local function read(log, key)
  log.key, log.used, log.total, log.reserved, log.heads, log.gone = key, 0, 0, 0, 0, 0
  log.oldest, log.has_total, log.is_left_out = nil, false, false
  log.at = recorded_at(log, now)
  if log.is_counter then return read_counter(log) end

  -- The entries that have left, and the heads.
  local beyond = call('ZCOUNT', key, log.cutoff, '+inf')
  if beyond > 0 then read_totals(log, call('ZREVRANGE', key, 0, 1, 'WITHSCORES'), 1) end
  local gone = beyond - log.heads
  if gone > 0 then
    trim(log, gone)
  elseif not log.has_total then
    log.total = call('ZCARD', key)
  end
  log.used, log.oldest = log.total, log.total > 0 and time_of(log, 0) or nil
  -- The expiry must not tell of a dropped entry as the next to leave.
  if gone > 0 and not log.part and is_expiry_telling and log.oldest then outlive(log, now) end
end

-- Whether a key has as many named entries as it may have.
local function is_full(log)
  return log.part and call('ZCARD', log.key) >= MOST_NAMED
end

-- Counts copies of a check that are admitted together.
local function count(log, id, copies, is_again)
  local units = log.takes * copies
  if not log.part and not log.lease then
    add_copies(log, id, copies)
    log.oldest = min(log.oldest or now, now)
  elseif (log.lease or is_again) and not is_full(log) then
    local time = named_at(log, now)
    add_named(log, time, named(log, id, units, log.is_reserving), units)
    log.oldest = min(log.oldest or time, time)
  elseif log.is_counter then
    add_to_counts(log, now, units)
  else
    add_to_total(log, units)
    add_to_sum(log, log.at, units)
    log.oldest = min(log.oldest or log.at, log.at)
  end
  outlive(log, log.at, true)
end
