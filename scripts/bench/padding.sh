#!/usr/bin/env bash
# Compares padded batches with packing: the same model, rows and real tokens per step. Each round
# runs both. Prints three figures for each of two length distributions: the expected speed-up
# (computed tokens / real tokens of the padded run), the measured speed-up per real token, and the
# second as a share of the first. The measured one is also printed by CPU time, for machines with
# other work. `padded` uses the attention of the packed run, so that only padding differs.
# `reference` uses dense masked attention, as configs/padded_reference.yaml does, which has a cost
# of its own.
#   scripts/bench/padding.sh [ROUNDS] [BATCHES of 8 rows]
# LOCK=FILE     each process waits for this lock
# TRAINER=FILE  another binary
# Needs a build: cargo build --release
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3} rounds=${1:-3} batches=${2:-6} work=${WORK:-target/bench_padding}
scripts/bench/text_model.sh "$work/model"

run() { # NAME STEPS KEY=VALUE..: one process, appends one line to steps.jsonl
  local name=$1 steps=$2 set=()
  shift 2
  for key in "$@"; do set+=(--set "$key"); done
  ${LOCK:+flock "$LOCK"} "${TRAINER:-./target/release/trainer}" bench --step --json --steps "$steps" --config "$work/$rows.yaml" "${set[@]}" |
    sed "s/^{/{\"rows\":\"$rows\",\"mode\":\"$name\",/" | tee -a "$work/steps.jsonl" >&2
}

: >"$work/steps.jsonl"
for rows in log-normal mix; do
  # One batch more than is timed: the first step is a warm-up.
  counts=$("$python" tests/bench/lengths.py --distribution $rows --rows $((8 * (batches + 1))) --out "$work/$rows.jsonl")
  echo "$rows: $counts" >&2
  cat >"$work/$rows.yaml" <<YAML
output_dir: $work/run
model: {path: $work/model, weights: random, freeze: [vision, merger]}
data:
  train: [{path: $work/$rows.jsonl}]
  packing_length: $("$python" -c 'import json, sys; c = json.loads(sys.argv[1]); print(max(c["longest"], c["tokens"] // c["batches"]))' "$counts")
  shuffle: false
train: {max_steps: 1000}
optim: {lr: 1.0e-4, schedule: constant}
YAML
done
for _ in $(seq "$rounds"); do
  for rows in log-normal mix; do
    run packed "$batches"
    run padded "$batches" data.packing=false train.batch_size=8 model.use_rmpad=false
    run reference "$batches" data.packing=false train.batch_size=8 model.use_rmpad=false model.attention=masked
  done
done
"$python" - "$work/steps.jsonl" <<'PY'
import json, sys
best = {}
for row in map(json.loads, open(sys.argv[1])):
    kept = best.setdefault((row["rows"], row["mode"]), row)
    for key in ["tokens/s", "tokens/cpu_s"]:
        kept[key] = max(kept[key], row[key])
print("| rows | against | real tokens/s | packed tokens/s | expected | measured | share | by CPU time |\n|---|---|---|---|---|---|---|---|")
for (rows, mode), padded in best.items():
    packed = best[rows, "packed"]
    if mode != "packed":
        expected = padded["computed_tokens"] / padded["tokens"] * packed["tokens"] / packed["computed_tokens"]
        wall, cpu = (packed[key] / padded[key] for key in ["tokens/s", "tokens/cpu_s"])
        print(f'| {rows} | {mode} | {padded["tokens/s"]:.0f} | {packed["tokens/s"]:.0f} | {expected:.2f} | {wall:.2f} | {wall / expected:.0%} | {cpu:.2f}, {cpu / expected:.0%} |')
PY
