"""The examples `server` and `streams`, and redis-server, run for one check."""

import os
import pathlib
import signal
import subprocess
import tempfile

from browser import free_port
from processes import start

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "debug" / "examples"


class Program:
    """A process that ends with its `with` block."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()

    def signal(self, name):
        self.process.send_signal(getattr(signal, name))


class Server(Program):
    example = "server"

    def __init__(self, port=0, **settings):
        known = ("REDIS_URL", "TRUSTED_PROXIES", "RATE_LIMIT_SECRET", "HELLO", "DEADLINE")
        environment = {name: value for name, value in os.environ.items() if name not in known}
        environment |= {"PORT": str(port), **settings}
        self.process = start([EXAMPLES / self.example], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.url = self.process.stdout.readline().split()[-1]
        self.port = int(self.url.rsplit(":", 1)[1])

    def __exit__(self, *error):
        super().__exit__(*error)
        self.process.stdout.close()


class Streams(Server):
    example = "streams"


class Redis(Program):
    def __init__(self):
        self.folder = tempfile.TemporaryDirectory()
        program = os.environ.get("REDIS_SERVER", "redis-server")
        # Another program may take the port before the server does. Then the server ends, and gets another port.
        for _ in range(5):
            self.port = free_port()
            self.url = f"redis://127.0.0.1:{self.port}/"
            options = ["--port", str(self.port), "--save", "", "--dir", self.folder.name]
            self.process = start([program, *options], text=True, stdout=subprocess.PIPE)
            if any("eady to accept" in line for line in self.process.stdout):
                return
        raise AssertionError("redis-server does not start")

    def __exit__(self, *error):
        self.signal("SIGCONT")
        super().__exit__(*error)
        self.process.stdout.close()
        self.folder.cleanup()
