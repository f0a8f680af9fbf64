-- The entries of a sorted set: score = the time under which something is recorded, negated, so that the newest stands
-- first, where writing is quick. Until a window after that time it counts.
--
-- An exact log records an admission under its time and its id. A compact log records under the end of a sub-window, a
-- fixed window and a counter under the start of a window, and put together what has the same time. What has an id of its
-- own there, since its caller gave one or holds its units, is an entry of its own, too. What is held for a lease is
-- recorded a window before the lease ends, so that it leaves then.

local KEPT = 255         -- the first byte of an entry with an id, where most have none
local MOST_KEPT = 10000  -- entries with ids of a key whose memory is bounded; what comes beyond them gets no id
local LARGEST = 2 ^ 53   -- the largest number that doubles count up to

local floor, max, min = math.floor, math.max, math.min

local function text(number)
  return string.format('%.0f', number)
end

-- A number as it may stand in a reply, whatever a key of ours was made to hold.
local function clamped(number)
  return number and number > 0 and min(ceil(number), LARGEST) or 0
end

-- The time that a score stands for.
local function time_in(score)
  return clamped(-tonumber(score))
end

-- Lets a key live until so many windows after a time.
local function outlive(key, charge, time, windows)
  local left = windows * charge.window_ms + SLACK
  if is_server_time then
    call('PEXPIREAT', key, ceil(time / 1000) + left)
  else
    call('PEXPIRE', key, ceil((time - now) / 1000) + left)
  end
end

-- Whether a key is known to live until then already.
local function outlives(key, charge, time, windows)
  return is_expiry_telling and call('PEXPIRETIME', key) >= ceil(time / 1000) + windows * charge.window_ms + SLACK
end

-- The member of an entry that has an id: the id, and behind it its units if there are more than 1, or if they are
-- reserved, with a plus sign then.
local function named(charge, id, units, is_reserved)
  local member = charge.is_exact and id or string.char(KEPT) .. id
  return (units ~= 1 or is_reserved) and member .. (is_reserved and '+' or '') .. text(units) or member
end

-- Whether the units of an entry are reserved.
local function is_reserved(charge, member)
  local place = charge.is_exact and 9 or string.byte(member) == KEPT and 10
  return place and string.byte(member, place) == 43  -- a plus sign
end

-- The member of an entry that copies of a check share: the first one's id, their number and the cost of each.
local function named_together(id, copies, cost)
  return id .. text(copies) .. '*' .. text(cost)
end

-- The member of an admission that has been settled, which no id finds any more: its units with a point behind them.
local function named_settled(id, units)
  return id .. text(units) .. '.'
end

-- The mark of an admission that was settled when its lease was over. Its units are among those without an id.
local function named_late(id)
  return string.char(KEPT) .. id .. '.'
end

-- The units of an entry, and if copies share it, the cost of each. One without an id is two bytes of its time, and its
-- units.
local function weight(charge, member)
  if charge.is_exact and #member == 8 then return 1 end
  local units = string.sub(member, charge.is_exact and 9 or string.byte(member) == KEPT and 10 or 3)
  if units == '' then return 1 end
  if units == '.' then return 0 end
  local number, copies, cost = tonumber(units), nil, nil
  if not number then
    copies, cost = string.match(units, '^(%d+)%*(%d+)$')
    number = copies and copies * cost
  end
  -- Other than a whole number it is not of our making. Over such units a counter would look for a moment for ever.
  local is_ours = number and number >= 0 and number < 2 ^ 53 and number % 1 == 0
  return is_ours and number or 1, tonumber(cost)
end

-- The time under which something with an id is recorded, if it has not left the window: it may have left, and be there still.
local function found(charge, key, member)
  local at = call('ZSCORE', key, member)
  at = at and time_in(at)
  return at and at + charge.window > now and at
end

-- Adds units to those that were admitted at the same recorded time, and returns whether they are the first.
local function join(charge, key, time, units)
  local at = text(-time)
  -- Among entries of one time, that without an id is the first.
  local earlier = call('ZRANGEBYSCORE', key, at, at, 'LIMIT', 0, 1)[1]
  if earlier and string.byte(earlier) == KEPT then earlier = nil end
  if earlier then units = units + weight(charge, earlier) end
  local part = floor(time / charge.part)
  local joined = string.char(part % KEPT, floor(part / KEPT) % 256) .. text(units)
  -- A compact log must not have one entry more even for a moment: beyond 128 Redis changes how it keeps a set, for good.
  if earlier and earlier ~= joined then call('ZREM', key, earlier) end
  call('ZADD', key, at, joined)
  return not earlier
end

-- The time under which an admission is recorded.
local function recorded_at(charge, time)
  if charge.is_exact then return time end
  local start = time - time % charge.part
  return charge.is_compact and start + charge.part - 1 or start
end

-- The time under which what has an id is recorded. When the clock has stepped back it may be an earlier one, but never a
-- later: that is another admission, to which the id was given again. It is not before 1970, since a score above 0 is that
-- of a sum.
local function kept_at(charge, time)
  if charge.lease == 0 then return charge.is_counter and time or recorded_at(charge, time) end
  local held = max(0, time + charge.lease - charge.window)
  return charge.is_counter and held or min(held, recorded_at(charge, time))
end
