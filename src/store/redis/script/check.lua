-- Deciding a check: all charges or none.

local function add_reply(value)
  r = r + 1
  reply[r] = value
end

-- Whether the sum still has units of entries that have left: more than one check may drop. Then no time is known.
local function is_behind(charge)
  return charge.is_summed and charge.expired > 0
end

-- The latest time under which anything of now is recorded.
local function latest(charge)
  return not charge.is_counter and charge.at or now
end

-- The time from which an entry counts by the present clock. The end of a prefetch's life may be ahead of the clock.
local function counted_from(charge, member, time)
  return min(time, is_prefetch(charge, member) and now + LONGEST_LIFE or latest(charge))
end

-- Where the clock has stepped back, entries from the future count as having happened now, so that the key is right again
-- after one window. Each refusal moves the newest of them, at most 100. A server without memory moves none.
local function pull_back(charge, key)
  local latest = latest(charge)
  local first = call('ZRANGE', key, 0, 0, 'WITHSCORES')
  if #first == 0 or time_in(first[2]) <= latest then return end
  local at, joined, is_any = score_of(latest), 0, false
  local entries = call('ZRANGEBYSCORE', key, '-inf', '(' .. at, 'WITHSCORES', 'LIMIT', 0, LOOKED_AT)
  for i = 1, #entries, 2 do
    local member, time = entries[i], time_in(entries[i + 1])
    if charge.part and string.byte(member) ~= KEPT then
      joined, is_any = joined + weight(charge, member), true
      call('ZREM', key, member)
    else
      local from = counted_from(charge, member, time)
      if from < time then
        if pcall('ZADD', key, score_of(from), member) ~= 0 then return end
        is_any = true
      end
    end
  end
  if not is_any then return end
  if joined > 0 then join(charge, key, latest, joined) end
  charge.oldest = time_of(charge, key, 0)
  outlive_entries(charge, key, charge.at)
end

-- The first moment at which at most `most` units are used. `entries` leave next, and `sum` is the units of all entries;
-- without the reserved ones, entries and sum are taken as if those were given back now. A lower bound if more entries have
-- to leave.
local function first_fit(charge, most, sum, entries, with_reserved)
  local from, leaves = now, min(now, latest(charge)) + charge.window
  for i = 1, #entries, 2 do
    leaves = counted_from(charge, entries[i], time_in(entries[i + 1])) + charge.window
    if with_reserved or not is_reserved(charge, entries[i]) then
      if charge.is_counter and sum <= most then
        -- Until the entry leaves, only the estimate falls.
        local fits = falls_to(charge, most - sum, from)
        if fits < leaves or fits == from then return fits end
      end
      sum, from = sum - weight(charge, entries[i]), max(leaves, from)
      if not charge.is_counter and sum <= most then return from end
    end
  end
  if not charge.is_counter then return leaves end
  if sum > 0 and #entries == 2 * LOOKED_AT then return from end
  return falls_to(charge, max(0, most - sum), from)
end

-- Microseconds until at most `most` units are used, and the same if all reserved units were given back now. Lower bounds if
-- more entries have to leave than a check may read.
local function wait(charge, key, most)
  if charge.ahead then pull_back_counts(charge, key) end
  local has_entries = not charge.is_counter or charge.sum > 0
  if has_entries then pull_back(charge, key) end
  if is_behind(charge) then return 1, 0 end
  if not charge.is_summed and not charge.is_counter then
    local leaves = min(time_of(charge, key, charge.sum - most - 1), latest(charge)) + charge.window
    return leaves - now, leaves - now
  end
  local first, settled = charge.heads + charge.expired, charge.sum - charge.reserved
  -- Each entry of an exact log has at least one unit, so no more than these have to leave.
  local enough = not charge.part and charge.reserved == 0 and min(LOOKED_AT, charge.sum - most) or LOOKED_AT
  local entries = has_entries and call('ZREVRANGE', key, first, first + enough - 1, 'WITHSCORES') or {}
  local retry = first_fit(charge, most, charge.sum, entries, true) - now
  if charge.reserved == 0 then return retry, retry end
  if not charge.is_counter and settled <= most then return retry, 0 end
  return retry, first_fit(charge, most, settled, entries, false) - now
end

-- Replies the status of a charge.
local function reply_status(charge)
  -- The moment from which on fewer units are used.
  local fewer = charge.oldest and charge.oldest + charge.window
  local estimate = charge.is_counter and estimate_now(charge) or 0
  if estimate > 0 then
    local falls = falls_to(charge, estimate - 1, now)
    fewer = min(falls, fewer or falls)
  end
  local reset = is_behind(charge) and 1 or clamped(fewer and fewer - now)
  add_reply(clamped(charge.used))
  add_reply(charge.reserved > 0 and -1 - reset or reset)
  if charge.reserved > 0 then add_reply(charge.reserved) end
end

