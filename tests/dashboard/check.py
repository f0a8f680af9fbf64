"""Runs the example `metrics` under load beside Redis, redis_exporter and Prometheus, and sends every query of its dashboard.

    python3 tests/dashboard/check.py EXAMPLE PROMETHEUS PROMTOOL REDIS_EXPORTER
"""

import contextlib
import http.client
import itertools
import json
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

EXAMPLE, PROMETHEUS, PROMTOOL, REDIS_EXPORTER = sys.argv[1:]
FOLDER = pathlib.Path(__file__).parents[2] / "examples/metrics"
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text())
VARIABLES = {"$__rate_interval": "30s", "$job": "example", "$layer": ".*", "$deadline": "0.05"}

# Method, path, tenant. Each limit refuses some of them, and each kind of rejection that a client can cause is here.
REQUESTS = [
    ("GET", "/api/items", "ada"),
    ("GET", "/api/items", "bob"),
    ("GET", "/api/items", "eve"),
    ("GET", "/api/items", None),
    ("GET", "/api/health", None),
    ("POST", "/login", None),
    ("GET", "/search?pages=2", "ada"),
    ("GET", "/search?pages=99", "ada"),
    *3 * [("GET", "/status", None)],
]
# These alerts have to notice that Redis stops. The requests above cause the last one.
NOTICED = {"RateLimitsOpen", "RateLimitsClosed", "RateLimitsLocal", "RateLimitBreakerOpen", "RateLimitQueueFull"}
NOTICED.add("RateLimitNeverFits")


def fail(text):
    sys.exit(f"tests/dashboard.sh: {text}")


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def get(url):
    with urllib.request.urlopen(url, timeout=10) as response:
        return response.read().decode()


def wait_for(server, is_there):
    for _ in range(150):
        with contextlib.suppress(OSError):
            if is_there():
                return
        time.sleep(0.1)
    fail(f"{server} did not start within 15 s")


class Servers(contextlib.ExitStack):
    """Ends all that it has started, in any case."""

    def start(self, *command, **settings):
        log = self.enter_context(tempfile.TemporaryFile())
        process = subprocess.Popen(command, **{"stdout": log, "stderr": log, **settings})
        self.callback(process.wait)
        self.callback(process.kill)
        return process


def load(port, end):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    for number in itertools.takewhile(lambda _: not end.is_set(), itertools.count()):
        for method, path, tenant in REQUESTS:
            connection.request(method, path, headers={"x-tenant": tenant} if tenant else {})
            connection.getresponse().read()
            time.sleep(0.01)
        # A client whose refusal the server does not know meets the failure mode.
        address = (f"127.1.{number // 250 % 250}.{number % 250 + 1}", 0)
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, 20, source_address=address)) as client:
            client.request("POST", "/login")
            client.getresponse().read()


def check_metrics(exposition):
    lint = subprocess.run([PROMTOOL, "check", "metrics"], input=exposition, text=True, capture_output=True)
    if lint.returncode or lint.stdout or lint.stderr:
        fail(f"promtool check metrics: {lint.stdout}{lint.stderr}")


