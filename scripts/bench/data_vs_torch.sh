#!/usr/bin/env bash
# Benchmark of data preparation: `trainer` and the processors of transformers tokenise and resize
# the same rows on one core, alternately. Then prints the share of the step time spent waiting for
# data, for the quickstart and for the image rows.
#   PYTHON=/path/to/python-with-torch-and-transformers scripts/bench/data_vs_torch.sh [ROUNDS] [STEPS]
# Needs a build: cargo build --release
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3} rounds=${1:-3} steps=${2:-3}
work=target/image_vs_torch
"$python" tests/bench/image_rows.py "$work" 2>/dev/null
cat >"$work/data.yaml" <<YAML
output_dir: $work/run
model: {path: $work/model}
data:
  train: [{path: $work/rows.jsonl}, {path: $work/text.jsonl}]
  packing: false
  shuffle: false
train: {batch_size: 4, gradient_accumulation_steps: 2}
YAML

rm -f "$work"/data_torch.*.jsonl "$work"/data_trainer.*.jsonl
for _ in $(seq "$rounds"); do
  for rows in text rows jpeg; do
    "$python" tests/bench/torch_data.py "$work/model" "$work/$rows.jsonl" 2>/dev/null >>"$work/data_torch.$rows.jsonl"
    ./target/release/trainer bench --data --json --config "$work/data.yaml" --set "data.train=[{path: $work/$rows.jsonl}]" \
      >>"$work/data_trainer.$rows.jsonl"
  done
done
"$python" - "$work" <<'PY'
import json, sys
print(f"{'one core':24}{'rows/s':>10}{'tokens/s':>12}{'tokens/cpu_s':>14}{'MPix/s':>8}{'MPix/cpu_s':>12}")
for rows, kind in (("text", "text"), ("rows", "images"), ("jpeg", "jpeg")):
    t, ours = ([json.loads(line) for line in open(f"{sys.argv[1]}/data_{side}.{rows}.jsonl")] for side in ("torch", "trainer"))
    o = [row for row in ours if row["name"].endswith(": encode, one core")]
    everywhere = [row for row in ours if row["name"].endswith(": encode, all cores")]
    assert len({row["tokens"] for row in t + o + everywhere}) == 1, "the token counts differ"
    best = lambda rows: [max(row.get(key, 0) for row in rows) for key in ("rows/s", "tokens/s", "tokens/cpu_s", "MPix/s", "MPix/cpu_s")]
    a, b = best(t), best(o)
    ratio = [y / x if x else 0 for x, y in zip(a, b)]
    for name, row in ((f"{kind}, {t[0]['way'] if kind != 'text' else 'transformers'}", a), (f"{kind}, trainer", b), (f"{kind}, ratio", ratio), (f"{kind}, all cores", best(everywhere))):
        digits = 2 if name.endswith("ratio") else 0
        print(f"{name:24}{row[0]:10.{digits}f}{row[1]:12.{digits}f}{row[2]:14.{digits}f}{row[3]:8.{max(digits, 1)}f}{row[4]:12.{max(digits, 1)}f}")
PY
wait_of() {
  ./target/release/trainer bench --step --json --steps "$1" --config "${@:2}" | "$python" -c '
import json, sys
row = json.load(sys.stdin)
print("{}: data wait {:.5f} of a step of {:.3f} s, {:.0f} tokens/s".format(sys.argv[1], *(row[key] for key in ("data_wait", "step_s", "tokens/s"))))
' "$2"
}
wait_of 400 configs/quickstart.yaml
wait_of "$steps" "$work/data.yaml" --set "data.train=[{path: $work/rows.jsonl}]"
