"""Chromium, driven through chromedriver by the W3C WebDriver protocol. Needs nothing but Python."""

import base64
import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request

from processes import start

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


# Seconds. On a machine that is not busy, a question takes no longer than this.
PAUSE, QUESTION = 0.02, 0.01


def wait_for(what, condition, seconds=10.0):
    """The first true value of `condition`, which is asked every 20 ms. On a busy machine a question may take half a second, since it goes through
    three processes. So the bound leaves out by how much questions and pauses are late."""
    counted = 0.0
    while True:
        asked = time.monotonic()
        value = condition()
        if value:
            return value
        counted += PAUSE + min(time.monotonic() - asked, QUESTION)
        if counted > seconds:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(PAUSE)


class Driver:
    """A chromedriver on a free port, until it is closed."""

    def __init__(self):
        self.port = free_port()
        command = [os.environ.get("CHROMEDRIVER", "chromedriver"), f"--port={self.port}", "--log-level=SEVERE"]
        self.process = start(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.browsers = []
        wait_for("chromedriver", self.is_ready)

    def is_ready(self):
        try:
            return self.send("GET", "/status")["ready"]
        except OSError:
            return False

    def send(self, method, path, body=None):
        data = None if method == "GET" else json.dumps(body or {}).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return json.load(reply)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{path}: {json.load(error)['value']['message']}") from None

    def browser(self, *arguments):
        browser = Browser(self, arguments)
        self.browsers.append(browser)
        return browser

    def close(self):
        for browser in self.browsers:
            browser.close()
        self.process.terminate()
        self.process.wait()


class Browser:
    """A window of Chromium."""

    def __init__(self, driver, arguments):
        options = {"args": ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage", *arguments]}
        if hasattr(os, "geteuid") and os.geteuid() == 0:
            # Chromium's sandbox refuses root. The browser opens the example's page alone.
            options["args"].append("--no-sandbox")
        if os.environ.get("CHROMIUM"):
            options["binary"] = os.environ["CHROMIUM"]
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        reply = driver.send("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self.driver, self.path, self.is_open = driver, f"/session/{reply['sessionId']}", True

    def send(self, method, path, body=None):
        return self.driver.send(method, self.path + path, body)

    def close(self):
        if self.is_open:
            self.is_open = False
            self.send("DELETE", "")

    def open(self, url):
        self.send("POST", "/url", {"url": url})

    def run(self, script, *arguments):
        """The value of a script that may `return`, and may `await`."""
        script = f"const done = arguments[arguments.length - 1]; (async (...arguments) => {{ {script} }})(...arguments).then(done)"
        return self.send("POST", "/execute/async", {"script": script, "args": list(arguments)})

    def cdp(self, command, **parameters):
        return self.send("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def click(self, selector):
        found = self.send("POST", "/element", {"using": "css selector", "value": selector})
        self.send("POST", f"/element/{found[ELEMENT]}/click")

    def press(self, *keys):
        """Presses keys on the focused element, one after the other."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self.send("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def text(self, selector):
        return self.run("return document.querySelector(arguments[0]).textContent", selector)

    def errors(self):
        """The errors and warnings on the console since the last call."""
        entries = self.send("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]

    def resize(self, width, height, scale=1, is_phone=False):
        self.cdp("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=is_phone)

    def prefer(self, **features):
        """Media features, such as `prefers_color_scheme="dark"`."""
        features = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.cdp("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, selector=None):
        """Of what is in sight, or of the first element of a selector."""
        element = ""
        if selector:
            element = f"/element/{self.send('POST', '/element', {'using': 'css selector', 'value': selector})[ELEMENT]}"
        return base64.b64decode(self.send("GET", f"{element}/screenshot"))
