"""Runs one command under limits and prints one line: exit code, seconds, peak memory in MiB.

    python3 scripts/reliability/limited.py SECONDS COMMAND..

The exit code is 128 plus the number of a signal that ended the command, and 124 after SECONDS.
"""

import multiprocessing
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


class Starter:
    """Starts commands from a process of its own.

    The peak memory of a child begins with that of the process that forked it, so a large script would
    be measured in place of the command. Create this before the script allocates memory.
    """

    def __init__(self):
        context = multiprocessing.get_context("fork")
        self.pipe, other = context.Pipe()
        context.Process(target=Starter.serve, args=(other,), daemon=True).start()

    @staticmethod
    def serve(pipe):
        while True:
            try:
                seconds, command, out, err = pipe.recv()
            except EOFError:
                return
            with open(out, "wb") as out, open(err, "wb") as err:
                pipe.send(run(seconds, command, stdout=out, stderr=err))

    def run(self, seconds, command, out, err):
        """`run` with the output in the files `out` and `err`."""
        self.pipe.send((seconds, [str(part) for part in command], str(out), str(err)))
        return self.pipe.recv()


if __name__ == "__main__":
    code, took, peak = run(float(sys.argv[1]), sys.argv[2:])
    print(code, f"{took:.2f}", peak)
