#!/usr/bin/env bash
# Runs unit tests of a crate, with the arguments of its test program:
#   scripts/unit_tests.sh kernels cuda-emulation attention:: --skip cuda::
# Each name, also one that is skipped, must be part of the name of a test: a test that was renamed would
# no longer run, and nothing would say so. Options with a value are written `--test-threads=1`.
set -euo pipefail
cd "$(dirname "$0")/.."
program=$(scripts/test_program.sh "$1" "$2")
for name in "${@:3}"; do
  [[ $name == --* ]] || "$program" --list "$name" | grep ': test$' >/dev/null || { echo "error: no unit test of $1 has \`$name\` in its name" >&2; exit 1; }
done
exec "$program" "${@:3}"
