-- The short form of a check that is alone, by the server's clock. No other file knows it. It saves Redis 23 % of its
-- instructions for such a check.
--
-- ARGV   the id, of eight bytes; the limit and its window, as two doubles, little-endian; or the five figures of 'place'
-- reply  a string of doubles: now, then used and reset of each charge. Where single.lua cannot decide, the reply is the usual one

local run, expires, entries
if is_lone_single then
  local id, units, window = struct.unpack('<c8dd', ARGV[1])
  if is_expiry_telling and now >= window then
    local due = (2 * ceil(window / 1000) + SLACK) * 1000 - window + now
    local used, reset, size = count_one(KEYS[1], id, units, window, due)
    if used then return struct.pack('<ddd', now, used, reset) end
    expires, entries = reset, size
  end
  run = { '', 'single', units, window, 1, id }
elseif is_lone_place then
  local id, units, window, places, life, place = struct.unpack('<c8ddddd', ARGV[1])
  if is_expiry_telling and now >= window and now >= life then
    local key, due = units > 0 and KEYS[3 - place], (2 * ceil(window / 1000) + SLACK) * 1000 - window + now
    local used, reset, held, size = take_place(key, id, units, window, due, nil, KEYS[place], places, life,
      2 * ceil(life / 1000) + SLACK)
    if held and not key then return struct.pack('<ddd', now, held, 0) end
    if held and place == 1 then return struct.pack('<ddddd', now, held, 0, used, reset) end
    if held then return struct.pack('<ddddd', now, used, reset, held, 0) end
    expires, entries = reset, size
  end
  run = { '', 'place', units, window, places, life, place, 1, id }
end
-- The other files read it as a run of one, and do not try the shortest way again.
if run then
  for i, argument in ipairs(run) do
    ARGV[i] = argument
  end
end
