#!/usr/bin/env bash
# Tests on a machine with a GPU. Needs only the archive of scripts/cuda/build.sh.
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
#   sanitizers compute-sanitizer, if installed, on the tests of the ops: memcheck for at most half of the
#              time that is left, then racecheck (shared memory), synccheck (barriers) and initcheck
#              (memory that was not written) with equal shares. With TRAINER_EXACT_SIZES=1, sizes of
#              allocations are not rounded, so that memcheck sees the end of each tensor.
# Groups of tests start in the order of `worth` below. The script ends within LIMIT_S (570) seconds. A part
# that has too little time is not finished; it has not failed. Exit code: 1 if a part has failed,
# otherwise 75 if one is not finished. DEVICE (cuda:0), BUNDLE (target/cuda/bundle) and OUT
# (target/cuda/test) can be set.
# TINY=1 tests the script on a machine without a GPU: the bundle was built with emulated kernels. Few
# ops, one test of the model and few steps run on them.
set -euo pipefail
cd "$(dirname "$0")/../.."
limit=${LIMIT_S:-570} device=${DEVICE:-cuda:0}
bundle=${BUNDLE:-target/cuda/bundle} out=${OUT:-target/cuda/test}
steps=50 more_steps=20 ops='.' laws=(laws parity --skip length_laws) worth='attention delta norm cross_entropy grouped'
parts=(ops mma curves adapters laws resume memory poison ranks sanitizers)
if [ -n "${TINY:-}" ]; then
  device=cpu steps=4 more_steps=4 ops='^(rms_norm|swiglu)' laws=(frames_and_images_do_not_mix_in_the_vision_encoder)
  parts=(ops curves adapters laws resume)
  export TRAINER_EMULATE_CUDA=1
fi
[ $# -eq 0 ] || parts=("$@")
. scripts/cuda/machine.sh
rm -rf "$out"
mkdir -p "$out"
# The tests read golden files below the path at which they were built, and have temporary folders in another.
{ read -r built && read -r temporary; } <"$bundle/built_in"
mkdir -p "$built/tests" "$built/crates/kernels" "$temporary"
[ -e "$built/tests/golden" ] || ln -sfn "$PWD/tests/golden" "$built/tests/golden"
export TRAINER_TEST_BINARY=$PWD/$bundle/trainer
failed=() left_over=() ends=$((EPOCHSECONDS + limit))
part() { # name, command..
  local name=$1 before=$SECONDS code=0
  shift
  echo "=== $name"
  "$@" || code=$?
  case $code in
    0) echo "ok: $name, $((SECONDS - before)) s" ;;
    "$unfinished") echo "not finished: $name, after $((SECONDS - before)) s" && left_over+=("$name") ;;
    *) echo "FAILED: $name, after $((SECONDS - before)) s" && failed+=("$name") ;;
  esac
}
[ "$device" = cpu ] || export TRAINER_TEST_DEVICE=$device
in_time() {
  local code=0
  [ "$EPOCHSECONDS" -lt "$ends" ] || return "$unfinished"
  timeout --kill-after 10 $((ends - EPOCHSECONDS)) "$@" || code=$?
  if [ "$EPOCHSECONDS" -ge "$ends" ] && { [ $code -eq 124 ] || [ $code -eq 137 ]; }; then code=$unfinished; fi
  return $code
}

