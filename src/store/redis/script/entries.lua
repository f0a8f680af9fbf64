-- The entries in a sorted set. An entry's score is the negated time under which its admission is
-- recorded. So the newest entry comes first, where writing is fast. An entry counts until a window
-- after its recorded time.
--
-- Takes  call, is_expiry_telling, is_server_time, now, SLACK
-- Gives  charge_of, NAMED, MOST_NAMED, LARGEST, DROPPED, LONGEST_LIFE, text, clamped, time_in,
--        recorded_at, named_at, begin_with, named, weigh, weigh_all, shared, following, find,
--        outlive
--
-- Time      An exact log records an admission under its time and id. The other algorithms sum up
--           all admissions that have the same recorded time. A compact log records the end of a
--           sub-window, a fixed window records its start, a counter records the end of its window,
--           and a calendar records the time one window before the period's end. Under these
--           algorithms, too, an admission has its own entry if it has an id from the caller or
--           reserved units. An entry with a lease is recorded a window before the lease ends, so
--           that it leaves when the lease ends. A prefetch's lease is longer than the window, so it
--           is recorded at the end of its life, ahead of the clock.
-- Expiry    An exact log with a single one-unit entry expires a window + SLACK after this entry.
--           Any other exact log expires two windows + SLACK after its oldest entry. That is late
--           enough for all entries within a window after the oldest, so most checks do not move the
--           expiry. From the expiry, take.lua computes when the oldest entry leaves. Only this
--           figure depends on an expiry, and decisions do not. Other logs expire a window + SLACK
--           after their newest entry. So do exact logs on Redis 6.2, and exact logs with a test's
--           clock.

local NAMED = 255         -- the first byte of a named entry, in a key whose other entries have no id
local MOST_NAMED = 10000  -- the most named entries under a key with bounded memory; further units count without an id
local LARGEST = 2 ^ 53    -- the largest number that doubles count up to
local DROPPED = 500       -- the most entries that a check drops after they have left, or reads to find one
local LONGEST_LIFE = 1000000  -- the most microseconds for which a process may hold a prefetch: no more than SLACK

-- Makes a charge from its five figures, which head.lua describes.
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

-- Clamps a number from a key to the range for replies: another program may have written the key.
local function clamped(number)
  return number and number > 0 and math.min(math.ceil(number), LARGEST) or 0
end

-- Converts a score into a time.
local function time_in(text_of_score)
  return clamped(-tonumber(text_of_score))
end

-- Returns the time under which an admission is recorded. If the admission had no reply, its time is
-- unknown, and is set beyond all entries.
local function recorded_at(charge, time)
  if not charge.sub_window or 2 * time >= LARGEST then return time end
  if charge.ends then
    -- The first end is compared with `now`, since `time` is in the past when an admission is
    -- settled.
    local first = tonumber(string.match(charge.ends, '%d+'))
    for finish in string.gmatch(charge.ends, '%d+') do
      if now >= first and time < tonumber(finish) then return finish - charge.window end
    end
    error('the clocks of the server and of the process that asks differ by more than two periods', 0)
  end
  return time - time % charge.sub_window + charge.later
end

-- Returns the time under which a named entry is recorded. After the clock has stepped back, the
-- entry may have moved to an earlier time. If an entry under this id has a later time, it belongs
-- to another admission that got the same id. The time is never before 1970, since only heads have a
-- score above 0.
local function named_at(charge, time)
  if not charge.lease then return charge.is_counter and time or recorded_at(charge, time) end
  local start = math.max(0, time + charge.lease - charge.window)
  return (charge.is_prefetch or charge.is_counter) and start or math.min(start, recorded_at(charge, time))
end

-- Returns the prefix of this id's named entry.
local function begin_with(charge, id)
  return charge.sub_window and string.char(NAMED) .. id or id
end

-- Returns a named entry's member, which is the id followed by the units. The units are left out for
-- a single unit that is not reserved. Reserved units have a plus sign in front of them, and a
-- prefetch's units have a plus sign and a zero.
local function named(charge, id, units, is_reserved)
  local member = begin_with(charge, id)
  if is_reserved then return member .. (charge.is_prefetch and '+0' or '+') .. text(units) end
  return units ~= 1 and member .. text(units) or member
end

-- Returns an entry's units, whether they are reserved, and whether they are a prefetch. The member
-- of an entry without an id is two bytes from its time, followed by its units.
local function weigh(charge, member)
  local start = not charge.sub_window and 9 or string.byte(member) == NAMED and 10 or 3
  -- An entry that a settlement has left has a point after its units, and may have a time after the
  -- point.
  local sign, zero, number, times = string.match(member, '^(%+?)(0?)(%d*)%*?(%d*)%.?%d*$', start)
  local units = (tonumber(number) or zero == '0' and 0 or 1) * (tonumber(times) or 1)
  -- If another program has written too many units, they count as one. Otherwise, a counter would
  -- search for ever for the first moment at which a check fits.
  return units < LARGEST and units or 1, sign == '+', sign == '+' and zero == '0'
end

-- Returns the sum of these entries' units, and how many of them are reserved. `step` is 2 if each
-- member is followed by its score.
local function weigh_all(charge, members, step)
  local total, reserved = 0, 0
  for i = 1, #members, step do
    local units, is_reserved = weigh(charge, members[i])
    total = total + units
    if is_reserved then reserved = reserved + units end
  end
  return total, reserved
end

-- Returns the member for an entry that several copies share.
local function shared(id, copies, cost)
  return id .. string.format('%.0f*%.0f', copies, cost)
end

-- Returns a later copy's id. There are too few copies for the last byte to overflow.
local function following(id, places)
  return string.sub(id, 1, 7) .. string.char(string.byte(id, 8) + places)
end

-- Returns a named entry's time, if the entry has not left the window. Entries that have left may
-- still be in the key.
local function find(log, member)
  local at = call('ZSCORE', log.key, member)
  at = at and time_in(at)
  return at and at + log.window > now and at
end

-- Sets a key's expiry so that it outlives its entries. In an exact log whose expiry can be read,
-- the expiry is computed from the oldest entry, and in other logs from the newest. If `stays`, a
-- later expiry is kept, either because it was set before the clock stepped back, or because sums
-- rely on it.
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
