#!/usr/bin/env bash
# Tests on a machine with a GPU. Needs only a checkout with target/cuda/bundle
# (scripts/cuda/build.sh).
#   scripts/cuda/gpu_test.sh                   all parts
#   scripts/cuda/gpu_test.sh ops curves        only these
# Parts, in this order:
#   ops        every op, forward and backward, against its f64 reference: odd sizes, f32 and bf16. Each
#              group of tests is a process of its own, because after an illegal access to memory all
#              later calls of its process fail.
#   mma        attention once more with the kernels for GPUs other than Hopper
#   curves     50 steps in bf16 on the GPU against 50 steps in f32 on the CPU: the losses of the first and
#              of the last step are within 2 %
#   adapters   the same for an adapter, for an adapter of a model in NF4, and for AdamW with 8-bit moments
#   laws       tests of the model: gradients, causality, isolation, packed == padded == alone, recompute
#   resume     a run that is stopped half way and resumed ends with the same bytes as an uninterrupted one
#   memory     1,000 steps of varying shapes: after step 200, neither GPU memory nor host memory grows
#   poison     every op once more with TRAINER_POISON=1: memory that no kernel has written contains NaN
#   ranks      with `distributed.exact: true`, two and four ranks that share the GPU train the same
#              weights as one; the library NCCL, if it is installed, with one rank; two MPI ranks, if
#              the bundle was built with FEATURES=cuda,mpi
#   sanitizers compute-sanitizer, if installed, on the tests of the ops: memcheck for at most two minutes;
#              racecheck (shared memory), synccheck (barriers) and initcheck (memory that was not
#              written) for at most one each. SANITIZER_S multiplies these times. With
#              TRAINER_EXACT_SIZES=1, sizes of allocations are not rounded, so that memcheck sees the
#              end of each tensor.
# Ends within LIMIT_S (570) seconds; a part that has no time left fails. DEVICE (cuda:0), BUNDLE
# (target/cuda/bundle) and OUT (target/cuda/test) can be set.
# TINY=1 tests the script on a machine without a GPU: the bundle was built with emulated kernels. Few
# ops, one test of the model and few steps run on them.
set -euo pipefail
cd "$(dirname "$0")/../.."
limit=${LIMIT_S:-570} device=${DEVICE:-cuda:0}
bundle=${BUNDLE:-target/cuda/bundle} out=${OUT:-target/cuda/test}
steps=50 more_steps=20 ops='^ops::' laws=(laws parity)
parts=(ops mma curves adapters laws resume memory poison ranks sanitizers)
if [ -n "${TINY:-}" ]; then
  device=cpu steps=4 more_steps=4 ops='^ops::(rms_norm|swiglu)' laws=(frames_and_images_do_not_mix_in_the_vision_encoder)
  parts=(ops curves adapters laws resume)
  export TRAINER_EMULATE_CUDA=1
