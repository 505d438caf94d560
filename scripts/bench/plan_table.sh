#!/usr/bin/env bash
# Prints the predictions of `trainer plan` for the published shapes of Qwen3-VL on 8 to 512 GPUs, as in
# docs/distributed.md.
#   scripts/bench/plan_table.sh
# TRAINER=FILE       another binary
set -euo pipefail
cd "$(dirname "$0")/../.."
trainer=${TRAINER:-$PWD/target/release/trainer} python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
echo "| model | GPUs | memory | needs, GiB a GPU: none, optimizer, gradients, full | least sharding that fits |"
echo "|---|---|---|---|---|"
for model in 2b 4b 8b 32b; do
  "$trainer" init --preset "$model" --out "$work/$model" >&2
  for cluster in "8 1 80GB" "8 1 141GB" "8 8 80GB" "8 64 80GB"; do
    read -r gpus nodes memory <<<"$cluster"
    cat >"$work/config.yaml" <<YAML
output_dir: $work/run
model: {path: $work/$model, precision: bf16, recompute: full}
data: {train: [{path: none.jsonl}], packing_length: 16384}
train: {gradient_accumulation_steps: $((gpus * nodes * 2)), max_steps: 1}
YAML
    "$trainer" plan --json --config "$work/config.yaml" --gpus "$gpus" --nodes "$nodes" --memory "$memory" |
      "$python" -c '
import json, sys
model, gpus, memory = sys.argv[1:]
rows = [row for row in map(json.loads, sys.stdin) if "shard" in row]
world = int(gpus)
needs = ", ".join("%.0f" % (row["memory_bytes"] / 2**30) for row in rows if row["shard"] == "none" or row["group"] == world)
first = next((row for row in rows if row["least"]), None)
name = "-"
if first is not None:
    name = "`%s`" % first["shard"] + (" in each node" if first["group"] < world else "")
print(f"| {model} | {gpus} | {memory} | {needs} | {name} |")
' "${model^^}" "$((gpus * nodes))" "$memory"
  done
done
