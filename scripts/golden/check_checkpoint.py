"""Loads an exported folder with transformers and recomputes the loss of each row.

  python scripts/golden/check_checkpoint.py MODEL_DIR DATA.jsonl --num 8 --expect per_sample.jsonl

Prints `{"line", "id", "nll_sum", "num_targets"}` for each row, then `{"token_mean", "num_targets",
"rows"}`. Fails (exit code 1) if loading reports a missing, unexpected or mismatched tensor or any
warning, or if a row differs from the file given with `--expect`, which contains the output of
`trainer eval --per-sample`.
"""

import argparse
import json
import logging
import sys
import warnings

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.utils import logging as transformers_logging

from reference_lib import Encoder, forward, nll, read_jsonl


class Collect(logging.Handler):
    """Collects the messages of warnings and errors."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages = []

    def emit(self, record):
        self.messages.append(record.getMessage())


def load(model_dir, image_root):
    """Returns the model, its encoder, and all warnings of transformers."""
    collect = Collect()
    logging.getLogger("transformers").addHandler(collect)
    logging.captureWarnings(True)
    logging.getLogger("py.warnings").addHandler(collect)
    warnings.simplefilter("always")
    transformers_logging.disable_progress_bar()
    encoder = Encoder(model_dir, image_root)
    auto = AutoModelForImageTextToText if encoder.images is not None else AutoModelForCausalLM
    model, info = auto.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="sdpa", output_loading_info=True
    )
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            compute_in_float32(module)
    notes = [f"{key}: {sorted(map(str, value))}" for key, value in info.items() if value]
    return model.eval(), encoder, notes + collect.messages


def compute_in_float32(layer):
    """Keeps a 4-bit layer of bitsandbytes from kernels for the CPU that are not exact."""
    layer.support_avx512bf16_for_cpu = False  # rounds scales to bf16
    state = layer.weight.quant_state
    layer.compute_dtype = state.dtype = torch.float32
    outputs, inputs = state.shape
    if inputs % 64:  # bitsandbytes 0.50 takes the scales of other blocks
        from bitsandbytes.functional import dequantize_4bit

        state.shape = (1, outputs * inputs)
        weight = dequantize_4bit(layer.weight.data, state).reshape(outputs, inputs)
        layer.forward = lambda x: torch.nn.functional.linear(x, weight, layer.bias)


def losses(model, encoder, sample):
    """Sum of the negative log likelihoods of the targets, and their number."""
    if encoder.images is not None:
        return forward(model, encoder.config, [sample])[0]
    ids, labels = (torch.tensor([sample[key]]) for key in ("input_ids", "labels"))
    loss, is_target = nll(model(input_ids=ids, use_cache=False).logits, labels)
    return loss.sum(), int(is_target.sum())


def differences(found, expected, tolerance):
    """Returns one line for each row whose loss or number of targets differs from the expected one."""
    # `trainer` identifies a row by file and line, so rows are matched by line. The summary line has
    # no id.
    expected = {int(row["id"].rsplit(":", 1)[1]): row for row in expected if "id" in row}
    lines = []
    for row in found:
        other = expected.get(row["line"])
        if other is None:
            lines.append(f"line {row['line']}: not in the expected file")
            continue
        # Relative to the loss, but at least to 1 per target: a very likely token has a loss near 0,
        # and logits of size 10 have rounding errors of 1e-6.
        error = abs(row["nll_sum"] - other["nll_sum"]) / max(abs(row["nll_sum"]), float(row["num_targets"]))
        if row["num_targets"] != other["num_targets"]:
            lines.append(f"line {row['line']}: expected {other['num_targets']} targets, found {row['num_targets']}")
        elif not error <= tolerance:  # `not <=` also catches a NaN
            lines.append(f"line {row['line']}: expected nll_sum {other['nll_sum']}, found {row['nll_sum']}, {error:.2g} relative")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir")
    parser.add_argument("data", help="JSON-lines file of chats")
    parser.add_argument("--num", type=int, help="only the first rows (default: all)")
    parser.add_argument("--image-root", help="folder that image paths are relative to (default: the data file's)")
    parser.add_argument("--expect", help="output of `trainer eval --per-sample` to compare with")
    parser.add_argument("--tolerance", type=float, default=1e-5, help="relative, on nll_sum")
    args = parser.parse_args()
    torch.set_num_threads(1)
    image_root = args.image_root or (args.data.rpartition("/")[0] or ".")
    model, encoder, problems = load(args.model_dir, image_root)
    found = []
    with torch.no_grad():
        for n, row in enumerate(read_jsonl(args.data)[: args.num]):
            nll_sum, num_targets = losses(model, encoder, encoder(row))
            score = {"line": n + 1, "id": row.get("id"), "nll_sum": float(nll_sum), "num_targets": num_targets}
            found.append(score)
            print(json.dumps(found[-1], ensure_ascii=False), flush=True)
    targets = sum(row["num_targets"] for row in found)
    mean = sum(row["nll_sum"] for row in found) / max(targets, 1)
    print(json.dumps({"token_mean": mean, "num_targets": targets, "rows": len(found)}))
    problems = [f"loading: {text}" for text in problems]
    if args.expect:
        problems += differences(found, read_jsonl(args.expect), args.tolerance)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
