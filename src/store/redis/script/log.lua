-- How a log counts: an exact one, a compact one, and a fixed window.

-- Reads the key of a charge into it, which makes it a log, and drops the entries that have left. A log has
--   key
--   used, total, reserved  the units used, those of them in entries, and those of them that are reserved
--   oldest, is_covered     the time of the oldest entry, and whether the expiry tells it
--   heads, has_total       how many heads there are, and whether one of them is the total
--   gone                   how many entries have left and are still there
--   at                     the time under which an admission of now is recorded
-- and of a counter what read_counter notes.
local function read(log, key)
  log.key, log.used, log.total, log.reserved, log.heads, log.gone = key, 0, 0, 0, 0, 0
  log.oldest, log.is_covered, log.has_total, log.is_left_out = nil, false, false, false
  log.at = recorded_at(log, now)
  if log.is_counter then return read_counter(log) end

  -- The entries that have left, and the heads.
  local beyond = call('ZCOUNT', key, log.cutoff, '+inf')
  if beyond > 0 then read_totals(log, call('ZREVRANGE', key, 0, 1, 'WITHSCORES'), 1) end
  if beyond > log.heads then
    trim(log, beyond - log.heads)
    log.used = log.total
    log.oldest = log.total > 0 and time_of(log, 0) or nil
    -- Otherwise, after a step back of the clock, the expiry would tell of a dropped entry as the next to leave.
    if not log.part and is_expiry_telling and log.oldest then outlive_entries(log) end
    return
  end

  local expires = is_expiry_telling and not log.part and call('PEXPIRETIME', key)
  if expires == -2 then return end
  if not log.has_total then log.total = call('ZCARD', key) end
  log.used = log.total
  -- The expiry of one entry of one unit is of one window, and tells nothing. It is rounded up by less than a millisecond.
  local oldest = expires and (log.has_total or log.total > 1) and (expires - 2 * log.window_ms - SLACK) * 1000
  log.is_covered = oldest and oldest - 1000 + log.window >= now
  if log.is_covered and oldest <= now then
    log.oldest = oldest
  elseif log.total > 0 then
    log.oldest = time_of(log, 0)
  end
end

-- Whether a key has as many named entries as it may have.
local function is_full(log)
  return log.part and call('ZCARD', log.key) >= MOST_NAMED
end

-- Counts an admission under its id. Returns whether the expiry may have to move.
local function count_exactly(log, id, copies)
  add_copies(log, id, copies)
  log.oldest = min(log.oldest or now, now)
  if not log.is_covered then outlive_entries(log, now) end
end

-- Counts copies of a check that are admitted together.
local function count(log, id, copies, is_again)
  if not log.part and not log.lease then return count_exactly(log, id, copies) end
  local units, is_first = log.takes * copies, true
  if (log.lease or is_again) and not is_full(log) then
    local time = named_at(log, now)
    add_named(log, time, named(log, id, units, log.is_reserving), units)
    log.oldest = min(log.oldest or time, time)
  elseif log.is_counter then
    is_first = add_to_counts(log, now, units)
  else
    add_to_total(log, units)
    is_first = add_to_sum(log, log.at, units)
    log.oldest = min(log.oldest or log.at, log.at)
  end
  -- An earlier admission to the same part may have set an earlier expiry: when the clock had stepped back, or under a
  -- shorter window.
  local needed = ceil(log.at / 1000) + (log.is_counter and 2 or 1) * log.window_ms + SLACK
  if is_first or not is_expiry_telling or call('PEXPIRETIME', log.key) < needed then outlive_entries(log, log.at) end
end
