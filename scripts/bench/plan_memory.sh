#!/usr/bin/env bash
# Compares the peak memory of `trainer sft` on the CPU with the prediction of `trainer plan`, for twelve
# configs that differ. Prints a table; fails if an error exceeds 10 %. Takes minutes.
#   scripts/bench/plan_memory.sh [NAME..]      example: scripts/bench/plan_memory.sh images lora
#   scripts/bench/plan_memory.sh short         three configs with few tokens, in seconds
# TRAINER=FILE   another binary
# STEPS=20       steps of each run; those with images are small, and always have 40
# Needs a build: cargo build --release
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3} trainer=${TRAINER:-$PWD/target/release/trainer}
names=" $* " known="images frozen bf16 lora qlora adafactor 8bit saves large experts routed expert-lora"
[ "$*" = short ] || for name in "$@"; do
  [[ " $known " = *" $name "* ]] || { echo "unknown config \`$name\`, expected short alone, or some of: $known" >&2; exit 64; }
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

VOCAB=2048 scripts/bench/text_model.sh "$work/base"
VOCAB=151936 scripts/bench/text_model.sh "$work/large"
EXPERTS=8 scripts/bench/text_model.sh "$work/experts"
"$python" tests/bench/lengths.py --distribution fixed --median 512 --rows 64 --out "$work/rows.jsonl" >&2
cat >"$work/text.yaml" <<YAML
output_dir: $work/run
device: cpu
model: {path: $work/base, weights: random}
data: {train: [{path: $work/rows.jsonl}], packing_length: 4096}
train: {max_steps: 3}
checkpoint: {every_steps: 0}
YAML

failed=0
measure() {
  local name=$1 config=$2
  shift 2
  [ "$names" = "  " ] || [ "${names#* "$name" }" != "$names" ] || return 0
  local set=(--set "output_dir=$work/run" --set device=cpu --set train.max_steps=${STEPS:-4} --set 'data.eval=[]')
  for key in "$@"; do set+=(--set "$key"); done
  rm -rf "$work/run"
  "$trainer" plan --json --config "$config" "${set[@]}" 2>"$work/log" >"$work/plan" || { cat "$work/log" >&2; exit 1; }
  rm -rf "$work/run"
  "$trainer" sft --config "$config" "${set[@]}" >"$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }
  "$python" - "$work" "$name" "$@" <<'PY' || failed=1
import json, sys
work, name, *keys = sys.argv[1:]
steps = [json.loads(line) for line in open(f"{work}/run/metrics.jsonl")]
peak = max(step["peak_memory_bytes"] for step in steps)
plan = json.loads(open(f"{work}/plan").read().splitlines()[-1])
predicted = plan["cpu_bytes"]["all"]
if predicted != steps[0]["predicted_memory_bytes"] and abs(predicted - steps[0]["predicted_memory_bytes"]) > 2:
    sys.exit(f"{name}: plan predicts {predicted}, sft {steps[0]['predicted_memory_bytes']}")
if any("checkpoint.every_steps" in key for key in keys):  # a copy, while training continues
    predicted += plan["checkpoint_copy_bytes"]
error = predicted / peak - 1
print(f"| {name} | {', '.join(f'`{key}`' for key in keys)} | {peak / 2**20:.0f} | {predicted / 2**20:.0f} | {error:+.1%} |", flush=True)
sys.exit(abs(error) > 0.1)
PY
}

echo "| config | settings | peak MiB | predicted | error |"
echo "|---|---|---|---|---|"
if [ "$names" = " short " ]; then
  names="  " STEPS=3
  STEPS=12 measure images configs/quickstart.yaml data.packing_length=4160
  measure lora "$work/text.yaml" 'adapter={}' data.packing_length=2048
  measure bf16 "$work/text.yaml" model.precision=bf16 data.packing_length=1024 optim.kind=adamw_8bit
  exit "$failed"
fi
STEPS=40 measure images configs/quickstart.yaml data.packing_length=4160
STEPS=40 measure frozen configs/quickstart.yaml data.packing_length=4160 'model.freeze=[vision]' model.recompute=full
measure bf16 "$work/text.yaml" model.precision=bf16
measure lora "$work/text.yaml" 'adapter={}'
measure qlora "$work/text.yaml" 'adapter={quantize: nf4}' model.precision=bf16
measure adafactor "$work/text.yaml" optim.kind=adafactor model.recompute=llm data.packing_length=8192
measure 8bit "$work/text.yaml" optim.kind=adamw_8bit train.batch_size=2 data.packing_length=1024 train.gradient_accumulation_steps=2
STEPS=12 measure saves "$work/text.yaml" checkpoint.every_steps=2 data.packing_length=2048
measure large "$work/text.yaml" "model.path=$work/large" data.packing_length=2048
measure experts "$work/text.yaml" "model.path=$work/experts"
measure routed "$work/text.yaml" "model.path=$work/experts" model.precision=bf16 model.recompute=full 'adapter={quantize: nf4}'
measure expert-lora "$work/text.yaml" "model.path=$work/experts" 'adapter={target: ["*"], dropout: 0}'
exit "$failed"