# Runs one group of tests, with a tool if `tool` is set; its output is shown if a test fails.
group() { # folder of the logs, group
  local tests status=0 left=$((group_ends - EPOCHSECONDS)) log=$1/$2.log wrong='^=+ (Invalid|Program hit|Error|Warning: Race|Barrier|Uninitialized|Divergent)|\.\.\. FAILED$'
  if [ $left -gt "$longest" ]; then left=$longest; fi
  # Whole names: `linear::` is also a part of `e4m3_linear::`, which is a group of its own.
  mapfile -t tests < <(grep -E "^$2::[^:]*$" "$1/tests")
  # shellcheck disable=SC2086
  [ $left -le 0 ] || timeout --kill-after 5 $left $tool "$bundle/unit_tests" --exact "${tests[@]}" --test-threads 2 >"$log" 2>&1 || status=$?
  if [ "$EPOCHSECONDS" -ge "$group_ends" ] && ! grep -qsE "$wrong" "$log" && [[ $left -le 0 || $status = 124 || $status = 137 ]]; then
    echo "$2" >>"$1/unfinished"
  elif [ $status -ne 0 ]; then
    echo "--- $2 ended with $status"
    grep -vE '\.\.\. ok$|^$' "$log" | cut -c1-400 | head -n 30
    return 1
  fi
}
export -f group
export bundle
tests_of_ops() { # pattern of the names, folder of the logs, [time of the end, [tool..]]
  local logs=$out/$2 code=0
  export group_ends=${3:-$ends} tool="${*:4}" longest=120
  local skipped='^$'
  # The tests of long segments take the tools minutes; the kernels are the same at other lengths.
  if [ -n "$tool" ]; then skipped=long_segments longest=$limit; fi
  mkdir -p "$logs"
  "$bundle/unit_tests" --list 2>/dev/null | sed -n 's/: test$//p' | grep -E "$1" | grep -vE "$skipped" >"$logs/tests"
  sed 's/::[^:]*$//' "$logs/tests" | sort -u |
    awk -v worth="$worth" '{ rank = n = split(worth, first, " "); rank++; for (i = n; i > 0; i--) if (index($0, first[i])) rank = i; print rank, $0 }' | sort -s -n -k 1,1 | cut -d' ' -f2 >"$logs/groups"
  [ -s "$logs/groups" ] || return 1
  xargs -a "$logs/groups" -P 8 -I{} bash -c 'group "$0" {}' "$logs" || code=1
  find "$logs" -name '*.log' -exec cat {} + | awk '/\.\.\. ok$/ { ok++ } /\.\.\. FAILED$/ { bad++ } END { print ok + 0 " tests passed, " bad + 0 " failed"; exit bad > 0 }' || code=1
  if [ -e "$logs/unfinished" ]; then
    echo "no time left for $(wc -l <"$logs/unfinished") of $(wc -l <"$logs/groups") groups: $(sort "$logs/unfinished" | tr '\n' ' ')"
    [ $code -ne 0 ] || code=$unfinished
  fi
  return $code
}
integration() { # name of the log, arguments..
  local code=0
  in_time "$bundle/integration_tests" "${@:2}" 2>&1 | tee "$out/$1.log" || code=$?
  if grep -q '\.\.\. FAILED$' "$out/$1.log"; then code=1; fi
  return $code
}

# Shows the end of a log, and keeps the exit code of the command before.
shown() {
  local code=$?
  tail -n 20 "$out/$1.log"
  return $code
}
train() { # name, steps, settings..
  local name=$1 steps=$2
  shift 2
  in_time "$bundle/trainer" sft --config configs/quickstart.yaml --set "output_dir=$out/$name" --set 'data.eval=[]' --set "train.max_steps=$steps" "$@" >"$out/$name.log" 2>&1 || shown "$name"
}
curve() { # name, steps, settings..
  local name=$1 steps=$2
  shift 2
  (unset TRAINER_EMULATE_CUDA && train "cpu_$name" "$steps" --set device=cpu "$@") || return
  train "gpu_$name" "$steps" --set "device=$device" --set model.precision=bf16 "$@" || return
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
  train whole "$more_steps" "${settings[@]}" || return
  # The state of a run that was killed half way.
  cp -r "$out/whole" "$out/halves"
  rm -rf "$out/halves/final" "$out/halves/$last"
  train halves "$more_steps" "${settings[@]}" || return
  cmp "$out/whole/final/model.safetensors" "$out/halves/final/model.safetensors" &&
    cmp "$out/whole/$last/optimizer.safetensors" "$out/halves/$last/optimizer.safetensors"
}

