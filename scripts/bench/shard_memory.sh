#!/usr/bin/env bash
# Compares the peak memory of each rank with the prediction of `trainer plan`, for f32 and bf16 and for
# each `distributed.shard`. The ranks are MPI processes of one thread on the CPU. Prints a table; fails if
# the prediction for a rank is more than 10 % off.
#   scripts/bench/shard_memory.sh [KEY=VALUE..]      example: scripts/bench/shard_memory.sh optim.moments=bf16
# VOCAB=151936       another vocabulary: 2,048 gives 26 M parameters, 151,936 gives 103 M
# WORLDS="2 4"       numbers of ranks
# MODEL="8 512 .."   other sizes (see text_model.sh)
# SHARDS="none .."   settings to measure
# PRECISIONS="bf16"  values of model.precision, by default f32 and bf16
# TRAINER=FILE       another binary, built with the feature `mpi`
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3} trainer=${TRAINER:-$PWD/target/release/trainer}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
set=()
for key in "$@"; do
  case $key in model.precision=*) echo "error: set PRECISIONS in place of $key" >&2 && exit 64 ;; esac
  set+=(--set "$key")
done
# shellcheck disable=SC2086
scripts/bench/text_model.sh "$work/model" ${MODEL:-} # reads VOCAB
"$python" tests/bench/lengths.py --distribution fixed --median 512 --rows 256 --out "$work/rows.jsonl" >&2
cat >"$work/config.yaml" <<YAML
output_dir: $work/run
device: cpu
model: {path: $work/model, weights: random, freeze: [vision, merger]}
data:
  train: [{path: $work/rows.jsonl}]
  packing_length: ${TOKENS:-1024}
  shuffle: false
train: {gradient_accumulation_steps: 4, max_steps: 3}
checkpoint: {every_steps: 0}
YAML
measure() { # precision, number of ranks, shard
  local precision=$1 world=$2 shard=$3
  rm -rf "$work/run"
  RAYON_NUM_THREADS=1 "$trainer" sft --config "$work/config.yaml" --set "model.precision=$precision" "${set[@]}" \
    --set "distributed.shard=$shard" --set "distributed.processes=$world" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
  "$trainer" plan --config "$work/config.yaml" --set "model.precision=$precision" "${set[@]}" --gpus "$world" \
    --images 0 --targets 0.5 --json >"$work/plan"
  "$python" - "$work" "$precision" "$shard" "$world" <<'PY' || failed=1
import json, sys
work, precision, shard, world = sys.argv[1:]
steps = [json.loads(line) for line in open(f"{work}/run/metrics.jsonl")]
peak = [value / 2**20 for value in steps[-1]["ranks"]["peak_memory_bytes"]]
plan = next(row for row in map(json.loads, open(f"{work}/plan")) if row["shard"] == shard)
# The formula counts a tokenizer of the size of the vocabulary; that of the tests has 2,048 entries.
vocabulary = json.load(open(f"{work}/model/config.json"))["text_config"]["vocab_size"]
predicted = (plan["memory_bytes"] - 1400 * (vocabulary - 2048)) / 2**20
shown = ", ".join(f"{value:.0f}" for value in peak)
worst = max((predicted / value - 1 for value in peak), key=abs)
print(f"| {precision} | {world} | {shard} | {shown} | {predicted:.0f} | {worst:+.1%}{'' if abs(worst) <= 0.1 else ', FAILED'} |", flush=True)
sys.exit(abs(worst) > 0.1)
PY
}
failed=0
echo "| precision | ranks | shard | peak of a rank, MiB: least, mean, most | predicted | largest error |"
echo "|---|---|---|---|---|---|"
for precision in ${PRECISIONS:-f32 bf16}; do
  for world in ${WORLDS:-2 4}; do
    for shard in ${SHARDS:-none optimizer gradients full}; do measure "$precision" "$world" "$shard"; done
  done
done
exit "$failed"
