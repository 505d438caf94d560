"""Prints the results of scripts/cuda/gpu_bench.sh as tables: `gpu_table.py FOLDER`. Ends with
1 if there are no results or a benchmark of `trainer` failed, with 75 if one had too little time.

`MFU` is relative to the matmul rate that the same process measured on the GPU, and counts operations
as `trainer` does. `lmms-engine` uses the formula and the timing of that project, relative to the
vendor's peak (PEAK_TFLOPS, 989 for H100 and H200).
"""
import json
import os
import sys
from pathlib import Path


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def number(row, key, digits):
    value = row.get(key)
    return "" if value is None else f"{value:,.{digits}f}"


def op_tables(ours, theirs):
    best = {}
    for row in theirs:
        if "ms" in row:
            best[row["name"]] = min(best.get(row["name"], row["ms"]), row["ms"])
    title = ""
    for row in ours:
        if "used" in row:
            title += f" {row['used']}"
        elif row["name"] == "peak":
            rate = next(key for key in row if key.endswith("FLOP/s"))
            print(f"\nops,{title}: peaks {row[rate]:,.1f} {rate}, {row['GB/s']:,.0f} GB/s\n")
            print("| op | ms | median | TFLOP/s | GB/s | share | adds MiB | PyTorch, ms | ratio |\n|---|---|---|---|---|---|---|---|---|")
            is_bf16, title = "bf16" in title, ""
        elif "ms" in row:
            flops = row.get("TFLOP/s", row["GFLOP/s"] / 1e3 if "GFLOP/s" in row else None)
            # PyTorch's ops were timed in bf16; its head includes the backward pass, as ours does.
            other = best.get(row["name"]) if is_bf16 else None
            cells = [row["name"], number(row, "ms", 3), number(row, "median_ms", 3), "" if flops is None else f"{flops:,.1f}", number(row, "GB/s", 0),
                     f"{row['share']:.0%}", number(row, "memory_mib", 0), f"{other:,.3f}" if other else "", f"{other / row['ms']:.2f}" if other else ""]
            print("| " + " | ".join(cells) + " |")
    if theirs:
        print("\nPyTorch's\n\n| op | way | ms | TFLOP/s | GB/s | adds MiB |\n|---|---|---|---|---|---|")
        for row in theirs:
            cells = [row["name"], row.get("way", ""), number(row, "ms", 3), number(row, "TFLOP/s", 1), number(row, "GB/s", 0), number(row, "memory_mib", 0)]
            print("| " + " | ".join(cells) + " |")


def step_tables(ours, theirs):
    # The figure of the GPU if trainer has one; PyTorch ran on the same GPU.
    known = [row["vendor_peak_GFLOP/s"] for row in ours if "vendor_peak_GFLOP/s" in row]
    vendor = float(os.environ["PEAK_TFLOPS"]) * 1e3 if "PEAK_TFLOPS" in os.environ else (known or [989e3])[0]
    print(f"\nsteps; the vendor's peak is {vendor / 1e3:,.0f} TFLOP/s\n\n| shape, mix | by | tokens/s | computed/real | step, s | data wait | TFLOP/s | MFU | "
          "MFU of the vendor's peak | lmms-engine | device GiB | predicted | vision tokens |\n|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    for by, row in [*(("trainer", row) for row in ours), *((f"PyTorch, {row.get('way', '')}", row) for row in theirs)]:
        if "tokens/s" not in row:
            continue
        lmms = row["mfu_lmms_engine"] * row["peak_GFLOP/s"] / vendor if "mfu_lmms_engine" in row else None
        cells = [row["name"], by, number(row, "tokens/s", 0), f"{row['computed_tokens'] / row['tokens']:.2f}", number(row, "step_s", 3), number(row, "data_wait", 4),
                 f"{row['GFLOP/s'] / 1e3:,.1f}", f"{row['mfu']:.1%}", f"{row['GFLOP/s'] / vendor:.1%}", "" if lmms is None else f"{lmms:.1%}", number(row, "peak_device_memory_gib", 1),
                 number(row, "predicted_device_memory_gib", 1),
                 f"{row['vision_tokens'] / row['tokens']:.0%}"]
        print("| " + " | ".join(cells) + " |")
    for row in ours:
        fastest = max((other["tokens/s"] for other in theirs if other["name"] == row["name"] and "tokens/s" in other and ", bf16" not in other["way"]), default=None)
        if fastest and "tokens/s" in row:
            print(f"{row['name']}: {row['tokens/s'] / fastest:.2f} x the tokens/s of PyTorch's best way with f32 master weights")


def problems(rows):
    for key, title in (("error", "Failed"), ("not_finished", "Not finished")):
        if any(key in row for row in rows):
            print(f"\n## {title}\n")
            for row in rows:
                if key in row:
                    print(f"- {row['name']} {row.get('way', '')}: {row[key]}")


def main():
    out = Path(sys.argv[1])
    ops, torch_ops, steps = (read(out / f"{name}.jsonl") for name in ("ops", "torch_ops", "step"))
    torch = [row for path in sorted(out.glob("torch-*.jsonl")) for row in read(path)]
    if ops:
        op_tables(ops, torch_ops)
    if steps or torch:
        step_tables(steps, torch)
    problems(ops + torch_ops + steps + torch)
    # Only an error of `trainer` is a failure: PyTorch may not support some of its ways.
    if any("error" in row for row in ops + steps) or not ops + steps + torch:
        raise SystemExit(1)
    if any("not_finished" in row for row in ops + torch_ops + steps + torch):
        raise SystemExit(75)


if __name__ == "__main__":
    main()