-- Replies the status of a charge, and when it no longer refuses one more copy. Returns whether it has refused one.
local function reply_refusal(charge, key, is_whole)
  local refuses = charge.is_left_out
  if not is_whole and charge.needs > 0 then refuses = charge.used + charge.needs > charge.units end
  local retry, least = 0, 0
  if refuses then
    retry, least = wait(charge, key, charge.units - charge.needs)
    retry = max(1, retry)
  end
  -- Callers remember a refusal until the oldest entry leaves. The expiry may be that of another window under this name.
  if not is_whole and charge.is_covered then charge.oldest = time_of(charge, key, 0) end
  reply_status(charge)
  add_reply(clamped(retry))
  if charge.reserved > 0 then add_reply(clamped(least)) end
  return refuses and not charge.is_shadow
end

-- How many copies of a check a charge has counted under this id before, and when: they share one entry, or have one each.
local function copies_counted(charge, key, id, copies)
  local reserved = copies == 1 and found(charge, key, named(charge, id, charge.cost, true))
  if reserved then return 1, reserved end
  for count = copies, 1, -1 do
    local member = count == 1 and named(charge, id, charge.cost) or named_together(id, count, charge.cost)
    local at = found(charge, key, member)
    if at then
      while not charge.part and charge.cost == 1 and count < copies and call('ZSCORE', key, following(id, count)) do
        count = count + 1
      end
      return count, at
    end
  end
  return 0
end

-- How many copies of a check an earlier try has counted, and when. A check is admitted whole, so an entry under any of its
-- charges shows it.
local function counted_before(shape, id)
  local counted, exact_at, rounded_at = 0, nil, nil
  for i = 1, #shape do
    local charge = shape[i]
    if charge.takes > 0 then
      shape.at_fault = i
      local copies, time = copies_counted(charge, KEYS[k + i], id, shape.copies)
      if copies > 0 then
        counted = max(counted, copies)
        if charge.lease then time = time + charge.window - charge.lease end
        if charge.part then
          rounded_at = max(rounded_at or 0, time)
        else
          exact_at = max(exact_at or 0, time)
        end
      end
    end
  end
  return counted, exact_at or rounded_at
end

-- How many copies of a check are admitted, once its keys are read, and whether an earlier try has counted them.
local function admissible(shape, id)
  local copies, admitted, is_counted = shape.copies, shape.copies, false
  if shape.is_given then
    local before, at = counted_before(shape, id)
    if before > 0 then
      -- Copies that the earlier try has refused stay refused.
      admitted, is_counted = min(copies, before), true
      add_reply({ at })
    end
  end
  for i = 1, #shape do
    local charge = shape[i]
    local is_over = not is_counted and charge.needs > 0 and charge.used + charge.needs * copies > charge.units
    if charge.is_prefetch and not is_counted and is_full(charge, KEYS[k + i]) then
      -- Without an entry of its own it would leave too early.
      admitted = 0
    end
    if charge.is_shadow then
      charge.is_left_out = is_over
    elseif is_over then
      admitted = min(admitted, max(0, floor((charge.units - charge.used) / charge.needs)))
    end
  end
  return admitted, is_counted
end

-- Decides a check. Every charge is read first: no key gets an entry unless all of them fit.
local function decide(shape, id)
  for i = 1, #shape do
    shape.at_fault = i
    read(shape[i], KEYS[k + i])
  end
  local admitted, is_counted = admissible(shape, id)
  local is_whole = admitted == shape.copies
  local has_retries = not is_whole or shape.has_shadow
  if has_retries then add_reply(-1 - admitted) end

  local has_retry = false
  for i = 1, #shape do
    local charge, key = shape[i], KEYS[k + i]
    shape.at_fault = i
    local units = (is_counted or charge.is_left_out) and 0 or charge.takes * admitted
    if units > 0 then count(charge, key, id, units, shape.is_given) end
    if has_retries then
      has_retry = reply_refusal(charge, key, is_whole) or has_retry
    else
      reply_status(charge)
    end
  end
  -- A check that is refused only because an earlier try has refused it may be tried again at once.
  if not is_whole and not has_retry then
    reply[shape[#shape].reserved > 0 and r - 1 or r] = 1
  end
  k = k + #shape
end

-- Errors that fail a whole batch, which may then be sent again: the server's state, or missing permissions.
local OF_THE_SERVER = {
  'READONLY', 'NOREPLICAS', 'MISCONF', 'LOADING', 'MASTERDOWN', 'CLUSTERDOWN', 'BUSY', 'NOPERM', 'NOAUTH', 'TRYAGAIN',
  'MOVED', 'ASK ', 'script killed', 'run this command', 'not allowed from script', 'nknown Redis command', 'non local key',
}

-- The text to reply if a charge has failed: its place and the error.
local function failure_of(place, problem)
  local message = type(problem) == 'table' and problem.err or problem
  for _, state in ipairs(OF_THE_SERVER) do
    if string.find(message, state, 1, true) then
      -- A table keeps the code of the error. A script before Redis 7.0 cannot fail with one.
      error(redis.REDIS_VERSION_NUM and { err = message } or message, 0)
    end
  end
  return text(place) .. ' ' .. message
end
