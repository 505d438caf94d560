#!/usr/bin/env bash
# Checks on a machine with a GPU, in a checkout with target/cuda/bundle (scripts/cuda/build.sh) and nothing else installed:
#   1. every op, forward and backward, on the GPU against its f64 reference: odd sizes, fresh operands, f32 and bf16
#   2. the laws of the model (gradients, causality, isolation, packed == padded == alone, recompute) on the GPU
#   3. 50 steps in bf16 on the GPU against 50 steps in f32 on the CPU: losses within 2 %, at the start and at the end
#   4. a run that is stopped half way and resumed ends with the same bytes as one that is not
#   5. compute-sanitizer, where it is installed, over the tests of the ops
#   scripts/cuda/gpu_test.sh [DEVICE]
set -euo pipefail
cd "$(dirname "$0")/../.."
device=${1:-cuda:0}
bundle=target/cuda/bundle
out=target/cuda/test
rm -rf "$out"
mkdir -p "$out"
# Tests look for their files where they were built.
built=$(cat "$bundle/built_in")
[ -e "$built" ] || { mkdir -p "$(dirname "$built")" && ln -s "$PWD" "$built"; }
# The libraries of a toolkit or of PyTorch, where the system does not know them.
for folder in /usr/local/cuda/lib64 /usr/local/cuda/targets/x86_64-linux/lib "$(python3 -c 'import nvidia.cu13, os; print(os.path.join(list(nvidia.cu13.__path__)[0], "lib"))' 2>/dev/null || true)"; do
  if [ -d "$folder" ]; then export LD_LIBRARY_PATH=$folder:${LD_LIBRARY_PATH:-}; fi
done
failed=()
part() { # name, command..
  local name=$1 before=$SECONDS
  shift
  echo "=== $name"
  if "$@"; then echo "ok: $name, $((SECONDS - before)) s"; else
    echo "FAILED: $name"
    failed+=("$name")
  fi
}
export TRAINER_TEST_DEVICE=$device

ops() { "$bundle/unit_tests" ops:: --test-threads 4; }
laws() { "$bundle/integration_tests" laws parity --test-threads 4; }

train() { # name, steps, settings..
  local name=$1 steps=$2
  shift 2
  "$bundle/trainer" sft --config configs/quickstart.yaml --set "output_dir=$out/$name" --set 'data.eval=[]' --set "train.max_steps=$steps" "$@" >"$out/$name.log" 2>&1 || {
    tail -n 20 "$out/$name.log"
    return 1
  }
}
curves() {
  train cpu_f32 50 --set device=cpu && train gpu_bf16 50 --set "device=$device" --set model.precision=bf16 || return 1
  paste -d' ' <(losses cpu_f32) <(losses gpu_bf16) | awk '
    { off = ($2 > $1 ? $2 - $1 : $1 - $2) / $1; if (off > worst) worst = off }
    NR == 1 || NR == 50 { printf "step %d: %.6f on the CPU in f32, %.6f on the GPU in bf16, %.2f %% apart\n", NR, $1, $2, 100 * off; if (off > 0.02) bad = 1 }
    END { printf "worst of %d steps: %.2f %%\n", NR, 100 * worst; exit bad || NR != 50 }'
}
losses() { grep -o '"loss":[0-9.e-]*' "$out/$1/metrics.jsonl" | cut -d: -f2; }

resume() {
  local settings=(--set "device=$device" --set model.precision=bf16 --set checkpoint.every_steps=10 --set checkpoint.keep=9)
  train whole 20 "${settings[@]}" || return 1
  # As if it had been killed after step 10.
  cp -r "$out/whole" "$out/halves"
  rm -rf "$out/halves/final" "$out/halves/checkpoints/step-00000020"
  train halves 20 "${settings[@]}" || return 1
  cmp "$out/whole/final/model.safetensors" "$out/halves/final/model.safetensors" &&
    cmp "$out/whole/checkpoints/step-00000020/optimizer.safetensors" "$out/halves/checkpoints/step-00000020/optimizer.safetensors"
}

sanitizer() { compute-sanitizer --tool memcheck --error-exitcode 1 "$bundle/unit_tests" ops:: --test-threads 1 >"$out/sanitizer.log" 2>&1 || { tail -n 40 "$out/sanitizer.log"; return 1; }; }

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || true
part "ops against their references" ops
part "laws of the model" laws
part "50 steps, bf16 on the GPU against f32 on the CPU" curves
part "resume" resume
if command -v compute-sanitizer >/dev/null; then part "compute-sanitizer" sanitizer; else echo "compute-sanitizer is not installed: skipped"; fi
if [ ${#failed[@]} -gt 0 ]; then
  printf 'FAILED: %s\n' "${failed[@]}"
  exit 1
fi
echo "all parts passed"
