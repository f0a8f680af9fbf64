-- Goes through a batch's runs in order, and passes each check to the code that decides it.
--
-- Takes  call, ceil, general_way, is_expiry_telling, is_server_time, known_expires, known_size,
--        now, other_ways, score, short, SLACK, sums, try
-- Gives  nothing

-- `reply` is preallocated for two charges' figures, since a table that grows is slow.
local reply, r, a, k = { now, nil, nil, nil, nil }, 1, #ARGV > 2 and 2 or 0, 0
local take, charge_of, score_of, entries_of, FEW, LOOKED_AT, decide, make_settle, settle, decide_sum
while k < #KEYS do
  local kind, figures, ids = ARGV[a], ARGV[a + 1], ARGV[a + 2]
  local copies, cost, sub_window, later, units, window = 1, 1, 0, 0
  local keys, width, step, texts, charges, renewed = 1, 40, 8, a + 4, nil, nil  -- bytes per charge and per id
  if short then
    ids, figures = short, nil  -- a lone sum has no id, and needs none
    if #short == 40 then
      units, cost, window, sub_window, later = struct.unpack('<ddddd', short)
    else
      units, window = struct.unpack('<dd', short, 9)
    end
  else
    copies, units, cost, window, sub_window, later = struct.unpack('<dddddd', figures)
    if kind == 'any' or kind == 'settle' then width, a = 48, a + 1 end
    if kind == 'settle' then step = 16 end
    keys = (#figures - 8) / width
    a = a + 3 + (width - 40) / 4 * keys
  end
  local is_short_way = is_expiry_telling and (kind == 'plain' or #ARGV < 3)
  local is_unit = is_short_way and keys == 1 and cost * copies == 1 and sub_window == 0 and window > 0
  local millis = ceil(window / 1000)
  local due = (2 * millis + SLACK) * 1000 - window + now
  for i = 1, short and 8 or #ids, step do
    local id, key = string.sub(ids, i, i + 7), KEYS[k + 1]
    local used, reset, retry, expires, size = nil, nil, nil, known_expires, known_size
    if is_unit and not expires then
      --> unit.lua
    elseif is_short_way and sub_window > 0 and not short then
      decide_sum = decide_sum or sums(now, SLACK)
      used, reset, retry = decide_sum(key, units, cost * copies, window, sub_window, later)
      if retry and copies > 1 then used, retry = nil, nil end  -- some of the copies may fit
    end
    if not used and kind ~= 'renew' and not take then
      take, score_of, entries_of, FEW, LOOKED_AT = other_ways(now, score, SLACK)
    end
    if not used and is_short_way and sub_window == 0 then
      figures = figures or struct.pack('<dddd', 1, units, cost, window)
      used, reset, retry = take(figures, 1, k, id, copies, reply, r, expires, size)
    end
    if used and not retry then
      reply[r + 1], reply[r + 2], r = used, reset, r + 2 * keys
    elseif retry and keys == 1 then
      reply[r + 1], r = { 0, -1, used, reset, 0, retry, retry }, r + 1
    elseif kind == 'renew' then
      local is_held = try('ZADD', key, 'XX', 'CH', score, id) == 1
      local removed = not is_held and try('ZREM', key, id)
      if is_held and key ~= renewed or removed == 1 then
        -- A server without memory accepts the ZADD after a ZREM.
        if not is_held then call('ZADD', key, score, id) end
        call('PEXPIRE', key, 2 * ceil(-window / 1000) + SLACK)
        is_held, renewed = true, key
      elseif removed and removed ~= 0 and not string.find(removed.err, 'WRONGTYPE', 1, true) then
        call('ZREM', key, id)  -- fails, since this is a server's error
      end
      reply[r + 1], r = is_held and 1 or 0, r + 1
    else
      if not decide then decide, make_settle, charge_of = general_way(now, SLACK, is_server_time, is_expiry_telling, score_of, entries_of, FEW, LOOKED_AT) end
      if not charges then
        charges = { charge_of(units, cost, window, sub_window, later) }
        for j = 1, keys do
          local from = 9 + width * (j - 1)
          local charge = charges[j] or charge_of(struct.unpack('<ddddd', figures, from))
          charges[j] = charge
          if width > 40 then
            local ends, mode, lease = ARGV[texts + 2 * j - 2], ARGV[texts + 2 * j - 1], struct.unpack('<d', figures, from + 40)
            if ends ~= '' then charge.ends = ends end  -- when the calendar's periods end
            if lease > 0 then charge.lease, charge.is_prefetch = lease, lease > charge.window end
            if mode ~= '' then
              charge.is_refund, charge.is_shadow = string.find(mode, 'refund'), string.find(mode, 'shadow$')
              charge.is_spent, charge.is_left = string.find(mode, '^spent'), string.find(mode, '^left')
              charge.settled = tonumber(string.match(mode, '%d+$'))
            end
          end
        end
      end
      local is_again = width > 40 and ARGV[texts - 1] == 'again'
      if kind == 'settle' then
        settle = settle or make_settle()
        reply[r + 1] = settle(charges, k, id, struct.unpack('<d', ids, i + 8), is_again)
      else
        reply[r + 1] = decide(charges, k, id, copies, is_again)
      end
      r = r + 1
    end
    k = k + keys
  end
end
-- If each check has only figures, the short form's reply is a string of doubles.
if #ARGV < 3 and r == 1 + 2 * #KEYS then return struct.pack('<' .. string.rep('d', r), unpack(reply)) end
return reply
