-- Copies of a check: equal checks of several callers, which travel as one. members.lua says how
-- they are kept.
--
-- Takes  add_named, call, entries_of, FEW, find, following, named, now, score_of, shared
-- Gives  add_copies, copies_counted, find_shared, part_copies

local MOST = 128  -- the most copies of a check that travel together

-- Counts copies in an exact log.
local function add_copies(log, id, copies)
  local cost, units = log.cost, log.cost * copies
  if log.has_total or cost > 1 or copies > FEW then
    add_named(log, now, copies == 1 and named(log, id, cost) or shared(id, copies, cost), units)
  else
    call('ZADD', log.key, entries_of(id, units))
    log.total, log.used = log.total + units, log.used + units
  end
end

-- How many copies of a check a limit has counted under this id before, and when.
local function copies_counted(log, id, copies)
  local reserved = copies == 1 and find(log, named(log, id, log.cost, true))
  if reserved then return 1, reserved end
  for counted = copies, 1, -1 do
    local at = find(log, counted == 1 and named(log, id, log.cost) or shared(id, counted, log.cost))
    if at then
      while not log.part and log.cost == 1 and counted < copies and call('ZSCORE', log.key, following(id, counted)) do
        counted = counted + 1
      end
      return counted, at
    end
  end
  return 0
end

-- Finds the entry that an admission shares with its copies: the entry, its time, and how many
-- copies share it.
local function find_shared(log, id)
  local first = string.sub(id, 1, 7) .. '\0'
  for copies = math.max(string.byte(id, 8) + 1, 2), MOST do
    local member = shared(first, copies, log.cost)
    local at = find(log, member)
    if at then return member, at, copies end
  end
end

-- Gives the other copies that shared an entry with this id entries of their own.
local function part_copies(log, id, copies, time)
  local place = copies > 1 and string.byte(id, 8) or 0
  for other = 0, copies - 1 do
    if other ~= place then
      call('ZADD', log.key, score_of(time), named(log, following(id, other - place), log.cost))
    end
  end
end
