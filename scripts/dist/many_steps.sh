#!/usr/bin/env bash
# Trains text rows and rows with images on several ranks for many steps, and prints the memory of the
# ranks on the way. No rank may wait for ever, and no rank may grow by more than 16 MiB in the second
# half.
#   scripts/dist/many_steps.sh 1000
# Needs a binary with the feature `mpi`: TRAINER=path, by default target/release/trainer. RANKS=n sets
# the number of ranks (4).
set -euo pipefail
cd "$(dirname "$0")/../.."
steps=${1:-1000}
trainer=${TRAINER:-$PWD/target/release/trainer} world=${RANKS:-4}
source scripts/dist/killing.sh
"$trainer" init --preset debug --out "$folder/model" 2>"$folder/log" || fail "init"
data=tests/golden/data
# Rows of 2,000 bytes and more do not fit into a pack.
cat "$data"/{text,image_exact}.jsonl | awk 'length($0) < 2000' >"$folder/rows.jsonl"
RAYON_NUM_THREADS=1 timeout $((120 + steps)) "$trainer" sft --config configs/quickstart.yaml --set "distributed.processes=$world" \
  --set device=cpu --set "model.path=$folder/model" --set model.weights=pretrained --set "output_dir=$folder/run" --set 'data.eval=[]' \
  --set "data.train=[{path: $folder/rows.jsonl, image_root: $data}]" --set data.packing_length=512 --set data.max_rejected=1.0 \
  --set "train.max_steps=$steps" --set train.gradient_accumulation_steps=4 --set checkpoint.every_steps=0 --set 'eval={show: 0}' \
  >"$folder/log" 2>&1 || fail "the run failed, or did not end in $((120 + steps)) s"
"${PYTHON:-python3}" - "$folder/run/metrics.jsonl" "$steps" "$world" <<'PY'
import json, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
steps, world = int(sys.argv[2]), int(sys.argv[3])
memory = {row["step"]: [value / 2**20 for value in row["ranks"]["peak_memory_bytes"]] for row in rows}
assert sorted(memory) == list(range(1, steps + 1)), "steps are missing or double"
for step in sorted({min(steps, 11), steps // 10 + 1, steps // 2 + 1, steps}):
    print(f"step {step}: peak memory of the {world} ranks: min, mean, max {', '.join(f'{value:.0f}' for value in memory[step])} MiB")
growth = memory[steps][2] - memory[steps // 2 + 1][2]
sys.exit(f"the memory grew by {growth:.0f} MiB in the second half" if growth > 16 else 0)
PY
