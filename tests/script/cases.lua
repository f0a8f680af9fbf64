-- The golden pairs: calls of the script, of each kind and algorithm. replay.lua has the functions,
-- head.lua of the script describes the arguments, and golden.txt has the replies.

local case, at, command, call = cases.case, cases.at, cases.command, cases.call
local id, score, server = cases.id, cases.score, cases.server
local MS, S = 1000, 1000000

-- A charge: its five figures under an algorithm, which is 'log', 'concurrent', 'fixed', 'counter',
-- the ends of a calendar's periods, or the entries of a compact log; and its lease and mode.
local function charge(units, cost, window, algorithm, lease, mode)
  local entries, ends = tonumber(algorithm), string.match(algorithm, '^ends (.*)')
  local sub_window = entries and math.ceil(window / (entries - 2)) or window
  local later = entries and sub_window - 1 or algorithm == 'counter' and window or 0
  if algorithm == 'log' or algorithm == 'concurrent' then sub_window = 0 end
  if algorithm == 'concurrent' then window = -window end
  return { figures = { units, cost, window, sub_window, later }, lease = lease, mode = mode, ends = ends or '' }
end

-- The charges of a unit, or none, and of a place, which has the key of number `p`.
local function place(units, window, places, life, p)
  local charges = { charge(places, 1, life, 'concurrent') }
  if units > 0 then table.insert(charges, 3 - p, charge(units, 1, window, 'log')) end
  return charges
end

