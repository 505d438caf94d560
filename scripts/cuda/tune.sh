#!/usr/bin/env bash
# Measures the algorithms of cuBLASLt for the products of training steps, writes the fastest to a table
# for the config key `model.algorithms`, and compares the speed of steps with and without the table.
# Needs a GPU, the archive of scripts/cuda/build.sh and python3.
#   scripts/cuda/tune.sh                       the shapes of SHAPES with packs of TOKENS
#   scripts/cuda/tune.sh CONFIG [--set K=V]..  the steps of this config
# OUT (target/cuda/tune) receives algorithms.json, the table, and table.txt, the gain of each product. A
# table that is there is extended: only products that it lacks are measured. Variables: SHAPES="4b",
# TOKENS="16384", MIXES="text" (also vl and hires, which need numpy and Pillow), STEPS=4, DEVICE=cuda:0,
# COMPARE="without with", TRAINER, PYTHON, and LIMIT_S=570: what
# does not fit is not finished, and the exit code is 75.
# TINY=1 tests the script with tiny shapes; on DEVICE=cpu it measures nothing.
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${OUT:-target/cuda/tune} device=${DEVICE:-cuda:0} limit=${LIMIT_S:-570}
trainer=${TRAINER:-target/cuda/bundle/trainer} work=${WORK:-target/cuda/bench_rows}
shapes=${SHAPES:-4b} tokens=${TOKENS:-16384} mixes=${MIXES:-text} steps=${STEPS:-4} compare=${COMPARE-without with}
rows=1500 words=151643
if [ -n "${TINY:-}" ]; then
  tokens=${TOKENS:-1024} rows=64 words=2000 steps=2
fi
if [ "$device" = cpu ]; then
  echo "skipped: the algorithms of cuBLASLt need a GPU"
  exit
fi
mkdir -p "$out" "$work"
. scripts/cuda/machine.sh

bench() { # FILE, arguments..: appends the output to FILE, and shows it
  local file=$1 left=$((limit - SECONDS)) code=0
  shift
  if [ "$left" -lt 10 ]; then echo "not finished: no time left" && return "$unfinished"; fi
  timeout -k 5 "$left" "$trainer" bench "$@" 2>"$out/log.txt" | tee -a "$file" || code=$?
  if [ "$code" = 124 ] || [ "$code" = 137 ]; then echo "not finished: stopped after $left s" && return "$unfinished"; fi
  if [ "$code" != 0 ]; then tail -n 20 "$out/log.txt" >&2; fi
  return "$code"
}

tune() { # NAME, CONFIG, settings..
  local name=$1 config=$2 table=$out/algorithms.json way
  shift 2
  echo "=== $name" | tee -a "$out/table.txt"
  bench "$out/table.txt" --tune "$table" --steps "$steps" --config "$config" --set "device=$device" "$@"
  for way in $compare; do
    local use=$table
    if [ "$way" = without ]; then use=null; fi
    bench "$out/table.txt" --step --steps "$steps" --config "$config" --set "device=$device" "$@" --set "model.algorithms=$use" |
      sed "s/^step /step, $way table /"
  done
}

shapes() {
  local shape mix length settings
  if [ "$mixes" != text ]; then "$python" -c 'import numpy, PIL'; fi
  "$python" tests/bench/gpu_rows.py "$work" --mixes "${mixes// /,}" --rows "$rows" --words "$words" >/dev/null
  for shape in $shapes; do
    rm -rf "${work:?}/$shape"
    "$trainer" init --preset "$shape" --out "$work/$shape" --tokenizer "$work/tokenizer" 2>"$out/log.txt" || { cat "$out/log.txt" >&2 && exit 1; }
    if [ -n "${TINY:-}" ]; then "$python" tests/bench/gpu_rows.py "$work" --words "$words" --shrink "$work/$shape"; fi
    for mix in $mixes; do
      # As in gpu_bench.sh, so that each shape fits into 139 GiB.
      case $shape-$mix in
        4b-vl | 4b-hires) settings=(--set model.recompute=vision) ;;
        8b-*) settings=(--set optim.moments=bf16 --set model.recompute=full) ;;
        *) settings=() ;;
      esac
      for length in $tokens; do
        cat >"$work/tune.yaml" <<YAML
output_dir: $work/run
model: {path: $work/$shape, weights: random, precision: bf16}
data: {train: [{path: $work/$mix.jsonl}], packing_length: $length, max_rejected: 1.0}
train: {max_steps: 1000}
optim: {lr: 1.0e-5, schedule: constant}
YAML
        tune "$shape $mix, packs of $length" "$work/tune.yaml" "${settings[@]}"
      done
    done
  done
}

: >"$out/table.txt"
if [ $# -gt 0 ]; then tune "$1" "$@"; else shapes; fi
echo "wrote $out/algorithms.json: use it with \`model.algorithms: $out/algorithms.json\`"
