-- Settling an admission: each of its charges by itself. One that cannot be settled fails the settlement, and not the others.

local function settle(shape, id, time, is_again)
  r = r + 1
  local place, known, failure = r, false, nil
  for i = 1, shape.charges do
    local charge, key = shape[i], KEYS[k + i]
    local algorithm = algorithm_of(charge)
    local is_done, problem = attempt(function()
      local unreadable = look(charge, key)
      if unreadable then error(unreadable, 0) end
      if charge.settled and algorithm.settle(charge, key, id, time, charge.settled) then known = true end
      tell(charge)
    end)
    if not is_done then
      failure = failure_of(i, problem)
      reply[r + 1], reply[r + 2] = 0, 0
      r = r + 2
    end
  end
  -- A second try cannot tell what the first one has settled from what nobody knows.
  reply[place] = failure or (known or is_again) and -2 or -1
  k = k + shape.charges
end
