#!/usr/bin/env bash
# Checks the CUDA code without a GPU. Runs the named parts, or all of them:
#   scripts/cuda/check.sh [types] [emulated] [nvcc] [ptx] [assemblers]
#   types     clippy for the features `cuda` and `flash-attn`, with a stub in place of nvcc
#   emulated  the tests of the ops and of the model (`laws`), with the source of the CUDA kernels
#             emulated on the CPU, except for the kernels for Hopper alone
#   nvcc      compiles every kernel for sm_80 and sm_90 (those for Hopper alone for sm_90a) with the
#             pinned compiler of toolkit.sh; register spills and products that the assembler must
#             serialize are errors, also when it compiles the PTX of sm_80 for sm_100 and sm_120, as a
#             driver does; checks the state space of every memory access in the PTX
#             (state_spaces.py); counts instructions of Hopper's kernels
#   ptx       the tests of the ops, with the PTX that the pinned compiler emits executed on the CPU:
#             addresses, unwritten memory, races, barriers and asynchronous work are checked
#   assemblers  the spills and registers of `nvcc` with the assemblers of CUDA 12.4 and 12.9 as well
set -euo pipefail
cd "$(dirname "$0")/../.."

types() {
  # With this cache, candle-flash-attn does not download CUTLASS. The stub compiles nothing of it.
  local cutlass=target/cuda-check/cache/git/checkouts/cutlass-7d49e6c7e2f8896c
  mkdir -p "$cutlass/include"
  [ -d "$cutlass/.git" ] || git init -q "$cutlass"
  echo 7d49e6c7e2f8896c47f586706e67e1fb215529dc >"$cutlass/.git/HEAD"
  CUDAFORGE_HOME=$PWD/target/cuda-check/cache env -u CUDA_HOME PATH="$PWD/scripts/cuda/stub:$PATH" CUDA_COMPUTE_CAP=80 CUDARC_CUDA_VERSION=13000 NVCC="$PWD/scripts/cuda/stub/nvcc" \
    cargo clippy --release --workspace --features flash-attn --lib --bins -- -D warnings
}

emulated() {
  # These compare kernels with the CPU. With the variable below they would compare them with themselves.
  scripts/unit_tests.sh kernels cuda-emulation cuda::
  export TRAINER_EMULATE_CUDA=8.0
  scripts/cuda/op_tests.sh cuda-emulation
  cargo test --release --features cuda-emulation --test integration -- laws parity --skip follow_the_reference
}

# Prints one line per kernel: architecture and file, name, registers, spilled bytes. Keeps the machine code
# for sm_90a.
registers() { # a file of PTX, architecture
  local log cubin=/dev/null arch=$2
  [ "$arch" != 90a ] || cubin=$MACHINE_CODE/$(basename "$1" .ptx).cubin
  # Older assemblers accept the PTX of nvcc 13.0 under the number of their own version.
  log=$(sed "s/^\.version .*/.version $PTX_VERSION/" "$1" | "$ASSEMBLER" "-arch=sm_$arch" -v -o "$cubin" - 2>&1) || { echo "$1: $log" >&2; return 1; }
  # C7510 and its neighbours: wgmma instructions that wait for each other, because of their registers.
  if grep -E '\(C75[0-9][0-9]\)' <<<"$log" >&2; then return 1; fi
  awk -v where="sm_$arch $(basename "$1")" '
    /Compiling entry function/ { split($0, part, "\047"); name = part[2] }
    /bytes spill stores/ { if ($5 > 0 || $9 > 0) { spills = $5 + $9 } else spills = 0 }
    /Used [0-9]+ registers/ { match($0, /Used [0-9]+/); printf "%-36s %-44s %3d registers, %d bytes spilled\n", where, name, substr($0, RSTART + 5), spills }
  ' <<<"$log"
}

# Prints one line per kernel of the machine code: the largest register that an instruction names (the
# consumers may have more than a thread has at the start), and the numbers of products, copies of boxes,
# loads from shared memory, and accesses to local memory.
instructions() { # file
  "$CUDA_HOME/bin/nvdisasm" -c "$1" | awk '
    match($0, /\.text\.[a-z0-9_]+/) { name = substr($0, RSTART + 6, RLENGTH - 6) }
    name == "" { next }
    / HGMMA/ { products[name]++ }
    / UTMALDG/ { copies[name]++ }
    / LDSM?[. ]/ { loads[name]++ }
    / (STL|LDL)[. ]/ { locals[name]++ }
    { rest = $0; while (match(rest, /R[0-9]+/)) { at = substr(rest, RSTART + 1, RLENGTH - 1) + 0; if (at < 255 && at >= most[name]) most[name] = at + 1; rest = substr(rest, RSTART + RLENGTH) } }
    END {
      for (name in most)
        printf "%-44s %3d registers, %3d products, %2d copies of boxes, %2d shared loads, %d local accesses\n", name, most[name], products[name], copies[name], loads[name], locals[name]
    }'
}

