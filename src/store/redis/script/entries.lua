-- The entries of a sorted set. The score of an entry is the time under which its admission is
-- recorded, negated. So the newest entry comes first, where writing is quick. An entry counts until
-- a window after its recorded time.
--
-- Takes  call, is_expiry_telling, is_server_time, now, SLACK
-- Gives  charge_of, NAMED, MOST_NAMED, LARGEST, DROPPED, LONGEST_LIFE, text, clamped, time_in,
--        recorded_at, named_at, begin_with, named, weigh, weigh_all, shared, following, find,
--        outlive
--
-- Time      An exact log records an admission under its time and its id. The other algorithms put admissions of one
--           recorded time together: a compact log records the end of a sub-window, a fixed window the start of a window, a
--           counter its end, and a calendar a window before the end of the period. An admission whose id the caller gave, or
--           whose units are reserved, has an entry of its own under these algorithms, too. An entry with a lease is
--           recorded a window before the lease ends, so that it leaves when the lease ends. The lease of a prefetch is
--           longer than the window, so a prefetch is recorded at the end of its life, ahead of the clock.
-- Expiry    An exact log of one entry of one unit expires a window + SLACK after that entry. Any other exact log expires
--           two windows + SLACK after its oldest entry. That is late enough for all entries that come within a window of
--           the oldest, so a check mostly leaves the expiry as it is. take.lua reads from the expiry when the oldest entry
--           leaves. Only this figure depends on an expiry, and no decision does. Other logs expire a window + SLACK after
--           their newest entry. On Redis 6.2, and by a clock that is not the server's, exact logs do so, too.

local NAMED = 255         -- the first byte of a named entry, in a key whose other entries have no id
local MOST_NAMED = 10000  -- the most named entries of a key whose memory is bounded; further units are counted without an id
local LARGEST = 2 ^ 53    -- the largest number that doubles count up to
local DROPPED = 500       -- the most entries that a check drops after they have left, or that it reads to find one entry
local LONGEST_LIFE = 1000000  -- the most microseconds for which a process may hold a prefetch: no more than SLACK

-- Makes a charge of its five figures: see head.lua.
local function charge_of(units, cost, window, sub_window, later)
  local lasts = window < 0
  if lasts then window = -window end
  return {
    units = units, cost = cost, window = window, millis = math.ceil(window / 1000),
    sub_window = sub_window > 0 and sub_window, later = later, lasts = lasts,
  }
end

local function text(number)
  return string.format('%.0f', number)
end

-- Brings a number that was read from a key into the range that a reply may have: another program
-- may have written the key.
local function clamped(number)
  return number and number > 0 and math.min(math.ceil(number), LARGEST) or 0
end

-- The time of a score.
local function time_in(text_of_score)
  return clamped(-tonumber(text_of_score))
end

-- The time under which an admission is recorded. The time of an admission without a reply is not
-- known: then it is beyond all entries.
local function recorded_at(charge, time)
  if not charge.sub_window or 2 * time >= LARGEST then return time end
  if charge.ends then
    -- The first end is compared with `now`, not with `time`: when an admission is settled, `time`
    -- is earlier.
    local first = tonumber(string.match(charge.ends, '%d+'))
    for finish in string.gmatch(charge.ends, '%d+') do
      if now >= first and time < tonumber(finish) then return finish - charge.window end
    end
    error('the clocks of the server and of the process that asks differ by more than two periods', 0)
  end
  return time - time % charge.sub_window + charge.later
end

-- The time under which a named entry is recorded. After a step back of the clock, the entry may
-- have moved to an earlier time. If an entry under this id has a later time, it belongs to another
-- admission, which got the same id. The time is never before 1970, since only heads have a score
-- above 0.
local function named_at(charge, time)
  if not charge.lease then return charge.is_counter and time or recorded_at(charge, time) end
  local start = math.max(0, time + charge.lease - charge.window)
  return (charge.is_prefetch or charge.is_counter) and start or math.min(start, recorded_at(charge, time))
end

-- The text with which a named entry of this id begins.
local function begin_with(charge, id)
  return charge.sub_window and string.char(NAMED) .. id or id
end

-- The member of a named entry: the id, and behind it the units. If the entry has only one unit,
-- which is not reserved, the number of units is left out. Reserved units have a plus sign before
-- them, and the units of a prefetch have a plus sign and a zero.
local function named(charge, id, units, is_reserved)
  local member = begin_with(charge, id)
  if is_reserved then return member .. (charge.is_prefetch and '+0' or '+') .. text(units) end
  return units ~= 1 and member .. text(units) or member
end

-- The units of an entry, whether they are reserved, and whether they are a prefetch. An entry
-- without an id consists of two bytes of its time, and its units.
local function weigh(charge, member)
  local start = not charge.sub_window and 9 or string.byte(member) == NAMED and 10 or 3
  -- The entry of a settlement has a point behind its units, and may have a time behind the point.
  local sign, zero, number, times = string.match(member, '^(%+?)(0?)(%d*)%*?(%d*)%.?%d*$', start)
  local units = (tonumber(number) or zero == '0' and 0 or 1) * (tonumber(times) or 1)
  -- If the units are too many, another program has written them, and they count as one unit. With
  -- so many units, a counter would search for ever for the first moment that fits.
  return units < LARGEST and units or 1, sign == '+', sign == '+' and zero == '0'
end

-- How many units these entries have together, and how many of these units are reserved. `step` is 2
-- if the score of each member follows the member.
local function weigh_all(charge, members, step)
  local total, reserved = 0, 0
  for i = 1, #members, step do
    local units, is_reserved = weigh(charge, members[i])
    total = total + units
    if is_reserved then reserved = reserved + units end
  end
  return total, reserved
end

-- The member of an entry that copies share.
local function shared(id, copies, cost)
  return id .. string.format('%.0f*%.0f', copies, cost)
end

-- The id of a later copy. There are too few copies for the last byte to overflow.
local function following(id, places)
  return string.sub(id, 1, 7) .. string.char(string.byte(id, 8) + places)
end

-- The time of a named entry, if it has not left the window. An entry that has left may still be in
-- the key.
local function find(log, member)
  local at = call('ZSCORE', log.key, member)
  at = at and time_in(at)
  return at and at + log.window > now and at
end

-- Sets the expiry of a key as its entries need it. In an exact log whose expiry can be read, the
-- expiry follows from the oldest entry. In any other log, it follows from the newest entry. If
-- `stays`, a later expiry is left as it is, because it is from before a step back of the clock, or
-- because sums rely on it.
local function outlive(log, newest, stays)
  local time, life = newest, log.millis + SLACK
  if not log.sub_window and is_expiry_telling and log.oldest then
    time = log.oldest
    if log.has_total or log.total > 1 then life = life + log.millis end
  end
  local expiry = math.ceil(time / 1000) + life
  if not is_server_time then
    call('PEXPIRE', log.key, math.ceil((time - now) / 1000) + life)
  elseif not (stays and is_expiry_telling and call('PEXPIRETIME', log.key) >= expiry) then
    call('PEXPIREAT', log.key, expiry)
  end
end
