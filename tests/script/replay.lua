-- Replays the cases of cases.lua, in a redis-server, as the script runs. Returns a text: the
-- replies, the commands of each call, and what the keys have after it.
--
-- ARGV   the script, and the cases
--
-- The keys are those of the server. Its clock, its version, its memory and the expiries are those
-- of a case. So any redis-server has the same replies at any time.

local real, floor = redis, math.floor
local S, START = 1000000, 1000000000 * 1000000  -- a second, and the time at which a case begins

local script = assert(loadstring('local redis, KEYS, ARGV = ...\n' .. ARGV[1], '@script'))
local lines = {}
local server  -- of the case: its time `now`, `expiries`, `is_full`, `is_before_7`, the `error` of writes, and the `commands` of a call

local function print(format, ...)
  lines[#lines + 1] = string.format(format, ...)
end

-- A text with its other bytes as numbers.
local function visible(text)
  return (string.gsub(text, '[%c\128-\255]', function(char) return '\\' .. string.byte(char) end))
end

-- A time as the seconds since the start.
local function since_start(time)
  return string.format('%+.6f s', (time - START) / S)
end

-- The server of a case.

local WRITES = { ZADD = true, ZREM = true, ZREMRANGEBYRANK = true, UNLINK = true }

local function exists(key)
  return real.call('EXISTS', key) == 1
end

-- Forgets the expiry of a key that is no longer there.
local function forget_expiry(key)
  if not exists(key) then server.expiries[key] = nil end
end

local function pass(time)
  server.now = time
  for key, expiry in pairs(server.expiries) do
    if expiry <= time / 1000 then real.call('DEL', key) end
    forget_expiry(key)
  end
end

local function pcall_server(name, key, ...)
  server.commands[#server.commands + 1] = name
  if name == 'TIME' then
    return { string.format('%d', floor(server.now / S)), string.format('%d', server.now % S) }
  elseif name == 'PEXPIRETIME' then
    if server.is_before_7 then return { err = 'ERR unknown command' } end
    return exists(key) and (server.expiries[key] or -1) or -2
  elseif name == 'PEXPIRE' or name == 'PEXPIREAT' then
    local from = name == 'PEXPIRE' and floor(server.now / 1000) or 0
    server.expiries[key] = exists(key) and from + (...) or nil
    return server.expiries[key] and 1 or 0
  end
  if server.error and WRITES[name] then return { err = server.error } end
  if server.is_full and not server.has_written and name == 'ZADD' then
    return { err = 'OOM command not allowed' }
  end
  server.has_written = server.has_written or WRITES[name]
  local reply = real.pcall(name, key, ...)
  forget_expiry(key)
  -- Redis 7.0 adds where a script has failed.
  return type(reply) == 'table' and reply.err and { err = reply.err } or reply
end

local function call_server(...)
  local reply = pcall_server(...)
  if type(reply) == 'table' and reply.err then error(reply, 0) end
  return reply
end

-- What is printed of a call.

local FIGURES = { 'used', 'reset', 'reserved', 'retry', 'least' }

local function shown_record(record)
  local words = { string.format('admitted %d, at %s', record[1], record[2] < 0 and 'none' or since_start(record[2])) }
  for i = 3, #record do
    local figure = FIGURES[(i - 3) % #FIGURES + 1]
    words[#words + 1] = string.format('%s%s %.0f', figure == 'used' and '; ' or ', ', figure, record[i])
  end
  return table.concat(words)
end

local function print_reply(reply)
  local form = 'a list'
  if type(reply) == 'string' then
    reply, form = { struct.unpack('<' .. string.rep('d', #reply / 8), reply) }, 'doubles'
    table.remove(reply)
  end
  print('  reply    %s, now %s', form, since_start(reply[1]))
  local figures = {}
  for i = 2, #reply do
    if type(reply[i]) == 'number' then figures[#figures + 1] = string.format('%.0f', reply[i]) end
    if #figures > 0 and type(reply[i + 1]) ~= 'number' then
      print('           figures %s', table.concat(figures, ' '))
      figures = {}
    end
    if type(reply[i]) == 'table' then print('           %s', shown_record(reply[i])) end
    if type(reply[i]) == 'string' then print('           error %s', reply[i]) end
  end
end

local function print_keys()
  local keys = real.call('KEYS', '*')
  table.sort(keys)
  for _, key in ipairs(keys) do
    local expiry = server.expiries[key]
    print('  key %s    expires %s', key, expiry and since_start(expiry * 1000) or 'never')
    if real.call('TYPE', key).ok == 'zset' then
      local members = real.call('ZRANGE', key, 0, -1, 'WITHSCORES')
      for i = 1, math.min(#members, 24), 2 do
        local score = tonumber(members[i + 1])
        print('           %-20s %s', score < 0 and since_start(-score) or members[i + 1], visible(members[i]))
      end
      if #members > 24 then print('           and %d more', #members / 2 - 12) end
    end
  end
end

-- The functions of cases.lua.

local cases = {}

-- Begins a case, with no keys.
function cases.case(name)
  real.call('FLUSHALL')
  server = { now = START, expiries = {}, commands = {} }
  print('\n== %s', name)
end

-- Changes the server: `is_full` of memory, `is_before_7`, and the `error` of its writes.
function cases.server(settings)
  for name, value in pairs(settings) do
    server[name] = value
  end
end

-- Lets the clock show so many microseconds since the start.
function cases.at(micros)
  pass(START + micros)
end

-- Makes the state with which a case starts.
function cases.command(...)
  call_server(...)
end

-- The id of eight bytes that has this name. The last byte counts copies.
function cases.id(name, copy)
  assert(#name <= 7, name)
  return name .. string.rep('_', 7 - #name) .. string.char(copy or 0)
end

-- The score of an entry of so many microseconds since the start.
function cases.score(micros)
  return string.format('-%.0f', START + micros)
end

local function text(word)
  return type(word) == 'number' and string.format('%.0f', word) or word
end

-- Calls the script with these keys and arguments, which are shown as these words.
local function call(keys, arguments, words)
  for i, word in ipairs(words) do
    words[i] = word == '' and "''" or visible(text(word))
  end
  print('at %s', since_start(server.now))
  print('  KEYS     %s', table.concat(keys, ' '))
  print('  ARGV     %s', table.concat(words, ' '))
  local api = { call = call_server, pcall = pcall_server, REDIS_VERSION_NUM = not server.is_before_7 and 0x070000 or nil }
  server.has_written, server.commands = false, {}
  local is_done, reply = pcall(script, api, keys, arguments)
  if is_done then
    print_reply(reply)
  else
    print('  fails    %s', type(reply) == 'table' and reply.err or reply)
  end
  print('  runs     %s', table.concat(server.commands, ' '))
  print_keys()
end

local function append(list, ...)
  for i = 1, select('#', ...) do
    list[#list + 1] = select(i, ...)
  end
end

local function doubles(numbers)
  return struct.pack('<' .. string.rep('d', #numbers), unpack(numbers))
end

-- Appends what head.lua says of a run, and the same in words. Without `kind`, the run is alone.
local function write(run, keys, arguments, words, kind)
  local figures, texts, ids = { run.copies }, {}, {}
  for _, charge in ipairs(run.charges) do
    append(figures, unpack(charge.figures))
    if run.kind == 'any' or run.kind == 'settle' then
      append(figures, charge.lease)
      append(texts, charge.ends, charge.mode)
    end
  end
  if #texts > 0 then table.insert(texts, 1, run.again) end
  append(words, kind, unpack(figures))
  for _, check in ipairs(run.checks) do
    append(ids, check.id .. (check.at and doubles({ START + check.at }) or ''))
    append(words, check.id, check.at)
    append(keys, unpack(check))
  end
  append(arguments, kind, doubles(figures), table.concat(ids), unpack(texts))
  append(words, unpack(texts))
end

-- Calls the script by this clock: '' is the server's, and 'test' is that of a test.
function cases.call(clock, ...)
  local now = clock == '' and '' or text(server.now)
  local keys, arguments, words = {}, { now }, { now }
  for _, run in ipairs({ ... }) do
    write(run, keys, arguments, words, run.kind)
  end
  call(keys, arguments, words)
end

-- Calls the script with one run of plain checks, without the clock and the kind.
function cases.call_short(run)
  local keys, arguments, words = {}, {}, { 'short' }
  write(run, keys, arguments, words)
  call(keys, arguments, words)
end

-- Calls the script with one argument: the id of a check, if it has one, and these figures.
function cases.call_lone(figures, check)
  local words = { 'lone', unpack(figures) }
  append(words, check.id)
  call({ check[1] }, { (check.id or '') .. doubles(figures) }, words)
end

assert(loadstring('local cases = ...\n' .. ARGV[2], '@cases'))(cases)
return table.concat(lines, '\n')
