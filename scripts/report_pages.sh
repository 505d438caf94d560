#!/usr/bin/env bash
# Makes the pages of `trainer report` for four kinds of runs, and checks that each has at most 2 MB, no
# script and no address that a browser would load: one run, three runs compared, a run with three
# restarts and rejected rows, one of which contains `<script>`, and a run with losses that are NaN. If
# chromium is installed, takes screenshots at widths of 1280 and 400 pixels.
#   scripts/report_pages.sh [OUT]       OUT: folder of pages and screenshots, target/report_pages by default
# TRAINER=FILE   another binary.   BROWSER=FILE   the browser.   STEPS=100   steps of a run.
set -euo pipefail
cd "$(dirname "$0")/.."
trainer=${TRAINER:-$PWD/target/release/trainer} out=${1:-target/report_pages} steps=${STEPS:-100}
rm -rf "$out"
mkdir -p "$out"
sft() { # name, settings..
  local name=$1 settings=() setting
  shift
  for setting in "output_dir=$out/$name" "train.max_steps=$steps" "eval.every_steps=$((steps / 4))" "$@"; do settings+=(--set "$setting"); done
  "$trainer" sft --config configs/quickstart.yaml "${settings[@]}" >"$out/$name.log" 2>&1
}
must() { "$@" || { tail -n 20 "$out/$2.log"; exit 1; }; }

must sft one 'eval.generate={max_new_tokens: 4}'
must sft slower optim.lr=2.0e-4
must sft bf16 model.precision=bf16

# Rows that are rejected, one of them with markup in its message.
{
  head -n 300 data/quickstart/digits_train.jsonl
  echo '{"messages": not JSON'
  echo '{"messages": [{"role": "<script>alert(1)</script>", "content": "x"}]}'
  echo '{"messages": [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "1"}], "images": ["none.png"]}'
} >"$out/rows.jsonl"
rejects=("data.train=[{path: $out/rows.jsonl, image_root: data/quickstart}]" data.max_rejected=1.0 checkpoint.every_steps=5)
for stop in 1 2 3; do
  after=$((stop * steps / 4))
  sft restarted "${rejects[@]}" &
  run=$!
  while kill -0 "$run" 2>/dev/null && [ "$(cat "$out/restarted/metrics.jsonl" 2>/dev/null | wc -l)" -lt "$after" ]; do sleep 0.1; done
  # The program is a child of the shell that runs the function.
  pkill -TERM -P "$run" || true
  wait "$run" || [ $? = 75 ] || { tail -n 20 "$out/restarted.log"; exit 1; }
done
must sft restarted "${rejects[@]}"
sft nan optim.lr=1.0e6 train.max_grad_norm=0 optim.warmup_steps=5 train.on_non_finite=skip train.max_skipped=10 checkpoint.every_steps=0 || true

page() { # name, runs..
  local name=$1 run
  shift
  local runs=()
  for run in "$@"; do runs+=("$out/$run"); done
  "$trainer" report "${runs[@]}" --out "$out/$name.html" >"$out/$name.report.log" 2>&1 || { cat "$out/$name.report.log"; exit 1; }
}
page page_one one
page page_compared one slower bf16
page page_restarted restarted
page page_nan nan
grep -c . "$out/restarted/starts.jsonl" | grep -qx 4 || { echo "FAILED: the run was not restarted three times"; exit 1; }
grep -qE '"(loss|grad_norm)":(null|"?NaN)' "$out/nan/metrics.jsonl" || { echo "FAILED: no step of the run is NaN"; exit 1; }

failed=0
for page in "$out"/page_*.html; do
  bytes=$(wc -c <"$page")
  problems=$(grep -oiE '<script|<link|<iframe|(src|href|action)="?(https?:)?//[^" >]*|url\([^d)][^)]*|@import' "$page" | sort | uniq -c || true)
  if [ "$bytes" -gt 2000000 ] || [ -n "$problems" ]; then
    echo "FAILED: $page: $bytes bytes $problems"
    failed=1
  else
    echo "ok: $page: $bytes bytes, loads nothing"
  fi
done
grep -q '&lt;script&gt;alert' "$out/page_restarted.html" || { echo "FAILED: the hostile row is not on the page"; failed=1; }

browser=${BROWSER:-$(command -v chromium || command -v chromium-browser || command -v google-chrome || true)}
if [ -n "$browser" ]; then
  for page in "$out"/page_*.html; do
    for width in 1280 400; do
      "$browser" --headless --no-sandbox --disable-gpu --hide-scrollbars --window-size="$width,4000" \
        --screenshot="${page%.html}_$width.png" "file://$(realpath "$page")" >"$out/browser.log" 2>&1 || { cat "$out/browser.log"; failed=1; }
    done
  done
  ls "$out"/*.png
else
  echo "no chromium: no screenshots"
fi
exit $failed
