#!/usr/bin/env bash
# Runs the GPU build on a machine without a GPU, behind a stand-in for the driver and for the libraries
# of CUDA (tests/fixtures/cuda) that answers at once:
#   scripts/cuda/stand_in.sh [check] [train] [host] [ranks]
#   check  memory that is exhausted, reads of the host, products that cuBLASLt refuses, an old driver
#   train  ten steps of three models against the CPU, in f32, in bf16, and in bf16 with Hopper's kernels.
#          The PTX of every kernel is executed on the CPU (crates/ptx)
#   ranks  on the stand-in, 1, 2 and 4 ranks train the same bits for every division of the state; not by
#          default, because kernels in emulation take minutes
#   host   the work of the host per step: launches, by kernel, and milliseconds, for the shape of SHAPE
#          (4b; also qwen35) with small matrices, and for SETTINGS of the config, such as
#          "adapter.rank=8 adapter.quantize=nf4"
# It needs a C++ compiler, but no GPU; only `train` needs nvcc, and installs it (toolkit.sh). PROFILE=dev builds without optimisation.
set -euo pipefail
cd "$(dirname "$0")/../.."
profile=${PROFILE:-release}
target=${CARGO_TARGET_DIR:-target/cuda-stand-in}
out=$target/stand-in
lib=$(realpath -m "$out/lib")
mkdir -p "$lib"
names=(cuda cublas cublasLt curand nvrtc cudart)

