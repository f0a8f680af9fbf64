-- The short way for exact logs: checks with new ids that count or refuse, for units and for places.
-- A check is counted if every log has capacity for all copies, and refused if its only log is full
-- of single units. The general way decides all else.
--
-- Takes  call, ceil, now, score, SLACK, try
-- Gives  entries_of, FEW, LOOKED_AT, score_of, take
--
-- Copies that are admitted together share an entry under the first id. The entry has their number
-- and each copy's cost. A few copies at cost 1 get separate entries instead. The first id's last
-- byte is 0, and the last bytes of the other copies' ids count up from there. So any copy's id
-- leads to the entry.
--
-- A concurrent limit is a distributed semaphore, and a place is one permit: a one-unit entry in an
-- exact log. The process that took the place renews its entry as long as the request runs. A
-- place's life is the log's window: a place that is not renewed in time, such as a dead process's,
-- becomes free. To free a place, the process removes the entry, without this script. An expired
-- entry may be renewed as long as it is still in the key. Even so, a key never has more entries
-- than the limit has places, since an admission drops expired entries. The exception is a process
-- that takes its lost places again, even beyond the limit. Each place sets the key's expiry to two
-- lives + SLACK from now.

local FEW = 4  -- up to 4 copies at cost 1 get an entry each, so that the key needs no total
local LOOKED_AT = 100  -- the most entries that a check looks at, or moves after a step back of the clock

-- Returns the score of an entry at this time. For a time before 1970, returns a bound beyond which
-- there is no entry. %.0f would take twice as many instructions.
local function score_of(time)
  if time < 0 then return '(0' end
  local micros = time % 1000000
  return string.format('-%d%06d', (time - micros) / 1000000, micros)
end

-- Returns the scores and members for a few copies at cost 1.
local function entries_of(id, copies)
  if copies == 1 then return score, id end
  return score, id, entries_of(string.sub(id, 1, 7) .. string.char(string.byte(id, 8) + 1), copies - 1)
end

-- Reads the last entries in a log with `size` members. This is needed if the log's expiry does not
-- tell enough to count more units. Returns the used units, the microseconds until fewer are used,
-- how many entries have left, and the total, if there is one. If one more unit does not fit,
-- returns the first two figures, nil, and the retry time. Returns nothing if the general way has to
-- decide.
local function examine(key, units, window, size, counted)
  local first, last = now - window, try('ZREVRANGE', key, '0', '1', 'WITHSCORES')
  -- The key has another type, or has reserved units, which the general way reads.
  if not last[1] or last[1] ~= 'used' and last[2] + 0 > 0 then return end
  local total = last[1] == 'used' and last[2]
  local heads, gone, used = total and 2 or 0, 0, tonumber(total)
  if used and used % 1 ~= 0 then return end  -- written by another program
  -- Usually, at most one entry has left.
  if last[heads + 2] and -last[heads + 2] <= first then gone = 1 end
  if gone == 1 and (total or not last[4] or -last[4] <= first) then
    gone = call('ZCOUNT', key, score_of(first), '+inf') - heads / 2
    if gone > LOOKED_AT then return end
    last = call('ZREVRANGE', key, total and 0 or gone - 1, heads / 2 + gone, 'WITHSCORES')
  end
  if not total then used = size - gone end
  for i = heads + 1, total and heads + 2 * gone or 0, 2 do
    -- A member's id is followed by its units, or by the number of copies and their cost. After a
    -- settlement, a point follows, and possibly a time.
    local number, times = string.match(last[i], '^(%d*)%*?(%d*)%.?%d*$', 9)
    -- A member shorter than an id is the head for reserved units, which the general way reads.
    if not number or #last[i] < 8 then return end
    used = used - (tonumber(number) or 1) * (tonumber(times) or 1)
  end
  local at = last[heads + 2 * (total and gone or math.min(gone, 1)) + 2]
  if not at and (total or used ~= 0) then return end
  local left = at and -at - first or window
  if left > window then return end
  if used >= 0 and used + counted <= units then return used, left, gone, total end  -- not if the total is no number
  -- One more unit fits when the oldest entry leaves. If entries are ahead of the clock, they have
  -- to be moved first.
  local is_full = gone == 0 and at and not total and counted == 1 and used == units
  if is_full and call('ZCOUNT', key, '-inf', '(' .. score) == 0 then return used, left, nil, left end
