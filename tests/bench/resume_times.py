"""Runs `trainer sft`, which resumes, and prints after how many seconds its data and its model were ready and how long the
first step waited for its rows. Log lines have the time in seconds only, so this program times their arrival.

  python tests/bench/resume_times.py RUN_DIR COMMAND..
"""
import json, re, subprocess, sys, time

run, command = sys.argv[1], sys.argv[2:]
begin = time.perf_counter()
process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
lines = [(time.perf_counter() - begin, line) for line in process.stderr]
if process.wait():
    sys.exit("".join(line for _, line in lines))
at = {name: next(seconds for seconds, line in lines if re.search(rf"INFO {name} ", line)) for name in ("data", "model")}
with open(f"{run}/metrics.jsonl") as rows:
    wait = json.loads(rows.readlines()[-1])["data_wait_s"]
print(f"resumed: data open after {at['data']:.2f} s, model after {at['model']:.2f} s, first step waited {wait:.3f} s for its rows")