# Each of 200 rows is one step, so that every shape has occurred by step 200; later epochs have
# another order. The limits leave room for the next step's data, which may arrive earlier, and for
# one more block of an allocator.
memory() {
  local data=tests/golden/data model=$out/debug_model
  in_time "$bundle/trainer" init --preset debug --out "$model" >"$out/memory.log" 2>&1 || return
  { cat "$data/image_exact.jsonl" && awk 'length($0) < 1500' "$data/text.jsonl"; } | head -n 200 >"$out/rows.jsonl"
  train memory 1000 --set "device=$device" --set model.precision=bf16 --set "model.path=$model" --set model.weights=pretrained --set data.packing=false \
    --set "data.train=[{path: $out/rows.jsonl, image_root: $data}]" --set checkpoint.every_steps=0 || return
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

mpi() {
  local settings=(--set "device=$device" --set model.precision=bf16 --set train.gradient_accumulation_steps=4 --set distributed.exact=true)
  train rank 10 "${settings[@]}" || return
  RAYON_NUM_THREADS=4 in_time mpirun --allow-run-as-root --oversubscribe --bind-to none -n 2 "$bundle/trainer" sft --config configs/quickstart.yaml \
    --set "output_dir=$out/ranks" --set 'data.eval=[]' --set train.max_steps=10 "${settings[@]}" >"$out/mpi.log" 2>&1 || shown mpi || return
  cmp "$out/rank/final/model.safetensors" "$out/ranks/final/model.safetensors"
}

sanitizer() { # tool, number of shares of the time that is left
  local left=$((ends - EPOCHSECONDS))
  TRAINER_EXACT_SIZES=1 tests_of_ops "$ops" "$1" $((EPOCHSECONDS + (left > 0 ? left : 0) / $2)) compute-sanitizer --tool "$1" --report-api-errors no --error-exitcode 1
}

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || true
for name in "${parts[@]}"; do
  case $name in
    ops) part "ops against f64 references" tests_of_ops "$ops" ops ;;
    mma) TRAINER_HOPPER=0 part "attention without the kernels for Hopper" tests_of_ops '^attention' mma ;;
    curves) part "$steps steps, bf16 on the GPU against f32 on the CPU" curve full "$steps" ;;
    adapters) part "adapter, NF4 and 8-bit AdamW on the GPU against the CPU" adapters ;;
    laws) part "model tests" integration laws "${laws[@]}" --test-threads 4 ;;
    resume) part "resume" resume ;;
    memory) part "memory over 1,000 steps" memory ;;
    poison) TRAINER_POISON=1 part "ops with poisoned memory" tests_of_ops "$ops" poison ;;
    ranks)
      part "ranks that share the GPU" integration ranks ranks::every_number ranks::a_checkpoint gpu_ranks::ranks --test-threads 1
      if python3 -c 'import ctypes; ctypes.CDLL("libnccl.so.2")' 2>/dev/null; then part "NCCL with one rank" integration nccl gpu_ranks::nccl --test-threads 1; else echo "libnccl.so.2 is not installed: skipped"; fi
      if ldd "$bundle/trainer" | grep -q libmpi && command -v mpirun >/dev/null; then part "two MPI ranks" mpi; else echo "no mpirun, or the bundle was built without mpi: skipped"; fi
      ;;
    sanitizers)
      if command -v compute-sanitizer >/dev/null; then
        part memcheck sanitizer memcheck 2
        part racecheck sanitizer racecheck 3
        part synccheck sanitizer synccheck 2
        part initcheck sanitizer initcheck 1
      else echo "compute-sanitizer is not installed: skipped"; fi
      ;;
    *) echo "unknown part \`$name\`, expected ${parts[*]}" >&2 && exit 64 ;;
  esac
done
if [ ${#failed[@]} -gt 0 ]; then
  printf 'FAILED: %s\n' "${failed[@]}"
  exit 1
fi
if [ ${#left_over[@]} -gt 0 ]; then
  printf 'NOT FINISHED: %s\n' "${left_over[@]}"
  exit "$unfinished"
fi
echo "all parts passed"
