-- Places of concurrent limits. A place is an entry of one unit in an exact log, which its process renews as long as it is held: so the
-- window of the log, the life of a place, is the time after which the places of a dead process are free. run.lua renews them. To free
-- one, its process removes the entry, without this script.
--
-- An entry whose time is over may be renewed as long as it is still there: an admission that does not count it drops it, or at least
-- one other. So there never are more than the limit, but for places that were lost and are taken again. Each write lets the key live
-- for two lives.

-- Takes a place under an id that is new, and counts a unit beside it if a key is given. Returns what count_one does, and the places
-- held. `expiry` is that of the key of the places, in milliseconds. A batch of one key has copies of a check, which are of no places.
local take_place
if is_lone_place or #KEYS > 1 then
  function take_place(key, id, units, window, due, cutoff, place, places, life, expiry, since)
    local held, used, reset = pcall('ZCARD', place), 0, nil
    if held ~= 0 and (type(held) == 'table' or held >= places
      or pcall('ZCOUNT', place, since or score_of(now - life), '+inf') ~= 0) then return end
    if key then
      local size
      used, reset, size = count_one(key, id, units, window, due, cutoff)
      if not used then return nil, reset, nil, size end
    end
    if pcall('ZADD', place, score, id) ~= 1 then return end
    call('PEXPIRE', place, expiry)
    return used, reset, held + 1
  end
end