# One library with all functions, and links with the names of the others. Functions that the stand-in
# lacks return CUDA_ERROR_NOT_SUPPORTED.
library() {
  g++ -std=c++17 -O2 -Wall -fPIC -c -o "$out/driver.o" tests/fixtures/cuda/driver.cpp
  g++ -std=c++17 -O3 -ffast-math -fno-finite-math-only -Wall -fPIC -c -o "$out/compute.o" tests/fixtures/cuda/compute.cpp
  # As compile_object in crates/kernels/build.rs. The objects of an earlier run stay if nothing changed.
  find crates/kernels/src/cuda/kernels/{common,sm80} crates/kernels/src/cuda/emulation -name '*.*' | sort | xargs cat | sha256sum >"$out/kernels.sha256.new"
  if ! cmp -s "$out/kernels.sha256.new" "$out/kernels.sha256"; then
    rm -rf "$out/kernels" "$out/kernels.sha256" && mkdir "$out/kernels"
    printf '%s\n' crates/kernels/src/cuda/kernels/{common,sm80}/*.cu crates/kernels/src/cuda/emulation/emulation.cpp | xargs -P "$(nproc)" -I{} sh -c 'g++ -x c++ -std=c++20 -O2 -DEMULATION -w \
      -fno-strict-aliasing -fPIC -c -Icrates/kernels/src/cuda/kernels/common -Icrates/kernels/src/cuda/emulation -o "$1/kernels/$(basename "$2").o" "$2"' _ "$out" {}
    mv "$out/kernels.sha256.new" "$out/kernels.sha256"
  fi
  local bindings sources
  bindings=$(cargo metadata -q --format-version 1 --features cuda | grep -o '"manifest_path":"[^"]*cudarc-[^"]*Cargo.toml"' | head -n 1 | cut -d'"' -f4)
  sources=$(dirname "$bindings")/src
  nm --defined-only "$out/driver.o" | awk '$2 == "T" { print $3 }' | sort >"$out/defined"
  grep -rhoE 'fn (cu|cublas|cublasLt|curand|nvrtc)[A-Za-z0-9_]*' "$sources"/{driver,cublas,cublaslt,curand,nvrtc}/sys | awk '{ print $2 }' | sort -u |
    comm -23 - "$out/defined" | awk '{ print "int " $1 "(void) { return 801; }" }' >"$out/others.c"
  gcc -w -O1 -fPIC -c -o "$out/others.o" "$out/others.c"
  g++ -shared -Wl,-soname,libcuda.so.1 -o "$lib/libcuda.so.1" "$out/driver.o" "$out/compute.o" "$out/others.o" "$out"/kernels/*.o
  local name
  for name in "${names[@]}"; do ln -sf libcuda.so.1 "$lib/lib$name.so"; done
}

# The stub of nvcc writes empty files, which the stand-in accepts as kernels.
export CUDAFORGE_HOME=$PWD/$out/cache CUDA_COMPUTE_CAP=80 CUDARC_CUDA_VERSION=13000 NVCC="$PWD/scripts/cuda/stub/nvcc"
export PATH="$PWD/scripts/cuda/stub:$PATH" LIBRARY_PATH=$lib LD_LIBRARY_PATH=$lib:${LD_LIBRARY_PATH:-}
unset CUDA_HOME
run() { ${CARGO:-cargo} "$1" --profile "$profile" --features cuda --target-dir "$target" "${@:2}"; }

# Runs unit tests of a crate; names that no test has are an error.
unit_tests() { # crate, names..
  local log=$out/tests.log name
  run test -p "$1" --lib -- "${@:2}" 2>&1 | tee "$log"
  for name in "${@:2}"; do grep -q "^test .*$name.* ok$" "$log" || fail "no test \`$name\` has passed" "$log"; done
}

fail() { # message, file
  echo "FAILED: $1" >&2
  tail -n 20 "$2" >&2
  exit 1
}

# sft for three steps on the stand-in; the caller sets the variables of the stand-in.
sft() { # name, exit code, settings..
  local name=$1 expected=$2 ended=0
  rm -rf "$out/$name" "$out/$name.calls"
  STAND_IN_LOG=$out/$name.calls "$trainer" sft --config configs/quickstart.yaml --set "output_dir=$out/$name" --set device=cuda:0 --set model.precision=bf16 \
    --set 'data.eval=[]' --set train.max_steps=3 "${@:3}" >"$out/$name.log" 2>&1 || ended=$?
  [ "$ended" = "$expected" ] || fail "$name: exit code $ended, expected $expected" "$out/$name.log"
}
says() { grep -qE "$2" "$out/$1.log" || fail "$1: the log lacks \`$2\`" "$out/$1.log"; }
calls() { awk -v name="$2" 'index($0, name) == 1 { sum += $NF } END { print sum + 0 }' "$out/$1.calls"; }

check() {
  local version lost
  version=$("$trainer" --version)
  [[ $version == *"CUDA 13.0: sm_80"* ]] || { echo "FAILED: --version prints \`$version\`" >&2; exit 1; }
  # the functions that replace the driver's are in the binary
  [ "$(nm "$trainer" | grep -cE ' T (cuMemAllocAsync|cuMemcpyDtoHAsync_v2)$')" = 2 ] || { echo "FAILED: the driver's functions are not replaced" >&2; exit 1; }
  STAND_IN_MEMORY=$((1 << 30)) TRAINER_TEST_DEVICE=cuda:0 unit_tests kernels cuda::driver cuda::upload cuda::download
  sft plain 0
  [ "$(calls plain 'cublasLtMatmul ')" -gt 0 ] && [ "$(calls plain 'kernel product')" = 0 ] || fail "cuBLASLt was not used" "$out/plain.calls"
  # The stand-in writes no results, so they stay NaN.
  TRAINER_POISON=1 sft poison 65
  says poison 'the loss is NaN'
  STAND_IN_REFUSES=1 sft refused 0
  says refused 'cublasLt has no algorithm for this product'
  [ "$(calls refused 'kernel product')" -gt 0 ] || fail "no product was computed by our kernel" "$out/refused.calls"
  STAND_IN_MEMORY=$((48 << 20)) sft exhausted 71
  says exhausted 'the GPU memory is nearly exhausted'
  says exhausted 'hint: set `'
  says exhausted 'caused by: on the GPU: cannot allocate [0-9]+ MiB more; about [0-9]+ MiB were predicted'
  # lost in the second step, and before the first one
  local kernels
  kernels=$(calls plain 'kernel ')
  for lost in $((kernels / 2)) 1; do
    STAND_IN_LOSES=$lost sft lost 74
    says lost 'CUDA_ERROR_ECC_UNCORRECTABLE'
    says lost 'hint: the GPU was lost'
  done
  STAND_IN_DRIVER=12040 sft old_driver 64
  says old_driver 'the driver supports CUDA 12.4 at most, but this binary was built with CUDA 13.0'
  echo "ok: the GPU build behind the stand-in"
}

# Ten steps with all kernels executed from the PTX that ships: the losses are those of the CPU.
train() {
  local ptx model name precision kernel settings
  ptx=$(env -u NVCC scripts/cuda/ptx.sh)
  ${CARGO:-cargo} rustc --release -p ptx --crate-type cdylib --target-dir "$target"
  cp "$target/release/libptx.so" "$lib"
  for model in quickstart small-qwen35 moe-vl; do
    settings=()
    [ $model = quickstart ] || settings=(--set "model.path=tests/golden/models/$model" --set data.packing_length=128)
    for precision in f32 bf16 hopper; do
      name=${model}_$precision kernel=attention_forward
      if [ $precision = hopper ]; then kernel=attention_forward_sm90; fi
      (
        export STAND_IN_COMPUTES=1 STAND_IN_PTX=$ptx STAND_IN_CAPABILITY=80 TRAINER_POISON=1 TRAINER_EXACT_SIZES=1
        if [ $precision = hopper ]; then STAND_IN_CAPABILITY=90 precision=bf16; fi
        sft "gpu_$name" 0 --set model.precision=$precision --set train.max_steps=10 "${settings[@]}"
        sft "cpu_$name" 0 --set model.precision=$precision --set train.max_steps=10 --set device=cpu "${settings[@]}"
      )
      [ "$(calls "gpu_$name" "kernel $kernel")" -gt 0 ] || fail "no kernel \`$kernel\` ran" "$out/gpu_$name.calls"
      python3 - "$out" "$model" $precision <<'PY'
import json, sys
folder, model, precision = sys.argv[1:]
read = lambda run: [json.loads(line) for line in open(f"{folder}/{run}/metrics.jsonl")]
off = lambda a, b, key: [abs(x[key] - y[key]) / abs(y[key]) for x, y in zip(a, b, strict=True)]
found, expected, exact = read(f"gpu_{model}_{precision}"), read(f"cpu_{model}_{precision}"), read(f"cpu_{model}_f32")
losses, norms, noise = off(found, expected, "loss"), off(found, expected, "grad_norm"), off(expected, exact, "loss")
print(f"{model} {precision}: the loss of the first step differs by {losses[0]:.1e} of that of the CPU, those of {len(found)} steps by at most {max(losses):.1e}, "
      f"norms of gradients by {max(norms):.1e}" + (f"; bf16 on the CPU from f32: {max(noise):.1e}" if max(noise) else ""), flush=True)
# Steps amplify how bf16 rounds: no bound is smaller than its distance from f32.
first, most = (2e-7, 2e-7) if precision == "f32" else (3e-4, max(3e-4, *noise))
assert losses[0] <= first and max(losses) <= most and max(norms) <= 1e-2, [(a["loss"], b["loss"], a["grad_norm"], b["grad_norm"]) for a, b in zip(found, expected)]
PY
    done
  done
}

ranks() {
  STAND_IN_COMPUTES=1 TRAINER_TEST_DEVICE=cuda:0 unit_tests kernels adamw::
  STAND_IN_COMPUTES=1 TRAINER_TEST_DEVICE=cuda:0 run test --test integration -- --test-threads 1 gpu_ranks::ranks
  echo "ok: ranks behind the stand-in"
}

# The number of launches does not depend on the sizes of matrices, so the model has all layers of its
# preset, but small matrices.
host() {
  local shape=${SHAPE:-4b} model=$out/model steps setting settings=()
  for setting in ${SETTINGS:-}; do settings+=(--set "$setting"); done
  rm -rf "$model"
  if [ "$shape" = qwen35 ]; then cp -r tests/golden/models/small-qwen35 "$model"; else "$trainer" init --preset debug --out "$model" >/dev/null 2>&1; fi
  python3 - "$model/config.json" "$shape" <<'PY'
import json, sys
path, shape = sys.argv[1:]
layers = {"2b": (28, 24), "4b": (36, 24), "8b": (36, 27), "qwen35": (32, 24)}[shape]
config = json.load(open(path))
config["text_config"]["num_hidden_layers"], config["vision_config"]["depth"] = layers
if "layer_types" in config["text_config"]:
    config["text_config"]["layer_types"] = (["linear_attention"] * 3 + ["full_attention"]) * (layers[0] // 4)
json.dump(config, open(path, "w"))
PY
  # The difference of two runs: neither the start nor the end of a run counts.
  for steps in 2 7; do
    rm -rf "$out/host" "$out/host.calls$steps"
    STAND_IN_LOG=$out/host.calls$steps "$trainer" sft --config configs/quickstart.yaml --set "output_dir=$out/host" --set device=cuda:0 \
      --set model.precision=bf16 --set "model.path=$model" --set model.weights=random --set "train.max_steps=$steps" --set 'data.eval=[]' \
      --set eval.every_steps=0 --set checkpoint.every_steps=0 "${settings[@]}" >"$out/host.log" 2>&1 || fail "host" "$out/host.log"
  done
  python3 - "$out/host/metrics.jsonl" "$out"/host.calls{2,7} <<'PY'
import json, statistics, sys
steps = 5
few, many = [dict(line.rsplit(" ", 1) for line in open(path)) for path in sys.argv[2:]]
calls = {name: (int(n) - int(few.get(name, 0))) / steps for name, n in many.items()}
rows = [json.loads(line) for line in open(sys.argv[1])][-steps:]
ms = 1e3 * statistics.median(row["step_time_s"] for row in rows)
wait = sum(row["data_wait_s"] for row in rows) / sum(row["step_time_s"] for row in rows)
launches = {name.removeprefix("kernel "): n for name, n in calls.items() if name.startswith("kernel ") or name == "cublasLtMatmul"}
for name, n in sorted(launches.items(), key=lambda launch: -launch[1]):
    print(f"{n:8.1f} {name}")
print(f"{sum(launches.values()):.0f} launches, {calls['cuMemAllocAsync']:.0f} allocations, "
      f"{ms:.1f} ms of the host per step, of which {100 * wait:.0f} % wait for data")
PY
}

[ $# -gt 0 ] || set -- check train host
library
run build --bin trainer
trainer=$target/$([ "$profile" = dev ] && echo debug || echo "$profile")/trainer
for part in "$@"; do
  case $part in
    check | train | host | ranks) "$part" ;;
    *) echo "unknown part \`$part\`, expected check, train, host or ranks" >&2; exit 64 ;;
  esac
done
