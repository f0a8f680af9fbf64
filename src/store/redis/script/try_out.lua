-- Runs each command that the deciding script needs, once, on a key that no limit has. No command
-- creates the key. From this script, `connect()` learns which command a user may not run. The error
-- of the deciding script would not name that command.
--
-- KEYS   that key
-- ARGV   '' if the other script reads the server's clock
-- reply  nothing, or the error of the first command that fails, with its name. A server that only has no memory left passes
-- Cost   14 commands

local key = KEYS[1]
local commands = {
  { 'ZCARD', key }, { 'ZCOUNT', key, 0, 0 }, { 'ZRANGE', key, 0, 0 }, { 'ZREVRANGE', key, 0, 0 }, { 'ZSCORE', key, '' },
  { 'ZRANGEBYSCORE', key, 0, 0 }, { 'ZADD', key, 'XX', 0, '' }, { 'ZREM', key, '' }, { 'ZREMRANGEBYRANK', key, 0, 0 },
  { 'PEXPIRE', key, 1 }, { 'PEXPIREAT', key, 1 }, { 'UNLINK', key },
}
if ARGV[1] == '' then
  table.insert(commands, { 'TIME' })
  if redis.REDIS_VERSION_NUM then table.insert(commands, { 'PEXPIRETIME', key }) end
end
for _, command in ipairs(commands) do
  local reply = redis.pcall(unpack(command))
  local failure = type(reply) == 'table' and reply.err
  if failure and not string.find(failure, 'OOM', 1, true) then
    return redis.error_reply(failure .. ' (' .. command[1] .. ')')
  end
end
