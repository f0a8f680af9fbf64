-- The same way for checks of several charges: all of them are looked at before anything is written.

-- Whether the checks of a run may be decided so: they have no copies, and none is a question that spends nothing.
local function is_plain(run)
  if not is_expiry_telling or ARGV[run] ~= '1' or ARGV[run + 1] ~= 'plain' then return false end
  for i = 1, ARGV[run + 2] do
    if ARGV[run + 1 + 3 * i] == '0' then return false end
  end
  return true
end

-- The charges of a run, each by its three figures.
local function charges_of(run)
  local charges = {}
  for i = 1, ARGV[run + 2] do
    local place = run + 3 * i
    local window = ARGV[place + 2] + 0
    charges[i] = {
      units = ARGV[place] + 0, cost = ARGV[place + 1] + 0, window = window, window_ms = ceil(window / 1000),
      cutoff = string.format('%.0f', window - now),
    }
  end
  return charges
end

-- Decides a check. Returns false if it has done nothing.
local function decide_plainly(id, charges)
  for i = 1, #charges do
    local c = charges[i]
    c.used, c.gone, c.reset, c.expiry, c.sum = look_plainly(KEYS[k + i], c.units, c.cost, c.window, c.window_ms, c.cutoff)
    if not c.used then return false end
  end
  for i = 1, #charges do
    local c = charges[i]
    admit_plainly(KEYS[k + i], id, c.cost, c.used, c.gone, c.reset, c.expiry, c.sum)
  end
  k = k + #charges
  return true
end

while a < #ARGV and not resume do
  local run = a + 1
  if not is_plain(run) then break end
  local charges = charges_of(run)
  local first = run + 4 + 3 * #charges
  local last = first - 1 + ARGV[first - 1]
  for i = first, last do
    if not decide_plainly(ARGV[i], charges) then
      resume = i
      break
    end
  end
  if not resume then a = last end
end
if a == #ARGV then return reply end
