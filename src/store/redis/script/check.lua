-- Decides a check: counts all its charges or none.
--
-- Takes  add_to_sum, call, clamped, count, counts_of, find, finish_of, following, heads_of,
--        is_full, LARGEST, log_falls_to, LONGEST_LIFE, LOOKED_AT, NAMED, named, now, outlive,
--        overlapping, read, score_of, shared, text, time_in, time_of, try, weigh
-- Gives  write_status, failure_of, decide

-- Returns the time from which an entry counts, by the present clock. This is the entry's time, but
-- no later than the time under which a new admission is recorded. For a prefetch, the latest time
-- is a life ahead of the clock.
local function counted_from(log, time, is_prefetch)
  return math.min(time, is_prefetch and now + LONGEST_LIFE or log.is_counter and now or log.at)
end

-- Moves entries from the future to the present. They are in the future if the clock has stepped
-- back. Once they are moved, the key's counts are correct again within one window. Each refusal
-- moves the newest of these entries, at most 100. A server without memory does not move any.
local function pull_back(log)
  local latest = counted_from(log, LARGEST)
  local is_any = false
  local newest = call('ZRANGEBYSCORE', log.key, '-inf', '(' .. score_of(latest), 'WITHSCORES', 'LIMIT', 0, LOOKED_AT)
  for i = 1, #newest, 2 do
    local member, time = newest[i], time_in(newest[i + 1])
    local units, _, is_prefetch = weigh(log, member)
    local from = counted_from(log, time, is_prefetch)
    local is_sum = log.sub_window and string.byte(member) ~= NAMED
    local is_ahead = time > (is_sum and log.at or from)
    if is_ahead and is_sum then
      -- ZREM comes first, so that a server without memory accepts the ZADD.
      call('ZREM', log.key, member)
      add_to_sum(log, log.at, units)
    elseif is_ahead and try('ZADD', log.key, score_of(from), member) ~= 0 then
      return
    end
    is_any = is_any or is_ahead
  end
  if not is_any then return end
  log.oldest = time_of(log, 0)
  outlive(log, log.at, log.sub_window)
end

-- Returns the first moment at which at most `most` units are used. `entries` has the entries that
-- leave next, each followed by its score. `total` counts the units in all entries, without a
-- counter's sums. Unless `with_reserved`, reserved units do not count, and `total` does not include
-- them. The result is a lower bound if more entries have to leave than were read.
local function first_fit(log, most, total, entries, with_reserved)
  local from, leaves = now, counted_from(log, now) + log.window
  for i = 1, #entries, 2 do
    local units, is_reserved, is_prefetch = weigh(log, entries[i])
    leaves = counted_from(log, time_in(entries[i + 1]), is_prefetch) + log.window
    if with_reserved or not is_reserved then
      if total <= most then
        -- Until the entry leaves, only a counter's estimate falls.
        local fits = log_falls_to(log, most - total, from)
        if fits < leaves or fits == from then return fits end
      end
      local is_estimated = log.is_counter and string.byte(entries[i]) ~= NAMED
      total, from = is_estimated and total or total - units, math.max(leaves, from)
    end
  end
  local fits = total > most and leaves or log_falls_to(log, most - total, from)
  -- Entries that were not read leave later, so this is a lower bound.
  return total > 0 and #entries == 2 * LOOKED_AT and math.min(fits, leaves) or fits
end

-- Returns the microseconds until at most `most` units are used, and the microseconds until then if
-- all reserved units were given back now. Both are lower bounds if more entries have to leave than
-- a check may read.
local function wait(log, most)
  pull_back(log)
  if log.is_behind then return 1, 0 end
  if not log.has_total then
    local leaves = counted_from(log, time_of(log, log.total - most - 1)) + log.window - now
    return leaves, leaves
  end
  local first, current, previous = heads_of(log) + log.gone, counts_of(log)
  local total = log.total - current - previous
  -- Each entry in an exact log has at least one unit, so at most `log.total - most` entries have to
  -- leave.
  local enough = not log.sub_window and log.reserved == 0 and math.min(LOOKED_AT, log.total - most) or LOOKED_AT
  local entries = call('ZREVRANGE', log.key, first, first + enough - 1, 'WITHSCORES')
  local retry = first_fit(log, most, total, entries, true) - now
  return retry, log.reserved > 0 and first_fit(log, most, total - log.reserved, entries, false) - now or retry
end

-- Appends a log's status to a record, whose length is `r`, and returns the new length.
local function write_status(record, r, log, retry, least)
  -- The moment at which fewer units are used.
  local fewer = log.oldest and log.oldest + log.window
  if log.is_counter and fewer then
    local current, previous = counts_of(log)
    local estimated = current + overlapping(log, previous, finish_of(log), now)
    if estimated > 0 then fewer = math.min(fewer, log_falls_to(log, estimated - 1, now)) end
  end
  record[r + 1], record[r + 2] = clamped(log.used), log.is_behind and 1 or clamped(fewer and fewer - now)
  record[r + 3], record[r + 4], record[r + 5] = log.reserved, clamped(retry), clamped(log.reserved > 0 and least or retry)
  return r + 5
