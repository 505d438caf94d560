#!/usr/bin/env bash
# Tests runs of several ranks on this machine with MPI: the self-test on 2 and 4 ranks, and the
# quickstart on 1, 2 and 4 ranks, whose weights, optimizer states and losses must have the same bits,
# also after a resume on another number of ranks. Installs OpenMPI if it is missing.
#   scripts/dist/test.sh
# FEATURES=video,mpi builds with other features than `mpi`, so that CI can reuse a build. STEPS=n sets
# the number of steps.
set -euo pipefail
cd "$(dirname "$0")/../.."
scripts/dist/install.sh
cargo build --release --quiet --bin trainer --features "${FEATURES:-mpi}"
trainer=$PWD/target/release/trainer
steps=${STEPS:-8}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

# Ranks share the cores, so each has one thread; `--bind-to none` lets the system place them. On
# SIGTERM, ranks have 10 seconds to save before SIGKILL follows.
export RAYON_NUM_THREADS=1
ranks() { # number of ranks, arguments of trainer..
  local world=$1
  shift
  if [ "$world" = 1 ]; then
    "$trainer" "$@"
    return
  fi
  mpirun --allow-run-as-root --oversubscribe --bind-to none --mca odls_base_sigkill_timeout 10 \
    -n "$world" "$trainer" "$@"
}
train() { # number of ranks, output_dir, further arguments..
  local world=$1 out=$2
  shift 2
  if ! ranks "$world" sft --config configs/quickstart.yaml --set "output_dir=$folder/$out" \
    --set train.gradient_accumulation_steps=4 --set "train.max_steps=$steps" \
    --set "checkpoint={every_steps: $((steps / 2)), keep: 3}" --set log.every_steps=1 \
    --set "eval.every_steps=$((steps / 2))" "$@" >"$folder/log" 2>&1; then
    cat "$folder/log"
    echo "error: the run \`$out\` failed" >&2
    exit 1
  fi
}
# Checksums of weights, optimizer state and position in the data, and the losses of all steps.
result() { # output_dir
  local last
  last=$folder/$1/checkpoints/step-$(printf '%08d' "$steps")
  sha256sum "$folder/$1/final/model.safetensors" "$last"/{optimizer.safetensors,trainer_state.json} |
    sed "s|$folder/$1/||"
  grep -oE '"(loss|grad_norm|accuracy)":[^,}]*' "$folder/$1/metrics.jsonl"
}
expect_same() { # output_dir
  if ! diff <(result one) <(result "$1"); then
    echo "error: the run \`$1\` differs from the run on one rank" >&2
    exit 1
  fi
  echo "$1: equal to the run on one rank"
}

for world in 2 4; do
  ranks "$world" selftest --distributed
done

train 1 one
result one | head -n 3
for world in 2 4; do
  train "$world" "world-$world"
  expect_same "world-$world"
done

# Half of the steps on some ranks, the others on another number of them.
for pair in "4 2" "1 4"; do
  read -r before after <<<"$pair"
  run=resumed-$before-$after
  # The length of the run decides the learning rate, so the run is continued from its checkpoint in
  # the middle, not from a shorter run.
  source=$([ "$before" = 1 ] && echo one || echo "world-$before")
  middle=$folder/$source/checkpoints/step-$(printf '%08d' $((steps / 2)))
  train "$after" "$run" --resume "$middle"
  # Losses of the first half are in the metrics of the other run.
  if ! diff <(result one | head -n 3) <(result "$run" | head -n 3); then
    echo "error: the run \`$run\` differs from the run on one rank" >&2
    exit 1
  fi
  echo "$run: equal to the run on one rank"
done
