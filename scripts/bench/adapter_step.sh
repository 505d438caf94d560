#!/usr/bin/env bash
# Compares the step with an adapter with that of the frozen model, on the text model of 103 M parameters:
# CPU time per token, the least of several rounds, in turns. The frozen model trains one norm of the first
# layer only, so both have the same backward pass through all layers. Fails if a step with an adapter
# costs more than 1.05 times the step of the frozen model.
#   scripts/bench/adapter_step.sh [ROUNDS]      3 rounds by default
# TRAINER=FILE   another binary.   STEPS=2   timed steps per round.   MOST=1.05   the limit.
set -euo pipefail
cd "$(dirname "$0")/../.."
trainer=${TRAINER:-$PWD/target/release/trainer} rounds=${1:-3} python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
VOCAB=151936 scripts/bench/text_model.sh "$work/model"
cat >"$work/config.yaml" <<YAML
output_dir: $work/run
device: cpu
model: {path: $work/model, weights: random}
data: {train: [{path: $PWD/tests/golden/data/text.jsonl}], packing_length: 2048}
train: {max_steps: 100}
optim: {lr: 1.0e-4, schedule: constant}
YAML
# Everything but `layers.0.input_layernorm.weight`.
frozen='model.freeze=[vision, merger, "*embed_tokens*", "*_proj*", "*q_norm*", "*k_norm*", "*language_model.norm*", "*post_attention*", "*layers.[1-9]*"]'
measure() { # name, setting
  "$trainer" bench --step --json --steps "${STEPS:-2}" --config "$work/config.yaml" --set "$2" 2>"$work/log" |
    sed "s/^/$1\t/" >>"$work/steps" || { cat "$work/log"; exit 1; }
}
for _ in $(seq "$rounds"); do
  measure "frozen model" "$frozen"
  measure "LoRA, rank 8" 'adapter={rank: 8, alpha: 16, dropout: 0.0}'
  measure "LoRA, rank 8, dropout 0.05" 'adapter={rank: 8, alpha: 16, dropout: 0.05}'
done
"$python" - "$work/steps" "${MOST:-1.05}" <<'PY'
import json, sys
best = {}
for line in open(sys.argv[1]):
    name, row = line.split("\t")
    cpu_us = 1e6 / json.loads(row)["tokens/cpu_s"]
    best[name] = min(best.get(name, cpu_us), cpu_us)
most, bad = float(sys.argv[2]), False
for name, cpu_us in best.items():
    ratio = cpu_us / best["frozen model"]
    bad |= ratio > most
    print(f"{name}: {cpu_us:.1f} us of CPU time per token, {ratio:.3f} of the frozen model")
sys.exit(bad)
PY