-- A run of checks, or of settlements: what a case says of them, and then for each check its id, its
-- keys, and the time `at` at which an admission was decided. A case says: 'single' with units and
-- window; 'place' with the arguments of `place`; 'plain' with copies, charges, and three figures a
-- charge; 'sum' with copies and five figures; 'renew' with a life; and the other kinds with copies,
-- charges, and for each charge three figures, algorithm, lease and mode.
local function run(words, ...)
  local kind, again = string.match(words[1], '^(%l+) ?(%l*)$')
  local made = { kind = kind, again = again, copies = 1, charges = {}, checks = { ... } }
  if kind == 'single' then
    made.kind, made.charges = 'plain', { charge(words[2], 1, words[3], 'log') }
  elseif kind == 'place' then
    made.kind, made.charges = 'plain', place(unpack(words, 2))
  elseif kind == 'sum' then
    made.kind, made.copies, made.charges = 'plain', words[2], { { figures = { unpack(words, 3) } } }
  elseif kind == 'renew' then
    made.charges = { charge(1, 1, words[2], 'concurrent') }
  else
    made.copies = words[2]
    for i = 4, #words, kind == 'plain' and 3 or 6 do
      made.charges[#made.charges + 1] = charge(words[i], words[i + 1], words[i + 2], kind == 'plain' and 'log' or words[i + 3], words[i + 4], words[i + 5])
    end
  end
  if kind == 'again' then made.kind, made.again = 'any', 'again' end
  return made
end

-- A call in a short form: two figures of single units; five of a lone sum, without an id; or the
-- arguments of `place`.
local function call_short(given, ...)
  local checks = { ... }
  if #given == 2 and #checks == 1 then
    cases.call_lone(given, checks[1])
  elseif not checks[1].id then
    cases.call_lone(given, checks[1])
  else
    cases.call_short(run({ #given == 2 and 'single' or 'place', unpack(given) }, ...))
  end
end

-- The figures of one unit.
local function one(units, window, algorithm, lease, mode)
  return units, 1, window, algorithm, lease or 0, mode or ''
end

-- A run of one charge in six figures, of one copy of each check.
local function any(kind, units, cost, window, algorithm, lease, mode)
  return { kind, 1, 1, units, cost, window, algorithm, lease or 0, mode or '' }
end

case 'single units, until one is refused'
for number, micros in ipairs({ 0, 1 * S, 2 * S, 3 * S }) do
  at(micros)
  call('', run({ 'single', 3, 10 * S }, { 'a', id = id('no' .. number) }))
end

case 'single units in the short form, of which the last is refused'
call_short({ 2, 10 * S }, { 'a', id = id 'first' }, { 'b', id = id 'second' })
call_short({ 2, 10 * S }, { 'a', id = id 'third' })
at(1500 * MS)
call_short({ 2, 10 * S }, { 'b', id = id 'fourth' }, { 'a', id = id 'fifth' })

case 'a single unit after others have left'
command('ZADD', 'a', score(-12 * S), id 'gone', score(-11 * S), id 'gone_2', score(-4 * S), id 'stays')
command('PEXPIREAT', 'a', 1000000000000 + 9000)
call('', run({ 'single', 3, 10 * S }, { 'a', id = id 'new' }))

case 'a single unit after others have left, of which one has copies, and the total follows'
command('ZADD', 'a', 7, 'used', score(-12 * S), id 'gone' .. '2*3', score(-4 * S), id 'stays')
command('PEXPIREAT', 'a', 1000000000000 + 9000)
call('', run({ 'single', 3, 10 * S }, { 'a', id = id 'new' }))

case 'a single unit after others have left, of which some have one unit, and the total follows'
command('ZADD', 'a', 6, 'used', score(-12 * S), id 'gone' .. '3', score(-11 * S), id 'one', score(-4 * S), id 'stays' .. '2')
command('PEXPIREAT', 'a', 1000000000000 + 9000)
call('', run({ 'single', 5, 10 * S }, { 'a', id = id 'new' }))

case 'a refusal of a log with a total, of one that is too full, and of one with an entry ahead of the clock'
command('ZADD', 'a', 2, 'used', score(-4 * S), id 'two' .. '2')
command('ZADD', 'b', score(-4 * S), id 'first', score(-3 * S), id 'second', score(-2 * S), id 'third')
command('ZADD', 'c', score(-4 * S), id 'first', score(2 * S), id 'ahead')
for _, name in ipairs({ 'a', 'b', 'c' }) do
  command('PEXPIREAT', name, 1000000000000 + 17000)
  call_short({ 2, 10 * S }, { name, id = id 'new' })
end

case 'units of a window longer than since 1970'
call('', run({ 'single', 3, 2000000000 * S }, { 'a', id = id 'new' }, { 'a', id = id 'newer' }))
call('', run(any('any', 3, 1, 2000000000 * S, 'log', 5 * S), { 'b', id = id 'new' }))

case 'single units of a window with a part of a millisecond'
at(1400)
call('', run({ 'single', 3, 10 * S + 300 }, { 'a', id = id 'new' }, { 'a', id = id 'newer' }))
call('', run({ 'plain', 1, 1, 3, 1, 10 * S + 300 }, { 'b', id = id 'new' }, { 'b', id = id 'newer' }))

case 'single units before Redis 7.0'
server { is_before_7 = true }
call('', run({ 'single', 2, 10 * S }, { 'a', id = id 'first' }, { 'a', id = id 'second' }, { 'a', id = id 'third' }))

case 'places alone: taken, refused, and free after a life'
call_short({ 0, 0, 1, 30 * S, 1 }, { 'p', id = id 'first' })
at(29 * S)
call_short({ 0, 0, 1, 30 * S, 1 }, { 'p', id = id 'second' })
at(30 * S)
call_short({ 0, 0, 1, 30 * S, 1 }, { 'p', id = id 'third' })

case 'places with a unit each, and then a refusal by either'
call_short({ 3, 10 * S, 2, 30 * S, 1 }, { 'p', 'a', id = id 'first' })
call('', run({ 'place', 3, 10 * S, 2, 30 * S, 2 }, { 'a', 'p', id = id 'second' }, { 'a', 'p', id = id 'third' }))
call('', run({ 'place', 2, 10 * S, 3, 30 * S, 2 }, { 'a', 'p', id = id 'fourth' }))

case 'a place whose id is there already'
command('ZADD', 'p', score(-1 * S), id 'first')
call_short({ 3, 10 * S, 2, 30 * S, 2 }, { 'a', 'p', id = id 'first' })

case 'places that are renewed: held, over but there, lost, of a key of another type, and twice at once'
command('ZADD', 'p', score(-10 * S), id 'held', score(-50 * S), id 'over')
command('SET', 'text', 'x')
call('', run({ 'renew', 30 * S }, { 'p', id = id 'held' }, { 'q', id = id 'lost' }, { 'text', id = id 'held' },
  { 'p', id = id 'over' }))
call('', run({ 'renew', 30 * S }, { 'p', id = id 'held' }))

case 'plain checks of two limits, of which the second refuses'
call('', run({ 'plain', 1, 2, 10, 3, 10 * S, 4, 3, 60 * S }, { 'a', 'b', id = id 'first' }, { 'a', 'b', id = id 'second' }))

case 'copies: a few, many, and more than fit'
call('', run({ 'plain', 3, 1, 10, 1, 10 * S }, { 'a', id = id 'few' }))
at(1 * S)
call('', run({ 'plain', 5, 1, 10, 1, 10 * S }, { 'a', id = id 'many' }))
at(2 * S)
call('', run({ 'plain', 4, 1, 10, 1, 10 * S }, { 'a', id = id 'more' }))
call('', run({ 'settle', 1, 1, 10, 1, 10 * S, 'log', 0, '0' }, { 'a', id = id('many', 2), at = 1 * S }))

case 'copies: as many as get entries of their own, and two of a cost'
call('', run({ 'plain', 4, 1, 10, 1, 10 * S }, { 'a', id = id 'few' }))
call('', run({ 'plain', 2, 1, 10, 2, 10 * S }, { 'b', id = id 'two' }))
at(11 * S)
call('', run(any('any', 10, 1, 10 * S, 'log'), { 'b', id = id 'later' }))

case 'copies that have left, beside an entry of too many units'
command('ZADD', 'a', 20, 'used', score(-12 * S), id 'gone' .. '2*3', score(-11 * S), id 'wrong' .. '9007199254740992', score(-1 * S), id 'stays')
call('', run(any('any', 30, 1, 10 * S, 'log'), { 'a', id = id 'new' }))

case 'copies that an earlier try has counted in part'
call('', run({ 'any', 3, 1, one(10, 10 * S, 'log') }, { 'a', id = id 'few' }))
call('', run({ 'again', 4, 1, one(10, 10 * S, 'log') }, { 'a', id = id 'few' }))
call('', run({ 'again', 2, 1, one(10, 10 * S, 'log') }, { 'a', id = id 'new' }))

case 'an exact log: a refusal finds the retry time by costs'
call('', run(any('any', 10, 4, 10 * S, 'log'), { 'a', id = id 'first' }))
at(1 * S)
call('', run(any('any', 10, 5, 10 * S, 'log'), { 'a', id = id 'second' }))
at(2 * S)
call('', run(any('any', 10, 6, 10 * S, 'log'), { 'a', id = id 'third' }))
call('', run(any('any', 10, 0, 10 * S, 'log'), { 'a', id = id 'asks' }))

case 'a fixed window: sums, a refusal, and the next window'
for _, micros in ipairs({ 1 * S, 2 * S, 3 * S, 11 * S }) do
  at(micros)
  call('', run(any('any', 5, 2, 10 * S, 'fixed'), { 'a', id = id 'new' }))
end
call('', run(any('again', 5, 2, 10 * S, 'fixed'), { 'a', id = id 'again' }))
call('', run(any('again', 5, 2, 10 * S, 'fixed'), { 'a', id = id 'again' }))

case 'a counter: two windows, a refusal, reserved units and their settlement'
at(9 * S)
call('', run(any('any', 6, 4, 10 * S, 'counter'), { 'a', id = id 'first' }))
at(12 * S)
call('', run(any('any', 6, 2, 10 * S, 'counter', 5 * S), { 'a', id = id 'second' }))
at(13 * S)
call('', run(any('any', 6, 3, 10 * S, 'counter'), { 'a', id = id 'third' }))
call('', run(any('settle', 6, 2, 10 * S, 'counter', 5 * S, '1'), { 'a', id = id 'second', at = 12 * S }))
at(8 * S)
call('', run(any('any', 6, 6, 10 * S, 'counter'), { 'a', id = id 'earlier' }))

case 'a compact log: parts of the window, and reserved units'
call('', run(any('any', 5, 2, 10 * S, '12'), { 'a', id = id 'first' }))
at(1500 * MS)
call('', run(any('any', 5, 1, 10 * S, '12'), { 'a', id = id 'second' }, { 'a', id = id 'third' }))
call('', run(any('any', 6, 1, 10 * S, '12', 2 * S), { 'a', id = id 'fourth' }))
call('', run(any('any', 5, 1, 10 * S, '12'), { 'a', id = id 'fifth' }))

-- A check of a sum, by the short way and then by the general way, which have to decide the same.
local function sum(units, cost, window, sub_window, later, algorithm)
  call_short({ units, cost, window, sub_window, later }, { 'short' })
  call('', run({ 'sum', 1, units, cost, window, sub_window, later }, { 'batch', id = id 'new' }),
    run(any('any', units, cost, window, algorithm), { 'general', id = id 'new' }))
end

case 'sums alone: a fixed window, until it refuses, and the next one'
for _, micros in ipairs({ 1 * S, 2 * S, 3 * S, 11 * S }) do
  at(micros)
  sum(5, 2, 10 * S, 10 * S, 0, 'fixed')
end

case 'sums alone: a counter over some windows, with refusals'
for _, micros in ipairs({ 9 * S, 9 * S, 12 * S, 13 * S, 16 * S, 45 * S }) do
  at(micros)
  sum(6, 3, 10 * S, 10 * S, 10 * S, 'counter')
end

case 'sums alone: a compact log, whose parts leave one by one'
for _, micros in ipairs({ 0, 1 * S, 1500 * MS, 3 * S, 4 * S, 12 * S, 40 * S }) do
  at(micros)
  sum(7, 2, 10 * S, 1 * S, 1 * S - 1, '12')
end

case 'sums alone, of a step back of the clock'
for _, micros in ipairs({ 60 * S, 30 * S, 31 * S }) do
  at(micros)
  sum(3, 2, 10 * S, 10 * S, 0, 'fixed')
  sum(3, 1, 20 * S, 2 * S, 2 * S - 1, '12')
end

case 'sums: copies, some that are admitted in part, reserved units, and keys of another type'
call('', run({ 'sum', 3, 5, 1, 10 * S, 10 * S, 0 }, { 'a', id = id 'few' }, { 'a', id = id 'more' }))
call('', run(any('any', 5, 1, 10 * S, 'counter', 3 * S), { 'b', id = id 'held' }))
call_short({ 5, 1, 10 * S, 10 * S, 10 * S }, { 'b' })
command('SET', 'text', 'x')
call_short({ 5, 1, 10 * S, 10 * S, 10 * S }, { 'text' })
call_short({ 5, 6, 10 * S, 10 * S, 10 * S }, { 'c' })

case 'sums before Redis 7.0, by the clock of a test, and on a server without memory'
call('test', run({ 'sum', 1, 5, 1, 10 * S, 10 * S, 10 * S }, { 'a', id = id 'test' }))
server { is_before_7 = true }
call_short({ 5, 1, 10 * S, 10 * S, 10 * S }, { 'b' })
server { is_before_7 = false, is_full = true }
call_short({ 5, 1, 10 * S, 10 * S, 10 * S }, { 'c' })
call_short({ 1, 1, 10 * S, 10 * S, 10 * S }, { 'b' })

case 'periods of the calendar, and a clock that is too far from them'
local ENDS = 'ends 1000000005000000 1000000036000000'
call('', run(any('any', 2, 2, 31 * S, ENDS), { 'a', id = id 'first' }, { 'a', id = id 'second' }))
at(5 * S)
call('', run(any('any', 2, 2, 31 * S, ENDS), { 'a', id = id 'third' }))
at(36 * S)
call('', run(any('any', 2, 2, 31 * S, ENDS), { 'a', id = id 'fourth' }))

case 'reserved units of an exact log: settled for less, again, and late'
call('', run(any('any', 10, 4, 10 * S, 'log', 3 * S), { 'a', id = id 'first' }, { 'a', id = id 'second' }))
call('', run(any('any', 10, 4, 10 * S, 'log', 3 * S), { 'a', id = id 'refused' }))
at(1 * S)
call('', run(any('settle', 10, 4, 10 * S, 'log', 3 * S, '1'), { 'a', id = id 'first', at = 0 }))
call('', run(any('settle again', 10, 4, 10 * S, 'log', 3 * S, '1'), { 'a', id = id 'first', at = 0 }))
at(4 * S)
call('', run(any('settle', 10, 4, 10 * S, 'log', 3 * S, '5'), { 'a', id = id 'second', at = 0 }))
call('', run(any('settle', 10, 4, 10 * S, 'log', 3 * S, '5'), { 'a', id = id 'second', at = 0 }))

case 'reserved units of a fixed window, settled late, and leave a mark'
call('', run(any('any', 10, 4, 10 * S, 'fixed', 3 * S), { 'a', id = id 'first' }))
at(4 * S)
call('', run(any('settle', 10, 4, 10 * S, 'fixed', 3 * S, '2'), { 'a', id = id 'first', at = 0 }))
call('', run(any('settle', 10, 4, 10 * S, 'fixed', 3 * S, '2'), { 'a', id = id 'first', at = 0 }))

case 'a prefetch: taken, asked for again, and given back in part'
call('', run(any('any', 10, 8, 10 * S, 'log', 10500 * MS), { 'a', id = id 'fetched' }))
call('', run(any('again', 10, 8, 10 * S, 'log', 10500 * MS), { 'a', id = id 'fetched' }))
at(200 * MS)
call('', run(any('any', 10, 5, 10 * S, 'log'), { 'a', id = id 'refused' }))
call('', run(any('settle', 10, 8, 10 * S, 'log', 10500 * MS, '3'), { 'a', id = id 'fetched', at = 0 }))

case 'a spent unit with a lease that ends before those of other units, and then a single unit'
call('', run({ 'single', 9, 600 * S }, { 'a', id = id 'first' }, { 'a', id = id 'second' }))
call('', run(any('any', 9, 1, 600 * S, 'log', 5 * S, 'spent'), { 'a', id = id 'leased' }))
call('', run({ 'single', 9, 600 * S }, { 'a', id = id 'third' }))

case 'reserved units of an exact log, down to one'
call('', run(any('any', 10, 1, 10 * S, 'log', 3 * S), { 'a', id = id 'first' }))
at(1 * S)
call('', run(any('any', 10, 1, 10 * S, 'log', 3 * S), { 'a', id = id 'second' }))
call('', run(any('settle', 10, 1, 10 * S, 'log', 3 * S, '0'), { 'a', id = id 'first', at = 0 }))

case 'a prefetch after a step back of the clock'
at(1 * S)
call('', run(any('any', 10, 8, 10 * S, 'log', 10500 * MS), { 'b', id = id 'fetched' }))
at(700 * MS)
call('', run(any('any', 10, 5, 10 * S, 'log'), { 'b', id = id 'refused' }))
at(100 * MS)
call('', run(any('any', 10, 5, 10 * S, 'log'), { 'b', id = id 'refused' }))

case 'limits that do not refuse, and charges that take nothing'
for _, mode in ipairs({ 'shadow', 'left', 'left shadow', 'spent' }) do
  call('', run(any('any', 2, 2, 10 * S, 'log', 0, mode), { 'a', id = id 'first' }, { 'a', id = id 'second' }))
end

case 'a check of all algorithms at once, and its settlement'
local ALL = { 'any', 1, 4 }
local SETTLED = { 'settle', 1, 4 }
for _, algorithm in ipairs({ 'log', 'fixed', 'counter', '12' }) do
  for _, word in ipairs({ 9, 2, 10 * S, algorithm, 5 * S, '' }) do
    ALL[#ALL + 1] = word
  end
  for _, word in ipairs({ 9, 2, 10 * S, algorithm, 5 * S, algorithm == '12' and 'left' or '1' }) do
    SETTLED[#SETTLED + 1] = word
  end
end
at(3 * S)
call('', run(ALL, { 'a', 'b', 'c', 'd', id = id 'first' }))
at(4 * S)
call('', run(SETTLED, { 'a', 'b', 'c', 'd', id = id 'first', at = 3 * S }))

case 'a place by the general way: taken, found by a second try, and refused'
call('', run(any('any', 1, 1, 30 * S, 'concurrent'), { 'p', id = id 'first' }))
at(1 * S)
call('', run(any('again', 1, 1, 30 * S, 'concurrent'), { 'p', id = id 'first' }, { 'p', id = id 'second' }))
call('', run(any('settle', 1, 1, 30 * S, 'concurrent', 0, '0'), { 'p', id = id 'first', at = 0 }))

case 'a step back of the clock: a refusal moves the newest entries'
at(60 * S)
call('', run({ 'plain', 3, 1, 3, 1, 10 * S }, { 'a', id = id 'first' }))
call('', run(any('any', 3, 3, 10 * S, '12'), { 'b', id = id 'first' }))
at(30 * S)
call('', run({ 'single', 3, 10 * S }, { 'a', id = id 'second' }))
call('', run(any('any', 3, 3, 10 * S, '12'), { 'b', id = id 'second' }))

case 'keys of another type fail alone'
command('SET', 'text', 'x')
call('', run({ 'plain', 1, 2, 3, 1, 10 * S, 3, 1, 10 * S }, { 'a', 'text', id = id 'first' }),
  run({ 'single', 3, 10 * S }, { 'text', id = id 'second' }, { 'a', id = id 'third' }),
  run(any('settle', 3, 1, 10 * S, 'log', 0, '0'), { 'text', id = id 'first', at = 0 }))

case 'a server without memory: new units fail, a refusal and a settlement do not'
call('', run(any('any', 1, 1, 10 * S, 'log', 5 * S), { 'a', id = id 'first' }))
server { is_full = true }
call('', run({ 'single', 1, 10 * S }, { 'b', id = id 'second' }))
call('', run({ 'single', 1, 10 * S }, { 'a', id = id 'third' }))
call('', run(any('settle', 1, 1, 10 * S, 'log', 5 * S, '0'), { 'a', id = id 'first', at = 0 }))

case 'more entries have left than one check drops, and many stay'
for number = 1, 1200 do
  command('ZADD', 'a', score((number < 601 and -20 or -5) * S + number * MS), id('n' .. number))
end
command('PEXPIREAT', 'a', 1000000000000 + 9000)
call('', run({ 'single', 1000, 10 * S }, { 'a', id = id 'new' }))
for number = 1, 1200 do
  command('ZADD', 'b', score((number < 601 and -20 or -5) * S + number * MS), id('n' .. number))
end
for _, name in ipairs({ 'new', 'newer' }) do
  call('', run(any('any', 1000, 2, 10 * S, 'log'), { 'b', id = id(name) }))
end

case 'as many entries have left as take.lua drops'
for number = 1, 101 do
  command('ZADD', 'a', score((number < 101 and -20 or -5) * S), id('n' .. number))
end
call('', run({ 'plain', 1, 1, 10, 1, 10 * S }, { 'a', id = id 'new' }))

case 'more entries have left than one check drops, and few stay'
for number = 1, 620 do
  command('ZADD', 'a', score((number < 601 and -20 or -5) * S), id('n' .. number))
end
command('ZADD', 'a', 620, 'used')
call('', run(any('any', 30, 2, 10 * S, 'log'), { 'a', id = id 'new' }))

case 'by the clock of a test, with a part of a millisecond'
at(1400)
call('test', run(any('any', 2, 1, 10 * S, 'counter'), { 'a', id = id 'test' }))

case 'by the clock of a test'
call('test', run({ 'single', 2, 10 * S }, { 'a', id = id 'test' }), run({ 'plain', 2, 1, 8, 2, 10 * S }, { 'b', id = id 'test' }))

case 'heads that are not of the script'
command('ZADD', 'a', 5, 'held', 2, 'used', score(-1 * S), id 'first' .. '2')
command('ZADD', 'b', '9100000000000000', 'used', score(-1 * S), id 'first')
command('ZADD', 'c', '900000000000000000000', 'used', score(10 * S), '..900000000000000000000')
call('', run(any('any', 3, 1, 10 * S, 'log'), { 'a', id = id 'new' }, { 'b', id = id 'new' }))
call('', run(any('any', 3, 1, 10 * S, 'counter'), { 'c', id = id 'new' }))
command('ZADD', 'd', '2.5', 'used', score(-1 * S), id 'first')
command('ZADD', 'e', '5', 'used')
call('', run(any('any', 9, 1, 10 * S, 'log'), { 'd', id = id 'new' }), run({ 'plain', 1, 1, 9, 1, 10 * S }, { 'e', id = id 'new' }))
command('ZADD', 'f', 12, 'held', 3, 'used', score(-1 * S), id 'first' .. '3')
call('', run({ 'plain', 1, 1, 3, 1, 10 * S }, { 'f', id = id 'new' }))

case 'sums near the largest number, and one of no units'
command('ZADD', 'a', '9007199254740990', 'used', score(0), '..9007199254740990')
call('', run(any('any', 9, 5, 10 * S, 'fixed', 0, 'spent'), { 'a', id = id 'new' }))
command('ZADD', 'b', 3, 'used', score(-20 * S), '..0', score(-5 * S), '..3')
call('', run(any('any', 9, 1, 10 * S, 'fixed'), { 'b', id = id 'new' }))

case 'a charge that takes nothing, beside an id that was admitted before'
call('', run(any('any', 3, 1, 10 * S, 'log'), { 'a', id = id 'before' }))
at(1 * S)
call('', run({ 'again', 1, 2, 3, 1, 10 * S, 'log', 0, 'left', 3, 1, 10 * S, 'log', 0, '' }, { 'a', 'b', id = id 'before' }))
call('', run(any('again', 3, 1, 10 * S, 'log', 0, 'left'), { 'a', id = id 'before' }))
call('', run(any('again', 3, 0, 10 * S, 'log'), { 'a', id = id 'before' }))

case 'a repeated check has the time of its exact log, and else the latest of the others'
local TWO = { 'again', 1, 2, 3, 1, 30 * S, 'concurrent', 0, '', 3, 1, 10 * S, 'log', 0, '' }
call('', run(TWO, { 'p', 'a', id = id 'held' }))
at(2 * S)
call('', run({ 'renew', 30 * S }, { 'p', id = id 'held' }))
call('', run(TWO, { 'p', 'a', id = id 'held' }))
call('', run({ 'again', 1, 2, 3, 1, 30 * S, 'concurrent', 0, '', 3, 2, 10 * S, 'fixed', 0, '' }, { 'p', 'b', id = id 'held' }))

case 'copies of a fixed window under ids that may be known, and a check that only some of them pass'
call('', run({ 'again', 3, 1, 5, 1, 10 * S, 'fixed', 0, '' }, { 'a', id = id 'copies' }))
call('', run({ 'again', 3, 1, 5, 1, 10 * S, 'fixed', 0, '' }, { 'a', id = id 'copies' }, { 'a', id = id 'others' }))
call('', run({ 'any', 3, 2, 5, 1, 10 * S, 'log', 0, 'shadow', 2, 1, 10 * S, 'log', 0, '' }, { 'b', 'c', id = id 'copies' }))

case 'a key with as many named entries as it may have: units without an id, and no prefetch'
for number = 1, 10000 do
  command('ZADD', 'a', score(-1 * S), '\255' .. string.format('%08d', number))
end
command('ZADD', 'a', 10000, 'used')
call('', run(any('again', 20000, 2, 10 * S, '12'), { 'a', id = id 'new' }))
call('', run(any('any', 20000, 2, 10 * S, '12', 10500 * MS), { 'a', id = id 'fetched' }))

case 'more entries with units have left than one check drops, and many stay'
for number = 1, 1200 do
  command('ZADD', 'a', score((number < 601 and -20 or -5) * S), id('n' .. number) .. '2')
end
command('ZADD', 'a', 2400, 'used')
for _ = 1, 2 do
  call('', run(any('any', 1400, 2, 10 * S, 'log'), { 'a', id = id 'new' }))
end

case 'a refusal whose retry time needs more entries than a check reads'
for number = 1, 150 do
  command('ZADD', 'a', score(number * S / 100 - 5 * S), id('n' .. number) .. '2')
  command('ZADD', 'b', score(number * S / 100 - 5 * S), '\255' .. id('n' .. number) .. '+2')
end
command('ZADD', 'a', 300, 'used')
command('ZADD', 'b', 310, 'used', 300, 'held', score(10 * S), '..7', score(0), '..3')
call('', run(any('any', 300, 250, 10 * S, 'log'), { 'a', id = id 'many' }))
call('', run(any('any', 300, 250, 10 * S, 'counter'), { 'b', id = id 'many' }))
call('', run(any('any', 300, 5, 10 * S, 'counter', 0, 'shadow'), { 'b', id = id 'few' }))

case 'settled late: a counter, a fixed window that is over, and an id that is given and settled again'
call('', run(any('any', 9, 2, 10 * S, 'counter', 1 * S), { 'a', id = id 'late' }))
call('', run(any('any', 9, 2, 10 * S, 'log', 1 * S), { 'c', id = id 'late' }))
at(9 * S)
call('', run(any('any', 9, 2, 10 * S, 'fixed', 2 * S), { 'b', id = id 'late' }))
call('', run(any('settle', 9, 2, 10 * S, 'counter', 1 * S, '3'), { 'a', id = id 'late', at = 0 }))
call('', run(any('settle', 9, 2, 10 * S, 'log', 1 * S, '3'), { 'c', id = id 'late', at = 0 }))
call('', run(any('any', 9, 2, 10 * S, 'log', 1 * S), { 'c', id = id 'late' }))
call('', run(any('settle', 9, 2, 10 * S, 'log', 1 * S, '3'), { 'c', id = id 'late', at = 9 * S }))
at(12 * S)
call('', run(any('settle', 9, 2, 10 * S, 'fixed', 2 * S, '1'), { 'b', id = id 'late', at = 9 * S }))
call('', run(any('settle', 9, 2, 10 * S, 'log', 1 * S, 'spent 1'), { 'b', id = id 'unknown', at = 9 * S }))

case 'settled for nothing, a key goes, and an unknown admission is none'
call('', run({ 'plain', 1, 1, 9, 2, 10 * S }, { 'a', id = id 'first' }))
call('', run(any('settle', 9, 2, 10 * S, 'log', 0, '1'), { 'a', id = id 'other', at = 0 }))
call('', run(any('settle', 9, 2, 10 * S, 'log', 0, '0'), { 'a', id = id 'first', at = 0 }))
call('', run(any('any', 9, 2, 10 * S, 'counter'), { 'b', id = id 'first' }))
call('', run(any('any', 9, 2, 10 * S, 'counter', 5 * S), { 'b', id = id 'second' }))
call('', run(any('settle', 9, 2, 10 * S, 'counter', 5 * S, '0'), { 'b', id = id 'second', at = 0 }))

case 'a counter over some windows, with an entry that has left'
call('', run(any('any', 9, 3, 10 * S, 'counter', 2 * S), { 'a', id = id 'first' }))
call('', run(any('any', 9, 4, 10 * S, 'counter'), { 'a', id = id 'second' }))
at(11 * S)
call('', run(any('any', 9, 6, 10 * S, 'counter'), { 'a', id = id 'third' }))
call('', run(any('any', 9, 4, 10 * S, 'counter'), { 'a', id = id 'fourth' }))
at(35 * S)
call('', run(any('any', 9, 9, 10 * S, 'counter'), { 'a', id = id 'fifth' }))

case 'a step back of the clock: named entries of a counter and of a compact log'
at(60 * S)
call('', run(any('again', 3, 3, 10 * S, '12'), { 'a', id = id 'named' }))
call('', run(any('any', 4, 2, 10 * S, 'counter', 2 * S), { 'b', id = id 'named' }))
call('', run(any('any', 4, 2, 10 * S, 'counter'), { 'b', id = id 'counted' }))
at(50 * S)
for _ = 1, 2 do
  call('', run(any('any', 3, 3, 10 * S, '12'), { 'a', id = id 'second' }))
  call('', run(any('any', 4, 3, 10 * S, 'counter'), { 'b', id = id 'second' }))
end

case 'expiries that tell nothing: none, one of later, and one that is just over'
for name, millis in pairs({ later = 50000, over = 11000 }) do
  command('ZADD', name, score(-1 * S), id 'first')
  command('PEXPIREAT', name, 1000000000000 + millis)
end
command('ZADD', 'none', score(-1 * S), id 'first')
at(9 * S)
call('', run({ 'single', 3, 10 * S }, { 'later', id = id 'new' }, { 'none', id = id 'new' }, { 'over', id = id 'new' }))

case 'expiries that tell a time within a millisecond of the present'
for number, micros in ipairs({ 8998500, 8999000, 8999001, 8999500 }) do
  command('ZADD', number, score(-1 * S), id 'first')
  command('PEXPIREAT', number, 1000000000000 + 10000)
  at(micros)
  call('', run({ 'plain', 1, 1, 3, 1, 10 * S }, { number, id = id 'new' }))
end
for number, millis in ipairs({ 11000, 11001, 11002 }) do
  at(9 * S)
  command('ZADD', 'a' .. number, score(9 * S), id 'first')
  command('PEXPIREAT', 'a' .. number, 1000000000000 + 9000 + millis)
  call('', run({ 'plain', 1, 1, 3, 1, 10 * S }, { 'a' .. number, id = id 'new' }))
end

case 'an entry ahead of the clock, in a log that has capacity'
command('ZADD', 'a', score(5 * S), id 'ahead')
command('PEXPIREAT', 'a', 1000000000000 + 16000)
call('', run({ 'plain', 1, 1, 3, 1, 10 * S }, { 'a', id = id 'new' }))

case 'a first try that is read after the second'
call('', run(any('again', 9, 2, 10 * S, 'log'), { 'a', id = id 'twice' }))
call('', run({ 'plain', 1, 1, 9, 2, 10 * S }, { 'a', id = id 'twice' }))
call('', run(any('again', 9, 1, 10 * S, 'log'), { 'b', id = id 'twice' }))
call('', run({ 'single', 9, 10 * S }, { 'b', id = id 'twice' }))

case 'a first try that is read after the second, whose entry has left'
command('ZADD', 'a', score(-12 * S), id 'late', score(-4 * S), id 'stays')
command('ZADD', 'b', 5, 'used', score(-12 * S), id 'late' .. '2', score(-4 * S), id 'stays' .. '3')
command('ZADD', 'p', score(-31 * S), id 'late')
for _, name in ipairs({ 'a', 'b', 'p' }) do
  command('PEXPIREAT', name, 1000000000000 + 9000)
end
call('', run({ 'single', 3, 10 * S }, { 'a', id = id 'late' }))
call('', run({ 'plain', 1, 1, 9, 2, 10 * S }, { 'b', id = id 'late' }))
call('', run({ 'place', 0, 0, 2, 30 * S, 1 }, { 'p', id = id 'late' }))

case 'a log with a total and an entry ahead of the clock keeps its later expiry'
command('ZADD', 'a', 4, 'used', score(-4 * S), id 'stays' .. '2', score(40 * S), id 'ahead' .. '2')
command('PEXPIREAT', 'a', 1000000000000 + 61000)
call('', run({ 'single', 9, 10 * S }, { 'a', id = id 'new' }))

case 'a limit of no units refuses, each way'
call_short({ 0, 10 * S }, { 'a', id = id 'lone' })
call('', run({ 'single', 0, 10 * S }, { 'a', id = id 'one' }, { 'a', id = id 'two' }))
call('', run(any('any', 0, 1, 10 * S, 'log'), { 'a', id = id 'any' }))

case 'errors of the server end the script'
server { error = 'READONLY You cannot write against a read only replica.' }
call('', run({ 'single', 3, 10 * S }, { 'a', id = id 'first' }))
call('', run(any('any', 3, 1, 10 * S, 'fixed'), { 'a', id = id 'first' }))
call('', run({ 'renew', 30 * S }, { 'p', id = id 'first' }))

case 'members that are no sums'
for number, members in ipairs({
  { 2, 'used', score(0), '' }, { 2, 'used', score(0), 'x' }, { 2, 'used', score(0), '..x' }, { 2, 'used' }, { score(0), '..2' },
  { 2, 'used', score(0), '..-2' }, { 2, 'used', score(0), '..inf' }, { 2, 'used', score(0), '..nan' }, { 2, 'used', score(0), '..2.5' },
}) do
  command('ZADD', number, unpack(members))
  call_short({ 9, 1, 10 * S, 10 * S, 10 * S }, { number })
  command('UNLINK', number)
end

-- The bytes of a sum repeat after 65,280 sub-windows.
case 'a step back of the clock by which sums ahead seem to be in the previous window, or the present one'
at(65279 * S + 5)
call_short({ 10, 10, S, S, S }, { 'counter' })
at(65280 * S + 5)
call_short({ 4, 2, S, S, 0 }, { 'fixed' })
call_short({ 4, 2, S, S, 0 }, { 'short' })
at(5)
call('', run(any('any', 4, 2, S, 'fixed'), { 'fixed', id = id 'general' }))
call_short({ 4, 2, S, S, 0 }, { 'fixed' })
call_short({ 4, 2, S, S, 0 }, { 'short' })
call_short({ 4, 2, S, S, 0 }, { 'short' })
at(900000)
call_short({ 10, 9, S, S, S }, { 'counter' })
