-- Deciding a check: all charges or none.

local function algorithm_of(charge)
  return charge.is_counter and counter or log
end

-- Looks at every charge first: no key is written unless all of them fit. Then counts, and replies.
local function decide(shape, id)
  local copies, admitted, before, failure = shape.copies, shape.copies, 0, nil
  for i = 1, shape.charges do
    local charge, key = shape[i], KEYS[k + i]
    charge.used, charge.oldest, charge.counted, charge.is_left_out = 0, nil, 0, false
    charge.is_summed, charge.is_stale, charge.is_covered = false, false, false
    failure = failure or algorithm_of(charge).look(charge, key)
    if failure then
      charge.used, charge.oldest, charge.is_stale = 0, nil, false
    elseif charge.cost > 0 then
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

  local is_whole = admitted == copies and not failure
  local is_told = not is_whole or shape.has_shadow
  if is_told then
    r = r + 1
    reply[r] = failure or -1 - admitted
  end

  local is_explained = false
  for i = 1, shape.charges do
    local charge, key = shape[i], KEYS[k + i]
    local algorithm = algorithm_of(charge)
    local units = charge.is_left_out and 0 or charge.cost * (admitted - charge.counted)
    -- Whether this charge refuses the first copy that is not admitted; one that it has counted before it does not.
    local refuses = charge.is_left_out
    if units > 0 and not failure then
      algorithm.admit(charge, key, id, units, shape.is_given)
    else
      algorithm.keep(charge, key)
    end
    if not is_whole and charge.cost > 0 and admitted >= charge.counted and not failure then
      refuses = charge.used + charge.cost > charge.units
    end
    local retry = refuses and algorithm.wait(charge, key, charge.units - charge.cost) or 0

    reply[r + 1] = charge.used
    reply[r + 2] = failure and 0 or algorithm.reset(charge)
    r = r + 2
    if is_told then
      r = r + 1
      reply[r] = retry
    end
    is_explained = is_explained or refuses and not charge.is_shadow
  end
  -- What is refused only because an earlier try has refused it may be tried again at once.
  if not is_whole and not is_explained then reply[r] = 1 end
  k = k + shape.charges
end
