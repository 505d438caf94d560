#!/usr/bin/env bash
# Compares training steps of PyTorch and `trainer`: the same model and rows. They run alternately,
# because machines are noisy. Prints tokens per second and per CPU second of both, the ratios, and
# peak memory.
#   PYTHON=/path/to/python-with-torch-and-transformers scripts/bench/vs_torch.sh [ROUNDS] [STEPS] [ARGS..]
# ARGS are passed to torch_step.py, for example `--mode padded`.
# With LORA=8, both train an adapter of rank 8 of all linear layers of the decoder, with alpha 16 and
# the dropout in LORA_DROPOUT (0); PyTorch uses the package peft.
# With FAMILY=qwen3_vl_moe, both train a Qwen3-VL with 16 experts in each layer, 4 of them for each token
# (122 M parameters); less than 3 times PyTorch's tokens per CPU second is an error. ARGS choose how
# transformers computes them: --experts-implementation grouped_mm.
# With FAMILY=qwen3_5, both train a Qwen3.5; PyTorch computes sample by sample, its fastest mode in which
# samples do not mix.
# Needs npm, which downloads the published tokenizer on the first run, and a build:
# cargo build --release
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3} rounds=${1:-3} steps=${2:-3}
shift $(($# < 2 ? $# : 2))
mode=("$@")
family=${FAMILY:-qwen3_vl}
if [ "$family" = qwen3_5 ]; then usual=per-sample; else usual=packed; fi
[ ${#mode[@]} -gt 0 ] || mode=(--mode "$usual" --only-targets)
mode+=(--family "$family")
if [ "$family" = qwen3_vl ]; then folder=target/vs_torch; else folder=target/vs_torch_$family; fi
work=${WORK:-$folder}
mkdir -p "$work"
part='freeze: [vision, merger]' adapter=
if [ -n "${LORA:-}" ]; then
  dropout=${LORA_DROPOUT:-0.0}
  mode+=(--lora "$LORA" --lora-dropout "$dropout")
  part='freeze: []' adapter="adapter: {rank: $LORA, alpha: $((2 * LORA)), dropout: $dropout}"
fi

if ! [ -f "$work/model/tokenizer.json" ]; then
  eval "$(scripts/golden/fetch_tokenizer.sh "$work")"
  "$python" tests/bench/torch_step.py --mode padded --family "$family" --steps 0 --warmup 0 --model-out "$work/model" >/dev/null
  small=tests/golden/models/small-tied
  cp "$TRAINER_QWEN3_TOKENIZER" "$work/model/tokenizer.json"
  cp "$small/chat_template.jinja" "$small/preprocessor_config.json" "$work/model/"
  "$python" - "$small/tokenizer_config.json" "$work/model" <<'PY'
import json, sys
config = json.load(open(sys.argv[1]))
ids = {token["content"]: token["id"] for token in json.load(open(sys.argv[2] + "/tokenizer.json"))["added_tokens"]}
config["added_tokens_decoder"] = {str(ids[t["content"]]): t for t in config["added_tokens_decoder"].values() if t["content"] in ids}
json.dump(config, open(sys.argv[2] + "/tokenizer_config.json", "w"))
PY
fi
# Rows of one warm-up step and of the timed steps.
"$python" tests/bench/torch_step.py --steps "$steps" --warmup 1 --jsonl "$work/rows.jsonl" --only-data
cat >"$work/config.yaml" <<YAML
output_dir: $work/run
model: {path: $work/model, $part}
$adapter
data:
  train: [{path: $work/rows.jsonl}]
  packing: false
  shuffle: false
train: {batch_size: 4, gradient_accumulation_steps: 2, max_steps: $((steps + 1))} # 8 samples per step, in the same micro-batches as PyTorch
optim: {lr: 1.0e-4, schedule: constant}
YAML

: >"$work/torch.jsonl"
: >"$work/trainer.jsonl"
for round in $(seq "$rounds"); do
  "$python" tests/bench/torch_step.py "${mode[@]}" --steps "$steps" --warmup 1 2>/dev/null | tee -a "$work/torch.jsonl"
  ./target/release/trainer bench --step --steps "$steps" --json --config "$work/config.yaml" | tee -a "$work/trainer.jsonl"
done
"$python" - "$work/torch.jsonl" "$work/trainer.jsonl" "$family" <<'PY'
import json, sys
theirs, ours = ([json.loads(line) for line in open(path)] for path in sys.argv[1:3])
best = lambda rows, key: max(row[key] for row in rows)
wall, cpu = best(ours, "tokens/s") / best(theirs, "tokens_per_s_wall"), best(ours, "tokens/cpu_s") / best(theirs, "tokens_per_cpu_s")
memory = min(row["peak_memory_gib"] for row in ours) / min(row["peak_rss_gib"] for row in theirs)
print(f"best of {len(ours)} rounds: {wall:.2f} x PyTorch's tokens per second, {cpu:.2f} x its tokens per CPU second, {memory:.2f} x its peak memory")
sys.exit(sys.argv[3] == "qwen3_vl_moe" and cpu < 3)
PY