fi
[ $# -eq 0 ] || parts=("$@")
[ -d "$bundle" ] || tar -C target/cuda -xJf "$bundle.tar.xz"
rm -rf "$out"
mkdir -p "$out"
# The tests read their files from the path at which they were built.
built=$(cat "$bundle/built_in")
[ -e "$built" ] || { mkdir -p "$(dirname "$built")" && ln -s "$PWD" "$built"; }
mkdir -p "$built/target/cuda-build/tmp" # their temporary folders
export TRAINER_TEST_BINARY=$PWD/$bundle/trainer
# Libraries of a toolkit or of PyTorch that are not in the system's library path.
pip_library() { python3 -c "import nvidia.$1 as m, os; print(os.path.join(list(m.__path__)[0], 'lib'))" 2>/dev/null || true; }
for folder in /usr/local/cuda/lib64 /usr/local/cuda/targets/x86_64-linux/lib "$(pip_library cu13)" "$(pip_library nccl)"; do
  if [ -d "$folder" ]; then export LD_LIBRARY_PATH=$folder:${LD_LIBRARY_PATH:-}; fi
done
failed=()
part() { # name, command..
  local name=$1 before=$SECONDS
  shift
  echo "=== $name"
  if "$@"; then echo "ok: $name, $((SECONDS - before)) s"; else
    echo "FAILED: $name, after $((SECONDS - before)) s$([ "$SECONDS" -lt "$limit" ] || echo ": no time left")"
    failed+=("$name")
  fi
}
[ "$device" = cpu ] || export TRAINER_TEST_DEVICE=$device
in_time() { [ "$SECONDS" -lt "$limit" ] && timeout --kill-after 10 $((limit - SECONDS)) "$@"; }

# Runs one group of tests; its output is shown if a test fails.
group() { # log, group
  local status=0
  timeout --kill-after 5 120 "$bundle/unit_tests" "$2::" --test-threads 2 >"$1" 2>&1 || status=$?
  if [ $status -ne 0 ]; then
    echo "--- $2 ended with $status"
    grep -vE '\.\.\. ok$|^$' "$1" | cut -c1-400 | head -n 30
  fi
  return $status
}
export -f group
export bundle
tests_of_ops() { # pattern of the names, folder of the logs
  mkdir -p "$out/$2"
  "$bundle/unit_tests" --list 2>/dev/null | sed -n 's/::[^:]*: test$//p' | grep -E "$1" | sort -u >"$out/$2/groups" || return 1
  in_time xargs -a "$out/$2/groups" -P 8 -I{} bash -c 'group "$0/{}.log" {}' "$out/$2" || return 1
  grep -h '^test result' "$out/$2"/*.log | awk '{ ok += $4; bad += $6 } END { print ok " tests passed, " bad + 0 " failed"; exit bad > 0 || ok == 0 }'
}
laws() { in_time "$bundle/integration_tests" "${laws[@]}" --test-threads 4; }

train() { # name, steps, settings..
  local name=$1 steps=$2
  shift 2
  in_time "$bundle/trainer" sft --config configs/quickstart.yaml --set "output_dir=$out/$name" --set 'data.eval=[]' --set "train.max_steps=$steps" "$@" >"$out/$name.log" 2>&1 || {
    tail -n 20 "$out/$name.log"
    return 1
  }
}
curve() { # name, steps, settings..
  local name=$1 steps=$2
  shift 2
  (unset TRAINER_EMULATE_CUDA && train "cpu_$name" "$steps" --set device=cpu "$@") || return 1
  train "gpu_$name" "$steps" --set "device=$device" --set model.precision=bf16 "$@" || return 1
  paste -d' ' <(losses "cpu_$name") <(losses "gpu_$name") | awk -v name="$name" -v steps="$steps" '
    { off = ($2 > $1 ? $2 - $1 : $1 - $2) / $1; if (off > worst) worst = off }
    NR == 1 || NR == steps { printf "%s, step %d: %.6f on the CPU, %.6f on the GPU, %.2f %% apart\n", name, NR, $1, $2, 100 * off; if (off > 0.02) bad = 1 }
    END { printf "worst of %d steps: %.2f %%\n", NR, 100 * worst; exit bad || NR != steps }'
}
# The codes of NF4 depend on the precision of the weights that are quantised: bf16 on the CPU too.
adapters() {
  curve adapter "$more_steps" --set 'adapter={rank: 8, dropout: 0.1}' &&
    curve nf4 "$more_steps" --set 'adapter={rank: 8, quantize: nf4}' --set model.precision=bf16 &&
    curve adamw_8bit "$more_steps" --set optim.kind=adamw_8bit
}
losses() { grep -o '"loss":[0-9.e-]*' "$out/$1/metrics.jsonl" | cut -d: -f2; }

resume() {
  local settings=(--set "device=$device" --set model.precision=bf16 --set "checkpoint.every_steps=$((more_steps / 2))" --set checkpoint.keep=9)
  local last
  last=checkpoints/step-$(printf '%08d' "$more_steps")
  train whole "$more_steps" "${settings[@]}" || return 1
  # The state of a run that was killed half way.
  cp -r "$out/whole" "$out/halves"
  rm -rf "$out/halves/final" "$out/halves/$last"
  train halves "$more_steps" "${settings[@]}" || return 1
  cmp "$out/whole/final/model.safetensors" "$out/halves/final/model.safetensors" &&
    cmp "$out/whole/$last/optimizer.safetensors" "$out/halves/$last/optimizer.safetensors"
}

# Each of 200 rows is one step, so that every shape has occurred by step 200; later epochs have
# another order. The limits leave room for the next step's data, which may arrive earlier, and for
# one more block of an allocator.
memory() {
  local data=tests/golden/data model=$out/debug_model
  in_time "$bundle/trainer" init --preset debug --out "$model" >"$out/memory.log" 2>&1 || return 1
  { cat "$data/image_exact.jsonl" && awk 'length($0) < 1500' "$data/text.jsonl"; } | head -n 200 >"$out/rows.jsonl"
  train memory 1000 --set "device=$device" --set model.precision=bf16 --set "model.path=$model" --set model.weights=pretrained --set data.packing=false \
    --set "data.train=[{path: $out/rows.jsonl, image_root: $data}]" --set checkpoint.every_steps=0 || return 1
  local slack key bad=0
  while read -r key slack; do
    grep -o "\"$key\":[0-9]*" "$out/memory/metrics.jsonl" | cut -d: -f2 | awk -v key="$key" -v slack="$slack" '
      NR == 200 { settled = $1 / 2 ^ 20 }
      { last = $1 / 2 ^ 20 }
      END { printf "%s: %.1f MiB after 200 steps, %.1f MiB after %d\n", key, settled, last, NR; exit NR != 1000 || last > settled + slack }' || bad=1
  done <<<"peak_device_memory_bytes 8
peak_device_reserved_bytes 34
peak_memory_bytes 34"
  return $bad
}

share_the_gpu() { in_time "$bundle/integration_tests" ranks::every_number ranks::a_checkpoint gpu_ranks::ranks --test-threads 1; }
nccl() { in_time "$bundle/integration_tests" gpu_ranks::nccl --test-threads 1; }
mpi() {
  local settings=(--set "device=$device" --set model.precision=bf16 --set train.gradient_accumulation_steps=4 --set distributed.exact=true)
  train rank 10 "${settings[@]}" || return 1
  RAYON_NUM_THREADS=4 in_time mpirun --allow-run-as-root --oversubscribe --bind-to none -n 2 "$bundle/trainer" sft --config configs/quickstart.yaml \
    --set "output_dir=$out/ranks" --set 'data.eval=[]' --set train.max_steps=10 "${settings[@]}" >"$out/ranks.log" 2>&1 || {
    tail -n 20 "$out/ranks.log"
    return 1
  }
  cmp "$out/rank/final/model.safetensors" "$out/ranks/final/model.safetensors"
}

# The tests of long segments take the tools minutes; the kernels are the same at other lengths.
sanitizer() { # tool, seconds
  local ended=0 seconds=$((limit - SECONDS)) most=$(($2 * ${SANITIZER_S:-1})) log=$out/$1.log
  TRAINER_EXACT_SIZES=1 timeout --signal INT --kill-after 10 $((seconds > most ? most : seconds > 1 ? seconds : 1)) compute-sanitizer --tool "$1" --report-api-errors no --error-exitcode 1 \
    "$bundle/unit_tests" ops:: --skip long_segments --test-threads 1 >"$log" 2>&1 || ended=$?
  if { [ $ended -eq 124 ] || [ $ended -eq 137 ]; } && ! grep -qE '^=+ (Invalid|Program hit|Error|Warning: Race|Barrier|Uninitialized|Divergent)' "$log"; then
    echo "stopped at the time limit after $(grep -c '\.\.\. ok$' "$log") tests without errors"
    return 0
  fi
  if [ $ended -ne 0 ]; then
    tail -n 40 "$log"
    return 1
  fi
}

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || true
for name in "${parts[@]}"; do
  case $name in
    ops) part "ops against f64 references" tests_of_ops "$ops" ops ;;
    mma) TRAINER_HOPPER=0 part "attention without the kernels for Hopper" tests_of_ops '^ops::attention' mma ;;
    curves) part "$steps steps, bf16 on the GPU against f32 on the CPU" curve full "$steps" ;;
    adapters) part "adapter, NF4 and 8-bit AdamW on the GPU against the CPU" adapters ;;
    laws) part "model tests" laws ;;
    resume) part "resume" resume ;;
    memory) part "memory over 1,000 steps" memory ;;
    poison) TRAINER_POISON=1 part "ops with poisoned memory" tests_of_ops "$ops" poison ;;
    ranks)
      part "ranks that share the GPU" share_the_gpu
      if python3 -c 'import ctypes; ctypes.CDLL("libnccl.so.2")' 2>/dev/null; then part "NCCL with one rank" nccl; else echo "libnccl.so.2 is not installed: skipped"; fi
      if ldd "$bundle/trainer" | grep -q libmpi && command -v mpirun >/dev/null; then part "two MPI ranks" mpi; else echo "no mpirun, or the bundle was built without mpi: skipped"; fi
      ;;
    sanitizers)
      if command -v compute-sanitizer >/dev/null; then
        part "memcheck" sanitizer memcheck 120
        for tool in racecheck synccheck initcheck; do part "$tool" sanitizer "$tool" 60; done
      else echo "compute-sanitizer is not installed: skipped"; fi
      ;;
    *) echo "unknown part \`$name\`, expected ${parts[*]}" >&2 && exit 64 ;;
  esac
done
if [ ${#failed[@]} -gt 0 ]; then
  printf 'FAILED: %s\n' "${failed[@]}"
  exit 1
fi
echo "all parts passed"
