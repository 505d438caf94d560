#!/usr/bin/env bash
# Compares the peak memory of `trainer sft` on the CPU with the prediction of `trainer plan`, for
# configs that differ. Prints a table; fails if an error exceeds 10 %. Takes minutes.
#   scripts/bench/plan_memory.sh [NAME..]      example: scripts/bench/plan_memory.sh images lora
#   scripts/bench/plan_memory.sh short         three configs with few tokens, in seconds
# TRAINER=FILE   another binary
# STEPS=20       steps of each run; those with images are small, and always have 40
# Needs a build: cargo build --release
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3} trainer=${TRAINER:-$PWD/target/release/trainer}
names=" $* " known="images frozen bf16 lora qlora adafactor 8bit saves large experts routed expert-lora tiles slices"
[ "$*" = short ] || for name in "$@"; do
  [[ " $known " = *" $name "* ]] || { echo "unknown config \`$name\`, expected short alone, or some of: $known" >&2; exit 64; }
done
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

VOCAB=2048 scripts/bench/text_model.sh "$work/base"
VOCAB=151936 scripts/bench/text_model.sh "$work/large"
EXPERTS=8 scripts/bench/text_model.sh "$work/experts"
"$python" tests/bench/lengths.py --distribution fixed --median 512 --rows 64 --out "$work/rows.jsonl" >&2
cat >"$work/text.yaml" <<YAML
output_dir: $work/run
device: cpu
model: {path: $work/base, weights: random}
data: {train: [{path: $work/rows.jsonl}], packing_length: 4096}
train: {max_steps: 3}
checkpoint: {every_steps: 0}
YAML

# Writes the folder of a model of tests/golden/models with a wider decoder and vision encoder, 600 rows
# with an image, and a config.
wide() {
  "$python" - "$1" "$work" <<'PY'
import json, os, shutil, sys
from pathlib import Path
name, work = sys.argv[1], Path(sys.argv[2])
folder = work / name
shutil.copytree(f"tests/golden/models/{name}", folder, ignore=shutil.ignore_patterns("*.safetensors"))

def change(file, edit):
    value = json.loads((folder / file).read_text())
    edit(value)
    (folder / file).write_text(json.dumps(value))

def widen(config):
    text, vision = config["text_config"], config["vision_config"]
    shared = dict(num_hidden_layers=8, intermediate_size=1536)
    text.update(shared, hidden_size=512, num_attention_heads=8, num_key_value_heads=2, head_dim=64)
    vision.update(shared, hidden_size=384, num_attention_heads=6)
    if "linear_key_head_dim" in text:
        text.update(layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 2)
        text.update(linear_key_head_dim=64, linear_value_head_dim=64, linear_num_key_heads=4, linear_num_value_heads=8)
        vision.update(image_size=980)
    else:
        text.update(layer_types=["full_attention"] * 8, max_window_layers=8)
        vision.update(image_size=[448, 448])
        config["image_seq_length"] = 256

def enlarge(settings):
    for section in (settings, settings.get("image_processor", {}), settings.get("video_processor", {})):
        for key, value in (("scale_resolution", 448), ("size", {"height": 448, "width": 448}), ("image_seq_length", 256)):
            if key in section:
                section[key] = value

change("config.json", widen)
change("preprocessor_config.json", enlarge)
change("processor_config.json", enlarge)
row = {"messages": [{"role": "user", "content": "<image>What is shown?"}, {"role": "assistant", "content": "The moon."}]}
row["images"] = [os.path.abspath("tests/golden/data/images/exact_moon_64x64.png")]
(work / "moon.jsonl").write_text("".join(json.dumps(row) + "\n" for _ in range(600)))
config = {
    "output_dir": f"{work}/run", "model": {"path": str(folder), "weights": "random"},
    "data": {"train": [{"path": f"{work}/moon.jsonl", "image_root": "/"}], "packing_length": 2048},
    "train": {"max_steps": 4}, "checkpoint": {"every_steps": 0},
}
(work / f"{name}.yaml").write_text(json.dumps(config))
PY
}
wide small-internvl
wide small-minicpm

