#!/usr/bin/env bash
# Padded batches against packing without padding: the same model, rows and real tokens a step, taking turns.
# Prints, for two length distributions, the factor that the token counts promise (computed / real tokens of the padded
# run), the measured factor of time a real token, and its share of the promise; by CPU time too, for machines with
# other work. `padded` has the packed run's attention, so that nothing but padding differs; `reference` is
# configs/padded_reference.yaml's: dense masked attention, which adds a cost of its own.
#   scripts/bench/padding.sh [ROUNDS] [BATCHES of 8 rows]
# LOCK=FILE: each process waits for the lock. TRAINER=FILE: another binary. Needs a build: cargo build --release
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3} rounds=${1:-3} batches=${2:-6} work=${WORK:-target/bench_padding}
scripts/bench/text_model.sh "$work/model"

run() { # NAME STEPS KEY=VALUE..: one process, one line
  local name=$1 steps=$2 set=()
  shift 2
  for key in "$@"; do set+=(--set "$key"); done
  ${LOCK:+flock "$LOCK"} "${TRAINER:-./target/release/trainer}" bench --step --json --steps "$steps" --config "$work/$rows.yaml" "${set[@]}" |
    sed "s/^{/{\"rows\":\"$rows\",\"mode\":\"$name\",/" | tee -a "$work/steps.jsonl" >&2
}

: >"$work/steps.jsonl"
for rows in log-normal mix; do
  # One batch more than is timed: the first step warms up.
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
print("| rows | against | real tokens/s | packed tokens/s | promised | measured | share | by CPU time |\n|---|---|---|---|---|---|---|---|")
for (rows, mode), padded in best.items():
    packed = best[rows, "packed"]
    if mode != "packed":
        promised = padded["computed_tokens"] / padded["tokens"] * packed["tokens"] / packed["computed_tokens"]
        wall, cpu = (packed[key] / padded[key] for key in ["tokens/s", "tokens/cpu_s"])
        print(f'| {rows} | {mode} | {padded["tokens/s"]:.0f} | {packed["tokens/s"]:.0f} | {promised:.2f} | {wall:.2f} | {wall / promised:.0%} | {cpu:.2f}, {cpu / promised:.0%} |')
PY
