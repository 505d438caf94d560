"""Writes the results of scripts/cuda/first_run.sh as a Markdown page to stdout:
`gpu_page.py FOLDER TRAINER`. Only what the folder has is in the page, so that it can be made after
any part. What had too little time is "not finished"; it has not failed."""
import datetime
import os
import subprocess
import sys
from pathlib import Path

import gpu_table

PARTS = {"tests": "1: tests", "sanitizers": "2: sanitizers", "ops": "3: ops", "steps": "4: steps", "start": "4: start", "torch": "4: PyTorch's steps"}


def text(path):
    return path.read_text().strip() if path.exists() else ""


def main():
    out, trainer = Path(sys.argv[1]), sys.argv[2]
    gpu = text(out / "gpu.txt") or "no GPU: emulated kernels on the CPU"
    version = subprocess.run([trainer, "--version"], capture_output=True, text=True).stdout.strip() or "does not start"
    print(f"# {gpu.split(',')[0]}, {datetime.date.today()}\n")
    print(f"GPU, driver and memory: {gpu}. Program: {version}. CPU cores: {os.cpu_count()}.")
    print("Command: `scripts/cuda/first_run.sh`.\n")
    print("| call: part | result |\n|---|---|")
    for name, title in PARTS.items():
        print(f"| {title} | {text(out / f'{name}.status') or 'not run'} |")
    shown = ("ok:", "FAILED", "not finished:", "no time left", "---", "step ", "worst of", "peak_", "test result", "all parts")
    for name, title in (("tests", "Tests"), ("sanitizers", "Sanitizers")):
        lines = text(out / f"{name}.log").splitlines()
        if lines:
            print(f"\n## {title}\n\n```text")
            print("\n".join(line for line in lines if line.startswith(shown) or " tests passed, " in line or line.endswith("skipped")))
            print("```")
    ops, torch_ops, steps = (gpu_table.read(out / f"{name}.jsonl") for name in ("ops", "torch_ops", "step"))
    torch = [row for path in sorted(out.glob("torch-*.jsonl")) for row in gpu_table.read(path)]
    if steps or torch:
        print("\n## Steps")
        gpu_table.step_tables(steps, torch)
    if ops:
        print("\n## Ops")
        gpu_table.op_tables(ops, torch_ops)
    start = gpu_table.read(out / "start.jsonl")
    if start:
        print("\n## Start\n\n| from the start of `trainer sft` to the end of its first step | seconds |\n|---|---|")
        for row in start:
            print(f"| {row['name']} | {row.get('seconds', row.get('error'))} |")
    gpu_table.problems(ops + torch_ops + steps + torch + start)


if __name__ == "__main__":
    main()
