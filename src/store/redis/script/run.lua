-- The way through the rest of a batch, from where the files before have left it.

-- Decides a check. If that fails, the other checks of the batch go on.
local function decide_alone(shape, id)
  local length = r
  local is_done, problem = attempt(decide, shape, id)
  if is_done then return end
  for i = length + 1, #reply do
    reply[i] = nil
  end
  reply[length + 1] = failure_of(shape.at_fault, problem)
  r, k = length + 1 + 3 * #shape, k + #shape
  for i = length + 2, r do
    reply[i] = 0
  end
end

while a < #ARGV do
  for i = resume or shape.first, shape.last, shape.is_settlement and 2 or 1 do
    if i ~= resume and (reply_done(i) or do_prefetch(shape, i)) then
      -- Done.
    elseif shape.is_settlement then
      settle(shape, ARGV[i], ARGV[i + 1] + 0)
    elseif not shape.is_plain or i == resume or not decide_plainly(shape, ARGV[i]) then
      decide_alone(shape, ARGV[i])
    end
  end
  a, resume = shape.last, nil
  if a < #ARGV then shape = read_shape(a + 1) end
end

return reply
