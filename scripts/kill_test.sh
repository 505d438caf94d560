#!/usr/bin/env bash
# Kills a training run N times at random moments and starts the same command again each time. Each
# finished run must be bit-identical to an uninterrupted one.
#
#   scripts/kill_test.sh 50
#
# Prints one summary line and exits with 0 if all runs are equal. TRAINER=path selects the binary;
# otherwise a release build is made. SEED=n sets the seed of the random waits.
set -euo pipefail
cd "$(dirname "$0")/.."
kills=${1:-50}
RANDOM=${SEED:-1}
if [ -z "${TRAINER:-}" ]; then
    cargo build --release --quiet
fi
trainer=${TRAINER:-$PWD/target/release/trainer}
folder=$(mktemp -d)
child=
cleanup() {
    if [ -n "$child" ]; then kill -9 "$child" 2>/dev/null || true; fi
    rm -rf "$folder"
}
trap cleanup EXIT

"$trainer" init --preset debug --out "$folder/model" 2>"$folder/log"
train() { # output_dir
    exec "$trainer" sft --config configs/quickstart.yaml \
        --set "model.path=$folder/model" --set "data.eval=[]" --set "output_dir=$folder/$1" \
        --set train.max_steps=60 --set "checkpoint={every_steps: 1, keep: 3}"
}
# Checksum of weights, moments, loader position, and metrics without times and memory.
sum() { # output_dir
    (
        cd "$folder/$1"
        sha256sum final/model.safetensors checkpoints/step-00000060/{optimizer.safetensors,trainer_state.json}
        sed -E 's/,"(step_time_s|data_wait_s|save_hold_s|save_s|tokens_per_s|peak_memory_bytes|predicted_memory_bytes|time_s)":[^,}]*//g' metrics.jsonl eval.jsonl | sha256sum
        # Lists hidden files and folders, that is, leftovers of incomplete writes.
        find . checkpoints -maxdepth 1 -name '.?*'
    ) | sha256sum
}

started=$(date +%s%N)
(train whole) 2>"$folder/log"
whole_ms=$((($(date +%s%N) - started) / 1000000))
expected=$(sum whole)

killed=0 finished=0 different=0
check() {
    finished=$((finished + 1))
    if [ "$(sum run)" != "$expected" ]; then
        different=$((different + 1))
        mv "$folder/run" "$folder/different-$different"
    fi
    rm -rf "$folder/run"
}
while [ "$killed" -lt "$kills" ]; do
    (train run) 2>"$folder/log" &
    child=$!
    sleep "$(printf '0.%03d' $((RANDOM % (whole_ms < 999 ? whole_ms : 999))))"
    kill -9 "$child" 2>/dev/null || true # it may have finished
    # 137: killed. Every other code except 0 is an error of the program.
    code=0
    wait "$child" 2>/dev/null || code=$?
    child=
    case $code in
    0) check ;;
    137) killed=$((killed + 1)) ;;
    *) cat "$folder/log" && exit 1 ;;
    esac
done
(train run) 2>"$folder/log"
check
echo "kill_test: $killed kills, $finished runs finished, $((finished - different)) equal to the uninterrupted one, $different different"
[ "$different" -eq 0 ]