# Compiles kernels with wrong state spaces, and fails unless state_spaces.py refuses each of them.
planted() {
  local folder=target/cuda/planted name body
  mkdir -p "$folder"
  while IFS='|' read -r name body; do
    echo "extern \"C\" __global__ void $name(float *x, int k) { __shared__ float4 tile[64]; $body }" >"$folder/$name.cu"
    "$CUDA_HOME/bin/nvcc" -ptx -arch=sm_80 -O3 -o "$folder/$name.ptx" "$folder/$name.cu"
    if python3 scripts/cuda/state_spaces.py "$folder/$name.ptx" >/dev/null; then echo "error: state_spaces.py accepts $folder/$name.ptx"; exit 1; fi
  done <<'KERNELS'
shared_as_global|float4 *at = tile + threadIdx.x; __stwb(at, float4{}); x[k] = at[k % 2].x;
generic|float *at = k > 3 ? x : &tile[threadIdx.x].x; at[k] = 1; __syncthreads(); x[0] = tile[1].x;
KERNELS
}

export -f registers

# Assembles all PTX, and checks spilled registers and those of Hopper's kernels.
assemble() { # folder for the list and for machine code, version of the PTX, assembler, most bytes that a kernel may spill, architectures that run the PTX of sm_80
  export MACHINE_CODE=$1 PTX_VERSION=$2 ASSEMBLER=$3
  local list=$1/registers.txt arch
  mkdir -p "$1"
  for arch in 80 90 90a; do printf "%s $arch\n" "$TRAINER_PTX/$arch"/*.ptx; done >"$list.files"
  for arch in $5; do printf "%s $arch\n" "$TRAINER_PTX"/80/*.ptx; done >>"$list.files"
  xargs -P "$(nproc)" -L 1 bash -c 'registers "$1" "$2"' _ <"$list.files" >"$list.new"
  sort "$list.new" >"$list"
  rm "$list.new" "$list.files"
  if awk -v most="$4" '$(NF - 2) > 0 { print; if ($(NF - 2) > most) bad = 1 } END { exit !bad }' "$list"; then echo "error: the kernels above spill registers"; exit 1; fi
  # Warps of Hopper's kernels exchange registers, and start with all of them (module.rs).
  if ! grep -q sm_90a "$list" || grep sm_90a "$list" | awk '{ expected = $3 ~ /forward_sm90_d(64|80)_/ ? 128 : 168; if ($4 != expected) { print; bad = 1 } } END { exit !bad }'; then
    echo "error: the kernels above have other registers at their start than setmaxnreg assumes"; exit 1
  fi
  awk '{ if ($4 > most) most = $4 } END { print NR " kernels, at most " most " registers: '"$list"'" }' "$list"
}

nvcc() {
  local counts=target/cuda/instructions.txt file before=$SECONDS
  TRAINER_PTX=$(scripts/cuda/ptx.sh)
  eval "$(scripts/cuda/toolkit.sh)"
  assemble target/cuda "$(sed -n 's/^\.version //p;/^\.version/q' "$TRAINER_PTX/90a/attention_forward_sm90.ptx")" "$CUDA_HOME/bin/ptxas" 0 "100 120"
  python3 scripts/cuda/state_spaces.py "$TRAINER_PTX"/*/*.ptx
  planted
  for file in target/cuda/*_sm90.cubin; do instructions "$file"; done | sort | tee "$counts"
  # The kernels give a consumer 240 registers, or 160 where there are three of them.
  if ! awk '{ limit = $1 ~ /forward_sm90_d(64|80)_/ ? 160 : 240; if ($2 > limit || $4 == 0 || $(NF - 2) > 0) { print "error: " $0; bad = 1 } } END { exit bad }' "$counts"; then exit 1; fi
  echo "compiled in $((SECONDS - before)) s"
}

assemblers() {
  local folder
  TRAINER_PTX=$(scripts/cuda/ptx.sh)
  while read -r release ptx others; do
    folder=target/cuda/assembler-$release
    [ -d "$folder" ] || target/cuda/venv/bin/python -m pip install -q --no-deps --target "$folder" "nvidia-cuda-nvcc-cu12==$release"
    echo "assembler of $release"
    # One double or two floats cost nothing: 12.4 spills them in two kernels.
    assemble "$folder/code" "$ptx" "$folder/nvidia/cuda_nvcc/bin/ptxas" 8 "$others"
  done <<<$'12.4.131 8.4\n12.9.86 8.8 100 120'
}

ptx() {
  export TRAINER_PTX TRAINER_EMULATE_CUDA
  TRAINER_PTX=$(scripts/cuda/ptx.sh)
  # These launch kernels themselves, and compare them with the ops on the CPU.
  env -u TRAINER_EMULATE_CUDA scripts/unit_tests.sh kernels cuda-emulation cuda::
  for TRAINER_EMULATE_CUDA in ptx:8.0 ptx:9.0; do scripts/cuda/op_tests.sh cuda-emulation; done
}

[ $# -gt 0 ] || set -- types emulated nvcc ptx assemblers
for part in "$@"; do
  case $part in
    types | emulated | nvcc | ptx | assemblers) ;;
    *) echo "unknown part \`$part\`, expected types, emulated, nvcc, ptx or assemblers" >&2; exit 64 ;;
  esac
  echo "=== CUDA: $part"
  "$part"
done
