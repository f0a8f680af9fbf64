-- Deciding a check: all charges or none.

local function algorithm_of(charge)
  return charge.is_counter and counter or log
end

-- What fails a whole batch, which may then be sent again: the server's own state, and what its user may not do.
local OF_THE_SERVER = {
  'READONLY', 'NOREPLICAS', 'MISCONF', 'LOADING', 'MASTERDOWN', 'CLUSTERDOWN', 'BUSY', 'NOPERM', 'NOAUTH', 'TRYAGAIN',
  'MOVED', 'ASK ', 'script killed', 'run this command', 'not allowed from script', 'nknown Redis command', 'non local key',
}

-- What to reply if a charge has failed: its place and the error.
local function failure_of(place, problem)
  local told = type(problem) == 'table' and problem.err or problem
  for _, state in ipairs(OF_THE_SERVER) do
    if string.find(told, state, 1, true) then
      -- Only as a table does it keep its code, which a script before Redis 7.0 cannot fail with.
      error(redis.REDIS_VERSION_NUM and { err = told } or told, 0)
    end
  end
  return text(place) .. ' ' .. told
end

-- Looks at what a limit has counted for a key, and notes in the charge how it stands: the units used, and those that are
-- summed up of entries; the time of the oldest; how many members stand behind the entries, and whether the sum is one; how
-- many entries have left and are still there, and whether they are in the sum; whether the expiry tells of the oldest.
-- Returns an error text if it cannot be read.
local function look(charge, key)
  charge.used, charge.sum, charge.oldest, charge.counted = 0, 0, nil, 0
  charge.heads, charge.is_summed = 0, false
  charge.left_behind, charge.is_behind, charge.is_covered, charge.is_left_out = 0, false, false, false
  return algorithm_of(charge).look(charge, key)
end

-- Looks at every charge first: no key is written unless all of them fit. Then counts, and replies.
local function decide(shape, id)
  local copies, admitted, before = shape.copies, shape.copies, 0
  for i = 1, shape.charges do
    local charge, key = shape[i], KEYS[k + i]
    shape.at_fault = i
    local problem = look(charge, key)
    if problem then error(problem, 0) end
    if charge.cost > 0 then
      if shape.is_given then
        charge.counted = algorithm_of(charge).counted_before(charge, key, id, copies)
        before = max(before, charge.counted)
      end
      if charge.counted < copies and charge.used + charge.cost * (copies - charge.counted) > charge.units then
        if charge.is_shadow then
          charge.is_left_out = true
        else
          admitted = min(admitted, charge.counted + max(0, floor((charge.units - charge.used) / charge.cost)))
        end
      end
    end
  end
  -- What an earlier try has refused stays refused.
  if before > 0 then admitted = min(admitted, before) end

  local is_whole = admitted == copies
  local is_told = not is_whole or shape.has_shadow
  if is_told then
    r = r + 1
    reply[r] = -1 - admitted
  end

  local is_explained = false
  for i = 1, shape.charges do
    local charge, key = shape[i], KEYS[k + i]
    shape.at_fault = i
    local algorithm = algorithm_of(charge)
    local units = charge.is_left_out and 0 or charge.cost * (admitted - charge.counted)
    -- Whether this charge refuses the first copy that is not admitted; one that it has counted before it does not.
    local refuses = charge.is_left_out
    if units > 0 then algorithm.admit(charge, key, id, units, shape.is_given) end
    if not is_whole and charge.cost > 0 and admitted >= charge.counted then
      refuses = charge.used + charge.cost > charge.units
    end
    local retry = refuses and max(1, algorithm.wait(charge, key, charge.units - charge.cost)) or 0

    -- A refusal is remembered by when the oldest leaves. The expiry may be that of another window under this name.
    if not is_whole and charge.is_covered then charge.oldest = time_of(charge, key, 0) end

    reply[r + 1] = clamped(charge.used)
    reply[r + 2] = clamped(algorithm.reset(charge))
    r = r + 2
    if is_told then
      r = r + 1
      reply[r] = clamped(retry)
    end
    is_explained = is_explained or refuses and not charge.is_shadow
  end
  -- What is refused only because an earlier try has refused it may be tried again at once.
  if not is_whole and not is_explained then reply[r] = 1 end
  k = k + shape.charges
end
