#!/usr/bin/env bash
# Every op of `trainer bench --ops` against PyTorch in f32, taking turns in one run, since machines are noisy: the best of
# all rounds. Fails if a bar is missed. A round takes about a minute.
#   PYTHON=/path/to/python-with-torch scripts/bench/ops_vs_torch.sh [ROUNDS] [FILTER]
# FILTER is part of an op's name, for example `rms_norm`. THREADS (2) are given to both. Needs a build: cargo build --release
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