def queries():
    """Title, query and legend of each panel, and of each variable that asks for labels."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"], target["legendFormat"]
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            series, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["definition"]).groups()
            yield f"variable {variable['name']}", f"group by ({label}) ({series})", f"{{{{{label}}}}}"


def check_rules(ask):
    # The alerts of the outage hold on for two minutes, except the one of the breaker.
    noticed = {series["metric"]["alertname"] for series in ask("query", query="count_over_time(ALERTS[1m])")["result"]}
    yield from (f"the alert {name} has not noticed the outage" for name in NOTICED - noticed)
    for group in ask("rules")["groups"]:
        yield from (f"{rule['name']}: {rule['lastError']}" for rule in group["rules"] if rule["health"] == "err")
    for alert in ask("alerts")["alerts"]:
        yield from (text for text in alert["annotations"].values() if "<error" in text)


def check_names(ask):
    files = (FOLDER / "dashboard.json").read_text() + (FOLDER / "alerts.yml").read_text()
    named = set(re.findall(r"\b(?:rate_limit|redis(?!_exporter))_\w+", files))
    yield from (f"{name} is not exported" for name in named - set(ask("label/__name__/values")))


def check_queries(ask):
    for title, query, legend in queries():
        # Without its default value, so that a metric that is missing is no 0.
        query = query.removesuffix(" or vector(0)")
        for variable, value in VARIABLES.items():
            query = query.replace(variable, value)
        try:
            result = ask("query", query=query)["result"]
        except urllib.error.HTTPError as error:
            yield f"{title}: {query}: {error.read().decode()}"
            continue
        if not any(series["value"][1] != "NaN" for series in result):
            yield f"{title}: no data from {query}"
        for label in re.findall(r"{{(\w+)}}", legend):
            if not any(label in series["metric"] for series in result):
                yield f"{title}: no label {label} from {query}"


def main(servers):
    for name in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(name, lambda *_: sys.exit(1))
    folder = pathlib.Path(servers.enter_context(tempfile.TemporaryDirectory()))
    redis_port, exporter_port, prometheus_port = free_port(), free_port(), free_port()
    redis = servers.start("redis-server", "--port", str(redis_port), "--save", "", "--maxmemory", "64mb")
    servers.start(
        REDIS_EXPORTER, f"-redis.addr=redis://127.0.0.1:{redis_port}", f"-web.listen-address=127.0.0.1:{exporter_port}"
    )
    environment = {"PORT": "0", "REDIS_URL": f"redis://127.0.0.1:{redis_port}/"}
    example = servers.start(EXAMPLE, env=environment, stdout=subprocess.PIPE)
    address = example.stdout.readline().decode().strip().removeprefix("listening on ")
    if not address:
        fail("the example did not start")
    port = urllib.parse.urlsplit(address).port

    settings = (FOLDER / "prometheus.yml").read_text().replace(" 5s", " 1s").replace("alerts.yml", f"{FOLDER}/alerts.yml")
    settings = settings.replace("host.docker.internal:3000", f"127.0.0.1:{port}")
    (folder / "prometheus.yml").write_text(settings.replace("redis-exporter:9121", f"127.0.0.1:{exporter_port}"))
    prometheus = f"http://127.0.0.1:{prometheus_port}"
    servers.start(
        PROMETHEUS,
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{prometheus_port}",
    )
    wait_for("Prometheus", lambda: get(f"{prometheus}/-/ready"))

    def ask(path, **arguments):
        return json.loads(get(f"{prometheus}/api/v1/{path}?{urllib.parse.urlencode(arguments)}"))["data"]

    wait_for("a target", lambda: all(target["health"] == "up" for target in ask("targets")["activeTargets"]))

    end = threading.Event()
    clients = [threading.Thread(target=load, args=(port, end)) for _ in range(4)]
    servers.callback(lambda: [client.join() for client in clients])
    servers.callback(end.set)
    [client.start() for client in clients]
    time.sleep(3)
    # Redis hangs, so that the breaker opens. Then 70,000 checks arrive at once, more than the queue takes.
    redis.send_signal(signal.SIGSTOP)
    time.sleep(4)
    with contextlib.suppress(OSError):
        urllib.request.urlopen(f"{address}/newsletter", b"70000", timeout=4)
    redis.send_signal(signal.SIGCONT)
    check_metrics(get(f"{address}/metrics"))

    # A rate needs two scrapes, and a busy machine misses some.
    for _ in range(15):
        errors = list(check_rules(ask)) + list(check_names(ask)) + list(check_queries(ask))
        if not errors:
            print(f"{len(list(queries()))} queries of the dashboard return data, and {len(NOTICED)} alerts notice the outage")
            return
        time.sleep(1)
    fail("\n".join(["", *errors]))


with Servers() as running:
    main(running)
