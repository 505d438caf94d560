#!/usr/bin/env bash
# Trains 2,000 steps of configs/counting.yaml and of the quickstart with each lean optimizer, and prints
# the table of docs/performance.md: the mean loss of the last 100 steps and its difference from AdamW in
# f32; for the quickstart also the share of rows that are answered exactly. Fails if a mean loss of
# counting is more than 1 % above that of AdamW in f32, or if the share of exact answers is more than
# 1.5 points (3 of 200 rows) below it. The losses of the quickstart are not compared: after 2,000
# steps they are so close to zero that 1 % of them is noise. Takes 10 minutes.
#   scripts/bench/optimizers_2000.sh
# TRAINER=FILE   another binary.   STEPS=2000
set -euo pipefail
cd "$(dirname "$0")/../.."
trainer=${TRAINER:-$PWD/target/release/trainer} steps=${STEPS:-2000} python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
train() { # optimizer, config, settings..
  local name=$1 config=$2 settings=() setting
  shift 2
  for setting in "output_dir=$work/${name//[^a-zA-Z0-9]/_}/$config" "train.max_steps=$steps" checkpoint.every_steps=0 eval.every_steps=0 eval.show=0 "$@"; do
    settings+=(--set "$setting")
  done
  "$trainer" sft --config "configs/$config.yaml" "${settings[@]}" >"$work/log" 2>&1 || { cat "$work/log"; exit 1; }
}
optimizer() { # name, settings..
  train "$1" counting "${@:2}"
  train "$1" quickstart "${@:2}"
  "$python" - "$work" "$1" <<'PY'
import json, re, statistics, sys
from pathlib import Path
work, name = Path(sys.argv[1]), sys.argv[2]
def rows(name, config, file):
    folder = re.sub("[^a-zA-Z0-9]", "_", name)
    return [json.loads(line) for line in (work / folder / config / file).open()]
def loss(name, config):
    return statistics.mean(row["loss"] for row in rows(name, config, "metrics.jsonl")[-100:])
def exact(name):
    return rows(name, "quickstart", "eval.jsonl")[-1]["accuracy"]
base = "AdamW, f32"
off = loss(name, "counting") / loss(base, "counting") - 1
print(f"| {name} | {loss(name, 'counting'):.5f} | {off:+.1%} | {loss(name, 'quickstart'):.6f} | {exact(name):.1%} |", flush=True)
sys.exit(off > 0.01 or exact(name) < exact(base) - 0.0151)
PY
}
echo "| optimizer | counting | against f32 | quickstart | exact |"
echo "|---|---|---|---|---|"
failed=()
for line in "AdamW, f32" "adamw_8bit, f32;optim.kind=adamw_8bit" \
  "AdamW, bf16 with f32 masters;model.precision=bf16" \
  "AdamW, bf16, master: none;model.precision=bf16;optim.master=none" \
  "adamw_8bit, bf16, master: none;model.precision=bf16;optim.master=none;optim.kind=adamw_8bit"; do
  IFS=';' read -r -a parts <<<"$line"
  optimizer "${parts[@]}" || failed+=("${parts[0]}")
done
if [ ${#failed[@]} -gt 0 ]; then
  printf 'FAILED: %s\n' "${failed[@]}"
  exit 1
fi
