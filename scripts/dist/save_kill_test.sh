#!/usr/bin/env bash
# Kills a random rank while the ranks write a checkpoint, and starts the same command again each time. No
# checkpoint may be lost and none may be incomplete: each start must resume from the newest checkpoint
# on disk, and the finished run must be equal to an uninterrupted one.
#
#   scripts/dist/save_kill_test.sh 20     # number of kills
#
# Needs a binary with the feature `mpi`: TRAINER=path, by default target/release/trainer. RANKS=n sets
# the number of ranks, STEPS=n the length of a run, SEED=n the seed of the random numbers, and SET='key=value
# ..' further settings. SHARDS='optimizer gradients full' sets the values of distributed.shard: each
# start uses the next one, so checkpoints also resume with another value.
set -euo pipefail
cd "$(dirname "$0")/../.."
kills=${1:-20}
trainer=${TRAINER:-$PWD/target/release/trainer}
world=${RANKS:-2} steps=${STEPS:-12}
RANDOM=${SEED:-1}
source scripts/dist/killing.sh
checkpoints=$folder/run/checkpoints
settings=()
for setting in ${SET:-}; do settings+=(--set "$setting"); done
read -ra shards <<<"${SHARDS:-none}"
declare -A kills_of=()
starts=0 shard=
start() { # output_dir
  shard=${shards[starts % ${#shards[@]}]} starts=$((starts + 1))
  start_ranks "$1" --set "distributed.shard=$shard" --set "train.gradient_accumulation_steps=$world" --set "train.max_steps=$steps" --set data.packing_length=52 \
    --set "checkpoint={every_steps: 1, keep: 2}" --set distributed.timeout_s=20 "${settings[@]}"
}
end() { # waits for the end of the run; sets `code`
  local limit=$((SECONDS + 120))
  while is_running; do
    [ "$SECONDS" -lt "$limit" ] || fail "the ranks did not end"
    sleep 0.02
  done
  code=0
  wait "$job" 2>/dev/null || code=$?
}
sums() { # output_dir
  (cd "$folder/$1" && sha256sum final/model.safetensors \
    checkpoints/step-"$(printf '%08d' "$steps")"/{model.safetensors,optimizer.safetensors,trainer_state.json})
}
newest() { # step of the newest checkpoint; 0 if there is none
  local found
  found=$(cd "$checkpoints" 2>/dev/null && printf '%s\n' step-* | tail -n 1)
  found=${found#step-}
  [ "$found" != "*" ] || found=
  echo $((10#${found:-0}))
}
is_saving() { compgen -G "$checkpoints/.tmp-step-*" >/dev/null; }
# Waits until the ranks write a checkpoint; fails at the end of the run.
wait_for_save() {
  until is_saving; do
    is_running || return 1
    sleep 0.001
  done
}
# The log must say that the run resumed from `from`, the newest checkpoint at its start.
check_resume() {
  if grep -q "skipped a checkpoint" "$folder/log"; then fail "the newest checkpoint is not complete"; fi
  [ "$from" = 0 ] || grep -q "from_step=$from\b" "$folder/log" || fail "the run did not resume from step $from"
}

start whole
end
[ "$code" = 0 ] || fail "the uninterrupted run failed"
expected=$(sums whole)
check() {
  [ "$(sums run)" = "$expected" ] || fail "the run differs from the uninterrupted one"
  rm -rf "$folder/run"
}

# Whether every division was killed at least once, if there are enough kills.
all_were_killed() {
  [ "$kills" -ge "${#shards[@]}" ] || return 0
  [ "${#kills_of[@]}" = "${#shards[@]}" ]
}
killed=0 left=0 longest=0
while [ "$killed" -lt "$kills" ] || ! all_were_killed; do
  from=$(newest)
  start run
  # The start removes what the last kill left.
  while is_running && ! grep -q "from_step=" "$folder/log"; do sleep 0.01; done
  # The kill follows the beginning of a save after up to twice the time of the longest one so far.
  saves=$((RANDOM % 3)) hit=
  while wait_for_save; do
    began=$(date +%s%N)
    if [ "$saves" = 0 ]; then
      wait=$((RANDOM * (longest + 5000) / 32768)) # microseconds
      sleep "$((wait / 1000000)).$(printf '%06d' $((wait % 1000000)))"
      mapfile -t pids < <(ranks)
      if [ ${#pids[@]} = "$world" ] && is_saving && kill -KILL "${pids[RANDOM % world]}" 2>/dev/null && is_saving; then
        hit=yes
      fi
      break
    fi
    saves=$((saves - 1))
    while is_saving; do sleep 0.001; done
    took=$((($(date +%s%N) - began) / 1000))
    [ "$took" -le "$longest" ] || longest=$took
  done
  end
  check_resume
  case $code in
  0) check ;;
  74) if [ -n "$hit" ]; then
    killed=$((killed + 1)) kills_of[$shard]=$((${kills_of[$shard]:-0} + 1))
    if is_saving; then left=$((left + 1)); fi
  fi ;;
  *) fail "exit code $code after SIGKILL" ;;
  esac
done
from=$(newest)
start run
end
[ "$code" = 0 ] || fail "the last run failed"
check_resume
job=
check
for shard in "${!kills_of[@]}"; do echo "save_kill_test: shard: $shard: ${kills_of[$shard]} kills"; done
echo "save_kill_test: $killed kills of one of $world ranks while they wrote a checkpoint ($left left an incomplete folder), each followed by a resume from the newest checkpoint; the finished run equals the uninterrupted one"
