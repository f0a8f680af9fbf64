"""Processes that end with the checks, also when a signal ends those."""

import os
import signal
import subprocess

started = []


def start(command, **settings):
    process = subprocess.Popen(command, start_new_session=True, **settings)
    started.append(process)
    return process


def end_all(*_):
    for process in started:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    # Without waiting for the threads of the checks.
    os._exit(1)


for name in ("SIGHUP", "SIGINT", "SIGTERM"):
    signal.signal(getattr(signal, name), end_all)
