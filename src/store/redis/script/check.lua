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

-- Looks at what a limit has counted for a key, and notes in the charge how it stands: the units used, those that are
-- summed up of entries, and those of them that are reserved; the time of the oldest; how many members stand behind the
-- entries, and whether the sum is one; how many entries have left and are still there, and whether they are in the sum;
-- whether the expiry tells of the oldest. Returns an error text if it cannot be read.
local function look(charge, key)
  charge.used, charge.sum, charge.reserved, charge.oldest = 0, 0, 0, nil
  charge.heads, charge.is_summed = 0, false
  charge.left_behind, charge.is_behind, charge.is_covered, charge.is_left_out = 0, false, false, false
  return algorithm_of(charge).look(charge, key)
end

-- Replies how a charge stands.
local function tell(charge)
  local reset = clamped(algorithm_of(charge).reset(charge))
  local is_any = charge.reserved > 0
  reply[r + 1], reply[r + 2] = clamped(charge.used), is_any and -1 - reset or reset
  r = r + 2
  if is_any then
    r = r + 1
    reply[r] = charge.reserved
  end
end

-- How many copies of a check an earlier try has counted, and when. A check is admitted whole: what any of its charges still
-- knows was admitted.
local function counted_before(shape, id)
  local counted, at, is_at_exact = 0, nil, false
  for i = 1, shape.charges do
    local charge, key = shape[i], KEYS[k + i]
    if charge.takes > 0 then
      shape.at_fault = i
      local copies, kept_at = algorithm_of(charge).counted_before(charge, key, id, shape.copies)
      if copies > 0 then
        -- Other times than those of an exact log may be rounded.
        local time = charge.lease > 0 and kept_at + charge.window - charge.lease or kept_at
        if charge.is_exact ~= is_at_exact and at then
          if charge.is_exact then at = time end
        else
          at = max(at or 0, time)
        end
        counted, is_at_exact = max(counted, copies), is_at_exact or charge.is_exact
      end
    end
  end
  return counted, at
end

-- Looks at every charge first: no key is written unless all of them fit. Then counts, and replies.
local function decide(shape, id)
  local copies, admitted = shape.copies, shape.copies
  for i = 1, shape.charges do
    shape.at_fault = i
    local problem = look(shape[i], KEYS[k + i])
    if problem then error(problem, 0) end
  end
  local before, at = 0, nil
  if shape.is_given then
    before, at = counted_before(shape, id)
  end
  if before > 0 then
    -- What an earlier try has refused stays refused.
    admitted = min(copies, before)
    r = r + 1
    reply[r] = { at }
  else
    for i = 1, shape.charges do
      local charge = shape[i]
      if charge.needs > 0 and charge.used + charge.needs * copies > charge.units then
        if charge.is_shadow then
          charge.is_left_out = true
        else
          admitted = min(admitted, max(0, floor((charge.units - charge.used) / charge.needs)))
        end
      end
    end
  end

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
    local units = (before > 0 or charge.is_left_out) and 0 or charge.takes * admitted
    -- Whether this charge refuses the first copy that is not admitted.
    local refuses = charge.is_left_out
    if units > 0 then algorithm.admit(charge, key, id, units, shape.is_given) end
    if not is_whole and charge.needs > 0 then
      refuses = charge.used + charge.needs > charge.units
    end
    local retry, least = 0, 0
    if refuses then
      retry, least = algorithm.wait(charge, key, charge.units - charge.needs)
      retry = max(1, retry)
    end

    -- A refusal is remembered by when the oldest leaves. The expiry may be that of another window under this name.
    if not is_whole and charge.is_covered then charge.oldest = time_of(charge, key, 0) end

    tell(charge)
    if is_told then
      r = r + 1
      reply[r] = clamped(retry)
      if charge.reserved > 0 then
        r = r + 1
        reply[r] = clamped(least)
      end
    end
    is_explained = is_explained or refuses and not charge.is_shadow
  end
  -- What is refused only because an earlier try has refused it may be tried again at once.
  if not is_whole and not is_explained then
    local last = shape[shape.charges]
    reply[last.reserved > 0 and r - 1 or r] = 1
  end
  k = k + shape.charges
end
