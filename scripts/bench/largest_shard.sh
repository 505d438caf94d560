#!/usr/bin/env bash
# Trains the largest model with the shape of Qwen3-VL 2B, in its number of layers, that `trainer plan`
# says fits into a given memory with `distributed.shard: full`: two steps from random weights on MPI
# ranks of this machine, in bf16 with recomputation and moments in bf16. Prints the predicted and the
# measured peak memory of a rank; fails if the prediction is more than 10 % off, or if the run does not
# make both steps.
#   scripts/bench/largest_shard.sh [KEY=VALUE..]     example: scripts/bench/largest_shard.sh optim.master=f32
# MEMORY=24GiB   memory of all ranks together; by default what is free now, less 1 GiB
# RANKS=2        number of ranks.  TOKENS=256  size of a micro-batch.  LAYERS=n  a number of layers
# PLAN=only      prints the prediction and trains nothing
# TRAINER=FILE   another binary, built with the feature `mpi`
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3} trainer=${TRAINER:-$PWD/target/release/trainer}
world=${RANKS:-2} tokens=${TOKENS:-256}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
set=(--set optim.master=none)
for key in "$@"; do set+=(--set "$key"); done
# The tokenizer is a small one, so the tokens of media get its ids; the table keeps its size.
"$trainer" init --preset 2b --out "$work/model" --tokenizer data/quickstart/model 2>/dev/null
"$python" tests/bench/lengths.py --distribution fixed --median $((tokens / 2)) --rows 64 --out "$work/rows.jsonl" >&2
cat >"$work/config.yaml" <<YAML
output_dir: $work/run
device: cpu
model: {path: $work/model, weights: random, precision: bf16, recompute: full}
data: {train: [{path: $work/rows.jsonl}], packing_length: $tokens, shuffle: false}
train: {gradient_accumulation_steps: $world, max_steps: 2}
optim: {lr: 1.0e-5, moments: bf16}
distributed: {shard: full}
checkpoint: {every_steps: 0}
YAML
cp "$work/model/config.json" "$work/published.json"
memory=${MEMORY:-$(($(sed -n 's/^MemAvailable: *\([0-9]*\) kB/\1/p' /proc/meminfo) / 1024 - 1024))MiB}

shape() { # number of layers
  "$python" - "$work" "$1" <<'PY'
import json, sys
work, layers = sys.argv[1], int(sys.argv[2])
config, small = json.load(open(f"{work}/published.json")), json.load(open("data/quickstart/model/config.json"))
config["text_config"]["num_hidden_layers"] = layers
config.update({key: value for key, value in small.items() if key.endswith("_token_id")})
json.dump(config, open(f"{work}/model/config.json", "w"))
PY
}
predict() { # MiB of a rank
  "$trainer" plan --config "$work/config.yaml" "${set[@]}" --gpus "$world" --images 0 --targets 0.5 --json >"$work/plan"
  "$python" - "$work" <<'PY'
import json, sys
plan = next(row for row in map(json.loads, open(f"{sys.argv[1]}/plan")) if row.get("shard") == "full")
config = json.load(open(f"{sys.argv[1]}/model/config.json"))
# The formula counts a tokenizer of the size of the vocabulary; the small one has about 2,000 entries.
print(round((plan["memory_bytes"] - 1400 * (config["text_config"]["vocab_size"] - 2048)) / 2**20))
PY
}
limit=$("$python" -c '
import re, sys
number, prefix, binary = re.fullmatch(r"([0-9.]+) *([MGT])(i?)B", sys.argv[1]).groups()
print(int(float(number) * (1024 if binary else 1000) ** (" KMGT".index(prefix)) / 2**20))' "$memory")
layers=${LAYERS:-28}
while :; do
  shape "$layers"
  predicted=$(predict)
  if [ -n "${LAYERS:-}" ] || [ $((world * predicted)) -le "$limit" ] || [ "$layers" = 4 ]; then break; fi
  echo "$layers layers: $predicted MiB a rank, more than $limit MiB on $world ranks" >&2
  layers=$((layers - 1))
done
if [ -z "${LAYERS:-}" ] && [ $((world * predicted)) -gt "$limit" ]; then
  echo "error: no number of layers fits into $limit MiB" >&2
  exit 1
fi
echo "$layers of 28 layers: $predicted MiB a rank predicted, $limit MiB for $world ranks"
[ "${PLAN:-}" != only ] || exit 0
RAYON_NUM_THREADS=${RAYON_NUM_THREADS:-1} "$trainer" sft --config "$work/config.yaml" "${set[@]}" \
  --set "distributed.processes=$world" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
"$python" - "$work" "$layers" "$predicted" <<'PY'
import json, math, sys
work, layers, predicted = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
steps = [json.loads(line) for line in open(f"{work}/run/metrics.jsonl")]
least, _, most = (value / 2**20 for value in steps[-1]["ranks"]["peak_memory_bytes"])
print("| layers | steps, losses | peak of a rank, MiB: least, most | predicted | error |\n|---|---|---|---|---|")
losses = ", ".join(f"{step['loss']:.3f}" for step in steps)
print(f"| {layers} | {len(steps)}: {losses} | {least:.0f}, {most:.0f} | {predicted:.0f} | {predicted / most - 1:+.1%} |")
off = max(abs(predicted / value - 1) for value in (least, most))
if off > 0.1 or len(steps) != 2 or not all(math.isfinite(step["loss"]) for step in steps):
    sys.exit(f"error: expected two steps with finite losses, and a prediction within 10 %, found one {off:.1%} off")
PY
