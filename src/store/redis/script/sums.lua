-- The short way for a check whose units have no ids, under a fixed window, counter or compact log.
-- It decides if the key has only sums, as described in entries.lua. It reads a sum's time from its
-- two bytes, since Redis 7.0 is slow to print a score. The bytes repeat after 65,280 sub-windows,
-- and a compact log has at most 1,022. If a past sum is mistaken for a later one, it counts for too
-- long, and never for too short a time. A sum ahead of the clock may be mistaken for a past one, so
-- the score decides in cases in which the sum might not count long enough.
--
-- Takes  falls_to, now, SLACK
-- Gives  decide_sum

-- Decides a check that takes units under one limit. Returns the used units, the microseconds until
-- fewer are used, and the retry time after a refusal. Returns nothing if the general way has to
-- decide.
local function decide_sum(key, units, takes, window, sub_window, later)
  local call, try, byte, text_from = redis.call, redis.pcall, string.byte, string.sub
  local is_counter, at = later == window, now - now % sub_window + later
  local number = (at - at % sub_window) / sub_window % 65280  -- of the sub-window, as a sum has it
  -- If there are at most three members, these are all: the total, and one or two sums.
  local members = try('ZREVRANGE', key, '0', '3')
  local count, oldest, newest = #members, members[2], nil
  if members.err or count > 0 and (members[1] ~= 'used' or not oldest) then return end
  local total, current, previous, leaves, first = 0, 0, 0, at + window, 0
  if oldest then
    local low, high = byte(oldest, 1, 2)
    local low_of_newest, high_of_newest = low, high
    first, newest = tonumber(text_from(oldest, 3)), oldest
    current = first
    if count > 2 then
      newest = count == 3 and members[3] or not is_counter and call('ZRANGE', key, '0', '0')[1] or ''
      low_of_newest, high_of_newest = byte(newest, 1, 2)
      current = tonumber(text_from(newest, 3))
    end
    -- Another program may have written the key.
    if not (high and high_of_newest and low < 255 and low_of_newest < 255 and first and current) then return end
    if first <= 0 or current <= 0 or (first + current) % 1 ~= 0 then return end
    -- `age` and `age_of_newest` are how many sub-windows the oldest and the newest sum are older
    -- than the present one. A sum ahead of the clock seems to be very old.
    local age = (number - low - 255 * high) % 65280
    local age_of_newest = (number - low_of_newest - 255 * high_of_newest) % 65280
    if count > 2 and age_of_newest >= age then return end
    leaves = leaves - age * sub_window
    if leaves <= now then
      -- If the newest sum has left, no sum is left. Only that sum's score tells its time for
      -- certain.
      if call('ZRANGE', key, '0', '0', 'WITHSCORES')[2] + now < window then return end
      call('UNLINK', key)
      count, current, leaves, first = 0, 0, at + window, 0
    else
      total = count == 2 and first or count == 3 and first + current or tonumber(call('ZSCORE', key, 'used'))
      if total < first or total % 1 ~= 0 then return end  -- written by another program
      if is_counter and age == 1 then
        if total + takes > units and call('ZRANGE', key, '0', '0', 'WITHSCORES')[2] + at < 0 then return end
        previous = first
      end
      if age_of_newest > 0 then current = 0 end
    end
  end
  local used = previous > 0 and current + math.ceil(previous * (at - now) / window) or total
  local fits = used + takes <= units and total + takes < 2 ^ 53
  if fits then
    -- %d is much faster than %.0f, but has only 32 bits on some machines.
    local format, micros = total + takes < 2 ^ 31 and '%d' or '%.0f', at % 1000000
    local score, sum = string.format('-%d%06d', (at - micros) / 1000000, micros), string.format(format, current + takes)
    local text = total == current and sum or string.format(format, total + takes)
    local bytes = string.char(number % 255, (number - number % 255) / 255)
    sum = bytes .. sum
    -- Redis changes a set's encoding for good if it has more than 128 members, even for a moment.
    -- So a compact log gets its new sum after the old one is removed.
    local is_apart = current > 0 and count > 3
    local written = is_apart and try('ZADD', key, text, 'used') or try('ZADD', key, text, 'used', score, sum)
    if type(written) == 'table' then return end
    if current > 0 then call('ZREM', key, newest) end
    if is_apart then written = call('ZADD', key, score, sum) end
    -- If a sum ahead of the clock had the same member, ZADD has moved it to this time.
    if written < (count == 0 and 2 or 1) then call('ZADD', key, score, bytes .. '0' .. text_from(sum, 3)) end
    if current == 0 then
      local expiry = math.ceil(at / 1000) + math.ceil(window / 1000) + SLACK
      if call('PEXPIRETIME', key) < expiry then call('PEXPIREAT', key, expiry) end
    end
    used, current = used + takes, current + takes
  end
  local retry = leaves
  if is_counter then
    if not fits then retry = falls_to(units - takes, now, window, at, current, previous) end
    if used > 0 then leaves = math.min(leaves, falls_to(used - 1, now, window, at, current, previous)) end
  end
  if fits then return used, leaves - now end
  if takes <= units and (is_counter or total - first <= units - takes) then return used, leaves - now, math.max(1, retry - now) end
end
