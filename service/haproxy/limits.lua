-- Asks the service about a request, and keeps the status and the figures of its answer.
core.register_action("ask_limits", { "http-req" }, function(txn)
    local answer = core.httpclient():get({ url = "http://127.0.0.1:8090/auth", timeout = 1000, headers = {
        ["x-forwarded-method"] = { txn.sf:method() },
        ["x-forwarded-uri"] = { txn.sf:pathq() },
        ["x-forwarded-for"] = { txn.sf:src() },
    } })
    txn:set_var("txn.status", answer.status)
    local names = { limit = "x-ratelimit-limit", remaining = "x-ratelimit-remaining", reset = "x-ratelimit-reset", retry = "retry-after" }
    for variable, name in pairs(names) do
        local values = answer.headers and answer.headers[name]
        if values then txn:set_var("txn." .. variable, values[0]) end
    end
end)
