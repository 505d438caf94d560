"""Runs one command under limits and prints one line: exit code, seconds, peak memory in MiB.

    python3 scripts/reliability/limited.py SECONDS COMMAND..

The exit code is 128 plus the number of a signal that ended the command, and 124 after SECONDS.
"""

import os
import resource
import subprocess
import sys
import time


# Protects the machine from a command that allocates without end.
ADDRESS_SPACE = 4 << 30


def limit():
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))


def run(seconds, command, **options):
    """Exit code, seconds and peak resident memory in MiB of `command`."""
    started = time.monotonic()
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=limit, **options)
    pause = 0.002
    while True:
        pid, status, usage = os.wait4(child.pid, os.WNOHANG)
        if pid:
            break
        if time.monotonic() - started > seconds:
            child.kill()
            _, _, usage = os.wait4(child.pid, 0)
            status = None
            break
        time.sleep(pause)
        pause = min(pause * 1.5, 0.05)
    code = 124 if status is None else os.waitstatus_to_exitcode(status)
    child.returncode = code
    return code if code >= 0 else 128 - code, time.monotonic() - started, usage.ru_maxrss // 1024


if __name__ == "__main__":
    code, took, peak = run(float(sys.argv[1]), sys.argv[2:])
    print(code, f"{took:.2f}", peak)
