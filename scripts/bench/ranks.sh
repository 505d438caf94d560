#!/usr/bin/env bash
# Compares two MPI ranks of one thread, for each `distributed.shard`, with one process of two threads, in
# turns, on the text model of 26 M parameters: tokens per second, the median over all steps but the
# first. Prints the medians over the rounds. Fails if a ratio is below its bar, or if a loss differs. Needs
# OpenMPI, a build with the feature `mpi`, and two cores that nothing else uses.
#   scripts/bench/ranks.sh [ROUNDS]
# TRAINER=FILE    another binary
set -euo pipefail
cd "$(dirname "$0")/../.."
trainer=${TRAINER:-$PWD/target/release/trainer} rounds=${1:-3} python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
scripts/bench/text_model.sh "$work/model"
"$python" - "$work/rows.jsonl" <<'PY'
import json, random, sys
random.seed(0)
words = "the model reads a row and writes an answer with many short words".split()
with open(sys.argv[1], "w") as file:
    for row in range(400):
        text = lambda n: " ".join(random.choice(words) for _ in range(n))
        turns = [{"role": "user", "content": text(random.randint(20, 60))}, {"role": "assistant", "content": text(random.randint(40, 160))}]
        file.write(json.dumps({"messages": turns}) + "\n")
PY
cat >"$work/config.yaml" <<YAML
output_dir: $work/run
device: cpu
model: {path: $work/model, weights: random}
data:
  train: [{path: $work/rows.jsonl}]
  packing_length: 1024
train: {gradient_accumulation_steps: 4, max_steps: 9}
checkpoint: {every_steps: 0}
YAML
run() { # name, threads, ranks, shard
  rm -rf "$work/run"
  RAYON_NUM_THREADS=$2 "$trainer" sft --config "$work/config.yaml" --set "distributed.processes=$3" --set "distributed.shard=$4" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
  "$python" - "$1" "$work/run/metrics.jsonl" "$work/speeds" <<'PY'
import json, statistics, sys
rows = [json.loads(line) for line in open(sys.argv[2])][1:]
speed = statistics.median(row["tokens_per_s"] for row in rows)
print(f"{sys.argv[1]}: {speed:.0f} tokens/s, last loss {rows[-1]['loss']}", flush=True)
with open(sys.argv[3], "a") as file:
    file.write(json.dumps([sys.argv[1], speed, rows[-1]["loss"]]) + "\n")
PY
}
for _ in $(seq "$rounds"); do
  run "1 process" 2 1 none
  for shard in none optimizer gradients full; do
    run "$shard" 1 2 "$shard"
  done
done
"$python" - "$work/speeds" <<'PY'
import json, statistics, sys
bars = {"none": 0.9, "optimizer": 0.9, "gradients": 0.75, "full": 0.75}
rows = [json.loads(line) for line in open(sys.argv[1])]
median = lambda of: statistics.median(speed for name, speed, _ in rows if name == of)
one, failed = median("1 process"), len({loss for *_, loss in rows}) > 1
if failed:
    print("error: the losses differ")
print(f"| 2 ranks of 1 thread | tokens/s | of 1 process with 2 threads ({one:.0f}) | at least |\n|---|---|---|---|")
for shard, bar in bars.items():
    ratio = median(shard) / one
    failed |= ratio < bar
    print(f"| shard: {shard} | {median(shard):.0f} | {ratio:.3f} | {bar}{'' if ratio >= bar else ': FAILED'} |")
sys.exit(failed)
PY
