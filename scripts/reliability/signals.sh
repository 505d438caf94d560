#!/usr/bin/env bash
# Stops a training run N times with a signal at random moments and starts the same command again each
# time. Each stop must save and end with exit code 75 within two step times plus the time of a save,
# also during an evaluation, and the finished runs must be equal to an uninterrupted one. Both times
# are the longest ones in the metrics of the uninterrupted run. SLACK_MS (400) is added: for the start
# and the end of the process, and for other programs on the machine.
# Then SIGUSR1, which saves without stopping, and SIGHUP under `nohup`, which must have no effect.
#
#   scripts/reliability/signals.sh 50
#
# SIGNALS="TERM HUP .." selects the signals, SLACK_MS=n is for a busy machine, and SEED=n sets the seed
# of the random waits.
set -euo pipefail
source "$(dirname "$0")/common.sh"
stops=${1:-50}
read -ra signals <<<"${SIGNALS:-TERM HUP INT XCPU USR2}"
slack=${SLACK_MS:-400} steps=16

init_model
# 5 times the rows of the quickstart's evaluation: an evaluation takes longer than many steps.
for _ in $(seq 5); do cat data/quickstart/digits_test.jsonl; done >"$folder/eval.jsonl"
run() { # output_dir
  quickstart "$folder/$1" --set "data.eval=[{path: $folder/eval.jsonl}]" --set eval.every_steps=4 \
    --set train.gradient_accumulation_steps=4 --set "train.max_steps=$steps" --set "checkpoint={every_steps: 8, keep: 3}"
}
saved_step() { # output_dir; prints the step of the newest checkpoint
  find "$folder/$1/checkpoints" -maxdepth 1 -name 'step-*' 2>/dev/null | sort | tail -n 1 | sed 's/.*step-0*//'
}
started=$(now)
(run whole) >"$folder/log" 2>&1
whole=$(($(now) - started))
expected=$(sum "$folder/whole" $steps)
# The longest time of this key in the metrics, in milliseconds.
longest() { # key
  sed -nE "s/.*\"$1\":([0-9][0-9.e-]*).*/\1/p" "$folder/whole/metrics.jsonl" | sort -g | tail -n 1 | awk '{ print int($1 * 1000) + 1 }'
}
step_ms=$(longest step_time_s) save_ms=$(longest save_s)
if [ -z "$step_ms" ] || [ -z "$save_ms" ]; then
  failed "the uninterrupted run has no times of steps or saves"
  finish "no signal was sent"
  exit 1
fi
limit=$((2 * step_ms + save_ms + slack))

stopped=0 finished=0 slowest=0
most=$((3 * stops + 20)) # runs that may finish before their signal
check() {
  finished=$((finished + 1))
  [ "$(sum "$folder/run" $steps)" = "$expected" ] || failed "a finished run differs from the uninterrupted one"
  rm -rf "$folder/run"
}
while [ "$stopped" -lt "$stops" ]; do
  signal=${signals[stopped % ${#signals[@]}]}
  (run run) >"$folder/log" 2>&1 &
  child=$!
  # Not before the program has installed its handlers.
  nap $((60 + RANDOM * whole * 2 / 3 / 32768))
  sent=$(now)
  if ! kill "-$signal" "$child" 2>/dev/null; then signal=none; fi
  code=0
  wait "$child" 2>/dev/null || code=$?
  took=$(($(now) - sent))
  child=
  if [ "$code" = 0 ]; then
    check # the signal came after the last step
    if [ "$finished" -gt "$most" ]; then
      failed "SIG$signal ends no run" && break
    fi
    continue
  fi
  stopped=$((stopped + 1))
  if [ "$code" != 75 ]; then
    failed "exit code $code after SIG$signal, expected 75"
  elif [ "$took" -gt "$limit" ]; then
    failed "SIG$signal: ended after $took ms, expected at most $limit ms (2 steps of $step_ms ms, a save of $save_ms ms and $slack ms)"
  else
    # A stop before the first step has nothing to save.
    row=$({ sed -nE 's/^\{"step":([0-9]+),.*/\1/p' "$folder/run/metrics.jsonl" 2>/dev/null || true; } | tail -n 1)
    [ "${row:-0}" = "$(saved_step run || true)" ] || [ -z "$row" ] || failed "SIG$signal: trained to step $row, saved step $(saved_step run)"
  fi
  [ "$took" -le "$slowest" ] || slowest=$took
done
if (run run) >"$folder/log" 2>&1; then check; else failed "the last run ended with exit code $?"; fi
rm -rf "$folder/run"

# Starts a run and waits until it has trained at least one step; sets `child`.
start_and_step() {
  ("$@") >"$folder/log" 2>&1 &
  child=$!
  for _ in $(seq 200); do
    [ -s "$folder/run/metrics.jsonl" ] && break
    sleep 0.02
  done
}
# SIGUSR1 saves and the run continues.
start_and_step run run
before=$(saved_step run || true)
kill -USR1 "$child" 2>/dev/null || true
sleep "$(awk "BEGIN { print (2 * $limit) / 1000 }")"
after=$(saved_step run || true)
code=0
wait "$child" || code=$?
child=
if [ "$code" != 0 ]; then
  failed "SIGUSR1: exit code $code, expected that the run continues"
elif [ "${after:-0}" -le "${before:-0}" ]; then
  failed "SIGUSR1: no checkpoint was saved"
elif [ "$(sum "$folder/run" $steps)" != "$expected" ]; then
  failed "SIGUSR1: the run differs from the one without it"
fi
rm -rf "$folder/run"
# A run under nohup ignores SIGHUP.
start_and_step nohup bash -c 'trap "" HUP; exec "$@"' - "$trainer" sft --config configs/quickstart.yaml \
  --set "model.path=$folder/model" --set "data.eval=[]" --set "output_dir=$folder/run" --set train.max_steps=60
kill -HUP "$child" 2>/dev/null || true
code=0
wait "$child" || code=$?
child=
[ "$code" = 0 ] || failed "SIGHUP under nohup: exit code $code, expected 0"

finish "$stopped signals, $finished finished runs equal to the uninterrupted one unless listed, slowest end $slowest ms (limit: 2 steps of $step_ms ms, a save of $save_ms ms and $slack ms), SIGUSR1 and nohup"
