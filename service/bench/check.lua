-- Programs that ask, each turn by another of 1,000 keys.
local turn = 0
request = function()
  turn = turn + 1
  local body = string.format('{"limit": "%s", "key": "client-%d"}', os.getenv("LIMIT"), turn % 1000)
  return wrk.format("POST", os.getenv("PATH_OF"), { ["Content-Type"] = "application/json" }, body)
end
