-- The entries of a sorted set. The score is the time under which an admission is recorded, negated: the newest entry comes
-- first, where writing is quick. An entry counts until a window after that time.
--
-- Time      An exact log records an admission under its time and its id. A compact log uses the end of a sub-window
--           instead, a fixed window and a counter the start of a window, and they put admissions of one time together. An
--           admission whose id the caller gave, or whose units are reserved, has an entry of its own there, too. An entry
--           with a lease is recorded a window before the lease ends, so that it leaves then. So a prefetch, whose lease is
--           longer than the window, is recorded at the end of its life, ahead of the clock.
-- Heads     As long as all entries are of one unit, their number is the sum. After that the score of one more member,
--           'used', is the sum of all entries. It is positive, so 'used' has the last rank. While units are reserved, the
--           score of 'held' is their sum. It has the rank before, since it is never greater. Neither has as many bytes as
--           an id.
-- Copies    Copies of a check that an exact log admits together share an entry under the first id, with their units; a few
--           of cost 1 get entries of their own. The last byte of the first id is 0, and those of the other copies count up
--           from it: so the id of any copy leads to the entry.
-- Expiry    An exact log of one entry of one unit expires a window + SLACK after it. Any other exact log expires two
--           windows + SLACK after its oldest entry. That is late enough for every entry of the window after that one, so
--           most admissions do not move the expiry, and read from it when the oldest entry leaves. Only that figure depends
--           on it, no decision. By another clock than the server's, every admission moves it. Other logs expire a window +
--           SLACK after their newest entry.

local KEPT = 255         -- the first byte of an entry with an id, where most have none
local MOST_KEPT = 10000  -- entries with ids of a key whose memory is bounded; further units are counted without an id
local LARGEST = 2 ^ 53   -- the largest number that doubles count up to
local LOOKED_AT = 100    -- entries that are looked at for a retry time, or moved after a step back of the clock
local DROPPED = 500      -- entries that have left and are dropped in one check, or that are read to find one
local LONGEST_LIFE = 1000000  -- microseconds that a process may hold a prefetch: no more than SLACK
local FEW = 4            -- up to 4 copies of cost 1 get an entry each: a sum would keep the key off the way of quick.lua

local floor, max, min = math.floor, math.max, math.min

local function text(number)
  return string.format('%.0f', number)
end

-- A number as it may stand in a reply, whatever a key of ours was made to hold.
local function clamped(number)
  return number and number > 0 and min(ceil(number), LARGEST) or 0
end

-- The time of a score.
local function time_in(score)
  return clamped(-tonumber(score))
end

-- The time under which an admission is recorded.
local function recorded_at(charge, time)
  if not charge.part then return time end
  local start = time - time % charge.part
  return charge.is_compact and start + charge.part - 1 or start
end

-- The time under which an entry with an id is recorded. When the clock has stepped back it may be an earlier one, but never
-- a later: that is another admission, to which the id was given again. It is not before 1970, since a score above 0 is that
-- of a sum.
local function kept_at(charge, time)
  if not charge.lease then return charge.is_counter and time or recorded_at(charge, time) end
  local start = max(0, time + charge.lease - charge.window)
  if charge.is_prefetch then return start end
  return charge.is_counter and start or min(start, recorded_at(charge, time))
end

-- Lets a key live for a number of windows after a time.
local function outlive(key, charge, time, windows)
  local left = windows * charge.window_ms + SLACK
  if is_server_time then
    call('PEXPIREAT', key, ceil(time / 1000) + left)
  else
    call('PEXPIRE', key, ceil((time - now) / 1000) + left)
  end
end

-- Lets a key live as its entries need it: the oldest of an exact log decides, and the newest of others.
local function outlive_entries(charge, key, newest)
  if not charge.part and is_expiry_telling and charge.oldest then
    outlive(key, charge, charge.oldest, 2)
  else
    outlive(key, charge, newest, charge.is_counter and 2 or 1)
  end
end

-- An id as the entries of a key begin with it.
local function kept(charge, id)
  return charge.part and string.char(KEPT) .. id or id
end

-- The member of an entry that has an id: the id, and behind it its units if there are more than 1, or if they are
-- reserved, with a plus sign then, and a zero if they are a prefetch.
local function named(charge, id, units, is_reserved)
  local member = kept(charge, id)
  if is_reserved then return member .. (charge.is_prefetch and '+0' or '+') .. text(units) end
  return units ~= 1 and member .. text(units) or member
end

-- The member of an entry that copies of a check share: the first one's id, their number and the cost of each.
local function named_together(id, copies, cost)
  return id .. text(copies) .. '*' .. text(cost)
end

-- The id of a later copy of a check. There are too few copies for the last byte to overflow.
local function following(id, places)
  return string.sub(id, 1, 7) .. string.char(string.byte(id, 8) + places)
end

-- The place in an entry behind its id, if it has one.
local function place_behind_id(charge, member)
  return not charge.part and 9 or string.byte(member) == KEPT and 10
end

-- Whether the units of an entry are reserved.
local function is_reserved(charge, member)
  local place = place_behind_id(charge, member)
  return place and string.byte(member, place) == 43  -- a plus sign
end

-- Whether an entry is a prefetch.
local function is_prefetch(charge, member)
  return is_reserved(charge, member) and string.byte(member, place_behind_id(charge, member) + 1) == 48  -- a zero
end

-- The units of an entry. One without an id is two bytes of its time, and its units.
local function weight(charge, member)
  local units = string.sub(member, place_behind_id(charge, member) or 3)
  if units == '' then return 1 end
  local number = tonumber(units)
  if not number or number % 1 > 0 then
    -- Behind the point of a settlement there may be its time. A mark has no units before it.
    local settled = string.match(units, '^(%d*)%.')
    local copies, cost = string.match(units, '^(%d+)%*(%d+)$')
    number = settled == '' and 0 or tonumber(settled) or copies and copies * cost
  end
  -- Other than a whole number it is not of our making. Over such units a counter would look for a moment for ever.
  local is_ours = number and number >= 0 and number < 2 ^ 53 and number % 1 == 0
  return is_ours and number or 1
end

-- The units of some entries together, and how many of them are reserved. `step` is 2 where scores are in between.
local function weights(charge, members, step)
  local sum, reserved = 0, 0
  for i = 1, #members, step do
    local units = weight(charge, members[i])
    sum = sum + units
    if is_reserved(charge, members[i]) then reserved = reserved + units end
  end
  return sum, reserved
end

-- The time of the entry of this rank, from the oldest that has not left the window.
local function time_of(charge, key, rank)
  rank = rank + charge.heads + charge.expired
  local score = call('ZREVRANGE', key, rank, rank, 'WITHSCORES')[2]
  return score and time_in(score) or now
end

-- The time of an entry, if it has not left the window: it may have left, and be there still.
local function found(charge, key, member)
  local at = call('ZSCORE', key, member)
  at = at and time_in(at)
  return at and at + charge.window > now and at
end

-- Adds units to those that were admitted at the same recorded time, and returns whether they are the first.
local function join(charge, key, time, units)
  local at = score_of(time)
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
