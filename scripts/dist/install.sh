#!/usr/bin/env bash
# Installs OpenMPI, and libclang for its bindings, if they are missing (Debian and Ubuntu).
#   scripts/dist/install.sh
set -euo pipefail

packages=()
if ! command -v mpicc >/dev/null || ! command -v mpirun >/dev/null; then
  packages+=(libopenmpi-dev openmpi-bin)
fi
# A here-string: with pipefail, a pipe to `grep -q` would fail when grep closes it early.
libraries=$({ ldconfig -p || /sbin/ldconfig -p; } 2>/dev/null || true)
if [ -z "${LIBCLANG_PATH:-}" ] && ! grep -qF libclang <<<"$libraries" && ! ls /usr/lib/llvm*/lib/libclang*.so* >/dev/null 2>&1; then
  packages+=(libclang-dev)
fi
[ ${#packages[@]} -gt 0 ] || exit 0
sudo=$([ "$(id -u)" = 0 ] || echo sudo)
$sudo apt-get update -qq
$sudo apt-get install -qq -y --no-install-recommends "${packages[@]}"
