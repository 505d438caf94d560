#!/usr/bin/env bash
# Benchmarks on a GPU. Needs the archive of scripts/cuda/build.sh and python3.
#   scripts/cuda/gpu_bench.sh ops      each op in f32 and bf16, compared with the GPU's measured
#                                      peaks; then the same ops in PyTorch, if it is installed
#   scripts/cuda/gpu_bench.sh step     whole steps of the published 2B, 4B and 8B shapes with random
#                                      weights and generated rows (images need numpy and Pillow;
#                                      without them, only the text mix runs)
#   scripts/cuda/gpu_bench.sh start    seconds from the start of `trainer sft` to the end of its
#                                      first step, 2B shape, with the weights in the page cache
#   scripts/cuda/gpu_bench.sh torch    the steps of the 4B shape in PyTorch with transformers, in
#                                      several ways; call it once per mix (MIXES=text), so that all
#                                      ways fit into the time limit
#   scripts/cuda/gpu_bench.sh table    prints the table of earlier results
# Each part ends within LIMIT_S (570) seconds and each process within RUN_S (180); what does not fit
# is listed as not finished. JSON lines and a table are written to OUT (target/cuda/bench). Exit code: 1
# if a benchmark of `trainer` failed, otherwise 75 if one is not finished.
# Other variables: DEVICE=cuda:0, SHAPES="2b 4b 8b" (`4b+adapter` trains an adapter of the 4B), MIXES="text vl hires", TORCH_SHAPES=4b,
# STEPS=8, PYTHON, and PEAK_TFLOPS, the vendor's peak that the MFU of lmms-engine is computed with
# (989 for H100 and H200).
# TINY=1 with DEVICE=cpu and TRAINER=target/release/trainer tests the script on any machine.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit
part=${1:?ops, step, start, torch or table}
out=${OUT:-target/cuda/bench} device=${DEVICE:-cuda:0}
trainer=${TRAINER:-target/cuda/bundle/trainer} work=${WORK:-target/cuda/bench_rows}
shapes=${SHAPES:-2b 4b 8b} mixes=${MIXES:-text vl hires} steps=${STEPS:-8} limit=${LIMIT_S:-570} most=${RUN_S:-180}
packing=16384 rows=1500 words=151643 tiny=() torch_tiny=() torch_ops_tiny=()
if [ -n "${TINY:-}" ]; then
  packing=512 rows=64 words=2000 tiny=(--sizes tiny) torch_tiny=(--side 128) torch_ops_tiny=(--side 128 --divide 256)
fi
mkdir -p "$out" "$work"
. scripts/cuda/machine.sh
nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader 2>/dev/null | tee "$out/gpu.txt" || true

row() { "$python" -c 'import json, sys; print(json.dumps(dict(zip(sys.argv[1::2], sys.argv[2::2]))))' "$@"; }
# NAME FILE COMMAND..: appends the command's JSON lines to FILE, and an error line if it fails. Its
# stderr goes to NAME.log.
bench() {
  local name=$1 file=$2 left=$((limit - SECONDS)) code log
  shift 2
  if [ "$left" -gt "$most" ]; then left=$most; fi
  log=$out/$(tr -c 'a-zA-Z0-9._\n' _ <<<"$name").log
  if [ "$left" -lt 20 ]; then
    row name "$name" not_finished "no time left" >>"$file"
    return
  fi
  echo "=== $name ($SECONDS s)" >&2
  timeout -k 5 "$left" "$@" 2>"$log" | sed -u '/^{/!d' >"$out/lines"
  code=${PIPESTATUS[0]}
  cat "$out/lines" >>"$file"
  if [ "$code" -eq 124 ] || [ "$code" -eq 137 ]; then
    row name "$name" not_finished "stopped after $left s" >>"$file"
  elif [ "$code" -ne 0 ]; then
    row name "$name" error "ended with $code: $(grep -m 1 -i error "$log" || tail -n 1 "$log")" >>"$file"
  fi
}

make_rows() { # SHAPE..: writes the rows of each mix and a model folder for each shape
  if ! "$python" -c 'import numpy, PIL' 2>/dev/null; then
    echo "numpy or Pillow is missing: cannot draw images, running only the text mix" >&2
    mixes=text
  fi
  "$python" tests/bench/gpu_rows.py "$work" --mixes "${mixes// /,}" --rows "$rows" --words "$words" | tee "$out/rows.jsonl" || exit 1
  for shape in "$@"; do
    rm -rf "${work:?}/$shape"
    "$trainer" init --preset "${shape%+adapter}" --out "$work/$shape" --tokenizer "$work/tokenizer" 2>/dev/null || exit 1
    if [ -n "${TINY:-}" ]; then "$python" tests/bench/gpu_rows.py "$work" --words "$words" --shrink "$work/$shape"; fi
  done
}

# Sets `settings`, `torch_settings` and the names of both, so that each shape fits into 139 GiB (18
# bytes per trained parameter, and the tape). The table compares only rows of equal names.
settings_of() { # shape mix
  settings=() torch_settings=() what="$1 $2" torch_what="$1 $2"
  case $1-$2 in
    4b-vl | 4b-hires)
      settings=(--set model.recompute=vision)
      what+=", vision encoder recomputed" torch_what=$what
      ;;
    # For GPUs whose memory is too small for 2B.
    2b+adapter-*) settings=(--set 'adapter={rank: 16}' --set model.recompute=full) what="2b $2, adapter, all recomputed" torch_what=$what ;;
    *+adapter-*) settings=(--set 'adapter={rank: 16}') what="${1%+*} $2, adapter" torch_what=$what ;;
    8b-*)
      settings=(--set optim.moments=bf16 --set model.recompute=full) what+=", moments in bf16, all recomputed"
      # PyTorch's fused AdamW does not support bf16 moments with f32 weights.
      torch_settings=(--freeze visual.blocks,visual.patch_embed,visual.pos_embed,embed_tokens,lm_head) torch_what+=", vision encoder and embeddings frozen"
      ;;
  esac
}