failed=0
measure() {
  local name=$1 config=$2
  shift 2
  [ "$names" = "  " ] || [ "${names#* "$name" }" != "$names" ] || return 0
  local set=(--set "output_dir=$work/run" --set device=cpu --set train.max_steps=${STEPS:-4} --set 'data.eval=[]')
  for key in "$@"; do set+=(--set "$key"); done
  rm -rf "$work/run"
  "$trainer" plan --json --config "$config" "${set[@]}" 2>"$work/log" >"$work/plan" || { cat "$work/log" >&2; exit 1; }
  rm -rf "$work/run"
  "$trainer" sft --config "$config" "${set[@]}" >"$work/log" 2>&1 || { cat "$work/log" >&2; exit 1; }
  "$python" - "$work" "$name" "$@" <<'PY' || failed=1
import json, sys
work, name, *keys = sys.argv[1:]
steps = [json.loads(line) for line in open(f"{work}/run/metrics.jsonl")]
peak = max(step["peak_memory_bytes"] for step in steps)
plan = json.loads(open(f"{work}/plan").read().splitlines()[-1])
predicted = plan["cpu_bytes"]["all"]
if predicted != steps[0]["predicted_memory_bytes"] and abs(predicted - steps[0]["predicted_memory_bytes"]) > 2:
    sys.exit(f"{name}: plan predicts {predicted}, sft {steps[0]['predicted_memory_bytes']}")
if any("checkpoint.every_steps" in key for key in keys):  # a copy, while training continues
    predicted += plan["checkpoint_copy_bytes"]
error = predicted / peak - 1
print(f"| {name} | {', '.join(f'`{key}`' for key in keys)} | {peak / 2**20:.0f} | {predicted / 2**20:.0f} | {error:+.1%} |", flush=True)
sys.exit(abs(error) > 0.1)
PY
}

echo "| config | settings | peak MiB | predicted | error |"
echo "|---|---|---|---|---|"
if [ "$names" = " short " ]; then
  names="  " STEPS=3
  STEPS=12 measure images configs/quickstart.yaml data.packing_length=4160
  measure lora "$work/text.yaml" 'adapter={}' data.packing_length=2048
  measure bf16 "$work/text.yaml" model.precision=bf16 data.packing_length=1024 optim.kind=adamw_8bit
  exit "$failed"
fi
STEPS=40 measure images configs/quickstart.yaml data.packing_length=4160
STEPS=40 measure frozen configs/quickstart.yaml data.packing_length=4160 'model.freeze=[vision]' model.recompute=full
measure bf16 "$work/text.yaml" model.precision=bf16
measure lora "$work/text.yaml" 'adapter={}'
measure qlora "$work/text.yaml" 'adapter={quantize: nf4}' model.precision=bf16
measure adafactor "$work/text.yaml" optim.kind=adafactor model.recompute=llm data.packing_length=8192
measure 8bit "$work/text.yaml" optim.kind=adamw_8bit train.batch_size=2 data.packing_length=1024 train.gradient_accumulation_steps=2
STEPS=12 measure saves "$work/text.yaml" checkpoint.every_steps=2 data.packing_length=2048
measure large "$work/text.yaml" "model.path=$work/large" data.packing_length=2048
measure experts "$work/text.yaml" "model.path=$work/experts"
measure routed "$work/text.yaml" "model.path=$work/experts" model.precision=bf16 model.recompute=full 'adapter={quantize: nf4}'
measure expert-lora "$work/text.yaml" "model.path=$work/experts" 'adapter={target: ["*"], dropout: 0}'
for choice in '' model.recompute=full 'adapter={}' 'adapter={quantize: nf4}'; do
  measure tiles "$work/small-internvl.yaml" ${choice:+"$choice"}
  measure slices "$work/small-minicpm.yaml" ${choice:+"$choice"}
done
exit "$failed"
