#!/usr/bin/env bash
# Measures how long training waits for checkpoints, with the text model of 103 M parameters: the time of a
# step, the wait for a save, and the time until the checkpoint is complete, with saves in the background
# and without.
#   scripts/bench/saves.sh
# TRAINER=FILE  another binary.  RANKS=n  several MPI ranks of one thread, with a binary that has the
# feature `mpi`.  Fails if training waits longer than one step for a save in the background; the last
# save is not compared.  STEPS=n  steps, each with a checkpoint.  SHARD=none  as `distributed.shard`.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3} trainer=${TRAINER:-$PWD/target/release/trainer} world=${RANKS:-1}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
VOCAB=151936 scripts/bench/text_model.sh "$work/model"
"$python" tests/bench/lengths.py --distribution fixed --median 512 --rows 256 --out "$work/rows.jsonl" >&2
if [ "$world" -gt 1 ]; then export RAYON_NUM_THREADS=1; fi
for background in true false; do
  rm -rf "$work/run"
  cat >"$work/config.yaml" <<YAML
output_dir: $work/run
device: cpu
model: {path: $work/model, weights: random, freeze: [vision, merger]}
data: {train: [{path: $work/rows.jsonl}], packing_length: 1024}
train: {gradient_accumulation_steps: 4, max_steps: ${STEPS:-6}}
checkpoint: {every_steps: 1, keep: 1, background: $background}
distributed: {processes: $world, shard: ${SHARD:-none}}
YAML
  "$trainer" sft --config "$work/config.yaml" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
  "$python" - "$work/run/metrics.jsonl" "$background" <<'PY'
import json, sys
rows = [json.loads(line) for line in open(sys.argv[1])]
print(f"background: {sys.argv[2]}")
late = []
for row in rows:
    # Training may wait for a copy, but not longer than one step takes.
    if sys.argv[2] == "true" and row.get("save_hold_s") is not None and row["step"] < len(rows):
        late += [row["step"]] if row["save_hold_s"] > row["step_time_s"] else []
    times = ", ".join(f"{name} {row[key]:.2f} s" for name, key in [("step", "step_time_s"), ("training waits", "save_hold_s"), ("save", "save_s")] if row.get(key) is not None)
    print(f"  step {row['step']}: {times}", flush=True)
if late:
    sys.exit(f"training waits longer than a step for the checkpoints of steps {late}")
PY
done
