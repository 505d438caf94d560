"""Talks to `trainer generate --chat` in a pseudo-terminal and prints when its output arrives.

  python3 scripts/bench/chat_terminal.py BINARY MODEL IMAGE [MAX_NEW_TOKENS]

Three turns: an image with a question, and two further questions. For each turn: seconds from the end of the line to the
first and to the last output of the answer, and the number of separate outputs between.
"""

import os
import pty
import select
import sys
import time
import tty

TURNS = ("What is shown?", "Describe it once more.", "Which colours does it have?")
PROMPT = b"> "


def read_until_prompt(terminal, timeout):
    """All output up to the next `> `, as (time, bytes)."""
    pieces, text = [], b""
    end = time.monotonic() + timeout
    while not text.endswith(PROMPT):
        if not select.select([terminal], [], [], max(0, end - time.monotonic()))[0]:
            raise SystemExit(f"no prompt after {timeout} s: {text[-300:]!r}")
        data = os.read(terminal, 65536)
        pieces.append((time.monotonic(), data))
        text += data
    return pieces


def main():
    binary, model, image, *rest = sys.argv[1:]
    tokens = rest[0] if rest else "64"
    start = time.monotonic()
    child, terminal = pty.fork()
    if child == 0:
        os.execv(binary, [binary, "generate", "--model", model, "--chat", "--max-new-tokens", tokens])
    tty.setraw(terminal)  # without an echo of the lines below
    read_until_prompt(terminal, 300)
    print(f"ready after {time.monotonic() - start:.2f} s")
    os.write(terminal, f"/image {image}\n".encode())
    read_until_prompt(terminal, 10)
    for turn in TURNS:
        begin = time.monotonic()
        os.write(terminal, f"{turn}\n".encode())
        pieces = read_until_prompt(terminal, 600)
        times = [at - begin for at, data in pieces if data.strip() not in (b"", PROMPT.strip())]
        print(f"first output {times[0]:.2f} s, last {times[-1]:.2f} s, {len(times)} outputs: {turn}")
    os.write(terminal, b"/exit\n")
    _, status, usage = os.wait4(child, 0)
    print(f"exit code {os.waitstatus_to_exitcode(status)}, peak memory {usage.ru_maxrss / 1e6:.2f} GB")


if __name__ == "__main__":
    main()
