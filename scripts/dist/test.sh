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
# Checksums of weights, optimizer state and position in the data.
sums() { # output_dir
  local last
  last=checkpoints/step-$(printf '%08d' "$steps")
  (cd "$folder/$1" && sha256sum final/model.safetensors "$last"/{optimizer.safetensors,trainer_state.json})
}
# Losses, gradient norms and accuracies of all steps and evaluations.
losses() { # output_dir
  grep -hoE '"(loss|grad_norm|accuracy)":[^,}]*' "$folder/$1"/{metrics,eval}.jsonl
}
expect_same() { # function, output_dir on one rank, output_dir
  if ! diff <("$1" "$2") <("$1" "$3"); then
    echo "error: the $1 of \`$3\` differ from those of the run on one rank" >&2
    exit 1
  fi
}

for world in 2 4; do
  ranks "$world" selftest --distributed
done

for precision in f32 bf16; do
  for moments in f32 bf16; do
    settings=(--set "model.precision=$precision" --set "optim.moments=$moments")
    one=one-$precision-$moments
    train 1 "$one" "${settings[@]}"
    for world in 2 4; do
      run=world-$world-$precision-$moments
      train "$world" "$run" "${settings[@]}"
      expect_same sums "$one" "$run"
      expect_same losses "$one" "$run"
      echo "$world ranks, $precision, moments in $moments: equal to the run on one rank"
    done
  done
done
sums one-f32-f32

# The ranks divide the state.
for precision in f32 bf16; do
  settings=(--set "model.precision=$precision" --set "optim.moments=$precision")
  for shard in optimizer gradients full; do
    for world in 2 4; do
      run=$shard-$world-$precision
      train "$world" "$run" "${settings[@]}" --set "distributed.shard=$shard"
      expect_same sums "one-$precision-$precision" "$run"
      expect_same losses "one-$precision-$precision" "$run"
    done
    echo "shard $shard, $precision: 2 and 4 ranks are equal to the run on one rank"
  done
done

# The second half of a run, resumed from its middle on another number of ranks.
middle=checkpoints/step-$(printf '%08d' $((steps / 2)))
train 2 from-4-to-2 --resume "$folder/world-4-f32-f32/$middle"
train 4 from-1-to-4 --resume "$folder/one-f32-f32/$middle"
train 4 from-full-to-optimizer --resume "$folder/full-2-f32/$middle" --set distributed.shard=optimizer
train 1 from-gradients-to-1 --resume "$folder/gradients-4-f32/$middle"
for run in from-4-to-2 from-1-to-4 from-full-to-optimizer from-gradients-to-1; do
  expect_same sums one-f32-f32 "$run"
  echo "resumed $run: equal to the run on one rank"
done