end

-- Counts copies of a check under charge `i` in `figures` and all later charges, or refuses the
-- check. Returns this charge's used units, the microseconds until fewer are used, and the retry
-- time after a refusal. Returns nothing if the general way has to decide. Appends the two figures
-- of each later charge to `reply`, which has length `r`.
local function take(figures, i, k, id, copies, reply, r, expires, size)
  local key, units, cost, window = KEYS[k + i], struct.unpack('<ddd', figures, 40 * i - 31)
  local lasts = window < 0
  if lasts then window = -window end
  local millis = ceil(window / 1000)
  local counted, used, left, gone, total, expiry = cost * copies, 0, window, 0
  expires = expires or not lasts and call('PEXPIRETIME', key)
  if expires == -2 then
    expiry = ceil(now / 1000) + (counted > 1 and 2 or 1) * millis + SLACK
    if counted > units then return end
  else
    used = size or try('ZCARD', key)
    -- The expiry is two windows + SLACK after the oldest entry, so it tells when that entry leaves.
    left = lasts and window or (expires - 2 * millis - SLACK) * 1000 + window - now
    -- A log with a single unit expires a window earlier than other logs, so the next unit moves the
    -- expiry.
    if used == 1 and not lasts then left, expiry = left + millis * 1000, expires + millis end
    -- A difference of less than a millisecond may come from rounding.
    local is_told = left >= 1000 and not (expiry and left > window + 1000)
    if lasts then
      is_told = used == 0 or try('ZCOUNT', key, score_of(now - window), '+inf') == 0
    elseif is_told and used ~= units then
      is_told = not try('ZSCORE', key, 'used')
    end
    if not is_told or used + counted > units then
      local total_or_retry
      used, left, gone, total_or_retry = examine(key, units, window, used, counted)
      if not gone then return used, left, total_or_retry end
      total = total_or_retry
      expiry = ceil((now + left - window) / 1000) + ((total or used + counted > 1) and 2 or 1) * millis + SLACK
      -- A later expiry may have been set before the clock stepped back.
      if expiry == expires or expires and total and gone == 0 and expiry < expires then expiry = nil end
    end
  end
  -- All charges are looked at before any is counted.
  if #figures > 40 * i + 8 then
    local next_used, next_left, is_refused = take(figures, i + 1, k, id, copies, reply, r)
    if not next_used or is_refused then return end
    reply[r + 2 * i + 1], reply[r + 2 * i + 2] = next_used, next_left
  end
  local written
  local added, has_total = copies, total
  -- A server without memory refuses only a check's first write.
  if not total and cost == 1 and copies == 1 then
    written = try('ZADD', key, score, id)
  elseif not total and cost == 1 and copies <= FEW then
    written = try('ZADD', key, entries_of(id, copies))
  else
    -- The member has the units, or the number of copies and their cost.
    local member = copies > 1 and id .. string.format('%.0f*%.0f', copies, cost) or cost > 1 and id .. string.format('%.0f', cost) or id
    written = try('ZADD', key, used + counted, 'used', score, member)
    added, has_total = total and 1 or 2, true
  end
  if written ~= added then
    if type(written) == 'table' then return end
    -- The entry already exists if the server reads the first try after the second. If the entry
    -- still counted, the total is restored. If it had left, it is not dropped.
    if total or gone > 0 then
      local left_now = call('ZCOUNT', key, score_of(now - window), '+inf') - (has_total and 1 or 0)
      if total and left_now == gone then
        call('ZADD', key, used, 'used')
        counted = 0
      end
      gone = left_now
    end
  end
  if gone > 0 then
    local newest = has_total and -2 or -1  -- the rank of the last entry, in front of the total
    call('ZREMRANGEBYRANK', key, newest + 1 - gone, newest)
  end
  if lasts then
    call('PEXPIRE', key, 2 * millis + SLACK)
  elseif expiry then
    call('PEXPIREAT', key, expiry)
  end
  return used + counted, lasts and 0 or left < window and left or window
end
