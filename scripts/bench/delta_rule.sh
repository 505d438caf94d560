#!/usr/bin/env bash
# Times the gated delta rule, forward and backward, with 16 key and 32 value heads of size 128:
# `trainer bench --ops` against the code that transformers runs without CUDA kernels, in f32. They run
# alternately, because machines are noisy; the best of all rounds counts. Fails if the sum of forward
# and backward at 2,048 tokens is not 3 times faster than in transformers.
#   PYTHON=/path/to/python-with-transformers scripts/bench/delta_rule.sh [ROUNDS]
# THREADS=N    number of threads of both sides (default 2)
# TRAINER=FILE the program (default target/release/trainer: cargo build --release)
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3} rounds=${1:-3} threads=${THREADS:-2} trainer=${TRAINER:-target/release/trainer}
work=${WORK:-target/delta_rule}
mkdir -p "$work"
rm -f "$work"/*.jsonl
for _ in $(seq "$rounds"); do
  "$python" tests/bench/torch_delta_rule.py --threads "$threads" >>"$work/torch.jsonl"
  RAYON_NUM_THREADS=$threads "$trainer" bench --ops --json --filter delta_rule >>"$work/trainer.jsonl"
done
"$python" tests/bench/torch_delta_rule.py --table "$work/torch.jsonl" "$work/trainer.jsonl"
