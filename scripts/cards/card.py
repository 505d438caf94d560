"""Runs a config and writes a verification card: one page with what was run and measured.

  python3 scripts/cards/card.py target/cards/NAME.md --trainer target/release/trainer \
      --config configs/quickstart.yaml [--set train.max_steps=60]... [--reference PYTHON]

The card has the report of `trainer verify`, the losses and the speed of `trainer sft`, the same run
stopped by SIGTERM and resumed, the SHA-256 of the exported weights, and, with `--reference`, the
comparison with transformers by `scripts/golden/check_checkpoint.py`. PYTHON is the interpreter of an
environment with `scripts/golden/requirements.txt`. Runs in the root of the repository and needs no
packages itself. Fails (exit code 1) if a comparison fails; the card is written in any case.
"""

import argparse
import datetime
import hashlib
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STOPPED = 75


class Card:
    def __init__(self, args, folder):
        self.args, self.folder = args, Path(folder)
        self.lines, self.failures = [], []

    def command(self, name, *arguments, sets=(), config=True):
        """The arguments of a command, and the text of it without temporary paths."""
        chosen = ["--config", self.args.config] if config else []
        for value in [*(self.args.set if config else []), *sets]:
            chosen += ["--set", value]
        command = [self.args.trainer, name, *chosen, *arguments]
        text = shlex.join(["trainer", *command[1:]]).replace(str(self.folder), "OUT")
        return command, text

    def run(self, name, *arguments, sets=(), config=True, code=0):
        command, text = self.command(name, *arguments, sets=sets, config=config)
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode != code:
            self.failures.append(f"`{text}`: exit code {result.returncode}")
            print(result.stderr, file=sys.stderr)
        return result.stdout, text

    def add(self, *lines):
        self.lines += lines

    def check(self, holds, text):
        self.add(f"- {'passed' if holds else '**failed**'}: {text}")
        if not holds:
            self.failures.append(text)

    def verify(self):
        out, text = self.run("verify", "--rows", str(self.args.rows))
        self.add("## Verification", "", f"`{text}`", "", "```text", out.rstrip(), "```", "")

    def train(self, name):
        out = self.folder / name
        _, text = self.run("sft", sets=[f"output_dir={out}"])
        return out, text

    def stopped(self):
        """The same run, stopped by SIGTERM after half of the steps, and resumed."""
        out = self.folder / "resumed"
        command, text = self.command("sft", sets=[f"output_dir={out}"])
        half = metrics(self.folder / "whole")[-1]["step"] // 2
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while run.poll() is None and last_step(out) < half:
            time.sleep(0.02)
        if run.poll() is None:
            run.send_signal(signal.SIGTERM)
        code = run.wait()
        stopped = last_step(out)
        if code == STOPPED:
            self.run("sft", sets=[f"output_dir={out}"])
        return out, stopped, code


def metrics(out):
    """The rows of the steps."""
    path = out / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows = []
    for line in lines:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:  # a line that is being written
            break
    return [row for row in rows if "grad_norm" in row]


def last_step(out):
    rows = metrics(out)
    return rows[-1]["step"] if rows else 0


def weights(out):
    """SHA-256 of the exported weight files."""
    files = sorted((out / "final").glob("*.safetensors"))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def curve(card, rows):
    chosen = sorted({0, *(len(rows) * i // 5 for i in range(1, 5)), len(rows) - 1})
    card.add("| step | loss | gradient norm |", "|---|---|---|")
    for row in (rows[at] for at in chosen):
        card.add(f"| {row['step']} | {row['loss']:.6f} | {row['grad_norm']:.4f} |")
    speeds = sorted(row["tokens_per_s"] for row in rows)
    card.add("", f"Median speed: {speeds[len(speeds) // 2]:,.0f} tokens/s.", "")


def compare_with_transformers(card, out):
    """Scores rows of `--reference-rows` with the exported folder, here and with transformers."""
    args, model = card.args, out / "final"
    if (model / "adapter_config.json").exists():
        merged = card.folder / "merged"
        card.run("export", "--adapter", str(model), "--merge", "--out", str(merged), config=False)
        model = merged
    scores = card.folder / "scores.jsonl"
    rows = args.reference_rows
    sets = [f"data.eval=[{{path: {rows}}}]", "model.precision=f32"]
    card.run("eval", "--checkpoint", str(model), "--per-sample", str(scores), sets=sets)
    checker = "scripts/golden/check_checkpoint.py"
    arguments = [checker, str(model), rows, "--num", "32", "--expect", str(scores)]
    result = subprocess.run([args.reference, *arguments], capture_output=True, text=True)
    text = shlex.join(["python", *arguments]).replace(str(card.folder), "OUT")
    card.add("## transformers", "", f"`{text}`", "")
    print(result.stderr, end="", file=sys.stderr)
    last = (result.stdout.splitlines() or ["no result"])[-1]
    card.check(result.returncode == 0, "the exported weights load without a warning, and the losses of "
               f"the rows agree to 1e-5: `{last}`")
    card.add("")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("card", type=Path)
    parser.add_argument("--trainer", default="target/release/trainer")
    parser.add_argument("--config", required=True)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--rows", type=int, default=16, help="rows of `verify`")
    parser.add_argument("--reference", help="Python interpreter with transformers")
    parser.add_argument("--reference-rows", default="data/quickstart/digits_test.jsonl")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        card = Card(args, folder)
        version = subprocess.run([args.trainer, "--version"], capture_output=True, text=True).stdout.strip()
        # The script's own command, without names of this machine's files.
        today = datetime.date.today().isoformat()
        card.add(f"# {args.card.stem}", "", f"{version}, {today}, {platform.machine()}, {os.cpu_count()} cores. "
                 "Written by `scripts/cards/card.py`.", "")
        card.verify()
        whole, text = card.train("whole")
        rows = metrics(whole)
        card.add("## Training", "", f"`{text}`", "")
        curve(card, rows)
        resumed, stopped, code = card.stopped()
        card.add("## Stop and resume", "", f"The same command, stopped by SIGTERM after step {stopped} of "
                 f"{rows[-1]['step']} (exit code {code}), and run again:", "")
        losses = [[(row["step"], row["loss"], row["grad_norm"]) for row in metrics(out)] for out in (whole, resumed)]
        card.check(code == STOPPED, "the first run stopped before its last step")
        card.check(losses[0] == losses[1], "losses and gradient norms of all steps are equal to the bit")
        card.check(weights(whole) == weights(resumed), "the exported weights are equal to the bit")
        card.add("", "## Exported weights", "", "| file | SHA-256 |", "|---|---|")
        card.add(*(f"| `{name}` | `{digest}` |" for name, digest in weights(whole).items()), "")
        if args.reference:
            compare_with_transformers(card, whole)
        args.card.parent.mkdir(parents=True, exist_ok=True)
        args.card.write_text("\n".join(card.lines).rstrip() + "\n", encoding="utf-8")
        for failure in card.failures:
            print(f"error: {failure}", file=sys.stderr)
        sys.exit(1 if card.failures else 0)


if __name__ == "__main__":
    main()
