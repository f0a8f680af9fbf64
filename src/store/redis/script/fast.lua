-- The fast way: a check of exact logs that have capacity for all of its copies, whose units are not
-- reserved, under ids that are new. It decides what check.lua decides, before the functions of the
-- general way are made. It reads the server's expiries, as run.lua does.
--
-- Takes  call, ceil, entries_of, FEW, now, score, shared, SHARED, SLACK, try
-- Gives  decide_fast

local MANY = 100                  -- more entries that have left are dropped in steps, by the general way
local present = ceil(now / 1000)  -- now in milliseconds

-- Reads an exact log for copies of a check. Returns the units used, the microseconds until the next
-- of them leaves if the copies are admitted, the expiry that the key needs then if it has another,
-- the total if the key has one, and how many entries have left. Returns nothing if there is no
-- capacity, or more to do than to count. `expires` and the number of entries may be known.
local function look(charge, key, copies, expires, size)
  local counted, window, window_ms = charge.cost * copies, charge.window, charge.window_ms
  if counted > charge.units then return end
  -- The entries that have left, and the total.
  local beyond, total, gone = try('ZCOUNT', key, charge.cutoff, '+inf'), nil, 0
  local used
  if beyond == 0 then
    expires = expires or call('PEXPIRETIME', key)
    if expires == -2 then return 0, window, present + (counted > 1 and 2 or 1) * window_ms + SLACK, nil, 0 end
    used = size or call('ZCARD', key)
  else
    if type(beyond) == 'table' or beyond > MANY then return end
    total = call('ZSCORE', key, 'used')
    gone = total and beyond - 1 or beyond
    used = total and tonumber(total) or (size or call('ZCARD', key)) - gone
    if total and gone > 0 then
      for _, member in ipairs(call('ZREVRANGE', key, 1, gone)) do
        -- Not a number if this is the total of reserved units. Behind the point of a settlement
        -- there may be its time.
        local copies_of_it, cost_of_it = string.match(member, SHARED, 9)
        local units = copies_of_it and copies_of_it * cost_of_it or #member == 8 and 1 or tonumber(string.sub(member, 9))
        if not (units and units >= 0) then return end
        used = used - (units - units % 1)
      end
    end
  end
  -- Also where it is no number that a total can be.
  if not (used >= 0 and used + counted <= charge.units) then return end

  if gone == 0 then
    expires = expires or call('PEXPIRETIME', key)
    local reset, expiry = (expires - 2 * window_ms - SLACK) * 1000 + window - now, nil
    -- One entry of one unit expires a window earlier, and the second moves the expiry.
    if used == 1 and not total then reset, expiry = reset + window_ms * 1000, expires + window_ms end
    -- Less than a millisecond may come from rounding.
    if reset >= 1000 and not (expiry and reset > window + 1000) then
      return used, reset < window and reset or window, expiry, total, 0
    end
  end
  local oldest = call('ZREVRANGE', key, beyond, beyond, 'WITHSCORES')[2]
  oldest = oldest and -tonumber(oldest)
  if oldest and oldest <= now then
    return used, oldest + window - now, ceil(oldest / 1000) + 2 * window_ms + SLACK, total, gone
  elseif not oldest and not total then
    return used, window, present + (counted > 1 and 2 or 1) * window_ms + SLACK, nil, gone
  end
end

-- Counts a charge that was looked at. Returns false if it has done nothing.
local function add(charge, key, id, copies)
  local cost, gone = charge.cost, charge.gone
  local has_total = charge.total or cost > 1 or copies > FEW
  local written
  -- The first write of a check is the only one that a server without memory refuses.
  if has_total then
    local member = copies > 1 and shared(id, copies, cost) or cost > 1 and id .. string.format('%.0f', cost) or id
    written = try('ZADD', key, charge.used + cost * copies, 'used', score, member)
    -- A first try that the server reads after the second finds the entry of that.
    if charge.total and written == 0 then call('ZADD', key, charge.used, 'used') end
  else
    written = try('ZADD', key, entries_of(id, copies))
  end
  if type(written) == 'table' then return false end
  if gone > 0 then
    local last = has_total and '-2' or '-1'
    call('ZREMRANGEBYRANK', key, gone == 1 and last or last + 1 - gone, last)
  end
  if charge.expiry then call('PEXPIREAT', key, charge.expiry) end
  return true
end

-- Decides copies of a check, and appends its status to the reply of this length. Returns false if
-- it has done nothing. The expiry of the first key and the number of its entries may be known.
local function decide_fast(charges, k, id, copies, reply, r, expires, size)
  -- All are looked at before one is counted.
  for i = 1, #charges do
    local charge = charges[i]
    charge.used, charge.reset, charge.expiry, charge.total, charge.gone =
      look(charge, KEYS[k + i], copies, i == 1 and expires, i == 1 and size)
    if not charge.used then return false end
  end
  for i = 1, #charges do
    local charge = charges[i]
    if not add(charge, KEYS[k + i], id, copies) then return false end
    reply[r + 2 * i - 1], reply[r + 2 * i] = charge.used + charge.cost * copies, charge.reset
  end
  return true
end
