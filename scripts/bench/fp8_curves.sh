#!/usr/bin/env bash
# Compares training with `model.matmul: fp8` with training in bf16: the quickstart, and the text model
# of 26 M parameters on the text of docs/*.md. Prints the mean loss of the last quarter of the steps
# of both runs and their difference; for the quickstart also the share of rows that are answered
# exactly. Fails if a mean loss differs by more than 1 %. After many steps the losses of the quickstart
# are so close to zero that 1 % of them is noise: from 1,000 steps on, the exact answers decide instead
# (at most 1.5 points, 3 of 200 rows, below bf16).
#   scripts/bench/fp8_curves.sh
# TRAINER=FILE   another binary.   QUICKSTART_STEPS=400   TEXT_STEPS=200
set -euo pipefail
cd "$(dirname "$0")/../.."
trainer=${TRAINER:-$PWD/target/release/trainer} python=${PYTHON:-python3}
quickstart=${QUICKSTART_STEPS:-400} text=${TEXT_STEPS:-200}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
scripts/bench/text_model.sh "$work/model"
cat docs/*.md >"$work/docs.txt"
cat >"$work/text.yaml" <<YAML
output_dir: $work/run
device: cpu
model: {path: $work/model, weights: random}
data:
  train: [{path: $work/docs.txt, corpus: {sampling: sliding_window, length: 255, stride: 255}}]
  packing: true
  packing_length: 1024
optim: {lr: 1.0e-3, schedule: cosine, warmup_steps: 10}
YAML
run() { # curve, config, steps, matmul
  "$trainer" sft --config "$2" --set "output_dir=$work/$1-$4" --set "train.max_steps=$3" \
    --set model.precision=bf16 --set "model.matmul=$4" --set checkpoint.every_steps=0 \
    --set eval.every_steps=0 --set eval.show=0 >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
}
for matmul in native fp8; do
  run quickstart configs/quickstart.yaml "$quickstart" "$matmul"
  run text "$work/text.yaml" "$text" "$matmul"
done
"$python" - "$work" "$quickstart" <<'PY'
import json, statistics, sys
from pathlib import Path
work, quickstart_steps = Path(sys.argv[1]), int(sys.argv[2])
def rows(curve, matmul, file):
    return [json.loads(line) for line in (work / f"{curve}-{matmul}" / file).open()]
def loss(curve, matmul):
    losses = [row["loss"] for row in rows(curve, matmul, "metrics.jsonl")]
    return statistics.mean(losses[-max(1, len(losses) // 4):])
def exact(matmul):
    return rows("quickstart", matmul, "eval.jsonl")[-1]["accuracy"]
failed = False
print("| curve | bf16 | fp8 | difference | exact, bf16 | exact, fp8 |")
print("|---|---|---|---|---|---|")
for curve in ("quickstart", "text"):
    native, fp8 = loss(curve, "native"), loss(curve, "fp8")
    off = fp8 / native - 1
    bad, answers = abs(off) > 0.01, " | "
    if curve == "quickstart":
        answers = f"{exact('native'):.1%} | {exact('fp8'):.1%}"
        if quickstart_steps >= 1000:
            bad = exact("fp8") < exact("native") - 0.0151
    print(f"| {curve} | {native:.5f} | {fp8:.5f} | {off:+.2%} | {answers} |")
    if bad:
        print(f"FAILED: {curve}")
        failed = True
sys.exit(failed)
PY
