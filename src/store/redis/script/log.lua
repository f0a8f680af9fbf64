-- How a log counts: an exact one, a compact one, and a fixed window.

-- Reads the status of a limit into the charge, and drops the entries that have left:
--   used, sum, reserved  the units used, those of them in entries, and those of them that are reserved
--   oldest, is_covered   the time of the oldest entry, and whether the expiry tells it
--   heads, is_summed     how many heads there are, and whether one of them is the sum
--   expired              how many entries have left and are still there
--   at                   the time under which an admission of now is recorded
local function read(charge, key)
  charge.used, charge.sum, charge.reserved, charge.oldest, charge.is_covered = 0, 0, 0, nil, false
  charge.heads, charge.is_summed, charge.expired, charge.at = 0, false, 0, recorded_at(charge, now)
  if charge.is_counter then return read_counter(charge, key) end

  local beyond = pcall('ZCOUNT', key, charge.cutoff, '+inf')
  if type(beyond) == 'table' then error(beyond.err, 0) end
  -- The entries that have left, and the heads.
  if beyond > 0 then read_heads(charge, call('ZREVRANGE', key, 0, 1, 'WITHSCORES'), 1) end
  if beyond > charge.heads then
    trim(charge, key, beyond - charge.heads)
    charge.used = charge.sum
    charge.oldest = charge.sum > 0 and time_of(charge, key, 0) or nil
    -- Otherwise, after a step back of the clock, the expiry would tell of a dropped entry as the next to leave.
    if not charge.part and is_expiry_telling and charge.oldest then outlive(key, charge, charge.oldest, 2) end
    return
  end

  local expires = is_expiry_telling and not charge.part and call('PEXPIRETIME', key)
  if expires == -2 then return end
  if not charge.is_summed then charge.sum = call('ZCARD', key) end
  charge.used = charge.sum
  -- The expiry of one entry of one unit is of one window, and tells nothing.
  local oldest = expires and (charge.is_summed or charge.sum > 1) and oldest_by(expires, charge)
  charge.is_covered = oldest
  if oldest and oldest <= now then
    charge.oldest = oldest
  elseif charge.sum > 0 then
    charge.oldest = time_of(charge, key, 0)
  end
end

-- Counts units under an id in an exact log.
local function count_exactly(charge, key, id, units)
  if charge.is_summed or units > 1 and (charge.cost > 1 or units > FEW) then
    local member = units == charge.cost and named(charge, id, units) or named_together(id, units / charge.cost, charge.cost)
    add_entry(charge, key, now, member, units)
  else
    for places = 0, units - 1 do
      call('ZADD', key, score, following(id, places))
    end
    charge.sum, charge.used = charge.sum + units, charge.used + units
  end
  charge.oldest = min(charge.oldest or now, now)
  if charge.is_covered then return end
  if is_expiry_telling and not charge.is_summed and charge.sum == 1 then
    outlive(key, charge, now, 1)
  else
    outlive_entries(charge, key, now)
  end
end

-- Whether a key has as many entries with ids as it may have.
local function is_full(charge, key)
  return charge.part and call('ZCARD', key) >= MOST_KEPT
end

-- Counts units under an id.
local function count(charge, key, id, units, is_given)
  if not charge.part and not charge.lease then return count_exactly(charge, key, id, units) end
  local is_first = true
  if (charge.lease or is_given) and not is_full(charge, key) then
    local time = kept_at(charge, now)
    add_entry(charge, key, time, named(charge, id, units, charge.is_reserving), units)
    charge.oldest = min(charge.oldest or time, time)
  elseif charge.is_counter then
    is_first = count_at(charge, key, now, units)
  else
    add_to_sum(charge, key, units)
    is_first = join(charge, key, charge.at, units)
    charge.oldest = min(charge.oldest or charge.at, charge.at)
  end
  -- An earlier admission to the same part may have set an earlier expiry: when the clock had stepped back, or under a
  -- shorter window.
  local windows = charge.is_counter and 2 or 1
  local needed = ceil(charge.at / 1000) + windows * charge.window_ms + SLACK
  if is_first or not is_expiry_telling or call('PEXPIRETIME', key) < needed then outlive_entries(charge, key, charge.at) end
end
