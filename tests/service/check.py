"""Runs the service behind real proxies, with the configurations of the guide as they stand there, and says what a client sees.

    python3 tests/service/check.py SERVICE [PROXY=PROGRAM ..]

Needs redis-server, and no packages.
"""

import collections
import concurrent.futures
import contextlib
import http.client
import http.server
import json
import os
import pathlib
import random
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time

SERVICE = os.path.abspath(sys.argv[1])
PROGRAMS = dict(argument.split("=", 1) for argument in sys.argv[2:])
ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "src/guide/another_language.md").read_text()
FIGURES = ["x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset", "retry-after"]
failures = []


def expect(text, seen, expected):
    if seen != expected:
        failures.append(f"{text}: {seen}, and not {expected}")
        print(f"FAILED {failures[-1]}", flush=True)


def blocks(section):
    """The programs of a section of the page, in their order."""
    if section == "haproxy":
        return [(ROOT / "service/haproxy" / name).read_text() for name in ["haproxy.cfg", "limits.lua"]]
    found, title, program = [], "", None
    for line in PAGE.splitlines(keepends=True):
        if line.startswith("```") and program is None:
            program = ""
        elif line.startswith("```"):
            found += [program] if title == section else []
            program = None
        elif program is not None:
            program += line
        elif line.startswith("# "):
            title = line[2:].strip()
    assert found, f"the page has no programs in {section!r}"
    return found


def free_port():
    """None of those that the system gives to clients, since a server needs it again after a restart."""
    while True:
        port = random.randrange(12_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind(("0.0.0.0", port))
            return port


class App(http.server.BaseHTTPRequestHandler):
    """The application: it tells what has come."""

    protocol_version = "HTTP/1.1"
    seen = []
    headers_seen = None

    def answer(self):
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        App.seen.append((self.command, self.path, body))
        App.headers_seen = self.headers
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"ok" if self.command != "HEAD" else b"")

    do_GET = do_POST = do_HEAD = do_PUT = answer

    def log_message(self, *_):
        pass


