#!/usr/bin/env bash
# Compares the speed that `trainer plan` predicts for MPI ranks of one thread with the measured one, for
# each `distributed.shard`, with the text model of 26 M parameters in f32. The rates of the prediction are
# measured first: that of a rank alone, and that of a sum over all ranks. Steps have 4 micro-batches
# for 2 ranks: 1,024 tokens each, and 128, so that exchanges take a larger part. Prints a table; fails if
# a prediction is more than LIMIT percent off (35).
#   scripts/bench/plan_time.sh
# TRAINER=FILE  another binary, built with the feature `mpi`.  RANKS=n  number of ranks (2).
# TOKENS="1024 128"  sizes of micro-batches.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3} trainer=${TRAINER:-$PWD/target/release/trainer} world=${RANKS:-2}
export RAYON_NUM_THREADS=1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
scripts/bench/text_model.sh "$work/model"
# Milliseconds of a sum of 100 MB over all ranks. A rank sends and receives 2 (n - 1) / n of it.
sum_ms=$(mpirun --allow-run-as-root --oversubscribe --bind-to none -n "$world" "$trainer" selftest --distributed 2>&1 |
  grep -oE 'a large sum.*' | grep -oE '[0-9.]+ ms' | head -n 1 | cut -d' ' -f1)
gbps=$(awk -v ms="$sum_ms" -v n="$world" 'BEGIN { printf "%.2f", 8 * 0.1 * 2 * (n - 1) / n / (ms / 1000) }')
failed=0
echo "a sum of 100 MB over $world ranks: $sum_ms ms, $gbps Gbit/s"
echo "| tokens | shard | predicted tokens/s | measured | difference |"
echo "|---|---|---|---|---|"
for tokens in ${TOKENS:-1024 128}; do
  "$python" tests/bench/lengths.py --distribution fixed --median $((tokens / 2)) --rows 512 --out "$work/rows.jsonl" >&2
  cat >"$work/config.yaml" <<YAML
output_dir: $work/run
device: cpu
model: {path: $work/model, weights: random, freeze: [vision, merger]}
data: {train: [{path: $work/rows.jsonl}], packing_length: $tokens, shuffle: false}
train: {gradient_accumulation_steps: $((2 * world)), max_steps: 9}
checkpoint: {every_steps: 0}
YAML
  gflops=$("$trainer" bench --step --steps 5 --json --config "$work/config.yaml" 2>/dev/null | grep '"name":"step"' | grep -oE '"GFLOP/s":[0-9.]+' | cut -d: -f2)
  "$trainer" plan --config "$work/config.yaml" --gpus "$world" --json --mfu 1 --link-gbps "$gbps" \
    --tflops "$(awk -v g="$gflops" 'BEGIN { print g / 1000 }')" 2>/dev/null >"$work/plan"
  for shard in none optimizer gradients full; do
    rm -rf "$work/run"
    "$trainer" sft --config "$work/config.yaml" --set "distributed.processes=$world" --set "distributed.shard=$shard" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
    "$python" - "$work" "$tokens" "$shard" "$world" "${LIMIT:-35}" <<'PY' || failed=1
import json, statistics, sys
work, tokens, shard, world, limit = sys.argv[1:]
rows = [json.loads(line) for line in open(f"{work}/run/metrics.jsonl")][1:]
measured = statistics.median(row["tokens_per_s"] for row in rows)
plan = next(row for row in map(json.loads, open(f"{work}/plan")) if row.get("shard") == shard)
predicted = plan["tokens_per_s"]
off = predicted / measured - 1
is_off = abs(off) > float(limit) / 100
print(f"| {tokens} | {shard} | {predicted:.0f} | {measured:.0f} | {off:+.0%}{', FAILED' if is_off else ''} |", flush=True)
sys.exit(is_off)
PY
  done
done
exit "$failed"
