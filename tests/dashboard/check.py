"""Runs the example `metrics` under load beside Redis, redis_exporter and Prometheus, and sends every query of its dashboard.

    python3 tests/dashboard/check.py EXAMPLE PROMETHEUS PROMTOOL REDIS_EXPORTER
"""

import contextlib
import http.client
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

# Method, path, tenant, body. Each limit refuses some of them, and each kind of rejection that a client can cause is here.
REQUESTS = [
    ("GET", "/api/items", "ada", None),
    ("GET", "/api/items", "bob", None),
    ("GET", "/api/items", "eve", None),
    ("GET", "/api/items", None, None),
    ("GET", "/api/health", None, None),
    ("POST", "/login", None, None),
    ("GET", "/search?pages=2", "ada", None),
    ("GET", "/search?pages=99", "ada", None),
    ("POST", "/newsletter", None, "200"),
]
# While Redis stops, these alerts have to notice it, and the requests above cause the last one.
NOTICED = {"RateLimitsOpen", "RateLimitsClosed", "RateLimitsLocal", "RateLimitBreakerOpen", "RateLimitQueueFull"}
NOTICED |= {"RateLimitNeverFits"}


def fail(text):
    sys.exit(f"tests/dashboard.sh: {text}")


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def get(url):
    with urllib.request.urlopen(url, timeout=10) as response:
        return response.read().decode()


def wait_for(what, is_there):
    for _ in range(150):
        with contextlib.suppress(OSError):
            if is_there():
                return
        time.sleep(0.1)
    fail(f"{what} did not start within 15 s")


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
    while not end.is_set():
        for method, path, tenant, body in REQUESTS:
            connection.request(method, path, body, {"x-tenant": tenant} if tenant else {})
            connection.getresponse().read()
            time.sleep(0.002)


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


def main(servers):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
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
    # Redis hangs, and 20,000 checks arrive at once, more than the queue takes.
    redis.send_signal(signal.SIGSTOP)
    urllib.request.urlopen(f"{address}/newsletter", b"20000", timeout=20).close()
    time.sleep(3)
    redis.send_signal(signal.SIGCONT)
    time.sleep(3)

    check_metrics(get(f"{address}/metrics"))
    # The alerts of the outage hold on for two minutes, except the one of the breaker.
    noticed = {series["metric"]["alertname"] for series in ask("query", query="count_over_time(ALERTS[1m])")["result"]}
    errors = [f"the alert {name} has not noticed the outage" for name in NOTICED - noticed]
    for group in ask("rules")["groups"]:
        errors += [f"{rule['name']}: {rule['lastError']}" for rule in group["rules"] if rule["health"] != "ok"]
    for alert in ask("alerts")["alerts"]:
        errors += [text for text in alert["annotations"].values() if "<error" in text]

    exported = set(ask("label/__name__/values"))
    files = (FOLDER / "dashboard.json").read_text() + (FOLDER / "alerts.yml").read_text()
    named = set(re.findall(r"\b(?:rate_limit|redis(?!_exporter))_\w+", files))
    errors += [f"{name} is not exported" for name in sorted(named - exported)]

    asked = 0
    for title, query, legend in queries():
        # Without its default value, so that a metric that is missing is no 0.
        query = query.removesuffix(" or vector(0)")
        for variable, value in VARIABLES.items():
            query = query.replace(variable, value)
        try:
            result = ask("query", query=query)["result"]
        except urllib.error.HTTPError as error:
            errors.append(f"{title}: {query}: {error.read().decode()}")
            continue
        if not any(series["value"][1] != "NaN" for series in result):
            errors.append(f"{title}: no data from {query}")
        for label in re.findall(r"{{(\w+)}}", legend):
            if not any(label in series["metric"] for series in result):
                errors.append(f"{title}: no label {label} from {query}")
        asked += 1
    if errors:
        fail("\n".join(["", *errors]))
    print(f"{asked} queries of the dashboard return data, {len(named)} named metrics are exported, {len(noticed)} alerts noticed")


with Servers() as running:
    main(running)
