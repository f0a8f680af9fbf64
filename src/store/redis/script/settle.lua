-- Settling an admission: each of its charges by itself.

local function settle(shape, id, time, is_again)
  r = r + 1
  local place, known, failure = r, false, nil
  for i = 1, shape.charges do
    local charge, key = shape[i], KEYS[k + i]
    local algorithm = algorithm_of(charge)
    charge.used, charge.oldest, charge.is_summed, charge.is_stale, charge.is_covered = 0, nil, false, false, false
    local problem = algorithm.look(charge, key)
    if problem then
      failure, charge.used, charge.oldest = problem, 0, nil
    elseif charge.settled and algorithm.settle(charge, key, id, time, charge.settled) then
      known = true
    else
      algorithm.keep(charge, key)
    end
    reply[r + 1] = charge.used
    reply[r + 2] = problem and 0 or algorithm.reset(charge)
    r = r + 2
  end
  -- A second try cannot tell what the first one has settled from what nobody knows.
  reply[place] = failure or (known or is_again) and -2 or -1
  k = k + shape.charges
end
