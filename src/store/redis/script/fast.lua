-- The fast way, and how copies of a check stand in an exact log. The fast way decides checks with
-- new ids on exact logs, if the logs have capacity for all copies and no reserved units. The fast
-- way decides as the general way does in check.lua, but the functions of the general way need not
-- be made. Like run.lua, the fast way reads the server's expiries.
--
-- Takes  nothing
-- Gives  now, score_of, SLACK, is_server_time, is_expiry_telling, call, try, FEW, LOOKED_AT, shared,
--        following, entries_of, decide_fast
--
-- Copies that are admitted together share an entry under the first id, with their number and the
-- cost of each. A few copies of cost 1 get entries of their own instead. The last byte of the first
-- id is 0, and the last bytes of the other copies' ids count up from it. So the id of any copy
-- leads to the entry.

-- mod.rs wraps this file in a function, other_ways. The function gets values of head.lua as
-- arguments, since a Lua function that refers to locals of another function costs more to make.
local now, score, score_of, SLACK, is_server_time, is_expiry_telling = ...
local call, try = redis.call, redis.pcall

local FEW = 4  -- up to 4 copies of cost 1 get an entry each, so that the key needs no total
local LOOKED_AT = 100  -- the most entries that a check looks at, or moves after a step back of the clock

-- The member of an entry that copies share.
local function shared(id, copies, cost)
  return id .. string.format('%.0f*%.0f', copies, cost)
end

-- The id of a later copy. There are too few copies for the last byte to overflow.
local function following(id, places)
  return string.sub(id, 1, 7) .. string.char(string.byte(id, 8) + places)
end

-- The scores and members of the entries of a few copies of cost 1.
local function entries_of(id, copies)
  if copies == 1 then return score, id end
  return score, id, entries_of(following(id, 1), copies - 1)
end

-- Looks at the exact log of a charge for copies of a check. Returns
--   used    the used units
--   reset   the microseconds until fewer are used, once the copies are counted
--   expiry  when the key has to expire, if its expiry has to change
--   gone    how many entries have left and are still in the key
--   total   the score of the total, if the key has one
-- or nothing, if not all copies fit, or if there is more to do than to count them. `expires` and
-- `size` are the expiry of the key and the number of its entries, if they are known.
local function look(charge, key, copies, expires, size)
  local counted, window = charge.cost * copies, charge.window
  expires = expires or call('PEXPIRETIME', key)
  local used, gone, total, oldest = 0, 0, nil, now
  if expires ~= -2 then
    -- Counts the entries that have left, and the total.
    local beyond = try('ZCOUNT', key, charge.cutoff, '+inf')
    if type(beyond) == 'table' or beyond > LOOKED_AT then return end
    total = beyond > 0 and call('ZSCORE', key, 'used')
    gone = total and beyond - 1 or beyond
    used = total and tonumber(total) or (size or call('ZCARD', key)) - gone
    for _, member in ipairs(total and gone > 0 and call('ZREVRANGE', key, 1, gone) or {}) do
      -- Behind its id, a member has its units, or the number of its copies and their cost. Behind
      -- the point of a settlement may be a time.
      local number, times = string.match(member, '^(%d*)%*?(%d*)%.?%d*$', 9)
      -- A member shorter than an id is the head of reserved units, which the general way reads.
      if not number or #member < 8 then return end
      used = used - (tonumber(number) or 1) * (tonumber(times) or 1)
    end
    -- The expiry tells the time of the oldest entry, but rounding may add less than a millisecond
    -- to this time. If one unit is used, the copies move the expiry. Then an expiry that puts the
    -- oldest entry ahead of the clock is not trusted, since it is from before a step back of the
    -- clock.
    local is_one = used == 1 and not total
    oldest = (expires - (is_one and charge.life or charge.long_life)) * 1000
    if gone > 0 or oldest + window < now + 1000 or is_one and oldest > now + 1000 then
      local at = call('ZREVRANGE', key, beyond, beyond, 'WITHSCORES')[2]
      oldest = at and -tonumber(at) or now
      if oldest > now or total and not at then return end
    end
  end
  -- This also returns nothing if the total is no number.
  if not (used >= 0 and used + counted <= charge.units) then return end
  local expiry = math.ceil(oldest / 1000) + ((total or used + counted > 1) and charge.long_life or charge.life)
  return used, math.min(oldest + window - now, window), expiry ~= expires and expiry, gone, total
end

-- Decides copies of a check, from charge `i` on, and appends the status of each of these charges to
-- `reply`, which has the length `r`. Returns false if nothing was counted. `expires` and `size` are
-- the expiry of the key and the number of its entries, if they are known.
local function decide_fast(charges, i, k, id, copies, reply, r, expires, size)
  local charge, key = charges[i], KEYS[k + i]
  local used, reset, expiry, gone, total = look(charge, key, copies, expires, size)
  -- All charges are looked at before one is counted.
  if not used or charges[i + 1] and not decide_fast(charges, i + 1, k, id, copies, reply, r) then return false end
  local cost = charge.cost
  local has_total, written = total or cost > 1 or copies > FEW
  -- The first write of a check is the only one that a server without memory refuses.
  if has_total then
    local member = copies > 1 and shared(id, copies, cost) or cost > 1 and id .. string.format('%.0f', cost) or id
    written = try('ZADD', key, used + cost * copies, 'used', score, member)
    -- If the server reads the first try after the second try, the entry is there already, and the
    -- total gets its earlier value again.
    if total and written == 0 then call('ZADD', key, used, 'used') end
  else
    written = try('ZADD', key, entries_of(id, copies))
  end
  if type(written) == 'table' then return false end
  local newest = has_total and -2 or -1  -- the rank of the last entry, in front of the total
  if gone > 0 then call('ZREMRANGEBYRANK', key, newest + 1 - gone, newest) end
  if expiry then call('PEXPIREAT', key, expiry) end
  reply[r + 2 * i - 1], reply[r + 2 * i] = used + cost * copies, reset
  return true
end
