#!/usr/bin/env bash
# Trains 2,000 steps of configs/counting.yaml and of the quickstart with each lean optimizer, the
# quickstart with SEEDS seeds, and prints a table: the mean loss of the last 100
# steps and its difference from AdamW in f32, for the quickstart as the mean over the seeds with its
# standard error, and the share of rows that are answered exactly. Fails if a loss of counting is more
# than 1 % above that of AdamW in f32, or if the share of exact answers is more than 1.5 points (3 of 200
# rows) below it. The losses of the quickstart are printed only: after 2,000 steps they are so close to
# zero that two seeds of AdamW in f32 differ by much more than 1 %. Takes 5 minutes per seed.
#   scripts/bench/optimizers_2000.sh
# TRAINER=FILE   another binary.   STEPS=2000   SEEDS=3
# KEEP=DIR   keeps the runs there, and uses those that are complete.
set -euo pipefail
cd "$(dirname "$0")/../.."
trainer=${TRAINER:-$PWD/target/release/trainer} steps=${STEPS:-2000} seeds=${SEEDS:-3} python=${PYTHON:-python3}
work=${KEEP:-$(mktemp -d)}
[ -n "${KEEP:-}" ] || trap 'rm -rf "$work"' EXIT
mkdir -p "$work"
train() { # run, config, settings..
  local output=$work/$1 config=$2 settings=() setting
  shift 2
  [ ! -e "$output/final" ] || return 0
  rm -rf "$output"
  for setting in "output_dir=$output" "train.max_steps=$steps" checkpoint.every_steps=0 eval.every_steps=0 eval.show=0 "$@"; do
    settings+=(--set "$setting")
  done
  "$trainer" sft --config "configs/$config.yaml" "${settings[@]}" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
}
for line in f32 "8bit optim.kind=adamw_8bit" "masters model.precision=bf16" \
  "bf16 model.precision=bf16 optim.master=none" \
  "8bit_bf16 model.precision=bf16 optim.master=none optim.kind=adamw_8bit"; do
  read -r -a parts <<<"$line"
  train "${parts[0]}-counting" counting "${parts[@]:1}"
  for ((seed = 42; seed < 42 + seeds; seed++)); do
    train "${parts[0]}-quickstart-$seed" quickstart "seed=$seed" "${parts[@]:1}"
  done
done
"$python" - "$work" "$seeds" <<'PY'
import json, statistics, sys
from pathlib import Path
work, seeds = Path(sys.argv[1]), range(42, 42 + int(sys.argv[2]))
names = {"f32": "AdamW, f32", "8bit": "`adamw_8bit`, f32", "masters": "AdamW, bf16 with f32 masters",
         "bf16": "AdamW, bf16, `master: none`", "8bit_bf16": "`adamw_8bit`, bf16, `master: none`"}
def rows(run, file):
    return [json.loads(line) for line in (work / run / file).open()]
def loss(run):
    return statistics.mean(row["loss"] for row in rows(run, "metrics.jsonl")[-100:])
counting = {key: loss(f"{key}-counting") for key in names}
quickstart = {key: [loss(f"{key}-quickstart-{seed}") for seed in seeds] for key in names}
exact = {key: statistics.mean(rows(f"{key}-quickstart-{seed}", "eval.jsonl")[-1]["accuracy"] for seed in seeds) for key in names}
print("| optimizer | counting | against f32 | quickstart | against f32 | exact |")
print("|---|---|---|---|---|---|")
failed = []
for key, name in names.items():
    off = counting[key] / counting["f32"] - 1
    of_seeds = [a / b - 1 for a, b in zip(quickstart[key], quickstart["f32"])]
    mean = statistics.mean(of_seeds)
    error = statistics.stdev(of_seeds) / len(of_seeds) ** 0.5 if len(of_seeds) > 1 else 0.0
    differences = ("", "") if key == "f32" else (f"{off:+.1%}", f"{mean:+.1%} ± {error:.1%}")
    print(f"| {name} | {counting[key]:.5f} | {differences[0]} | {statistics.mean(quickstart[key]):.6f} | {differences[1]} | {exact[key]:.1%} |")
    if off > 0.01 or exact[key] < exact["f32"] - 0.0151:
        failed.append(name)
base = quickstart["f32"]
print(f"AdamW in f32 over the seeds of the quickstart: {min(base):.6f} to {max(base):.6f}, "
      f"{min(base) / statistics.mean(base) - 1:+.1%} to {max(base) / statistics.mean(base) - 1:+.1%} of the mean")
if failed:
    print("FAILED:", ", ".join(failed))
sys.exit(bool(failed))
PY
