#!/usr/bin/env bash
# Compares losses of training with `model.matmul` `fp8` and `fp8_all` with those in bf16: the quickstart
# with SEEDS seeds, and the text model of 26 M parameters on the text of docs/. f32 shows how much
# another rounding alone changes. Prints for each format
#   the mean loss of all steps and its relative difference from bf16 with the same seed: mean over the
#   seeds, with its standard error,
#   the largest difference of a tenth of the steps, and for the quickstart the share of exact answers.
# Fails if the difference of all steps together with `fp8` is above 1 %, and above it by more than two
# standard errors if there are several seeds. A tenth alone can differ by more, with f32 too: the steps at
# which the loss falls depend on every rounding.
#   scripts/bench/fp8_curves.sh
# TRAINER=FILE   another binary.   QUICKSTART_STEPS=400   TEXT_STEPS=80   SEEDS=3
# KEEP=DIR   keeps the runs there, and uses those that are complete.
set -euo pipefail
cd "$(dirname "$0")/../.."
trainer=${TRAINER:-$PWD/target/release/trainer} python=${PYTHON:-python3}
quickstart=${QUICKSTART_STEPS:-400} text=${TEXT_STEPS:-80} seeds=${SEEDS:-3}
work=${KEEP:-$(mktemp -d)}
[ -n "${KEEP:-}" ] || trap 'rm -rf "$work"' EXIT
mkdir -p "$work"
scripts/bench/text_model.sh "$work/model"
cat docs/*.md docs/dev/*.md >"$work/docs.txt"
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
run() { # curve, config, steps, format, seed
  local output=$work/$1-$4-$5 settings=(--set model.precision=bf16)
  case $4 in
    f32) settings=(--set model.precision=f32) ;;
    fp8*) settings+=(--set "model.matmul=$4") ;;
  esac
  [ ! -e "$output/final" ] || return 0
  rm -rf "$output"
  "$trainer" sft --config "$2" --set "output_dir=$output" --set "train.max_steps=$3" --set "seed=$5" "${settings[@]}" \
    --set checkpoint.every_steps=0 --set eval.every_steps=0 --set eval.show=0 >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
}
for format in bf16 fp8 fp8_all f32; do run text "$work/text.yaml" "$text" "$format" 42; done
for ((seed = 42; seed < 42 + seeds; seed++)); do
  for format in bf16 fp8 fp8_all f32; do run quickstart configs/quickstart.yaml "$quickstart" "$format" "$seed"; done
done
"$python" - "$work" "$seeds" <<'PY'
import json, statistics, sys
from pathlib import Path
work, seeds = Path(sys.argv[1]), int(sys.argv[2])
def rows(curve, format, seed, file):
    return [json.loads(line) for line in (work / f"{curve}-{format}-{seed}" / file).open()]
def losses(curve, format, seed):
    return [row["loss"] for row in rows(curve, format, seed, "metrics.jsonl")]
def tenths(losses):
    size = max(1, len(losses) // 10)
    return [statistics.mean(losses[at:at + size]) for at in range(0, len(losses) - size + 1, size)]
failed = []
print("| curve | format | mean loss | difference | largest of a tenth | exact |")
print("|---|---|---|---|---|---|")
for curve, used in (("text", [42]), ("quickstart", range(42, 42 + seeds))):
    mean = lambda format: [statistics.mean(losses(curve, format, seed)) for seed in used]
    reference = mean("bf16")
    for format in ("bf16", "fp8", "fp8_all", "f32"):
        found = mean(format)
        off = [a / b - 1 for a, b in zip(found, reference)]
        error = statistics.stdev(off) / len(off) ** 0.5 if len(off) > 1 else 0.0
        parts = [[statistics.mean(part) for part in zip(*(tenths(losses(curve, of, seed)) for seed in used))] for of in (format, "bf16")]
        tenth = max((a / b - 1 for a, b in zip(*parts)), key=abs)
        exact = ""
        if curve == "quickstart":
            exact = f"{statistics.mean(rows(curve, format, seed, 'eval.jsonl')[-1]['accuracy'] for seed in used):.1%}"
        difference = f"{statistics.mean(off):+.2%}" + (f" ± {error:.2%}" if len(off) > 1 else "")
        print(f"| {curve} | {format} | {statistics.mean(found):.4f} | {difference} | {tenth:+.2%} | {exact} |")
        bad = abs(statistics.mean(off)) > 0.01 + 2 * error
        if format == "fp8" and bad:
            failed.append(curve)
if failed:
    print("FAILED:", ", ".join(failed))
sys.exit(bool(failed))
PY
