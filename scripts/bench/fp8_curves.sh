#!/usr/bin/env bash
# Compares losses of training with `model.matmul` `fp8` and `fp8_all` with those in bf16: the quickstart,
# and the text model of 26 M parameters on the text of docs/*.md. Prints the mean loss of all steps and of
# the last quarter, the largest difference of a tenth of the steps, and for the quickstart the share of
# rows that are answered exactly. f32 shows how much another rounding alone changes.
# Fails if the mean loss of all steps with `fp8` differs by more than 1 %; of the text model also that of
# every tenth. (The last losses of the quickstart are so close to zero that 1 % of them is noise.)
#   scripts/bench/fp8_curves.sh
# TRAINER=FILE   another binary.   QUICKSTART_STEPS=400   TEXT_STEPS=120   KEEP=DIR   keeps the runs.
set -euo pipefail
cd "$(dirname "$0")/../.."
trainer=${TRAINER:-$PWD/target/release/trainer} python=${PYTHON:-python3}
quickstart=${QUICKSTART_STEPS:-400} text=${TEXT_STEPS:-120}
work=${KEEP:-$(mktemp -d)}
[ -n "${KEEP:-}" ] || trap 'rm -rf "$work"' EXIT
mkdir -p "$work"
scripts/bench/text_model.sh "$work/model"
cat docs/*.md >"$work/docs.txt"
cat >"$work/text.yaml" <<YAML
output_dir: $work/run
device: cpu
model: {path: $work/model, weights: random}
data:
  train: [{path: $work/docs.txt, corpus: {sampling: sliding_window, length: 255, stride: 255}}]
  packing: true
  packing_length: 512
optim: {lr: 1.0e-3, schedule: cosine, warmup_steps: 10}
YAML
run() { # curve, config, steps, format
  local settings=(--set model.precision=bf16 --set "model.matmul=$4")
  case $4 in
    f32) settings=(--set model.precision=f32) ;;
    bf16) settings=(--set model.precision=bf16) ;;
  esac
  [ -e "$work/$1-$4/final" ] && return
  "$trainer" sft --config "$2" --set "output_dir=$work/$1-$4" --set "train.max_steps=$3" "${settings[@]}" \
    --set checkpoint.every_steps=0 --set eval.every_steps=0 --set eval.show=0 >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
}
for format in f32 bf16 fp8 fp8_all; do
  run quickstart configs/quickstart.yaml "$quickstart" "$format"
done
for format in f32 bf16 fp8 fp8_all; do
  run text "$work/text.yaml" "$text" "$format"
done
"$python" - "$work" <<'PY'
import json, statistics, sys
from pathlib import Path
work = Path(sys.argv[1])
def rows(curve, format, file):
    return [json.loads(line) for line in (work / f"{curve}-{format}" / file).open()]
def losses(curve, format):
    return [row["loss"] for row in rows(curve, format, "metrics.jsonl")]
def tenths(losses):
    size = max(1, len(losses) // 10)
    return [statistics.mean(losses[at:at + size]) for at in range(0, len(losses) - size + 1, size)]
def exact(curve, format):
    if curve == "text":
        return ""
    return f"{rows(curve, format, 'eval.jsonl')[-1]['accuracy']:.1%}"
failed = []
print("| curve | format | all steps | difference | largest of a tenth | last quarter | difference | exact |")
print("|---|---|---|---|---|---|---|---|")
for curve in ("quickstart", "text"):
    reference = losses(curve, "bf16")
    quarter = lambda losses: statistics.mean(losses[-max(1, len(losses) // 4):])
    for format in ("f32", "bf16", "fp8", "fp8_all"):
        found = losses(curve, format)
        all_steps = statistics.mean(found) / statistics.mean(reference) - 1
        tenth = max((a / b - 1 for a, b in zip(tenths(found), tenths(reference))), key=abs)
        last = quarter(found) / quarter(reference) - 1
        print(f"| {curve} | {format} | {statistics.mean(found):.4f} | {all_steps:+.2%} | {tenth:+.2%} | "
              f"{quarter(found):.5f} | {last:+.2%} | {exact(curve, format)} |")
        if format == "fp8" and (abs(all_steps) > 0.01 or curve == "text" and abs(tenth) > 0.01):
            failed.append(curve)
if failed:
    print("FAILED:", ", ".join(failed))
sys.exit(bool(failed))
PY