end

-- Returns how many copies of the check an earlier try has counted in this log, and when. Returns
-- nothing if it has counted none. A charge that takes nothing has no entry, so an entry under this
-- id belongs to another admission.
local function copies_counted(log, id, copies)
  if log.takes == 0 then return end
  for counted = copies, 1, -1 do
    local at = find(log, counted == 1 and named(log, id, log.cost) or shared(id, counted, log.cost))
    if counted == 1 then at = at or find(log, named(log, id, log.cost, true)) end
    if at then
      while not log.sub_window and log.cost == 1 and counted < copies and call('ZSCORE', log.key, following(id, counted)) do
        counted = counted + 1
      end
      return counted, at
    end
  end
end

-- Returns how many copies an earlier try has counted, and when. Returns 0 and -1 if it has counted
-- none. All charges of a check are counted together, so an entry under any of them shows that the
-- check was counted.
local function counted_before(logs, id, copies)
  local counted, at, is_exact = 0, -1, false
  for _, log in ipairs(logs) do
    local before, time = copies_counted(log, id, copies)
    if before then
      counted = math.max(counted, before)
      if log.lease then time = time + log.window - log.lease end
      -- An exact log has the most precise time. A place's time is only that of its last renewal.
      local tells = not log.sub_window and not log.lasts
      if tells and not is_exact or tells == is_exact and time > at then at, is_exact = time, tells end
    end
  end
  return counted, at
end

-- Returns how many more units may be admitted under a log's limit. The total stays in the range in
-- which doubles are exact.
local function room_of(log)
  return math.min(log.units - log.used, LARGEST - 1 - log.total)
end

-- Returns how many copies are admitted. Marks the logs in the shadow that do not have capacity for
-- all copies.
local function admissible(logs, copies)
  local admitted = copies
  for _, log in ipairs(logs) do
    local is_over = log.needs > 0 and log.needs * copies > room_of(log)
    log.is_left_out = log.is_shadow and is_over
    -- A full key cannot take more entries with ids, and a prefetch without its own entry would
    -- leave too early. So a full key does not admit prefetches.
    if log.is_prefetch and is_full(log) then admitted = 0 end
    if is_over and not log.is_shadow then
      admitted = math.min(admitted, math.max(0, math.floor(room_of(log) / log.needs)))
    end
  end
  return admitted
end

-- These words are in the texts of errors that fail a whole batch. Such errors come from the
-- server's state, or from missing permissions. The batch may be sent again.
local OF_THE_SERVER = {
  'READONLY', 'NOREPLICAS', 'MISCONF', 'LOADING', 'MASTERDOWN', 'CLUSTERDOWN', 'BUSY', 'NOPERM', 'NOAUTH', 'TRYAGAIN',
  'MOVED', 'ASK ', 'script killed', 'run this command', 'not allowed from script', 'nknown Redis command', 'non local key',
}

-- Returns the reply for a failed charge: its number, and the error.
local function failure_of(place, problem)
  local message = type(problem) == 'table' and problem.err or problem
  for _, state in ipairs(OF_THE_SERVER) do
    if string.find(message, state, 1, true) then
      -- A table keeps the error's code. Before Redis 7.0, a script cannot fail with a table.
      error(redis.REDIS_VERSION_NUM and { err = message } or message, 0)
    end
  end
  return text(place) .. ' ' .. message
end

-- Decides a check, and returns its record. Every charge is read before any is counted, so a refused
-- check does not add entries under any key. `logs.place` is the number of the charge that was last
-- worked on.
local function decide_all(logs, charges, k, id, copies, is_again)
  for i, charge in ipairs(charges) do
    logs.place = i
    logs[i] = read(charge, KEYS[k + i])
  end
  local before, at, has_retry = 0, -1, false
  if is_again then before, at = counted_before(logs, id, copies) end
  -- Copies that the earlier try has refused stay refused.
  local admitted = before > 0 and math.min(copies, before) or admissible(logs, copies)
  local is_whole = admitted == copies
  local record, r = { admitted, at, 0, 0, 0, 0, 0 }, 2  -- as long as most records are: a table that grows is slow
  for i, log in ipairs(logs) do
    logs.place = i
    if admitted > 0 and before == 0 and log.takes > 0 and not log.is_left_out then count(log, id, admitted, is_again) end
    local refuses, retry, least = log.is_left_out, 0, 0
    if not is_whole then refuses = log.needs > 0 and log.needs > room_of(log) end
    if refuses then
      retry, least = wait(log, log.units - log.needs)
      retry = math.max(1, retry)
      has_retry = has_retry or not log.is_shadow
    end
    -- If a check is refused only because an earlier try was refused, it may be tried again at once.
    if not is_whole and not has_retry and i == #logs then retry = 1 end
    r = write_status(record, r, log, retry, least)
  end
  return record
end

-- Decides a check. Returns its record, or an error text.
local function decide(charges, k, id, copies, is_again)
  local logs = {}
  local is_done, record = pcall(decide_all, logs, charges, k, id, copies, is_again)
  return is_done and record or failure_of(logs.place, record)
end
