#!/usr/bin/env bash
# Tokens per second and peak memory of packs of 1k to 32k tokens made of rows of 512 tokens. Time
# per token should be constant and peak memory linear in the length of the pack.
#   scripts/bench/flat.sh [ROUNDS] [KEY=VALUE..]        example: scripts/bench/flat.sh 1 model.recompute=full
# Each round runs all sizes, each in its own process; the best of all rounds is printed.
# LOCK=FILE              each process waits for this lock
# TOKENS="1024 4096"     other pack lengths
# MODEL="4 256 768 4 2"  another model (see text_model.sh)
# TRAINER=FILE           another binary
# Needs a build: cargo build --release
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3} rounds=${1:-3} work=${WORK:-target/bench_flat}
sizes=${TOKENS:-1024 2048 4096 8192 16384 32768}
set=()
for key in "${@:2}"; do set+=(--set "$key"); done
# shellcheck disable=SC2086
scripts/bench/text_model.sh "$work/model" ${MODEL:-}
"$python" tests/bench/lengths.py --distribution fixed --median 512 --rows 256 --out "$work/rows.jsonl" >&2
cat >"$work/config.yaml" <<YAML
output_dir: $work/run
model: {path: $work/model, weights: random, freeze: [vision, merger]}
data:
  train: [{path: $work/rows.jsonl}]
  shuffle: false
train: {max_steps: 1000}
optim: {lr: 1.0e-4, schedule: constant}
YAML

: >"$work/steps.jsonl"
for _ in $(seq "$rounds"); do
  for tokens in $sizes; do
    steps=$((tokens < 8192 ? 8192 / tokens : 1))
    ${LOCK:+flock "$LOCK"} "${TRAINER:-./target/release/trainer}" bench --step --json --steps "$steps" --config "$work/config.yaml" \
      --set data.packing_length="$tokens" "${set[@]}" | sed "s/^{/{\"pack\":$tokens,/" | tee -a "$work/steps.jsonl" >&2
  done
done
"$python" - "$work/steps.jsonl" <<'PY'
import json, sys
best = {}
for row in map(json.loads, open(sys.argv[1])):
    kept = best.setdefault(row["pack"], row)
    for key in ["tokens/s", "tokens/cpu_s"]:
        kept[key] = max(kept[key], row[key])
    kept["peak_memory_gib"] = max(kept["peak_memory_gib"], row["peak_memory_gib"])
fastest = {key: max(row[key] for row in best.values()) for key in ["tokens/s", "tokens/cpu_s"]}
print("| tokens per pack | tokens/s | of the fastest | tokens/CPU s | of the fastest | peak GiB | predicted | error |\n|---|---|---|---|---|---|---|---|")
for pack, row in best.items():
    rates = " | ".join(f"{row[key]:.0f} | {row[key] / fastest[key]:.0%}" for key in fastest)
    peak, predicted = row["peak_memory_gib"], row["predicted_memory_gib"]
    print(f"| {pack} | {rates} | {peak:.2f} | {predicted:.2f} | {predicted / peak - 1:+.1%} |")
PY
