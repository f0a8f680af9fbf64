-- Places of concurrent limits. A place is an entry of one unit in an exact log, which its process renews as long as it is held: so the
-- window of the log, the life of a place, is the time after which the places of a dead process are free.
--
-- An entry whose time is over may be renewed as long as it is still there: an admission that does not count it drops it, or at least
-- one other. So there never are more than the limit, but for places that were lost and are taken again. Each write lets the key live
-- for two lives.

local function ways_of_places()
  -- Takes a place under an id that is new, of the key at `p`, and counts a unit of the other key, if there are two. Appends their
  -- figures to the reply of length `r`, and returns its new length. If there is more to do it does nothing, and returns nil and the
  -- expiry of the first key, if it knows that. `expiry` is that of the places, in milliseconds.
  local function take_place(k, keys, p, id, units, window, due, cutoff, places, life, since, expiry, reply, r)
    local place = KEYS[k + p]
    local held, used, reset = pcall('ZCARD', place), nil, nil
    if held ~= 0 and (type(held) == 'table' or held >= places
      or pcall('ZCOUNT', place, since or score_of(now - life), '+inf') ~= 0) then return end
    if keys == 2 then
      used, reset = count_one(KEYS[k + 3 - p], id, units, window, due, cutoff)
      if not used then return nil, p == 2 and reset end
    end
    if pcall('ZADD', place, score, id) ~= 1 then return end
    call('PEXPIRE', place, expiry)
    if p == 2 then reply[r + 1], reply[r + 2], r = used, reset, r + 2 end
    reply[r + 1], reply[r + 2], r = held + 1, 0, r + 2
    if keys > p then reply[r + 1], reply[r + 2], r = used, reset, r + 2 end
    return r
  end

  local renewed  -- the key of the place that was renewed last: an expiry is enough for all of a key in a row

  -- Frees the places of these keys, or renews them until an expiry. Appends whether each was held to the reply of length `r`, and
  -- returns its new length.
  local function keep_places(k, keys, id, expiry, reply, r)
    for i = k + 1, k + keys do
      local key, held = KEYS[i], false
      if expiry and pcall('ZADD', key, 'XX', 'CH', score, id) == 1 then
        held = true
      elseif pcall('ZREM', key, id) == 1 then
        -- A server without memory accepts the ZADD after a ZREM.
        if expiry then call('ZADD', key, score, id) end
        held, renewed = true, nil
      end
      if held and expiry and key ~= renewed then
        call('PEXPIRE', key, expiry)
        renewed = key
      end
      reply[r + i - k] = held and 1 or 0
    end
    return r + keys
  end

  return take_place, keep_places
end
