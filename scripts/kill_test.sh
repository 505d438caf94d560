#!/usr/bin/env bash
# Kills a training run N times at random moments and starts the same command again each time. After each
# kill, every checkpoint in its final place must match its manifest, the newest must not be older than
# the last one that the log has confirmed, and the next start must resume from there. Each finished run
# must be bit-identical to an uninterrupted one. Every third run also evaluates.
#
#   scripts/kill_test.sh 50
#
# Prints one summary line and exits with 0 if nothing was lost and all runs are equal. TRAINER=path
# selects the binary; otherwise a release build is made. SEED=n sets the seed of the random waits.
set -euo pipefail
cd "$(dirname "$0")/.."
kills=${1:-50}
RANDOM=${SEED:-1}
if [ -z "${TRAINER:-}" ]; then
    cargo build --release --quiet
fi
trainer=${TRAINER:-$PWD/target/release/trainer}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

"$trainer" init --preset debug --out "$folder/model" 2>"$folder/log"
head -n 24 data/quickstart/digits_test.jsonl >"$folder/eval.jsonl"
train() { # output_dir, plain or evals, [seconds until it is killed]
    local more=(--set "data.eval=[]")
    if [ "$2" = evals ]; then
        more=(--set "data.eval=[{path: $folder/eval.jsonl, image_root: data/quickstart}]" --set eval.every_steps=4 --set eval.show=0)
    fi
    exec ${3:+timeout --foreground --preserve-status -s KILL "$3"} "$trainer" sft --config configs/quickstart.yaml \
        --set "model.path=$folder/model" --set "output_dir=$folder/$1" "${more[@]}" \
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

declare -A whole_ms expected
for kind in plain evals; do
    started=$(date +%s%N)
    (train "whole-$kind" $kind) 2>"$folder/log"
    whole_ms[$kind]=$((($(date +%s%N) - started) / 1000000))
    expected[$kind]=$(sum "whole-$kind")
done

killed=0 finished=0 different=0 lost=0
kind=plain good=0
report() { # what
    lost=$((lost + 1))
    echo "kill_test: $1" >&2
    tail -n 3 "$folder/log" | cut -c 1-200 >&2
}
# What the log of a run says of itself: the step that it resumes from, and its last complete checkpoint.
resumed() { sed -nE 's/.*resume from_step=([0-9]+).*/\1/p' "$folder/log" | tail -n 1; }
confirmed() { sed -nE 's/.*checkpoint step=([0-9]+).*/\1/p' "$folder/log" | tail -n 1; }
# Whether the run has started from the newest good checkpoint of before.
check_start() {
    if [ "$good" -gt 0 ] && grep -qE ' (start|resume) from_step=' "$folder/log" && [ "$(resumed || true)" -lt "$good" ] 2>/dev/null; then
        report "resumed from step $(resumed), although the checkpoint of step $good is good"
    fi
    if [ "$good" -gt 0 ] && grep -q ' start from_step=0' "$folder/log"; then
        report "started at step 0, although the checkpoint of step $good is good"
    fi
}
check_kill() {
    local last newest
    check_start
    last=$(confirmed)
    if ! newest=$(python3 scripts/reliability/verify_checkpoints.py "$folder/run" 2>"$folder/verify"); then
        report "a checkpoint is damaged: $(cat "$folder/verify")"
    elif [ "$newest" -lt "${last:-0}" ] || [ "$newest" -lt "$good" ]; then
        report "the newest checkpoint is of step $newest, after the log confirmed ${last:-none} and $good was good"
    else
        good=$newest
    fi
}
check_end() {
    check_start
    finished=$((finished + 1)) good=0
    if [ "$(sum run)" != "${expected[$kind]}" ]; then
        different=$((different + 1))
        mv "$folder/run" "$folder/different-$different"
    fi
    rm -rf "$folder/run"
    kind=plain
    if [ $((finished % 3)) = 2 ]; then kind=evals; fi
}
while [ "$killed" -lt "$kills" ]; do
    # Anywhere in a run, mostly in its first half: later a run would rarely reach its end.
    wait_ms=$((RANDOM * RANDOM % whole_ms[$kind] + 1))
    if [ $((RANDOM % 2)) = 0 ]; then wait_ms=$((wait_ms / 2 + 1)); fi
    # 137: killed. Every other code except 0 is an error of the program.
    code=0
    (train run $kind "$(printf '%d.%03d' $((wait_ms / 1000)) $((wait_ms % 1000)))") 2>"$folder/log" || code=$?
    case $code in
    0) check_end ;;
    137)
        killed=$((killed + 1))
        check_kill
        ;;
    *) cat "$folder/log" && exit 1 ;;
    esac
done
(train run $kind) 2>"$folder/log"
check_end
echo "kill_test: $killed kills, $lost checkpoints lost or damaged, $finished runs finished, $((finished - different)) equal to the uninterrupted ones, $different different"
[ "$different" -eq 0 ] && [ "$lost" -eq 0 ]
