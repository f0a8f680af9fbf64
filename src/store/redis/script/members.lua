-- How copies of a check stand in an exact log, whichever way counts them.
--
-- Takes  nothing
-- Gives  now, score, score_of, SLACK, is_server_time, is_expiry_telling, call, try, FEW, shared,
--        following, entries_of
--
-- Copies that are admitted together share an entry under the first id, with their number and the
-- cost of each. A few copies of cost 1 get entries of their own instead. The last byte of the first
-- id is 0, and the last bytes of the other copies' ids count up from it. So the id of any copy
-- leads to the entry.

-- The names that this shares with head.lua come as arguments: a function that refers to locals of
-- another function costs more to make.
local now, score, score_of, SLACK, is_server_time, is_expiry_telling = ...
local call, try = redis.call, redis.pcall

local FEW = 4  -- up to 4 copies of cost 1 get an entry each, so that the key needs no total

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
