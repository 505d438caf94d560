#!/usr/bin/env bash
# Plants faults of 31 kinds in 5 % of N rows. `cache`, `inspect` and a run of one epoch must reject
# each of them with the right reason, use every other row, and count exactly.
#
#   scripts/reliability/faults.sh 10000
#
# Prints one summary line. SEED=n sets the seed of the rows.
set -euo pipefail
source "$(dirname "$0")/common.sh"
rows=${1:-10000}

init_model
kinds=$(python3 $tools/faults.py write "$folder/data" "$rows" "${SEED:-1}")
data=(--config configs/quickstart.yaml --set "model.path=$folder/model" --set "data.eval=[]" --set data.max_rejected=0.2
  --set "data.train=[{path: $folder/data/rows.jsonl}]" --set device=cpu)
part() { # name of the check in faults.py, its argument, command..
  local check=$1 argument=$2 code=0
  shift 2
  "$trainer" "$@" >"$folder/out" 2>"$folder/log" || code=$?
  if [ "$code" != 0 ]; then
    failed "$1: exit code $code"
  elif ! count=$(python3 $tools/faults.py "$check" "$folder/data" "$argument" 2>"$folder/log"); then
    LINES_OF_LOG=40 failed "$1: rows differ from what was planted"
  fi
}
count=0
part measured "$folder/out" cache "${data[@]}" --set "output_dir=$folder/run"
part inspected "$folder/out" inspect "${data[@]}" --num 0 --format jsonl --set data.packing_length=2048
part trained "$folder/run" sft "${data[@]}" --set "output_dir=$folder/run" --set data.packing_length=2048 \
  --set train.epochs=1 --set log.every_steps=1000 --set train.max_steps=null
finish "$((rows / 20)) faults of $kinds in $rows rows, $count good rows used"
