#!/usr/bin/env bash
# Benchmark of an image model with 20 M parameters: the same rows and weights in PyTorch and in
# `trainer`, run alternately. Both read the images inside the timed steps. The script fails unless
# token counts, first loss and first gradient norm agree, which shows that both do the same work.
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
train: {batch_size: 4, gradient_accumulation_steps: 2}   # 8 samples per step, 4 per micro-batch
optim: {lr: 1.0e-4, schedule: constant}
YAML

: >"$work/torch.jsonl"
: >"$work/trainer.jsonl"
ours=(./target/release/trainer bench --step --json --config "$work/config.yaml")
# Bit-identical pixels on both sides: lossless images, resized with torchvision's arithmetic.
"$python" tests/bench/torch_image_step.py "$work/model" "$work/exact.jsonl" --way pillow+torchvision --samples 2 --steps 1 2>/dev/null >"$work/exact.torch.json"
"${ours[@]}" --steps 1 --set "data.train=[{path: $work/exact.jsonl}]" --set train.batch_size=2 --set train.gradient_accumulation_steps=1 >"$work/exact.trainer.json"
for _ in $(seq "$rounds"); do
  "$python" tests/bench/torch_image_step.py "$work/model" "$work/rows.jsonl" --steps "$steps" 2>/dev/null >>"$work/torch.jsonl"
  "${ours[@]}" --steps "$steps" >>"$work/trainer.jsonl"
done
"$python" - "$work" <<'PY'
import json, sys
work = sys.argv[1]
read = lambda name: [json.loads(line) for line in open(f"{work}/{name}")]
theirs, ours, exact = read("torch.jsonl"), read("trainer.jsonl"), (read("exact.torch.json")[0], read("exact.trainer.json")[0])
for key in ("tokens", "vision_tokens", "targets"):
    found = {row[key] for row in theirs + ours}
    assert len(found) == 1, f"{key} differ: {found}"
a, b = theirs[0], ours[0]
for x, y, loss, norm in ((*exact, 1e-5, 1e-4), (a, b, 2e-3, 2e-2)):  # JPEG decoders may differ in the second pair
    for key, bound in (("first_loss", loss), ("first_grad_norm", norm)):
        assert abs(x[key] - y[key]) <= bound * abs(x[key]), f"{key} differ: {x[key]} and {y[key]}"
        print(f"{key}, {'lossless images' if x is exact[0] else 'all images':18} {x[key]:.6f} and {y[key]:.6f}")
print(f"{a['parameters'] / 1e6:.1f} M parameters, {a['steps']} steps, {a['tokens']} tokens ({a['vision_tokens']} of images, {a['targets']} targets), PyTorch {a['torch']}, images by {a['way']}")
best = lambda rows, key: max(row[key] for row in rows)
least = lambda rows, key: min(row[key] for row in rows)
figures = lambda rows: [best(rows, "tokens/s"), best(rows, "tokens/cpu_s"), least(rows, "peak_memory_gib")]
t, o = figures(theirs), figures(ours)
print(f"best of {len(ours)} rounds  tokens/s  tokens/cpu_s  peak GiB")
for name, row in (("PyTorch", t), ("trainer", o), ("ratio", [x / y for x, y in zip(o, t)])):
    print(f"{name:16}{row[0]:10.2f}{row[1]:14.2f}{row[2]:10.2f}")
print("each round's ratio of tokens/s:", ", ".join(f"{y['tokens/s'] / x['tokens/s']:.2f}" for x, y in zip(theirs, ours)), f"; data wait {best(ours, 'data_wait'):.4f}")
PY
