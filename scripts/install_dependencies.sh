#!/usr/bin/env bash
# Installs what building and testing need and this machine lacks (Debian and Ubuntu; through sudo if the
# user is not root).
#   scripts/install_dependencies.sh                       everything
#   scripts/install_dependencies.sh compilers video mpi   some of it
#     compilers   rustfmt, clippy, C and C++ compilers, Python's venv (for the CUDA compiler)
#     video       pkg-config, FFmpeg's development files, libclang
#     mpi         OpenMPI, libclang
# Each check uses the thing itself: a program or a library of the right name may lack its other half.
set -euo pipefail

compiles() { # source, compiler, arguments..
  local source=$1
  shift
  command -v "$1" >/dev/null && "$@" -o /dev/null - <<<"$source" 2>/dev/null
}
# `bindgen` loads libclang.so, and parses with the headers that come with it. libclang-cpp.so is
# another library, and libclang1 is installed without the headers.
has_libclang() {
  local libraries headers
  libraries=$(find -L ${LIBCLANG_PATH:-} /usr/lib /usr/lib64 /usr/local/lib -maxdepth 3 \
    -regex '.*/libclang\(-[0-9.]+\)?\.so\(\.[0-9.]+\)?' 2>/dev/null) || true
  headers=$(find -L /usr/lib /usr/lib64 /usr/local/lib -maxdepth 6 -path '*/clang/*/include/stddef.h' 2>/dev/null) || true
  [ -n "$libraries" ] && [ -n "$headers" ]
}

packages=()
compilers() {
  # A minimal Rust toolchain lacks these two.
  cargo fmt --version >/dev/null 2>&1 || rustup component add rustfmt
  cargo clippy --version >/dev/null 2>&1 || rustup component add clippy
  compiles 'int main(void) { return 0; }' cc -x c || packages+=(gcc libc6-dev)
  compiles $'#include <vector>\nint main() { return 0; }' c++ -x c++ || packages+=(g++)
  python3 -c 'import ensurepip, venv' 2>/dev/null || packages+=(python3-venv)
}
video() {
  pkg-config --exists libavcodec libavformat libavutil libswscale 2>/dev/null ||
    packages+=(pkg-config libavcodec-dev libavformat-dev libavutil-dev libswscale-dev)
  has_libclang || packages+=(libclang-dev)
}
mpi() {
  compiles $'#include <mpi.h>\nint main(void) { return MPI_Init(0, 0); }' mpicc -x c || packages+=(libopenmpi-dev)
  command -v mpirun >/dev/null || packages+=(openmpi-bin)
  has_libclang || packages+=(libclang-dev)
}

[ $# -gt 0 ] || set -- compilers video mpi
for part in "$@"; do
  case $part in
    compilers | video | mpi) "$part" ;;
    *) echo "unknown part \`$part\`, expected compilers, video or mpi" >&2; exit 64 ;;
  esac
done
[ ${#packages[@]} -gt 0 ] || exit 0
echo "installing ${packages[*]}"
sudo=$([ "$(id -u)" = 0 ] || echo sudo)
$sudo apt-get update -qq
$sudo apt-get install -qq -y --no-install-recommends "${packages[@]}"