class Place:
    """The ports and the files of one run."""

    def __init__(self, stack):
        self.stack = stack
        self.folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        self.folder.chmod(0o755)
        self.ports = {name: free_port() for name in ["8080", "3000", "8090", "8091", "6379", "8092", "8093"]}
        server = http.server.ThreadingHTTPServer(("127.0.0.1", self.ports["3000"]), App)
        server.handle_error = lambda *_: None  # A proxy may end a connection that it does not need.
        threading.Thread(target=server.serve_forever, daemon=True).start()
        stack.callback(server.server_close)
        stack.callback(server.shutdown)
        self.redis = self.start_redis()

    def with_ports(self, text):
        """The text with free ports in the place of its own."""
        return re.sub(r"(?<![\d.])(8080|3000|8090|8091|6379)(?!\d)", lambda port: str(self.ports[port[0]]), text)

    def write(self, name, text):
        (self.folder / name).write_text(text)
        return str(self.folder / name)

    def start(self, name, command, port, **options):
        log = self.stack.enter_context(open(self.folder / f"{name}.log", "ab"))
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, **options)
        self.stack.callback(end, process)
        until = time.monotonic() + 20
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                return process
            if time.monotonic() > until or process.poll() is not None:
                sys.exit(f"{name} does not listen: {(self.folder / f'{name}.log').read_text()[-3000:]}")
            time.sleep(0.02)

    def start_redis(self):
        port = self.ports["6379"]
        return self.start("redis", ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no"], port)

    def start_service(self, rules, name="service"):
        rules = self.with_ports(rules)
        port = int(re.search(r'^listen = ".*:(\d+)"', rules, flags=re.M)[1])
        return self.start(name, [SERVICE, self.write(f"{name}.toml", rules)], port)

    def request(self, method="GET", path="/", headers=(), client="127.0.0.2", body=None, port=None):
        """The status, the headers and the body that a client at this address sees."""
        connection = http.client.HTTPConnection("127.0.0.1", port or self.ports["8080"], timeout=10, source_address=(client, 0))
        with contextlib.closing(connection):
            connection.putrequest(method, path)
            for name, value in headers:
                connection.putheader(name, value)
            if body is not None:
                connection.putheader("content-length", str(len(body)))
            connection.endheaders(body)
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()

    def figures(self, *arguments, **options):
        status, headers, _ = self.request(*arguments, **options)
        return status, [headers.get(name) for name in FIGURES]


def end(process):
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def start_proxy(place, kind, lines):
    """The program of this kind with these lines."""
    text = place.with_ports("\n".join(lines))
    program, folder, port = PROGRAMS[kind], place.folder, place.ports["8080"]
    environment = None
    if kind == "nginx":
        settings = f"daemon off; pid {folder}/pid; error_log stderr; worker_processes 1; events {{}}\nhttp {{ access_log off;\n{text}\n}}"
        command = [program, "-e", "stderr", "-p", str(folder), "-c", place.write("nginx.conf", settings)]
    elif kind == "caddy":
        settings = f"{{\n    admin off\n    persist_config off\n}}\n{text}"
        command = [program, "run", "--adapter", "caddyfile", "--config", place.write("Caddyfile", settings)]
        environment = {**os.environ, "HOME": str(folder)}
    elif kind == "traefik":
        settings, routes = text.split("# app.yml\n")
        settings = settings.replace("app.yml", place.write("app.yml", routes))
        command = [program, "--configfile=" + place.write("traefik.yml", settings)]
    elif kind == "haproxy":
        script = place.write("limits.lua", place.with_ports(lines[1]))
        settings = place.with_ports(lines[0]).replace("/etc/haproxy/limits.lua", script)
        command = [program, "-db", "-f", place.write("haproxy.cfg", settings)]
    else:
        command = [program, "--disable-hot-restart", "--concurrency", "1", "-c", place.write("envoy.yaml", text)]
    process = place.start(kind, command, port, env=environment)
    until = time.monotonic() + 20
    while kind == "traefik" and place.request(path="/ready", client="127.0.0.9")[0] == 404:
        if time.monotonic() > until:
            sys.exit("traefik has no routes")
        time.sleep(0.02)
    return process


RULES = blocks("")[0]
# Each has a client of its own, so that one proxy's forgeries do not spend another's units.
SECTIONS = {"nginx": "nginx", "caddy": "Caddy", "traefik": "Traefik", "envoy": "Envoy", "haproxy": "haproxy"}
# With the method and the path of a request that a rule without a limit is about, and with other spellings of the path.
FORGERIES = [
    *[[(name, "/free")] for name in ["X-Original-URI", "X-Original-URL", "X-Forwarded-Uri", "X-Rewrite-URL", "X-Envoy-Original-Path"]],
    *[[(name, "GET")] for name in ["X-Original-Method", "X-Forwarded-Method", "X-HTTP-Method-Override"]],
    [("X-Original-Method", "GET"), ("X-Original-URI", "/free"), ("X-Forwarded-Method", "GET"), ("X-Forwarded-Uri", "/free")],
    [("X-Forwarded-Uri", "/free"), ("X-Forwarded-Uri", "/free")],
    [("X_Forwarded_Uri", "/free"), ("X_Original_URI", "/free")],
    *[[("Connection", f"close, {name}")] for name in ["X-Forwarded-Uri, X-Forwarded-Method", "X-Original-URI, X-Original-Method"]],
    *[[("X-Forwarded-For", value)] for value in ["198.51.100.7", "127.0.0.1", "198.51.100.8, 127.0.0.1"]],
    [("Connection", "close, X-Forwarded-For"), ("X-Forwarded-For", "198.51.100.9")],
    [("X-Real-IP", "198.51.100.10"), ("Forwarded", "for=198.51.100.10")],
]
SPELLINGS = ["/%6Cogin", "//login", "/./login", "/x/../login", "/login/", "/login?from=/free"]


def rules_for(section):
    """The rules of the page, with the lines of the proxy's own section in the place of theirs."""
    own = [block for block in blocks(section) if block.startswith("[proxy]")]
    return RULES.replace('[proxy]\naddresses = ["127.0.0.1"]\n', own[0]) if own else RULES


def login(place, client="127.0.0.2", **options):
    return place.figures("POST", "/login", client=client, body=b"name=ada", **options)


def behind(kind):
    """What a client sees behind one proxy: a row of the table."""
    section = SECTIONS[kind]
    row = []
    with contextlib.ExitStack() as stack:
        place = Place(stack)
        service = place.start_service(rules_for(section))
        lines = [block for block in blocks(section) if not block.startswith("[proxy]")]
        start_proxy(place, kind, lines)
        App.seen.clear()
        seen = [login(place) for _ in range(6)]
        expect(f"{kind}: statuses", [status for status, _ in seen], 5 * [200] + [429])
        expect(f"{kind}: requests at the application", App.seen, 5 * [("POST", "/login", b"name=ada")])
        remaining = [figures[1] for _, figures in seen[:5]]
        # Not every proxy has a way to tell the client. None counts twice.
        expect(f"{kind}: remaining", remaining, 5 * [None] if kind == "traefik" else ["4", "3", "2", "1", "0"])
        limit, left, reset, retry = seen[5][1]
        expect(f"{kind}: figures of the refusal", (limit, left, 50 < int(retry or 0) <= 60), ("5", "0", True))
        row += [told(seen[0]), told(seen[5])]
        if kind == "traefik":
            expect("traefik: remaining, at the application", App.headers_seen["x-ratelimit-remaining"], "0")

        App.seen.clear()
        passed = []
        for headers in FORGERIES:
            status, _ = login(place, headers=headers)
            passed += [(headers, status)] if App.seen else []
            App.seen.clear()
        for path in SPELLINGS:
            with contextlib.suppress(http.client.HTTPException):
                place.request("POST", path, client="127.0.0.2", body=b"name=ada")
            passed += [path] if App.seen else []
            App.seen.clear()
        expect(f"{kind}: forgeries that passed", passed, [])
        expect(f"{kind}: another client", login(place, client="127.0.0.3")[0], 200)
        status, figures = place.figures("GET", "/free?q=1")
        expect(f"{kind}: another route", (status, figures[0]), (200, None if kind == "traefik" else "600"))
        expect(f"{kind}: the path at the application", App.seen[-1][:2], ("GET", "/free?q=1"))

        end(place.redis)
        row += [told(place.figures("GET", "/free", client="127.0.0.4")), told(login(place, client="127.0.0.4"))]
        expect(f"{kind}: a known refusal", login(place)[0], 429)
        place.redis = place.start_redis()
        end(service)
        App.seen.clear()
        row.append(told(login(place, client="127.0.0.5")))
        place.start_service(rules_for(section))
        until = time.monotonic() + 10
        while login(place, client="127.0.0.6")[0] != 200 and time.monotonic() < until:
            time.sleep(0.1)
        expect(f"{kind}: the service is back", login(place, client="127.0.0.7")[0], 200)
    return row


def told(seen):
    """A status and its figures, as the table of the page has them."""
    status, (*figures, retry) = seen
    return f"{status}{', figures' * all(figures)}{', wait' * bool(retry)}"


@contextlib.contextmanager
def changed(kind, *changes, rules=None):
    """The proxy with its lines, or the rules with theirs, changed as the page warns of."""
    with contextlib.ExitStack() as stack:
        place = Place(stack)
        place.service = place.start_service(rules or rules_for(SECTIONS[kind]))
        lines = [block for block in blocks(SECTIONS[kind]) if not block.startswith("[proxy]")]
        for old, new in changes:
            assert old in lines[0], f"{kind} has no {old!r}"
            lines[0] = lines[0].replace(old, new, 1)
        start_proxy(place, kind, lines)
        App.seen.clear()
        yield place


def traps(kind):
    """Each warning of the page is true."""
    if kind == "nginx":
        with changed(kind, rules=rules_for("nginx").replace("refusal_status = 403", "refusal_status = 429")) as place:
            expect("nginx: a status that it does not know", [login(place)[0] for _ in range(6)][4:], [200, 500])
        # As for PHP: the request goes on to another location.
        tried = ("proxy_pass http://127.0.0.1:3000;", "try_files /missing @app;")
        app = ("    location @refused {", "    location @app { proxy_pass http://127.0.0.1:3000; }\n    location @refused {")
        moved = ("        auth_request /_limits;\n", ""), ("    location / {", "    auth_request /_limits;\n    location / {")
        for name, changes, used in [("location", [], 1), ("server", moved, 2)]:
            with changed(kind, tried, app, *changes) as place:
                expect(f"nginx: auth_request in the {name}: status", login(place)[0], 200)
                peeked = post(place, "/peek", {"limit": "login", "key": "127.0.0.2"})
                expect(f"nginx: auth_request in the {name}: units of one request", peeked["used"], used)
        with changed(kind, ("        error_page 502 504 = @unasked;\n", "")) as place:
            end(place.service)
            expect("nginx: without @unasked", login(place)[0], 500)
    if kind == "caddy":
        with changed(kind) as place:
            lines = [":8080 {\n    forward_auth 127.0.0.1:8090 {\n        uri /auth\n        copy_headers X-Ratelimit-Limit\n    }\n    reverse_proxy 127.0.0.1:3000\n}"]
            place.ports["8080"] = free_port()
            start_proxy(place, kind, lines)
            expect("caddy: forward_auth", login(place), (200, [None] * 4))
            expect("caddy: copy_headers", App.headers_seen["x-ratelimit-limit"], "5")
        with changed(kind, ("{rp.header.X-Ratelimit-Limit}", "{rp.header.X-RateLimit-Limit}")) as place:
            expect("caddy: another spelling", login(place)[1][0], "{http.reverse_proxy.header.X-RateLimit-Limit}")
        with changed(kind, rules=RULES.replace("[proxy]\n", '[proxy]\nask = "original"\nrefusal_status = 429\n')) as place:
            forged = [("X-Original-Method", "GET"), ("X-Original-URI", "/free")]
            expect("caddy: the pair of another proxy", [login(place, headers=forged)[0] for _ in range(9)], 9 * [200])
    if kind == "envoy":
        with changed(kind, ("status_on_error: { code: ServiceUnavailable }", "failure_mode_allow: true")) as place:
            end(place.redis)
            expect("envoy: failure_mode_allow and a closed rule", login(place)[0], 200)
            end(place.service)
            expect("envoy: failure_mode_allow without the service", login(place)[0], 200)
        with changed(kind, ("              allowed_headers: { patterns: [{ exact: x-forwarded-for }] }\n", "")) as place:
            clients = [login(place, client=f"127.0.0.{2 + number}")[0] for number in range(6)]
            expect("envoy: without allowed_headers, all clients are one", clients, 5 * [200] + [429])


@contextlib.contextmanager
def limited_by_envoy(*changes, action=""):
    """Envoy with its rate limit filter in the place of `ext_authz`."""
    rules = RULES
    for old, new in changes:
        assert old in rules, old
        rules = rules.replace(old, new, 1)
    limits, cluster = blocks("Envoy's rate limits")
    limits = limits.rstrip() + action + "\n"
    lines = blocks("Envoy")[0]
    lines = re.sub(r"          - name: envoy.filters.http.ext_authz\n.*?(?=          - name: envoy.filters.http.router)", lambda _: limits, lines, flags=re.S)
    lines = re.sub(r"  - name: limits\n.*", lambda _: cluster, lines, flags=re.S)
    with contextlib.ExitStack() as stack:
        place = Place(stack)
        place.service = place.start_service(rules)
        start_proxy(place, "envoy", [lines])
        App.seen.clear()
        yield place


def at_a_boundary(algorithm):
    """How many of 20 requests within two seconds, 10 on each side of a boundary of fixed windows, are admitted under 10 in 2 s."""
    with limited_by_envoy(("address=100/10s", f"address=10/2s{algorithm}")) as place:
        place.figures()
        # On a busy machine, the first ten may still be running at the boundary. Then the next one counts.
        for _ in range(5):
            boundary = (time.time() // 2 + 3) * 2
            statuses, ended = [], []
            for begin in [boundary - 0.8, boundary + 0.05]:
                time.sleep(max(0, begin - time.time()))
                statuses += [place.figures()[0] for _ in range(10)]
                ended.append(time.time())
            if ended[0] < boundary and ended[1] < boundary + 1:
                break
        else:
            failures.append("envoy: the machine is too slow for the boundary")
        expect("envoy: statuses", set(statuses) - {200, 429}, set())
        return statuses.count(200)


def rate_limits():
    """Envoy's rate limit filter."""
    sliding, fixed = at_a_boundary(""), at_a_boundary(" fixed")
    print(f"at a boundary under 10 in 2 s: {sliding} with the sliding window, {fixed} with a fixed one", flush=True)
    expect("envoy: sliding", sliding, 10)
    expect("envoy: fixed", fixed, 20)

    third = '\n[[rule]]\nname = "all"\ndomain = "app"\ndescriptor = ["generic_key=all"]\nlimits = ["all=9/min"]\n'
    action = "\n              - actions: [{ generic_key: { descriptor_value: all } }]"
    with limited_by_envoy(("tenant=1000/min", "tenant=3/min"), ("[[rule]]", third[1:] + "\n[[rule]]"), action=action) as place:
        ask = lambda tenant, client="127.0.0.2": place.request(headers=[("X-Tenant", tenant)], client=client)
        statuses = [ask("ada")[0] for _ in range(20)]
        expect("envoy: three descriptors", statuses, 3 * [200] + 17 * [429])
        # The refusals took nothing: 6 of `all` are left, and 97 of the address.
        left = [ask(tenant)[0] for tenant in ["bob", "bob", "bob", "eve", "eve", "eve", "kim"]]
        expect("envoy: all or nothing", left, 6 * [200] + [429])
        peeked = post(place, "/peek", {"limit": "address", "key": "127.0.0.2"})
        expect("envoy: units of the address", (peeked.get("used"), peeked.get("remaining")), (9, 91))
        _, headers, _ = ask("ada")
        expect("envoy: figures of the limit that refuses", [headers.get(name, "").split(",")[0] for name in FIGURES[:2]], ["3", "0"])
        expect("envoy: the time to wait", 50 < int(headers.get("retry-after", 0)) <= 60, True)

    with limited_by_envoy(('descriptor = ["remote_address"]', 'descriptor = ["remote_address"]\non_failure = "closed"')) as place:
        expect("envoy: closed", place.figures()[0], 200)
        end(place.redis)
        expect("envoy: no store, closed", place.figures()[0], 429)
    with limited_by_envoy() as place:
        end(place.redis)
        expect("envoy: no store", place.figures()[0], 200)
        end(place.service)
        expect("envoy: no service", place.figures()[0], 200)


def post(place, path, question, port=None):
    connection = http.client.HTTPConnection("127.0.0.1", port or place.ports["8090"], timeout=10)
    with contextlib.closing(connection):
        connection.request("POST", path, json.dumps(question), {"content-type": "application/json"})
        return json.loads(connection.getresponse().read())


def programs():
    """The clients of the page, and two services on one Redis."""
    with contextlib.ExitStack() as stack:
        place = Place(stack)
        service = place.start_service(RULES)
        python, javascript = map(place.with_ports, blocks("From a program"))
        calls = {"python3": python + "\nfor _ in range(4): print(check('sms', 'ada')['allowed'])", "node": javascript + "\nfor (let i = 0; i < 4; i++) console.log((await check('sms', 'bob')).allowed);"}
        wrong = {"python3": python + "\ncheck('no such limit', 'ada')", "node": javascript + "\nawait check('no such limit', 'ada');"}
        options = {"python3": ["-c"], "node": ["--input-type=module", "-e"]}
        run = lambda program, text: subprocess.run([program, *options[program], text], capture_output=True, text=True)
        for program in calls:
            if subprocess.run(["which", program], capture_output=True).returncode:
                print(f"tests/service.sh: NOT run with {program}, which is missing", file=sys.stderr)
                continue
            seen = run(program, calls[program]).stdout.lower().split()
            expect(f"{program}: a client", seen, 3 * ["true"] + ["false"])
            expect(f"{program}: a mistake", run(program, wrong[program]).returncode != 0, True)
            end(service)
            expect(f"{program}: without the service", run(program, calls[program]).stdout.lower().split(), 4 * ["true"])
            service = place.start_service(RULES)

        other = place.start_service(RULES.replace(":8090", f":{place.ports['8092']}").replace(":8091", f":{place.ports['8093']}").replace("sms=3/h", "sms=1000/h"), "other")
        end(service)
        service = place.start_service(RULES.replace("sms=3/h", "sms=1000/h"))

        def ask(port):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            with contextlib.closing(connection):
                allowed = 0
                for _ in range(625):
                    connection.request("POST", "/check", '{"limit": "sms", "key": "kim"}', {"content-type": "application/json"})
                    allowed += json.loads(connection.getresponse().read())["allowed"]
                return allowed

        begun = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(16) as pool:
            allowed = list(pool.map(ask, 8 * [place.ports["8090"], place.ports["8092"]]))
        print(f"10,000 requests to two services under 1,000: {sum(allowed[::2])} and {sum(allowed[1::2])} admitted in {time.monotonic() - begun:.1f} s", flush=True)
        expect("two services: admitted", sum(allowed), 1000)
        expect("two services: both have asked", min(sum(allowed[::2]), sum(allowed[1::2])) > 0, True)


def main():
    begun = time.monotonic()
    step = lambda text: print(f"{text} (after {time.monotonic() - begun:.0f} s)", flush=True)
    for kind in SECTIONS:
        if kind in PROGRAMS:
            row = f"| {SECTIONS[kind]} | {' | '.join(behind(kind))} |"
            step(row)
            expect(f"{kind}: the table of the page has the row", row.removesuffix("|") in PAGE, True)
            traps(kind)
    if "envoy" in PROGRAMS:
        rate_limits()
        step("Envoy's rate limits")
    programs()
    step("programs")
    if failures:
        sys.exit("tests/service.sh: " + "\n".join(failures))


if __name__ == "__main__":
    main()
