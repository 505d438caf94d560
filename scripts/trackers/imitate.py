"""Writes the files of a run, as training does, while a process sends them to a tracker. Kills the
process again and again, and starts another one each time.

    python scripts/trackers/imitate.py RUN_DIR wandb|mlflow|swanlab STEPS KILLS
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

run, tracker, steps, kills = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
script = Path(__file__).parents[2] / "src/run/trackers/follow.py"
train = {
    "epoch": 0.1, "loss": 3.2, "grad_norm": 1.0, "skipped": False, "lr": 1e-5, "num_tokens": 500,
    "num_target_tokens": 40, "target_weight": 40.0, "num_samples": 5, "fill": 0.98,
    "step_time_s": 0.01, "data_wait_s": 0.0, "save_hold_s": 0.0, "save_s": 0.0,
    "tokens_per_s": 5000.0, "peak_memory_bytes": 123456789, "peak_device_memory_bytes": None,
    "predicted_memory_bytes": 123123123, "rejected": 0, "rejected_by_reason": {"bad_json": 1},
    "rejected_by_file": {}, "ranks": None,
}
(run / "trackers").mkdir(parents=True)
data = {"train": [], "eval": []}
config = {"optim": {"lr": 1e-5}, "data": data}
info = {"project": None, "name": "run", "config": config, "data": data, "run": {"version": "0.1.0"}}
(run / "trackers/run.json").write_text(json.dumps(info))
files = {name: open(run / f"{name}.jsonl", "a", buffering=1)
         for name in ("metrics", "eval", "predictions")}
log = open(run / "trackers/log", "a")


def start():
    command = [sys.executable, script, run, tracker]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log)


def write(name, row):
    files[name].write(json.dumps(row) + "\n")


random.seed(steps)
# Not all at the start: a client needs seconds until it sends the first row.
pause = float(os.environ.get("PAUSE_S", "4"))
next_kill, num_killed, process = time.time() + pause, 0, start()
for step in range(1, steps + 1):
    write("metrics", {"step": step} | train | {"loss": 3 / step if step % 1000 else None})
    if step % (steps // 20) == 0:
        for row in range(10):
            answer = {"row": f"rows.jsonl:{row}", "expected": "a", "answered": "b", "num_media": 0}
            write("predictions", {"step": step} | answer)
        write("eval", {"step": step, "loss": 1 / step, "accuracy": 0.5, "best": False})
    if num_killed < kills and time.time() >= next_kill:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process, num_killed = start(), num_killed + 1
        next_kill = time.time() + pause * (0.5 + random.random())
    time.sleep(pause * kills / steps * 1.1)
print(f"killed {num_killed} times; the process sends the rest")
process.stdin.write(b"finished\n")
process.stdin.close()
sys.exit(process.wait())
