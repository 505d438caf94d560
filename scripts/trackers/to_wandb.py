"""Sends the metrics of runs to Weights & Biases, through the public functions of its package.

    pip install wandb
    python scripts/trackers/to_wandb.py PROJECT runs/a runs/b

With WANDB_MODE=offline, writes a folder for `wandb sync` instead.
"""

import json
import sys
from pathlib import Path

import wandb


def rows(path, kind):
    for line in path.read_text().splitlines() if path.exists() else []:
        row = json.loads(line)
        left_out = ("step", "eval", "rejected_by_file")
        kept = {k: v for k, v in row.items() if v is not None and k not in left_out}
        yield {"step": row["step"]} | {f"{kind}/{key}": value for key, value in kept.items()}


def main(project, runs):
    for folder in map(Path, runs):
        run = wandb.init(project=project, name=folder.name, config={"run": str(folder)})
        run.define_metric("*", step_metric="step")
        found = [*rows(folder / "metrics.jsonl", "train"), *rows(folder / "eval.jsonl", "eval")]
        for row in sorted(found, key=lambda row: row["step"]):
            run.log(row)
        run.finish()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
