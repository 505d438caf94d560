#!/usr/bin/env bash
# Kills or stops a random rank of a training run at random moments, and starts the same command again
# each time. The command must end with exit code 74 within `distributed.timeout_s` + 5 seconds without
# leaving a process. The next start must continue from the last checkpoint that the log had reported, or
# from a later one. Each finished run must be equal to an uninterrupted one, with its metrics. At last,
# SIGKILL ends the process that has started the ranks: no rank may be left after 8 seconds.
#
#   scripts/dist/kill_test.sh 50 20 3   # number of SIGKILLs, SIGSTOPs, and SIGKILLs of the first process
#
# Needs a binary with the feature `mpi`: TRAINER=path, by default target/release/trainer. RANKS=n sets
# the number of ranks, STEPS=n the length of a run, and SEED=n the seed of the random waits.
set -euo pipefail
cd "$(dirname "$0")/../.."
kills=${1:-50} stops=${2:-20} starters=${3:-2}
trainer=${TRAINER:-$PWD/target/release/trainer}
world=${RANKS:-2} steps=${STEPS:-40} timeout_s=3
RANDOM=${SEED:-1}
source scripts/dist/killing.sh

now() { echo $(($(date +%s%N) / 1000000)); } # milliseconds
saved=0 # step of the last checkpoint that a log has reported
start() { # output_dir
  start_ranks "$1" --set train.gradient_accumulation_steps=4 --set "train.max_steps=$steps" \
    --set "checkpoint={every_steps: 2, keep: 3}" --set "distributed.timeout_s=$timeout_s"
}
# Waits for the end of the run; sets `code`. A rank that is stopped when the run is complete and all
# ranks have said so delays the end until it continues.
end() {
  local limit=$((SECONDS + 120))
  [ -z "${victim:-}" ] || limit=$((SECONDS + timeout_s + 6))
  while is_running; do
    if [ "$SECONDS" -ge "$limit" ]; then
      if [ -z "${victim:-}" ] || [ ! -d "$folder/run/final" ]; then
        fail "the ranks did not end"
      fi
      kill -CONT "$victim" 2>/dev/null || true
      limit=$((SECONDS + 30)) victim=
    fi
    sleep 0.02
  done
  code=0
  wait "$job" 2>/dev/null || code=$?
  check_saved
}
# Nothing that was reported as saved may be lost.
check_saved() {
  local from reported
  from=$(grep -oE '\bfrom_step=[0-9]+' "$folder/log" | head -n 1 | cut -d= -f2 || true)
  [ "${from:-$saved}" -ge "$saved" ] || fail "the run continued from step $from, but step $saved was saved"
  for reported in "$from" $(grep -oE '\bcheckpoint step=[0-9]+' "$folder/log" | cut -d= -f2); do
    [ "${reported:-0}" -le "$saved" ] || saved=$reported
  done
}
sums() { # output_dir
  (cd "$folder/$1" && sha256sum final/model.safetensors \
    checkpoints/step-"$(printf '%08d' "$steps")"/{optimizer.safetensors,trainer_state.json})
}
started=$(now)
start whole
end
[ "$code" = 0 ] || fail "the uninterrupted run failed"
whole=$(($(now) - started))
expected=$(sums whole)
[ "$saved" = "$steps" ] || fail "the log of the uninterrupted run reports no checkpoint of step $steps"
saved=0

killed=0 stopped=0 finished=0 slowest=0 unnamed=0
check() {
  finished=$((finished + 1))
  [ "$(sums run)" = "$expected" ] || fail "the run differs from the uninterrupted one"
  diff <(metrics whole) <(metrics run) || fail "the metrics differ from those of the uninterrupted run"
  rm -rf "$folder/run"
  saved=0
}
# Our message must name the rank. That of mpirun suffices only before the ranks are connected, or after
# the last step, when all ranks have said that they are done.
check_name() {
  local named="rank $rank |no progress .* on rank $rank\\b|.* ranks did not connect within .*: \\[.*\\b$rank\\b"
  if grep -qE "^error: ($named)" "$folder/log"; then return; fi
  if grep -q 'all ranks are connected' "$folder/log" && [ ! -d "$folder/run/final" ]; then
    fail "rank $rank is not named after SIG$signal"
  fi
  grep -q "mpirun noticed that process rank $rank " "$folder/log" || fail "rank $rank is not named after SIG$signal"
  unnamed=$((unnamed + 1))
}
while [ $((killed + stopped)) -lt $((kills + stops)) ]; do
  start run
  wait=$((RANDOM * whole / 32768))
  sleep "$((wait / 1000)).$(printf '%03d' $((wait % 1000)))"
  mapfile -t pids < <(ranks)
  signal=KILL
  [ "$killed" -lt "$kills" ] || signal=STOP
  sent=$(now) victim=
  if [ ${#pids[@]} = "$world" ]; then
    victim=${pids[RANDOM % world]} rank=$(rank_of "$victim")
  fi
  if [ -z "$victim" ] || ! kill "-$signal" "$victim" 2>/dev/null; then
    victim=
    # It has just ended, or not yet started.
    end
    [ "$code" = 0 ] || fail "exit code $code without a signal"
    check
    continue
  fi
  end
  took=$(($(now) - sent))
  case $code in
  0) check && continue ;; # the signal came after the end of training
  74) ;;
  *) fail "exit code $code after SIG$signal" ;;
  esac
  [ "$took" -le $((timeout_s * 1000 + 5000)) ] || fail "the ranks ended $took ms after SIG$signal"
  [ "$took" -le "$slowest" ] || slowest=$took
  [ -z "$(processes "$folder/run")" ] || fail "a process is left after SIG$signal"
  check_name
  if [ $signal = KILL ]; then killed=$((killed + 1)); else stopped=$((stopped + 1)); fi
done
victim=
longest=0
for _ in $(seq "$starters"); do
  start run
  wait=$((RANDOM * whole / 32768))
  sleep "$((wait / 1000)).$(printf '%03d' $((wait % 1000)))"
  kill -KILL "$job" 2>/dev/null || true # it may have ended
  sent=$(now)
  wait "$job" 2>/dev/null || true
  while [ -n "$(processes "$folder/run")" ]; do
    [ $(($(now) - sent)) -le 8000 ] || fail "processes are left 8 s after SIGKILL to the process that started them"
    sleep 0.02
  done
  took=$(($(now) - sent))
  [ "$took" -le "$longest" ] || longest=$took
  check_saved
done
start run
end
[ "$code" = 0 ] || fail "the last run failed"
job=
check
echo "kill_test: $killed kills and $stopped stops of one of $world ranks, all ended after at most $slowest ms ($unnamed before the ranks were connected or after the last step, and named by mpirun only); $finished finished runs equal to the uninterrupted one; no process left $longest ms after $starters kills of the process that started the ranks"
