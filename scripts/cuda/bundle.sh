#!/usr/bin/env bash
# Builds the program and the unit tests of the ops and the integration tests, and copies them to FOLDER/{trainer,unit_tests,integration_tests}
# for gpu_test.sh, gpu_bench.sh and first_run.sh:
#   scripts/cuda/bundle.sh FOLDER FEATURES TARGET
set -euo pipefail
cd "$(dirname "$0")/../.."
bundle=$1 features=$2 target=$3
mkdir -p "$bundle"
cargo build --release --features "$features" --target-dir "$target"
install -s -m 755 "$target/release/trainer" "$bundle/trainer"
cargo test --release -p trainer -p kernels --features "$features" --target-dir "$target" --no-run --message-format json |
  grep -o '"executable":"[^"]*"' | cut -d'"' -f4 | while read -r test; do
  case $(basename "$test") in
    integration-*) install -s -m 755 "$test" "$bundle/integration_tests" ;;
    kernels-*) install -s -m 755 "$test" "$bundle/unit_tests" ;;
  esac
done
# The tests read their files from the first path, and have temporary folders in the second.
printf '%s\n' "$PWD" "$(realpath "$target")/tmp" >"$bundle/built_in"