ops() {
  local file=$out/ops.jsonl precision
  : >"$file"
  for precision in bf16 f32; do
    bench "ops $precision" "$file" "$trainer" bench --ops --device "$device" --precision "$precision" "${tiny[@]}" --json
  done
  : >"$out/torch_ops.jsonl"
  if "$python" -c 'import torch' 2>/dev/null; then
    bench "ops PyTorch" "$out/torch_ops.jsonl" "$python" scripts/cuda/torch_bench.py ops --device "$device" "${torch_ops_tiny[@]}"
  fi
}

step() {
  local file=$out/step.jsonl shape mix settings torch_settings what torch_what
  # shellcheck disable=SC2086
  make_rows $shapes
  : >"$file"
  for mix in $mixes; do
    for shape in $shapes; do
      settings_of "$shape" "$mix"
      cat >"$work/$shape-$mix.yaml" <<YAML
output_dir: $work/run
model: {path: $work/$shape, weights: random, precision: bf16}
data:
  train: [{path: $work/$mix.jsonl}]
  packing_length: $packing
  workers: $(($(nproc) / 2 + 1))
  max_rejected: 1.0 # rows longer than a pack
train: {max_steps: 1000}
optim: {lr: 1.0e-5, schedule: constant}
YAML
      bench "$what" "$out/step_one.jsonl" "$trainer" bench --step --json --steps "$steps" --config "$work/$shape-$mix.yaml" --set "device=$device" "${settings[@]}"
      sed "s/^{\"name\":\"step\"/{\"name\":\"$what\"/" "$out/step_one.jsonl" >>"$file"
      rm "$out/step_one.jsonl"
    done
  done
}

# Runs twice: the first run reads the weights into the page cache.
start() {
  local file=$out/start.jsonl shape=${START_SHAPE:-2b} begin line log round pid tokenizer=(--tokenizer "$work/tokenizer" --weights)
  if [ -n "${TINY:-}" ]; then shape=debug tokenizer=(); fi
  mixes=text make_rows
  rm -rf "$work/start"
  "$trainer" init --preset "$shape" --out "$work/start" "${tokenizer[@]}" 2>/dev/null || exit 1
  : >"$file"
  for round in first "page cache warm"; do
    rm -rf "$work/run"
    log=$out/start.log
    begin=$EPOCHREALTIME
    exec 5< <(exec "$trainer" sft --config <(printf '{output_dir: %s, model: {path: %s, precision: bf16}, data: {train: [{path: %s}], packing_length: %s, max_rejected: 1.0}, train: {max_steps: 1000}, log: {every_steps: 1}, device: "%s"}' \
      "$work/run" "$work/start" "$work/text.jsonl" "$packing" "$device") 2>&1)
    pid=$!
    while read -r -t $((limit > SECONDS ? limit - SECONDS : 1)) line <&5; do
      echo "$line"
      [[ $line != *"train step=1 "* ]] || break
    done >"$log"
    if [[ ${line:-} == *"train step=1 "* ]]; then
      row name "start $shape, $round" seconds "$(awk -v a="$begin" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.2f", b - a }')" | tee -a "$file"
    else
      row name "start $shape, $round" error "$(tail -n 1 "$log")" | tee -a "$file"
    fi
    kill -KILL "$pid" 2>/dev/null || true
    exec 5<&-
  done
  ! grep -q '"error"' "$file"
}

torch() {
  local file shape mix settings torch_settings what torch_what way
  export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
  # shellcheck disable=SC2086
  make_rows ${TORCH_SHAPES:-4b}
  for shape in ${TORCH_SHAPES:-4b}; do
    for mix in $mixes; do
      settings_of "$shape" "$mix"
      file=$out/torch-$shape-$mix.jsonl
      : >"$file"
      # The ways that may be the fastest run first; one that does not fit into memory fails at once.
      # `--state bf16` stores less than `trainer` does, so its figures are not comparable.
      for way in "packed --compile" "packed --compile --checkpointing" "packed" "packed --checkpointing" "padded --checkpointing" \
        "padded-mask --checkpointing" "padded-flash --checkpointing" "packed --compile --state bf16" "packed --state bf16"; do
        # shellcheck disable=SC2086
        bench "$torch_what PyTorch $way" "$file" "$python" scripts/cuda/torch_bench.py step "$work/$shape" "$work/$mix.json" --name "$torch_what" --way $way \
          --steps "$steps" --packing-length "$packing" --device "$device" "${torch_settings[@]}" "${torch_tiny[@]}"
      done
    done
  done
}

case $part in
  ops | step | torch) "$part" ;;
  start)
    start
    exit
    ;;
  table) ;;
  *)
    echo "unknown part \`$part\`, expected ops, step, start, torch or table" >&2
    exit 64
    ;;
esac
rm -f "$out/lines"
"$python" tests/bench/gpu_table.py "$out" | tee "$out/table.txt"
