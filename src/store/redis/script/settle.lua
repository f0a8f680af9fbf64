-- Settling an admission: each charge by itself. One that cannot be settled does not stop the others.

local COPIES = 128  -- the copies of a check that travel together at most

-- The entry that an admission shares with its copies, the place of its own id behind the entry's, and the entry's time.
local function shared(charge, key, id)
  local first, place = string.sub(id, 1, 7) .. '\0', string.byte(id, 8)
  for copies = max(place + 1, 2), COPIES do
    local member = named_together(first, copies, charge.cost)
    local at = found(charge, key, member)
    if at then return member, place, at end
  end
end

-- Writes an entry of a settlement, which no id finds any more: its units with a point behind them. If the id is given and
-- settled again, the same member may be there: then the time follows the point, and spaces within one microsecond.
local function write_settled(key, id, time, units)
  local member = id .. text(units) .. '.'
  if call('ZSCORE', key, member) then
    member = member .. text(time)
    for _ = 1, LOOKED_AT do
      if not call('ZSCORE', key, member) then break end
      member = member .. ' '
    end
  end
  call('ZADD', key, score_of(time), member)
end

-- Whether there still is the entry that a settlement has left at a time under this id.
local function has_settled(key, id, time)
  local at = score_of(time)
  for _, member in ipairs(call('ZRANGEBYSCORE', key, at, at, 'LIMIT', 0, DROPPED)) do
    if string.sub(member, 1, #id) == id and string.find(member, '%.%d* *$', #id + 1) then return true end
  end
  return false
end

-- Settles units whose lease is over and whose window is not: counts them as of when they were reserved. Returns whether
-- that was not done before.
local function settle_late(charge, key, id, time, cost)
  if cost == 0 or not charge.lease or now < time + charge.lease or now >= time + charge.window then return false end
  if not charge.part or charge.is_counter then
    local prefix = kept(charge, id)
    if has_settled(key, prefix, time) then return false end
    add_to_sum(charge, key, cost)
    write_settled(key, prefix, time, cost)
    return true
  end
  -- The units are among those without an id, so a mark says that they were counted.
  local at = recorded_at(charge, time)
  -- A fixed window may have ended before.
  if at + charge.window <= now then return false end
  -- The id may have been given again: the time tells the marks apart.
  local mark = kept(charge, id) .. '.' .. text(at)
  local marked_at = call('ZSCORE', key, mark)
  if marked_at and time_in(marked_at) == at then return false end
  local has_mark = not is_full(charge, key)
  add_to_sum(charge, key, cost)
  join(charge, key, at, cost)
  if has_mark then call('ZADD', key, score_of(at), mark) end
  return true
end

-- Sets the real cost of an admission, as of its own time. Returns whether the admission was known.
local function settle_charge(charge, key, id, time, cost)
  local member, copies, place = named(charge, id, charge.cost, charge.is_reserving), 1, 0
  local at = found(charge, key, member)
  if not at and not charge.part and not charge.lease and charge.cost > 0 then
    member, place, at = shared(charge, key, id)
    copies = at and weight(charge, member) / charge.cost
  end
  if not at or at > kept_at(charge, time) then
    if not settle_late(charge, key, id, time, cost) then return false end
  else
    -- All units of a prefetch that are spent by now count from now at the latest.
    time = charge.lease and min(charge.is_prefetch and at or time, now) or at
    -- The first write, so that a server without memory lets units be given back.
    call('ZREM', key, member)
    local stays = charge.is_counter and 0 or cost  -- a counter adds it to its numbers
    if charge.is_counter or charge.is_summed or stays > 0 then
      add_to_sum(charge, key, stays - charge.cost, charge.is_reserving and -charge.cost)
    else
      charge.sum, charge.used = charge.sum - charge.cost, charge.used - charge.cost
    end
    -- Those that shared the entry have one of their own from now on.
    for places = 0, copies - 1 do
      if places ~= place then
        call('ZADD', key, score_of(time), named(charge, following(id, places - place), charge.cost))
      end
    end
    if cost > 0 then
      if charge.is_counter then
        count_at(charge, key, time, cost)
      elseif charge.part then
        join(charge, key, recorded_at(charge, time), cost)
      else
        write_settled(key, id, time, cost)
      end
    end
  end

  local is_counted = false  -- in the numbers of a counter
  if charge.is_counter then
    charge.used, is_counted = charge.sum + estimate_now(charge), charge.current + charge.previous > 0
  end
  charge.oldest = nil
  if charge.used == 0 and not is_counted then
    call('UNLINK', key)
    return true
  end
  if charge.sum > 0 then charge.oldest = time_of(charge, key, 0) end
  local newest = time_in(call('ZRANGE', key, 0, 0, 'WITHSCORES')[2])
  if charge.is_counter then
    -- All that is left may be of the window before.
    local is_present = charge.current > 0 or charge.sum > 0 and newest > charge.at
    outlive(key, charge, is_present and charge.at or charge.at - charge.window, 2)
  else
    -- The oldest may have gone, so the expiry must not tell of it any more. The newest may be as old as the admission.
    outlive_entries(charge, key, min(newest, charge.at))
  end
  return true
end

-- Settles an admission, and replies.
local function settle(shape, id, time)
  r = r + 1
  local place, is_known, failure = r, false, nil
  for i = 1, #shape do
    local charge, key = shape[i], KEYS[k + i]
    local is_done, problem = attempt(function()
      read(charge, key)
      if charge.settled and settle_charge(charge, key, id, time, charge.settled) then is_known = true end
      reply_status(charge)
    end)
    if not is_done then
      failure = failure_of(i, problem)
      reply[r + 1], reply[r + 2] = 0, 0
      r = r + 2
    end
  end
  -- A second try cannot tell an admission that the first one has settled from an unknown one.
  reply[place] = failure or (is_known or shape.kind == 'settle again') and -2 or -1
  k = k + #shape
end
