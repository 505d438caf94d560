#!/usr/bin/env bash
# Damages the newest checkpoint of a run in N ways and starts the run again each time: flipped bits,
# files that are truncated, deleted, zeroed, exchanged with those of the checkpoint before, extended,
# replaced by folders, links or pipes, and manifests without an entry. Each damage must be detected
# and reported, the run must continue from the checkpoint before, and its end must be equal to that of
# the undamaged run.
#
#   scripts/reliability/damage.sh 200
#
# Prints one summary line. SEED=n sets the seed of the damages.
set -euo pipefail
source "$(dirname "$0")/common.sh"
count=${1:-200}

init_model
run() { quickstart "$folder/$1" --set "train.max_steps=${2:-8}" --set optim.schedule=constant --set "checkpoint={every_steps: 2, keep: 3}"; }
(run whole) >"$folder/log" 2>&1
expected=$(sum "$folder/whole" 8)
(run base 6) >"$folder/log" 2>&1
detected=0 harmless=0
for i in $(seq "$count"); do
  rm -rf "$folder/run"
  cp -a "$folder/base" "$folder/run"
  rm -rf "$folder/run/final"
  damage=$(python3 $tools/damage.py "$folder/run/checkpoints/step-00000006" "$folder/run/checkpoints/step-00000004" "${SEED:-1}" "$i")
  code=0
  (run run) >"$folder/out" 2>"$folder/log" </dev/null &
  child=$!
  # A reader of a pipe would wait for ever.
  ticks=0
  while kill -0 "$child" 2>/dev/null && [ $ticks -lt 300 ]; do
    sleep 0.05
    ticks=$((ticks + 1))
  done
  if kill -9 "$child" 2>/dev/null; then
    wait "$child" 2>/dev/null || true
    child=
    failed "$damage: hangs"
    continue
  fi
  wait "$child" || code=$?
  child=
  log=$folder/log
  if [ "$code" != 0 ]; then
    failed "$damage: exit code $code"
  elif ! grep -q 'WARN.*step-00000006' "$log"; then
    # Files that no step reads, and their entries, may change; they do not count as detected.
    if [[ "$damage" != add* && "$damage" != remove* ]]; then
      failed "$damage: no warning"
    elif [ "$(sum "$folder/run" 8)" != "$expected" ]; then
      failed "$damage: no warning, and another end"
    else
      harmless=$((harmless + 1))
    fi
  elif [[ "$damage" = add* ]] && grep -q 'resume from_step=6 ' "$log"; then
    # An added file may be reported and left out.
    if [ "$(sum "$folder/run" 8)" = "$expected" ]; then detected=$((detected + 1)); else failed "$damage: another end"; fi
  elif ! grep -q 'resume from_step=4 ' "$log"; then
    failed "$damage: did not continue from step 4"
  elif [ "$(sum "$folder/run" 8)" != "$expected" ]; then
    failed "$damage: another end than that of the undamaged run"
  else
    detected=$((detected + 1))
  fi
done
# Most damages are of files that a run reads.
[ $((4 * harmless)) -le "$count" ] || failed "$harmless of $count damages were not reported"
finish "$count damaged checkpoints, $detected detected, reported, and continued from the one before, $harmless in files that no step reads"
