#!/usr/bin/env bash
# An image model of 20 M parameters, the same rows and weights in PyTorch and in `trainer`, taking turns in one run. Both read
# the pictures inside of the timed steps; that both do the same work is asserted from tokens, first loss and gradient norm.
#   PYTHON=/path/to/python-with-torch-and-transformers scripts/bench/image_vs_torch.sh [ROUNDS] [STEPS]
# Needs a build: cargo build --release
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3} rounds=${1:-2} steps=${2:-3}
work=target/image_vs_torch
"$python" tests/bench/image_rows.py "$work" 2>/dev/null
cat >"$work/config.yaml" <<YAML
output_dir: $work/run
model: {path: $work/model, use_rmpad: true, precision: f32}
data:
  train: [{path: $work/rows.jsonl}]
  packing: false
  shuffle: false
train: {batch_size: 4, gradient_accumulation_steps: 2}   # 8 samples a step, four unpadded into one stream
optim: {lr: 1.0e-4, schedule: constant}
YAML

: >"$work/torch.jsonl"
: >"$work/trainer.jsonl"
for _ in $(seq "$rounds"); do
  "$python" tests/bench/torch_image_step.py "$work/model" "$work/rows.jsonl" --steps "$steps" 2>/dev/null >>"$work/torch.jsonl"
  ./target/release/trainer bench --step --steps "$steps" --json --config "$work/config.yaml" >>"$work/trainer.jsonl"
done
"$python" - "$work/torch.jsonl" "$work/trainer.jsonl" <<'PY'
import json, sys
theirs, ours = ([json.loads(line) for line in open(path)] for path in sys.argv[1:])
for key in ("tokens", "vision_tokens", "targets"):
    found = {row[key] for row in theirs + ours}
    assert len(found) == 1, f"{key} differ: {found}"
a, b = theirs[0], ours[0]
for key, bound in (("first_loss", 1e-4), ("first_grad_norm", 5e-3)):  # two resizes differ in a last bit of some pixels
    assert abs(a[key] - b[key]) <= bound * abs(a[key]), f"{key} differ: {a[key]} and {b[key]}"
print(f"{a['parameters'] / 1e6:.1f} M parameters, {a['steps']} steps, {a['tokens']} tokens ({a['vision_tokens']} of pictures, {a['targets']} targets), PyTorch {a['torch']}, pictures by {a['way']}")
print(f"first loss {a['first_loss']:.6f} and {b['first_loss']:.6f}, its gradient norm {a['first_grad_norm']:.5f} and {b['first_grad_norm']:.5f}")
best = lambda rows, key: max(row[key] for row in rows)
least = lambda rows, key: min(row[key] for row in rows)
figures = lambda rows: [best(rows, "tokens/s"), best(rows, "tokens/cpu_s"), least(rows, "peak_memory_gib")]
t, o = figures(theirs), figures(ours)
print(f"best of {len(ours)} rounds  tokens/s  tokens/cpu_s  peak GiB")
for name, row in (("PyTorch", t), ("trainer", o), ("ratio", [x / y for x, y in zip(o, t)])):
    print(f"{name:16}{row[0]:10.2f}{row[1]:14.2f}{row[2]:10.2f}")
print("each round's ratio of tokens/s:", ", ".join(f"{y['tokens/s'] / x['tokens/s']:.2f}" for x, y in zip(theirs, ours)), f"; data wait {best(ours, 'data_wait'):.4f}")
PY
