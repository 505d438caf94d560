#!/usr/bin/env bash
# Compares every op of `trainer bench --ops` with PyTorch in f32. They run alternately, because
# machines are noisy; the best of all rounds is printed. Fails if an op is slower than its limit or
# needs more memory. A round takes about a minute.
#   PYTHON=/path/to/python-with-torch scripts/bench/ops_vs_torch.sh [ROUNDS] [FILTER]
# FILTER     part of an op's name, for example `rms_norm`
# THREADS=N  number of threads of both sides (default 2)
# Needs a build: cargo build --release
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3} rounds=${1:-3} filter=${2:-} threads=${THREADS:-2}
work=${WORK:-target/ops_vs_torch}
mkdir -p "$work"

torch() { "$python" tests/bench/torch_ops.py --threads "$threads" --filter "$filter" "$@"; }
torch --memory >"$work/torch.jsonl"
: >"$work/trainer.jsonl"
for _ in $(seq "$rounds"); do
  torch >>"$work/torch.jsonl"
  RAYON_NUM_THREADS=$threads ./target/release/trainer bench --ops --json --filter "$filter" >>"$work/trainer.jsonl"
done
torch --table "$work/torch.jsonl" "$work/trainer.jsonl"
